"""Cells, tables and sentences of the report."""

import math

import pandas as pd

from .. import names
from ..common import markdown
from .statistics import before_training, cost_to_reach, final, mean_of, of_methods, paired_difference


NO_VALUE, NOT_REACHED = "–", "not reached"
MIN_SEEDS = 3  # of an interval: with two seeds it is too wide to be informative
BETTER, SAME, WORSE = "significantly better than", "no significant difference from", "significantly worse than"


def show(mean_and_half: tuple[float, float], digits: int = 3, sign: bool = False) -> str:
    """A mean, with its interval unless that is NaN."""
    mean, half = mean_and_half
    if math.isnan(mean):
        return NO_VALUE
    mean = round(mean, digits) + 0.0  # no "-0.000"
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def against(own: dict[int, float], other: dict[int, float]) -> str:
    """Paired difference, with its interval from `MIN_SEEDS` common seeds on; bold if the interval excludes 0."""
    mean, half = paired_difference(own, other)
    if len(own.keys() & other.keys()) < MIN_SEEDS:
        return show((mean, math.nan), sign=True)
    text = show((mean, half), sign=True)
    return f"**{text}**" if abs(mean) > half else text


def with_difference(own: dict[int, float], reference: dict[int, float], is_compared: bool) -> str:
    """The mean, followed by the difference from `reference` in brackets if the method is compared with it."""
    if not own:
        return NO_VALUE
    return f"{mean_of(own)[0]:.3f}" + (f" ({against(own, reference)})" if is_compared else "")


def comparison(mean: float, half: float) -> str:
    """A paired difference, whose 95% interval is ± `half`, in words."""
    return SAME if not abs(mean) > half else BETTER if mean > 0 else WORSE


def as_table(rows: list[dict[str, str]]) -> str:
    """Rows of text, whose keys are the headers."""
    return markdown(rows, {name: lambda row, name=name: row[name] for name in rows[0]})


def share_to_reach(runs: dict[int, pd.DataFrame], reference: dict[int, pd.DataFrame]) -> str:
    """Generated tokens at the reference's mean final accuracy, as a multiple of the reference's; the median over seeds."""
    if not reference:
        return NO_VALUE
    target = mean_of(final(reference))[0]
    spent = mean_of(final(reference, "generated_tokens"))[0]
    costs = sorted(cost_to_reach(run, "generated_tokens", target) for run in runs.values())
    median = costs[len(costs) // 2]  # the larger one of the middle two for an even number of seeds
    return NOT_REACHED if math.isinf(median) else f"{median / spent:.2f}×"


def start_row(evaluations: pd.DataFrame, prompt_set: str, columns: dict[str, str]) -> dict[str, str]:
    """The row "before training" of a table; `columns` maps a header to a column of the evaluations."""
    before = before_training(evaluations, prompt_set)
    return {"Method": "before training"} | {label: show((before[name], math.nan)) for label, name in columns.items()}


def pass_table(evaluations: pd.DataFrame, prompt_set: str, ks, methods) -> str:
    """pass@k and entropy before and after training."""
    columns = [f"pass@{k}" for k in ks] + ["entropy"]
    rows = [start_row(evaluations, prompt_set, {name: name for name in columns})]
    for method, runs in of_methods(evaluations, prompt_set, methods).items():
        if len(runs) >= MIN_SEEDS:
            rows.append({"Method": method} | {name: show(mean_of(final(runs, name))) for name in columns})
    return as_table(rows)


REFERENCE, STRONG_REFERENCE = (
    names.GRPO_4,
    names.GRPO_8,
)  # every method is compared with the first, many with the second
