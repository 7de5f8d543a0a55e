"""Tables of the small models: equal tokens, one rollout per prompt, and equal prompts per step."""

import math

import pandas as pd

from .. import names
from ..common import markdown
from . import equal_tokens, one_rollout
from .formatting import (
    BETTER,
    MIN_SEEDS,
    REFERENCE,
    SAME,
    STRONG_REFERENCE,
    WORSE,
    against,
    as_table,
    comparison,
    pass_table,
    share_to_reach,
    show,
    with_difference,
)
from .prompt_sets import BIN_EDGES, PROMPT_SETS
from .run import METHODS, PROMPTS_PER_STEP
from .statistics import by_seed, final, mean_of, of_methods, paired_difference


GRPO_2_ITERATIONS = f"{names.GRPO_4}, 2 iterations"
DIVERSITY_SETS = ("hard", "large")
PASS_AT = (1, 8, 64, 256)
FIRST_TABLE = (
    names.GRPO_4,
    names.GRPO_8,
    names.DAPO,
    names.HYBRID,
    names.POSTERIOR,
    GRPO_2_ITERATIONS,
    names.POSTERIOR_2_ITERATIONS,
)
SHOWN = (*FIRST_TABLE, names.RETRIES, names.OVERSAMPLING)  # the other methods are in the ablation
ABLATION = {  # method: its difference from the row above, or (indented) from the posterior baseline with n=1
    names.GRPO_4: names.GRPO_4,
    GRPO_2_ITERATIONS: "2 optimizer iterations",
    f"{names.GRPO_4}, no std normalization": "no std normalization",
    "posterior baseline, n=4": "posterior baseline, n=4",
    names.POSTERIOR: names.POSTERIOR,
    f"{names.POSTERIOR}, EMA only": "… EMA of the pass rates only",
    f"{names.POSTERIOR}, value head only": "… value head only",
    names.ORACLE: "… oracle pass rates",
    f"{names.POSTERIOR}, 1/√p": "… prompt weight 1/√p",
    names.POSTERIOR_2_ITERATIONS: "… 2 optimizer iterations",
    names.RETRIES: "… + retries",
    names.OVERSAMPLING: "… + prompt oversampling ×3",
}
PROMPT_SELECTION = {  # reference: methods that differ from it in the selection of prompts
    names.POSTERIOR: (
        names.RETRIES,
        f"{names.RETRIES} (max 4)",
        f"{names.RETRIES} (max 2)",
        f"{names.POSTERIOR}, + prompt oversampling ×2",
        names.OVERSAMPLING,
        f"{names.POSTERIOR}, + prompt oversampling ×4",
        names.OVERSAMPLING_ORACLE,
    ),
    names.POSTERIOR_2_ITERATIONS: (f"{names.RETRIES}, 2 iterations", f"{names.OVERSAMPLING}, 2 iterations"),
}


def sets_of(evaluations: pd.DataFrame) -> list[str]:
    """The sets with runs of the reference."""
    return [name for name in equal_tokens.SETS if by_seed(evaluations, name, REFERENCE)]


def first_table(equal: pd.DataFrame) -> str:
    """Final accuracy on every set, and the difference from GRPO n=4."""
    sets, rows = sets_of(equal), []
    for method in FIRST_TABLE:
        row = {"Method": method}
        for name in sets:
            runs, reference = by_seed(equal, name, method), by_seed(equal, name, REFERENCE)
            label = equal_tokens.title(name).capitalize()
            row[label] = with_difference(final(runs), final(reference), method != REFERENCE)
        rows.append(row)
    return as_table(rows)


def verdict(equal: pd.DataFrame, single: pd.DataFrame) -> str:
    """The comparisons on small models in a list, for the README."""
    batch, default = differences(single, names.BATCH), differences(equal, names.HYBRID)
    lines = {f"**{names.BATCH}**": batch, f"**{names.HYBRID}**, the default": default}
    return "\n".join(f"- {name}: {text}." for name, text in lines.items() if text)


def differences(evaluations: pd.DataFrame, method: str, reference: str = REFERENCE) -> str:
    """Paired differences from a reference; the sets are grouped by their result."""
    results: dict[str, list[str]] = {BETTER: [], SAME: [], WORSE: []}
    for name in sets_of(evaluations):
        runs, others = by_seed(evaluations, name, method), by_seed(evaluations, name, reference)
        if runs and others:
            mean, half = paired_difference(final(runs), final(others))
            text = f"{equal_tokens.title(name)} ({show((mean, half), sign=True)})"
            results[comparison(mean, half)].append(text)
    return "; ".join(f"{result} {reference} on {', '.join(sets)}" for result, sets in results.items() if sets)


def tokens_table(equal: pd.DataFrame, prompt_set: str) -> str:
    """Every method at its best learning rate, at equal tokens and steps."""
    found = of_methods(equal, prompt_set, SHOWN)
    weak, strong = (final(found.get(method, {})) for method in (REFERENCE, STRONG_REFERENCE))

    def row(method: str, runs: dict[int, pd.DataFrame]) -> dict[str, str]:
        own = final(runs)
        return {
            "Method": method,
            "Rate": f"{next(iter(runs.values()))['rate'].iloc[-1]:g}",
            "Seeds": str(len(runs)),
            "Accuracy": show(mean_of(own)) if len(own) >= MIN_SEEDS else f"{mean_of(own)[0]:.3f}",
            f"against {REFERENCE}": against(own, weak) if method != REFERENCE and weak else "",
            f"against {STRONG_REFERENCE}": against(own, strong) if method != STRONG_REFERENCE and strong else "",
            f"{STRONG_REFERENCE}'s accuracy after": share_to_reach(runs, found.get(STRONG_REFERENCE, {})),
            "1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}",
            "CPU s": f"{mean_of(final(runs, 'cpu_seconds'))[0]:.0f}",
        }

    return as_table([row(method, runs) for method, runs in found.items()])


def one_rollout_table(single: pd.DataFrame) -> str:
    """Accuracy of the baselines with one rollout per prompt, and the mean reward where rewards are graded."""
    rows = []
    for method in one_rollout.METHODS:
        row = {"Method": method}
        for name in sets_of(single):
            own, reference = (by_seed(single, name, m) for m in (method, REFERENCE))
            label = equal_tokens.title(name).capitalize()
            row[label] = with_difference(final(own), final(reference), method != REFERENCE)
            if name == "sorting-graded":
                own, reference = final(own, "mean_reward"), final(reference, "mean_reward")
                row[f"{label}, mean reward"] = with_difference(own, reference, method != REFERENCE)
        rows.append(row)
    return as_table(rows)


def more_tokens_table(equal: pd.DataFrame) -> str:
    """Equal steps with a quarter of the rollouts: accuracy, and the difference from GRPO n=16."""
    most = equal_tokens.MORE_TOKENS
    sets = [name for name in sets_of(equal) if by_seed(equal, name, most)]
    rows = []
    for method in (most, REFERENCE, names.POSTERIOR, names.POSTERIOR_2_ITERATIONS):
        factor = 4 if method == most else 1
        row = {"Method": method, "Rollouts per step": str(factor * equal_tokens.ROLLOUTS_PER_STEP)}
        for name in sets:
            own, reference = (final(by_seed(equal, name, m)) for m in (method, most))
            row[equal_tokens.title(name).capitalize()] = with_difference(own, reference, method != most)
        rows.append(row)
    return as_table(rows)


def parts_table(equal: pd.DataFrame, parts: list[tuple[str, str, str]], sets=DIVERSITY_SETS) -> str:
    """Final accuracy and pass@16 of `(label, method, reference)`, with the differences from the reference."""
    rows = []
    for part, method, reference in parts:
        row = {"": part}
        for name in sets:
            runs, others = by_seed(equal, name, method), by_seed(equal, name, reference)
            for column, label in (("accuracy", name.capitalize()), ("pass@16", f"{name.capitalize()}, pass@16")):
                row[label] = with_difference(final(runs, column), final(others, column), method != reference)
        rows.append(row)
    return as_table(rows)


def ablation_table(equal: pd.DataFrame) -> str:
    """The difference of each part from GRPO."""
    return parts_table(equal, [(part, method, REFERENCE) for method, part in ABLATION.items()])


def prompt_selection_table(equal: pd.DataFrame) -> str:
    """Retries and prompt oversampling, compared with the posterior baseline that samples prompts in the data's order."""
    rows = []
    for reference, methods in PROMPT_SELECTION.items():
        rows += [(method, method, reference) for method in (reference, *methods)]
    return parts_table(equal, rows)


def steps_table(steps: pd.DataFrame, evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Equal prompts per step, as in the paper: accuracy after all steps, and the cost of the steps."""
    found = of_methods(evaluations, prompt_set, METHODS)
    means = steps[steps["prompt_set"] == prompt_set].groupby("method").mean(numeric_only=True)
    strong = final(found[STRONG_REFERENCE])

    def row(method: str, runs: dict[int, pd.DataFrame]) -> dict[str, str]:
        own, of_steps = final(runs), means.loc[method]
        return {
            "Method": method,
            "Accuracy": show(mean_of(own)),
            f"against {STRONG_REFERENCE}": against(own, strong) if method != STRONG_REFERENCE else "",
            "pass@8": show(mean_of(final(runs, "pass@8"))),
            "Rollouts per prompt": f"{of_steps['rollouts'] / PROMPTS_PER_STEP:.1f}",
            "Tokens trained on": f"{of_steps['trained_tokens'] / of_steps['generated_tokens']:.0%}",
            "Zero-gradient prompts": f"{of_steps['frac_zero_advantage_groups']:.0%}",
            "1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}",
            "CPU s": f"{mean_of(final(runs, 'cpu_seconds'))[0]:.0f}",
        }

    return as_table([row(method, runs) for method, runs in found.items()])


def difficulty_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Accuracy on unselected problems by the base model's pass rate."""
    bins = list(range(len(BIN_EDGES) - 1))
    rows = []
    for method, runs in of_methods(evaluations, prompt_set, METHODS).items():
        if not rows:
            before = next(iter(runs.values())).iloc[0]
            rows.append({"method": "before training"} | {i: (float(before[f"bin_{i}"]), math.nan) for i in bins})
        rows.append({"method": method} | {i: mean_of(final(runs, f"bin_{i}")) for i in bins})
    columns = {"Method": lambda row: row["method"]}
    for i in bins:
        columns[f"{BIN_EDGES[i]:g}–{BIN_EDGES[i + 1]:g}"] = lambda row, i=i: show(row[i])
    return markdown(rows, columns)


def tables(
    equal: pd.DataFrame, steps: pd.DataFrame, evaluations: pd.DataFrame, single: pd.DataFrame
) -> dict[str, str]:
    """Every table of the small models by the name of its place in the documents."""
    filled = {"first": first_table(equal), "ablation": ablation_table(equal), "one-rollout": one_rollout_table(single)}
    filled |= {"more-tokens": more_tokens_table(equal), "which-prompts": prompt_selection_table(equal)}
    for name in equal["prompt_set"].unique():
        filled[f"tokens-{name}"] = tokens_table(equal, name)
        if name in DIVERSITY_SETS:
            filled[f"pass-{name}"] = pass_table(equal, name, PASS_AT, SHOWN)
    for name in PROMPT_SETS:
        filled[f"steps-{name}"] = steps_table(steps, evaluations, name)
        filled[f"difficulty-{name}"] = difficulty_table(evaluations, name)
    return filled
