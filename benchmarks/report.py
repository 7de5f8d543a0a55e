"""
Tables, sentences and figures of learning results in the documents: `python -m benchmarks.report`.

Everything is generated from the stored results: the places `<!-- name -->` of the documents that [`blocks`] names.
"""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from . import figures, names
from .common import FIGURES, README, RESULTS, ROOT, fill
from .comparisons import (
    ACCURACY,
    PASS_AT_16,
    SPEED,
    Comparison,
    Measure,
    as_table,
    by_seed,
    final,
    load,
    per_step,
)
from .gpu import fast, right
from .learning.confirmation import LOWER_RATE, PARTS, RETRIES, SECOND_PLAN, STORED, STORED_ON_CPU, Part
from .learning.confirmation import RATE as PLANNED_RATE
from .learning.language_model import (
    CUT_SET,
    EST_EMA,
    HYBRID_3_PROMPTS,
    LONG_SET,
    LONGER_SUFFIX,
    PAPER,
    PAPER_SUFFIX,
    RATE,
    RATES,
    SMALL_ROUNDS_3_PROMPTS,
)
from .learning.small_models import AHEAD, EXPERIMENTS, SETS
from .learning.training import Run
from .statistics import AS_FAST, FASTER, SLOWER, comparison


DOCS = ROOT / "docs"
MAIN_SET, HARD_SET = "mixture", "hard"
SELECTION_SEED = 9  # used only to choose learning rates; the chosen rates are reported with other seeds
CHOSEN_RATE = 1e-4
EARLIER_LOOKS = (3,)  # on the language model, comparisons were looked at with three seeds before more were added
MODEL = "SmolLM2-135M-Instruct with LoRA"
COMMAND = "benchmarks.learning.confirmation"
SPEED_WORDS = (FASTER, AS_FAST, SLOWER)
TITLES = {"sorting-graded": "Graded sorting"}
BEFORE = {"Accuracy": "accuracy", "pass@16": "pass@16"}


def rate_text(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def compare(
    evaluations: pd.DataFrame, prompt_set: str, methods, looks=(), reference: str = names.GRPO_4
) -> Comparison:
    return Comparison({m: by_seed(evaluations, prompt_set, m) for m in methods}, reference, looks)


def measures(found: Comparison) -> dict[str, Callable[[str], str]]:
    """Columns of a table: accuracy and pass@16."""
    return {
        "Accuracy, mean over evaluations": lambda m: found.cell(m, SPEED),
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
    }


# Both plans of docs/benchmarks.md


def plan_block(parts: Iterable[str], rows: pd.DataFrame) -> str:
    """The planned results, part by part; nothing of a part that is not finished."""
    return "\n\n".join(_part_block(name, PARTS[name], rows) for name in parts)


def _part_block(name: str, part: Part, rows: pd.DataFrame) -> str:
    found = part_comparison(name, rows)
    if found is None:
        return f"*{name}*: not finished: {_finished_runs(part, rows)} of {len(part.runs)} runs."
    text = f"**{name}**, {part.steps} steps, seeds {part.seeds[0]} to {part.seeds[-1]}. Differences are from {found.reference}.\n\n"
    commands = {
        _label(method, rate): f'`python -m {COMMAND} --parts "{name}" --methods "{method}"`'
        for method, rate in part.methods
    }
    columns = measures(found) | {
        "Rollouts per step": lambda m: f"{found.mean(m, per_step('rollouts')).mean:.0f}",
        "Tokens": lambda m: tokens(found, m),
        "Time of a run": lambda m: time_by_device(list(found.runs[m].values())),
        "Command": lambda m: commands.get(m, ""),
    }
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
        methods = [(names.GRPO_4, PLANNED_RATE), (names.BATCH, PLANNED_RATE), *methods]
    runs = {}
    for method, rate in methods:
        own = by_seed(rows, part.prompt_set, method, rate)
        runs[_label(method, rate)] = {seed: run for seed, run in own.items() if seed in part.seeds}
    lower = _label(names.GRPO_4, LOWER_RATE)
    found = Comparison(dict(sorted(runs.items())), names.GRPO_4)
    if lower in runs and found.mean(lower, SPEED).mean > found.mean(names.GRPO_4, SPEED).mean:
        found.reference = lower
    return found


def confirmation() -> Comparison:
    """The first part of the plan, whose runs are all stored."""
    found = part_comparison("confirmation", load(STORED))
    assert found is not None
    return found


CHOICES = (
    names.GRPO_4,
    f"{names.GRPO_4} at {rate_text(LOWER_RATE)}",
    names.GRPO_8,
    names.BATCH,
    *(names.batch_retries(retries) for retries in (1, 2, 3)),
)
TASKS = {MAIN_SET: "short answers", CUT_SET: "1,024 problems with short answers", LONG_SET: "answers with steps"}


def choices(parts: Iterable[str], rows: pd.DataFrame) -> str:
    """Results and costs of the methods to choose from, of the finished parts."""
    lines = []
    for name in parts:
        found = part_comparison(name, rows)
        if found is None:
            continue
        part = PARTS[name]
        about = {"Task": f"{TASKS[part.prompt_set]}, {part.steps} steps, {len(part.seeds)} seeds"}
        start = {f"{header}": f"{found.before_training(column):.3f}" for header, column in BEFORE.items()}
        lines.append(about | {"Method": "before training"} | start)
        for method in (method for method in CHOICES if method in found.runs):
            cells = {"Accuracy": found.cell(method, ACCURACY), "pass@16": found.cell(method, PASS_AT_16)}
            cells |= {
                "Tokens": tokens(found, method),
                "Time of a run": time_by_device(list(found.runs[method].values())),
            }
            lines.append(about | {"Method": method} | cells)
    headers = dict.fromkeys(header for line in lines for header in line)
    return as_table([{header: line.get(header, "") for header in headers} for line in lines])


def tokens(found: Comparison, method: str) -> str:
    return f"{found.mean(method, final('generated_tokens')).mean / 1e3:.0f}k"


def time_by_device(runs: list[pd.DataFrame]) -> str:
    """Mean time of the training steps, per device."""
    ends = pd.DataFrame([run.iloc[-1] for run in runs])
    texts = []
    for device, own in ends.groupby("device"):
        seconds = own["cpu_seconds"].mean()
        texts.append(f"CPU core {seconds / 3600:.1f} h" if device == "CPU" else f"{device} {seconds / 60:.1f} min")
    return ", ".join(texts)


def readme_results(found: Comparison, rows: pd.DataFrame) -> str:
    """Table, caption and sentences of the README."""
    caption = (
        f"*Equal tokens: {MODEL}, 64 rollouts per step at learning rate {rate_text(PLANNED_RATE)} if no other is given; methods, seeds "
        "and endpoints were [fixed before the runs](docs/benchmarks.md#plan). n: rollouts per prompt. Retry: an unsolved prompt is sampled "
        "again in a later step. pass@16: at least one of 16 rollouts is correct. In parentheses: difference from the task's "
        f"{found.reference}, paired by seed, with 95% interval (bold: excludes 0), not corrected for the number of comparisons. Time: of "
        "the training steps; 16 runs share a GPU. [All methods and commands](docs/benchmarks.md#results-of-the-plan).*"
    )
    sizes = part_comparison("group size", rows)
    sentences = [
        f"{title}, the batch baseline {found.words(method, SPEED, words=SPEED_WORDS, digits=4)} in mean accuracy over the "
        f"evaluations; its pass@16 {end_of_training(found, method)}, {found.words(method, PASS_AT_16)}."
        for title, method in (("Without retries", names.BATCH), ("With 3 retries", RETRIES))
    ]
    if sizes is not None:
        sentences.append(prompts_sentence(sizes))
    numbers = part_comparison("number of retries", rows)
    if numbers is not None:
        sentences.append(retries_sentences(numbers).splitlines()[-1].removeprefix("- "))
    return f"{choices(('confirmation', *SECOND_PLAN), rows)}\n\n{caption}\n\n{' '.join(sentences)}"


def end_of_training(found: Comparison, method: str) -> str:
    """pass@16 after training compared with that before, in words."""
    end, start = found.mean(method, PASS_AT_16).mean, found.before_training("pass@16")
    side, change = "below" if end < start else "above", found.change(method, "pass@16")
    return (
        f"ends {side} that of the untrained model, at {end:.3f} instead of {start:.3f} ({comparison(change)} it: "
        f"{change.text(sign=True)})"
    )


def retries_and_none(found: Comparison) -> str:
    """docs/tuning.md: the gains with every number of retries, and without."""
    texts = []
    for method in (method for method in found.runs if method.startswith(names.BATCH)):
        label = method.removeprefix(f"{names.BATCH}, ") if method != names.BATCH else "no retries"
        gains = (found.difference(method, measure).text(sign=True) for measure in (ACCURACY, PASS_AT_16))
        texts.append(f"{label}: {' and '.join(gains)}")
    return (
        f"On the language model, accuracy and pass@16 minus those of {found.reference} at equal tokens: {'; '.join(texts)} "
        f"([results](benchmarks.md#results-of-the-plan)). Without retries, pass@16 {end_of_training(found, names.BATCH)}."
    )


def recommendation(found: Comparison) -> str:
    """docs/settings.md: the recommended mode compared with GRPO."""
    return f"On the language model, at equal tokens and after the last step: {both(found, RETRIES)} ([plan](benchmarks.md#results-of-the-plan))."


def prompts_sentence(found: Comparison) -> str:
    """With as many prompts as GRPO."""
    speed = found.words(names.BATCH_4, SPEED, names.GRPO_4, SPEED_WORDS, digits=4)
    return f"With as many prompts as {names.GRPO_4}, the batch baseline {speed}."


def _label(method: str, rate: float) -> str:
    return method.removesuffix(PAPER_SUFFIX).removesuffix(LONGER_SUFFIX) + (
        f" at {rate_text(rate)}" if rate != PLANNED_RATE else ""
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
    return f"accuracy {accuracy}, pass@16 {diversity}"


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
    lines = [f"- {names.short(m)}: {both(found, m)}." for m in (names.ALGORITHM_2, paper, small)]
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


def retries_sentences(found: Comparison) -> str:
    """The endpoints of the second plan's first part, and its decision."""
    results = {}
    for retries in (1, 2, 3):
        method = names.batch_retries(retries)
        accuracy, diversity = (found.words(method, m, better_grpo(found, m)) for m in (ACCURACY, PASS_AT_16))
        results[retries] = f"{method}: accuracy {accuracy}, pass@16 {diversity}."
    number = recommended_retries(found)
    decision = "no retries are recommended." if number is None else f"recommended is {results[number]}"
    return "\n".join(f"- {line}" for line in [*results.values(), f"By the rule of the second plan, {decision}"])


def longer_answers_sentences(found: Comparison) -> str:
    """The endpoints of the second plan's second part, and the lengths of the completions."""
    lines = [f"- {method}: {both(found, method)}." for method in (RETRIES, names.BATCH)]
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

    def significant(method: str, sign: int) -> bool:
        differences = [found.difference(method, measure) for measure in (ACCURACY, PASS_AT_16)]
        return any(one.excludes_zero and sign * one.mean > 0 for one in differences)

    methods = (RETRIES, names.BATCH, SMALL_ROUNDS_3_PROMPTS, EST_EMA)
    retries = "a number of passes is named with retries" if significant(RETRIES, -1) else "retries need no such number"
    is_named = significant(EST_EMA, 1) and not significant(EST_EMA, -1)
    decision = f"{retries}, and Est (EMA) is {'' if is_named else 'not '}named for several passes"
    lines = [
        *(f"{method}: {both(found, method)}" for method in methods),
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


def cpu_block(rows: pd.DataFrame) -> str:
    """The version of the longer answers for a slow CPU: the seeds whose runs are all finished."""
    methods = (names.GRPO_4, RETRIES)
    runs = {method: by_seed(rows, LONG_SET, method) for method in methods}
    seeds = set.intersection(*(set(own) for own in runs.values()))
    if not seeds:
        return "*longer answers on a CPU*: no seed is finished."
    runs = {method: {seed: own[seed] for seed in sorted(seeds)} for method, own in runs.items()}
    found = Comparison(runs, names.GRPO_4)
    columns: dict[str, Callable[[str], str]] = {
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
        "Tokens per completion": lambda m: f"{found.mean(m, final('completion_tokens')).mean:.1f}",
        "Truncated": lambda m: f"{found.mean(m, final('truncated')).mean:.1%}",
    }
    title = (
        f"**longer answers on a CPU**, {_last_step(found, RETRIES)} steps, seeds {', '.join(map(str, sorted(seeds)))}."
    )
    return f"{title} Too short to decide anything.\n\n{found.table(columns, BEFORE)}"


CONCLUSIONS = {
    "confirmation": endpoints,
    "group size": group_size_sentences,
    "paper": paper_sentences,
    "number of retries": retries_sentences,
    "longer answers": longer_answers_sentences,
    "passes over the data": passes_sentences,
    "longer run": longer_run_sentences,
}


# The language model at equal tokens


def language_rates() -> Comparison:
    """Methods at their chosen learning rate."""
    rows = load(RATES)
    rows = rows[(rows["seed"] != SELECTION_SEED) & (rows["rate"] == CHOSEN_RATE)]
    return compare(rows, MAIN_SET, (names.GRPO_4, names.GRPO_8, names.BATCH), EARLIER_LOOKS)


def cpu_seconds(found: Comparison, method: str) -> float:
    """CPU seconds per step of the fastest seed: other runs on the machine make a step slower, never faster."""
    return min(found.values(method, per_step("cpu_seconds")).values())


def rates_table(found: Comparison) -> str:
    costs: dict[str, Callable[[str], str]] = {
        "Tokens": found.share_of_tokens,
        "Entropy": lambda m: f"{found.mean(m, final('entropy')).mean:.2f}",
        "CPU s per step": lambda m: f"{cpu_seconds(found, m):.1f}",
    }
    return found.table({"Seeds": found.num_seeds} | measures(found) | costs, BEFORE)


def rates_caption(found: Comparison) -> str:
    return (
        f"*{MODEL} on eight families of tasks, 150 steps of 64 rollouts at learning rate {rate_text(CHOSEN_RATE)}. In "
        f"parentheses: difference from {found.reference}, paired by seed, with 95% interval (bold: excludes 0). Two of five seeds "
        "were added after a look at the first three; intervals over five seeds are corrected for both looks. None is corrected "
        "for the number of comparisons. Tokens: at the final accuracy of the same seed's run of "
        f"{found.reference}, as a fraction of that run's tokens.*"
    )


def rates_sentences(found: Comparison) -> str:
    batch = functools.partial(found.words, names.BATCH)
    shares = found.share_of_tokens(names.BATCH)
    return (
        f"With {found.num_seeds(names.BATCH)} seeds, the batch baseline {batch(SPEED, words=SPEED_WORDS, digits=4)} in mean "
        f"accuracy over the evaluations, a measure that was chosen after the runs. Accuracy after the last step: "
        f"{batch(ACCURACY)}, {batch(ACCURACY, names.GRPO_8)} ({found.num_seeds(names.GRPO_8)} seeds). pass@16: {batch(PASS_AT_16)}. "
        f"The batch baseline reaches the final accuracy of the same seed's {names.GRPO_4} run after {shares} of its tokens, "
        f"{names.GRPO_4} itself for the first time after {found.share_of_tokens(names.GRPO_4)}."
    )


def selection_table() -> str:
    """Ends of the runs from which learning rates were chosen."""
    rows = load(RATES)
    rows = rows[rows["seed"] == SELECTION_SEED]
    cells = []
    for method in (names.GRPO_4, names.BATCH, names.BATCH_2_ITERATIONS):
        for rate in sorted(rows[rows["method"] == method]["rate"].unique()):
            (run,) = by_seed(rows, MAIN_SET, method, rate).values()
            row = {"Method": method, "Rate": rate_text(rate)}
            row |= {label: f"{final(column)(run):.3f}" for label, column in BEFORE.items()}
            best = run.loc[run["accuracy"].idxmax()]
            cells.append(row | {"Highest accuracy": f"{best['accuracy']:.3f} after {best['step']:.0f} steps"})
    return as_table(cells)


def families_table(found: Comparison, evaluations: pd.DataFrame) -> str:
    """By family: zero-variance groups of four rollouts before training, and accuracy before and after."""
    rows = evaluations[(evaluations["family"] != "all") & (evaluations["seed"] != SELECTION_SEED)]
    rows = rows[(rows["rate"] == CHOSEN_RATE) & rows["method"].isin(found.runs)]
    lines = []
    for family, own in rows.groupby("family"):
        start, end = own[own["step"] == 0], own[own["step"] == own["step"].max()]
        share = start["frac_zero_variance"].mean()
        row = {"Family": family, "Zero-variance groups (n=4)": f"{share:.0%}"}
        row["before training"] = f"{start['accuracy'].mean():.3f}"
        means = end.groupby("method")["accuracy"].mean()
        lines.append((-share, row | {method: f"{means[method]:.3f}" for method in found.runs}))
    return as_table([row for _, row in sorted(lines, key=lambda line: line[0])])


OTHER_SETS = {  # at one learning rate for all methods
    MAIN_SET: f"mixture at {rate_text(RATE)}",
    HARD_SET: "seven hard families",
    LONG_SET: "longer answers",
}


def other_sets() -> dict[str, Comparison]:
    rows = load("language_model")
    methods = (names.GRPO_4, names.GRPO_8, HYBRID_3_PROMPTS, names.BATCH)
    return {name: compare(rows, name, methods, EARLIER_LOOKS) for name in OTHER_SETS}


def other_sets_table(sets: dict[str, Comparison]) -> str:
    rows = []
    for name, found in sets.items():
        for method in found.runs:
            row = {"Set": f"{OTHER_SETS[name]}", "Method": method, "Seeds": found.num_seeds(method)}
            row |= {"Accuracy": found.cell(method, ACCURACY), "pass@16": found.cell(method, PASS_AT_16)}
            rows.append(
                row
                | {
                    "Before training": f"{found.before_training('accuracy'):.3f}, {found.before_training('pass@16'):.3f}"
                }
            )
    lower = [
        found.mean(method, PASS_AT_16).mean < found.before_training("pass@16")
        for found in sets.values()
        for method in found.runs
    ]
    return f"{as_table(rows)}\n\nIn {sum(lower)} of {len(lower)} rows, pass@16 is lower than before training."


# The paper's protocol on the language model

PAPER_STEPS = 75
PAPER_REFERENCE = f"{names.GRPO_4} at {rate_text(CHOSEN_RATE)}"
EST_VALUE = f"{names.EST} (value head) n=8"


def paper_protocol() -> Comparison:
    """Equal prompts per step, compared with GRPO n=4 at its better learning rate, from the same base model."""
    rates, rows = load(RATES), load("language_model")
    reference = by_seed(rates[rates["step"] <= PAPER_STEPS], MAIN_SET, names.GRPO_4, CHOSEN_RATE)
    runs = {method.removesuffix(PAPER_SUFFIX): by_seed(rows, MAIN_SET, method) for method in PAPER}
    seeds = set().union(*runs.values())
    return Comparison(
        {PAPER_REFERENCE: {s: run for s, run in reference.items() if s in seeds}} | runs, PAPER_REFERENCE
    )


def paper_table(found: Comparison) -> str:
    def relative(method: str, cost: Callable[[str], float]) -> str:
        return f"{cost(method) / cost(PAPER_REFERENCE):.1f}×"

    columns: dict[str, Callable[[str], str]] = {
        "Steps": lambda m: f"{_last_step(found, m)}",
        "Seeds": found.num_seeds,
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
        "Tokens per step": lambda m: relative(m, lambda own: found.mean(own, per_step("generated_tokens")).mean),
        "CPU time per step": lambda m: relative(m, lambda own: cpu_seconds(found, own)),
        "Zero-variance groups": lambda m: f"{found.mean(m, final('frac_zero_advantage_groups')).mean:.2f}",
        "Entropy": lambda m: f"{found.mean(m, final('entropy')).mean:.2f}",
    }
    return found.table(columns, BEFORE)


def _last_step(found: Comparison, method: str) -> int:
    return int(max(run["step"].iloc[-1] for run in found.runs[method].values()))


PAPER_CAPTION = (
    f"*Three seeds; differences are from {names.GRPO_4} at {rate_text(CHOSEN_RATE)}, its better rate, and not corrected for the "
    f"number of comparisons. The other methods were run at {rate_text(RATE)} only.*"
)


def claims_table(found: Comparison) -> str:
    """The claims of the paper and what the runs show."""
    entropy = final("entropy")

    per_method = {
        m: found.mean(m, per_step("rollouts")).mean for m in (names.ALGORITHM_2, names.GRPO_16, names.SEQ_POS_2)
    }
    claims = {
        f"better than GRPO at equal prompts ({_last_step(found, found.reference)} steps of GRPO, "
        f"{_last_step(found, names.ALGORITHM_2)} of the others)": "<br>".join(
            f"{names.short(m)}: {both(found, m)}" for m in (names.ALGORITHM_2, names.HYBRID, names.SEQ_POS_2)
        ),
        "better than GRPO n=16, with fewer rollouts": f"Algorithm 2: {both(found, names.ALGORITHM_2, names.GRPO_16)}; "
        f"{per_method[names.ALGORITHM_2]:.0f} rollouts per step instead of {per_method[names.GRPO_16]:.0f}, because most "
        "prompts are hard",
        "Seq-balance is better than Seq-pos": f"Algorithm 2: {both(found, names.ALGORITHM_2, names.SEQ_POS_2)}; "
        f"{per_method[names.SEQ_POS_2]:.0f} rollouts per step with Seq-pos",
        "entropy is kept (mean over all steps)": "; ".join(
            f"{names.short(m)}: {found.difference(m, entropy).text(sign=True)}"
            for m in (names.ALGORITHM_2, names.HYBRID)
        )
        + f" against {found.reference} (whose smaller steps change entropy less)",
        "Est": f"value head, n=8, two seeds, not tested: accuracy {found.difference(EST_VALUE, ACCURACY).text(sign=True)}, "
        f"pass@16 {found.difference(EST_VALUE, PASS_AT_16).text(sign=True)}",
    }
    return as_table([{"Claim": claim, "Result": result} for claim, result in claims.items()])


# Small models


def title(prompt_set: str) -> str:
    return TITLES.get(prompt_set, prompt_set.capitalize())


def small_experiment(name: str) -> dict[str, Comparison]:
    rows = load(name)
    sets = [one for one in SETS if one in set(rows["prompt_set"])]
    return {one: compare(rows, one, EXPERIMENTS[name]) for one in sets}


def small_table(name: str) -> str:
    """Accuracy on every set, and pass@64 on the hard set."""
    sets = small_experiment(name)
    rows = []
    for method in EXPERIMENTS[name]:
        row = {"Method": method} | {title(one): found.cell(method, ACCURACY) for one, found in sets.items()}
        if "sorting-graded" in sets:
            row["Graded sorting, mean reward"] = sets["sorting-graded"].cell(method, final("mean_reward"))
        rows.append(row | {"Hard, pass@64": sets["hard"].cell(method, final("pass@64"))})
    return as_table(rows)


def equal_steps_table() -> str:
    """Equal prompts per step on addition, as in the paper: results and costs, on the easy and the hard set."""
    sets = small_experiment("equal_steps")
    rows = []
    for method in EXPERIMENTS["equal_steps"]:
        row = {"Method": method}
        for name, found in sets.items():
            row[f"Accuracy, {name}"] = found.cell(method, ACCURACY)
            row[f"pass@8, {name}"] = found.cell(method, final("pass@8"))
        costs = [found.mean(method, per_step("rollouts")).mean / 32 for found in sets.values()]
        row["Rollouts per prompt"] = " / ".join(f"{cost:.1f}" for cost in costs)
        shares = [found.mean(method, final("frac_zero_advantage_groups")).mean for found in sets.values()]
        row["Zero-gradient prompts"] = " / ".join(f"{share:.0%}" for share in shares)
        row["CPU s"] = " / ".join(f"{found.mean(method, final('cpu_seconds')).mean:.0f}" for found in sets.values())
        rows.append(row)
    return as_table(rows)


def equal_steps_sentences() -> str:
    """Algorithm 2 and the default against GRPO n=8."""
    lines = []
    for name, found in small_experiment("equal_steps").items():
        texts = [
            f"{names.short(m)}: {found.words(m, ACCURACY, names.GRPO_8)}" for m in (names.ALGORITHM_2, names.HYBRID)
        ]
        lines.append(f"- {title(name)} set: {'; '.join(texts)}.")
    return "\n".join(lines)


def ahead_table() -> str:
    """GRPO with and without generation one step ahead."""
    rows = []
    for name, found in small_experiment("one_step_ahead").items():
        row = {"Sums": name, "Seeds": found.num_seeds(AHEAD)}
        row["`max_staleness=0`"] = f"{found.mean(names.GRPO_4, ACCURACY).mean:.3f}"
        rows.append(row | {"1": found.cell(AHEAD, ACCURACY)})
    return as_table(rows)


# Documents


def gpu_results(stage: str) -> dict:
    """Stored results of a stage with vLLM on a GPU: `environment` and `units`."""
    return json.loads((RESULTS / "gpu" / f"{stage}.json").read_text())


def gpu_block() -> str:
    """Device and tables of the stages with vLLM on a GPU."""
    checked, measured = gpu_results("right"), gpu_results("fast")
    found = checked["environment"]
    versions = ", ".join(f"{package} {found['versions'][package]}" for package in ("vllm", "torch", "trl"))
    header = f"{found['device']}, {versions}, commit {found['commit'][:7]}."
    return "\n\n".join([header, right.report(checked["units"]), fast.report(measured["units"])])


def gpu_limitation() -> str:
    """README's sentence about vLLM on a GPU."""
    trained, measured = gpu_results("right")["units"], gpu_results("fast")["units"]
    ratios = [
        sum(row["generation_seconds"]["ours"]) / sum(row["generation_seconds"]["TRL"])
        for row in measured.values()
        if "generation_seconds" in row
    ]
    has_rounds = any(name.startswith(f"step, {names.SEQ_BALANCE}") for name in measured)
    return (
        "- [45 minutes](benchmarks/gpu/README.md) on one GPU (H200, H100); not on several or over NCCL.\n"
        f"- vLLM on a GPU ([{gpu_results('fast')['environment']['device']}](docs/benchmarks.md#vllm-on-a-gpu)): {len(trained)} "
        f"short runs with verified weights; generation took {min(ratios):.2f} to {max(ratios):.2f} of the time with TRL's client (two "
        "repeats)." + ("" if has_rounds else " Step times of adaptive sampling were not measured there.")
    )


def blocks() -> dict[Path, dict[str, str]]:
    """Every generated text by document and name of its place."""
    rates, paper, sets, confirmed = language_rates(), paper_protocol(), other_sets(), confirmation()
    sizes = part_comparison("group size", load(STORED))
    assert sizes is not None
    return {
        DOCS / "benchmarks.md": {
            "confirmation": plan_block([name for name in PARTS if name not in SECOND_PLAN], load(STORED)),
            "second-plan": f"{plan_block(SECOND_PLAN, load(STORED))}\n\n{cpu_block(load(STORED_ON_CPU))}",
            "language-rates": f"{rates_table(rates)}\n\n{rates_caption(rates)}\n\n{rates_sentences(rates)}",
            "language-prompts": prompts_sentence(sizes),
            "language-selection": selection_table(),
            "language-families": families_table(rates, load(RATES)),
            "language-sets": other_sets_table(sets),
            "language-paper": f"{paper_table(paper)}\n\n{PAPER_CAPTION}",
            "language-claims": claims_table(paper),
            "small-equal-tokens": small_table("equal_tokens"),
            "small-one-rollout": small_table("one_rollout"),
            "gpu": gpu_block(),
        },
        README: {
            "overview": figures.overview_caption(confirmed),
            "results": readme_results(confirmed, load(STORED)),
            "gpu": gpu_limitation(),
        },
        DOCS / "reproducing_the_paper.md": {
            "equal-steps": f"{equal_steps_table()}\n\nAgainst {names.GRPO_8}, in accuracy:\n\n{equal_steps_sentences()}"
        },
        DOCS / "settings.md": {"recommended": recommendation(confirmed)},
        DOCS / "tuning.md": {"retries": retries_and_none(confirmed)},
        DOCS / "vllm.md": {"staleness": ahead_table()},
    }


def main() -> None:
    for document, texts in blocks().items():
        for name, text in texts.items():
            fill(name, text, document)
    drawn = figures.draw_all(language_rates(), paper_protocol(), small_experiment("equal_steps"), confirmation())
    for name, figure in drawn.items():
        figure.savefig(FIGURES / f"{name}.png", dpi=200 if name == "overview" else 110)


if __name__ == "__main__":
    main()
