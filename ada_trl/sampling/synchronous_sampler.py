"""Rounds through the trainer's own generation, shared evenly by all processes."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from ..core import Pool, Rollout, eliminate
from ..utils.distributed import exchange, gather_results
from .rollout_sampler import Completions, RolloutSampler


class SynchronousSampler(RolloutSampler):
    """
    Draws rollouts with the trainer's own generation (transformers, continuous batching, vLLM colocate).

    Rows are split evenly: every process generates the same number, because generation under FSDP and ZeRO is
    collective. Where the rows do not divide, the last one is repeated and the copies are thrown away, so that pools do
    not depend on the number of processes and never exceed their cap. A process is sent the data set rows of other
    processes' prompts when it first generates for them. Completions stay on the process that generated them; a round ends
    with one collective for rewards and failures, a step brings the selected completions to where they are trained on.

    Args:
        rows (`Sequence[dict]`):
            The data set rows of this process's prompts, or candidates.
        row_ranks (`Sequence[int]`):
            By prompt or candidate of all processes, in order, whose it is.
        generate_and_score (`Callable[[list[dict], bool], Completions]`):
            Generates and scores one completion for each data set row on this process; the flag tells the first round.
    """

    def __init__(
        self,
        *,
        rows: Sequence[dict],
        row_ranks: Sequence[int],
        generate_and_score: Callable[[list[dict], bool], Completions],
        **common,
    ):
        slots = common.get("slots")
        super().__init__(prompts=range(len(row_ranks) if slots is None else len(slots)), **common)
        self.generate_and_score = generate_and_score
        own = [row for row, owner in enumerate(row_ranks) if owner == self.process_index]
        self._data: dict[int, dict] = dict(zip(own, rows, strict=True))  # data set rows, see `dataset_row_index`
        self._row_ranks = row_ranks
        self._generated: set[int] = set()  # rows, by any process
        self._ranks_with_row = [{owner} for owner in row_ranks]  # which processes have a data set row

    def sample(self, **loop) -> list[Pool]:
        return eliminate(len(self.prompts), self.sample_round, pools=self.slots, **loop)

    def sample_round(self, rows: Sequence[tuple[int, int]]) -> list[Rollout]:
        """One round: a rollout per `(prompt, draw)` row, the same list on every process."""
        started = time.perf_counter()
        share = -(-len(rows) // self.num_processes)
        padded = [*rows, *[rows[-1]] * (share * self.num_processes - len(rows))]
        start, offset = self.process_index * share, len(self._rows)
        padding = share - max(0, min(share, len(rows) - start))
        reward_seconds = 0.0

        def work() -> list[list[float]]:
            nonlocal reward_seconds
            is_first_round = rows[0][1] == 0
            completions = self.generate(padded[start : start + share], is_first_round)
            self.store(completions, is_first_round=is_first_round, padding=padding)
            self._store_states(rows, start, completions.states)
            reward_seconds = completions.reward_seconds
            return completions.rewards.tolist()

        self._exchange_rows(padded, share)
        received = gather_results(work)
        self.stats["time/generate"] += time.perf_counter() - started - reward_seconds
        rewards = torch.tensor([row for process in received for row in process][: len(rows)])
        sources = [(i // share, offset + i % share) for i in range(len(rows))]
        return self.rollouts([draw for _, draw in rows], rewards, sources)

    def _store_states(self, rows: Sequence[tuple[int, int]], start: int, states: torch.Tensor | None) -> None:
        """Of each prompt on the process that generates its first completion; `rows` are those of all processes."""
        for i, asked in enumerate(rows):
            row = self.dataset_row_index(*asked)
            if row not in self._generated:
                self._generated.add(row)
                if states is not None and 0 <= i - start < len(states):
                    self.states[row] = states[i - start]

    def generate(self, rows: Sequence[tuple[int, int]], is_first_round: bool) -> Completions:
        """One completion for each `(prompt, draw)`, on this process."""
        return self.generate_and_score([self._data[self.dataset_row_index(*row)] for row in rows], is_first_round)

    def _exchange_rows(self, rows: Sequence[tuple[int, int]], share: int) -> None:
        """Send data set rows to the processes that are about to generate for them, and have them not yet."""
        outgoing: dict[int, dict[int, dict]] = defaultdict(dict)
        somebody_sends = False
        for i, asked in enumerate(rows):
            process, row = i // share, self.dataset_row_index(*asked)
            if process not in self._ranks_with_row[row]:
                self._ranks_with_row[row].add(process)
                somebody_sends = True
                if self._row_ranks[row] == self.process_index:
                    outgoing[process][row] = self._data[row]
        if somebody_sends:
            for package in exchange(outgoing, self.accelerator).values():
                self._data |= package
