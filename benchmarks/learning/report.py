"""
The tables and figures of `docs/report.md`, from stored results only.

`python -m benchmarks.learning.report --runs outputs/learning/runs` first stores the records of `benchmarks.learning.run` as two
parquet files beside the figures; without `--runs` it makes the report from those.
"""

import argparse
import math
from pathlib import Path

import pandas as pd

from ..common import FIGURES, RESULTS, ROOT, fill, interval, markdown
from . import figures
from .prompt_sets import BIN_EDGES, PROMPT_SETS
from .run import METHODS, PROMPTS_PER_STEP
from .statistics import accuracy_at, by_seed, collect, common_budget, cost_to_reach, paired_difference


DOCUMENT = ROOT / "docs" / "report.md"
FILES = ("learning_steps.parquet", "learning_evaluations.parquet")
# Budgets are named after the plain method of the family that spends them.
FAMILIES = {n: [f"GRPO n={n}", f"Est-EMA n={n}", f"Est-value n={n}"] for n in (4, 8)}
BASELINE = "GRPO n=8"


def store(runs: Path, directory: Path = RESULTS) -> None:
    """Write the records in `runs` as the two tables that the report is made of."""
    directory.mkdir(parents=True, exist_ok=True)
    for table, name in zip(collect(runs.glob("*.json")), FILES, strict=True):
        floats = table.select_dtypes("float64").columns
        table.astype(dict.fromkeys(floats, "float32")).to_parquet(directory / name, index=False, compression="zstd")


def criteria(evaluations: pd.DataFrame, prompt_set: str) -> dict[str, tuple[str, float]]:
    """What the methods are compared at: a name, a column of costs and a budget each."""
    of_set = evaluations[evaluations["prompt_set"] == prompt_set]
    last = int(of_set["step"].max())
    found = {f"{last} steps": ("step", last)}
    for axis, unit, scale in (("generated_tokens", "k tokens", 1e3), ("cpu_seconds", "CPU s", 1)):
        for family in FAMILIES.values():
            budget = common_budget(evaluations, prompt_set, axis, family)
            if math.isnan(budget):
                continue
            found[f"{budget / scale:.0f} {unit}"] = (axis, budget)
    return found


def comparison(evaluations: pd.DataFrame, prompt_set: str) -> list[dict]:
    """Accuracy of every method at every criterion, as `{seed: accuracy}`; empty where a run could not afford it."""
    rows = []
    for method in METHODS:
        runs = by_seed(evaluations, prompt_set, method)
        if not runs:
            continue
        row = {"method": method, "seeds": len(runs)}
        for name, (axis, budget) in criteria(evaluations, prompt_set).items():
            values = {seed: accuracy_at(run, axis, budget) for seed, run in runs.items()}
            row[name] = {} if any(map(math.isnan, values.values())) else values
        row |= {name: interval([run[name].iloc[-1] for run in runs.values()])[0] for name in TOTALS}
        rows.append(row)
    return rows


TOTALS = {"generated_tokens": lambda x: f"{x / 1e3:.0f}k", "cpu_seconds": lambda x: f"{x:.0f}"}


def show(mean_and_half: tuple[float, float], digits: int = 3, sign: bool = False) -> str:
    mean, half = mean_and_half
    if math.isnan(mean):
        return "–"
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def methods_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Accuracy at equal steps, equal generated tokens and equal CPU time."""
    columns = {"Method": lambda row: row["method"], "Seeds": lambda row: str(row["seeds"])}
    for name in criteria(evaluations, prompt_set):
        columns[name] = lambda row, name=name: show(interval(list(row[name].values())))
    columns["Tokens"] = lambda row: TOTALS["generated_tokens"](row["generated_tokens"])
    columns["CPU s"] = lambda row: TOTALS["cpu_seconds"](row["cpu_seconds"])
    return markdown(comparison(evaluations, prompt_set), columns)


def differences_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Paired differences from the baseline, bold where the interval leaves out 0."""
    rows = comparison(evaluations, prompt_set)
    baseline = next((row for row in rows if row["method"] == BASELINE), None)
    if baseline is None:
        return f"{BASELINE} has not been run."

    def cell(row, name):
        mean, half = paired_difference(row[name], baseline[name])
        text = show((mean, half), sign=True)
        return f"**{text}**" if abs(mean) > half else text

    columns = {"Method": lambda row: row["method"]}
    for name in criteria(evaluations, prompt_set):
        columns[name] = lambda row, name=name: cell(row, name)
    return markdown([row for row in rows if row is not baseline], columns)


def speed_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Steps, tokens and CPU time until the mean final accuracy of the baseline is reached."""
    baseline = by_seed(evaluations, prompt_set, BASELINE)
    if not baseline:
        return f"{BASELINE} has not been run."
    target = interval([run["accuracy"].iloc[-1] for run in baseline.values()])[0]
    spent = {axis: interval([run[axis].iloc[-1] for run in baseline.values()])[0] for axis in SPEED}
    rows = []
    for method in METHODS:
        runs = by_seed(evaluations, prompt_set, method)
        if runs:
            costs = {axis: sorted(cost_to_reach(run, axis, target) for run in runs.values()) for axis in SPEED}
            reached = sum(map(math.isfinite, costs["step"]))
            rows.append({"method": method, "reached": f"{reached} of {len(runs)}"} | costs)

    def cell(row, axis):
        median = row[axis][len(row[axis]) // 2]  # of an even number of seeds the worse one
        return "not reached" if math.isinf(median) else f"{SPEED[axis](median)} ({median / spent[axis]:.2f}×)"

    columns = {"Method": lambda row: row["method"], f"Seeds reaching {target:.3f}": lambda row: row["reached"]}
    for axis, label in zip(SPEED, ("Steps", "Generated tokens", "CPU seconds"), strict=True):
        columns[label] = lambda row, axis=axis: cell(row, axis)
    return markdown(rows, columns)


SPEED = {"step": lambda x: f"{x:.0f}", **TOTALS}


def pass_table(evaluations: pd.DataFrame, prompt_set: str, ks=(1, 8, 64, 256)) -> str:
    """pass@k before and after training."""
    runs = {method: by_seed(evaluations, prompt_set, method) for method in METHODS}
    runs = {method: found for method, found in runs.items() if found}
    before = next(iter(next(iter(runs.values())).values())).iloc[0]
    rows = [{"method": "before training"} | {k: (float(before[f"pass@{k}"]), math.nan) for k in ks}]
    for method, found in runs.items():
        rows.append({"method": method} | {k: interval([r[f"pass@{k}"].iloc[-1] for r in found.values()]) for k in ks})
    columns = {"Method": lambda row: row["method"]}
    return markdown(rows, columns | {f"pass@{k}": lambda row, k=k: show(row[k]) for k in ks})


def difficulty_table(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """Accuracy on unselected problems, by the pass rate that the base model has on them."""
    bins = list(range(len(BIN_EDGES) - 1))
    rows = []
    for method in METHODS:
        runs = list(by_seed(evaluations, prompt_set, method).values())
        if runs and not rows:
            rows.append(
                {"method": "before training"} | {i: (float(runs[0][f"bin_{i}"].iloc[0]), math.nan) for i in bins}
            )
        if runs:
            rows.append({"method": method} | {i: interval([run[f"bin_{i}"].iloc[-1] for run in runs]) for i in bins})
    columns = {"Method": lambda row: row["method"]}
    for i in bins:
        columns[f"{BIN_EDGES[i]:g}–{BIN_EDGES[i + 1]:g}"] = lambda row, i=i: show(row[i])
    return markdown(rows, columns)


def sampling_table(steps: pd.DataFrame, prompt_set: str) -> str:
    """What was sampled: means over all steps and seeds."""
    means = steps[steps["prompt_set"] == prompt_set].groupby("method").mean(numeric_only=True)
    rows = [means.loc[method] for method in METHODS if method in means.index]
    return markdown(
        rows,
        {
            "Method": lambda row: row.name,
            "Rollouts per prompt": lambda row: f"{row['rollouts'] / PROMPTS_PER_STEP:.1f}",
            "Generated tokens per step": lambda row: f"{row['generated_tokens']:.0f}",
            "Trained tokens per step": lambda row: f"{row['trained_tokens']:.0f}",
            "Zero-gradient prompts, as GRPO": lambda row: f"{row['zero_signal/first_round']:.1%}",
            "in the update": lambda row: f"{row['zero_signal/final']:.1%}",
            "CPU s per step": lambda row: f"{row['cpu_seconds']:.2f}",
        },
    )


def summary(evaluations: pd.DataFrame, prompt_set: str) -> str:
    """What the comparison says, in sentences, whoever wins."""
    rows = comparison(evaluations, prompt_set)
    baseline = next((row for row in rows if row["method"] == BASELINE), None)
    lines = []
    for name in criteria(evaluations, prompt_set):
        afford = [row for row in rows if row[name]]
        if not afford:
            continue
        best = max(afford, key=lambda row: interval(list(row[name].values()))[0])
        line = f"- At {name}, {best['method']} has the best mean, {show(interval(list(best[name].values())))}."
        if baseline is not None and baseline[name]:
            line += " " + _against_baseline([row for row in afford if row is not baseline], baseline, name)
        lines.append(line)
    return "\n".join(lines)


def _against_baseline(rows: list[dict], baseline: dict, name: str) -> str:
    differences = {row["method"]: paired_difference(row[name], baseline[name]) for row in rows}
    better = [method for method, (mean, half) in differences.items() if mean > half]
    worse = [method for method, (mean, half) in differences.items() if mean < -half]
    return (
        f"Better than {BASELINE} beyond chance: {', '.join(better) or 'none'}. "
        f"Worse: {', '.join(worse) or 'none'}. Not told apart: {len(rows) - len(better) - len(worse)} of {len(rows)}."
    )


def status(evaluations: pd.DataFrame) -> str:
    done = evaluations[["prompt_set", "method", "seed"]].drop_duplicates()
    seeds = (
        done.groupby(["prompt_set", "method"])
        .size()
        .reindex(pd.MultiIndex.from_product([PROMPT_SETS, METHODS]), fill_value=0)
    )
    low, high = seeds.min(), seeds.max()
    number = str(high) if low == high else f"{low} to {high}"
    return f"{len(done)} runs are stored: {number} seeds of each method on each set."


TABLES = {
    "summary": summary,
    "methods": methods_table,
    "differences": differences_table,
    "speed": speed_table,
    "pass": pass_table,
    "difficulty": difficulty_table,
}


def build(document: Path = DOCUMENT, results: Path = RESULTS, pictures: Path = FIGURES) -> None:
    """Fill the tables of the document and draw its figures."""
    steps, evaluations = (pd.read_parquet(results / name) for name in FILES)
    fill("status", status(evaluations), document)
    for prompt_set in evaluations["prompt_set"].unique():
        for name, table in TABLES.items():
            fill(f"{name}-{prompt_set}", table(evaluations, prompt_set), document)
        fill(f"sampling-{prompt_set}", sampling_table(steps, prompt_set), document)
    for name, figure in figures.draw_all(steps, evaluations).items():
        figure.savefig(pictures / f"{name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="Records of benchmarks.learning.run; default: what is stored.")
    args = parser.parse_args()
    if args.runs is not None:
        store(args.runs)
    build()


if __name__ == "__main__":
    main()
