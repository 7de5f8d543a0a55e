"""Figures of the report: tables of `benchmarks.learning.statistics` to matplotlib figures."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ..common import COLORS, interval
from .prompt_sets import BIN_EDGES, PASS_AT, PROMPT_SETS
from .statistics import by_seed


MAIN = {
    **{method: {"color": color} for method, color in COLORS.items() if method != "Est"},
    "Est-EMA n=4": {"color": COLORS["Est"], "linestyle": "--"},
    "Est-value n=4": {"color": COLORS["Est"]},
}
VARIANTS = {
    "Seq-balance": {"color": COLORS["Seq-balance"]},
    "Seq-balance, weight 1": {"color": "#ff7f0e"},
    "Seq-balance, weight 1/p": {"color": "#8c564b"},
    "Seq-balance, corrected": {"color": "#e377c2"},
    "GRPO n=8": {"color": COLORS["GRPO n=8"]},
    "Est-EMA n=8": {"color": COLORS["Est"], "linestyle": "--"},
    "Est-value n=8": {"color": COLORS["Est"]},
}
AXES = {"step": "Optimizer steps", "generated_tokens": "Generated tokens", "cpu_seconds": "CPU seconds of training"}
ADAPTIVE = ("Seq-pos", "Seq-balance")
BLOCK = 5  # steps that a curve of per-step figures is averaged over


def panels(columns: int, rows: int = len(PROMPT_SETS), **options):
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def marker(style: dict) -> str:
    return "x" if style.get("linestyle") == "--" else "o"


def legend(figure, axes) -> None:
    """One legend for all panels, of the lines in `axes`."""
    lines = {}
    for axis in axes:
        lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | lines
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def curves(evaluations: pd.DataFrame, prompt_set: str, method: str, column: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Means over seeds by step, and half the 95 % interval of `column`."""
    rows = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["method"] == method)]
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
                    axis.plot(means[column], means["accuracy"], label=method, **style)
                    band = means["accuracy"] - half, means["accuracy"] + half
                    axis.fill_between(means[column], *band, color=style["color"], alpha=0.12, linewidth=0)
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel(f"Held-out accuracy, {prompt_set} set")
    legend(figure, axes[:, 0])
    return figure


def frontier(evaluations: pd.DataFrame) -> Figure:
    """Accuracy against entropy over training, means over seeds; the end of a run is marked."""
    figure, axes = panels(len(PROMPT_SETS), rows=1)
    for axis, prompt_set in zip(axes[0], PROMPT_SETS, strict=True):
        for method, style in MAIN.items():
            means, _ = curves(evaluations, prompt_set, method, "accuracy")
            if len(means):
                axis.plot(means["entropy"], means["accuracy"], label=method, **style)
                axis.plot(means["entropy"].iloc[-1], means["accuracy"].iloc[-1], marker(style), color=style["color"])
        axis.set_xlabel("Entropy on held-out problems (nats per token)")
        axis.set_ylabel(f"Held-out accuracy, {prompt_set} set")
    legend(figure, axes[0])
    return figure


def passes(evaluations: pd.DataFrame) -> Figure:
    """pass@k on held-out problems before training (dotted) and after, means over seeds."""
    figure, axes = panels(len(PROMPT_SETS), rows=1)
    columns = [f"pass@{k}" for k in PASS_AT]
    for axis, prompt_set in zip(axes[0], PROMPT_SETS, strict=True):
        for method, style in MAIN.items():
            means, _ = curves(evaluations, prompt_set, method, "accuracy")
            if len(means):
                axis.plot(PASS_AT, means[columns].iloc[-1], label=method, **style)
                axis.plot(PASS_AT, means[columns].iloc[0], color="black", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(PASS_AT, PASS_AT)
        axis.set_xlabel("k")
        axis.set_ylabel(f"pass@k, {prompt_set} set")
    legend(figure, axes[0])
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
                axis.errorbar(x, means, halves, fmt=marker(style), ms=4, lw=1, label=method, color=style["color"])
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xticks(range(len(names)), [f"{a:g}–{b:g}" for a, b in zip(BIN_EDGES, BIN_EDGES[1:], strict=False)])
        axis.set_xlabel(f"Pass rate of the base model; trained on the {prompt_set} set")
    axes[0][0].set_ylabel("Change of accuracy")
    legend(figure, axes[0])
    return figure


def sampling(steps: pd.DataFrame) -> Figure:
    """Rollouts and zero-gradient prompts of each method; active prompts and missing quota of the Seq methods."""
    figure, axes = panels(4)
    steps = steps.assign(block=(steps["step"] - 1) // BLOCK * BLOCK + (BLOCK + 1) / 2)
    steps = steps.fillna({name: 0 for name in steps.columns if name.startswith("active_prompts/")})
    for row, prompt_set in zip(axes, PROMPT_SETS, strict=True):
        of_set = steps[steps["prompt_set"] == prompt_set]
        means = of_set.groupby(["method", "block"]).mean(numeric_only=True)
        present = set(means.index.get_level_values("method"))
        for method, style in MAIN.items():
            if method in present:
                row[0].plot(means.loc[method]["rollouts"], label=method, **style)
                row[1].plot(means.loc[method]["zero_signal/final"], **style)
        for method, style in zip(ADAPTIVE, ("--", "-"), strict=True):
            if method in present:
                _draw_rounds(row[2], row[3], means.loc[method], method, style)
        row[0].set_ylabel(f"Rollouts per step, {prompt_set} set")
        row[1].set_ylabel("Zero-gradient share of the update")
        row[2].set_ylabel("Active prompts by round")
        row[3].set_ylabel("Unresolved prompts")
        for axis in row:
            axis.set_ylim(bottom=0)
            axis.set_xlabel("Optimizer steps")
    for axis in axes[0][2:]:
        axis.legend(fontsize="xx-small", ncols=2, loc="upper left")
    legend(figure, axes[:, 0])
    return figure


def _draw_rounds(active, unresolved, means: pd.DataFrame, method: str, style: str) -> None:
    for k in range(2, 5):
        active.plot(means[f"active_prompts/round_{k}"], style, color=f"C{k}", label=f"round {k}, {method}")
    negative, positive = means["unresolved/all_negative"], means["unresolved/all_positive"]
    unresolved.plot(negative, style, color="C3", label=f"no positive, {method}")
    unresolved.plot(positive, style, color="C2", label=f"no negative, {method}")
    unresolved.plot(1 - means["resolved"] - negative - positive, style, color="C7", label=f"too few of one, {method}")


def draw_all(steps: pd.DataFrame, evaluations: pd.DataFrame) -> dict[str, Figure]:
    """Every figure by its file name."""
    return {
        "learning_accuracy": accuracy(evaluations, MAIN),
        "learning_variants": accuracy(evaluations, VARIANTS),
        "learning_frontier": frontier(evaluations),
        "learning_pass": passes(evaluations),
        "learning_difficulty": difficulty(evaluations),
        "learning_sampling": sampling(steps),
    }
