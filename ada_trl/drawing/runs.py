"""What training runs learnt, what they spent, and what sampling did."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..utils.tables import markdown_table
from .curves import ALL_TOKENS, MINUTES, STEPS, TOKENS, Log, against, by_round, cost, curve
from .panels import draw, legend_above, make_panels


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def learning_figure(runs: Mapping[str, Log], metrics: Mapping[str, str] | None = None) -> "Figure":
    """
    Rewards against steps, tokens and time.

    Args:
        runs (`Mapping[str, Log]`):
            Log histories by label.
        metrics (`Mapping[str, str]`, *optional*):
            Label of each metric to draw, one row of panels each; those that no run has logged are left out. By default
            the training reward (of the first round, where there are several) and the reward on the evaluation set.

    Returns:
        `matplotlib.figure.Figure`: tokens are generated ones if every run has counted them, else those of the prompts
        are included. Time leaves evaluation out.
    """
    from matplotlib.ticker import EngFormatter

    metrics = metrics or {"reward": "Training reward", "eval_reward": "Evaluation reward"}
    shown = {
        name: label for name, label in metrics.items() if any(len(curve(log, name).steps) for log in runs.values())
    }
    counted = all(len(curve(log, "ada/tokens/generated").steps) for log in runs.values())
    columns = [STEPS, TOKENS if counted else ALL_TOKENS, MINUTES]
    figure, panels = make_panels(max(len(shown), 1), len(columns), sharey="row")
    for row, (name, label) in zip(panels, shown.items(), strict=False):
        for panel, axis in zip(row, columns, strict=True):
            for run, log in runs.items():
                points = {"marker": "o", "markersize": 3, "markevery": None} if name.startswith("eval") else {}
                draw(panel, against(log, name, axis), label=run, **points)
            panel.set_xlabel(axis)
            if axis in (TOKENS, ALL_TOKENS):
                panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel(label)
    panels[0][0].legend(frameon=False, fontsize="small")
    return figure


def cost_table(runs: Mapping[str, Log]) -> str:
    """
    What a step of each run costs, as Markdown: the paper's table 3, with rollouts and tokens. Seconds are per optimizer
    step, without evaluation; the last column is relative to the first run.
    """
    rows, first = [], None
    for run, log in runs.items():
        steps = curve(log, "step").steps
        last = steps[-1] if len(steps) else 0
        spent = {axis: cost(log, axis).values for axis in (TOKENS, MINUTES)}
        tokens, seconds = (values[-1] if len(values) else math.nan for values in spent.values())
        seconds = 60 * seconds / max(last, 1)
        first = seconds if first is None else first
        rollouts = curve(log, "ada/samples_per_prompt/mean").values
        rows.append(
            [
                run,
                f"{last}",
                f"{np.nanmean(rollouts):.1f}" if len(rollouts) else "–",
                "–" if math.isnan(tokens) else f"{tokens:,.0f}",
                "–" if math.isnan(seconds) else f"{seconds:.3g}",
                "–" if math.isnan(seconds / first) else f"{seconds / first:.2f}×",
            ]
        )
    return markdown_table(["Run", "Steps", "Rollouts per prompt", TOKENS, "Seconds per step", "Relative"], rows)


def signal_figure(runs: Mapping[str, Log]) -> "Figure":
    """Share of prompts without gradient, before (dotted) and after sampling further rounds, and the policy's entropy."""
    figure, ((signal, entropy),) = make_panels(1, 2)
    for i, (run, log) in enumerate(runs.items()):
        before, after = curve(log, "frac_reward_zero_std"), curve(log, "ada/frac_zero_advantage_groups")
        if len(after.steps):
            draw(signal, before, color=f"C{i}", linestyle=":")
        draw(signal, after if len(after.steps) else before, color=f"C{i}", label=run)
        draw(entropy, curve(log, "entropy"), color=f"C{i}", label=run)
    signal.set(ylabel="Prompts without gradient", ylim=(-0.02, 1.02), xlabel=STEPS)
    signal.set_title("dotted: as GRPO, from the first round; solid: trained on", fontsize="small")
    entropy.set(ylabel="Entropy of the update (nats/token)", xlabel=STEPS)
    signal.legend(fontsize="small")
    return figure


def sampling_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    What adaptive sampling did, a row of panels per run: prompts still active in each round, rollouts per prompt, and
    why prompts stayed unresolved. `None` if all prompts of all runs got the same.
    """
    adaptive = {run: log for run, log in runs.items() if len(curve(log, "ada/rounds/mean").steps)}
    if not adaptive:
        return None
    figure, panels = make_panels(len(adaptive), 3)
    for row, (run, log) in zip(panels, adaptive.items(), strict=True):
        _draw_sampling(row, log)
        row[0].set_ylabel(f"{run}\nactive prompts")
        for panel in row:
            panel.set_ylim(bottom=0)
            panel.set_xlabel(STEPS)
    return figure


def _draw_sampling(row: Sequence["Axes"], log: Log) -> None:
    for k, active in by_round(log, "ada/active_prompts").items():
        draw(row[0], active, color=f"C{k - 1}", label=f"round {k}")
    for name, style in (("max", ":"), ("mean", "-"), ("min", ":")):
        draw(row[1], curve(log, f"ada/samples_per_prompt/{name}"), color="C0", linestyle=style)
    row[1].set_ylabel("Rollouts per prompt\n(dotted: least, most)")
    steps, resolved = curve(log, "ada/frac_exit_condition_met")
    positive, negative = (curve(log, f"ada/frac_all_{name}").values for name in ("correct", "wrong"))
    other = np.clip(1 - resolved - positive - negative, 0, None)  # both kinds, but too few of one; or unscored
    row[2].stackplot(
        steps, negative, positive, other, labels=["all negative", "all positive", "too few of one"], alpha=0.8
    )
    row[2].set_ylabel("Unresolved prompts")
    for panel in (row[0], row[2]):
        legend_above(panel)


def baseline_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    How good the baseline was, where it is no pool: the share of the rewards' variance that it explains (dotted: the mean of
    the prompt's other rollouts), and what it is worth in rollouts. `None` if no run has used one.
    """
    using = {run: log for run, log in runs.items() if len(curve(log, "ada/baseline/explained_variance").steps)}
    if not using:
        return None
    figure, ((explained, strength),) = make_panels(1, 2)
    for i, (run, log) in enumerate(using.items()):
        draw(explained, curve(log, "ada/baseline/explained_variance"), color=f"C{i}", label=run)
        others = curve(log, "ada/baseline/explained_variance_leave_one_out")
        if len(others.steps):
            draw(explained, others, color=f"C{i}", linestyle=":")
        draw(strength, curve(log, "ada/baseline/pseudo_counts"), color=f"C{i}")
    explained.set(ylabel="Variance explained", ylim=(-0.5, 1), xlabel=STEPS)
    explained.axhline(0, color="black", linewidth=0.8)
    strength.set(ylabel="Baseline, in rollouts", xlabel=STEPS)
    strength.set_ylim(bottom=0)
    legend_above(explained)
    return figure


def prompts_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    Which prompts were asked: how many in a step, the share that was asked for the first time, and how often the data set was
    gone through. `None` if no run took its prompts from the stream.
    """
    using = {run: log for run, log in runs.items() if len(curve(log, "ada/prompts/sampled").steps)}
    if not using:
        return None
    figure, (panels,) = make_panels(1, 3)
    for i, (run, log) in enumerate(using.items()):
        for panel, name in zip(panels, ("sampled", "frac_new", "epoch"), strict=True):
            draw(panel, curve(log, f"ada/prompts/{name}"), color=f"C{i}", label=run)
    for panel, label in zip(
        panels, ("Prompts sampled", "Sampled for the first time", "Times through the data"), strict=True
    ):
        panel.set(ylabel=label, xlabel=STEPS)
        panel.set_ylim(bottom=0)
    legend_above(panels[0])
    return figure


def difficulty_figure(records: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> "Figure":
    """
    Difficulty of the prompts of each run: share of positives among all their rollouts, and the estimate.

    Args:
        records (`Mapping[str, tuple[Sequence[float], Sequence[float]]]`):
            Observed pass rates and estimates of the prompts, as [`read_record`] returns them.
    """
    figure, panels = make_panels(len(records), 2, sharex=True)
    for row, (run, columns) in zip(panels, records.items(), strict=True):
        for panel, values, label in zip(row, columns, ("Observed over the run", "Estimated now"), strict=True):
            panel.hist(values, bins=np.linspace(0, 1, 21), weights=np.full(len(values), 1 / max(len(values), 1)))
            panel.set_xlabel(f"{label}: pass rate")
        row[0].set_ylabel(f"{run}\nshare of {len(columns[0])} prompts")
    return figure
