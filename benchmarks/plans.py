"""Results of the plans of benchmarks/README.md (`learning.confirmation`): tables, endpoints and decisions."""

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from . import names
from .comparisons import ACCURACY, PASS_AT_16, SPEED, Comparison, Measure, as_table, by_seed, final, per_step
from .learning.confirmation import LOWER_RATE, PARTS, RATE, RETRIES, THIRD_PLAN, Part
from .learning.language_model import EST_EMA, LONGER_SUFFIX, PAPER_SUFFIX
from .learning.training import Run
from .statistics import AS_FAST, FASTER, SLOWER, Interval, cell, interval


RECOMMENDED = names.batch_retries(2)  # by the rule of the second plan
SPEED_WORDS = (FASTER, AS_FAST, SLOWER)
BEFORE = {"Accuracy": "accuracy", "pass@16": "pass@16"}


def rate_text(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def measures(found: Comparison) -> dict[str, Callable[[str], str]]:
    """Columns of a table: accuracy and pass@16."""
    return {
        "Accuracy, mean over evaluations": lambda m: found.cell(m, SPEED),
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
    }


def last_step(found: Comparison, method: str) -> int:
    return int(max(run["step"].iloc[-1] for run in found.runs[method].values()))


def plan_block(parts: Iterable[str], rows: pd.DataFrame, with_tables: bool = True) -> str:
    """The planned results, part by part; nothing of a part that is not finished."""
    return "\n\n".join(_part_block(name, PARTS[name], rows, with_tables) for name in parts)


def _part_block(name: str, part: Part, rows: pd.DataFrame, with_tables: bool) -> str:
    found = part_comparison(name, rows)
    if found is None:
        return f"*{name}*: not finished: {_finished_runs(part, rows)} of {len(part.runs)} runs."
    fewer = f" ({' and '.join(map(str, part.seeds_of_two))}: two methods only)" if part.seeds_of_two else ""
    text = (
        f"**{name}**, {part.steps} steps, seeds {part.seeds[0]} to {part.seeds[-1]}{fewer}. Differences are from "
        f"{found.reference}.\n\n"
    )
    columns = measures(found)
    rollouts = {method: f"{found.mean(method, per_step('rollouts')).mean:.0f}" for method in found.runs}
    if len(set(rollouts.values())) > 1:
        columns["Rollouts per step"] = lambda method: rollouts[method]
    table = f"{found.table(columns, BEFORE)}\n\n" if with_tables else ""
    return f"{text}{table}{CONCLUSIONS[name](found)}"


def _finished_runs(part: Part, rows: pd.DataFrame) -> int:
    finished = rows[(rows["family"] == "all") & (rows["step"] == part.steps)]
    done = {Run(*(getattr(row, field) for field in Run._fields)) for row in finished.itertuples()}
    return sum(run in done for run in part.runs)


def part_comparison(name: str, rows: pd.DataFrame) -> Comparison | None:
    """The methods of a part of the plan on its seeds; `None` before its last run."""
    part = PARTS[name]
    if _finished_runs(part, rows) < len(part.runs):
        return None
    methods = part.methods
    if name == "group size":  # its reference is in the first part, with the same base and seeds
        methods = [(names.GRPO_4, RATE), (names.BATCH, RATE), *methods]
    runs, every = {}, [method for method, _ in methods]
    for method, rate in methods:
        own = by_seed(rows, part.prompt_set, method, rate)
        label = _label(method, rate if every.count(method) > 1 else RATE)
        runs[label] = {seed: run for seed, run in own.items() if seed in part.seeds}
    lower = _label(names.GRPO_4, LOWER_RATE)
    found = Comparison(dict(sorted(runs.items())), names.GRPO_4)
    if lower in runs and found.mean(lower, SPEED).mean > found.mean(names.GRPO_4, SPEED).mean:
        found.reference = lower
    return found


def stored_part(name: str, rows: pd.DataFrame) -> Comparison:
    """A part whose runs are all stored."""
    found = part_comparison(name, rows)
    assert found is not None
    return found


def _label(method: str, rate: float) -> str:
    at_rate = f" at {rate_text(rate)}" if rate != RATE else ""
    return method.removesuffix(PAPER_SUFFIX).removesuffix(LONGER_SUFFIX) + at_rate


def endpoints(found: Comparison) -> str:
    """The two endpoints of the plan."""
    diversity, accuracy = found.difference(RETRIES, PASS_AT_16), found.difference(RETRIES, SPEED)
    holds = diversity.is_higher and accuracy.mean - accuracy.half > -0.01
    return (
        f"- (a) {names.BATCH} {found.words(names.BATCH, SPEED, words=SPEED_WORDS, digits=4)} in mean accuracy over "
        "the evaluations.\n"
        f"- (b) {'holds' if holds else 'does not hold'}: {RETRIES} against {found.reference}: pass@16 after the last "
        f"step {diversity.text(sign=True)}, mean accuracy over the evaluations {accuracy.text(4, sign=True)} "
        f"(lower bound {accuracy.mean - accuracy.half:+.4f}, required: above -0.01)."
    )


def both(found: Comparison, method: str, reference: str | None = None) -> str:
    """Accuracy and pass@16 after the last step in words."""
    accuracy, diversity = (found.words(method, measure, reference) for measure in (ACCURACY, PASS_AT_16))
    return f"accuracy: {accuracy}; pass@16: {diversity}"


def group_size_sentences(found: Comparison) -> str:
    """The baseline at equal prompts, and the number of distinct prompts with the same baseline."""
    pairs = ((names.BATCH_4, names.GRPO_4), (names.BATCH, names.BATCH_4))
    lines = []
    for title, (method, other) in zip(("The baseline", "The number of prompts"), pairs, strict=True):
        speed = found.words(method, SPEED, other, SPEED_WORDS, digits=4)
        lines.append(
            f"- {title}: {method} {speed} in mean accuracy; pass@16: {found.words(method, PASS_AT_16, other)}."
        )
    return "\n".join(lines)


def paper_sentences(found: Comparison) -> str:
    """The plan's criterion for another default."""
    small, paper = names.SMALL_ROUNDS, names.HYBRID  # rounds of 4, and the paper's
    accuracy, diversity = (found.difference(small, measure, paper) for measure in (SPEED, PASS_AT_16))
    rollouts = found.mean(small, per_step("rollouts")).mean / found.mean(paper, per_step("rollouts")).mean
    is_met = accuracy.mean >= -0.005 and diversity.mean >= -0.01 and rollouts < 1
    return (
        f"- The criterion for another default is {'met' if is_met else 'not met'}: {names.short(small)} against "
        f"{names.short(paper)}: mean accuracy over the evaluations {accuracy.text(4, sign=True)} (required: at least "
        f"-0.005), pass@16 {diversity.text(sign=True)} (at least -0.01), {rollouts:.2f} of its rollouts."
    )


def better_grpo(found: Comparison, measure: Measure) -> str:
    """GRPO n=4 or n=8, whichever has the higher mean over the seeds of both."""
    return names.GRPO_8 if found.difference(names.GRPO_8, measure, names.GRPO_4).mean > 0 else names.GRPO_4


def recommended_retries(found: Comparison) -> int | None:
    """The number of retries that the rule of the second plan recommends; `None` if it recommends no retries."""
    gains, allowed = {}, []
    for retries in (1, 2, 3):
        method = names.batch_retries(retries)
        diversity = found.difference(method, PASS_AT_16, better_grpo(found, PASS_AT_16))
        if diversity.is_higher:
            gains[retries] = found.difference(method, ACCURACY, better_grpo(found, ACCURACY)).mean
        if diversity.mean >= -0.01:
            allowed.append(retries)
    if gains:
        return max(gains, key=lambda retries: gains[retries])
    return min(allowed, default=None)


def against_better_grpo(found: Comparison, method: str) -> str:
    """Accuracy and pass@16 after the last step in words, each compared with the GRPO that is better in it."""
    accuracy, diversity = (found.words(method, m, better_grpo(found, m)) for m in (ACCURACY, PASS_AT_16))
    return f"accuracy: {accuracy}; pass@16: {diversity}"


def retries_sentences(found: Comparison) -> str:
    """The decision of the second plan's first part."""
    number = recommended_retries(found)
    decision = "no retries are" if number is None else f"{names.batch_retries(number)} is"
    return f"- By the rule of the second plan, {decision} recommended."


def end_gains(found: Comparison, method: str, reference: str | None = None) -> list[Interval]:
    """Accuracy and pass@16 after the last step, compared with the reference."""
    return [found.difference(method, measure, reference) for measure in (ACCURACY, PASS_AT_16)]


def is_better_in_one(differences: Sequence[Interval]) -> bool:
    """Whether one difference is significantly higher, and none is significantly lower."""
    return any(one.is_higher for one in differences) and not any(one.is_lower for one in differences)


def longer_answers_sentences(found: Comparison) -> str:
    """The decision of the second plan's second part, and the lengths of the completions."""
    is_lower = any(one.is_lower for one in end_gains(found, RETRIES))
    decision = (
        "retries are recommended for short answers only" if is_lower else "the recommendation names both lengths"
    )
    lengths = ", ".join(
        f"{method} {found.mean(method, final('completion_tokens')).mean:.1f} "
        f"({found.mean(method, final('truncated')).mean:.1%}; {found.mean(method, final('entropy')).mean:.2f})"
        for method in found.runs
    )
    return (
        f"- By the rule of the second plan, {decision}.\n"
        f"- Tokens per completion after the last step (truncated; entropy over all steps): {lengths}."
    )


def passes_sentences(found: Comparison) -> str:
    """The decisions of the second plan's third part."""
    retries = "a" if any(one.is_lower for one in end_gains(found, RETRIES)) else "no"
    is_named = is_better_in_one(end_gains(found, EST_EMA))
    return (
        f"- By the rule of the second plan, {retries} number of passes is named with retries, and Est (EMA) is "
        f"{'' if is_named else 'not '}named for several passes."
    )


def longer_run_sentences(found: Comparison) -> str:
    """The order of the methods after the steps of the other parts and at the end, and how often it changes."""

    def from_best(values: pd.Series) -> pd.Series:
        return values.sort_values(ascending=False, kind="stable")

    lines = []
    for name in ("accuracy", "pass@16"):
        curves = {
            (m, seed): run.set_index("step")[name] for m, runs in found.runs.items() for seed, run in runs.items()
        }
        by_step = pd.concat(curves, axis=1)  # (steps, methods and seeds)
        ends = {
            step: by_step.loc[step].unstack() for step in (PARTS["number of retries"].steps, PARTS["longer run"].steps)
        }
        orders = []
        for step, own in ends.items():
            means = [f"{method} ({value:.3f})" for method, value in from_best(own.mean(axis=1)).items()]
            orders.append(f"after {step} steps {', '.join(means)}")
        early, late = ends.values()  # (methods, seeds)
        changes = [list(from_best(early[seed]).index) != list(from_best(late[seed]).index) for seed in early]
        lines.append(
            f"- Order by {name}: {'; '.join(orders)}. It changes with {sum(changes)} of {len(changes)} seeds."
        )
    return "\n".join(lines)


def two_retries_sentences(found: Comparison) -> str:
    """The endpoints of the third plan on repeated problems and longer answers."""
    lines = [f"{RECOMMENDED}, {both(found, RECOMMENDED)}."]
    if RETRIES in found.runs:
        lines.append(f"{RECOMMENDED}, {both(found, RECOMMENDED, RETRIES)}.")
    return "\n".join(f"- {line}" for line in lines)


def second_family_sentences(found: Comparison) -> str:
    """The endpoints of the third plan with the second model family."""
    return "\n".join(f"- {method}, {against_better_grpo(found, method)}." for method in (RECOMMENDED, RETRIES))


def pooled_gain(parts: Iterable[Comparison], method: str, measure: Measure) -> Interval:
    """Difference from the better GRPO of each part, paired by seed, over the seeds of all parts with the method."""
    return interval([gain for found in parts for gain in found.gains(method, measure, better_grpo(found, measure))])


def retries_by_lower_bound(parts: Sequence[Comparison]) -> int | None:
    """
    The number of retries that the rule of the third plan recommends: the highest accuracy among those whose lower
    bound of pass@16 against the better GRPO is above -0.01; `None` if there is none.
    """
    gains = {}
    for retries in (1, 2, 3):
        diversity = pooled_gain(parts, names.batch_retries(retries), PASS_AT_16)
        if diversity.mean - diversity.half > -0.01:  # False if one of them is NaN
            gains[retries] = pooled_gain(parts, names.batch_retries(retries), ACCURACY).mean
    return max(gains, key=lambda retries: gains[retries], default=None)


def parts_by_model(rows: pd.DataFrame) -> dict[str, list[Comparison]]:
    """Finished parts with short answers, of each model and of both."""
    plans = {"SmolLM2": ("confirmation", "number of retries"), "Gemma": ("second model family",)}
    finished = {
        model: [found for name in parts if (found := part_comparison(name, rows)) is not None]
        for model, parts in plans.items()
    }
    finished = {model: parts for model, parts in finished.items() if parts}
    if len(finished) > 1:
        finished["both models"] = [found for parts in finished.values() for found in parts]
    return finished


def third_plan_block(rows: pd.DataFrame) -> str:
    """Parts of the third plan, and the number of retries by its rule."""
    table = []
    for model, parts in parts_by_model(rows).items():
        row = {"Model": model}
        for retries in (1, 2, 3):
            gains = [pooled_gain(parts, names.batch_retries(retries), measure) for measure in (ACCURACY, PASS_AT_16)]
            row[f"{retries} {'retry' if retries == 1 else 'retries'}"] = " and ".join(map(cell, gains))
        number = retries_by_lower_bound(parts)
        table.append(row | {"Recommended retries": "none" if number is None else str(number)})
    caption = (
        "*Accuracy and pass@16 against the better GRPO, with all seeds of the finished parts with short answers.*"
    )
    return f"{plan_block(THIRD_PLAN, rows)}\n\n{as_table(table)}\n\n{caption}"


CONCLUSIONS = {
    "confirmation": endpoints,
    "group size": group_size_sentences,
    "paper": paper_sentences,
    "number of retries": retries_sentences,
    "longer answers": longer_answers_sentences,
    "passes over the data": passes_sentences,
    "longer run": longer_run_sentences,
    "repeated problems": two_retries_sentences,
    "longer answers, 2 retries": two_retries_sentences,
    "second model family": second_family_sentences,
}
