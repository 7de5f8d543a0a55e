"""
What one rollout per prompt should be compared with: all others of the step, or what was expected of its prompt.

`python -m benchmarks.learning.one_rollout` trains GRPO n=4 and the two from one base model per task, at the rates that
`benchmarks.learning.equal_tokens` has chosen, and writes one file per run to `outputs/learning/one_rollout/`; stopped and started
again, it goes on with the runs that are missing. `--store` makes them the results in the repository.
"""

import argparse
import functools
import logging
from pathlib import Path

import pandas as pd

from ..common import load_rows, save_rows
from .equal_tokens import SETS, Run, best_rate, prepare_sets, results, train_and_save
from .run import run_missing


METHODS = ("GRPO n=4", "Batch n=1", "Batch n=1, scaled", "Posterior n=1", "Posterior n=1, scaled")
NAME = "one_rollout"


def stored() -> pd.DataFrame:
    """All evaluations."""
    return pd.DataFrame(load_rows(NAME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data.")
    parser.add_argument("--sorting_dir", type=Path, default=Path("outputs/sorting"), help="Those of sorting.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/one_rollout"))
    parser.add_argument("--store", action="store_true", help="Only make the runs there are the stored results.")
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
