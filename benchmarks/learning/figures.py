"""Figures of the report: tables of `benchmarks.learning.statistics` to matplotlib figures."""

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..common import COLORS, interval
from . import equal_tokens
from .prompt_sets import BIN_EDGES, PASS_AT, PROMPT_SETS
from .statistics import by_seed, paired_difference


CHEAP = "GRPO n=4"


MAIN = {
    **{method: {"color": color} for method, color in COLORS.items() if method not in ("Est", "Posterior")},
    "Est-EMA n=4": {"color": COLORS["Est"], "linestyle": "--"},
    "Est-value n=4": {"color": COLORS["Est"]},
}
# At equal tokens; the first screen of the report, and the README's picture.
FIRST = {
    "GRPO n=4": {"color": COLORS["GRPO n=4"], "marker": "v"},
    "GRPO n=8": {"color": COLORS["GRPO n=8"], "marker": "^"},
    "DAPO n=4": {"color": COLORS["DAPO n=4"], "marker": "X", "linestyle": "--"},
    "Seq-balance, 1/√p, corrected": {"color": COLORS["Seq-balance"], "marker": "D"},
    "Posterior n=1": {"color": COLORS["Posterior"], "marker": "o"},
    "Posterior n=1, 2 iterations": {"color": "#00523b", "marker": "s", "linewidth": 2.4},
}
OTHERS = {
    "Batch n=1": {"color": COLORS["Seq-pos"], "marker": "P"},
    "Posterior n=1, 1 of 3": {"color": "#00523b", "linestyle": "--"},
    "Rounds across steps": {"color": COLORS["Est"], "linestyle": "--"},
}
AXES = {"step": "Optimizer steps", "generated_tokens": "Generated tokens", "cpu_seconds": "CPU seconds of training"}


def panels(columns: int, rows: int = len(PROMPT_SETS), **options):
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def marker(style: dict) -> str:
    return "x" if style.get("linestyle") == "--" else "o"


def short(method: str) -> str:
    """Its name in a figure: the default has the short one."""
    return method.removesuffix(", 1/√p, corrected")


def legend(figure, axes, place=None) -> None:
    """One legend for all panels, of the lines in `axes`: in `place` if there is an empty panel, else below."""
    lines = {}
    for axis in axes:
        lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | lines
    shown = {"handles": lines.values(), "labels": lines.keys(), "frameon": False}
    if place is None:
        figure.legend(**shown, loc="outside lower center", ncols=4, fontsize="small")
    else:
        place.legend(**shown, loc="center left")


def curves(evaluations: pd.DataFrame, prompt_set: str, method: str, column: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Means over seeds by step, and half the 95 % interval of `column`, of the steps that most seeds were evaluated at."""
    rows = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["method"] == method)]
    rows = rows[rows.groupby("step")["seed"].transform("nunique") > rows["seed"].nunique() / 2]
    halves = [interval(values)[1] for _, values in rows.groupby("step")[column]]
    return rows.groupby("step", as_index=False).mean(numeric_only=True), np.nan_to_num(halves)


def accuracy(evaluations: pd.DataFrame, styles: dict[str, dict]) -> Figure:
    """Held-out accuracy against steps, generated tokens and CPU time; bands are 95 % intervals over seeds."""
    figure, axes = panels(len(AXES), sharey="row")
    for row, prompt_set in zip(axes, PROMPT_SETS, strict=True):
        for axis, (column, label) in zip(row, AXES.items(), strict=True):
            for method, style in styles.items():
                means, half = curves(evaluations, prompt_set, method, "accuracy")
                if len(means):
                    axis.plot(means[column], means["accuracy"], label=short(method), **style)
                    band = means["accuracy"] - half, means["accuracy"] + half
                    axis.fill_between(means[column], *band, color=style["color"], alpha=0.12, linewidth=0)
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel(f"Held-out accuracy, {prompt_set} set")
    legend(figure, axes[:, 0])
    return figure


def tokens(equal: pd.DataFrame) -> Figure:
    """Held-out accuracy against generated tokens on every set; bands are 95 % intervals over seeds."""
    sets = [name for name in equal_tokens.SETS if name in set(equal["prompt_set"])]
    figure, axes = panels(math.ceil(len(sets) / 2), rows=2)
    empty = axes.flat[len(sets) :]
    for axis in empty:
        axis.set_axis_off()
    for axis, prompt_set in zip(axes.flat, sets, strict=False):
        draw_tokens(axis, equal, prompt_set)
        axis.set_xlabel("Generated tokens")
        axis.set_ylabel(f"Held-out accuracy, {equal_tokens.title(prompt_set)} set")
    legend(figure, axes[0], next(iter(empty), None))
    return figure


def draw_tokens(
    axis, evaluations: pd.DataFrame, prompt_set: str, scale: float = 1, column: str = "accuracy", styles=FIRST
) -> None:
    """A column of the evaluations, times `scale`, against generated tokens."""
    for method, style in styles.items():
        means, half = curves(evaluations, prompt_set, method, column)
        if len(means):
            x, y = means["generated_tokens"], scale * means[column]
            axis.plot(x, y, label=short(method), markevery=[-1], **style)
            if len(by_seed(evaluations, prompt_set, method)) > 2:  # an interval of two seeds says nothing
                axis.fill_between(x, y - scale * half, y + scale * half, color=style["color"], alpha=0.12, linewidth=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlim(left=0)


def passes(equal: pd.DataFrame, sets=("hard", "large")) -> Figure:
    """pass@k on held-out problems before training and after, at equal tokens; means over seeds."""
    figure, axes = panels(len(sets), rows=1)
    columns = [f"pass@{k}" for k in PASS_AT]
    for axis, prompt_set in zip(axes[0], sets, strict=True):
        for method, style in (FIRST | OTHERS).items():
            means, _ = curves(equal, prompt_set, method, "accuracy")
            if len(means):
                axis.plot(PASS_AT, means[columns].iloc[-1], label=short(method), **style)
                before = means[columns].iloc[0]
        axis.plot(PASS_AT, before, label="before training", color="black", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(PASS_AT, PASS_AT)
        axis.set_xlabel("k")
        axis.set_ylabel(f"pass@k, {prompt_set} set")
    legend(figure, axes[0])
    return figure


def ablation(equal: pd.DataFrame, parts: dict[str, str], sets=("hard", "large")) -> Figure:
    """One bar for each method in `parts`: its accuracy minus that of the first, with the paired 95 % interval."""
    figure, axes = panels(len(sets), rows=1, sharey=True)
    first, *_ = parts
    for axis, prompt_set in zip(axes[0], sets, strict=True):
        accuracies = {
            method: {seed: run["accuracy"].iloc[-1] for seed, run in by_seed(equal, prompt_set, method).items()}
            for method in parts
        }
        for y, (method, own) in enumerate(accuracies.items()):
            difference, half = paired_difference(own, accuracies[first])
            if not math.isnan(difference):
                color = COLORS["Posterior"] if method.startswith(("Posterior", "Rounds")) else COLORS[CHEAP]
                axis.barh(y, difference, xerr=np.nan_to_num(half), color=color, error_kw={"lw": 1, "capsize": 2})
        axis.axvline(0, color="black", lw=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set_xlabel(f"Accuracy minus {first}'s, {prompt_set} set")
    axes[0][0].set_yticks(range(len(parts)), parts.values(), fontsize="small")
    axes[0][0].invert_yaxis()
    return figure


def difficulty(evaluations: pd.DataFrame) -> Figure:
    """Change of accuracy on unselected problems, by the base model's pass rate; bars are 95 % intervals over seeds."""
    figure, axes = panels(len(PROMPT_SETS), rows=1, sharey=True)
    names = [f"bin_{i}" for i in range(len(BIN_EDGES) - 1)]
    for axis, prompt_set in zip(axes[0], PROMPT_SETS, strict=True):
        for shift, (method, style) in zip(np.linspace(-0.3, 0.3, len(MAIN)), MAIN.items(), strict=True):
            runs = by_seed(evaluations, prompt_set, method).values()
            if runs:
                gains = [[run[name].iloc[-1] - run[name].iloc[0] for run in runs] for name in names]
                means, halves = zip(*map(interval, gains), strict=True)
                x, halves = np.arange(len(names)) + shift, np.nan_to_num(halves)
                axis.errorbar(
                    x, means, halves, fmt=marker(style), ms=4, lw=1, label=short(method), color=style["color"]
                )
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xticks(
            range(len(names)),
            [f"{a:g}–{b:g}" for a, b in zip(BIN_EDGES, BIN_EDGES[1:], strict=False)],
            fontsize="x-small",
        )
        axis.set_xlabel(f"Pass rate of the base model; trained on the {prompt_set} set")
    axes[0][0].set_ylabel("Change of accuracy")
    legend(figure, axes[0])
    return figure


def language(runs: pd.DataFrame, prompt_set: str) -> Figure:
    """The language model: accuracy and pass@16 on the way, and by family how often four rollouts all score the same."""
    figure, ((left, middle, right),) = panels(3, rows=1)
    whole = runs[runs["family"] == "all"]
    for axis, column, label in ((left, "accuracy", "Held-out accuracy"), (middle, "pass@16", "pass@16")):
        draw_tokens(axis, whole, prompt_set, column=column, styles=FIRST | OTHERS)
        axis.set(xlabel="Generated tokens", ylabel=f"{label}, {prompt_set}")
    draw_contrast(right, runs, prompt_set)
    right.set_xlabel(f"{CHEAP}: groups whose rollouts all score the same")
    legend(figure, (left,))
    return figure


def draw_contrast(axis, runs: pd.DataFrame, prompt_set: str, scale: float = 1) -> None:
    """By family, the share of GRPO's groups whose rollouts would all score the same before training."""
    families = runs[(runs["family"] != "all") & (runs["step"] == 0) & (runs["prompt_set"] == prompt_set)]
    alike = scale * families.groupby("family")["alike"].mean().sort_values()
    axis.barh(alike.index, alike, color=COLORS[CHEAP])
    axis.set_xlim(0, scale)
    axis.tick_params(axis="y", labelsize="small")


def draw_all(equal: pd.DataFrame, evaluations: pd.DataFrame, parts: dict[str, str]) -> dict[str, Figure]:
    """Every figure by its file name."""
    return {
        "learning_tokens": tokens(equal),
        "learning_accuracy": accuracy(evaluations, MAIN),
        "learning_pass": passes(equal),
        "learning_difficulty": difficulty(evaluations),
        "learning_ablation": ablation(equal, parts),
    }
