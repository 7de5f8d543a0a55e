"""
The runs of docs/benchmarks.md, "Plan": fixed methods, learning rates and seeds.

`python -m benchmarks.learning.confirmation` writes one file per run to `outputs/learning/confirmation/`; a restarted command
continues with the runs that are missing. Runs are ordered by part and seed, and no result is looked at before the last one of a
part: the report shows nothing of an unfinished part. `--store` adds the finished runs to the results in the repository; stored
runs are not run again.
"""

import argparse
import functools
import logging
from pathlib import Path
from typing import NamedTuple

from recipes.reasoning.task import prepare

from .. import names
from .language_model import PAPER_SUFFIX, evaluate_base, train_and_save
from .training import Run, run_missing, store, stored_runs


STORED, PROMPT_SET, EVAL_EVERY = "confirmation", "mixture", 25
RATE, LOWER_RATE = 1e-4, 5e-5
RETRIES = names.batch_retries(4)


class Part(NamedTuple):
    """Runs that are looked at together: methods with their learning rates, training seeds, and the seed of the base model."""

    methods: list[tuple[str, float]]
    seeds: tuple[int, ...]
    base_seed: int
    steps: int

    @property
    def runs(self) -> list[Run]:
        return [Run(method, PROMPT_SET, seed, rate) for seed in self.seeds for method, rate in self.methods]


PARTS = {  # in this order
    "confirmation": Part(
        [
            (names.GRPO_4, RATE),
            (names.BATCH, RATE),
            (RETRIES, RATE),
            (names.GRPO_4, LOWER_RATE),
            (names.batch_retries(2), RATE),
            (names.batch_retries(8), RATE),
        ],
        seeds=(6, 7, 8, 9, 10),
        base_seed=1,
        steps=150,
    ),
    "group size": Part([(names.BATCH_4, RATE), (names.BATCH_2, RATE)], seeds=(6, 7, 8), base_seed=1, steps=150),
    "paper": Part(
        [
            (method + PAPER_SUFFIX, RATE)
            for method in (names.GRPO_4, names.ALGORITHM_2, names.HYBRID, names.SMALL_ROUNDS)
        ],
        seeds=(1, 2, 3),
        base_seed=0,
        steps=75,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks_dir", type=Path, default=Path("outputs"), help="Folder of the base models: `reasoning-seed-N` in it."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/confirmation"))
    parser.add_argument(
        "--store", action="store_true", help="Do not train; add the finished runs to the stored results."
    )
    args = parser.parse_args()
    if args.store:
        store(STORED, args.output_dir)
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for part in PARTS.values():
        missing = [run for run in part.runs if run not in stored_runs(STORED)]
        if not missing:
            continue
        task_dir = args.tasks_dir / f"reasoning-seed-{part.base_seed}"
        prepare(task_dir, seed=part.base_seed)
        evaluate_base(PROMPT_SET, task_dir)
        work = functools.partial(
            train_and_save, runs_dir=args.output_dir, task_dir=task_dir, steps=part.steps, eval_every=EVAL_EVERY
        )
        run_missing(missing, args.output_dir, work)


if __name__ == "__main__":
    main()
