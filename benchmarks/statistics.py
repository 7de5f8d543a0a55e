"""
Statistics of comparisons over seeds, and the words that a comparison allows.

Every interval, bold cell and comparing sentence of the documents is made here,
so that no sentence is stronger than its test.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


MIN_SEEDS = 3  # of an interval: with two seeds it is too wide to be informative
ERROR = 0.05  # type I error of a comparison, and one minus the confidence of an interval
NO_VALUE = "–"
UNTESTED = "not tested against"
BETTER, SAME, WORSE = "significantly better than", "no significant difference from", "significantly worse than"
FASTER, AS_FAST, SLOWER = "learns faster than", "does not learn significantly faster than", "learns more slowly than"


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval, which is NaN for fewer than `MIN_SEEDS` seeds."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half  # False if NaN

    @property
    def is_higher(self) -> bool:
        return self.mean > self.half

    @property
    def is_lower(self) -> bool:
        return -self.mean > self.half

    def text(self, digits: int = 3, sign: bool = False) -> str:
        if math.isnan(self.mean):
            return NO_VALUE
        mean = round(self.mean, digits) + 0.0  # no "-0.000"
        text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
        return text if math.isnan(self.half) else f"{text}±{self.half:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and half the width of the t-interval, of one value per seed."""
    values = np.asarray(values, dtype=float)
    if len(values) < MIN_SEEDS:
        return Interval(float(values.mean()) if len(values) else math.nan, math.nan)
    quantile = stats.t.ppf(1 - ERROR / 2, len(values) - 1)
    return Interval(float(values.mean()), float(quantile * values.std(ddof=1) / math.sqrt(len(values))))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Differences of the common seeds, which share the order of the prompts."""
    return [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test; 1 if all differences are 0."""
    return float(stats.ttest_1samp(differences, 0).pvalue) if any(differences) else 1.0


def holm(p_values: Mapping[Any, float]) -> list:
    """
    The tests that are significant after Holm's correction: in the order of their p-values, up to the first one that is
    above `ERROR` divided by the number of tests that are left.
    """
    rejected = []
    for test in sorted(p_values, key=lambda test: p_values[test]):
        if p_values[test] > ERROR / (len(p_values) - len(rejected)):
            break
        rejected.append(test)
    return rejected


def comparison(difference: Interval, words: tuple[str, str, str] = (BETTER, SAME, WORSE)) -> str:
    """The strongest words that a difference allows: of `words` for better, no significant difference and worse."""
    if math.isnan(difference.half):
        return UNTESTED
    return words[0] if difference.is_higher else words[2] if difference.is_lower else words[1]


def cell(difference: Interval) -> str:
    """A difference in a table; bold if its interval excludes 0."""
    text = difference.text(sign=True)
    return f"**{text}**" if difference.excludes_zero else text
