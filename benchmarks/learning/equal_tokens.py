"""
What a rollout should be compared with: GRPO, DAPO and the posterior baseline at equal rollouts *and* equal steps.

Every method draws about 128 rollouts per step (64 in the sorting task, whose completions are longer); those that need fewer per
prompt see more prompts. Every method gets the best of a task's learning rates, chosen on seeds that are not reported: all of them
on one seed, the two best on another, too; of two about as good the smaller.

`python -m benchmarks.learning.equal_tokens` writes one file per run to `outputs/learning/equal_tokens/`, first the runs that choose
the rates; stopped and started again, it goes on with the runs that are missing. `--store` adds them to the results in the
repository, which count as done from then on.
"""

import argparse
import functools
import json
import logging
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pandas as pd
from datasets import Dataset

from ada_trl import AdaGRPOTrainer
from ada_trl.utils.files import atomic_write
from recipes.arithmetic.task import prepare
from recipes.sorting.task import prepare as prepare_sorting

from ..common import load_rows, save_rows
from . import prompt_sets
from .run import ADDITION, run_missing, slug, train_once
from .sorting import SORTING, SORTING_GRADED


ROLLOUTS_PER_STEP = 128
TUNING_SEEDS = (0, 6)
MORE_TOKENS = "GRPO n=16, 4 times the tokens"
KNOWN, BEST_KNOWN = "Posterior n=1, pass rates known", "Posterior n=1, 1 of 3, pass rates known"
TIE = 0.02  # about the standard error of a difference of two such means
SETS = {
    "easy": ADDITION,
    "hard": ADDITION,
    "large": ADDITION,
    "sorting": SORTING,
    "sorting-graded": SORTING_GRADED,
}


class OraclePassRateTrainer(AdaGRPOTrainer):
    """
    Expects of every prompt the policy's exact pass rate, as the value head's prediction: what knowing would be worth. Addition
    only: its right answer is one string.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        predict = self.pass_rates.predict
        self.pass_rates.predict = lambda states=None: (predict(states), self._know())

    def _know(self) -> None:
        tracker = self.pass_rates
        answers = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in tracker.predictions.prompts]
        rows = Dataset.from_dict({"prompt": tracker.predictions.prompts, "answer": answers})
        rates = prompt_sets.pass_rates(self.model, self.processing_class, rows)
        guesses = (rates - (tracker.reward_estimator.mean_reward or 0.0)) / (
            tracker.reward_estimator.reward_std.std or 1.0
        )
        features = tracker.reward_estimator.features(tracker.predictions.keys, guesses)
        tracker.predictions = tracker.predictions._replace(value=rates.tolist(), features=features)


class Method(NamedTuple):
    """
    Options of the trainer, the prompts of a step (on all sets but those of `prompts_on`), the method whose learning rate it
    takes if it is not tuned, and the trainer.
    """

    options: dict
    prompts_per_step: int
    rate_of: str | None = None
    prompts_on: dict[str, int] = {}
    trainer: type[AdaGRPOTrainer] = AdaGRPOTrainer


def _grpo(n: int) -> Method:
    return Method(
        {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n}, ROLLOUTS_PER_STEP // n
    )


def _posterior(n: int, **options) -> Method:
    options = {"adaptive_sampling": "uniform", "baseline": "posterior", "num_generations": n} | options
    return Method(options, ROLLOUTS_PER_STEP // n)


def _part(**options) -> Method:
    """One part added to the posterior with one rollout, or changed in it, at its rate."""
    return _posterior(1, **options)._replace(rate_of="Posterior n=1")


def _rounds(**options) -> Method:
    """Until the first positive, at most 8 rollouts if not said otherwise."""
    options = {"adaptive_sampling": "seq-pos", "max_rounds": 8} | options
    return _posterior(1, **options)


def _seq_balance(**options) -> Method:
    """About 14 rollouts per prompt on both sets."""
    options = {
        "adaptive_sampling": "seq-balance",
        "num_generations": 4,
        "samples_per_round": 8,
        "max_rounds": 4,
    } | options
    return Method(options, 9)


METHODS = {
    "GRPO n=2": _grpo(2),
    "GRPO n=4": _grpo(4),
    "GRPO n=8": _grpo(8),
    "GRPO n=16": _grpo(16),
    "GRPO n=4, not scaled": Method(
        _grpo(4).options | {"scale_rewards": "none"}, ROLLOUTS_PER_STEP // 4, rate_of="GRPO n=4"
    ),
    # 20 prompts have contrast of about 32 that are asked on the easy set, 17 on the hard one.
    "DAPO n=4": Method(
        _grpo(4).options | {"zero_variance_groups": "resample", "max_rounds": 8}, 17, prompts_on={"easy": 20}
    ),
    "Posterior n=4": _posterior(4),
    "Posterior n=2": _posterior(2),
    "Posterior n=1": _posterior(1),
    "Posterior n=1, scaled": _part(scale_rewards="batch"),
    "Batch n=1": _part(baseline="batch"),
    "Batch n=1, scaled": _part(baseline="batch", scale_rewards="batch"),
    "Posterior n=1, counts": _part(pass_rate_estimator="ema"),
    "Posterior n=1, value": _part(pass_rate_estimator="value"),
    "Posterior n=1, 1/√p": _part(prompt_weighting="inverse_sqrt"),
    "Posterior n=1, 2 iterations": _posterior(1, num_iterations=2),
    "Posterior, Est": _posterior(2, adaptive_sampling="est", min_samples=1, prompt_weighting="none")._replace(
        rate_of="Posterior n=2"
    ),
    "Rounds across steps": _rounds(),
    "Rounds across steps, at most 4": _rounds(max_rounds=4)._replace(rate_of="Rounds across steps"),
    "Rounds across steps, at most 2": _rounds(max_rounds=2)._replace(rate_of="Rounds across steps"),
    "Rounds across steps, 2 iterations": _rounds(num_iterations=2),
    "Posterior n=1, 1 of 2": _posterior(1, prompt_oversampling=2)._replace(rate_of="Posterior n=1, 1 of 3"),
    "Posterior n=1, 1 of 3": _posterior(1, prompt_oversampling=3),
    "Posterior n=1, 1 of 4": _posterior(1, prompt_oversampling=4)._replace(rate_of="Posterior n=1, 1 of 3"),
    KNOWN: _part(pass_rate_estimator="value")._replace(trainer=OraclePassRateTrainer),
    BEST_KNOWN: _part(pass_rate_estimator="value", prompt_oversampling=3)._replace(trainer=OraclePassRateTrainer),
    "Posterior n=1, 1 of 3, 2 iterations": _posterior(1, prompt_oversampling=3, num_iterations=2),
    "Seq-balance, 1/√p": _seq_balance(prompt_weighting="inverse_sqrt", selection_correction=False),
    "Seq-balance, 1/√p, corrected": _seq_balance(prompt_weighting="inverse_sqrt", selection_correction=True),
    "Seq-balance, weight 1": _seq_balance(prompt_weighting="none", selection_correction=False),
    "Seq-pos": _seq_balance(adaptive_sampling="seq-pos", selection_correction=True),
    "Est, paper": Method({"adaptive_sampling": "est", "num_generations": 4}, ROLLOUTS_PER_STEP // 4),
    "GRPO n=4, 2 iterations": Method(_grpo(4).options | {"num_iterations": 2}, ROLLOUTS_PER_STEP // 4),
    MORE_TOKENS: Method(_grpo(16).options, ROLLOUTS_PER_STEP // 4),  # not at equal tokens: for what a step buys
}


def title(prompt_set: str) -> str:
    """As it is called in a sentence."""
    return {"sorting-graded": "graded sorting"}.get(prompt_set, prompt_set)


class Run(NamedTuple):
    """One cell of the grid."""

    method: str
    prompt_set: str
    seed: int
    rate: float

    @property
    def file_name(self) -> str:
        return f"{self.prompt_set}_{slug(self.method)}_{self.rate:g}_{self.seed}.json"


def tuning(methods: list[str], sets: list[str]) -> list[Run]:
    methods = tuned_methods(methods)
    return [Run(m, name, TUNING_SEEDS[0], rate) for name in sets for rate in SETS[name].rates for m in methods]


def reported_runs(methods: list[str], sets: list[str], seeds: list[int], rows: list[dict]) -> list[Run]:
    """Each method at its rate, seed by seed, where the task lets it run."""
    cells = [
        (m, name)
        for name in sets
        for m in methods
        if METHODS[m].trainer is not OraclePassRateTrainer or SETS[name] is ADDITION
    ]
    rates = {(m, name): best_rate(m, name, rows) for m, name in cells}
    return [Run(m, name, seed, rates[m, name]) for seed in seeds for m, name in cells]


def tuned_methods(methods: list[str]) -> list[str]:
    """Those that choose a learning rate: for one that takes another's, that other."""
    return list(dict.fromkeys(METHODS[method].rate_of or method for method in methods))


def second_tuning(methods: list[str], sets: list[str], rows: list[dict]) -> list[Run]:
    """The two best rates of the first tuning seed on the second: one seed's best is within its noise."""
    return [
        Run(m, name, TUNING_SEEDS[1], rate)
        for name in sets
        for m in tuned_methods(methods)
        for rate in two_best(tuned(rows, m, name, TUNING_SEEDS[0]))
    ]


def two_best(accuracies: dict[float, float]) -> list[float]:
    return sorted(accuracies, key=accuracies.__getitem__)[-2:]


def tuned(rows: list[dict], method: str, prompt_set: str, seed: int) -> dict[float, float]:
    """Final accuracy by learning rate on a tuning seed."""
    return {row["rate"]: row["accuracy"] for row in finals(rows, method, prompt_set) if row["seed"] == seed}


def best_rate(method: str, prompt_set: str, rows: list[dict]) -> float | None:
    """
    The rate with the highest mean of final accuracies on both tuning seeds, or the smaller one within `TIE` of it: large
    rates vary more between seeds. `None` before both seeds are done.
    """
    method = METHODS[method].rate_of or method
    first, second = (tuned(rows, method, prompt_set, seed) for seed in TUNING_SEEDS)
    if len(first) < len(SETS[prompt_set].rates) or len(second) < 2:
        return None
    means = {rate: (first[rate] + second[rate]) / 2 for rate in second}
    return min(rate for rate in means if means[rate] >= max(means.values()) - TIE)


def finals(rows: list[dict], method: str, prompt_set: str) -> list[dict]:
    """The last evaluation of each run of a method on a set."""
    last = {}
    for row in rows:
        if (row["method"], row["prompt_set"]) == (method, prompt_set):
            run = Run(*(row[name] for name in Run._fields))
            last[run] = max(last.get(run, row), row, key=lambda row: row["step"])
    return list(last.values())


def train_and_save(run: Run, runs_dir: Path, task_dirs: dict[str, Path], steps: int | None, eval_every: int) -> Run:
    method, task = METHODS[run.method], SETS[run.prompt_set]
    options = method.options | {"learning_rate": run.rate}
    prompts = method.prompts_on.get(run.prompt_set, method.prompts_per_step)
    prompts = prompts * task.rollouts_per_step // ROLLOUTS_PER_STEP
    record = run._asdict() | train_once(
        run, options, prompts, task_dirs[run.prompt_set], steps or task.steps, eval_every, task, method.trainer
    )
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(record))
    return run


def results(runs_dir: Path, known: list[dict]) -> list[dict]:
    """
    One row per evaluation of a run, with what was spent until then: those that are `known`, and those in `runs_dir`.
    """
    rows = {(Run(*(row[name] for name in Run._fields)), row["step"]): row for row in known}
    for path in sorted(runs_dir.glob("*.json")):
        record = json.loads(path.read_text())
        run = Run(*(record[name] for name in Run._fields))
        for evaluation in record["evaluations"]:
            row = run._asdict() | {name: value for name, value in evaluation.items() if name != "by_difficulty"}
            steps = record["steps"][: evaluation["step"]]
            for name in ("generated_tokens", "rollouts", "cpu_seconds"):
                row[name] = sum(step[name] for step in steps)
            explained = [value for step in steps if (value := step.get("baseline/explained_variance")) is not None]
            row["explained"] = mean(explained) if explained else None
            rows[run, evaluation["step"]] = row
    return list(rows.values())


def reported(rows: list[dict]) -> pd.DataFrame:
    """All evaluations of the runs that are reported: each method at its rate, on the seeds that did not choose it."""
    cells = dict.fromkeys((row["method"], row["prompt_set"]) for row in rows)
    rates = {(method, name): best_rate(method, name, rows) for method, name in cells}
    return pd.DataFrame(
        [
            row
            for row in rows
            if row["seed"] not in TUNING_SEEDS and row["rate"] == rates[row["method"], row["prompt_set"]]
        ],
        columns=list(rows[0]),
    )


def prepare_sets(sets: list[str], task_dir: Path, sorting_dir: Path) -> None:
    """Make base models and prompts that are not there yet."""
    if any(name.startswith("sorting") for name in sets):
        prepare_sorting(sorting_dir)
    if all(name.startswith("sorting") for name in sets):
        return
    prepare(task_dir)
    data = task_dir / "learning"
    if not (data / "hard_train.jsonl").exists():  # written last
        prompt_sets.build(task_dir / "base", data)
    if "large" in sets and not (data / "large_train.jsonl").exists():
        prompt_sets.build_large(task_dir / "base", data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, help="By default 100, of sorting 60.")
    parser.add_argument("--eval_every", type=int, default=20, help="Steps between evaluations.")
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data.")
    parser.add_argument("--sorting_dir", type=Path, default=Path("outputs/sorting"), help="Those of sorting.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/equal_tokens"))
    parser.add_argument("--store", action="store_true", help="Only add the runs there are to the stored results.")
    args = parser.parse_args()
    if args.store:
        save_rows(results(args.output_dir, load_rows("equal_tokens")), "equal_tokens")
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare_sets(args.sets, args.task_dir, args.sorting_dir)
    task_dirs = {name: args.sorting_dir if name.startswith("sorting") else args.task_dir for name in SETS}
    work = functools.partial(
        train_and_save, runs_dir=args.output_dir, task_dirs=task_dirs, steps=args.steps, eval_every=args.eval_every
    )
    known = load_rows("equal_tokens")
    in_repository = {Run(*(row[name] for name in Run._fields)) for row in known}

    def run_those_missing(runs: list[Run]) -> None:
        run_missing([run for run in runs if run not in in_repository], args.output_dir, work, args.workers)

    run_those_missing(tuning(args.methods, args.sets))
    run_those_missing(second_tuning(args.methods, args.sets, results(args.output_dir, known)))
    run_those_missing(reported_runs(args.methods, args.sets, args.seeds, results(args.output_dir, known)))


if __name__ == "__main__":
    main()
