"""
What the stored results of the plans allow to say: tables and sentences of README.md and of docs/.

Every sentence follows from a comparison over seeds, so that new results change the words, and not only the numbers.
"""

from collections.abc import Iterable

import pandas as pd

from . import names
from .comparisons import ACCURACY, PASS_AT_16, SPEED, Comparison, as_table, final
from .learning.confirmation import PARTS, RETRIES
from .learning.language_model import CUT_SIZE, EST_EMA, PROMPTS_PER_STEP, ROLLOUTS_PER_STEP, SMALL_ROUNDS_3_PROMPTS
from .plans import (
    RECOMMENDED,
    better_grpo,
    end_gains,
    is_better_in_one,
    last_step,
    part_comparison,
    parts_by_model,
    recommended_retries,
    retries_by_lower_bound,
    stored_part,
)
from .statistics import BETTER, NO_VALUE, SAME, WORSE, Interval, cell, comparison, holm, interval, p_value, paired


SHORT = "number of retries"
REPEATED, LONGER, FAMILY = "repeated problems", "longer answers, 2 retries", "second model family"
EARLIER = {REPEATED: "passes over the data", LONGER: "longer answers"}  # parts of the second plan on the same tasks
SECOND_PLAN = {SHORT: "short answers", EARLIER[LONGER]: "longer answers", EARLIER[REPEATED]: "repeated problems"}
ENDPOINTS = {  # methods whose accuracy and pass@16 are compared with the better GRPO; everything else is secondary
    SHORT: [names.batch_retries(retries) for retries in (1, 2, 3)],
    EARLIER[LONGER]: [RETRIES],
    EARLIER[REPEATED]: [RETRIES, EST_EMA],
    **dict.fromkeys((REPEATED, LONGER, FAMILY), [RECOMMENDED]),
}
MEASURES = {"accuracy": ACCURACY, "pass@16": PASS_AT_16}
SECONDARY = "†"
MODEL = "SmolLM2-135M with LoRA"
FIGURE = "![Zero gradients by pass rate; accuracy against tokens; pass@16 against accuracy](docs/figures/overview.png)"
NAMES = {names.BATCH: "one rollout", SMALL_ROUNDS_3_PROMPTS: "Seq-balance (the default)", EST_EMA: "Est (EMA)"}
WORDS = {2: "two", 3: "three", 8: "eight", 12: "twelve"}


def name_of(method: str) -> str:
    """The method as README.md calls it."""
    retries = method.removeprefix(f"{names.BATCH}, ")
    return NAMES.get(method, retries if method.startswith(names.BATCH) else names.short(method))


def with_retries(found: Comparison) -> str:
    """3 retries if they are significantly better than 2 in accuracy or pass@16 and worse in neither, 2 otherwise."""
    return RETRIES if is_better_in_one(end_gains(found, RETRIES, RECOMMENDED)) else RECOMMENDED


# Tables


def results_table(part: str, rows: pd.DataFrame, methods: Iterable[str] = ()) -> str:
    """Methods of a part (by default all) against the better GRPO in each metric, with their costs."""
    found = stored_part(part, rows)
    return as_table(
        {"Method": marked(part, method)} | cells(found, method) | costs(found, method)
        for method in methods or ordered(found)
    )


def tables(part: str, rows: pd.DataFrame) -> str:
    """The table of a part of the third plan, and of the second plan's part on the same task."""
    earlier = EARLIER[part]
    seeds = PARTS[earlier].seeds
    before = f"Second plan, from another base model, seeds {seeds[0]} to {seeds[-1]}:"
    return f"{results_table(part, rows)}\n\n{before}\n\n{results_table(earlier, rows)}"


def short_tables(rows: pd.DataFrame) -> str:
    """The table of short answers, and after its last run that of the second model family."""
    table = results_table(SHORT, rows)
    if part_comparison(FAMILY, rows) is None:
        return table
    part = PARTS[FAMILY]
    about = (
        f"{part.model} with LoRA, its vocabulary cut to the [2,635 tokens](../benchmarks/README.md#third-plan) that "
        f"the problems need (102 million parameters), seeds {part.seeds[0]} to {part.seeds[-1]} "
        f"({' and '.join(map(str, part.seeds_of_two))}: {' and '.join(name_of(m) for m, _ in part.methods[:2])} only):"
    )
    return f"{table}\n\n{about}\n\n{results_table(FAMILY, rows)}"


def readme_table(rows: pd.DataFrame) -> str:
    """The better GRPO, one rollout, and retries, on the two tasks on which something was decided."""
    lines = []
    for part, about in ((SHORT, "short answers"), (REPEATED, f"{CUT_SIZE:,} problems, repeated")):
        found = stored_part(part, rows)
        about += f" ({len(PARTS[part].seeds)} seeds; start: {found.before_training('accuracy'):.3f}, "
        about += f"{found.before_training('pass@16'):.3f})"
        baselines = dict.fromkeys(better_grpo(found, measure) for measure in MEASURES.values())
        others = dict.fromkeys((names.BATCH, with_retries(found), RETRIES))
        for method in (*baselines, *(method for method in others if method in found.runs)):
            lines.append({"Task": about, "Method": marked(part, method)} | cells(found, method))
            about = ""  # once per task
    return as_table(lines)


def ordered(found: Comparison) -> list[str]:
    """GRPO first, then without and with more and more retries, then the others."""
    grpo = [method for method in (names.GRPO_4, names.GRPO_8) if method in found.runs]
    batch = [method for method in map(names.batch_retries, range(8)) if method in found.runs]
    return [*grpo, *batch, *(method for method in found.runs if method not in (*grpo, *batch))]


def marked(part: str, method: str) -> str:
    is_endpoint = method in ENDPOINTS[part] or method in (names.GRPO_4, names.GRPO_8)
    return name_of(method) + ("" if is_endpoint else f" {SECONDARY}")


def cells(found: Comparison, method: str) -> dict[str, str]:
    """Accuracy and pass@16 with their differences from the better GRPO, and the change of pass@16 by the training."""
    row = {
        title: found.cell(method, measure, None if method.startswith("GRPO") else better_grpo(found, measure))
        for title, measure in (("Accuracy", ACCURACY), ("pass@16", PASS_AT_16))
    }
    if method.startswith("GRPO"):
        row = {title: text.split(" ")[0] for title, text in row.items()}
    return row | {f"pass@16 since the start {SECONDARY}": cell(found.change(method, "pass@16"))}


def costs(found: Comparison, method: str) -> dict[str, str]:
    return {f"Tokens to the accuracy of {found.reference} {SECONDARY}": found.share_of_tokens(method)}


def retries_table(rows: pd.DataFrame) -> str:
    """The gains of all parts with every number of retries, and without."""
    parts = {"Short answers": SHORT, "First plan": "confirmation"}
    parts |= {f"{CUT_SIZE:,} problems": REPEATED, "Longer answers": LONGER}
    lines = []
    for retries in (0, 1, 2, 3, 7):
        method, row = names.batch_retries(retries), {"`retries`": str(retries)}
        for title, part in parts.items():
            found = stored_part(part, rows)
            is_run = method in found.runs
            row[title] = ", ".join(map(cell, end_gains(found, method))) if is_run else NO_VALUE
        lines.append(row)
    return (
        f"{as_table(lines)}\n\n*Accuracy and pass@16 minus those of {names.GRPO_4} at equal tokens, with 95% "
        "intervals over seeds (bold: excludes 0): [results](results.md).*"
    )


# Sentences


def planned_p_values(rows: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    """p-values of the tests of the second plan, by part, method and metric."""
    found = {part: stored_part(part, rows) for part in SECOND_PLAN}
    return {
        (part, method, name): p_value(found[part].gains(method, measure, better_grpo(found[part], measure)))
        for part in SECOND_PLAN
        for method in ENDPOINTS[part]
        for name, measure in MEASURES.items()
    }


def corrected(rows: pd.DataFrame, test: tuple[str, str, str]) -> str:
    """What remains of a test after a correction for the number of tests."""
    p_values = planned_p_values(rows)
    significant, number = holm(p_values), WORDS.get(len(p_values), str(len(p_values)))
    if test not in significant:
        return f"not significant after Holm's correction for the {number} planned tests"
    if len(significant) == 1:
        return f"the only one of {number} planned tests to survive Holm's correction"
    return f"significant after Holm's correction for the {number} planned tests"


def why(rows: pd.DataFrame) -> str:
    """The baseline at equal prompts, and more prompts with the same baseline."""
    found = stored_part("group size", rows)
    baseline = found.difference(names.BATCH_4, SPEED)
    prompts = found.difference(names.BATCH, SPEED, names.BATCH_4)
    claim = "The gain comes from more distinct prompts" if prompts.is_higher and not baseline.is_higher else "Why"
    return (
        f"**{claim}**: with as many prompts as {names.GRPO_4}, the batch baseline has "
        f"{'a' if baseline.is_higher else 'no'} significant gain in mean accuracy "
        f"({baseline.text(sign=True)}); four times as many add {'one' if prompts.is_higher else 'none'} "
        f"({prompts.text(sign=True)})."
    )


def short_answers(rows: pd.DataFrame) -> str:
    """The recommended mode against the better GRPO in each metric."""
    found = stored_part(SHORT, rows)
    accuracy, diversity = against_grpo(found, RECOMMENDED)
    return (
        f"**Short answers**: {name_of(RECOMMENDED)} are {comparison(accuracy)} the better GRPO "
        f"({better_grpo(found, ACCURACY).removeprefix('GRPO ')}) in accuracy: {accuracy.text(sign=True)}, "
        f"{corrected(rows, (SHORT, RECOMMENDED, 'accuracy'))}; pass@16: "
        f"{without_object(diversity)} ({diversity.text(sign=True)}). {families(found, rows)}{another_model(rows)}"
    )


def against_grpo(found: Comparison, method: str) -> list[Interval]:
    """Accuracy and pass@16 minus those of the better GRPO in each."""
    return [found.difference(method, measure, better_grpo(found, measure)) for measure in MEASURES.values()]


def without_object(difference: Interval) -> str:
    """The words of a comparison at the end of a sentence."""
    return comparison(difference).removesuffix(" than").removesuffix(" from")


def with_test(difference: Interval) -> str:
    """The difference, and whether it is significant."""
    return f"{difference.text(sign=True)}{', significant' if difference.excludes_zero else ''}"


def families(found: Comparison, rows: pd.DataFrame) -> str:
    """In which families of problems the recommended mode gains."""
    part, other = PARTS[SHORT], better_grpo(found, ACCURACY)
    own = rows[(rows["prompt_set"] == part.prompt_set) & rows["seed"].isin(part.seeds) & (rows["family"] != "all")]
    ends = own[own["step"] == part.steps].set_index(["family", "seed"])
    values = {m: ends[ends["method"] == m]["accuracy"] for m in (RECOMMENDED, other)}
    gains = (values[RECOMMENDED] - values[other]).groupby("family").mean().sort_values(ascending=False)
    start = own[own["step"] == 0].groupby("family")["accuracy"].mean()
    hardest = start.idxmin()
    of_hardest = interval(paired(*(values[m][hardest].to_dict() for m in (RECOMMENDED, other))))
    return (
        f"Three of {WORDS.get(len(gains), len(gains))} families have {gains.iloc[:3].sum() / gains.sum():.0%} of the "
        f"gain, the hardest {of_hardest.text(sign=True) if of_hardest.excludes_zero else 'none'}."
    )


def repeated_problems(rows: pd.DataFrame) -> str:
    """What training did to pass@16, where problems are seen several times."""
    found = stored_part(REPEATED, rows)
    chosen = with_retries(found)
    prompts = (PROMPTS_PER_STEP[names.GRPO_4], ROLLOUTS_PER_STEP)
    visits = [number * last_step(found, chosen) / CUT_SIZE for number in prompts]
    is_kept = found.difference(chosen, PASS_AT_16, names.BATCH).is_higher
    return (
        f"**Repeated problems**: {visits[0]:.1f} visits each with {names.GRPO_4}, {visits[1]:.1f} with one rollout. "
        f"{changes_in_words(found)}"
        f"{' Use retries there.' if is_kept else ''}"
    )


def longer_answers(rows: pd.DataFrame) -> str:
    """Retries with longer answers."""
    found = stored_part(LONGER, rows)
    length = f"{found.mean(RECOMMENDED, final('completion_tokens')).mean:.0f} tokens"
    accuracy, diversity = map(with_test, end_gains(found, RECOMMENDED))
    return (
        f"**Longer answers** ({length}), {name_of(RECOMMENDED)} minus {names.GRPO_4}: accuracy {accuracy}; pass@16 "
        f"{diversity}."
    )


def another_model(rows: pd.DataFrame) -> str:
    """The recommended mode with the second model family; empty before its last run."""
    found = part_comparison(FAMILY, rows)
    if found is None:
        return ""
    accuracy, diversity = map(with_test, against_grpo(found, RECOMMENDED))
    return (
        f" With [{PARTS[FAMILY].model}](docs/results.md#short-answers), vocabulary cut: accuracy {accuracy}; pass@16 "
        f"{diversity}."
    )


def readme_results(rows: pd.DataFrame, caption: str) -> str:
    """The reason, the three results, the table, and the figure with its caption."""
    writers = (why, short_answers, repeated_problems, longer_answers)
    sentences = "\n".join(f"- {write(rows)}" for write in writers)
    note = (
        f"*{MODEL}, equal tokens; n: rollouts per prompt. In parentheses: minus the better GRPO, 95% interval over "
        f"training seeds only (bold: excludes 0). {SECONDARY}: no endpoint of the "
        "[plan](docs/results.md#how-it-was-measured).*"
    )
    return f"{sentences}\n\n{readme_table(rows)}\n\n{note}\n\n{FIGURE}\n\n{caption}"


# docs/results.md


def verdict(rows: pd.DataFrame) -> str:
    """What to use, in words."""
    short, repeated, longer = (stored_part(part, rows) for part in (SHORT, REPEATED, LONGER))
    lines = [
        f"**Rewards of 0 or 1, short answers: {name_of(RECOMMENDED)}.** {in_words(short, RECOMMENDED)}",
        f"**Few problems, many passes: {name_of(with_retries(repeated))}.** "
        f"{in_words(repeated, with_retries(repeated))} {changes_in_words(repeated)}",
        f"**Longer answers**: {name_of(RECOMMENDED)}. {in_words(longer, RECOMMENDED)}",
    ]
    if (family := part_comparison(FAMILY, rows)) is not None:
        lines.insert(1, f"**The same with {PARTS[FAMILY].model}.** {in_words(family, RECOMMENDED)}")
    return "\n".join(f"- {line}" for line in lines)


def in_words(found: Comparison, method: str) -> str:
    accuracy, diversity = against_grpo(found, method)
    return f"Accuracy: {comparison(accuracy)} the better GRPO; pass@16: {without_object(diversity)}."


def changes_in_words(found: Comparison) -> str:
    """A sentence on the methods by what training did to their pass@16."""
    groups: dict[str, list[str]] = {}
    for method in ordered(found):
        groups.setdefault(comparison(found.change(method, "pass@16")), []).append(name_of(method))
    titles = {
        WORSE: "significantly lower with",
        BETTER: "significantly higher with",
        SAME: "not significantly changed with",
    }
    changes = [f"{title} {', '.join(groups[words])}" for words, title in titles.items() if words in groups]
    return f"After training, pass@16 is {'; '.join(changes)}."


def correction(rows: pd.DataFrame) -> str:
    """What remains of the planned tests after a correction for their number."""
    p_values = planned_p_values(rows)
    kept = [
        f"{SECOND_PLAN[part]}, {name_of(method)}, {name} (p = {p_values[part, method, name]:.4f})"
        for part, method, name in holm(p_values)
    ]
    count = WORDS.get(len(p_values), len(p_values))
    corrected_tests = "; ".join(kept) or "none"
    return (
        f"Intervals are not corrected. Of the {count} tests, significant after Holm's correction: {corrected_tests}."
    )


def numbers_by_rule(rows: pd.DataFrame) -> str:
    """The number of retries by the rules of the second and of the third plan, for each model."""
    models = {model: retries_by_lower_bound(parts) for model, parts in parts_by_model(rows).items()}
    numbers = (recommended_retries(stored_part(SHORT, rows)), *models.values())
    second, *third = ("none" if number is None else str(number) for number in numbers)
    if {second} == set(third):
        return f"**The number of retries** is {second} by the rules of the second and of the third plan."
    by_model = [f"{number} with {model}" for number, model in zip(third, models, strict=True)]
    return (
        f"**The number of retries is not settled**: the rule of the second plan picks {second}, that of the "
        "[third plan](../benchmarks/README.md#third-plan), with the seeds of the first plan in addition, "
        f"{', '.join(by_model)}."
    )


def paper_sentence(rows: pd.DataFrame) -> str:
    """The default and Algorithm 2 of the paper against GRPO at equal prompts."""
    found = stored_part("paper", rows)
    lines = []
    for method in (names.SMALL_ROUNDS, names.ALGORITHM_2):
        accuracy, diversity = end_gains(found, method)
        tokens = (
            found.mean(method, final("generated_tokens")).mean
            / found.mean(names.GRPO_4, final("generated_tokens")).mean
        )
        title = "Seq-balance (the default)" if method == names.SMALL_ROUNDS else names.short(method)
        lines.append(
            f"- {title}, {tokens:.1f} times the tokens of {names.GRPO_4}. Accuracy: {comparison(accuracy)} it "
            f"({accuracy.text(sign=True)}); pass@16: {comparison(diversity)} it ({diversity.text(sign=True)})."
        )
    return "\n".join(lines)
