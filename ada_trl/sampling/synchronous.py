"""Sampling in synchronous rounds with the trainer's own generation, split evenly between all ranks."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from accelerate import Accelerator

from ..core import Slot, sample_slots
from ..utils.distributed import exchange_rows, gather_results
from .sampler import Completions, RolloutSampler, StepProgress


class SynchronousSampler(RolloutSampler):
    """
    Samples rollouts with the trainer's own generation (transformers, continuous batching, vLLM colocate).

    Rows are split evenly: every rank generates the same number, because generation under FSDP and ZeRO is collective. If the
    rows do not divide, the last one is repeated and the copies are discarded, so that pools do not depend on the number of
    ranks and never exceed their cap. A rank receives the dataset rows of other ranks' prompts when it first generates for
    them. Completions stay on the rank that generated them: a round ends with one collective for rewards and failures, and a
    step sends the selected completions to where they are trained on.

    Args:
        rows (`Sequence[dict]`):
            Dataset rows of this rank's prompts or candidates.
        row_ranks (`Sequence[int]`):
            Rank of each prompt or candidate of all ranks, in order.
        generate_and_score (`Callable[[list[dict], bool], Completions]`):
            Generates and scores one completion for each dataset row on this rank; the flag is true in the first round.
        fills_rounds (`bool`):
            Whether later rounds are filled up to the size of the first one with further rollouts of the prompts that are still
            active. On a GPU, a round takes as long as its longest completion however many there are, so that this saves rounds.
            Rollouts that turn out not to be needed are discarded.
    """

    def __init__(
        self,
        *,
        rows: Sequence[dict],
        row_ranks: Sequence[int],
        generate_and_score: Callable[[list[dict], bool], Completions],
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
        self._requests: list[tuple[int, int]] = []  # slot and draw of the next round's rollouts

    @property
    def num_shown(self) -> int:
        return len(self.slots)

    def sample(self, progress: StepProgress) -> None:
        speculate_below = len(self.slots) if self.fills_rounds else 0
        sample_slots(
            self.slots, self._request_round, self._sample_round, speculate_below=speculate_below, progress=progress
        )

    def _request_round(self, slot: int, first_draw: int) -> None:
        self._requests += [(slot, first_draw + i) for i in range(self.slots[slot].round_size)]

    def _sample_round(self) -> list[tuple[int, int, np.ndarray]]:
        """Sample all requested rollouts; returns slot, first draw and rewards of each request, the same on every rank."""
        requests, self._requests = self._requests, []
        started = time.perf_counter()
        per_rank = -(-len(requests) // self.num_processes)
        padded = [*requests, *[requests[-1]] * (per_rank * self.num_processes - len(requests))]
        indices = [self.dataset_row_index(*request) for request in padded]
        start, offset = self.process_index * per_rank, len(self.completions)
        padding = per_rank - max(0, min(per_rank, len(requests) - start))
        reward_seconds = 0.0

        def generate_local() -> list[list[float]]:
            nonlocal reward_seconds
            is_first_round = requests[0][1] == 0
            rows = [self._data[index] for index in indices[start : start + per_rank]]
            completions = self.generate_and_score(rows, is_first_round)
            self.store(completions, is_first_round=is_first_round, padding=padding)
            reward_seconds = completions.reward_seconds
            return completions.rewards.tolist()

        self._exchange_rows(indices, per_rank)
        received = gather_results(generate_local)
        self.stats["time/generate"] += time.perf_counter() - started - reward_seconds
        rewards = np.array([row for of_rank in received for row in of_rank][: len(requests)])  # (rollouts, F)
        for i, request in enumerate(requests):
            self.locations[request] = (i // per_rank, offset + i % per_rank)
        rounds, first = [], 0
        while first < len(requests):
            slot, first_draw = requests[first]
            size = self.slots[slot].round_size
            rounds.append((slot, first_draw, rewards[first : first + size]))
            first += size
        return rounds

    def _exchange_rows(self, indices: Sequence[int], per_rank: int) -> None:
        """Send dataset rows to the ranks that are about to generate for them and do not have them yet. Collective."""
        missing: list[list[int]] = []
        for rank in range(self.num_processes):
            needed = dict.fromkeys(indices[rank * per_rank : (rank + 1) * per_rank])
            missing.append([index for index in needed if rank not in self._ranks_with_row[index]])
            for index in missing[rank]:
                self._ranks_with_row[index].add(rank)
        self._data |= exchange_rows(self._own_rows, self._row_ranks, missing, self.accelerator)
