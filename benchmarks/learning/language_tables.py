"""Tables and sentences of the language model: the paper's protocol, equal tokens, and short runs."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from .. import names
from ..common import load_rows
from .formatting import (
    MIN_SEEDS,
    NO_VALUE,
    REFERENCE,
    SAME,
    STRONG_REFERENCE,
    against,
    as_table,
    comparison,
    share_to_reach,
    show,
    start_row,
    with_difference,
)
from .language_model import EQUAL_TOKENS, LONG_SET, PAPER, PAPER_PROMPTS, PAPER_SUFFIX, RATE, RATES
from .statistics import before_training, by_seed, final, half_way, mean_of, of_methods, paired_difference


PILOT_SEED = 0  # used for the short runs only
SELECTION_SEED = 9  # used only to compare learning rates; the rates that are chosen are reported with other seeds
MAIN_SET, HARD_SET = "mixture", "hard"
TITLES = {
    MAIN_SET: "eight families of tasks (mixture)",
    HARD_SET: "seven hard families",
    LONG_SET: "four families with intermediate steps",
}
PASS_AT = (4, 16, 64)
PAPER_REFERENCE = REFERENCE + PAPER_SUFFIX
ORDER = (  # of the comparison at equal tokens
    names.GRPO_4,
    names.GRPO_8,
    names.DAPO,
    f"{names.HYBRID}, 3 prompts",
    names.BATCH,
    names.BATCH_2_ITERATIONS,
    names.BATCH_HALF_STEPS,
    names.POSTERIOR,
    names.POSTERIOR_2_ITERATIONS,
    names.OVERSAMPLING,
    names.RETRIES,
    names.RETRIES_OVERSAMPLING,
)
COMPARED = (names.BATCH, names.POSTERIOR, names.OVERSAMPLING, names.RETRIES)  # in sentences
TOKENS_TO_REACH = f"Tokens to the final accuracy of {REFERENCE}"
# Other runs on the machine make a step slower, never faster.
CPU_SECONDS = "CPU s per step, fastest seed"


def stored_language() -> pd.DataFrame:
    """The stored evaluations of the reported runs at the common learning rate."""
    rows = _load("language_model")
    return rows[(rows["seed"] != PILOT_SEED) & (rows["rate"] == RATE)]


def stored_pilots() -> pd.DataFrame:
    rows = _load("language_model")
    return rows[rows["seed"] == PILOT_SEED]


def selection_runs() -> pd.DataFrame:
    """The stored runs of one seed with several learning rates, from which the rates of `reported_rates` were chosen."""
    rows = _load(RATES)
    return rows[rows["seed"] == SELECTION_SEED]


def reported_rates() -> pd.DataFrame:
    """The stored runs of several seeds, in which every method has one learning rate."""
    rows = _load(RATES)
    return rows[rows["seed"] != SELECTION_SEED]


def _load(name: str) -> pd.DataFrame:
    columns = ("explained_variance", "frac_zero_variance", "generating_seconds", "frac_zero_advantage_groups")
    return pd.DataFrame(load_rows(name)).astype(dict.fromkeys(columns, float))


def equal_tokens_runs(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["method"].isin(EQUAL_TOKENS)]


def paper_runs(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["method"].isin(PAPER)]


def of_all_families(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["family"] == "all"]


def paper_name(method: str) -> str:
    """The name in the section on the paper's protocol, where every method has as many prompts."""
    return method.removesuffix(PAPER_SUFFIX)


def has_one_rollout(method: str) -> bool:
    """True for methods with one rollout per prompt, which have no groups."""
    return "n=1," in f"{method},"


def zero_variance(runs: pd.DataFrame, prompt_set: str) -> float:
    """Fraction of groups of four rollouts with zero reward variance before training, exact unless answers are longer."""
    whole = of_all_families(runs[runs["prompt_set"] == prompt_set])
    return float(whole[whole["step"] == 0]["frac_zero_variance"].mean())


# Captions


def caption(runs: pd.DataFrame, prompt_set: str, methods: Sequence[str], reference: str = REFERENCE) -> str:
    """Model, answers and seeds, and the smallest significant differences from the reference."""
    whole = of_all_families(runs[runs["prompt_set"] == prompt_set])
    found = of_methods(whole, prompt_set, methods)
    last = whole[whole["step"] == whole["step"].max()]
    tokens = (last["generated_tokens"] / last["rollouts"]).mean()
    rates = sorted(whole["rate"].unique())
    rate = f"learning rate {rate_text(rates[0])}" if len(rates) == 1 else "the learning rate in the table"
    text = (
        f"SmolLM2-135M-Instruct with LoRA on {TITLES[prompt_set]}, {last['step'].max():.0f} steps at {rate}, answers of about "
        f"{tokens:.0f} tokens, {_seeds(sorted({len(own) for own in found.values()}))}."
    )
    widths = {column: _half_widths(found, column, reference) for column in ("accuracy", "pass@16")}
    if all(widths.values()):
        smallest = ", ".join(f"{_range(values)} in {column}" for column, values in widths.items())
        condition = ", depending on the method," if any(len(values) > 1 for values in widths.values()) else ""
        text += f" With these seeds, the smallest significant difference from {paper_name(reference)}{condition} is {smallest}."
    if any(len(own) < MIN_SEEDS for own in found.values()):
        text += f" Differences over fewer than {MIN_SEEDS} common seeds have no interval."
    return f"*{text}*"


def _seeds(counts: list[int]) -> str:
    """Numbers of seeds of several methods, in ascending order, in words."""
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} seeds"
    return "one seed" if counts == [1] else f"{counts[0]} seeds"


def _half_widths(found: dict[str, dict[int, pd.DataFrame]], column: str, reference: str) -> list[float]:
    """Half the widths of the intervals of the differences from the reference."""
    halves = []
    for method, own in found.items():
        others = found.get(reference, {})
        if method != reference and len(own.keys() & others.keys()) >= MIN_SEEDS:
            halves.append(paired_difference(final(own, column), final(others, column))[1])
    return halves


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def rate_text(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


# Equal tokens


def language_table(runs: pd.DataFrame, prompt_set: str) -> str:
    """Accuracy and pass@16 at equal tokens, and what was measured during the steps; no columns without values."""
    whole = of_all_families(runs)
    found = of_methods(whole, prompt_set, ORDER)
    weak, strong = found.get(REFERENCE, {}), found.get(STRONG_REFERENCE, {})
    rows = [start_row(whole, prompt_set, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    for method, own in found.items():
        row = {"Method": method, "Seeds": str(len(own))} | _results(method, own, weak, strong)
        groups, explained = (
            mean_of(final(own, column))[0] for column in ("frac_zero_advantage_groups", "explained_variance")
        )
        row["Zero-variance groups"] = NO_VALUE if has_one_rollout(method) else f"{groups:.2f}"
        row["Explained variance"] = (
            f"{explained:.2f}" if has_one_rollout(method) and method != names.BATCH else NO_VALUE
        )
        row[CPU_SECONDS] = f"{_cpu_seconds(own):.1f}"
        rows.append(row)
    columns = [name for name in rows[-1] if any(row.get(name, "") not in ("", NO_VALUE) for row in rows)]
    return as_table([{name: row.get(name, "") for name in columns} for row in rows])


def _cpu_seconds(runs: dict[int, pd.DataFrame]) -> float:
    """CPU seconds per step of the fastest of the runs, by seed."""
    return min(float((run["cpu_seconds"] / run["step"]).iloc[-1]) for run in runs.values())


def rates_table(runs: pd.DataFrame, for_readme: bool = False) -> str:
    """
    Methods at equal tokens, each at one learning rate, with the differences from GRPO n=4.

    Args:
        runs (`pd.DataFrame`):
            Evaluations with one learning rate per method.
        for_readme (`bool`, *optional*, defaults to `False`):
            Whether to show only methods with at least `MIN_SEEDS` seeds, without seeds, entropy and CPU time.
    """
    whole = of_all_families(runs)
    least = MIN_SEEDS if for_readme else 1
    found = {method: own for method, own in of_methods(whole, MAIN_SET, ORDER).items() if len(own) >= least}
    reference = found[REFERENCE]
    rows = [start_row(whole, MAIN_SET, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    for method, own in found.items():
        is_compared = method != REFERENCE
        row = {"Method": method, "Rate": rate_text(_rate(own)), "Seeds": str(len(own))}
        row["Accuracy"] = with_difference(final(own), final(reference), is_compared)
        row[TOKENS_TO_REACH] = share_to_reach(own, reference)
        row["pass@16"] = with_difference(final(own, "pass@16"), final(reference, "pass@16"), is_compared)
        row["Entropy"] = f"{mean_of(final(own, 'entropy'))[0]:.2f}"
        row[CPU_SECONDS] = f"{_cpu_seconds(own):.1f}"
        rows.append(row)
    hidden = {"Seeds", "Entropy", CPU_SECONDS} if for_readme else set()
    return as_table([{name: row.get(name, "") for name in rows[-1] if name not in hidden} for row in rows])


def _rate(runs: dict[int, pd.DataFrame]) -> float:
    """The learning rate of all runs of a method."""
    (rate,) = {rate for run in runs.values() for rate in run["rate"]}
    return rate


def _results(method: str, own: dict[int, pd.DataFrame], weak: dict, strong: dict) -> dict[str, str]:
    """Accuracy and pass@16 of a method, compared with both references."""
    row = {"Accuracy": f"{mean_of(final(own))[0]:.3f}"}
    for other, reference in ((REFERENCE, weak), (STRONG_REFERENCE, strong)):
        row[f"against {other}"] = against(final(own), final(reference)) if method != other and reference else ""
    row[f"{STRONG_REFERENCE}'s accuracy after"] = share_to_reach(own, strong)
    is_compared = method != REFERENCE and bool(weak)
    row["pass@16"] = with_difference(final(own, "pass@16"), final(weak, "pass@16"), is_compared)
    return row


def language_verdict(
    runs: pd.DataFrame,
    prompt_set: str,
    methods: Sequence[str] = COMPARED,
    references: Sequence[str] = (REFERENCE, STRONG_REFERENCE),
) -> str:
    """
    Comparisons of methods with at least `MIN_SEEDS` common seeds, in sentences: with the references and the methods before it.
    """
    whole = of_all_families(runs)
    found = {method: by_seed(whole, prompt_set, method) for method in (*references, *methods)}
    share, how = zero_variance(runs, prompt_set), "estimated" if prompt_set == LONG_SET else "exact"
    lines = [f"Before training, {share:.0%} of the groups of four rollouts have zero reward variance ({how})."]
    others = list(references)
    for method in methods:
        text = _sentence(method, found, others, last_reference=references[-1])
        others.append(method)
        if text:
            lines.append(text)
    return "\n".join(f"- {line}" for line in lines)


def _sentence(
    method: str, found: dict[str, dict[int, pd.DataFrame]], others: Sequence[str], last_reference: str
) -> str:
    """Accuracy against every other method, pass@16 where the difference is significant, and the accuracy half-way."""
    accuracy: dict[str, list[str]] = {}
    diversity: dict[str, list[str]] = {}
    for other in others:
        own, reference = found[method], found[other]
        if other == method or len(own.keys() & reference.keys()) < MIN_SEEDS:
            continue
        difference = paired_difference(final(own), final(reference))
        text = f"{paper_name(other)} ({show(difference, sign=True)})"
        accuracy.setdefault(comparison(*difference), []).append(text)
        difference = paired_difference(final(own, "pass@16"), final(reference, "pass@16"))
        if comparison(*difference) != SAME:
            text = f"{paper_name(other)} ({show(difference, sign=True)})"
            diversity.setdefault(f"pass@16 {comparison(*difference)}", []).append(text)
    if not accuracy:
        return ""
    parts = [f"{result} {', '.join(texts)}" for result, texts in (accuracy | diversity).items()]
    early = paired_difference(half_way(found[method]), final(found[last_reference]))
    if not math.isnan(early[1]):
        half = f"accuracy after half of the steps, compared with {paper_name(last_reference)} after all steps"
        parts.append(f"{half}: {show(early, sign=True)}")
    return f"**{paper_name(method)}**: {'; '.join(parts)}."


def family_table(runs: pd.DataFrame, prompt_set: str, methods: Sequence[str] = ORDER) -> str:
    """By family: zero-variance groups of four rollouts before training, and accuracy before and after."""
    runs = runs[(runs["prompt_set"] == prompt_set) & (runs["family"] != "all")]
    rows = []
    for family, own in runs.groupby("family"):
        start, end = own[own["step"] == 0], own[own["step"] == own["step"].max()]
        share = start["frac_zero_variance"].mean()
        row = {"Family": family, "Zero-variance groups (n=4)": f"{share:.0%}"}
        row["before training"] = f"{start['accuracy'].mean():.3f}"
        means = end.groupby("method")["accuracy"].mean()
        row |= {names.short(paper_name(m)): f"{means[m]:.3f}" for m in methods if m in means}
        rows.append((share, row))
    return as_table([row for _, row in sorted(rows, key=lambda item: -item[0])])


def readme_sentences(runs: pd.DataFrame) -> str:
    """The hard families and longer answers at equal tokens, in a list item each."""
    equal, batch = of_all_families(equal_tokens_runs(runs)), names.BATCH
    items = [_hard_families(equal, zero_variance(runs, HARD_SET), batch), _longer_answers(equal, batch)]
    return "\n".join(f"- {item}" for item in items if item)


def _hard_families(equal: pd.DataFrame, share: float, method: str) -> str:
    """Accuracy on the hard families, compared with both references."""
    own, results = final(by_seed(equal, HARD_SET, method)), []
    for other in (REFERENCE, STRONG_REFERENCE):
        difference = paired_difference(own, final(by_seed(equal, HARD_SET, other)))
        results.append(f"{comparison(*difference)} {other} ({show(difference, sign=True)})")
    return (
        f"**Hard tasks** ([seven families](docs/benchmarks.md#a-language-model), accuracy "
        f"{before_training(equal, HARD_SET)['accuracy']:.3f} before training, {share:.0%} zero-variance groups with n=4), "
        f"{method}: {', '.join(results)}."
    )


def _longer_answers(equal: pd.DataFrame, method: str) -> str:
    """Accuracy and pass@16 on answers with intermediate steps; empty for fewer than `MIN_SEEDS` common seeds."""
    own, reference = (by_seed(equal, LONG_SET, name) for name in (method, REFERENCE))
    if len(own.keys() & reference.keys()) < MIN_SEEDS:
        return ""
    last = pd.concat([run.iloc[-1:] for run in own.values()])
    tokens = (last["generated_tokens"] / last["rollouts"]).mean()
    results = []
    for column, label in (("accuracy", ""), ("pass@16", "in pass@16 ")):
        difference = paired_difference(final(own, column), final(reference, column))
        results.append(f"{label}{comparison(*difference)} {REFERENCE} ({show(difference, sign=True)})")
    return (
        f"**Longer answers** ([four families](docs/benchmarks.md#longer-answers) with intermediate steps, {tokens:.0f} tokens on "
        f"average, accuracy {before_training(equal, LONG_SET)['accuracy']:.3f} before training), {method}: {', '.join(results)}."
    )


# The paper's protocol


def paper_methods(runs: pd.DataFrame, prompt_set: str = MAIN_SET) -> list[str]:
    """The methods with stored runs, the reference first; none without runs of the reference."""
    own = paper_runs(runs)
    stored = set(own[own["prompt_set"] == prompt_set]["method"])
    return [method for method in PAPER if method in stored] if PAPER_REFERENCE in stored and len(stored) > 1 else []


def paper_table(runs: pd.DataFrame, prompt_set: str = MAIN_SET) -> str:
    """Accuracy and pass@16 at equal prompts and steps, with the differences from GRPO n=4; and the costs."""
    whole = of_all_families(paper_runs(runs))
    found = of_methods(whole, prompt_set, paper_methods(runs, prompt_set))
    reference = found[PAPER_REFERENCE]
    rows = [start_row(whole, prompt_set, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    for method, own in found.items():
        row = {"Method": paper_name(method), "Seeds": str(len(own))}
        for column, label in (("accuracy", "Accuracy"), ("pass@16", "pass@16")):
            is_compared = method != PAPER_REFERENCE
            row[label] = f"{mean_of(final(own, column))[0]:.3f}"
            difference = against(final(own, column), final(reference, column)) if is_compared else ""
            row[f"{label} against {REFERENCE}"] = difference
        per_step = [float((run["rollouts"] / run["step"]).iloc[-1]) for run in own.values()]
        row["Rollouts per step"] = f"{sum(per_step) / len(per_step):.0f}"
        row["1k tokens"] = f"{mean_of(final(own, 'generated_tokens'))[0] / 1e3:.0f}"
        row["Zero-variance groups"] = f"{mean_of(final(own, 'frac_zero_advantage_groups'))[0]:.2f}"
        row["Entropy"] = f"{mean_of(final(own, 'entropy'))[0]:.2f}"
        row[CPU_SECONDS] = f"{_cpu_seconds(own):.1f}"
        rows.append(row)
    return as_table([{name: row.get(name, "") for name in rows[-1]} for row in rows])


def paper_section(runs: pd.DataFrame, prompt_set: str = MAIN_SET) -> str:
    """The section on the paper's protocol; empty without stored runs."""
    methods = paper_methods(runs, prompt_set)
    if not methods:
        return ""
    own = paper_runs(runs)
    adaptive = [method for method in methods if "GRPO" not in method]
    references = [method for method in methods if "GRPO" in method]
    parts = [
        "## The paper's protocol on a language model",
        f"Equal prompts and steps: every method trains on {PAPER_PROMPTS} prompts per step, and additional rollouts are its "
        "cost. Accuracy and pass@16 are exact; differences are paired by seed. All runs start from the same base model, which "
        "is also that of the [learning rates](#learning-rates), but not of the other tables. Zero-variance groups (groups "
        "whose advantages are all 0) and entropy (nats per token) are means over all steps.",
        "![The paper's protocol](figures/language_paper.png)",
        paper_table(runs, prompt_set),
        caption(own, prompt_set, methods, PAPER_REFERENCE),
        language_verdict(own, prompt_set, adaptive, references),
        "Accuracy by family:",
        family_table(own, prompt_set, methods),
    ]
    return "\n\n".join(parts)


def paper_readme_table(runs: pd.DataFrame, prompt_set: str = MAIN_SET) -> str:
    """The methods with at least `MIN_SEEDS` seeds at equal prompts and steps, and what they cost relative to GRPO n=4."""
    whole = of_all_families(paper_runs(runs))
    found = of_methods(whole, prompt_set, paper_methods(runs, prompt_set))
    found = {method: own for method, own in found.items() if len(own) >= MIN_SEEDS}
    reference = found[PAPER_REFERENCE]
    rows = []
    for method, own in found.items():
        row = {"Method": paper_name(method)}
        for column, label in (("accuracy", "Accuracy"), ("pass@16", "pass@16")):
            values = final(own, column)
            row[label] = with_difference(values, final(reference, column), method != PAPER_REFERENCE)
        tokens, least = (mean_of(final(each, "generated_tokens"))[0] for each in (own, reference))
        row["Tokens"] = f"{tokens / least:.1f}×"
        row["CPU time"] = f"{_cpu_seconds(own) / _cpu_seconds(reference):.1f}×"
        rows.append(row)
    return as_table(rows)


# Short runs


def pilot_table(pilots: pd.DataFrame) -> str:
    """The short runs on an unreported seed, which were used to choose the learning rate and the methods."""
    whole = of_all_families(pilots)
    ends = whole[whole["step"] == whole["step"].max()]
    ends = ends.assign(generating=ends["generating_seconds"] * ends["step"] / ends["cpu_seconds"]).to_dict("records")
    rows = [start_row(whole, MAIN_SET, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    methods = [*ORDER, *PAPER]
    rows += [
        {
            "Method": run["method"],
            "Rate": rate_text(run["rate"]),
            "Accuracy": f"{run['accuracy']:.3f}",
            "pass@16": f"{run['pass@16']:.3f}",
            "Time generating": NO_VALUE if math.isnan(run["generating"]) else f"{run['generating']:.0%}",
        }
        for run in sorted(ends, key=lambda run: (run["rate"], methods.index(run["method"])))
    ]
    return as_table([{name: row.get(name, "") for name in rows[-1]} for row in rows])


# Learning rates, batch sizes and iterations


def frontier_runs(runs: pd.DataFrame) -> dict[tuple[str, float], pd.DataFrame]:
    """Evaluations of each run by method and learning rate, in the order of the table."""
    whole = of_all_families(runs)
    by_run = {key: rows.sort_values("step") for key, rows in whole.groupby(["method", "rate"])}
    return dict(sorted(by_run.items(), key=lambda item: (ORDER.index(item[0][0]), item[0][1])))


def is_dominated(run: pd.Series, others: Iterable[pd.Series]) -> bool:
    """Whether another run is at least as good in accuracy and pass@16, and better in one of them."""
    own = run["accuracy"], run["pass@16"]
    ends = [(other["accuracy"], other["pass@16"]) for other in others]
    return any(end != own and end[0] >= own[0] and end[1] >= own[1] for end in ends)


def frontier_table(runs: pd.DataFrame) -> str:
    """Ends of the runs that compare learning rates."""
    ends = {key: rows.iloc[-1] for key, rows in frontier_runs(runs).items()}
    rows = [start_row(of_all_families(runs), MAIN_SET, {"Accuracy": "accuracy", "pass@16": "pass@16"})]
    for (method, rate), end in ends.items():
        row = {"Method": method, "Rate": rate_text(rate), "Steps": f"{end['step']:.0f}"}
        row |= {"1k tokens": f"{end['generated_tokens'] / 1e3:.0f}", "Entropy": f"{end['entropy']:.2f}"}
        row |= {"Accuracy": f"{end['accuracy']:.3f}", "pass@16": f"{end['pass@16']:.3f}"}
        rows.append(row | {"Not dominated": "" if is_dominated(end, ends.values()) else "yes"})
    return as_table([{name: row.get(name, "") for name in rows[-1]} for row in rows])
