"""
Tables, sentences and figures of learning results in the documents: `python -m benchmarks.report`.

Everything is generated from the stored results: the places `<!-- name -->` of the documents that [`blocks`] names.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from . import figures, names
from .common import FIGURES, README, RESULTS, ROOT, fill
from .comparisons import ACCURACY, PASS_AT_16, Comparison, as_table, by_seed, final, load, per_step
from .gpu import fast, right, rounds
from .learning.confirmation import PARTS, SECOND_PLAN, STORED
from .learning.confirmation import PROMPT_SET as MAIN_SET
from .learning.language_model import HYBRID_3_PROMPTS, LONG_SET, PAPER, PAPER_SUFFIX, RATE, RATES
from .learning.small_models import AHEAD, EXPERIMENTS, SETS
from .plans import (
    BEFORE,
    both,
    last_step,
    plan_block,
    rate_text,
    readme_results,
    recommendation,
    retries_table,
    stored_part,
)


DOCS = ROOT / "docs"
HARD_SET = "hard"
SELECTION_SEED = 9  # used only to choose learning rates; the chosen rates are reported with other seeds
CHOSEN_RATE = 1e-4
EARLIER_LOOKS = (3,)  # on the language model, comparisons were looked at with three seeds before more were added
TITLES = {"sorting-graded": "Graded sorting"}


def compare(
    evaluations: pd.DataFrame, prompt_set: str, methods, looks=(), reference: str = names.GRPO_4
) -> Comparison:
    return Comparison({m: by_seed(evaluations, prompt_set, m) for m in methods}, reference, looks)


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
            best = run.loc[run["accuracy"].idxmax()]
            cells.append(row | {"Highest accuracy": f"{best['accuracy']:.3f} after {best['step']:.0f} steps"})
    return as_table(cells)


def families_table(methods: Sequence[str], evaluations: pd.DataFrame) -> str:
    """By family: zero-variance groups of four rollouts before training, and accuracy before and after."""
    rows = evaluations[(evaluations["family"] != "all") & (evaluations["seed"] != SELECTION_SEED)]
    rows = rows[(rows["rate"] == CHOSEN_RATE) & rows["method"].isin(methods)]
    lines = []
    for family, own in rows.groupby("family"):
        start, end = own[own["step"] == 0], own[own["step"] == own["step"].max()]
        share = start["frac_zero_variance"].mean()
        row = {"Family": family, "Zero-variance groups (n=4)": f"{share:.0%}"}
        row["before training"] = f"{start['accuracy'].mean():.3f}"
        means = end.groupby("method")["accuracy"].mean()
        lines.append((-share, row | {method: f"{means[method]:.3f}" for method in methods}))
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


def cpu_seconds(found: Comparison, method: str) -> float:
    """CPU seconds per step of the fastest seed: other runs on the machine make a step slower, never faster."""
    return min(found.values(method, per_step("cpu_seconds")).values())


def paper_table(found: Comparison) -> str:
    def relative(method: str, cost: Callable[[str], float]) -> str:
        return f"{cost(method) / cost(PAPER_REFERENCE):.1f}×"

    columns: dict[str, Callable[[str], str]] = {
        "Steps": lambda m: f"{last_step(found, m)}",
        "Seeds": found.num_seeds,
        "Accuracy": lambda m: found.cell(m, ACCURACY),
        "pass@16": lambda m: found.cell(m, PASS_AT_16),
        "Tokens per step": lambda m: relative(m, lambda own: found.mean(own, per_step("generated_tokens")).mean),
        "CPU time per step": lambda m: relative(m, lambda own: cpu_seconds(found, own)),
        "Zero-variance groups": lambda m: f"{found.mean(m, final('frac_zero_advantage_groups')).mean:.2f}",
        "Entropy": lambda m: f"{found.mean(m, final('entropy')).mean:.2f}",
    }
    return found.table(columns, BEFORE)


PAPER_CAPTION = (
    f"*Differences are from {names.GRPO_4} at {rate_text(CHOSEN_RATE)}, its better rate, and not corrected for the "
    f"number of comparisons. The other methods were run at {rate_text(RATE)} only.*"
)


def claims_table(found: Comparison) -> str:
    """The claims of the paper and what the runs show."""
    entropy = final("entropy")

    per_method = {
        m: found.mean(m, per_step("rollouts")).mean for m in (names.ALGORITHM_2, names.GRPO_16, names.SEQ_POS_2)
    }
    claims = {
        f"better than GRPO at equal prompts ({last_step(found, found.reference)} steps of GRPO, "
        f"{last_step(found, names.ALGORITHM_2)} of the others)": "<br>".join(
            f"{names.short(m)}, {both(found, m)}" for m in (names.ALGORITHM_2, names.HYBRID, names.SEQ_POS_2)
        ),
        "better than GRPO n=16, with fewer rollouts": f"Algorithm 2, {both(found, names.ALGORITHM_2, names.GRPO_16)}; "
        f"{per_method[names.ALGORITHM_2]:.0f} rollouts per step instead of {per_method[names.GRPO_16]:.0f}, because most "
        "prompts are hard",
        "Seq-balance is better than Seq-pos": f"Algorithm 2, {both(found, names.ALGORITHM_2, names.SEQ_POS_2)}; "
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
    """Stored results of a stage with vLLM on a GPU: `environment` and `units`; without units if it has not been run."""
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
    paper, sets, planned = paper_protocol(), other_sets(), load(STORED)
    parts = ("confirmation", "number of retries", "longer answers", "passes over the data")
    confirmed, retries, longer, passes = (stored_part(name, planned) for name in parts)
    return {
        DOCS / "benchmarks.md": {
            "confirmation": plan_block([name for name in PARTS if name not in SECOND_PLAN], planned),
            "second-plan": plan_block(SECOND_PLAN, planned),
            "language-selection": selection_table(),
            "language-families": families_table((names.GRPO_4, names.GRPO_8, names.BATCH), load(RATES)),
            "language-sets": other_sets_table(sets),
            "language-paper": f"{paper_table(paper)}\n\n{PAPER_CAPTION}",
            "language-claims": claims_table(paper),
            "small-equal-tokens": small_table("equal_tokens"),
            "small-one-rollout": small_table("one_rollout"),
            "gpu": gpu_block(),
        },
        README: {
            "overview": figures.overview_caption(retries),
            "results": readme_results(planned),
            "gpu": gpu_limitation(),
        },
        DOCS / "reproducing_the_paper.md": {
            "equal-steps": f"{equal_steps_table()}\n\nAgainst {names.GRPO_8}, in accuracy:\n\n{equal_steps_sentences()}"
        },
        DOCS / "settings.md": {"recommended": recommendation(retries)},
        DOCS / "tuning.md": {"retries": retries_table(confirmed, retries, longer, passes)},
        DOCS / "vllm.md": {"staleness": ahead_table()},
    }


def all_figures() -> dict[str, Figure]:
    planned = load(STORED)
    parts = [stored_part(name, planned) for name in ("confirmation", "number of retries")]
    return figures.draw_all(paper_protocol(), small_experiment("equal_steps"), *parts)


def main() -> None:
    for document, texts in blocks().items():
        for name, text in texts.items():
            fill(name, text, document)
    for name, figure in all_figures().items():
        figure.savefig(FIGURES / f"{name}.png", dpi=200 if name == "overview" else 110)


if __name__ == "__main__":
    main()
