"""
The confirmation of docs/benchmarks.md, "Plan": fixed methods, learning rates and seeds on a base model that no earlier run used.

`python -m benchmarks.learning.confirmation` writes one file per run to `outputs/learning/confirmation/`; a restarted command
continues with the runs that are missing. Runs are ordered by seed, and no result is looked at before the last one of a part.
`--store` adds the finished runs to the results in the repository; stored runs are not run again.
"""

import argparse
import functools
import logging
from pathlib import Path

from recipes.reasoning.task import prepare

from .. import names
from ..common import RESULTS, load_rows, save_rows
from .equal_tokens import Run
from .language_model import evaluate_base, results, train_and_save
from .run import run_missing


STORED, PROMPT_SET, BASE_SEED, STEPS, EVAL_EVERY = "confirmation", "mixture", 1, 150, 25
PARTS = {  # in this order: methods with their learning rates, and seeds
    "confirmation": (
        [
            (names.GRPO_4, 1e-4),
            (names.BATCH, 1e-4),
            (names.batch_retries(4), 1e-4),
            (names.GRPO_4, 5e-5),
            (names.batch_retries(2), 1e-4),
            (names.batch_retries(8), 1e-4),
        ],
        (6, 7, 8, 9, 10),
    ),
    "group size": ([(names.BATCH_4, 1e-4), (names.BATCH_2, 1e-4)], (6, 7, 8)),
}


def planned_runs() -> list[Run]:
    return [
        Run(method, PROMPT_SET, seed, rate)
        for methods, seeds in PARTS.values()
        for seed in seeds
        for method, rate in methods
    ]


def stored_runs() -> set[Run]:
    if not (RESULTS / f"{STORED}.parquet").exists():
        return set()
    return {Run(*(row[name] for name in Run._fields)) for row in load_rows(STORED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/reasoning-seed-1"), help="Base model and data.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/confirmation"))
    parser.add_argument(
        "--store", action="store_true", help="Do not train; add the finished runs to the stored results."
    )
    args = parser.parse_args()
    if args.store:
        save_rows(results(args.output_dir, stored=STORED), STORED)
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare(args.task_dir, seed=BASE_SEED)
    evaluate_base(PROMPT_SET, args.task_dir)
    work = functools.partial(
        train_and_save, runs_dir=args.output_dir, task_dir=args.task_dir, steps=STEPS, eval_every=EVAL_EVERY
    )
    run_missing([run for run in planned_runs() if run not in stored_runs()], args.output_dir, work)


if __name__ == "__main__":
    main()
