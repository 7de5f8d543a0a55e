"""Sampling from a vLLM server: one request per prompt and round, and no prompt waits for another."""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..core import Pool, Rollout, eliminate_async
from ..utils.distributed import gather_results
from ..utils.logging import get_logger
from ..vllm.errors import VLLMServerUnavailable
from ..vllm.generation import AdaVLLMGeneration
from ..vllm.transport import RequestGroup
from .rollout_sampler import Completions, RolloutSampler


logger = get_logger(__name__)

TICK_SECONDS = 1.0
MAX_FAILURES = 3  # in a row, after which no more rollouts are requested in a step


class AsyncVLLMSampler(RolloutSampler):
    """
    Samples rollouts from a vLLM server, without a barrier.

    Every rank samples its own prompts and keeps one request of `samples_per_round` completions in flight for each. All
    completions of a request are awaited together, so that short ones are not over-represented. Reward functions run on the
    main thread (they may use signals) while further requests are in flight; the completions that have arrived in the
    meantime are scored in one call.

    When few requests are left, the server has capacity to spare: next rounds of the active prompts are then requested
    speculatively, and cancelled or discarded if they turn out not to be needed.

    A first round that fails stops the run on all ranks. When a later one fails because the server is unavailable, its prompt
    keeps the rollouts it has, which is counted in `vllm/incomplete_pools`. After three such failures in a row all prompts
    do, so that a step waits for a dead server once, not once for each prompt.

    Args:
        vllm (`AdaVLLMGeneration`):
            Sends the requests.
        prompt_ids (`list[list[int]]`):
            Token ids of this rank's prompts or candidates.
        images (`list[list | None]`, *optional*):
            Images of each prompt, for vision-language models.
        score (`Callable[[list[int], list[list[int]], list, bool], Completions]`):
            Decodes and scores completions on this rank alone. Takes the position of each completion's prompt in
            `prompt_ids`, completion ids, log-probabilities, and whether they belong to the first round.
    """

    speculate_below = 0.25  # requests in flight per prompt; with fewer the server has capacity to spare

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
        self.stats |= dict.fromkeys(("vllm/incomplete_pools", "time/idle", "time/reward_overlapped"), 0.0)
        self._completed: queue.SimpleQueue = queue.SimpleQueue()  # (prompt, first index, future), as requests finish
        self._in_flight: set[tuple[int, int]] = set()  # prompt and first index of each request that is waited for
        self._first_failures: dict[int, int] = {}  # by prompt, first index of its first round that failed
        self._sent = 0  # requests that have not failed
        self._failures = 0  # in a row
        self._unavailable: VLLMServerUnavailable | None = None  # set after `MAX_FAILURES` failures in a row
        self._idle_since: float | None = None

    def sample(self, **loop) -> list[Pool]:
        # The same message on every rank, also on ranks without a failed request.
        error_factory = self.vllm.error_factory("rollouts of this step are missing")
        received = gather_results(lambda: self._sample_local(**loop), error_factory)
        by_prompt = [rollouts for of_rank in received for rollouts in of_rank]
        if self.slots is None:
            return [Pool(loop["positive_threshold"], rollouts) for rollouts in by_prompt]
        for i, (slot, rollouts) in enumerate(zip(self.slots, by_prompt, strict=True)):
            if i not in self.prompts:  # slots of this rank were filled while sampling
                for rollout in rollouts:
                    slot.add(rollout)
        return list(self.slots)

    def _sample_local(self, *, samples_per_round: int, progress, **loop) -> list[list[Rollout]]:
        """The rollouts of each prompt of this rank."""
        started = time.perf_counter()
        transport = self.vllm.vllm_client.transport
        with transport.group() as group:  # speculative requests that are not needed are cancelled at the end
            pools = eliminate_async(
                len(self.prompts),
                lambda prompt, first_index: self._submit(group, prompt, first_index, samples_per_round),
                lambda: self._collect(progress.tick),
                samples_per_round=samples_per_round,
                pools=self.slots and self.slots[self.prompts.start : self.prompts.stop],
                # A slot may continue with another candidate, which is unknown before its round is complete.
                speculate_below=int(self.speculate_below * len(self.prompt_ids)) if self.slots is None else 0,
                progress=progress,
                **loop,
            )
        self._end_idle()
        self.stats["time/generate"] += time.perf_counter() - started - self.stats["time/reward"]
        needed = sum(-(-len(pool) // samples_per_round) for pool in pools)
        self.stats["vllm/wasted_rounds"] = self._sent - needed
        self.stats["vllm/weight_check_logprob_diff"] = self.vllm.weight_difference  # 0 on all ranks but the main one
        # A speculative round that failed, but was not needed, truncates no prompt.
        is_truncated = (
            len(pools[prompt]) == first_index and not loop["exit_condition"](pools[prompt])
            for prompt, first_index in self._first_failures.items()
        )
        self.stats["vllm/incomplete_pools"] = sum(is_truncated)
        # Since the last step, the weight sync and the evaluations included.
        self.stats["vllm/retries"], self.stats["vllm/timeouts"] = transport.take_counts()
        return [pool.rollouts for pool in pools]

    def _submit(self, group: RequestGroup, prompt: int, first_index: int, number: int) -> None:
        """Request the next round of a prompt or slot of this rank."""
        self._end_idle()
        self._in_flight.add((prompt, first_index))
        if self._unavailable is not None:  # fails without being sent
            future: Future = Future()
            future.set_exception(self._unavailable)
        else:
            self._sent += 1
            row = self._local_row(prompt, first_index)
            future = self.vllm.start_request(group, [self.prompt_ids[row]], number, self.images[row])
        future.add_done_callback(lambda done: self._completed.put((prompt, first_index, done)))

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self.stats["time/idle"] += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _local_row(self, prompt: int, rollout_index: int) -> int:
        """Position in `prompt_ids` of the prompt that rollout `rollout_index` of a prompt or slot of this rank belongs to."""
        if self.slots is None:
            return prompt
        first = self.prompts.start
        return self.dataset_row_index(first + prompt, rollout_index) - self._first[first]

    def _collect(self, tick: Callable[[], None]) -> list[tuple[int, int, list[Rollout] | None]]:
        """Wait for a request, take all that have finished, and score their completions."""
        succeeded, failed = [], []
        for prompt, first_index, future in self._wait_for_finished(tick):
            if (prompt, first_index) not in self._in_flight:
                continue  # given up with all others after `MAX_FAILURES` failures
            self._in_flight.remove((prompt, first_index))
            try:
                succeeded.append((prompt, first_index, *future.result()))
                self._failures = 0
            except VLLMServerUnavailable as error:
                failed += self._fail(prompt, first_index, error)
        if not self._in_flight:
            self._idle_since = time.perf_counter()
        collected: list[tuple[int, int, list[Rollout] | None]] = [(*request, None) for request in failed]
        # Reward functions may log metrics, which describe the first round only: score the two kinds apart.
        for is_first_round in (True, False):
            of_kind = [request for request in succeeded if (request[1] == 0) == is_first_round]
            if of_kind:
                collected += self._score(of_kind, is_first_round)
        return collected

    def _wait_for_finished(self, tick: Callable[[], None]) -> list[tuple[int, int, Future]]:
        finished: list[tuple[int, int, Future]] = []
        while not finished:
            try:
                finished.append(self._completed.get(timeout=TICK_SECONDS))
            except queue.Empty:
                tick()
        while not self._completed.empty():
            finished.append(self._completed.get())
        return finished

    def _fail(self, prompt: int, first_index: int, error: VLLMServerUnavailable) -> list[tuple[int, int]]:
        """The requests that are given up: this one, or after several failures in a row all that are not first rounds."""
        if first_index == 0:
            raise error
        self._failures += 1
        self._sent -= error is not self._unavailable  # else this request was not sent
        failed = [(prompt, first_index)]
        if self._failures == MAX_FAILURES and self._unavailable is None:
            self._unavailable = error
            # First rounds are waited for: the step needs them, and the rounds that failed may have been speculative.
            given_up = sorted(request for request in self._in_flight if request[1])
            self._in_flight.difference_update(given_up)
            self._sent -= len(given_up)
            failed += given_up
            logger.warning(
                f"{MAX_FAILURES} requests to the vLLM server have failed in a row: {error.cause}. Prompts with pending "
                "rounds keep their current rollouts. If the server does not recover, the next step raises an error."
            )
        for number, index in failed:
            self._first_failures[number] = min(index, self._first_failures.get(number, index))
        return failed

    def _score(self, succeeded: list[tuple], is_first_round: bool) -> list[tuple[int, int, list[Rollout]]]:
        requests = [(prompt, first_index + i) for prompt, first_index, ids, _ in succeeded for i in range(len(ids))]
        completion_ids = [ids for *_, group, _ in succeeded for ids in group]
        logprobs = [[top[0] for top in sequence] for *_, group in succeeded for sequence in group]
        is_overlapped = bool(self._in_flight)
        completions = self.score(
            [self._local_row(*request) for request in requests], completion_ids, logprobs, is_first_round
        )
        if is_overlapped:
            self.stats["time/reward_overlapped"] += completions.reward_seconds
        offset = self.store(completions, is_first_round=is_first_round)
        locations = [(self.process_index, offset + i) for i in range(len(requests))]
        rollouts = iter(
            self.rollouts([rollout_index for _, rollout_index in requests], completions.rewards, locations)
        )
        return [(prompt, first_index, [next(rollouts) for _ in ids]) for prompt, first_index, ids, _ in succeeded]
