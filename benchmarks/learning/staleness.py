"""
The effect on accuracy of rollouts that are one update old: `max_staleness=1` compared with 0, on a vLLM server.

`python -m benchmarks.learning.staleness` starts a server with the arithmetic task's base model and trains with it, at the
learning rates tuned by `benchmarks.learning.equal_tokens`. It writes one file per run to `outputs/learning/staleness/`; a
restarted command continues with the runs that are missing. `--store` replaces the results in the repository by these runs, and
writes the table of docs/vllm.md.
"""

import argparse
import functools
import json
import logging
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ada_trl.utils.files import atomic_write
from recipes.arithmetic.vllm_server import running_server

from .. import names
from ..common import ROOT, fill, interval, load_rows, markdown, save_rows
from .equal_tokens import METHODS, best_rate, prepare_sets
from .run import ADDITION, run_missing, slug, train_once


SETS, NAMES = ("hard", "easy", "large"), (names.POSTERIOR, names.GRPO_4)
NAME, PAGE = "staleness", ROOT / "docs" / "vllm.md"


class Run(NamedTuple):
    """One cell of the grid."""

    method: str
    prompt_set: str
    staleness: int
    seed: int

    @property
    def file_name(self) -> str:
        return "_".join(slug(str(part)) for part in self) + ".json"


def train_and_save(run: Run, runs_dir: Path, task_dir: Path, url: str, rates: dict) -> Run:
    method = METHODS[run.method]
    options = method.options | {"learning_rate": rates[run.method, run.prompt_set], "max_staleness": run.staleness}
    options |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_weight_sync": "disk"}
    record = train_once(run, options, method.prompts_per_step, task_dir, ADDITION.steps, 50)
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(run._asdict() | record))
    return run


def results(runs_dir: Path) -> list[dict]:
    """One row per run."""
    rows = []
    for path in sorted(runs_dir.glob("*.json")):
        record = json.loads(path.read_text())
        row = {name: record[name] for name in Run._fields}
        rows.append(row | {"accuracy": record["evaluations"][-1]["accuracy"]})
    return rows


def table(rows: list[dict]) -> str:
    """Final accuracy with and without staleness, and the difference, paired by seed."""
    frame, shown = pd.DataFrame(rows), []
    for (method, name), own in frame.groupby(["method", "prompt_set"], sort=False):
        paired = own.pivot(index="seed", columns="staleness", values="accuracy").dropna()
        if set(paired) == {0, 1} and len(paired):
            mean, width = interval((paired[1] - paired[0]).to_numpy())
            shown.append((method, name, len(paired), paired[0].mean(), paired[1].mean(), mean, width))
    return markdown(
        [dict(enumerate(row)) for row in shown],
        {
            "Method": lambda row: row[0],
            "Sums": lambda row: row[1],
            "Seeds": lambda row: str(row[2]),
            "`max_staleness=0`": lambda row: f"{row[3]:.3f}",
            "1": lambda row: f"{row[4]:.3f}",
            "Difference": lambda row: f"{row[5]:+.3f} ± {row[6]:.3f}",
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/staleness"))
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--store", action="store_true", help="Do not train; store the finished runs as the results.")
    args = parser.parse_args()
    if args.store:
        fill("staleness", table(save_rows(results(args.output_dir), NAME)), PAGE)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare_sets(args.sets, args.task_dir, Path())
    tuned = load_rows("equal_tokens")
    rates = {(method, name): best_rate(method, name, tuned) for method in args.methods for name in args.sets}
    runs = [
        Run(method, name, staleness, seed)
        for seed in args.seeds
        for name in args.sets
        for method in args.methods
        for staleness in (0, 1)
    ]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with running_server(args.task_dir / "base", args.port, args.output_dir / "server.log") as url:
        work = functools.partial(
            train_and_save, runs_dir=args.output_dir, task_dir=args.task_dir, url=url, rates=rates
        )
        run_missing(runs, args.output_dir, work)


if __name__ == "__main__":
    main()
