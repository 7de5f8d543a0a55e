"""Results of the plan "Graded rewards" (benchmarks/README.md): its table, rule and decisions."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from . import names
from .common import load_rows
from .comparisons import ACCURACY, Comparison, as_table, by_seed
from .learning.graded_rewards import KINDS, WITHOUT_SUCCESS
from .learning.small_models import EXPERIMENTS
from .statistics import Interval, comparison, interval


STORED, FIRST_STEPS = "graded_rewards", "graded_first_steps"
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
CELLS = {(name, method) for method, own in EXPERIMENTS[STORED].items() for name in own.rates}
PART_B = {
    (name, method)
    for name, method in CELLS
    if method in (names.BATCH_SCALED, RETRIES) or name in [f"easy-{kind}" for kind in WITHOUT_SUCCESS]
}
PARTS = (CELLS - PART_B, PART_B)


def complete(rows: pd.DataFrame) -> dict[str, Comparison]:
    """The methods on each set, with the seeds of which all runs of their part are finished."""
    ends = rows[rows["step"] > 0]
    done = {(row.prompt_set, row.method, row.seed) for row in ends.itertuples()}
    seeds = {
        cell: {seed for seed in set(ends["seed"]) if all((*own, seed) in done for own in part)}
        for part in PARTS
        for cell in part
    }
    found = {}
    for name in (name for kind in TITLES for name in SETS[kind]):
        runs = {method: by_seed(rows, name, method) for method in EXPERIMENTS[STORED] if (name, method) in CELLS}
        for method, own in runs.items():
            runs[method] = {seed: run for seed, run in own.items() if seed in seeds[name, method]}
        if any(runs.values()):
            found[name] = Comparison(runs, names.GRPO_4)
    return found


def is_worse(difference: Interval) -> bool:
    return difference.excludes_zero and difference.mean < 0


def recommended(found: Mapping[str, Comparison], kind: str) -> str:
    """
    The method that the rule of the plan recommends for a kind of reward: the highest mean over its sets of those that are not significantly
    worse than GRPO n=4 on any of them.
    """
    sets = [found[name] for name in SETS[kind] if name in found]
    methods = [method for method in sets[0].runs if all(method in own.runs for own in sets)]
    allowed = [m for m in methods if not any(is_worse(own.difference(m, ACCURACY)) for own in sets)]
    return max(allowed, key=lambda method: sum(own.mean(method, ACCURACY).mean for own in sets))


def worse_sets(found: Mapping[str, Comparison], method: str) -> list[str]:
    """Sets with a reward that means the same on every prompt on which a method is significantly worse than GRPO n=4."""
    sets = [name for kind in SAME_MEANING for name in SETS[kind] if name in found]
    return [name for name in sets if is_worse(found[name].difference(method, ACCURACY))]


def pooled(found: Mapping[str, Comparison], method: str) -> Interval:
    """Difference from GRPO n=4 over all pairs of seed and set whose reward means the same on every prompt."""
    gains: list[float] = []
    for own in (found[name] for kind in SAME_MEANING for name in SETS[kind] if name in found):
        values, reference = (own.values(m, ACCURACY) for m in (method, names.GRPO_4))
        gains += [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    return interval(gains)


def block(rows: pd.DataFrame) -> str:
    """Table of accuracies, recommendations by kind of reward, and the decision on win rates."""
    found = complete(rows)
    lines, methods = [], list(EXPERIMENTS[STORED])
    for kind, title in TITLES.items():
        for name in (name for name in SETS[kind] if name in found):
            own = found[name]
            line = {"Reward": title, "Set": name.partition("-")[0], "Seeds": own.num_seeds(names.GRPO_4)}
            line["Before"] = f"{own.before_training('accuracy'):.3f}"
            lines.append(line | {method: own.cell(method, ACCURACY) for method in methods})
    sentences = [f"{TITLES[kind]}: {recommended(found, kind)}" for kind in TITLES if SETS[kind][0] in found]
    worse = worse_sets(found, names.WIN_RATES)
    decision = f"significantly worse than {names.GRPO_4} on {', '.join(worse)}" if worse else (
        f"not significantly worse than {names.GRPO_4} on any set whose reward means the same on every prompt"
    )
    sentences.append(f"Win rates are {decision}")
    for method in methods[1:]:
        sentences.append(f"Over all seeds and these sets, {method}: {comparison(pooled(found, method))} {names.GRPO_4} ({pooled(found, method).text(sign=True)})")
    return f"{as_table(lines)}\n\n" + "\n".join(f"- {sentence}." for sentence in sentences)
