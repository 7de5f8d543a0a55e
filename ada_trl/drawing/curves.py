"""Curves out of the logs of training runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


Log = Sequence[Mapping[str, Any]]  # `log_history` of a trainer

STEPS, TOKENS, ALL_TOKENS, MINUTES = "Optimizer steps", "Generated tokens", "Prompt and generated tokens", "Minutes"
COST = ("num_tokens", "step_time", "ada/tokens/generated")  # what is summed up, and so never smoothed


class Curve(NamedTuple):
    """A logged metric over the steps at which it was logged; NaN where it had no value."""

    steps: np.ndarray
    values: np.ndarray


def curve(log: Log, name: str) -> Curve:
    """What a run has logged under `name`; empty if it has not."""
    rows = [row for row in log if name in row]
    values = [math.nan if row[name] is None else row[name] for row in rows]
    return Curve(np.array([row["step"] for row in rows]), np.array(values, dtype=float))


def total(log: Log, name: str) -> Curve:
    """
    Sum over the steps so far of a metric of each step. Logged values are means over the steps since the last log, so
    each is multiplied by their number; a metric without a value counts as 0.
    """
    steps, values = curve(log, name)
    return Curve(steps, np.cumsum(np.nan_to_num(values) * np.diff(steps, prepend=0)))


def cost(log: Log, axis: str) -> Curve:
    """What a run had spent, in units of `axis` (but `STEPS`), at every step it has logged."""
    if axis == ALL_TOKENS:
        return curve(log, "num_tokens")
    if axis == TOKENS:
        return total(log, "ada/tokens/generated")
    steps, seconds = total(log, "step_time")
    return Curve(steps, seconds / 60)


def against(log: Log, name: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric against what the run had spent by then; between two logs, spending is taken to be even."""
    steps, values = curve(log, name)
    if axis == STEPS:
        return steps, values
    spent = cost(log, axis)
    if not len(spent.steps):
        return np.array([]), np.array([])
    return np.interp(steps, np.append(0, spent.steps), np.append(0.0, spent.values)), values


def smoothed(log: Log, window: int) -> list[dict[str, Any]]:
    """
    A log in which every metric is its mean over the last `window` steps, as far as they were logged. What a run has
    spent, and what was evaluated, stays as it was.

    Args:
        log (`Log`):
            Of one run.
        window (`int`):
            Steps, at least 1; the paper's figures have 20.
    """
    means = [dict(row) for row in log]
    names = {name for row in log for name, value in row.items() if isinstance(value, int | float)}
    for name in sorted(names - {"step", "epoch", *COST}):
        if name.startswith("eval_"):
            continue
        rows = [i for i, row in enumerate(log) if isinstance(row.get(name), int | float)]
        steps, values = (np.array([log[i][key] for i in rows], dtype=float) for key in ("step", name))
        known = np.isfinite(values)
        first = np.searchsorted(steps, steps - window, side="right")  # of the steps after `step - window`
        sums, numbers = (np.append(0, np.cumsum(x)) for x in (np.where(known, values, 0.0), known))
        totals, counts = ((x[1:] - x[first]) for x in (sums, numbers))
        for i, total, count in zip(rows, totals.tolist(), counts.tolist(), strict=True):
            means[i][name] = total / count if count else math.nan
    return means


def by_round(log: Log, name: str) -> dict[int, Curve]:
    """What a run has logged under `name/round_<k>`, by k, where it has logged rounds at all; 0 where it left one out."""
    prefix = f"{name}/round_"
    rows = [row for row in log if any(key.startswith(prefix) for key in row)]
    rounds = sorted({int(key.removeprefix(prefix)) for row in rows for key in row if key.startswith(prefix)})
    steps = np.array([row["step"] for row in rows])
    return {k: Curve(steps, np.array([row.get(f"{prefix}{k}") or 0.0 for row in rows], dtype=float)) for k in rounds}
