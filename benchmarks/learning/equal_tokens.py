"""
GRPO, dynamic sampling (DAPO), Reinforce-Ada and the posterior baseline at equal rollouts *and* equal steps.

Every method samples about 128 rollouts per step (64 in the sorting task, whose completions are longer), so methods with fewer
rollouts per prompt see more prompts. Learning rates are tuned for each method and task on seeds that are not reported: all rates
on the first seed, the two best ones also on the second; of two rates within `TIE` the smaller one is used.

`python -m benchmarks.learning.equal_tokens` writes one file per run to `outputs/learning/equal_tokens/`, first the runs that tune
the rates; a restarted command continues with the runs that are missing. `--store` adds the runs to the results in the
repository; stored runs are not run again.
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

from .. import names
from ..common import load_rows, save_rows
from . import prompt_sets
from .run import ADDITION, run_missing, slug, train_once
from .sorting import SORTING, SORTING_GRADED


ROLLOUTS_PER_STEP = 128
TUNING_SEEDS = (0, 6)
MORE_TOKENS = f"{names.GRPO_16}, 4× tokens"
TIE = 0.02  # about the standard error of the difference of two such means
SETS = {
    "easy": ADDITION,
    "hard": ADDITION,
    "large": ADDITION,
    "sorting": SORTING,
    "sorting-graded": SORTING_GRADED,
}


class OraclePassRateTrainer(AdaGRPOTrainer):
    """
    Uses the policy's exact pass rates as the predictions of the value head, to measure the value of perfect predictions. For
    addition only, where the correct answer is a single string.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        predict = self.pass_rates.predict
        self.pass_rates.predict = lambda states=None: (predict(states), self._insert_exact_pass_rates())

    def _insert_exact_pass_rates(self) -> None:
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
    A method of the comparison.

    Args:
        options (`dict`):
            Fields of `AdaGRPOConfig`.
        prompts_per_step (`int`):
            Prompts of a step, except on the sets in `prompts_on`.
        rate_of (`str`, *optional*):
            Method whose tuned learning rate is used. By default the rate is tuned for the method itself.
        prompts_on (`dict[str, int]`):
            Prompts of a step by set.
        trainer (`type`):
            Trainer class.
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
    """The posterior baseline with one rollout per prompt and changed options, at the learning rate of the unchanged method."""
    return _posterior(1, **options)._replace(rate_of=names.POSTERIOR)


def _retries(**options) -> Method:
    """One rollout per prompt and step; unsolved prompts are sampled again in later steps, by default at most 8 times in all."""
    options = {"adaptive_sampling": "seq-pos", "max_rounds": 8} | options
    return _posterior(1, **options)


def _oversampling(factor: int, **options) -> Method:
    """The posterior baseline for the prompts of highest expected gradient, one of every `factor` candidates."""
    return _posterior(1, prompt_oversampling=factor, **options)


def _seq_balance(**options) -> Method:
    """Seq-balance with 9 prompts per step: it samples about 14 rollouts per prompt on both sets."""
    options = {
        "adaptive_sampling": "seq-balance",
        "num_generations": 4,
        "samples_per_round": 8,
        "max_rounds": 4,
    } | options
    return Method(options, 9)


METHODS = {
    "GRPO n=2": _grpo(2),
    names.GRPO_4: _grpo(4),
    names.GRPO_8: _grpo(8),
    names.GRPO_16: _grpo(16),
    f"{names.GRPO_4}, no std normalization": Method(
        _grpo(4).options | {"scale_rewards": "none"}, ROLLOUTS_PER_STEP // 4, rate_of=names.GRPO_4
    ),
    # About 20 of 32 sampled groups have a non-zero reward variance on the easy set, 17 on the hard set.
    names.DAPO: Method(
        _grpo(4).options | {"zero_variance_groups": "resample", "max_rounds": 8}, 17, prompts_on={"easy": 20}
    ),
    "posterior baseline, n=4": _posterior(4),
    "posterior baseline, n=2": _posterior(2),
    names.POSTERIOR: _posterior(1),
    f"{names.POSTERIOR}, scaled rewards": _part(scale_rewards="batch"),
    names.BATCH: _part(baseline="batch"),
    f"{names.BATCH}, scaled rewards": _part(baseline="batch", scale_rewards="batch"),
    f"{names.POSTERIOR}, EMA only": _part(pass_rate_estimator="ema"),
    f"{names.POSTERIOR}, value head only": _part(pass_rate_estimator="value"),
    f"{names.POSTERIOR}, 1/√p": _part(prompt_weighting="inverse_sqrt"),
    names.POSTERIOR_2_ITERATIONS: _posterior(1, num_iterations=2),
    "posterior baseline, Est": _posterior(2, adaptive_sampling="est", min_samples=1, prompt_weighting="none")._replace(
        rate_of="posterior baseline, n=2"
    ),
    names.RETRIES: _retries(),
    f"{names.RETRIES} (max 4)": _retries(max_rounds=4)._replace(rate_of=names.RETRIES),
    f"{names.RETRIES} (max 2)": _retries(max_rounds=2)._replace(rate_of=names.RETRIES),
    f"{names.RETRIES}, 2 iterations": _retries(num_iterations=2),
    f"{names.POSTERIOR}, + prompt oversampling ×2": _oversampling(2)._replace(rate_of=names.OVERSAMPLING),
    names.OVERSAMPLING: _oversampling(3),
    f"{names.POSTERIOR}, + prompt oversampling ×4": _oversampling(4)._replace(rate_of=names.OVERSAMPLING),
    names.ORACLE: _part(pass_rate_estimator="value")._replace(trainer=OraclePassRateTrainer),
    names.OVERSAMPLING_ORACLE: _part(pass_rate_estimator="value", prompt_oversampling=3)._replace(
        trainer=OraclePassRateTrainer
    ),
    f"{names.OVERSAMPLING}, 2 iterations": _oversampling(3, num_iterations=2),
    names.HYBRID: _seq_balance(prompt_weighting="inverse_sqrt", selection_correction=False),
    names.CORRECTED: _seq_balance(prompt_weighting="inverse_sqrt", selection_correction=True),
    names.ALGORITHM_2: _seq_balance(prompt_weighting="none", selection_correction=False),
    f"{names.SEQ_POS} (1/√p, corrected)": _seq_balance(adaptive_sampling="seq-pos", selection_correction=True),
    names.EST: Method({"adaptive_sampling": "est", "num_generations": 4}, ROLLOUTS_PER_STEP // 4),
    f"{names.GRPO_4}, 2 iterations": Method(_grpo(4).options | {"num_iterations": 2}, ROLLOUTS_PER_STEP // 4),
    MORE_TOKENS: Method(_grpo(16).options, ROLLOUTS_PER_STEP // 4),  # equal steps, four times the tokens
}


def title(prompt_set: str) -> str:
    """The name of a prompt set in a sentence."""
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
    """Each method at its tuned rate, ordered by seed. The oracle runs only where pass rates can be computed."""
    cells = [
        (m, name)
        for name in sets
        for m in methods
        if METHODS[m].trainer is not OraclePassRateTrainer or SETS[name] is ADDITION
    ]
    rates = {(m, name): best_rate(m, name, rows) for m, name in cells}
    return [Run(m, name, seed, rates[m, name]) for seed in seeds for m, name in cells]


def tuned_methods(methods: list[str]) -> list[str]:
    """The methods whose learning rates are tuned, in place of those that use the rate of another method."""
    return list(dict.fromkeys(METHODS[method].rate_of or method for method in methods))


def second_tuning(methods: list[str], sets: list[str], rows: list[dict]) -> list[Run]:
    """The two best rates of the first tuning seed on the second one, because a single seed is too noisy to choose one."""
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
    The rate with the highest mean of final accuracies on both tuning seeds, or the smaller one within `TIE` of it, because
    large rates vary more between seeds. `None` until both seeds are done.
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
    One row per evaluation of a run, with the cost until then: the `known` rows and those of the runs in `runs_dir`.
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
            row["explained_variance"] = mean(explained) if explained else None
            rows[run, evaluation["step"]] = row
    return list(rows.values())


def reported(rows: list[dict]) -> pd.DataFrame:
    """All evaluations of the reported runs: each method at its tuned rate, on the seeds that were not used for tuning."""
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
    """Create base models and prompts that do not exist yet."""
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
    parser.add_argument("--steps", type=int, help="Default: 100, for sorting 60.")
    parser.add_argument("--eval_every", type=int, default=20, help="Steps between evaluations.")
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument(
        "--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data of addition."
    )
    parser.add_argument(
        "--sorting_dir", type=Path, default=Path("outputs/sorting"), help="Base model and data of sorting."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/equal_tokens"))
    parser.add_argument(
        "--store", action="store_true", help="Do not train; add the finished runs to the stored results."
    )
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
