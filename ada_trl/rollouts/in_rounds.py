"""Rounds through the trainer's own generation, shared evenly by all processes."""

import time
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object

from ..core import Pool, Rollout, eliminate
from ..failures import raise_first, report
from .source import Completions, RolloutSource


class RoundSource(RolloutSource):
    """
    Draws rollouts with the trainer's own generation (transformers, continuous batching, vLLM colocate).

    Rows are split evenly: every process generates the same number, because generation under FSDP and ZeRO is
    collective. Where the rows do not divide, the last one is repeated and the copies are thrown away, so that pools do
    not depend on the number of processes and never exceed their cap. Completions stay on the process that generated
    them; a round ends with one collective for rewards and failures, a step with one for the selected completions.

    Args:
        num_prompts (`int`):
            Prompts of all processes.
        complete (`Callable[[Sequence[tuple[int, int]], bool], Completions]`):
            Generates and scores one completion per `(prompt, draw)` row on this process; the flag tells the first round.
    """

    def __init__(self, num_prompts: int, complete: Callable[[Sequence[tuple[int, int]], bool], Completions], *args):
        super().__init__(*args)
        self.num_prompts = num_prompts
        self.complete = complete

    def sample(self, **loop) -> list[Pool]:
        return eliminate(self.num_prompts, self.draw, **loop)

    def draw(self, rows: Sequence[tuple[int, int]]) -> list[Rollout]:
        """One round: a rollout per `(prompt, draw)` row, the same list on every process."""
        started = time.perf_counter()
        share = -(-len(rows) // self.num_processes)
        padded = [*rows, *[rows[-1]] * (share * self.num_processes - len(rows))]
        start = self.process_index * share
        first_round = rows[0][1] == 0
        rewards, offset, reward_seconds, error = [], len(self._rows), 0.0, None
        try:
            completions = self.complete(padded[start : start + share], first_round)
            self.keep(completions, max(0, min(share, len(rows) - start)) if first_round else 0)
            rewards, reward_seconds = completions.rewards.tolist(), completions.reward_seconds
        except Exception as caught:  # the other processes must hear of it, see raise_first
            error = caught
        received = gather_object([(report(error), rewards)])
        raise_first([text for text, _ in received], error, "a round of rollouts could not be completed")
        self.stats["time/generate"] += time.perf_counter() - started - reward_seconds
        rewards = torch.tensor([row for _, process in received for row in process][: len(rows)])
        sources = [(i // share, offset + i % share) for i in range(len(rows))]
        return self.rollouts([draw for _, draw in rows], rewards, sources)
