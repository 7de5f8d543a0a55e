"""Figures of learning results, and the README's overview."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from . import names
from .analyses.outcomes import Outcome, sequential_outcome, single_round_outcome
from .common import COLORS, DEFAULT
from .comparisons import Comparison
from .plans import RECOMMENDED
from .statistics import interval


RETRIES = {  # darker greens are more retries
    names.batch_retries(1): "#8fd175",
    names.batch_retries(2): "#4cb96b",
    names.batch_retries(3): "#009e73",
    names.batch_retries(7): "#00563f",
}
STYLES = {
    names.GRPO_4: {"color": COLORS[names.GRPO_4], "marker": "v"},
    names.GRPO_8: {"color": COLORS[names.GRPO_8], "marker": "^"},
    names.GRPO_16: {"color": COLORS[names.GRPO_16], "marker": "<"},
    names.HYBRID: {"color": COLORS[names.SEQ_BALANCE], "marker": "D"},
    names.SMALL_ROUNDS: {"color": COLORS[names.SEQ_BALANCE], "marker": "D"},
    names.ALGORITHM_2: {"color": "#8c1c13", "marker": "s", "linestyle": "-."},
    names.BATCH: {"color": COLORS[names.BATCH], "marker": "P"},
    **{method: {"color": color, "marker": "o", "linestyle": "--"} for method, color in RETRIES.items()},
}


def style(method: str) -> dict:
    """Style of a method, also with its learning rate."""
    return STYLES[method.split(" at ")[0]]


def panels(columns: int, rows: int = 1):
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def legend(figure, axis, **options) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = 3 if len(labels) == 5 else 4  # so that no entry is alone in the second row
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, **options)


def means_by_step(found: Comparison, method: str, columns: Iterable[str]) -> tuple[dict[str, np.ndarray], dict]:
    """Means of `columns` over seeds at the steps that all seeds have, and half the interval of the last one."""
    runs = [run.set_index("step") for run in found.runs[method].values()]
    steps = sorted(set.intersection(*(set(run.index) for run in runs)))
    values = {
        c: np.array([[step if c == "step" else run[c][step] for step in steps] for run in runs]) for c in columns
    }
    halves = {c: interval(value[:, -1]).half for c, value in values.items()}
    return {c: value.mean(axis=0) for c, value in values.items()}, halves


def draw_curves(axis, found: Comparison, methods: Iterable[str], x: str, y: str, scale: float = 1) -> None:
    """Means of `y`, times `scale`, against `x`; the 95% interval at the end is drawn right of all curves."""
    ends = []
    for method in methods:
        means, halves = means_by_step(found, method, dict.fromkeys((x, y)))
        own = style(method)
        if x == "accuracy":
            means[x] = scale * means[x]
        axis.plot(means[x], scale * means[y], **own | {"markersize": 5}, label=names.short(method))
        ends.append((means[x][-1], scale * means[y][-1], scale * halves[y], own))
    if x != "accuracy":
        end = max(last for last, *_ in ends)
        for i, (_, value, half, own) in enumerate(ends):
            bar = {"color": own["color"], "marker": own["marker"], "markersize": 5, "capsize": 3, "linestyle": "none"}
            axis.errorbar(end * (1.05 + 0.035 * i), value, yerr=np.nan_to_num(half), **bar)
        axis.axvline(1.025 * end, color="0.8", linewidth=0.8)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xticks([tick for tick in MaxNLocator(4).tick_values(0, end) if 0 <= tick <= end])


def trade_off(axis, found: Comparison, methods: Iterable[str], scale: float = 1) -> None:
    """pass@16 against accuracy over training."""
    draw_curves(axis, found, methods, "accuracy", "pass@16", scale)
    axis.set(xlabel="Held-out accuracy", title="pass@16 against accuracy")


def curves_and_trade_off(found: Comparison, methods: Iterable[str], x: str, label: str) -> Figure:
    """Accuracy and pass@16 against `x`, and against each other over training, of the methods that have runs."""
    methods = [method for method in methods if method in found.runs]
    figure, ((left, middle, right),) = panels(3)
    for axis, column in ((left, "accuracy"), (middle, "pass@16")):
        draw_curves(axis, found, methods, x, column)
        axis.set(xlabel=label, title=f"Held-out {column}")
    trade_off(right, found, methods)
    legend(figure, left)
    return figure


def equal_tokens(found: Comparison, methods: Iterable[str]) -> Figure:
    return curves_and_trade_off(found, methods, "generated_tokens", "Generated tokens")


# The README's first figure

OUTCOMES = {
    names.GRPO_4: lambda p: single_round_outcome(p, 4),
    names.GRPO_8: lambda p: single_round_outcome(p, 8),
    names.SMALL_ROUNDS: lambda p: sequential_outcome(p, **DEFAULT),
    # The baseline is the mean reward of other prompts, so a single rollout has a non-zero advantage.
    RECOMMENDED: lambda p: Outcome(*np.broadcast_arrays(0.0, 1.0, np.ones(len(p)))),
}
PASS_RATES = 1 / (1 + np.exp(-np.linspace(-5, 5, 201)))
PIXELS = 830  # width of a picture in a README on GitHub


def overview_caption(found: Comparison) -> str:
    """The figure in words."""
    seeds = len(found.runs[RECOMMENDED])
    return (
        "*Left, computed: probability that a prompt does not train the model. Middle and right, measured: short "
        f"answers, means over {seeds} seeds with a point every 25 steps and 95% intervals after the last; dotted: "
        "before training.*"
    )


def overview(found: Comparison) -> Figure:
    """Zero gradients by pass rate, and a language model's accuracy and pass@16."""
    drawn = Figure(figsize=(PIXELS / 100, 3.4), layout="constrained")
    zero_gradient, *measured = drawn.subplots(1, 3)
    for method, compute in OUTCOMES.items():
        own = {"color": style(method)["color"], "linestyle": style(method).get("linestyle", "-"), "linewidth": 2}
        label = "Seq-balance" if method == names.SMALL_ROUNDS else names.short(method)
        zero_gradient.plot(PASS_RATES, 100 * compute(PASS_RATES).zero_gradient, label=label, **own)
    zero_gradient.set(title="P(zero gradient), %", xlabel="Pass rate of the prompt", ylim=(-3, 100), xscale="logit")
    zero_gradient.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["1%", "10%", "50%", "90%", "99%"])
    zero_gradient.minorticks_off()
    methods = (names.GRPO_4, names.GRPO_8, RECOMMENDED)
    accuracy, both = measured
    draw_curves(accuracy, found, methods, "generated_tokens", "accuracy", scale=100)
    accuracy.set(title="Accuracy of a 135M model, %", xlabel="Generated tokens")
    trade_off(both, found, methods, scale=100)
    both.axhline(100 * found.before_training("pass@16"), color="0.4", linestyle=":", linewidth=1.2)
    both.set(title="pass@16 against accuracy, %", xlabel="Accuracy over training, %")
    for axis in drawn.axes:
        axis.grid(alpha=0.25)
        axis.title.set_fontsize(10.5)
        axis.spines[["top", "right"]].set_visible(False)
    legend(drawn, zero_gradient)
    return drawn


def draw_all(paper: Comparison, confirmation: Comparison, numbers_of_retries: Comparison) -> dict[str, Figure]:
    """Every figure by its file name."""
    return {
        "overview": overview(numbers_of_retries),
        "confirmation": equal_tokens(confirmation, (confirmation.reference, names.BATCH, *RETRIES)),
        "number_of_retries": equal_tokens(numbers_of_retries, numbers_of_retries.runs),
        "language_paper": curves_and_trade_off(
            paper, (paper.reference, names.GRPO_16, names.ALGORITHM_2, names.HYBRID), "step", "Optimizer steps"
        ),
    }
