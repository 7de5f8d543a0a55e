"""Tables of the records of runs, and statistics over seeds."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from ..common import interval


RUN = ["prompt_set", "method", "seed"]
COSTS = ["rollouts", "generated_tokens", "trained_tokens", "cpu_seconds", "wall_seconds"]


def collect(files: Iterable[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """
    Convert records of runs to two tables.

    Returns:
        `tuple[pd.DataFrame, pd.DataFrame]`: one row per step, and one row per evaluation with the costs summed up to
        it. Both name the run in the columns `prompt_set`, `method` and `seed`.
    """
    steps, evaluations = [], []
    for file in sorted(files):
        record = json.loads(file.read_text())
        run = {name: record[name] for name in RUN}
        spent = {0: dict.fromkeys(COSTS, 0.0)}
        for row in record["steps"]:
            steps.append(run | row)
            spent[row["step"]] = {name: spent[row["step"] - 1][name] + row[name] for name in COSTS}
        for row in record["evaluations"]:
            bins = {f"bin_{i}": value for i, value in enumerate(row.get("by_difficulty", []))}
            row = {name: value for name, value in row.items() if name != "by_difficulty"}
            evaluations.append(run | row | bins | spent[row["step"]])
    return pd.DataFrame(steps), pd.DataFrame(evaluations)


def by_seed(evaluations: pd.DataFrame, prompt_set: str, method: str) -> dict[int, pd.DataFrame]:
    """The evaluations of each run of a method by seed, in the order of steps."""
    rows = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["method"] == method)]
    return {seed: run.sort_values("step") for seed, run in rows.groupby("seed")}


def cost_to_reach(run: pd.DataFrame, axis: str, target: float) -> float:
    """The cost at which a run first reached the accuracy `target`, linear between evaluations; infinite if it never did."""
    accuracy, spent = run["accuracy"].to_numpy(), run[axis].to_numpy(dtype=float)
    reached = np.flatnonzero(accuracy >= target)
    if not len(reached):
        return math.inf
    i = reached[0]
    if i == 0:
        return float(spent[0])
    share = (target - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
    return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> tuple[float, float]:
    """Mean difference over common seeds, which share the order of the prompts, and half the width of its interval."""
    return interval([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())])


def final(runs: dict[int, pd.DataFrame], column: str = "accuracy") -> dict[int, float]:
    """Value of the last evaluation by seed."""
    return {seed: float(run[column].iloc[-1]) for seed, run in runs.items()}


def half_way(runs: dict[int, pd.DataFrame]) -> dict[int, float]:
    """Accuracy after half of the steps by seed, of the runs that were evaluated there."""
    halves = {seed: run[run["step"] == run["step"].max() / 2] for seed, run in runs.items()}
    return {seed: float(rows["accuracy"].iloc[0]) for seed, rows in halves.items() if len(rows)}


def mean_of(values: dict[int, float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its interval."""
    return interval(list(values.values()))


def of_methods(
    evaluations: pd.DataFrame, prompt_set: str, methods: Iterable[str]
) -> dict[str, dict[int, pd.DataFrame]]:
    """Runs by method and seed, for the methods that have any."""
    found = {method: by_seed(evaluations, prompt_set, method) for method in methods}
    return {method: runs for method, runs in found.items() if runs}


def before_training(evaluations: pd.DataFrame, prompt_set: str) -> pd.Series:
    """Means at step 0. Averaged over seeds, because the seeds of the language model have different initial weights."""
    start = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["step"] == 0)]
    return start.groupby("seed").mean(numeric_only=True).mean()
