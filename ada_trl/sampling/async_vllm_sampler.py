"""A vLLM server: one request per prompt and round, and no prompt waits for another."""

import queue
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..core import Pool, Rollout, eliminate_async
from ..core.sequential_sampling import round_sizes
from ..utils.distributed import gather_results
from ..utils.logging import get_logger
from ..vllm.generation import AdaVLLMGeneration
from ..vllm.transport import VLLMServerUnavailable
from .rollout_sampler import Completions, RolloutSampler


logger = get_logger(__name__)

TICK_SECONDS = 1.0
MAX_FAILURES = 3  # one after the other, after which a step asks no more


class AsyncVLLMSampler(RolloutSampler):
    """
    Draws rollouts from a vLLM server, without a barrier.

    Every process looks after its own prompts and keeps one request of `samples_per_round` completions in flight for each.
    All completions of a request are awaited together, so short ones gain
    nothing. Reward functions run on the main thread (they may use signals) while further requests are under way; what
    has arrived in the meantime is scored in one call.

    When few requests are left, the server has capacity to spare: rounds of the prompts still active are then asked for ahead
    of time. Those that turn out not to be needed are cancelled or thrown away.

    A first round that fails stops the run on every process. When a later one fails because the server is unavailable,
    its prompt is retired with the pool it has, which is counted in `vllm/truncated_prompts`. After three such failures in a row all
    prompts are, so that a step waits for a dead server once, not once for each prompt.

    Args:
        vllm (`AdaVLLMGeneration`):
            Sends the requests.
        prompt_ids (`list[list[int]]`):
            Token ids of this process's prompts, or candidates.
        images (`list[list | None]`, *optional*):
            Images of each prompt, for vision-language models.
        score (`Callable[[list[int], list[list[int]], list, bool], Completions]`):
            Takes this process's prompt of each row, completion ids, log-probabilities and whether the rows belong to
            the first round; decodes and scores them on this process alone.
    """

    barrier = False  # see `eliminate_async`; set by the benchmark that measures what one costs
    max_in_flight = sys.maxsize  # the server queues
    speculate_below = 0.25  # requests under way per prompt; fewer leave the server capacity to spare

    def __init__(
        self,
        *,
        vllm: AdaVLLMGeneration,
        prompt_ids: Sequence[list[int]],
        images: Sequence[list | None] | None,
        score: Callable[[list[int], list, list, bool], Completions],
        **common,
    ):
        super().__init__(**common)
        self.vllm = vllm
        self.prompt_ids = prompt_ids
        self.images = images or [None] * len(prompt_ids)
        self.score = score
        self.stats |= dict.fromkeys(("vllm/truncated_prompts", "time/idle", "time/reward_overlapped"), 0.0)
        self._completed: queue.SimpleQueue = queue.SimpleQueue()  # (prompt, first draw, future), as requests finish
        self._in_flight: set[tuple[int, int]] = set()  # prompt and first draw of what is under way
        self._failed_prompts: set[int] = set()  # prompts
        self._submitted = self._failures = 0
        self._unavailable: VLLMServerUnavailable | None = None
        self._idle_since: float | None = None

    def sample(self, **loop) -> list[Pool]:
        self._tick = loop["progress"].tick
        # The same words on every process, whatever its share of the prompts.
        received = gather_results(
            lambda: self._sample_local(loop), self.vllm.error_factory("rollouts of this step are missing")
        )
        if self.slots is None:
            return [Pool(loop["positive_threshold"], rollouts) for process in received for rollouts in process]
        for i, (slot, rollouts) in enumerate(
            zip(self.slots, (rollouts for process in received for rollouts in process), strict=True)
        ):
            if i not in self.prompts:
                for rollout in rollouts:
                    slot.add(rollout)
        return list(self.slots)

    def _sample_local(self, loop: dict) -> list[list[Rollout]]:
        """The rollouts of each prompt of this process."""
        started = time.perf_counter()
        client, sizes = self.vllm.vllm_client, round_sizes(loop["samples_per_round"], len(self.prompts))
        client.reset_counts()
        with self.vllm.requests() as start:  # what is still in flight on leaving is cancelled
            pools = eliminate_async(
                len(self.prompts),
                self._submitter(start, sizes),
                self._collect,
                max_in_flight=self.max_in_flight,
                pools=self.slots and self.slots[self.prompts.start : self.prompts.stop],
                # What a slot asks next is not known before its round is over.
                speculate_below=int(self.speculate_below * len(self.prompt_ids)) if self.slots is None else 0,
                barrier=self.barrier,
                **loop,
            )
        self.stats["time/generate"] += time.perf_counter() - started - self.stats["time/reward"]
        needed = sum(-(-len(pool) // size) for pool, size in zip(pools, sizes, strict=True))
        self.stats["vllm/wasted_rounds"] = self._submitted - needed
        self.stats["vllm/weight_check_logprob_diff"] = self.vllm.weight_difference  # 0 on all processes but one
        self.stats["vllm/truncated_prompts"] = len(self._failed_prompts)
        self.stats["vllm/retries"], self.stats["vllm/timeouts"] = client.retries, client.timeouts
        return [pool.rollouts for pool in pools]

    def _submitter(self, start, sizes: Sequence[int]) -> Callable[[int, int], None]:
        def submit(prompt: int, first_draw: int) -> None:
            if self._idle_since is not None:
                self.stats["time/idle"] += time.perf_counter() - self._idle_since
                self._idle_since = None
            self._in_flight.add((prompt, first_draw))
            if self._unavailable is not None:  # it is not even sent
                future: Future = Future()
                future.set_exception(self._unavailable)
                self._completed.put((prompt, first_draw, future))
                return
            self._submitted += 1
            row = self._local_row(prompt, first_draw)
            future = start([self.prompt_ids[row]], sizes[prompt], self.images[row])
            future.add_done_callback(lambda done: self._completed.put((prompt, first_draw, done)))

        return submit

    def _local_row(self, prompt: int, draw: int) -> int:
        """Which of this process's rows prompt or slot `prompt` of this process asks."""
        if self.slots is None:
            return prompt
        first = self.prompts.start
        return self.dataset_row_index(first + prompt, draw) - self._first[first]

    def _collect(self) -> list[tuple[int, int, list[Rollout] | None]]:
        """Wait for an answer, take all that there are, score them."""
        arrived: list[tuple[int, int, Future]] = []
        while not arrived:
            try:
                arrived.append(self._completed.get(timeout=TICK_SECONDS))
            except queue.Empty:
                self._tick()
        while not self._completed.empty():
            arrived.append(self._completed.get())
        answered, failed = [], []
        for prompt, first_draw, future in arrived:
            if (prompt, first_draw) not in self._in_flight:
                continue  # no longer
            self._in_flight.remove((prompt, first_draw))
            try:
                answered.append((prompt, first_draw, *future.result()))
                self._failures = 0
            except VLLMServerUnavailable as error:
                failed += self._fail(prompt, first_draw, error)
        if not self._in_flight:
            self._idle_since = time.perf_counter()
        collected: list[tuple[int, int, list[Rollout] | None]] = [
            (prompt, first_draw, None) for prompt, first_draw in failed
        ]
        # Reward functions may log metrics, which describe the first round only: score the two kinds apart.
        for is_first_round in (True, False):
            collected += self._score(
                [answer for answer in answered if (answer[1] == 0) == is_first_round], is_first_round
            )
        return collected

    def _fail(self, prompt: int, first_draw: int, error: VLLMServerUnavailable) -> list[tuple[int, int]]:
        """What is not waited for any more: this request, or after several failures in a row all that are under way."""
        self._failures += 1
        failed = [(prompt, first_draw)]
        if self._failures == MAX_FAILURES and self._unavailable is None:
            self._unavailable = error
            failed += sorted(self._in_flight)
            self._in_flight.clear()
            self.vllm.vllm_client.cancel()
            logger.warning(
                f"The vLLM server has failed to answer {MAX_FAILURES} requests in a row: {error.cause}. The prompts that it "
                "was to sample further keep the rollouts they have; if it does not recover, the next step stops."
            )
        if any(first == 0 for _, first in failed):
            raise error
        self._failed_prompts |= {prompt for prompt, _ in failed}
        return failed

    def _score(self, answers: list[tuple], is_first_round: bool) -> list[tuple[int, int, list[Rollout]]]:
        if not answers:
            return []
        rows = [(prompt, first_draw + i) for prompt, first_draw, ids, _ in answers for i in range(len(ids))]
        completion_ids = [ids for *_, group, _ in answers for ids in group]
        logprobs = [[top[0] for top in sequence] for *_, group in answers for sequence in group]
        hidden = bool(self._in_flight)
        completions = self.score([self._local_row(*row) for row in rows], completion_ids, logprobs, is_first_round)
        if hidden:
            self.stats["time/reward_overlapped"] += completions.reward_seconds
        offset = self.store(completions, is_first_round=is_first_round)
        sources = [(self.process_index, offset + i) for i in range(len(rows))]
        rollouts = iter(self.rollouts([draw for _, draw in rows], completions.rewards, sources))
        return [(prompt, first_draw, [next(rollouts) for _ in ids]) for prompt, first_draw, ids, _ in answers]
