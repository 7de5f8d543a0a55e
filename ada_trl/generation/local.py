"""Rounds through the trainer's own generation, shared evenly by all processes."""

import time
from collections.abc import Callable, Sequence

from ..core import Pool, Rollout, eliminate
from .sampler import Completions, Sampler


class LocalSampler(Sampler):
    """
    Draws rollouts with the trainer's own generation (transformers, continuous batching, vLLM colocate).

    Rows are split evenly: every process generates the same number, because generation under FSDP and ZeRO and the
    trainer's gathers are collective. Where the rows do not divide, the last one is repeated and the copies are thrown
    away, so that pools do not depend on the number of processes and never exceed their cap. Completions stay on the
    process that generated them; only the selected ones travel, in one collective per step.

    Args:
        num_prompts (`int`):
            Prompts of all processes.
        complete (`Callable[[list[int], bool], Completions]`):
            Generates and scores one row per given prompt position on this process; the flag tells the first round.
    """

    def __init__(self, num_prompts: int, complete: Callable[[list[int], bool], Completions], *args):
        super().__init__(*args)
        self.num_prompts = num_prompts
        self.complete = complete

    def sample(self, **loop) -> list[Pool]:
        return eliminate(self.num_prompts, self.draw, **loop)

    def draw(self, rows: Sequence[tuple[int, int]]) -> list[Rollout]:
        """One round: a rollout per `(prompt, draw)` row, the same list on every process."""
        started = time.perf_counter()
        share = -(-len(rows) // self.num_processes)
        padded = [prompt for prompt, _ in rows] + [rows[-1][0]] * (share * self.num_processes - len(rows))
        mine = padded[self.process_index * share : (self.process_index + 1) * share]
        completions = self.complete(mine, rows[0][1] == 0)
        offset = self.keep(completions, share)
        self.stats["time/generate"] += time.perf_counter() - started - completions.reward_seconds
        sources = [(i // share, offset + i % share) for i in range(len(rows))]
        return self.rollouts([draw for _, draw in rows], completions.rewards[: len(rows)], sources)
