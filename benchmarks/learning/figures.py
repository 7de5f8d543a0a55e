"""Figures of the report: tables of `benchmarks.learning.statistics` to matplotlib figures."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

from .. import names
from ..common import COLORS, interval
from . import equal_tokens
from .formatting import MIN_SEEDS, REFERENCE
from .language_model import RATE
from .language_tables import (
    MAIN_SET,
    ORDER,
    equal_tokens_runs,
    frontier_runs,
    of_all_families,
    paper_methods,
    paper_name,
    paper_runs,
    rate_text,
)
from .prompt_sets import BIN_EDGES, PASS_AT, PROMPT_SETS
from .statistics import by_seed, paired_difference


DARK_GREEN = "#00523b"
STYLES = {
    names.GRPO_4: {"color": COLORS[names.GRPO_4], "marker": "v"},
    names.GRPO_8: {"color": COLORS[names.GRPO_8], "marker": "^"},
    names.GRPO_16: {"color": COLORS[names.GRPO_16], "marker": "<"},
    names.DAPO: {"color": COLORS[names.DAPO], "marker": "X", "linestyle": "--"},
    f"{names.SEQ_POS} (1/√p)": {"color": COLORS[names.SEQ_POS], "marker": "p"},
    names.SEQ_POS_2: {"color": COLORS[names.SEQ_POS], "marker": "p"},
    names.HYBRID: {"color": COLORS[names.SEQ_BALANCE], "marker": "D"},
    names.ALGORITHM_2: {"color": "#8c1c13", "marker": "D"},
    names.CORRECTED: {"color": COLORS[names.SEQ_BALANCE], "marker": "D", "linestyle": "--"},
    f"{names.EST} (value head) n=4": {"color": COLORS[names.EST], "marker": "h"},
    f"{names.EST} (value head) n=8": {"color": COLORS[names.EST], "marker": "h"},
    f"{names.EST} (EMA) n=8": {"color": COLORS[names.EST], "marker": "h", "linestyle": "--"},
    names.BATCH: {"color": COLORS[names.BATCH], "marker": "P"},
    names.BATCH_2_ITERATIONS: {"color": "#8c510a", "marker": "X"},
    names.BATCH_HALF_STEPS: {"color": COLORS[names.BATCH], "marker": "1"},
    names.POSTERIOR: {"color": COLORS[names.POSTERIOR], "marker": "o"},
    names.POSTERIOR_2_ITERATIONS: {"color": DARK_GREEN, "marker": "s"},
    names.OVERSAMPLING: {"color": DARK_GREEN, "marker": "*", "linestyle": "--"},
    names.RETRIES: {"color": COLORS[names.EST], "marker": "d", "linestyle": ":"},
    names.RETRIES_OVERSAMPLING: {"color": "#7b3294", "marker": "d"},
}
EQUAL_TOKENS = (
    *(names.GRPO_4, names.GRPO_8, names.DAPO, names.HYBRID, names.POSTERIOR, names.POSTERIOR_2_ITERATIONS),
)
EQUAL_PROMPTS = (
    *(names.GRPO_4, names.GRPO_8, names.GRPO_16, names.DAPO, f"{names.SEQ_POS} (1/√p)", names.HYBRID),
    f"{names.EST} (value head) n=4",
)
PASSES = (
    names.GRPO_4,
    names.HYBRID,
    names.POSTERIOR,
    names.POSTERIOR_2_ITERATIONS,
    names.OVERSAMPLING,
    names.RETRIES,
)
LANGUAGE = (names.GRPO_4, names.GRPO_8, names.BATCH, names.POSTERIOR, names.OVERSAMPLING, names.RETRIES)
AXES = {"step": "Optimizer steps", "generated_tokens": "Generated tokens", "cpu_seconds": "CPU seconds of training"}


def panels(columns: int, rows: int = len(PROMPT_SETS), **options):
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def legend(figure, axes: Iterable, place=None, columns: int = 4) -> None:
    """One legend for all panels, of the lines in `axes`: in the empty panel `place` if there is one, else below."""
    lines = {}
    for axis in axes:
        lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | lines
    shown = {"handles": lines.values(), "labels": lines.keys(), "frameon": False}
    if place is None:
        figure.legend(**shown, loc="outside lower center", ncols=columns, fontsize="small")
    else:
        place.set_axis_off()
        place.legend(**shown, loc="center left")


def means_by_step(
    evaluations: pd.DataFrame, prompt_set: str, method: str, column: str
) -> tuple[pd.DataFrame, np.ndarray]:
    """Means over seeds and half the 95% interval of `column`, for the steps at which most seeds were evaluated."""
    rows = evaluations[(evaluations["prompt_set"] == prompt_set) & (evaluations["method"] == method)]
    rows = rows[rows.groupby("step")["seed"].transform("nunique") > rows["seed"].nunique() / 2]
    halves = [interval(values)[1] for _, values in rows.groupby("step")[column]]
    return rows.groupby("step", as_index=False).mean(numeric_only=True), np.nan_to_num(halves)


def draw_curves(
    axis,
    evaluations: pd.DataFrame,
    prompt_set: str,
    methods: Iterable[str],
    x: str = "generated_tokens",
    y: str = "accuracy",
    scale: float = 1,
    beside: bool = False,
) -> None:
    """
    The means of `y`, times `scale`, against `x`. The 95% interval over seeds is drawn for the last evaluation only, because
    bands of several methods cover each other; with `beside`, to the right of all curves, for methods that end at the same `x`.
    """
    found = {method: means_by_step(evaluations, prompt_set, method, y) for method in methods}
    found = {method: values for method, values in found.items() if len(values[0])}
    end = max((means[x].iloc[-1] for means, _ in found.values()), default=0)
    for i, (method, (means, halves)) in enumerate(found.items()):
        style = STYLES[paper_name(method)]
        color, line, symbol = style["color"], style.get("linestyle", "-"), style["marker"]
        values = scale * means[y]
        axis.plot(means[x], values, color=color, linestyle=line)
        last = end * (1.04 + 0.035 * i) if beside else means[x].iloc[-1]
        half = scale * halves[-1] if len(by_seed(evaluations, prompt_set, method)) >= MIN_SEEDS else None
        bars = {"capsize": 3, "elinewidth": 1.2} if half is not None else {}
        axis.errorbar(last, values.iloc[-1], yerr=half, fmt=symbol, color=color, **bars)
        axis.plot([], [], label=names.short(paper_name(method)), **style)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlim(left=0)
    if beside:  # the x of the markers on the right has no meaning
        axis.axvline(1.02 * end, color="0.8", linewidth=0.8)
        axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= end])
        middle, below = end * (1.04 + 0.0175 * (len(found) - 1)), {"xytext": (0, -5), "textcoords": "offset points"}
        place = {"xy": (middle, 0), "xycoords": axis.get_xaxis_transform(), "ha": "center", "va": "top"}
        axis.annotate("final", **place, **below, fontsize="small")


def accuracy(evaluations: pd.DataFrame) -> Figure:
    """Equal prompts per step: held-out accuracy against steps, generated tokens and CPU time."""
    figure, axes = panels(len(AXES), sharey="row")
    for row, prompt_set in zip(axes, PROMPT_SETS, strict=True):
        for axis, (column, label) in zip(row, AXES.items(), strict=True):
            draw_curves(axis, evaluations, prompt_set, EQUAL_PROMPTS, x=column, beside=column == "step")
            axis.set(xlabel=label, title=f"{prompt_set.capitalize()} set")
        row[0].set_ylabel("Held-out accuracy")
    legend(figure, axes[:, 0])
    return figure


def tokens(equal: pd.DataFrame) -> Figure:
    """Equal tokens: held-out accuracy against generated tokens on every set."""
    sets = [name for name in equal_tokens.SETS if name in set(equal["prompt_set"])]
    figure, axes = panels(math.ceil(len(sets) / 2), rows=2)
    empty = axes.flat[len(sets) :]
    for axis in empty:
        axis.set_axis_off()
    for axis, prompt_set in zip(axes.flat, sets, strict=False):
        draw_curves(axis, equal, prompt_set, EQUAL_TOKENS)
        axis.set(xlabel="Generated tokens", title=equal_tokens.title(prompt_set).capitalize())
    for row in axes:
        row[0].set_ylabel("Held-out accuracy")
    legend(figure, axes[0], next(iter(empty), None))
    return figure


def passes(equal: pd.DataFrame, sets=("hard", "large")) -> Figure:
    """pass@k after training minus pass@k before, at equal tokens; means over seeds."""
    figure, axes = panels(len(sets), rows=1, sharey=True)
    columns = [f"pass@{k}" for k in PASS_AT]
    for axis, prompt_set in zip(axes[0], sets, strict=True):
        for method in PASSES:
            means, _ = means_by_step(equal, prompt_set, method, "accuracy")
            if len(means):
                change = means[columns].iloc[-1] - means[columns].iloc[0]
                axis.plot(PASS_AT, change, label=names.short(method), markersize=5, **STYLES[method])
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(PASS_AT, PASS_AT)
        axis.set(xlabel="k", title=f"{prompt_set.capitalize()} set")
    axes[0][0].set_ylabel("Change of pass@k by training")
    legend(figure, axes[0])
    return figure


def ablation(equal: pd.DataFrame, parts: dict[str, str], sets=("hard", "large")) -> Figure:
    """One bar for each method in `parts`: its accuracy minus that of the first, with the paired 95% interval."""
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
                color = COLORS[names.POSTERIOR] if method.startswith("posterior") else COLORS[REFERENCE]
                axis.barh(y, difference, xerr=np.nan_to_num(half), color=color, error_kw={"lw": 1, "capsize": 2})
            else:
                axis.text(0, y, " not run", va="center", fontsize="x-small", color="grey")
        axis.axvline(0, color="black", lw=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set(xlabel=f"Accuracy minus {first}'s", title=f"{prompt_set.capitalize()} set")
    axes[0][0].set_yticks(range(len(parts)), parts.values(), fontsize="small")
    axes[0][0].invert_yaxis()
    return figure


def difficulty(evaluations: pd.DataFrame) -> Figure:
    """Change of accuracy on unselected problems, by the base model's pass rate; bars are 95% intervals over seeds."""
    figure, axes = panels(len(PROMPT_SETS), rows=1, sharey=True)
    columns = [f"bin_{i}" for i in range(len(BIN_EDGES) - 1)]
    ticks = [f"{low:g}–{high:g}" for low, high in zip(BIN_EDGES, BIN_EDGES[1:], strict=False)]
    for axis, prompt_set in zip(axes[0], PROMPT_SETS, strict=True):
        for shift, method in zip(np.linspace(-0.3, 0.3, len(EQUAL_PROMPTS)), EQUAL_PROMPTS, strict=True):
            runs = by_seed(evaluations, prompt_set, method).values()
            if runs:
                gains = [[run[name].iloc[-1] - run[name].iloc[0] for run in runs] for name in columns]
                means, halves = zip(*map(interval, gains), strict=True)
                style = {name: STYLES[method][name] for name in ("color", "marker")}
                x = np.arange(len(columns)) + shift
                axis.errorbar(x, means, np.nan_to_num(halves), label=names.short(method), ls="", ms=4, lw=1, **style)
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xticks(range(len(columns)), ticks, fontsize="x-small")
        axis.set(xlabel="Pass rate of the base model", title=f"Trained on the {prompt_set} set")
    axes[0][0].set_ylabel("Change of accuracy by training")
    legend(figure, axes[0])
    return figure


def language(runs: pd.DataFrame, prompt_set: str) -> Figure:
    """The language model at equal tokens: accuracy, pass@16, and zero-variance groups by family."""
    figure, ((left, middle, right),) = panels(3, rows=1)
    whole = of_all_families(equal_tokens_runs(runs))
    for axis, column, label in ((left, "accuracy", "Held-out accuracy"), (middle, "pass@16", "Held-out pass@16")):
        draw_curves(axis, whole, prompt_set, LANGUAGE, y=column, beside=True)
        axis.set(xlabel="Generated tokens", title=f"{label}, {prompt_set}")
    draw_zero_variance(right, runs, prompt_set)
    right.set(xlabel="Fraction of groups before training", title="Zero-variance groups (GRPO, n=4)")
    legend(figure, (left,))
    return figure


def draw_zero_variance(axis, runs: pd.DataFrame, prompt_set: str, scale: float = 1) -> None:
    """Fraction of groups of four rollouts with zero reward variance before training, by family."""
    runs = equal_tokens_runs(runs)  # the runs of the paper's protocol start from another base model
    families = runs[(runs["family"] != "all") & (runs["step"] == 0) & (runs["prompt_set"] == prompt_set)]
    shares = scale * families.groupby("family")["frac_zero_variance"].mean().sort_values()
    axis.barh(shares.index, shares, color=COLORS[REFERENCE])
    axis.set_xlim(0, scale)
    axis.tick_params(axis="y", labelsize="small")


def language_paper(runs: pd.DataFrame, prompt_set: str) -> Figure:
    """The paper's protocol: accuracy by steps and tokens; the others by steps; pass@16 against accuracy over training."""
    figure, axes = panels(3, rows=2)
    methods, whole = paper_methods(runs), of_all_families(paper_runs(runs))
    steps = "Optimizer steps"
    for axis, x, y, label, title in (
        (axes[0][0], "step", "accuracy", steps, "Held-out accuracy"),
        (axes[0][1], "generated_tokens", "accuracy", "Generated tokens", "Held-out accuracy"),
        (axes[0][2], "step", "pass@16", steps, "Held-out pass@16"),
        (axes[1][0], "step", "frac_zero_advantage_groups", steps, "Zero-variance groups in training"),
        (axes[1][1], "step", "entropy", steps, "Entropy in training (nats per token)"),
    ):
        rows = per_interval(whole, y) if y in ("frac_zero_advantage_groups", "entropy") else whole
        draw_curves(axis, rows, prompt_set, methods, x=x, y=y, beside=x == "step")
        axis.set(xlabel=label, title=title)
    draw_tradeoff(axes[1][2], whole, prompt_set, methods)
    legend(figure, axes[0])
    return figure


def language_rates(runs: pd.DataFrame) -> Figure:
    """Methods with one learning rate each: accuracy and pass@16 against tokens, and against each other over training."""
    figure, ((left, middle, right),) = panels(3, rows=1)
    whole = of_all_families(runs)
    for axis, column in ((left, "accuracy"), (middle, "pass@16")):
        draw_curves(axis, whole, MAIN_SET, ORDER, y=column, beside=True)
        axis.set(xlabel="Generated tokens", title=f"Held-out {column}")
    draw_tradeoff(right, whole, MAIN_SET, ORDER)
    legend(figure, (left,))
    return figure


def draw_tradeoff(axis, evaluations: pd.DataFrame, prompt_set: str, methods: Iterable[str]) -> None:
    """pass@16 against accuracy over training, means over seeds."""
    draw_curves(axis, evaluations, prompt_set, methods, x="accuracy", y="pass@16")
    axis.autoscale(axis="x")
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set(xlabel="Held-out accuracy", title="pass@16 against accuracy")


def language_frontier(runs: pd.DataFrame) -> Figure:
    """One seed of methods at several learning rates: accuracy against tokens, and pass@16 against accuracy over training."""
    figure, ((left, right),) = panels(2, rows=1)
    for (method, rate), rows in frontier_runs(runs).items():
        style = STYLES[method] | {"linestyle": "-" if rate == RATE else "--", "markersize": 5}
        left.plot(rows["generated_tokens"], rows["accuracy"], **style)
        right.plot(rows["accuracy"], rows["pass@16"], label=f"{names.short(method)}, {rate_text(rate)}", **style)
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    left.set(xlabel="Generated tokens", title="Held-out accuracy")
    right.set(xlabel="Held-out accuracy", title="pass@16 against accuracy")
    legend(figure, (right,), columns=3)
    return figure


def per_interval(evaluations: pd.DataFrame, column: str) -> pd.DataFrame:
    """Means of `column` over the steps since the previous evaluation, from the stored means over all steps so far."""
    rows = evaluations[evaluations["step"] > 0].sort_values("step")
    runs = rows.groupby(["prompt_set", "method", "seed"])
    total = rows[column] * rows["step"]
    totals = total - total.groupby([rows[name] for name in ("prompt_set", "method", "seed")]).shift(fill_value=0)
    return rows.assign(**{column: totals / (rows["step"] - runs["step"].shift(fill_value=0))})


def draw_all(equal: pd.DataFrame, evaluations: pd.DataFrame, parts: dict[str, str]) -> dict[str, Figure]:
    """Every figure of the small models by its file name."""
    return {
        "learning_tokens": tokens(equal),
        "learning_accuracy": accuracy(evaluations),
        "learning_pass": passes(equal),
        "learning_difficulty": difficulty(evaluations),
        "learning_ablation": ablation(equal, parts),
    }
