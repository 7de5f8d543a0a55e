"""
The batch and the posterior baseline with one rollout per prompt, compared with GRPO n=4.

`python -m benchmarks.learning.one_rollout` trains all methods from one base model per task, at the learning rates tuned by
`benchmarks.learning.equal_tokens`, and writes one file per run to `outputs/learning/one_rollout/`; a restarted command continues
with the runs that are missing. `--store` replaces the results in the repository by these runs.
"""

import argparse
import functools
import logging
from pathlib import Path

import pandas as pd

from .. import names
from ..common import load_rows, save_rows
from .equal_tokens import SETS, Run, best_rate, prepare_sets, results, train_and_save
from .run import run_missing


METHODS = (
    names.GRPO_4,
    names.BATCH,
    f"{names.BATCH}, scaled rewards",
    names.POSTERIOR,
    f"{names.POSTERIOR}, scaled rewards",
)
NAME = "one_rollout"


def stored() -> pd.DataFrame:
    """All evaluations of the stored runs."""
    return pd.DataFrame(load_rows(NAME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument(
        "--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data of addition."
    )
    parser.add_argument(
        "--sorting_dir", type=Path, default=Path("outputs/sorting"), help="Base model and data of sorting."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/one_rollout"))
    parser.add_argument("--store", action="store_true", help="Do not train; store the finished runs as the results.")
    args = parser.parse_args()
    if args.store:
        save_rows(results(args.output_dir, []), NAME)
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare_sets(args.sets, args.task_dir, args.sorting_dir)
    task_dirs = {name: args.sorting_dir if name.startswith("sorting") else args.task_dir for name in SETS}
    work = functools.partial(train_and_save, runs_dir=args.output_dir, task_dirs=task_dirs, steps=None, eval_every=20)
    tuned = load_rows("equal_tokens")
    runs = [
        Run(method, name, seed, best_rate(method, name, tuned))
        for seed in args.seeds
        for name in args.sets
        for method in args.methods
    ]
    run_missing(runs, args.output_dir, work, args.workers)


if __name__ == "__main__":
    main()
