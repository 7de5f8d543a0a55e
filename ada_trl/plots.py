"""
Figures of training runs, from what they have logged.

`ada-trl plots RUN [RUN …]` reads `trainer_state.json` of each run (an output directory or a checkpoint), of
`AdaGRPOTrainer` or plain `GRPOTrainer`, and draws what is there. Needs matplotlib (the extra `plots`).
"""

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from .cli import start
from .cli.errors import UserError
from .cli.parser import CommandParser
from .estimation.record import PASS_RATES_FILE
from .files import last_checkpoint


TRAINER_STATE_NAME = "trainer_state.json"  # transformers', which takes seconds to import
Log = Sequence[Mapping[str, Any]]  # `log_history` of a trainer

STEPS, TOKENS, ALL_TOKENS, MINUTES = "Optimizer steps", "Generated tokens", "Prompt and generated tokens", "Minutes"


class Curve(NamedTuple):
    """A logged metric over the steps at which it was logged; NaN where it had no value."""

    steps: np.ndarray
    values: np.ndarray


def curve(log: Log, name: str) -> Curve:
    """What a run has logged under `name`; empty if it has not."""
    rows = [row for row in log if name in row]
    values = [math.nan if row[name] is None else row[name] for row in rows]
    return Curve(np.array([row["step"] for row in rows]), np.array(values, dtype=float))


def total(log: Log, name: str) -> Curve:
    """
    Sum over the steps so far of a metric of each step. Logged values are means over the steps since the last log, so
    each is multiplied by their number; a metric without a value counts as 0.
    """
    steps, values = curve(log, name)
    return Curve(steps, np.cumsum(np.nan_to_num(values) * np.diff(steps, prepend=0)))


def cost(log: Log, axis: str) -> Curve:
    """What a run had spent, in units of `axis` (but `STEPS`), at every step it has logged."""
    if axis == ALL_TOKENS:
        return curve(log, "num_tokens")
    if axis == TOKENS:
        return total(log, "ada/tokens/generated")
    steps, seconds = total(log, "step_time")
    return Curve(steps, seconds / 60)


def against(log: Log, name: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric against what the run had spent by then; between two logs, spending is taken to be even."""
    steps, values = curve(log, name)
    if axis == STEPS:
        return steps, values
    spent = cost(log, axis)
    if not len(spent.steps):
        return np.array([]), np.array([])
    return np.interp(steps, np.append(0, spent.steps), np.append(0.0, spent.values)), values


def learning_figure(runs: Mapping[str, Log], metrics: Mapping[str, str] | None = None):
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
    figure, panels = _panels(max(len(shown), 1), len(columns), sharey="row")
    for row, (name, label) in zip(panels, shown.items(), strict=False):
        for panel, axis in zip(row, columns, strict=True):
            for run, log in runs.items():
                panel.plot(*against(log, name, axis), marker="o" if name.startswith("eval") else "", ms=3, label=run)
            panel.set_xlabel(axis)
            if axis in (TOKENS, ALL_TOKENS):
                panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        row[0].set_ylabel(label)
    panels[0][0].legend(frameon=False, fontsize="small")
    return figure


def signal_figure(runs: Mapping[str, Log]):
    """Share of prompts without gradient, before (dotted) and after sampling further rounds, and the policy's entropy."""
    figure, ((signal, entropy),) = _panels(1, 2)
    for i, (run, log) in enumerate(runs.items()):
        before, after = curve(log, "frac_reward_zero_std"), curve(log, "ada/zero_signal/final")
        if len(after.steps):
            signal.plot(*before, color=f"C{i}", linestyle=":")
        signal.plot(*(after if len(after.steps) else before), color=f"C{i}", label=run)
        entropy.plot(*curve(log, "entropy"), color=f"C{i}", label=run)
    signal.set(ylabel="Prompts without gradient", ylim=(-0.02, 1.02), xlabel=STEPS)
    signal.set_title("dotted: as GRPO, from the first round; solid: trained on", fontsize="small")
    entropy.set(ylabel="Entropy of the update (nats/token)", xlabel=STEPS)
    signal.legend(fontsize="small")
    return figure


def sampling_figure(runs: Mapping[str, Log]):
    """
    What adaptive sampling did, a row of panels per run: prompts still active in each round, rollouts per prompt, and
    why prompts stayed unresolved. `None` if no run has logged it.
    """
    adaptive = {run: log for run, log in runs.items() if len(curve(log, "ada/samples_per_prompt/mean").steps)}
    if not adaptive:
        return None
    figure, panels = _panels(len(adaptive), 3)
    for row, (run, log) in zip(panels, adaptive.items(), strict=True):
        _draw_sampling(row, log)
        row[0].set_ylabel(f"{run}\nactive prompts")
        for panel in row:
            panel.set_ylim(bottom=0)
            panel.set_xlabel(STEPS)
    return figure


def _draw_sampling(row, log: Log) -> None:
    rounds = sorted(
        {int(name.rpartition("_")[2]) for logs in log for name in logs if name.startswith("ada/active_prompts/round_")}
    )
    for k in rounds:
        row[0].plot(*curve(log, f"ada/active_prompts/round_{k}"), color=f"C{k - 1}", label=f"round {k}")
    for name, style in (("max", ":"), ("mean", "-"), ("min", ":")):
        row[1].plot(*curve(log, f"ada/samples_per_prompt/{name}"), color="C0", linestyle=style)
    row[1].set_ylabel("Rollouts per prompt\n(dotted: least, most)")
    steps, resolved = curve(log, "ada/resolved")
    positive, negative = (curve(log, f"ada/unresolved/all_{name}").values for name in ("positive", "negative"))
    other = np.clip(1 - resolved - positive - negative, 0, None)  # both kinds, but too few of one; or unscored
    row[2].stackplot(
        steps, negative, positive, other, labels=["all negative", "all positive", "too few of one"], alpha=0.8
    )
    row[2].set_ylabel("Unresolved prompts")
    for panel in (row[0], row[2]):
        panel.legend(
            fontsize="small",
            frameon=False,
            ncols=4,
            handlelength=1,
            columnspacing=1,
            loc="lower left",
            bbox_to_anchor=(0, 1),
        )


def difficulty_figure(records: Mapping[str, tuple[Sequence[float], Sequence[float]]]):
    """
    Difficulty of the prompts of each run: share of positives among all their rollouts, and the estimate.

    Args:
        records (`Mapping[str, tuple[Sequence[float], Sequence[float]]]`):
            Observed pass rates and estimates of the prompts, as [`read_record`] returns them.
    """
    figure, panels = _panels(len(records), 2, sharex=True)
    for row, (run, columns) in zip(panels, records.items(), strict=True):
        for panel, values, label in zip(row, columns, ("Observed over the run", "Estimated now"), strict=True):
            panel.hist(values, bins=np.linspace(0, 1, 21), weights=np.full(len(values), 1 / max(len(values), 1)))
            panel.set_xlabel(f"{label}: pass rate")
        row[0].set_ylabel(f"{run}\nshare of {len(columns[0])} prompts")
    return figure


def _panels(rows: int, columns: int, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    return figure, panels


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """
    `log_history` of a run.

    Args:
        run (`str` or `Path`):
            An output directory (its last checkpoint is read if it has no state of its own), a checkpoint, or a
            `trainer_state.json`.

    Raises:
        `FileNotFoundError`: if there is none.
    """
    path = _find(run, TRAINER_STATE_NAME)
    if path is None:
        if not Path(run).exists():
            raise FileNotFoundError(f"There is no run {str(run)!r}. Give the output directory of a training.")
        raise FileNotFoundError(
            f"{str(run)!r} has no {TRAINER_STATE_NAME}, nor has a checkpoint in it. Call trainer.save_state() at the end "
            "of training, or give a run that has saved checkpoints."
        )
    try:
        return json.loads(path.read_text())["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no state of a trainer ({error}). Give another run, or train it again.") from error


def read_record(run: str | Path) -> tuple[list[float], list[float]] | None:
    """Observed pass rates and estimates of a run's prompts, from its last difficulty record; `None` without one."""
    path = _find(run, PASS_RATES_FILE)
    if path is None:
        return None
    rows = pq.read_table(path, columns=["positives", "draws", "estimate"]).to_pylist()
    return [row["positives"] / row["draws"] for row in rows if row["draws"]], [row["estimate"] for row in rows]


def _find(run: str | Path, name: str) -> Path | None:
    run = Path(run)
    if run.is_file():
        run = run.parent
    checkpoint = last_checkpoint(run)
    for directory in [run, *([checkpoint] if checkpoint else [])]:
        if (directory / name).exists():
            return directory / name
    return None


def draw_all(runs: Mapping[str, Log], records: Mapping[str, tuple]) -> dict[str, Any]:
    """Every figure there is data for, by name."""
    figures = {
        "learning": learning_figure(runs),
        "signal": signal_figure(runs),
        "sampling": sampling_figure(runs),
        "difficulty": difficulty_figure(records) if records else None,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), read the runs, draw what they have logged."""
    parser = CommandParser(
        command="plots",
        description="Draw what training runs have logged, of AdaGRPOTrainer or plain GRPOTrainer, into PNG files.",
        example="outputs/grpo outputs/seq-balance --output_dir plots",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Output directories or checkpoints.")
    parser.add_argument(
        "--labels", nargs="+", help="Names in the legends; by default the part where the paths differ."
    )
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, default=Path("plots"), help="Where the PNG files go."
    )
    options = parser.parse_args(args)
    labels = options.labels or _labels(options.runs)
    if len(set(labels)) != len(options.runs):
        parser.error(f"{len(options.runs)} runs need as many different labels, got {labels}; set --labels")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed. Install it: pip install 'ada_trl[plots]'.")

    runs = {label: read_log(run) for label, run in zip(labels, options.runs, strict=True)}
    records = {label: read_record(run) for label, run in zip(labels, options.runs, strict=True)}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in draw_all(runs, {label: r for label, r in records.items() if r is not None}).items():
        path = options.output_dir / f"{name}.png"
        figure.savefig(path, dpi=130)
        print(path)


def _labels(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; a single run is called by its folder."""
    paths = [Path(os.path.abspath(run.parent if run.is_file() else run)) for run in runs]
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(paths):
            return labels
    return [str(run) for run in runs]  # the same run twice, which is refused


if __name__ == "__main__":
    start("plots")
