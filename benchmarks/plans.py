"""Results of the plans of benchmarks/README.md (`learning.confirmation`): tables, endpoints and decisions."""

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from . import names
from .comparisons import ACCURACY, PASS_AT_16, SPEED, Comparison, Measure, as_table, by_seed, final, per_step
from .learning.confirmation import LOWER_RATE, PARTS, PROMPT_SET, RATE, RETRIES, SECOND_PLAN, THIRD_PLAN, Part
from .learning.language_model import (
    CUT_SET,
    CUT_SIZE,
    EST_EMA,
    LONG_SET,
    LONGER_SUFFIX,
    PAPER_SUFFIX,
    PROMPTS_PER_STEP,
    ROLLOUTS_PER_STEP,
    SMALL_ROUNDS_3_PROMPTS,
)
from .learning.training import Run
from .statistics import AS_FAST, FASTER, NO_VALUE, SLOWER, Interval, cell, comparison, interval


MODEL = "SmolLM2-135M-Instruct with LoRA"
COMMAND = "benchmarks.learning.confirmation"
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


def plan_block(parts: Iterable[str], rows: pd.DataFrame) -> str:
    """The planned results, part by part; nothing of a part that is not finished."""
    return "\n\n".join(_part_block(name, PARTS[name], rows) for name in parts)


def _part_block(name: str, part: Part, rows: pd.DataFrame) -> str:
    found = part_comparison(name, rows)
    if found is None:
        return f"*{name}*: not finished: {_finished_runs(part, rows)} of {len(part.runs)} runs."
    text = f"**{name}**, {part.steps} steps, seeds {part.seeds[0]} to {part.seeds[-1]}. Differences are from {found.reference}.\n\n"
    labels = {_label(method, rate): method for method, rate in part.methods}
    commands = {}
    for label, method in labels.items():
        methods = " ".join(f'"{one}"' for one in dict.fromkeys((labels.get(found.reference, method), method)))
        commands[label] = f'`python -m {COMMAND} --parts "{name}" --methods {methods}`'
    columns = measures(found)
    columns["Rollouts per step"] = lambda m: f"{found.mean(m, per_step('rollouts')).mean:.0f}"
    columns |= costs(found) | {"Command": lambda m: commands.get(m, "")}
    return f"{text}{found.table(columns, BEFORE)}\n\n{CONCLUSIONS[name](found)}"


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
    runs = {}
    for method, rate in methods:
        own = by_seed(rows, part.prompt_set, method, rate)
        runs[_label(method, rate)] = {seed: run for seed, run in own.items() if seed in part.seeds}
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


def costs(found: Comparison) -> dict[str, Callable[[str], str]]:
    """Columns of a table: tokens and time."""
    return {
        "Tokens": lambda m: f"{found.mean(m, final('generated_tokens')).mean / 1e3:.0f}k",
        f"Tokens to the accuracy of {found.reference}": found.share_of_tokens,
        "Time of a run": lambda m: time_by_device(list(found.runs[m].values())),
    }


def time_by_device(runs: list[pd.DataFrame]) -> str:
    """Mean time of the training steps, per device."""
    ends = pd.DataFrame([run.iloc[-1] for run in runs])
    texts = []
    for device, own in ends.groupby("device"):
        minutes = own["cpu_seconds"].mean() / 60
        texts.append(f"CPU core {minutes:.0f} min" if device == "CPU" else f"{device} {minutes:.1f} min")
    return ", ".join(texts)


def _label(method: str, rate: float) -> str:
    return method.removesuffix(PAPER_SUFFIX).removesuffix(LONGER_SUFFIX) + (
        f" at {rate_text(rate)}" if rate != RATE else ""
    )


def endpoints(found: Comparison) -> str:
    """The two endpoints of the plan."""
    diversity, accuracy = found.difference(RETRIES, PASS_AT_16), found.difference(RETRIES, SPEED)
    is_higher = diversity.excludes_zero and diversity.mean > 0
    holds = is_higher and accuracy.mean - accuracy.half > -0.01
    return (
        f"- (a) {names.BATCH} {found.words(names.BATCH, SPEED, words=SPEED_WORDS, digits=4)} in mean accuracy over the "
        f"evaluations.\n"
        f"- (b) {'holds' if holds else 'does not hold'}: {RETRIES} against {found.reference}: pass@16 after the last step "
        f"{diversity.text(sign=True)}, mean accuracy over the evaluations {accuracy.text(4, sign=True)} (lower bound "
        f"{accuracy.mean - accuracy.half:+.4f}, required: above -0.01)."
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
    """The adaptive methods against GRPO at one rate and equal steps, and the plan's criterion for another default."""
    small, paper = names.SMALL_ROUNDS, names.HYBRID  # rounds of 4, and the paper's
    lines = [f"- {names.short(m)}, {both(found, m)}." for m in (names.ALGORITHM_2, paper, small)]
    accuracy, diversity = (found.difference(small, measure, paper) for measure in (SPEED, PASS_AT_16))
    rollouts = found.mean(small, per_step("rollouts")).mean / found.mean(paper, per_step("rollouts")).mean
    is_met = accuracy.mean >= -0.005 and diversity.mean >= -0.01 and rollouts < 1
    lines.append(
        f"- The criterion for another default is {'met' if is_met else 'not met'}: {names.short(small)} against "
        f"{names.short(paper)}: mean accuracy over the evaluations {accuracy.text(4, sign=True)} (required: at least -0.005), "
        f"pass@16 {diversity.text(sign=True)} (at least -0.01), {rollouts:.2f} of its rollouts."
    )
    return "\n".join(lines)


def better_grpo(found: Comparison, measure: Measure) -> str:
    """GRPO n=4 or n=8, whichever has the higher mean."""
    return max((names.GRPO_4, names.GRPO_8), key=lambda method: found.mean(method, measure).mean)


def recommended_retries(found: Comparison) -> int | None:
    """The number of retries that the rule of the second plan recommends; `None` if it recommends no retries."""
    gains, allowed = {}, []
    for retries in (1, 2, 3):
        method = names.batch_retries(retries)
        diversity = found.difference(method, PASS_AT_16, better_grpo(found, PASS_AT_16))
        if diversity.excludes_zero and diversity.mean > 0:
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
    """The endpoints of the second plan's first part, and its decision."""
    methods = [names.batch_retries(retries) for retries in (1, 2, 3)]
    lines = [f"{method}, {against_better_grpo(found, method)}." for method in methods]
    number = recommended_retries(found)
    decision = "no retries are" if number is None else f"{names.batch_retries(number)} is"
    return "\n".join(f"- {line}" for line in [*lines, f"By the rule of the second plan, {decision} recommended."])


def differs(found: Comparison, method: str, sign: int) -> bool:
    """Whether accuracy or pass@16 is significantly higher (`sign` 1) or lower (-1) than that of the reference."""
    differences = (found.difference(method, measure) for measure in (ACCURACY, PASS_AT_16))
    return any(one.excludes_zero and sign * one.mean > 0 for one in differences)


def longer_answers_sentences(found: Comparison) -> str:
    """The endpoints of the second plan's second part, its decision, and the lengths of the completions."""
    is_lower = differs(found, RETRIES, -1)
    decision = (
        "retries are recommended for short answers only" if is_lower else "the recommendation names both lengths"
    )
    lines = [f"- {method}, {both(found, method)}." for method in (RETRIES, names.BATCH)]
    lines.append(f"- By the rule of the second plan, {decision}.")
    lengths = ", ".join(
        f"{method} {found.mean(method, final('completion_tokens')).mean:.1f} "
        f"({found.mean(method, final('truncated')).mean:.1%}; {found.mean(method, final('entropy')).mean:.2f})"
        for method in found.runs
    )
    return "\n".join(
        [*lines, f"- Tokens per completion after the last step (truncated; entropy over all steps): {lengths}."]
    )


def passes_sentences(found: Comparison) -> str:
    """The endpoints of the second plan's third part, and its decisions."""
    methods = (RETRIES, names.BATCH, SMALL_ROUNDS_3_PROMPTS, EST_EMA)
    retries = (
        "a number of passes is named with retries"
        if differs(found, RETRIES, -1)
        else "no number of passes is named with retries"
    )
    is_named = differs(found, EST_EMA, 1) and not differs(found, EST_EMA, -1)
    decision = f"{retries}, and Est (EMA) is {'' if is_named else 'not '}named for several passes"
    lines = [
        *(f"{method}, {both(found, method)}" for method in methods),
        f"By the rule of the second plan, {decision}",
    ]
    return "\n".join(f"- {line}." for line in lines)


def longer_run_sentences(found: Comparison) -> str:
    """The order of the methods after the steps of the other parts and after the last one, and with how many seeds it changes."""

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
    gains: list[float] = []
    for found in parts:
        values, reference = (found.values(m, measure) for m in (method, better_grpo(found, measure)))
        gains += [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    return interval(gains)


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


def third_plan_block(rows: pd.DataFrame) -> str:
    """Parts of the third plan, and the number of retries by its rule, for each model and for both."""
    plans = {"SmolLM2": ("confirmation", "number of retries"), "Gemma": ("second model family",)}
    finished = {
        model: [found for name in parts if (found := part_comparison(name, rows)) is not None]
        for model, parts in plans.items()
    }
    finished = {model: parts for model, parts in finished.items() if parts}
    if len(finished) > 1:
        finished["both models"] = [found for parts in finished.values() for found in parts]
    table = []
    for model, parts in finished.items():
        row = {"Model": model}
        for retries in (1, 2, 3):
            gains = [pooled_gain(parts, names.batch_retries(retries), measure) for measure in (ACCURACY, PASS_AT_16)]
            row[f"{retries} {'retry' if retries == 1 else 'retries'}"] = " and ".join(map(cell, gains))
        number = retries_by_lower_bound(parts)
        table.append(row | {"Recommended retries": "none" if number is None else str(number)})
    caption = (
        "*Accuracy and pass@16 against the better GRPO of each part, over all seeds of the finished parts with short "
        "answers, and the number of retries by the rule of the third plan.*"
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


# The README, docs/settings.md, docs/tuning.md

CHOICES = (names.GRPO_4, names.GRPO_8, names.BATCH)
TASKS = {PROMPT_SET: "short answers", CUT_SET: "1,024 problems with short answers", LONG_SET: "longer answers"}


def choices(parts: Iterable[str], rows: pd.DataFrame) -> str:
    """Results and costs of the methods to choose from, of the finished parts."""
    lines = []
    for name in parts:
        found = part_comparison(name, rows)
        if found is None:
            continue
        part = PARTS[name]
        start = ", ".join(f"{found.before_training(column):.3f}" for column in BEFORE.values())
        about = f"{TASKS[part.prompt_set]}, {part.steps} steps, {len(part.seeds)} seeds (before training: {start})"
        # In parts without the recommended number of retries, the one that was recommended before.
        with_retries = RECOMMENDED if RECOMMENDED in found.runs else RETRIES
        for method in (method for method in (*CHOICES, with_retries) if method in found.runs):
            cells = {"Accuracy": found.cell(method, ACCURACY), "pass@16": found.cell(method, PASS_AT_16)}
            cells |= {header: show(method) for header, show in costs(found).items()}
            lines.append({"Task": about, "Method": method} | cells)
            about = ""  # once per task
    return as_table(lines)


def readme_results(rows: pd.DataFrame) -> str:
    """Table, caption and list of the README."""
    parts = ("confirmation", "group size", "number of retries", "longer answers", "passes over the data")
    first, sizes, found, longer, passes = (stored_part(name, rows) for name in parts)
    caption = (
        f"*Equal tokens: {MODEL} after supervised training on solved problems, 64 rollouts per step at learning "
        f"rate {rate_text(RATE)}; methods, seeds and endpoints were [fixed before the runs](docs/benchmarks.md#second-plan). n: rollouts "
        "per prompt. Retry: an unsolved prompt is sampled again in a later step ([other numbers](docs/tuning.md#retries)). In "
        "parentheses: accuracy and pass@16 (at least one of 16 rollouts is correct) before training, or the difference from the task's "
        f"{found.reference}, paired by seed, with 95% interval (bold: excludes 0), not corrected for the number of comparisons. "
        f"Tokens to the accuracy of {found.reference}: as a fraction of the tokens of the same seed's {found.reference} "
        "([definition](docs/benchmarks.md#results-of-the-plan)), not an endpoint. Time: of the training steps. [All methods and "
        "commands](docs/benchmarks.md#results-of-the-second-plan).*"
    )
    speed = sizes.words(names.BATCH_4, SPEED, names.GRPO_4, SPEED_WORDS, digits=4)
    sentences = [
        f"Short answers, compared with the better GRPO in each metric: {_number_of_retries(RECOMMENDED)} (recommended [by the rule of "
        f"the plan](docs/benchmarks.md#second-plan)), {against_better_grpo(found, RECOMMENDED)}; it "
        f"{end_of_training(found, RECOMMENDED)}.",
        with_longer_answers(longer),
        with_passes(passes),
        "In the [first plan](docs/benchmarks.md#results-of-the-plan) (the same model with other supervised training and problems), "
        f"{_number_of_retries(names.BATCH)}, {both(first, names.BATCH)}. With as many prompts as {names.GRPO_4}, the batch baseline "
        f"{speed} in mean accuracy over the evaluations.",
    ]
    lines = "\n".join(f"- {sentence}" for sentence in sentences)
    return f"{choices(SECOND_PLAN, rows)}\n\n{caption}\n\n{lines}"


def end_of_training(found: Comparison, method: str) -> str:
    """pass@16 after training compared with that before, in words."""
    end, start = found.mean(method, PASS_AT_16).mean, found.before_training("pass@16")
    side, change = "below" if end < start else "above", found.change(method, "pass@16")
    return (
        f"ends {side} that before training, at {end:.3f} instead of {start:.3f} ({comparison(change)} it: "
        f"{change.text(sign=True)})"
    )


def _number_of_retries(method: str) -> str:
    return method.removeprefix(f"{names.BATCH}, ") if method != names.BATCH else "no retries"


def with_longer_answers(found: Comparison) -> str:
    """The endpoints of the second plan's second part in one sentence."""
    about = f"{found.mean(RETRIES, final('completion_tokens')).mean:.0f} tokens on average, {last_step(found, RETRIES)} steps"
    return _sentence("Longer answers", about, found)


def with_passes(found: Comparison) -> str:
    """The endpoints of the second plan's third part in one sentence."""
    steps = last_step(found, RETRIES)
    visits = [prompts * steps / CUT_SIZE for prompts in (PROMPTS_PER_STEP[names.GRPO_4], ROLLOUTS_PER_STEP)]
    about = f"{steps} steps, in which {names.GRPO_4} samples each {visits[0]:.1f} times and one rollout {visits[1]:.1f} times"
    return _sentence(f"{CUT_SIZE:,} problems with short answers", about, found)


def _sentence(title: str, about: str, found: Comparison) -> str:
    """Retries and one rollout against the reference, without the numbers of README's table."""
    results = "; ".join(
        f"{_number_of_retries(method)}, {in_short(found, method)}" for method in (RETRIES, names.BATCH)
    )
    if RECOMMENDED not in found.runs:
        about += f"; {_number_of_retries(RECOMMENDED)} were not run"
    return f"{title} ({about}): {results}."


def in_short(found: Comparison, method: str) -> str:
    """Accuracy and pass@16 after the last step compared with the reference, without numbers."""
    accuracy, diversity = (comparison(found.difference(method, measure)) for measure in (ACCURACY, PASS_AT_16))
    return f"accuracy: {accuracy} {found.reference}; pass@16: {diversity} it"


def retries_table(first: Comparison, second: Comparison, longer: Comparison, passes: Comparison) -> str:
    """docs/tuning.md: the gains of both plans with every number of retries, and without."""
    columns = {
        "Short answers": second,
        "Short answers, first plan": first,
        f"{CUT_SIZE:,} problems": passes,
        f"Longer answers, {last_step(longer, RETRIES)} steps": longer,
    }
    rows = []
    for retries in (0, 1, 2, 3, 7):
        method = names.batch_retries(retries)
        row = {"`retries`": str(retries)}
        for title, found in columns.items():
            gains = [cell(found.difference(method, measure)) for measure in (ACCURACY, PASS_AT_16)]
            row[title] = " and ".join(gains) if method in found.runs else NO_VALUE
        rows.append(row)
    return (
        f"{as_table(rows)}\n\n*Accuracy and pass@16 minus those of {second.reference} at equal tokens, with 95% intervals (bold: "
        "excludes 0); [second plan](benchmarks.md#results-of-the-second-plan), if not the [first "
        f"plan](benchmarks.md#results-of-the-plan). In this, pass@16 without retries {end_of_training(first, names.BATCH)}.*"
    )


def recommendation(found: Comparison) -> str:
    """docs/settings.md: the recommended mode compared with GRPO."""
    return (
        f"On the language model, at equal tokens and after the last step, {against_better_grpo(found, RECOMMENDED)} "
        "([plan](benchmarks.md#results-of-the-second-plan)). Longer answers, other numbers of retries: "
        "[results](../README.md#results), [tuning](tuning.md#retries)."
    )
