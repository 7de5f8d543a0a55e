"""
The runs of docs/benchmarks.md, "Plan" and "Second plan": fixed methods, learning rates and seeds.

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

from .. import names
from .language_model import LONG_SET, PAPER_SUFFIX, prepare_task, train_and_save
from .training import Run, run_missing, store, stored_runs


STORED, PROMPT_SET = "confirmation", "mixture"
RATE, LOWER_RATE = 1e-4, 5e-5
RETRIES = names.batch_retries(3)


class Part(NamedTuple):
    """
    Runs that are looked at together.

    Args:
        methods (`list[tuple[str, float]]`):
            Methods with their learning rates.
        seeds (`tuple[int, ...]`):
            Training seeds.
        base_seed (`int`):
            Seed of the problems and of the base model.
        steps (`int`):
            Steps of a run.
        prompt_set (`str`, *optional*, defaults to `"mixture"`):
            Set of problems.
        eval_every (`int`, *optional*, defaults to `25`):
            Steps between evaluations.
    """

    methods: list[tuple[str, float]]
    seeds: tuple[int, ...]
    base_seed: int
    steps: int
    prompt_set: str = PROMPT_SET
    eval_every: int = 25

    @property
    def runs(self) -> list[Run]:
        return [Run(method, self.prompt_set, seed, rate) for seed in self.seeds for method, rate in self.methods]

    @property
    def task_folder(self) -> str:
        """Name of the folder of the problems and the base model."""
        return f"{'written-steps' if self.prompt_set == LONG_SET else 'reasoning'}-seed-{self.base_seed}"


PARTS = {  # in this order
    "confirmation": Part(
        [
            (names.GRPO_4, RATE),
            (names.BATCH, RATE),
            (RETRIES, RATE),
            (names.GRPO_4, LOWER_RATE),
            (names.batch_retries(1), RATE),
            (names.batch_retries(7), RATE),
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
    # The second plan
    "number of retries": Part(
        [
            (method, RATE)
            for method in (
                *(names.batch_retries(retries) for retries in (3, 2, 1)),
                names.GRPO_8,
                names.GRPO_4,
            )
        ],
        seeds=(21, 22, 23, 24, 25),
        base_seed=2,
        steps=150,
    ),
    "longer answers": Part(
        [(method, RATE) for method in (names.GRPO_4, RETRIES, names.BATCH)],
        seeds=(21, 22, 23),
        base_seed=2,
        steps=40,
        prompt_set=LONG_SET,
        eval_every=20,
    ),
}
SECOND_PLAN = ("number of retries", "longer answers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks_dir", type=Path, default=Path("outputs"), help="Folder of the base models: `reasoning-seed-N` in it."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/confirmation"))
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="By default all, in their order."
    )
    parser.add_argument(
        "--store", action="store_true", help="Do not train; add the finished runs to the stored results."
    )
    args = parser.parse_args()
    if args.store:
        store(STORED, args.output_dir)
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for part in (PARTS[name] for name in args.parts):
        missing = [run for run in part.runs if run not in stored_runs(STORED)]
        if not missing:
            continue
        task_dir = args.tasks_dir / part.task_folder
        prepare_task(part.prompt_set, task_dir, part.base_seed)
        work = functools.partial(
            train_and_save, runs_dir=args.output_dir, task_dir=task_dir, steps=part.steps, eval_every=part.eval_every
        )
        run_missing(missing, args.output_dir, work)


if __name__ == "__main__":
    main()
