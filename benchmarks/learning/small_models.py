"""
Learning benchmarks with small models on integer addition (easy, hard and large sets) and sorting.

- `equal_steps`: every method trains on 32 prompts per step, as in the paper, at one learning rate.
- `equal_tokens`: every method samples about 128 rollouts per step (64 on sorting),
  so methods with fewer rollouts per prompt see more prompts.
- `one_rollout`: the same for the batch baseline with one rollout per prompt, from another base model.
- `graded_rewards`: the same for graded rewards (benchmarks/README.md).
- `one_step_ahead`: GRPO with and without `max_staleness=1`, on a vLLM server.

The learning rates of `equal_tokens` were tuned for each method and set on two seeds that are not stored; those of the
batch baseline were tuned for another baseline with one rollout per prompt, which has been removed.

`python -m benchmarks.learning.small_models EXPERIMENT` writes one file per run to `outputs/learning/EXPERIMENT/` and
continues with the runs that are missing. `--store` adds the runs to the results in the repository; stored runs are not
run again.
"""

import argparse
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ada_trl.utils.files import atomic_write
from examples.win_rates import win_rates
from recipes.arithmetic.task import exact_match, prepare
from recipes.arithmetic.vllm_server import running_server
from recipes.sorting.task import prepare as prepare_sorting

from .. import names
from ..common import BALANCE, POS
from . import graded_rewards, prompt_sets
from .sorting import SORTING, SORTING_GRADED
from .training import Run, Task, run_missing, store, stored_runs, train_once


ROLLOUTS_PER_STEP = 128
ADDITION = Task(
    exact_match,
    {},
    ROLLOUTS_PER_STEP,
    steps=100,
    read=prompt_sets.read_set,
    evaluate=prompt_sets.evaluate,
    load=prompt_sets.load,
)
SETS = {
    "easy": ADDITION,
    "hard": ADDITION,
    "large": ADDITION,
    "sorting": SORTING,
    "sorting-graded": SORTING_GRADED,
    **graded_rewards.TASKS,
}
AHEAD = f"{names.GRPO_4}, one step ahead"
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_weight_sync": "disk"}
PORT = 8377


class Method(NamedTuple):
    """
    A method of an experiment.

    Args:
        options (`dict`):
            Fields of `AdaGRPOConfig`.
        prompts (`int`):
            Prompts of a step with `ROLLOUTS_PER_STEP` rollouts.
        rates (`dict[str, float]`):
            Learning rate by set, of the sets that the method is run on.
        prompts_on (`dict[str, int]`):
            Prompts of a step on the sets that differ.
        advantage_func (`Callable`, *optional*):
            Argument of the trainer.
    """

    options: dict
    prompts: int
    rates: dict[str, float]
    prompts_on: dict[str, int] = {}
    advantage_func: Callable | None = None


def _grpo(n: int, **options) -> dict:
    return {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n, **options}


def _dapo() -> dict:
    return _grpo(4, zero_variance_groups="resample", max_rounds=8)


def _seq(mode: str = "seq-balance", **options) -> dict:
    rounds = POS if mode == "seq-pos" else BALANCE
    return {"adaptive_sampling": mode, "num_generations": 4, **rounds, **options}


def _est(estimator: str, n: int) -> dict:
    return {"adaptive_sampling": "est", "pass_rate_estimator": estimator, "num_generations": n}


def _equal_steps(options: dict) -> Method:
    return Method(options, 32, {"easy": 2e-4, "hard": 2e-4})


GRPO_RATES = {"easy": 2e-4, "hard": 2e-4, "large": 2e-4, "sorting": 1e-4}
BATCH_RATES = {"easy": 2e-4, "hard": 2e-4, "large": 4e-4, "sorting": 2e-4, "sorting-graded": 2e-4}
GRADED_RATES = dict.fromkeys((*graded_rewards.TASKS, "sorting-graded"), 2e-4)
WITH_SUCCESS = {name: rate for name, rate in GRADED_RATES.items() if not name.endswith(graded_rewards.WITHOUT_SUCCESS)}
EXPERIMENTS = {  # methods in the order of the tables
    "equal_steps": {
        names.GRPO_4: _equal_steps(_grpo(4)),
        names.GRPO_8: _equal_steps(_grpo(8)),
        names.GRPO_16: _equal_steps(_grpo(16)),
        names.DAPO: _equal_steps(_dapo()),
        names.SEQ_POS_HYBRID: _equal_steps(_seq("seq-pos")),
        names.HYBRID: _equal_steps(_seq()),
        names.ALGORITHM_2: _equal_steps(_seq(prompt_weighting="none")),
        f"{names.SEQ_BALANCE} (1/p)": _equal_steps(_seq(prompt_weighting="inverse")),
        f"{names.EST} (EMA) n=4": _equal_steps(_est("ema", 4)),
        f"{names.EST} (value head) n=4": _equal_steps(_est("value", 4)),
        f"{names.EST} (EMA) n=8": _equal_steps(_est("ema", 8)),
        f"{names.EST} (value head) n=8": _equal_steps(_est("value", 8)),
    },
    "equal_tokens": {
        names.GRPO_4: Method(_grpo(4), 32, GRPO_RATES),
        names.GRPO_8: Method(_grpo(8), 16, GRPO_RATES | {"easy": 1e-4, "large": 1e-4}),
        # About 20 of 32 sampled groups have a non-zero reward variance on the easy set, 17 on the hard set.
        names.DAPO: Method(_dapo(), 17, {"easy": 2e-4, "hard": 2e-4}, prompts_on={"easy": 20}),
        names.HYBRID: Method(_seq(), 9, {"easy": 1e-4, "hard": 1e-4}),  # about 14 rollouts per prompt on both sets
    },
    "one_rollout": {
        names.GRPO_4: Method(_grpo(4), 32, GRPO_RATES | {"sorting-graded": 2e-4}),
        names.BATCH: Method({"baseline": "batch"}, 128, BATCH_RATES),
        names.BATCH_SCALED: Method({"baseline": "batch", "scale_rewards": "batch"}, 128, {"sorting-graded": 2e-4}),
    },
    "graded_rewards": {
        names.GRPO_4: Method(_grpo(4), 32, GRADED_RATES),
        names.BATCH: Method({"baseline": "batch"}, 128, GRADED_RATES),
        names.BATCH_SCALED: Method({"baseline": "batch", "scale_rewards": "batch"}, 128, GRADED_RATES),
        names.WIN_RATES: Method({"baseline": "batch"}, 128, GRADED_RATES, advantage_func=win_rates),
        names.batch_retries(2): Method({"baseline": "batch", "retries": 2}, 128, WITH_SUCCESS),
    },
    "one_step_ahead": {
        names.GRPO_4: Method(_grpo(4) | SERVER, 32, {name: GRPO_RATES[name] for name in ("easy", "hard", "large")}),
        AHEAD: Method(
            _grpo(4, max_staleness=1) | SERVER, 32, {name: GRPO_RATES[name] for name in ("easy", "hard", "large")}
        ),
    },
}


def planned_runs(experiment: str, methods: list[str], sets: list[str], seeds: list[int]) -> list[Run]:
    """Runs ordered by seed, so that an unfinished experiment has about as many seeds of every method."""
    found = EXPERIMENTS[experiment]
    return [
        Run(method, name, seed, found[method].rates[name])
        for seed in seeds
        for name in sets
        for method in methods
        if name in found[method].rates
    ]


def train_and_save(
    run: Run,
    experiment: str,
    runs_dir: Path,
    task_dirs: dict[str, Path],
    steps: int | None = None,
    eval_every: int = 20,
    server: str | None = None,
) -> Run:
    method, task = EXPERIMENTS[experiment][run.method], SETS[run.prompt_set]
    options = method.options | ({"vllm_server_base_url": server} if server else {})
    prompts = method.prompts_on.get(run.prompt_set, method.prompts) * task.rollouts_per_step // ROLLOUTS_PER_STEP
    functions = task.reward if isinstance(task.reward, list) else [task.reward]
    rewards: dict[str, list] = {}
    if experiment == "graded_rewards":
        rewards = {function.__name__: [] for function in functions}
        reward = [graded_rewards.recorded(function, rewards[function.__name__]) for function in functions]
        task = task._replace(reward=reward)
    directory, steps = task_dirs[run.prompt_set], steps or task.steps
    record = train_once(
        run, options, prompts, directory, steps, eval_every, task, advantage_func=method.advantage_func
    )
    record["rewards"] = rewards
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(record))
    return run


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
    if any(name.endswith("functions") for name in sets):
        graded_rewards.prepare_base_with_sign(task_dir)
    if "large" in sets and not (data / "large_train.jsonl").exists():
        prompt_sets.build_large(task_dir / "base", data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--methods", nargs="+", help="Default: all of the experiment.")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="Default: all of the experiment.")
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
    parser.add_argument("--output_dir", type=Path, help="Default: outputs/learning/EXPERIMENT.")
    parser.add_argument(
        "--store", action="store_true", help="Do not train; add the finished runs to the stored results."
    )
    args = parser.parse_args()
    methods = EXPERIMENTS[args.experiment]
    if unknown := set(args.methods or ()) - set(methods):
        parser.error(f"--methods: {', '.join(sorted(unknown))} must be among {', '.join(methods)}")
    runs_dir = args.output_dir or Path("outputs/learning") / args.experiment
    if args.store:
        store(args.experiment, runs_dir)
        if args.experiment == "graded_rewards":
            graded_rewards.store_first_steps(runs_dir)
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    sets = args.sets or [name for name in SETS if any(name in method.rates for method in methods.values())]
    runs = planned_runs(args.experiment, args.methods or list(methods), sets, args.seeds)
    runs = [run for run in runs if run not in stored_runs(args.experiment)]
    prepare_sets(sets, args.task_dir, args.sorting_dir)
    work = functools.partial(
        train_and_save,
        experiment=args.experiment,
        runs_dir=runs_dir,
        task_dirs={name: args.sorting_dir if name.startswith("sorting") else args.task_dir for name in SETS},
        steps=args.steps,
        eval_every=args.eval_every,
    )
    if args.experiment != "one_step_ahead":
        run_missing(runs, runs_dir, work, args.workers)
        return
    runs_dir.mkdir(parents=True, exist_ok=True)
    with running_server(args.task_dir / "base", PORT, runs_dir / "server.log") as url:
        run_missing(runs, runs_dir, functools.partial(work, server=url))


if __name__ == "__main__":
    main()
