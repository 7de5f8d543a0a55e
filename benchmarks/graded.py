"""Results of the plan "Graded rewards" (benchmarks/README.md): its table, rule and decisions."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from . import names
from .comparisons import ACCURACY, Comparison, as_table, by_seed
from .learning.graded_rewards import KINDS, WITHOUT_SUCCESS
from .learning.small_models import EXPERIMENTS
from .statistics import MIN_SEEDS, NO_VALUE, Interval, cell, interval


STORED = "graded_rewards"
METHODS = EXPERIMENTS[STORED]
RETRIES = names.batch_retries(2)
TITLES = {
    "digits": "fraction of right digits",
    "distance": "1 / (1 + abs(error))",
    "functions": "exact 1.0 and format 0.2",
    "length": "exact, minus 0.02 per character",
    "sorting": "sorting with partial credit",
    "error": "−abs(error) / 100",
    "offset": "exact, plus a level of the prompt",
}
SETS = {kind: (f"hard-{kind}", f"easy-{kind}") for kind in KINDS} | {"sorting": ("sorting-graded",)}
SAME_MEANING = ("digits", "distance", "functions", "length", "sorting", "error")
CELLS = {(name, method) for method, own in METHODS.items() for name in own.rates}
RETRIED = {(name, method) for name, method in CELLS if method == RETRIES}
SCALED = {(name, method) for name, method in CELLS if method == names.BATCH_SCALED}
EASY = {(name, method) for name, method in CELLS if name in [f"easy-{kind}" for kind in WITHOUT_SUCCESS]} - SCALED
PARTS = (CELLS - RETRIED - SCALED - EASY, RETRIED, SCALED, EASY)


def complete(rows: pd.DataFrame) -> dict[str, Comparison]:
    """The methods on each set, with the seeds of which all runs of their part are finished."""
    # Two methods that have lost a task have "significantly" different pass rates of 1e-14.
    rows = rows.assign(accuracy=rows["accuracy"].round(6))
    ends = rows[rows["step"] > 0]
    done = set(zip(ends["prompt_set"], ends["method"], ends["seed"], strict=True))
    seeds = {}
    for part in PARTS:
        finished = {seed for seed in set(ends["seed"]) if all((*cell, seed) in done for cell in part)}
        seeds |= dict.fromkeys(part, finished)
    found = {}
    for name in (name for kind in TITLES for name in SETS[kind]):
        runs = {}
        for method in (method for method in METHODS if (name, method) in CELLS):
            own = by_seed(rows, name, method)
            runs[method] = {seed: run for seed, run in own.items() if seed in seeds[name, method]}
        if any(runs.values()):
            found[name] = Comparison(runs, names.GRPO_4)
    return found


def recommended(found: Mapping[str, Comparison], kind: str) -> str | None:
    """
    The method that the rule of the plan recommends for a kind of reward: the highest mean over its sets among those
    that are not significantly worse than GRPO n=4 on any of them. As methods may have different seeds, means are
    compared through the differences from GRPO n=4 with the same seeds. `None` if there are too few seeds for a test.
    """
    sets = [found[name] for name in SETS[kind] if name in found]
    gains = {}
    for method in METHODS:
        differences = [own.difference(method, ACCURACY) for own in sets]
        if not any(np.isnan(one.half) or one.is_lower for one in differences):
            gains[method] = sum(one.mean for one in differences)
    return max(gains, key=lambda method: gains[method], default=None)


def with_same_meaning(found: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """The sets with a reward that means the same on every prompt."""
    return {name: found[name] for kind in SAME_MEANING for name in SETS[kind] if name in found}


def pooled(found: Mapping[str, Comparison], method: str) -> Interval:
    """Difference from GRPO n=4 over all pairs of a seed and a set whose reward means the same on every prompt."""
    comparisons = with_same_meaning(found).values()
    return interval([gain for own in comparisons for gain in own.gains(method, ACCURACY, names.GRPO_4)])


def decision(found: Mapping[str, Comparison]) -> str:
    """Whether win rates become a value of `scale_rewards`, by the rule of the plan."""
    own = [one.difference(names.WIN_RATES, ACCURACY) for one in with_same_meaning(found).values()]
    if any(np.isnan(one.half) for one in own):
        return "it is not decided yet whether win rates become"
    is_lower = any(one.is_lower for one in [*own, pooled(found, names.WIN_RATES)])
    return f"win rates {'do not become' if is_lower else 'become'}"


SHORT = {method: method.removeprefix(f"{names.BATCH}, ") for method in METHODS} | {names.BATCH: "batch baseline"}


def block(rows: pd.DataFrame) -> str:
    """Table of accuracies with the recommendation for each kind of reward, and the decision on win rates."""
    found = complete(rows)
    # With fewer seeds there is no test.
    methods = [m for m in METHODS if any(len(own.runs.get(m, {})) >= MIN_SEEDS for own in found.values())]
    if not methods:
        return "*Not finished.*"
    lines = []
    for kind in TITLES:
        sets = [name for name in SETS[kind] if name in found]
        for name in sets:
            own, is_first = found[name], name == sets[0]
            line = {"Reward": TITLES[kind] if is_first else ""}
            line["Set (before)"] = f"{name.partition('-')[0]} ({own.before_training('accuracy'):.3f})"
            line |= {SHORT[method]: own.cell(method, ACCURACY) for method in methods}
            lines.append(line | {"By the rule": SHORT.get(recommended(found, kind), NO_VALUE) if is_first else ""})
    gains = {SHORT[method]: cell(pooled(found, method)) for method in methods if method != names.GRPO_4}
    lines.append(dict.fromkeys(lines[0], "") | {"Reward": "all but the last, pooled"} | gains)
    sentences = []
    if RETRIES in methods:
        retried = [own for own in found.values() if RETRIES in own.runs]
        same = sum(not own.difference(RETRIES, ACCURACY, names.BATCH).excludes_zero for own in retried)
        sentences.append(f"No significant difference between 2 retries and none on {same} of {len(retried)} sets")
    sentences.append(f"By the rule, {decision(found)} a value of `scale_rewards`")
    return f"{as_table(lines)}\n\n" + "\n".join(f"- {sentence}." for sentence in sentences)
