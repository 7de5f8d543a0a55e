"""Curves and figures of training runs from their logs. matplotlib is imported only when a figure is made."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Log = Sequence[Mapping[str, Any]]  # `log_history` of a trainer

STEPS, TOKENS, ALL_TOKENS, MINUTES = "Optimizer steps", "Generated tokens", "Prompt and generated tokens", "Minutes"
COST = ("num_tokens", "step_time", "ada/tokens/generated")  # summed by `total`, so never smoothed


# Logs


def find_in(run: str | Path, name: str) -> Path | None:
    """
    Find a file of a run (an output directory or a checkpoint) or of its last checkpoint; `None` if neither has it.
    """
    from transformers.trainer_utils import get_last_checkpoint  # it imports torch, which takes seconds

    directories = [Path(run), Path(get_last_checkpoint(run) or run)]
    return next((directory / name for directory in directories if (directory / name).exists()), None)


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """
    Read the `log_history` of a run, of `AdaGRPOTrainer` or `GRPOTrainer`,
    from its directory or from its last checkpoint.

    Raises:
        `FileNotFoundError`: if there is none.
    """
    path = find_in(run, "trainer_state.json")
    if path is None:
        raise FileNotFoundError(
            f"{str(run)!r} has no trainer_state.json, and no checkpoint with one. Give the output directory of a run "
            "that has saved checkpoints, or call trainer.save_state() at the end of training."
        )
    return json.loads(path.read_text(encoding="utf-8"))["log_history"]


# Curves


class Curve(NamedTuple):
    """Logged metric over the steps at which it was logged; NaN where it had no value."""

    steps: np.ndarray
    values: np.ndarray


def curve(log: Log, name: str) -> Curve:
    """Return the metric `name`; empty if the run has not logged it."""
    rows = [row for row in log if name in row]
    values = [math.nan if row[name] is None else row[name] for row in rows]
    return Curve(np.array([row["step"] for row in rows]), np.array(values, dtype=float))


def total(log: Log, name: str) -> Curve:
    """
    Sum a metric over all steps so far. Logged values are means over the steps since the last log, so each is
    multiplied by their number; a missing value counts as 0.
    """
    steps, values = curve(log, name)
    return Curve(steps, np.cumsum(np.nan_to_num(values) * np.diff(steps, prepend=0)))


def cost(log: Log, axis: str) -> Curve:
    """Return the cost of a run so far at every logged step, in the unit of `axis` (any but `STEPS`)."""
    if axis == ALL_TOKENS:
        return curve(log, "num_tokens")
    if axis == TOKENS:
        return total(log, "ada/tokens/generated")
    steps, seconds = total(log, "step_time")
    return Curve(steps, seconds / 60)


def against(log: Log, name: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return cost and values of a metric. The cost of the run so far is interpolated linearly between two logs."""
    steps, values = curve(log, name)
    if axis == STEPS:
        return steps, values
    spent = cost(log, axis)
    if not len(spent.steps):
        return np.array([]), np.array([])
    return np.interp(steps, np.append(0, spent.steps), np.append(0.0, spent.values)), values


def smoothed(log: Log, window: int) -> list[dict[str, Any]]:
    """
    Replace every metric by its mean over the last `window` steps (those of them that were logged). Costs and
    evaluations are not changed.

    Args:
        log (`Log`):
            Log of one run.
        window (`int`):
            Number of steps, at least 1; 20 in the paper's figures.
    """
    means = [dict(row) for row in log]
    names = {name for row in log for name, value in row.items() if isinstance(value, int | float)}
    for name in sorted(names - {"step", "epoch", *COST}):
        if name.startswith("eval_"):
            continue
        rows = [i for i, row in enumerate(log) if isinstance(row.get(name), int | float)]
        steps = np.array([log[i]["step"] for i in rows])
        values = np.array([log[i][name] for i in rows], dtype=float)
        for i, step in zip(rows, steps, strict=True):
            recent = values[(steps > step - window) & (steps <= step) & np.isfinite(values)]
            means[i][name] = float(recent.mean()) if len(recent) else math.nan
    return means


def by_round(log: Log, name: str) -> dict[int, Curve]:
    """Return the metric `name/round_<k>` by k, at every step with logged rounds; 0 for a round that was not logged."""
    prefix = f"{name}/round_"
    rows = [row for row in log if any(key.startswith(prefix) for key in row)]
    rounds = sorted({int(key.removeprefix(prefix)) for row in rows for key in row if key.startswith(prefix)})
    steps = np.array([row["step"] for row in rows])
    return {k: Curve(steps, np.array([row.get(f"{prefix}{k}") or 0.0 for row in rows], dtype=float)) for k in rounds}


# Panels


def make_panels(rows: int, columns: int, **options: Any) -> tuple["Figure", np.ndarray]:
    """Create a figure and its panels, `(rows, columns)`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    return figure, panels


def draw(panel: "Axes", points: tuple[ArrayLike, ArrayLike], **style: Any) -> None:
    """Plot y against x as a line. A value without neighbors is a dot, because it would be invisible in a line."""
    x, y = (np.asarray(values, dtype=float) for values in points)
    known = np.pad(np.isfinite(y), 1)
    isolated = known[1:-1] & ~known[:-2] & ~known[2:]
    dots: dict[str, Any] = {}
    if isolated.any():
        dots = {"marker": "o", "markersize": 3, "markevery": np.flatnonzero(isolated).tolist()}
    panel.plot(x, y, **dots | style)


def legend_above(panel: "Axes") -> None:
    """Add a legend in one line on top of the panel."""
    style = {"fontsize": "small", "frameon": False, "ncols": 4, "handlelength": 1, "columnspacing": 1}
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), **style)


# Figures


def learning_figure(runs: Mapping[str, Log], metrics: Mapping[str, str] | None = None) -> "Figure":
    """
    Plot rewards against steps, tokens and time.

    Args:
        runs (`Mapping[str, Log]`):
            Log histories by label.
        metrics (`Mapping[str, str]`, *optional*):
            Label of each metric, with one row of panels each; metrics that no run has logged are left out. By default
            the training reward (of the first round, if there are several) and the reward on the evaluation set.

    Returns:
        `matplotlib.figure.Figure`: tokens are the generated ones if every run has counted them, otherwise they include
        the prompts. Time does not include evaluation.
    """
    from matplotlib.ticker import EngFormatter

    metrics = metrics or {"reward": "Training reward", "eval_reward": "Evaluation reward"}
    shown = {name: label for name, label in metrics.items() if logged(runs, name)}
    counted = len(logged(runs, "ada/tokens/generated")) == len(runs)
    columns = [STEPS, TOKENS if counted else ALL_TOKENS, MINUTES]
    figure, panels = make_panels(max(len(shown), 1), len(columns), sharey="row")
    for row, (name, label) in zip(panels, shown.items(), strict=False):
        points = {"marker": "o", "markersize": 3, "markevery": None} if name.startswith("eval") else {}
        for panel, axis in zip(row, columns, strict=True):
            for run, log in runs.items():
                draw(panel, against(log, name, axis), label=run, **points)
            panel.set_xlabel(axis)
            if axis in (TOKENS, ALL_TOKENS):
                panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel(label)
    panels[0][0].legend(frameon=False, fontsize="small")
    return figure


def logged(runs: Mapping[str, Log], name: str) -> dict[str, Log]:
    """Select the runs that have logged a metric."""
    return {run: log for run, log in runs.items() if len(curve(log, name).steps)}
