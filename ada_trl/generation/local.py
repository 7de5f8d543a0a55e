"""Rounds through the trainer's own generation, shared evenly by all processes."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from ..core import Rollout


class Completions(NamedTuple):
    """
    What this process generated and scored for some rows.

    Args:
        columns (`tuple`):
            Output of the trainer's generation: a list per row, or a value without rows (`None`, `{}`, `[]`).
        lengths (`list[int]`):
            Generated tokens per row.
        rewards (`torch.Tensor` of shape `(num_processes * rows, num_reward_funcs)`):
            Unweighted rewards of **all** processes' rows, in process order; NaN where a function returned `None`.
        extras (`dict[str, list]`):
            Columns that reward functions logged for the completions table, one value per row.
        reward_seconds (`float`):
            Time spent in reward functions.
    """

    columns: tuple
    lengths: list[int]
    rewards: torch.Tensor
    extras: dict[str, list]
    reward_seconds: float


class LocalSampler:
    """
    Draws rollouts with the trainer's own generation (transformers, continuous batching).

    Rows are split evenly: every process generates the same number, because generation under FSDP and ZeRO and the
    trainer's gathers are collective. Where the rows do not divide, the last one is repeated and the copies are thrown
    away, so that pools do not depend on the number of processes and never exceed their cap. Completions stay on the
    process that generated them; only the selected ones travel, in one collective per step.

    Args:
        complete (`Callable[[list[int], bool], Completions]`):
            Generates and scores one row per given prompt position on this process; the flag tells the first round.
        to_signal (`Callable[[torch.Tensor], tuple[list[float], list[float]]]`):
            Rewards of shape `(rows, num_reward_funcs)` to total rewards and signals.
        process_index (`int`), num_processes (`int`):
            This process and how many there are.
    """

    def __init__(
        self,
        complete: Callable[[list[int], bool], Completions],
        to_signal: Callable[[torch.Tensor], tuple[list[float], list[float]]],
        process_index: int,
        num_processes: int,
    ):
        self.complete = complete
        self.to_signal = to_signal
        self.process_index = process_index
        self.num_processes = num_processes
        self.first_round_rewards: torch.Tensor | None = None  # (prompts * samples_per_round, num_reward_funcs)
        self._rows: list[tuple[tuple, dict[str, Any]]] = []  # what this process generated: columns and extras
        self._empty_columns: tuple = ()
        self._stats = {"tokens/generated": 0.0, "time/generate": 0.0, "time/reward": 0.0}

    def draw(self, rows: Sequence[tuple[int, int]]) -> list[Rollout]:
        """One round: a rollout per `(prompt, draw)` row, the same list on every process."""
        started = time.perf_counter()
        share = -(-len(rows) // self.num_processes)
        padded = [prompt for prompt, _ in rows] + [rows[-1][0]] * (share * self.num_processes - len(rows))
        mine = padded[self.process_index * share : (self.process_index + 1) * share]
        completions = self.complete(mine, self.first_round_rewards is None)

        offset = len(self._rows)
        self._rows += [
            (
                tuple(column[i] if _has_rows(column, share) else None for column in completions.columns),
                {name: values[i] for name, values in completions.extras.items()},
            )
            for i in range(share)
        ]
        if not self._empty_columns:
            self._empty_columns = tuple(None if _has_rows(column, share) else column for column in completions.columns)
        rewards = completions.rewards[: len(rows)]
        if self.first_round_rewards is None:
            self.first_round_rewards = rewards

        self._stats["tokens/generated"] += sum(completions.lengths)
        self._stats["time/reward"] += completions.reward_seconds
        self._stats["time/generate"] += time.perf_counter() - started - completions.reward_seconds
        totals, signals = self.to_signal(rewards)
        return [
            Rollout(draw, total, signal, tuple(per_func), (i // share, offset + i % share))
            for i, ((_, draw), total, signal, per_func) in enumerate(
                zip(rows, totals, signals, rewards.tolist(), strict=True)
            )
        ]

    def fetch(self, selected: Sequence[Rollout]) -> tuple[tuple, list[dict[str, Any]], dict[str, float]]:
        """
        Bring the selected completions to the processes that train on them. Collective.

        Args:
            selected (`Sequence[Rollout]`):
                The update batch of all processes, in process order; the same on every process.

        Returns:
            `tuple`: columns of this process's rows in the layout of the trainer's generation, their extras, and the
            figures `tokens/generated` (sum over processes) and `time/*` (seconds, mean over processes).
        """
        sent = {
            slot: self._rows[rollout.source[1]]
            for slot, rollout in enumerate(selected)
            if rollout.source[0] == self.process_index
        }
        received = gather_object([(sent, self._stats)])
        slots = {slot: row for rows, _ in received for slot, row in rows.items()}
        share = len(selected) // self.num_processes
        mine = [slots[self.process_index * share + i] for i in range(share)]
        columns = tuple(
            empty if all(value is None for value in values) else list(values)
            for empty, values in zip(self._empty_columns, zip(*(row for row, _ in mine), strict=True), strict=True)
        )
        stats = {name: sum(stats[name] for _, stats in received) for name in self._stats}
        for name in ("time/generate", "time/reward"):
            stats[name] /= self.num_processes
        return columns, [extras for _, extras in mine], stats


def _has_rows(column: Any, rows: int) -> bool:
    return isinstance(column, list) and len(column) == rows
