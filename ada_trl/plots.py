"""
Figures of training runs, from what they have logged.

`ada-trl plots RUN [RUN …]` reads `trainer_state.json` of each run (an output directory or a checkpoint), of
`AdaGRPOTrainer` or plain `GRPOTrainer`, and draws what is there; `--samples` draws what `ada-trl data` and
`ada-trl evaluate` have sampled. Needs matplotlib (the extra `plots`).
"""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from .cli import start
from .cli.errors import UserError
from .cli.parser import CommandParser
from .drawing.curves import ALL_TOKENS, MINUTES, STEPS, TOKENS, Curve, Log, against, cost, curve, smoothed, total
from .drawing.paper import allocation_figure, draws_figure, frontier_figure, levels_figure, quota_figure
from .drawing.runs import (
    baseline_figure,
    cost_table,
    difficulty_figure,
    learning_figure,
    prompts_figure,
    sampling_figure,
    signal_figure,
)
from .estimation.record import PASS_RATES_FILE
from .planning.difficulty import fit_pass_rate_distribution
from .utils.files import last_checkpoint


TRAINER_STATE_NAME = "trainer_state.json"  # transformers', which takes seconds to import

__all__ = [
    "ALL_TOKENS",
    "MINUTES",
    "STEPS",
    "TOKENS",
    "Curve",
    "against",
    "allocation_figure",
    "baseline_figure",
    "cost",
    "cost_table",
    "curve",
    "difficulty_figure",
    "draw_all",
    "draws_figure",
    "frontier_figure",
    "learning_figure",
    "levels_figure",
    "main",
    "prompts_figure",
    "quota_figure",
    "read_counts",
    "read_difficulty",
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


def read_difficulty(run: str | Path) -> tuple[np.ndarray, np.ndarray] | None:
    """
    The distribution of true pass rates behind a run's last difficulty record, from its discounted counts: pass rates and
    weights, see [`~planning.difficulty.fit_pass_rate_distribution`]. `None` without a record or without counts in it.
    """
    path = _find(run, PASS_RATES_FILE)
    if path is None:
        return None
    table = pq.read_table(path, columns=["discounted_positives", "discounted_draws"])
    positives, draws = (column.to_numpy() for column in table.columns)
    return fit_pass_rate_distribution(positives, draws) if (draws > 0).any() else None


def read_counts(path: str | Path) -> dict[str, tuple[list[int], int]]:
    """
    What `ada_trl.data` and `ada_trl.evaluate` have measured: correct completions of each problem, and how many were drawn.

    Args:
        path (`str` or `Path`):
            A `*.scores.jsonl`, or a directory with some below it; those in the same folder are put together.

    Returns:
        `dict[str, tuple[list[int], int]]`: by the name of the folder, or of `path` if there is only one.

    Raises:
        `ValueError`: if there is none, or if problems in a folder were sampled different numbers of times.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*.scores.jsonl"))
    found: dict[Path, list[list[float]]] = {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]  # after the header
        found.setdefault(file.parent, []).extend(row["rewards"] for row in rows if row["rewards"] is not None)
    counts = {}
    for folder, rewards in found.items():
        numbers = {len(row) for row in rewards}
        if len(numbers) != 1:
            raise ValueError(
                f"{folder} has problems with {', '.join(map(str, sorted(numbers))) or 'no'} completions; it takes the same "
                "number for all. Give one of its *.scores.jsonl files."
            )
        counts[folder.name] = [int(sum(row)) for row in rewards], numbers.pop()
    if not counts:
        raise ValueError(f"{path} has no *.scores.jsonl, which ada_trl.data and ada_trl.evaluate write.")
    return counts if len(counts) > 1 else {path.name.removesuffix(".scores.jsonl"): next(iter(counts.values()))}


def _find(run: str | Path, name: str) -> Path | None:
    run = Path(run)
    if run.is_file():
        run = run.parent
    checkpoint = last_checkpoint(run)
    for directory in [run, *([checkpoint] if checkpoint else [])]:
        if (directory / name).exists():
            return directory / name
    return None


def draw_all(
    runs: Mapping[str, Log],
    records: Mapping[str, tuple],
    fitted: Mapping[str, tuple] | None = None,
    counts: Mapping[str, tuple] | None = None,
) -> dict[str, Any]:
    """
    Every figure there is data for, by name.

    Args:
        runs (`Mapping[str, Log]`), records (`Mapping[str, tuple]`), fitted (`Mapping[str, tuple]`, *optional*):
            What [`read_log`], [`read_record`] and [`read_difficulty`] return, by label.
        counts (`Mapping[str, tuple]`, *optional*):
            What [`read_counts`] returns.
    """
    figures = {
        "learning": learning_figure(runs) if runs else None,
        "signal": signal_figure(runs) if runs else None,
        "sampling": sampling_figure(runs),
        "baseline": baseline_figure(runs),
        "prompts": prompts_figure(runs),
        "quotas": quota_figure(runs),
        "frontier": frontier_figure(runs),
        "levels": levels_figure(runs),
        "allocation": allocation_figure(runs),
        "difficulty": difficulty_figure(records) if records else None,
        "draws": draws_figure(counts or {}, fitted or {}),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), read the runs, draw what they have logged."""
    parser = CommandParser(
        command="plots",
        description="Draw what training runs have logged, of AdaGRPOTrainer or plain GRPOTrainer, into PNG files.",
        example="outputs/grpo outputs/seq-balance --output_dir plots",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="Output directories or checkpoints.")
    parser.add_argument(
        "--samples", nargs="+", default=[], type=Path, help="Output directories of ada-trl data and ada-trl evaluate."
    )
    parser.add_argument("--smooth", type=int, default=1, help="Steps to average over; the paper's figures have 20.")
    parser.add_argument(
        "--labels", nargs="+", help="Names in the legends; by default the part where the paths differ."
    )
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, default=Path("plots"), help="Where the PNG files go."
    )
    options = parser.parse_args(args)
    if not options.runs and not options.samples:
        parser.error("nothing to draw: give RUN, an output directory of a training, or --samples")
    if options.smooth < 1:
        parser.error(f"--smooth ({options.smooth}) must be at least 1, which does not smooth")
    labels = options.labels or _labels(options.runs)
    if len(set(labels)) != len(options.runs):
        parser.error(f"{len(options.runs)} runs need as many different labels, got {labels}; set --labels")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib is not installed. Install it: pip install 'ada_trl[plots]'.")

    paths = dict(zip(labels, options.runs, strict=True))
    logs = {label: read_log(run) for label, run in paths.items()}
    runs = {label: smoothed(log, options.smooth) for label, log in logs.items()}
    records = {label: record for label, run in paths.items() if (record := read_record(run)) is not None}
    fitted = {label: fit for label, run in paths.items() if (fit := read_difficulty(run)) is not None}
    counts = {label: value for path in options.samples for label, value in read_counts(path).items()}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if logs:
        (options.output_dir / "costs.md").write_text(cost_table(logs) + "\n")
        print(options.output_dir / "costs.md")
    for name, figure in draw_all(runs, records, fitted, counts).items():
        path = options.output_dir / f"{name}.png"
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
