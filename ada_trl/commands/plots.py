"""
Figures of training runs from their logs.

`ada-trl plots RUN [RUN …]` reads `trainer_state.json` of each run (an output directory or a checkpoint), of
`AdaGRPOTrainer` or `GRPOTrainer`, and plots the logged metrics. It needs matplotlib (the extra `plots`).
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..pass_rates.store import PASS_RATES_FILE
from ..utils.files import last_checkpoint
from . import plotting, start
from .errors import UserError, user_errors
from .parser import HelpFormatter, program


TRAINER_STATE_NAME = "trainer_state.json"  # as in transformers, which takes seconds to import


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """
    Read `log_history` of a run.

    Args:
        run (`str` or `Path`):
            An output directory (its last checkpoint is read if it has no state itself), a checkpoint, or a
            `trainer_state.json`.

    Raises:
        `FileNotFoundError`: if there is none.
        `ValueError`: if it is not the state of a trainer.
    """
    path = find_in(run, TRAINER_STATE_NAME)
    if path is None:
        if not Path(run).exists():
            raise FileNotFoundError(f"There is no run {str(run)!r}. Give the output directory of a training run.")
        raise FileNotFoundError(
            f"{str(run)!r} has no {TRAINER_STATE_NAME}, and no checkpoint in it has one. Call trainer.save_state() at the "
            "end of training, or give a run that has saved checkpoints."
        )
    try:
        return json.loads(path.read_text())["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the state of a trainer ({error}). Give another run.") from error


def read_record(run: str | Path) -> tuple[list[float], list[float]] | None:
    """Read observed pass rates and estimates of a run's prompts, from its last checkpoint; `None` without any."""
    path = find_in(run, PASS_RATES_FILE)
    if path is None:
        return None
    try:
        rows = pq.read_table(path, columns=["positives", "rollouts", "estimate"]).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be read ({error}). Delete it, or give another run.") from error
    return [row["positives"] / row["rollouts"] for row in rows if row["rollouts"]], [row["estimate"] for row in rows]


def find_in(run: str | Path, name: str) -> Path | None:
    """Find a file of a run or of its last checkpoint; `None` if neither has it."""
    run = Path(run)
    if run.is_file():
        run = run.parent
    checkpoint = last_checkpoint(run)
    for directory in [run, *([checkpoint] if checkpoint else [])]:
        if (directory / name).exists():
            return directory / name
    return None


def all_figures(runs: Mapping[str, plotting.Log], records: Mapping[str, tuple]) -> dict[str, Any]:
    """
    Make every figure for which there is data, by name.

    Args:
        runs (`Mapping[str, Log]`), records (`Mapping[str, tuple]`):
            Results of [`read_log`] and [`read_record`], by label.
    """
    figures = {
        "learning": plotting.learning_figure(runs),
        "signal": plotting.signal_figure(runs),
        "sampling": plotting.sampling_figure(runs),
        "baseline": plotting.baseline_figure(runs),
        "prompts": plotting.prompts_figure(runs),
        "difficulty": plotting.difficulty_figure(records) if records else None,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), read the runs and plot their logs."""
    parser = argparse.ArgumentParser(
        prog=program("plots"),
        usage="%(prog)s RUN … [options]",
        description="Plot the logs of training runs, of AdaGRPOTrainer or GRPOTrainer, into PNG files.",
        epilog=f"example:\n  {program('plots')} outputs/grpo outputs/seq-balance --output_dir plots",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    options = parser.parse_args(args)
    if not options.runs:
        parser.error("RUN is missing: give one or more output directories of training runs")
    paths = runs_by_label(parser, options)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed. Install it: pip install 'ada_trl[plots]'.")
    with user_errors():
        logs = {label: read_log(run) for label, run in paths.items()}
        records = {label: record for label, run in paths.items() if (record := read_record(run)) is not None}
        options.output_dir.mkdir(parents=True, exist_ok=True)
    runs = {label: plotting.smoothed(log, options.smooth) for label, log in logs.items()}
    (options.output_dir / "costs.md").write_text(plotting.cost_table(logs) + "\n")
    print(options.output_dir / "costs.md")
    save(all_figures(runs, records), options.output_dir)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select runs and the output directory."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="Output directories or checkpoints.")
    parser.add_argument("--smooth", type=int, default=1, help="Steps to average over; 20 in the paper's figures.")
    parser.add_argument(
        "--labels", nargs="+", help="Names in the legends; by default the parts where the paths differ."
    )
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, default=Path("plots"), help="Directory of the PNG files."
    )


def runs_by_label(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Path]:
    """Return the selected runs by label. Invalid labels or smoothing end with the parser's error."""
    if options.smooth < 1:
        parser.error(f"--smooth ({options.smooth}) must be at least 1 (no smoothing)")
    labels = options.labels or default_labels(options.runs)
    if not len(set(labels)) == len(labels) == len(options.runs):
        parser.error(f"{len(options.runs)} runs need as many different labels, got {labels}; set --labels")
    return dict(zip(labels, options.runs, strict=True))


def save(figures: Mapping[str, Any], output_dir: Path) -> None:
    """Write each figure to a PNG file of its name, and print the paths."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = output_dir / f"{name}.png"
        figure.savefig(path, dpi=130)
        print(path)


def default_labels(runs: Sequence[Path]) -> list[str]:
    """Return the names of the runs' folders, or the paths of the folders if the names are not different."""
    folders = [Path(os.path.abspath(run.parent if run.is_file() else run)) for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [os.path.relpath(folder) for folder in folders]


if __name__ == "__main__":
    start("plots")
