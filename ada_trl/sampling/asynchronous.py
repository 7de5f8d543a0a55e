"""Sampling from a vLLM server: one request per prompt and round, and no prompt waits for another."""

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from accelerate import Accelerator

from ..core import Slot, sample_slots
from ..utils.distributed import gather_results
from ..vllm.generation import AdaVLLMGeneration
from ..vllm.transport import RequestGroup
from .sampler import Generated, RolloutSampler, StepProgress


TICK_SECONDS = 1.0


class AsyncVLLMSampler(RolloutSampler):
    """
    Samples rollouts from a vLLM server, without a barrier.

    Every rank samples its own slots and keeps one request of `samples_per_round` completions in flight for each. All
    completions of a request are awaited together, so that short ones are not over-represented. Reward functions run on
    the main thread (they may use signals) while further requests are in flight; the completions that have arrived in
    the meantime are scored in one call.

    The server has room for as many rollouts as in the paper's first round, 8 per prompt: further rounds of the prompts
    that are still active are requested ahead, and cancelled or discarded if they turn out not to be needed.

    A request that fails, after its retries, stops the run on all ranks.

    Args:
        local_slots (`range`):
            Slots that this rank samples.
        vllm (`AdaVLLMGeneration`):
            Sends the requests.
        prompt_ids (`list[list[int]]`):
            Token ids of this rank's prompts or candidates.
        images (`list[list | None]`, *optional*):
            Images of each prompt, for vision-language models.
        score (`Callable[[list[int], list[list[int]], list, bool], Generated]`):
            Decodes and scores completions on this rank alone. Takes the position of each completion's prompt in
            `prompt_ids`, completion ids, log-probabilities, and whether they belong to the first round.
    """

    def __init__(
        self,
        *,
        local_slots: range,
        vllm: AdaVLLMGeneration,
        prompt_ids: Sequence[list[int]],
        images: Sequence[list | None] | None,
        score: Callable[[list[int], list, list, bool], Generated],
        slots: Sequence[Slot],
        accelerator: Accelerator,
    ):
        super().__init__(slots=slots, accelerator=accelerator)
        self.local_slots, self.vllm, self.score = local_slots, vllm, score
        self.prompt_ids, self.images = prompt_ids, images or [None] * len(prompt_ids)
        self.stats |= dict.fromkeys(("time/idle", "time/reward_overlapped"), 0.0)
        self._requests: dict[tuple[int, int], Future] = {}  # in flight, by slot and first draw
        self._completed: queue.SimpleQueue = queue.SimpleQueue()  # their keys, as they finish
        self._sent = 0  # requests
        self._idle_since: float | None = None

    @property
    def num_shown(self) -> int:
        return len(self.local_slots)

    def _fill_slots(self, progress: StepProgress) -> None:
        # The same message on every rank, also on ranks without a failed request.
        error_factory = self.vllm.error_factory("rollouts of this step are missing")
        received = gather_results(lambda: self._sample_local(progress), error_factory)
        rounds_of_slots = itertools.chain(*received)
        for i, (slot, rounds) in enumerate(zip(self.slots, rounds_of_slots, strict=True)):
            if i not in self.local_slots:  # slots of this rank were filled while sampling
                for rewards in rounds:
                    slot.add_round(rewards)
                slot.done = True

    def _sample_local(self, progress: StepProgress) -> list[list[np.ndarray]]:
        """The rewards of the rounds of this rank's slots."""
        started = time.perf_counter()
        first = self.local_slots.start
        slots = self.slots[first : self.local_slots.stop]
        with self.vllm.vllm_client.transport.group() as group:
            sample_slots(
                slots,
                lambda slot, first_draw: self._submit(group, first + slot, first_draw),
                lambda: [(slot - first, draw, rewards) for slot, draw, rewards in self._collect(progress.tick)],
                speculate_below=self.requests_in_flight(len(slots), self.slots[0].round_size),
                cancel=lambda slot, first_draw: self._cancel(first + slot, first_draw),
                progress=progress,
            )
        self._end_idle()
        self.stats["time/generate"] += time.perf_counter() - started - self.stats["time/reward"]
        self.stats["vllm/wasted_rounds"] = self._sent - sum(len(slot.rounds) for slot in slots)
        return [slot.rounds for slot in slots]

    def _submit(self, group: RequestGroup, slot: int, first_draw: int) -> None:
        """Request the next round of a slot of this rank."""
        self._end_idle()
        self._sent += 1
        row, number = self._local_row(slot, first_draw), self.slots[slot].round_size
        future = self.vllm.start_request(group, [self.prompt_ids[row]], number, self.images[row])
        self._requests[slot, first_draw] = future
        future.add_done_callback(lambda done: self._completed.put((slot, first_draw)))

    def _cancel(self, slot: int, first_draw: int) -> None:
        """Cancel a request, unless it has been collected."""
        if (future := self._requests.pop((slot, first_draw), None)) is not None:
            future.cancel()

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self.stats["time/idle"] += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _local_row(self, slot: int, draw: int) -> int:
        """Position in `prompt_ids` of the prompt that rollout `draw` of a slot of this rank belongs to."""
        return self.dataset_row_index(slot, draw) - self._first_row[self.local_slots.start]

    def _collect(self, tick: Callable[[], None]) -> list[tuple[int, int, np.ndarray]]:
        """Wait for a request, take all that have finished, and score their completions."""
        finished = [(*key, *self._requests.pop(key).result()) for key in self._wait_for_finished(tick)]
        if not self._requests:
            self._idle_since = time.perf_counter()
        collected = []
        # Reward functions may log metrics, which describe the first round only: score the two kinds apart.
        for is_first_round in (True, False):
            of_kind = [request for request in finished if (request[1] == 0) == is_first_round]
            if of_kind:
                collected += self._score(of_kind, is_first_round)
        return collected

    def _wait_for_finished(self, tick: Callable[[], None]) -> list[tuple[int, int]]:
        """Slots and first draws of at least one request that has not been cancelled."""
        finished: list[tuple[int, int]] = []
        while not finished or not self._completed.empty():
            try:
                key = self._completed.get(timeout=TICK_SECONDS)
            except queue.Empty:
                tick()
            else:
                finished += [key] if key in self._requests else []
        return finished

    def _score(self, finished: list[tuple], is_first_round: bool) -> list[tuple[int, int, np.ndarray]]:
        rollouts = [(slot, first_draw + i) for slot, first_draw, ids, _ in finished for i in range(len(ids))]
        completion_ids = [ids for *_, group, _ in finished for ids in group]
        logprobs = [values for *_, group in finished for values in group]
        is_overlapped = bool(self._requests)
        rows = [self._local_row(*rollout) for rollout in rollouts]
        completions, stats = self.score(rows, completion_ids, logprobs, is_first_round)
        if is_overlapped:
            self.stats["time/reward_overlapped"] += stats["time/reward"]
        self.store(rollouts, (completions, stats))
        ends = np.cumsum([len(ids) for *_, ids, _ in finished])
        rewards = np.split(np.array([completion.rewards for completion in completions]), ends[:-1])
        return [(slot, first_draw, rows) for (slot, first_draw, *_), rows in zip(finished, rewards, strict=True)]
