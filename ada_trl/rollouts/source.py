"""What every source of rollouts has in common: it keeps the completions and hands out the selected ones."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..core import Pool, Rollout


class Completions(NamedTuple):
    """
    What one process has generated and scored, `rows` completions.

    Args:
        columns (`tuple`):
            Output of the trainer's generation: a list per row, or a value without rows (`None`, `{}`, `[]`).
        prompts (`list`):
            The prompts as generated from, with images and an environment's observation in their messages.
        rewards (`torch.Tensor` of shape `(rows, num_reward_funcs)`):
            Unweighted rewards; NaN where a function returned `None`.
        extras (`dict[str, list]`):
            Columns that reward functions logged for the completions table, one value per row.
        lengths (`list[int]`):
            Generated tokens.
        truncated (`list[bool]`):
            Whether the length cap ended the completion.
        tool_calls (`tuple[int, int]`):
            Calls of tools, and how many of them failed.
        reward_seconds (`float`):
            Time spent in reward functions.
        tokens_seen (`int`):
            Tokens of prompts and completions.
    """

    columns: tuple
    prompts: list
    rewards: torch.Tensor
    extras: dict[str, list]
    lengths: list[int]
    truncated: list[bool]
    tool_calls: tuple[int, int]
    reward_seconds: float
    tokens_seen: int = 0


class Batch(NamedTuple):
    """
    The selected completions that one process trains on, and what is known of all processes' sampling.

    Args:
        columns (`tuple`), prompts (`list`):
            As in [`Completions`], of this process's rows.
        extras (`list[dict]`):
            Per row, what reward functions logged of it.
        stats (`dict[str, float]`):
            Counts summed over processes, seconds averaged.
        first_round (`list[tuple[int, bool]]`):
            Length of every completion of the first round, and whether it was truncated.
    """

    columns: tuple
    prompts: list
    extras: list[dict[str, Any]]
    stats: dict[str, float]
    first_round: list[tuple[int, bool]]


class RolloutSource:
    """
    Base class of the sources of rollouts. A rollout's `source` is `(process, row)`: which process holds the completion, and where.

    Args:
        to_signal (`Callable[[torch.Tensor], tuple[list[float], list[float]]]`):
            Rewards of shape `(rows, num_reward_funcs)` to total rewards and signals.
        accelerator (`Accelerator`):
            This process and the others.
    """

    def __init__(self, to_signal, accelerator: Accelerator):
        self.to_signal = to_signal
        self.process_index = accelerator.process_index
        self.num_processes = accelerator.num_processes
        # Sums over the step on this process: `tokens/*`, `server/*` are counts, `time/*` seconds.
        self.stats: dict[str, float] = defaultdict(float)
        self.first_round: list[tuple[int, bool]] = []  # of this process's completions: length, truncated
        self._rows: list[tuple[tuple, Any, dict]] = []  # what this process generated: columns, prompt and extras
        self._empty_columns: tuple = ()

    def sample(self, **loop) -> list[Pool]:
        """
        Draw until every prompt is retired. Collective.

        Args:
            loop:
                `exit_condition`, `samples_per_round`, `max_rounds`, `positive_threshold`, `progress` of the loop. Where
                `samples_per_round` differs by prompt, it has one entry for each prompt that this source asks for: those
                of this process with a server, all of them otherwise.

        Returns:
            `list[Pool]`: the pools of all processes' prompts, in order; the same on every process.
        """
        raise NotImplementedError

    def keep(self, completions: Completions, first_round: int = 0) -> int:
        """Store what this process has generated, `first_round` of it in the first round; returns the first's position."""
        offset, rows = len(self._rows), len(completions.prompts)
        self._rows += [
            (
                tuple(column[i] if _has_rows(column, rows) else None for column in completions.columns),
                completions.prompts[i],
                {name: values[i] for name, values in completions.extras.items()},
            )
            for i in range(rows)
        ]
        if not self._empty_columns:
            self._empty_columns = tuple(None if _has_rows(column, rows) else column for column in completions.columns)
        self.stats["tokens/generated"] += sum(completions.lengths)
        self.stats["tokens/seen"] += completions.tokens_seen
        self.stats["time/reward"] += completions.reward_seconds
        if first_round:
            self.first_round += zip(completions.lengths[:first_round], completions.truncated, strict=False)
            for name, count in zip(("calls", "failures"), completions.tool_calls, strict=True):
                self.stats[f"tools/{name}"] += count
        return offset

    def rollouts(self, draws: Sequence[int], rewards: torch.Tensor, sources: Sequence[tuple]) -> list[Rollout]:
        totals, signals = self.to_signal(rewards)
        return [
            Rollout(draw, total, signal, tuple(per_func), source)
            for draw, total, signal, per_func, source in zip(
                draws, totals, signals, rewards.tolist(), sources, strict=True
            )
        ]

    def fetch(self, selected: Sequence[Rollout]) -> Batch:
        """
        Bring the selected completions to the processes that train on them. Collective; a completion that is trained on
        where it was generated does not travel.

        Args:
            selected (`Sequence[Rollout]`):
                The update batch of all processes, in process order; the same on every process.
        """
        share = len(selected) // self.num_processes
        mine, sent = {}, {}
        for slot, rollout in enumerate(selected):
            process, row = rollout.source
            if process == self.process_index:
                (mine if slot // share == process else sent)[slot] = self._rows[row]
        received = gather_object([(sent, dict(self.stats), self.first_round, self._empty_columns)])
        for rows, *_ in received:
            mine |= rows
        empty_columns = next(empty for *_, empty in received if empty)  # a process may have generated nothing
        columns, prompts, extras = zip(*(mine[self.process_index * share + i] for i in range(share)), strict=True)
        names = sorted({name for _, stats, *_ in received for name in stats})
        return Batch(
            columns=tuple(
                empty if all(value is None for value in values) else list(values)
                for empty, values in zip(empty_columns, zip(*columns, strict=True), strict=True)
            ),
            prompts=list(prompts),
            extras=list(extras),
            stats={
                name: sum(stats.get(name, 0.0) for _, stats, *_ in received)
                / (self.num_processes if name.startswith("time/") else 1)
                for name in names
            },
            first_round=[row for *_, first_round, _ in received for row in first_round],
        )


def _has_rows(column: Any, rows: int) -> bool:
    return isinstance(column, list) and len(column) == rows
