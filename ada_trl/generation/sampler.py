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
    What was generated and scored for some rows.

    Args:
        columns (`tuple`):
            Output of the trainer's generation: a list per row, or a value without rows (`None`, `{}`, `[]`).
        rewards (`torch.Tensor` of shape `(rows, num_reward_funcs)`):
            Unweighted rewards; NaN where a function returned `None`. With generation in lockstep, those of **all**
            processes' rows, in process order.
        extras (`dict[str, list]`):
            Columns that reward functions logged for the completions table, one value per row.
        reward_seconds (`float`):
            Time spent in reward functions.
    """

    columns: tuple
    rewards: torch.Tensor
    extras: dict[str, list]
    reward_seconds: float

    @property
    def lengths(self) -> list[int]:
        """Generated tokens per row."""
        return [len(ids) for ids in self.columns[1]]


class Sampler:
    """
    Base class of the samplers. A rollout's `source` is `(process, row)`: which process holds the completion, and where.

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
        self._rows: list[tuple[tuple, dict[str, Any]]] = []  # what this process generated: columns and extras
        self._empty_columns: tuple = ()

    def sample(self, **loop) -> list[Pool]:
        """
        Draw until every prompt is retired. Collective.

        Args:
            loop:
                `exit_condition`, `samples_per_round`, `max_rounds`, `positive_threshold`, `progress` of the loop. Where
                `samples_per_round` differs by prompt, it has one entry for each prompt that this sampler asks for: those
                of this process with a server, all of them otherwise.

        Returns:
            `list[Pool]`: the pools of all processes' prompts, in order; the same on every process.
        """
        raise NotImplementedError

    def keep(self, completions: Completions, rows: int) -> int:
        """Store the completions of this process's `rows`; returns the position of the first."""
        offset = len(self._rows)
        self._rows += [
            (
                tuple(column[i] if _has_rows(column, rows) else None for column in completions.columns),
                {name: values[i] for name, values in completions.extras.items()},
            )
            for i in range(rows)
        ]
        if not self._empty_columns:
            self._empty_columns = tuple(None if _has_rows(column, rows) else column for column in completions.columns)
        self.stats["tokens/generated"] += sum(completions.lengths)
        self.stats["time/reward"] += completions.reward_seconds
        return offset

    def rollouts(self, draws: Sequence[int], rewards: torch.Tensor, sources: Sequence[tuple]) -> list[Rollout]:
        totals, signals = self.to_signal(rewards)
        return [
            Rollout(draw, total, signal, tuple(per_func), source)
            for draw, total, signal, per_func, source in zip(
                draws, totals, signals, rewards.tolist(), sources, strict=True
            )
        ]

    def fetch(self, selected: Sequence[Rollout]) -> tuple[tuple, list[dict[str, Any]], dict[str, float]]:
        """
        Bring the selected completions to the processes that train on them. Collective; a completion that is trained on
        where it was generated does not travel.

        Args:
            selected (`Sequence[Rollout]`):
                The update batch of all processes, in process order; the same on every process.

        Returns:
            `tuple`: columns of this process's rows in the layout of the trainer's generation, their extras, and
            `stats` (counts summed over processes, seconds averaged).
        """
        share = len(selected) // self.num_processes
        mine, sent = {}, {}
        for slot, rollout in enumerate(selected):
            process, row = rollout.source
            if process == self.process_index:
                (mine if slot // share == process else sent)[slot] = self._rows[row]
        received = gather_object([(sent, dict(self.stats), self._empty_columns)])
        for rows, _, _ in received:
            mine |= rows
        empty_columns = next(empty for *_, empty in received if empty)  # a process may have generated nothing
        rows = [mine[self.process_index * share + i] for i in range(share)]
        columns = tuple(
            empty if all(value is None for value in values) else list(values)
            for empty, values in zip(empty_columns, zip(*(row for row, _ in rows), strict=True), strict=True)
        )
        totals = {
            name: sum(stats.get(name, 0.0) for _, stats, _ in received)
            / (self.num_processes if name.startswith("time/") else 1)
            for name in sorted({name for _, stats, _ in received for name in stats})
        }
        return columns, [extras for _, extras in rows], totals


def _has_rows(column: Any, rows: int) -> bool:
    return isinstance(column, list) and len(column) == rows
