"""
Tables, sentences and figures of learning results in the documents: `python -m benchmarks.report`.

Everything is generated from the stored results: the places `<!-- name -->` of the documents that [`blocks`] names.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from . import figures, graded, names, verdicts
from .common import ARCHIVE, FIGURES, README, RESULTS, ROOT, fill
from .comparisons import ACCURACY, PASS_AT_16, Comparison, as_table, by_seed, final, load, per_step
from .gpu import fast, right, rounds
from .learning.confirmation import FIRST_PLAN, SECOND_PLAN, STORED
from .learning.confirmation import PROMPT_SET as MAIN_SET
from .learning.language_model import HYBRID_3_PROMPTS, LONG_SET, PAPER, PAPER_SUFFIX, RATE, RATES
from .learning.small_models import AHEAD, EXPERIMENTS, SETS
from .plans import BEFORE, both, last_step, plan_block, rate_text, stored_part, third_plan_block


DOCS = ROOT / "docs"
HARD_SET = "hard"
SELECTION_SEED = 9  # used only to choose learning rates; the chosen rates are reported with other seeds
CHOSEN_RATE = 1e-4


def compare(evaluations: pd.DataFrame, prompt_set: str, methods) -> Comparison:
    return Comparison({m: by_seed(evaluations, prompt_set, m) for m in methods}, names.GRPO_4)


# The language model at equal tokens


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
            cells.append(row)
    return as_table(cells)


OTHER_SETS = {  # at one learning rate for all methods
    MAIN_SET: f"mixture at {rate_text(RATE)}",
    HARD_SET: "seven hard families",
    LONG_SET: "longer answers",
}


def other_sets() -> dict[str, Comparison]:
    rows = load("language_model")
    methods = (names.GRPO_4, names.GRPO_8, HYBRID_3_PROMPTS, names.BATCH)
    return {name: compare(rows, name, methods) for name in OTHER_SETS}


def other_sets_table(sets: dict[str, Comparison]) -> str:
    rows = []
    for name, found in sets.items():
        for method in found.runs:
            row = {"Set": "", "Method": f"{method} ({len(found.runs[method])} seeds)"}
            if method == found.reference:
                start = ", ".join(f"{found.before_training(column):.3f}" for column in BEFORE.values())
                row["Set"] = f"{OTHER_SETS[name]} (before training: {start})"
            rows.append(row | {"Accuracy": found.cell(method, ACCURACY), "pass@16": found.cell(method, PASS_AT_16)})
    return as_table(rows)


# The paper's protocol on the language model

PAPER_STEPS = 75
PAPER_REFERENCE = f"{names.GRPO_4} at {rate_text(CHOSEN_RATE)}"


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
    def tokens(method: str) -> float:
        return found.mean(method, per_step("generated_tokens")).mean

    columns: dict[str, Callable[[str], str]] = {
        "Steps": lambda m: f"{last_step(found, m)}",
        "Seeds": lambda m: str(len(found.runs[m])),
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
        "Tokens per step": lambda m: f"{tokens(m) / tokens(PAPER_REFERENCE):.1f}×",
        "Entropy": lambda m: f"{found.mean(m, final('entropy')).mean:.2f}",
    }
    return found.table(columns, BEFORE)


def claims(found: Comparison) -> str:
    """Claims of the paper that the table does not show."""
    rollouts = {
        m: found.mean(m, per_step("rollouts")).mean for m in (names.ALGORITHM_2, names.GRPO_16, names.SEQ_POS_2)
    }
    algorithm = names.short(names.ALGORITHM_2)
    lines = [
        f"{algorithm} against more rollouts, {both(found, names.ALGORITHM_2, names.GRPO_16)}; it has "
        f"{rollouts[names.ALGORITHM_2]:.0f} rollouts per step instead of {rollouts[names.GRPO_16]:.0f}, because most "
        "prompts are hard",
        f"{algorithm}, {both(found, names.ALGORITHM_2, names.SEQ_POS_2)}, which has {rollouts[names.SEQ_POS_2]:.0f}",
    ]
    return "\n".join(f"- {line}." for line in lines)


# Small models


def small_experiment(name: str) -> dict[str, Comparison]:
    rows = load(name)
    sets = [one for one in SETS if one in set(rows["prompt_set"])]
    return {one: compare(rows, one, EXPERIMENTS[name]) for one in sets}


def small_table(name: str) -> str:
    """Accuracy on every set but the graded one."""
    sets = {one: found for one, found in small_experiment(name).items() if one != "sorting-graded"}
    rows = []
    for method in (method for method in EXPERIMENTS[name] if any(method in found.runs for found in sets.values())):
        cells = {one.capitalize(): found.cell(method, ACCURACY) for one, found in sets.items()}
        rows.append({"Method": method} | cells)
    return as_table(rows)


def equal_steps_table() -> str:
    """Equal prompts per step on addition, as in the paper: results and costs, on the easy and the hard set."""
    sets = small_experiment("equal_steps")
    rows = []
    for method in (method for method in EXPERIMENTS["equal_steps"] if not method.startswith(names.EST)):
        row = {"Method": method}
        for name, found in sets.items():
            row[f"Accuracy, {name}"] = found.cell(method, ACCURACY)
        row["pass@8, hard"] = sets["hard"].cell(method, final("pass@8"))
        costs = [found.mean(method, per_step("rollouts")).mean / 32 for found in sets.values()]
        row["Rollouts per prompt"] = ", ".join(f"{cost:.1f}" for cost in costs)
        rows.append(row)
    return as_table(rows)


def ahead_sentence() -> str:
    """GRPO with and without generation one step ahead."""
    found = small_experiment("one_step_ahead")
    gains = {name: one.difference(AHEAD, ACCURACY) for name, one in found.items()}
    words = ", ".join(f"{name} {gain.text(sign=True)}" for name, gain in gains.items())
    is_same = not any(gain.excludes_zero for gain in gains.values())
    return f"Accuracy of {names.GRPO_4} on addition{' does not change significantly' if is_same else ''}: {words}."


# Documents


def gpu_results(stage: str) -> dict:
    """Stored results of a stage with vLLM on a GPU: `environment` and `units`, empty if it has not been run."""
    path = RESULTS / "gpu" / f"{stage}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"units": {}}


def gpu_block() -> str:
    """Device and tables of the stages with vLLM on a GPU."""
    checked, measured, without_server = map(gpu_results, ("right", "fast", "rounds"))
    found = checked["environment"]
    versions = ", ".join(f"{package} {found['versions'][package]}" for package in ("vllm", "torch", "trl"))
    header = f"{found['device']}, {versions}, commit {found['commit'][:7]}."
    tables = [right.report(checked["units"]), fast.report(measured["units"])]
    if without_server["units"]:
        tables.append(rounds.report(without_server["units"]))
    return "\n\n".join([header, *tables])


def gpu_limitation() -> str:
    """README's sentence about runs on a GPU."""
    trained, measured = gpu_results("right")["units"], gpu_results("fast")["units"]
    ratios = [
        sum(row["generation_seconds"]["ours"]) / sum(row["generation_seconds"]["TRL"])
        for row in measured.values()
        if "generation_seconds" in row
    ]
    has_rounds = any(name.startswith(f"step, {names.SEQ_BALANCE}") for name in measured)
    return (
        f"- Run for [45 minutes on one GPU](benchmarks/gpu/README.md), with vLLM in {len(trained)} short runs "
        f"({min(ratios):.2f} to {max(ratios):.2f} of TRL's generation time); not on several GPUs, not over NCCL"
        + ("." if has_rounds else ", and without step times of adaptive sampling.")
    )


def blocks() -> dict[Path, dict[str, str]]:
    """Every generated text by document and name of its place."""
    paper, planned = paper_protocol(), load(STORED)
    return {
        ARCHIVE: {
            "confirmation": plan_block(FIRST_PLAN, planned),
            "second-plan": plan_block(SECOND_PLAN, planned, with_tables=False),
            "third-plan": third_plan_block(planned),
            "graded-rewards": graded.block(load(graded.STORED)),
            "language-selection": selection_table(),
            "language-sets": other_sets_table(other_sets()),
            "language-paper": paper_table(paper),
            "language-claims": claims(paper),
            "small-equal-tokens": small_table("equal_tokens"),
            "small-one-rollout": small_table("one_rollout"),
            "equal-steps": equal_steps_table(),
        },
        ROOT / "benchmarks" / "gpu" / "README.md": {"vllm": gpu_block()},
        README: {
            "results": verdicts.readme_results(
                planned, figures.overview_caption(stored_part(verdicts.SHORT, planned))
            ),
            "gpu": gpu_limitation(),
        },
        DOCS / "results.md": {
            "verdict": verdicts.verdict(planned),
            "correction": verdicts.correction(planned),
            "short": verdicts.short_tables(planned),
            "number": verdicts.numbers_by_rule(planned),
            "repeated": verdicts.tables(verdicts.REPEATED, planned),
            "longer": verdicts.tables(verdicts.LONGER, planned),
            "paper": verdicts.paper_sentence(planned),
        },
        DOCS / "migrating.md": {"retries": verdicts.retries_table(planned)},
        DOCS / "running.md": {"staleness": ahead_sentence()},
    }


def all_figures() -> dict[str, Figure]:
    planned = load(STORED)
    parts = [stored_part(name, planned) for name in ("confirmation", "number of retries")]
    return figures.draw_all(paper_protocol(), *parts)


def main() -> None:
    for document, texts in blocks().items():
        for name, text in texts.items():
            fill(name, text, document)
    for name, figure in all_figures().items():
        figure.savefig(FIGURES / f"{name}.png", dpi=200 if name == "overview" else 110)


if __name__ == "__main__":
    main()
