"""
The runs of the three plans (benchmarks/README.md): fixed methods, learning rates and seeds.

`python -m benchmarks.learning.confirmation` writes one file per run to `outputs/learning/confirmation/`; a restarted
command continues with the runs that are missing. Runs are ordered by part and seed, and no result is looked at before
the last one of a part: the report shows nothing of an unfinished part. `--store` adds the finished runs to the results
in the repository; stored runs are not run again.

With `--methods`, `--task`, `--steps`, `--seeds`, `--rate` or `--model`, a part is repeated, whether or not its runs
are stored: with some of its methods, on other problems, with another length, seeds, learning rate or model. It runs on
a GPU if there is one, and a table of the results is printed, as for the number of retries with a larger model:
`--parts "number of retries" --model Qwen/Qwen2.5-0.5B-Instruct --workers 4`. The part *second model family* always
needs `--model FOLDER`.
"""

import argparse
import functools
import json
import logging
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from recipes.reasoning.task import SETS

from .. import names
from ..common import load_rows
from ..comparisons import ACCURACY, PASS_AT_16, Comparison, by_seed
from .language_model import (
    CUT_SET,
    EST_EMA,
    LONG_SET,
    LONGER_SUFFIX,
    MICRO_BATCH,
    PAPER_SUFFIX,
    SMALL_ROUNDS_3_PROMPTS,
    prepare_task,
    train_and_save,
)
from .training import Run, evaluation_rows, run_missing, slug, store, stored_runs


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
        model (`str`, *optional*):
            Name of the model, whose folder is the argument `--model`; by default SmolLM2-135M-Instruct.
        seeds_of_two (`tuple[int, ...]`, *optional*):
            Those of `seeds` that only the first two methods have.
    """

    methods: list[tuple[str, float]]
    seeds: tuple[int, ...]
    base_seed: int
    steps: int
    prompt_set: str = PROMPT_SET
    eval_every: int = 25
    model: str | None = None
    seeds_of_two: tuple[int, ...] = ()

    @property
    def runs(self) -> list[Run]:
        return [
            Run(method, self.prompt_set, seed, rate)
            for seed in self.seeds
            for method, rate in self.methods[: 2 if seed in self.seeds_of_two else None]
        ]

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
    "passes over the data": Part(
        [(method, RATE) for method in (names.GRPO_4, RETRIES, names.BATCH, SMALL_ROUNDS_3_PROMPTS, EST_EMA)],
        seeds=(21, 22, 23),
        base_seed=2,
        steps=150,
        prompt_set=CUT_SET,
    ),
    "longer run": Part(
        [(method + LONGER_SUFFIX, RATE) for method in (names.GRPO_4, RETRIES, names.BATCH, names.GRPO_8)],
        seeds=(21, 22),
        base_seed=2,
        steps=600,
        eval_every=50,
    ),
    # The third plan
    "repeated problems": Part(
        [(method, RATE) for method in (names.batch_retries(2), names.GRPO_4, RETRIES, names.BATCH)],
        seeds=(24, 25, 26, 27, 28),
        base_seed=2,
        steps=150,
        prompt_set=CUT_SET,
    ),
    "longer answers, 2 retries": Part(
        [(method, RATE) for method in (names.batch_retries(2), names.GRPO_4, names.BATCH)],
        seeds=(24, 25, 26, 27, 28),
        base_seed=2,
        steps=40,
        prompt_set=LONG_SET,
        eval_every=20,
    ),
    "second model family": Part(
        [(method, RATE) for method in (names.GRPO_4, names.batch_retries(2), names.GRPO_8, RETRIES)],
        seeds=(41, 42, 43, 44, 45),
        base_seed=4,
        steps=150,
        model="Gemma 3 270M",
        seeds_of_two=(41, 42),
    ),
}
FIRST_PLAN = ("confirmation", "group size", "paper")
SECOND_PLAN = ("number of retries", "longer answers", "passes over the data", "longer run")
THIRD_PLAN = ("repeated problems", "longer answers, 2 retries", "second model family")


def check_start(part: Part, missing: list[Run], accuracy: float) -> None:
    """
    Raise `SystemExit` if stored runs with the seeds of missing ones have another base model, as their differences
    would be those of the base models too. The same seed gives another one on another machine or with other threads.
    """
    seeds = {run.seed for run in missing}
    for row in load_rows(STORED, missing_ok=True):
        run = Run(*(row[field] for field in Run._fields))
        is_compared = run in part.runs and run.seed in seeds and (row["step"], row["family"]) == (0, "all")
        if is_compared and row["accuracy"] != accuracy:
            raise SystemExit(
                f"The stored runs with seed {run.seed} started from a base model with accuracy {row['accuracy']:.6f}, "
                f"the one here has {accuracy:.6f}. Finish this seed on such a machine, with as many threads."
            )


def table(part: Part, runs_dir: Path) -> str:
    """Accuracy and pass@16 after the last step, compared with the part's GRPO n=4."""
    records = [json.loads((runs_dir / run.file_name).read_text(encoding="utf-8")) for run in part.runs]
    rows = pd.DataFrame([row for record in records for row in evaluation_rows(record)])
    labels = {(m, rate): m if rate == RATE else f"{m} at {rate:g}" for m, rate in part.methods}
    runs = {label: by_seed(rows, part.prompt_set, *method) for method, label in labels.items()}
    reference = next((label for label in runs if label.startswith(names.GRPO_4)), next(iter(runs)))
    found = Comparison(runs, reference)
    columns = {"Accuracy": lambda m: found.cell(m, ACCURACY), "pass@16": lambda m: found.cell(m, PASS_AT_16)}
    return found.table(columns, {"Accuracy": "accuracy", "pass@16": "pass@16"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks_dir", type=Path, default=Path("outputs"), help="Folder of the base models: `reasoning-seed-N` in it."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/confirmation"))
    parser.add_argument("--methods", nargs="+", help="Names of methods of the parts.")
    parser.add_argument(
        "--task", choices=[*SETS, CUT_SET, LONG_SET], help="Set of problems, instead of those of the plan."
    )
    parser.add_argument("--steps", type=int, help="Steps of a run, instead of those of the plan.")
    parser.add_argument("--seeds", nargs="+", type=int, help="Training seeds, instead of those of the plan.")
    parser.add_argument("--rate", type=float, help="Learning rate of all methods, instead of those of the plan.")
    parser.add_argument("--model", help="Name on the hub or local folder, instead of SmolLM2-135M-Instruct.")
    parser.add_argument("--start_steps", type=int, help="Supervised steps of the base model, instead of the recipe's.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at a time, which share the GPU.")
    parser.add_argument("--micro_batch", type=int, default=MICRO_BATCH, help="Rows of a forward pass while training.")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=[name for name, part in PARTS.items() if part.model is None],
        help="By default all of SmolLM2-135M-Instruct, in their order.",
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
        if part.model is not None and args.model is None:
            parser.error(f"--model: this part needs the folder of {part.model} (benchmarks/README.md).")
        is_planned = not (args.methods or args.task or args.steps or args.seeds or args.rate)
        is_planned = is_planned and (args.model is None) == (part.model is None)
        methods = [(method, args.rate or rate) for method, rate in part.methods]
        methods = [method for method in methods if method[0] in (args.methods or method)]
        part = part._replace(
            methods=methods,
            prompt_set=args.task or part.prompt_set,
            steps=args.steps or part.steps,
            seeds=args.seeds or part.seeds,
            seeds_of_two=part.seeds_of_two if is_planned else (),
        )
        stored = stored_runs(STORED) if is_planned else set()
        missing = [run for run in part.runs if run not in stored]
        if not missing:
            continue
        model = slug(Path(args.model).name) if args.model else "smollm2-135m-instruct"
        task_dir = args.tasks_dir / (f"{part.task_folder}-{model}" if args.model else part.task_folder)
        runs_dir = args.output_dir if is_planned else args.output_dir.with_name(f"{args.output_dir.name}-{model}")
        start = prepare_task(part.prompt_set, task_dir, part.base_seed, args.model, args.start_steps)
        if is_planned:
            check_start(part, missing, start["accuracy"])
        work = functools.partial(
            train_and_save,
            runs_dir=runs_dir,
            task_dir=task_dir,
            steps=part.steps,
            eval_every=part.eval_every,
            micro_batch=args.micro_batch,
            use_cpu=not torch.cuda.is_available(),
        )
        run_missing(missing, runs_dir, work, args.workers)
        if not is_planned:
            print(table(part, runs_dir))


if __name__ == "__main__":
    main()
