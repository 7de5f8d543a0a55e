"""Sampling in synchronous rounds with the trainer's own generation, split evenly between all ranks."""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from accelerate import Accelerator

from ..core import Slot, sample_slots
from ..utils.distributed import exchange_rows, gather_results
from .sampler import Generated, RolloutSampler, StepProgress


class SynchronousSampler(RolloutSampler):
    """
    Samples rollouts with the trainer's own generation (transformers, continuous batching, vLLM colocate).

    Rows are split evenly: every rank generates the same number, because generation under FSDP and ZeRO is collective.
    If the rows do not divide, the last one is repeated and the copies are discarded, so that pools do not depend on
    the number of ranks and never exceed their cap. A rank receives the dataset rows of other ranks' prompts when it
    first generates for them. Completions stay on the rank that generated them: a round ends with one collective for
    rewards and failures, and a step sends the selected completions to where they are trained on.

    Args:
        rows (`Sequence[dict]`):
            Dataset rows of this rank's prompts or candidates.
        row_ranks (`Sequence[int]`):
            Rank of each prompt or candidate of all ranks, in order.
        generate_and_score (`Callable[[list[dict], bool], Generated]`):
            Generates and scores one completion for each dataset row on this rank; the flag is true in the first round.
        fills_rounds (`bool`):
            Whether rounds are filled up to `rollouts_in_flight` rollouts per prompt of the batch, or to the size of a
            round without speculation, with further rollouts of the prompts that are still active. On a GPU, a round
            takes as long as its longest completion however many there are, so that this saves rounds. Rollouts that
            turn out not to be needed are discarded.
    """

    def __init__(
        self,
        *,
        rows: Sequence[dict],
        row_ranks: Sequence[int],
        generate_and_score: Callable[[list[dict], bool], Generated],
        fills_rounds: bool,
        slots: Sequence[Slot],
        accelerator: Accelerator,
    ):
        super().__init__(slots=slots, accelerator=accelerator)
        self.generate_and_score, self.fills_rounds = generate_and_score, fills_rounds
        self._own_rows, self._row_ranks = rows, row_ranks
        own = (index for index, rank in enumerate(row_ranks) if rank == self.process_index)
        self._data: dict[int, dict] = dict(zip(own, rows, strict=True))  # known dataset rows, see `dataset_row_index`
        self._ranks_with_row = [{rank} for rank in row_ranks]
        self._requests: list[tuple[int, int]] = []  # slots of the next round, and the index of their next rollout

    @property
    def num_shown(self) -> int:
        return len(self.slots)

    def _fill_slots(self, progress: StepProgress) -> None:
        started = time.perf_counter()
        room = self.requests_in_flight(len(self.slots), self.slots[0].round_size)
        sample_slots(
            self.slots,
            lambda *request: self._requests.append(request),
            self._sample_round,
            speculate_below=room if self.fills_rounds else 0,
            progress=progress,
        )
        self.stats["time/generate"] += time.perf_counter() - started - self.stats["time/reward"]

    @classmethod
    def requests_in_flight(cls, num_slots: int, round_size: int) -> int:
        return max(num_slots, super().requests_in_flight(num_slots, round_size))  # at least a round of all prompts

    def _sample_round(self) -> list[tuple[int, int, np.ndarray]]:
        """
        Sample all requested rollouts; returns slot, first draw and rewards of each request, the same on every rank.
        """
        requests, self._requests = self._requests, []
        sizes = [self.slots[slot].round_size for slot, _ in requests]
        rollouts = [(slot, first + i) for (slot, first), n in zip(requests, sizes, strict=True) for i in range(n)]
        per_rank = -(-len(rollouts) // self.num_processes)
        padded = [*rollouts, *[rollouts[-1]] * (per_rank * self.num_processes - len(rollouts))]
        indices = [self.dataset_row_index(*rollout) for rollout in padded]
        self._exchange_rows(indices, per_rank)
        local = slice(self.process_index * per_rank, (self.process_index + 1) * per_rank)
        is_first_round = requests[0][1] == 0

        def generate_local() -> list[Sequence[float]]:
            generated = self.generate_and_score([self._data[index] for index in indices[local]], is_first_round)
            self.store(rollouts[local], generated)
            return [completion.rewards for completion in generated[0]]

        rewards = np.array(list(itertools.chain(*gather_results(generate_local))))[: len(rollouts)]  # (rollouts, F)
        of_requests = np.split(rewards, np.cumsum(sizes)[:-1])
        return [(*request, of_request) for request, of_request in zip(requests, of_requests, strict=True)]

    def _exchange_rows(self, indices: Sequence[int], per_rank: int) -> None:
        """Send dataset rows to the ranks that are about to generate for them and do not have them yet. Collective."""
        missing: list[list[int]] = []
        for rank in range(self.num_processes):
            needed = dict.fromkeys(indices[rank * per_rank : (rank + 1) * per_rank])
            missing.append([index for index in needed if rank not in self._ranks_with_row[index]])
            for index in missing[rank]:
                self._ranks_with_row[index].add(rank)
        self._data |= exchange_rows(self._own_rows, self._row_ranks, missing, self.accelerator)
