"""
Figures of training runs, from what they have logged.

`ada-trl plots RUN [RUN …]` reads `trainer_state.json` of each run (an output directory or a checkpoint), of
`AdaGRPOTrainer` or plain `GRPOTrainer`, and draws what is there. Needs matplotlib (the extra `plots`).
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .cli import start
from .cli.errors import UserError
from .cli.parser import CommandParser
from .drawing.curves import ALL_TOKENS, MINUTES, STEPS, TOKENS, Curve, Log, against, cost, curve, smoothed, total
from .drawing.runs import (
    baseline_figure,
    cost_table,
    difficulty_figure,
    learning_figure,
    prompts_figure,
    sampling_figure,
    signal_figure,
)
from .pass_rates.store import PASS_RATES_FILE
from .utils.files import last_checkpoint


TRAINER_STATE_NAME = "trainer_state.json"  # transformers', which takes seconds to import

__all__ = [
    "ALL_TOKENS",
    "MINUTES",
    "STEPS",
    "TOKENS",
    "Curve",
    "against",
    "baseline_figure",
    "cost",
    "cost_table",
    "curve",
    "difficulty_figure",
    "draw_all",
    "find_in",
    "learning_figure",
    "main",
    "prompts_figure",
    "read_log",
    "read_record",
    "sampling_figure",
    "signal_figure",
    "smoothed",
    "total",
]


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
    path = find_in(run, TRAINER_STATE_NAME)
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
    path = find_in(run, PASS_RATES_FILE)
    if path is None:
        return None
    rows = pq.read_table(path, columns=["positives", "draws", "estimate"]).to_pylist()
    return [row["positives"] / row["draws"] for row in rows if row["draws"]], [row["estimate"] for row in rows]


def find_in(run: str | Path, name: str) -> Path | None:
    """A file of a run, or of its last checkpoint; `None` if neither has it."""
    run = Path(run)
    if run.is_file():
        run = run.parent
    checkpoint = last_checkpoint(run)
    for directory in [run, *([checkpoint] if checkpoint else [])]:
        if (directory / name).exists():
            return directory / name
    return None


def draw_all(runs: Mapping[str, Log], records: Mapping[str, tuple]) -> dict[str, Any]:
    """
    Every figure there is data for, by name.

    Args:
        runs (`Mapping[str, Log]`), records (`Mapping[str, tuple]`):
            What [`read_log`] and [`read_record`] return, by label.
    """
    figures = {
        "learning": learning_figure(runs),
        "signal": signal_figure(runs),
        "sampling": sampling_figure(runs),
        "baseline": baseline_figure(runs),
        "prompts": prompts_figure(runs),
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
    add_options(parser)
    options = parser.parse_args(args)
    if not options.runs:
        parser.error("nothing to draw: give RUN, an output directory of a training")
    paths = labelled(parser, options)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed. Install it: pip install 'ada_trl[plots]'.")

    logs = {label: read_log(run) for label, run in paths.items()}
    runs = {label: smoothed(log, options.smooth) for label, log in logs.items()}
    records = {label: record for label, run in paths.items() if (record := read_record(run)) is not None}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "costs.md").write_text(cost_table(logs) + "\n")
    print(options.output_dir / "costs.md")
    save(draw_all(runs, records), options.output_dir)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is drawn, and how, on the command line."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="Output directories or checkpoints.")
    parser.add_argument("--smooth", type=int, default=1, help="Steps to average over; the paper's figures have 20.")
    parser.add_argument(
        "--labels", nargs="+", help="Names in the legends; by default the part where the paths differ."
    )
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, default=Path("plots"), help="Where the PNG files go."
    )


def labelled(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Path]:
    """The runs that were asked for by [`add_options`], by label; ends with the parser's error if that does not work."""
    if options.smooth < 1:
        parser.error(f"--smooth ({options.smooth}) must be at least 1, which does not smooth")
    labels = options.labels or _labels(options.runs)
    if len(set(labels)) != len(options.runs):
        parser.error(f"{len(options.runs)} runs need as many different labels, got {labels}; set --labels")
    return dict(zip(labels, options.runs, strict=True))


def save(figures: Mapping[str, Any], output_dir: Path) -> None:
    """Write each figure to a PNG file of its name, and print where."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = output_dir / f"{name}.png"
        figure.savefig(path, dpi=130)
        print(path)


def _labels(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; a single run is called by its folder."""
    if not runs:
        return []
    paths = [Path(os.path.abspath(run.parent if run.is_file() else run)) for run in runs]
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(paths):
            return labels
    return [str(run) for run in runs]  # the same run twice, which is refused


if __name__ == "__main__":
    start("plots")
