"""
Tables and figures of `docs/benchmarks.md`, from stored results: `python -m benchmarks.learning.report`.

The results are those of `benchmarks.learning.language_model`, `equal_tokens` (equal tokens and steps, tuned learning rates) and
`one_rollout`. Those of `benchmarks.learning.run` (equal prompts per step as in the paper, one learning rate) are shown in
`docs/reproducing_the_paper.md`; `--runs outputs/learning/runs` first stores their records in `benchmarks/results`.
"""

import argparse
import math
from pathlib import Path

import pandas as pd

from .. import names
from ..common import FIGURES, RESULTS, ROOT, fill, load_rows
from . import equal_tokens, figures, one_rollout
from .formatting import NO_VALUE, REFERENCE, against, as_table, pass_table, show
from .language_tables import (
    MAIN_SET,
    ORDER,
    PASS_AT,
    caption,
    equal_tokens_runs,
    family_table,
    frontier_table,
    language_table,
    language_verdict,
    of_all_families,
    paper_methods,
    paper_section,
    pilot_table,
    rates_table,
    reported_rates,
    selection_runs,
    stored_language,
    stored_pilots,
)
from .prompt_sets import PROMPT_SETS
from .statistics import by_seed, collect, final, mean_of
from .tables import ABLATION, tables


DOCUMENT, PAPER, RECIPES = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "reproducing_the_paper.md",
    ROOT / "recipes" / "README.md",
)
FILES = ("learning_steps.parquet", "learning_evaluations.parquet")
ARITHMETIC_RECIPES = {  # file in recipes/arithmetic: its method in the comparison
    "grpo-n8": names.GRPO_8,
    "grpo-n16": names.GRPO_16,
    "seq-pos": f"{names.SEQ_POS} (1/√p)",
    "seq-balance": names.HYBRID,
    "est-ema": f"{names.EST} (EMA) n=4",
    "est-value": f"{names.EST} (value head) n=4",
    "batch": names.BATCH,
    "posterior": names.POSTERIOR,
    "retry_unsolved": names.RETRIES,
}
REASONING_RECIPES = {  # file and further arguments: method
    "reasoning/grpo-n4.yaml": names.GRPO_4,
    "reasoning/batch.yaml": names.BATCH,
}
SORTING_RECIPES = {  # file in recipes/sorting: set and method
    "grpo-n4": ("sorting", names.GRPO_4),
    "posterior": ("sorting", names.POSTERIOR),
    "posterior-graded": ("sorting-graded", f"{names.POSTERIOR}, scaled rewards"),
}


def store(runs: Path, directory: Path = RESULTS) -> None:
    """Write the records in `runs` as two tables."""
    directory.mkdir(parents=True, exist_ok=True)
    for table, name in zip(collect(runs.glob("*.json")), FILES, strict=True):
        floats = table.select_dtypes("float64").columns
        table.astype(dict.fromkeys(floats, "float32")).to_parquet(directory / name, index=False, compression="zstd")


def stored(results: Path = RESULTS) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Evaluations at equal tokens; steps and evaluations at equal prompts per step; evaluations with one rollout."""
    steps, evaluations = (pd.read_parquet(results / name) for name in FILES)
    return equal_tokens.reported(load_rows("equal_tokens")), steps, evaluations, one_rollout.stored()


# Expected results of the recipes


def expect_arithmetic(equal: pd.DataFrame, evaluations: pd.DataFrame, single: pd.DataFrame) -> str:
    """Final accuracy on the comparison's sets minus that of GRPO n=4 in the same comparison, because base models differ."""
    rows = []
    for recipe, method in ARITHMETIC_RECIPES.items():
        comparisons = (evaluations, equal, single)
        table = next(runs for runs in comparisons if (runs["method"] == method).any())
        row, tokens = {"Recipe": f"`arithmetic/{recipe}.yaml`"}, []
        for name in PROMPT_SETS:
            runs, reference = by_seed(table, name, method), by_seed(table, name, REFERENCE)
            row[f"Accuracy minus `grpo-n4`'s, {name}"] = against(final(runs), final(reference))
            times = mean_of(final(runs, "generated_tokens"))[0] / mean_of(final(reference, "generated_tokens"))[0]
            tokens.append(NO_VALUE if math.isnan(times) else f"{times:.1f}×")
        rows.append(row | {"Generated tokens": " / ".join(tokens)})
    return as_table(rows)


def expect_sorting(single: pd.DataFrame) -> str:
    rows = []
    for recipe, (name, method) in SORTING_RECIPES.items():
        runs = by_seed(single, name, method)
        row = {"Recipe": f"`sorting/{recipe}.yaml`", "Accuracy": show((mean_of(final(runs))[0], math.nan))}
        rows.append(row | {"1k tokens": f"{mean_of(final(runs, 'generated_tokens'))[0] / 1e3:.0f}"})
    return as_table(rows)


def expect_reasoning(rates: pd.DataFrame) -> str:
    whole, rows = of_all_families(rates), []
    for recipe, method in REASONING_RECIPES.items():
        runs = by_seed(whole, MAIN_SET, method)
        row = {"Recipe": f"`{recipe}`", "Accuracy": f"{mean_of(final(runs))[0]:.3f}"}
        rows.append(row | {"pass@16": f"{mean_of(final(runs, 'pass@16'))[0]:.3f}"})
    return as_table(rows)


# Documents


def build(
    data: tuple[pd.DataFrame, ...],
    language: pd.DataFrame,
    document: Path = DOCUMENT,
    paper: Path = PAPER,
    recipes: Path = RECIPES,
    pictures: Path = FIGURES,
) -> None:
    """Fill the tables of the documents, and draw their figures."""
    equal, _, evaluations, single = data
    for name, table in tables(*data).items():
        fill(name, table, paper if name.startswith(("steps-", "difficulty-")) else document)
    rates, selection = reported_rates(), selection_runs()
    for name, table in language_blocks(language, rates, selection).items():
        fill(name, table, document)
    fill("expect-arithmetic", expect_arithmetic(equal, evaluations, single), recipes)
    fill("expect-sorting", expect_sorting(single), recipes)
    fill("expect-reasoning", expect_reasoning(rates), recipes)
    drawn = figures.draw_all(equal, evaluations, ABLATION)
    drawn |= {f"language_{name}": figures.language(language, name) for name in language["prompt_set"].unique()}
    if paper_methods(language):
        drawn["language_paper"] = figures.language_paper(language, MAIN_SET)
    drawn["language_rates"] = figures.language_rates(rates)
    drawn["language_frontier"] = figures.language_frontier(selection)
    for name, figure in drawn.items():
        figure.savefig(pictures / f"{name}.png", dpi=110)


def language_blocks(language: pd.DataFrame, rates: pd.DataFrame, selection: pd.DataFrame) -> dict[str, str]:
    """Every table and text on the language model by the name of its place in the document."""
    blocks = {
        "language-paper": paper_section(language),
        "language-rates": f"{rates_table(rates)}\n\n{caption(rates, MAIN_SET, ORDER)}",
        "language-frontier": frontier_table(selection),
        "language-pilots": pilot_table(stored_pilots()),
    }
    equal = equal_tokens_runs(language)
    for name in equal["prompt_set"].unique():
        blocks[f"language-{name}"] = f"{language_table(equal, name)}\n\n{caption(equal, name, ORDER)}"
        blocks[f"language-verdict-{name}"] = language_verdict(equal, name)
        blocks[f"families-{name}"] = family_table(equal, name)
        whole = of_all_families(equal)
        # On longer answers there are 16 samples of each problem.
        ks = [k for k in PASS_AT if whole[whole["prompt_set"] == name][f"pass@{k}"].notna().any()]
        blocks[f"passes-{name}"] = pass_table(whole, name, ks, ORDER)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="Records of benchmarks.learning.run to store first.")
    args = parser.parse_args()
    if args.runs is not None:
        store(args.runs)
    build(stored(), stored_language())


if __name__ == "__main__":
    main()
