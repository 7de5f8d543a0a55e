"""Runs of several methods, compared with a reference by seed."""

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from . import names
from .common import load_rows, markdown
from .statistics import BETTER, NO_VALUE, SAME, WORSE, Interval, cell, comparison, interval, paired


Runs = dict[int, pd.DataFrame]  # evaluations of each run in the order of steps, by seed
Measure = Callable[[pd.DataFrame], float]  # a number of one run


@functools.cache  # several tables are made of the same result
def load(name: str) -> pd.DataFrame:
    """Stored evaluations, which are shared; without rows if there is no such result."""
    columns = ["method", "prompt_set", "seed", "rate", "step", "family"]
    rows = load_rows(name, missing_ok=True)
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def by_seed(evaluations: pd.DataFrame, prompt_set: str, method: str, rate: float | None = None) -> Runs:
    """Runs of a method on a whole set, at one learning rate if it is given."""
    rows = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["method"] == method)]
    rows = rows[(rows["family"] == "all") & ((rows["rate"] == rate) | (rate is None))]
    return {seed: run.sort_values("step") for seed, run in rows.groupby("seed")}


def final(column: str) -> Measure:
    """Value of the last evaluation."""
    return lambda run: float(run[column].iloc[-1])


def over_evaluations(column: str) -> Measure:
    """Mean over the evaluations after training began."""
    return lambda run: float(run[run["step"] > 0][column].mean())


def per_step(column: str) -> Measure:
    """A cost of the run divided by its steps."""
    return lambda run: float(run[column].iloc[-1] / run["step"].iloc[-1])


ACCURACY, PASS_AT_16, SPEED = final("accuracy"), final("pass@16"), over_evaluations("accuracy")


def cost_to_reach(run: pd.DataFrame, column: str, target: float) -> float:
    """
    The cost at which a run first reached the accuracy `target`, linear between evaluations; infinite if it never did.
    """
    accuracy, spent = run["accuracy"].to_numpy(), run[column].to_numpy(dtype=float)
    reached = np.flatnonzero(accuracy >= target)
    if not len(reached):
        return math.inf
    i = reached[0]
    if i == 0:
        return float(spent[0])
    share = (target - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
    return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))


class Comparison:
    """
    Methods on one set of problems.

    Args:
        runs (`dict[str, Runs]`):
            Runs by method; methods without runs are left out.
        reference (`str`):
            Method that the others are compared with.
    """

    def __init__(self, runs: dict[str, Runs], reference: str):
        self.runs = {method: own for method, own in runs.items() if own}
        self.reference = reference

    def values(self, method: str, measure: Measure) -> dict[int, float]:
        return {seed: measure(run) for seed, run in self.runs.get(method, {}).items()}

    def mean(self, method: str, measure: Measure) -> Interval:
        return interval(list(self.values(method, measure).values()))

    def gains(self, method: str, measure: Measure, reference: str) -> list[float]:
        """Differences of the seeds that both methods have."""
        return paired(self.values(method, measure), self.values(reference, measure))

    def difference(self, method: str, measure: Measure, reference: str | None = None) -> Interval:
        return interval(self.gains(method, measure, reference or self.reference))

    def cell(self, method: str, measure: Measure, reference: str | None = None) -> str:
        """The mean, followed by the difference from the reference in brackets."""
        if method not in self.runs:
            return NO_VALUE
        mean, reference = f"{self.mean(method, measure).mean:.3f}", reference or self.reference
        return mean if method == reference else f"{mean} ({cell(self.difference(method, measure, reference))})"

    def words(
        self,
        method: str,
        measure: Measure,
        reference: str | None = None,
        words: tuple[str, str, str] = (BETTER, SAME, WORSE),
        digits: int = 3,
    ) -> str:
        """The difference in words, with its interval."""
        reference = reference or self.reference
        difference = self.difference(method, measure, reference)
        return f"{comparison(difference, words)} {names.short(reference)} ({difference.text(digits, sign=True)})"

    def change(self, method: str, column: str) -> Interval:
        """The last evaluation minus the one before training, paired by seed."""
        ends, start = (self.values(method, lambda run, i=i: float(run[column].iloc[i])) for i in (-1, 0))
        return interval(paired(ends, start))

    def share_of_tokens(self, method: str) -> str:
        """
        Generated tokens at the final accuracy of the same seed's run of the reference, as a fraction of that run's
        tokens. For the reference, which may have reached it before, a share of at most 1, without an interval.
        """
        shares = []
        for seed, other in self.runs[self.reference].items():
            if seed in self.runs[method]:
                spent = cost_to_reach(self.runs[method][seed], "generated_tokens", ACCURACY(other))
                shares.append(spent / final("generated_tokens")(other))
        missed = sum(map(math.isinf, shares))
        if missed:
            return f"not reached by {missed} of {len(shares)}"
        mean = interval(shares)
        return f"{mean.mean:.2f}" if method == self.reference else mean.text(2)

    def before_training(self, measure_column: str) -> float:
        """Mean at step 0 over seeds, because the seeds of the language model have different initial weights."""
        start = {seed: run.iloc[0][measure_column] for own in self.runs.values() for seed, run in own.items()}
        return float(np.mean(list(start.values())))

    def table(self, columns: dict[str, Callable[[str], str]], before: dict[str, str] | None = None) -> str:
        """
        A row per method.

        Args:
            columns (`dict`):
                Header: function of the method that formats its cell.
            before (`dict`, *optional*):
                Header: column of the evaluations, for a first row "before training".
        """
        rows = [{"Method": method} | {name: show(method) for name, show in columns.items()} for method in self.runs]
        if before:
            start = {name: f"{self.before_training(column):.3f}" for name, column in before.items()}
            rows.insert(0, {"Method": "before training"} | dict.fromkeys(columns, "") | start)
        return as_table(rows)


def as_table(rows: Iterable[dict[str, str]]) -> str:
    """Rows of text, whose keys are the headers."""
    rows = list(rows)
    return markdown(rows, {name: lambda row, name=name: row[name] for name in rows[0]})
