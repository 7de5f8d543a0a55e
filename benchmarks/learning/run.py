"""
GRPO, dynamic sampling (DAPO) and Reinforce-Ada on an easy and a hard prompt set of the arithmetic task, over several seeds.

`python -m benchmarks.learning.run` writes one file per run to `outputs/learning/runs/`; a restarted command continues with
the runs that are missing. Any prefix of the grid has about as many seeds of every method. `python -m
benchmarks.learning.report` makes the tables and figures.
"""

import argparse
import functools
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.utils.files import atomic_write
from recipes.arithmetic.task import MAX_ANSWER_TOKENS, exact_match, prepare

from .. import names
from . import prompt_sets


logger = logging.getLogger(__name__)

STEPS, EVAL_EVERY = 100, 10
PROMPTS_PER_STEP = 32
COMMON = {
    "max_completion_length": MAX_ANSWER_TOKENS,
    "temperature": 1.0,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "log_level": "error",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


class Task(NamedTuple):
    """A learning task. Its base model is in the folder `base` of the task's directory."""

    reward: Callable
    options: dict  # in addition to COMMON
    rollouts_per_step: int
    steps: int
    rates: tuple[float, ...]  # learning rates to choose from
    read: Callable[[Path, str], tuple[Dataset, Dataset, Dataset | None]]  # training, test and unselected prompts
    evaluate: Callable[..., dict]  # of model, tokenizer and test prompts
    load: Callable[[Path], tuple] = prompt_sets.load
    peft_config: Any = None


ADDITION = Task(
    exact_match, {}, 128, STEPS, rates=(1e-4, 2e-4, 4e-4), read=prompt_sets.read_set, evaluate=prompt_sets.evaluate
)


def _grpo(n: int) -> dict:
    return {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n}


def _seq(condition: str, **options) -> dict:
    """Without selection correction, as in the paper, unless `options` contain it."""
    rounds = {"num_generations": 4, "samples_per_round": 8, "max_rounds": 4}
    return {"adaptive_sampling": condition, "selection_correction": False, **rounds, **options}


def _est(estimator: str, n: int) -> dict:
    return {"adaptive_sampling": "est", "pass_rate_estimator": estimator, "num_generations": n}


# In the order of the tables. The options are those that a user would pass, in addition to COMMON.
METHODS = {
    names.GRPO_4: _grpo(4),
    names.GRPO_8: _grpo(8),
    names.GRPO_16: _grpo(16),
    names.DAPO: _grpo(4) | {"zero_variance_groups": "resample", "max_rounds": 8},
    f"{names.SEQ_POS} (1/√p)": _seq("seq-pos"),
    names.HYBRID: _seq("seq-balance"),
    names.ALGORITHM_2: _seq("seq-balance", prompt_weighting="none"),
    f"{names.SEQ_BALANCE} (1/p)": _seq("seq-balance", prompt_weighting="inverse"),
    names.CORRECTED: _seq("seq-balance", selection_correction=True),
    f"{names.EST} (EMA) n=4": _est("ema", 4),
    f"{names.EST} (value head) n=4": _est("value", 4),
    f"{names.EST} (EMA) n=8": _est("ema", 8),
    f"{names.EST} (value head) n=8": _est("value", 8),
}


def slug(text: str) -> str:
    """A method's name as part of a file name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower())


class Run(NamedTuple):
    """One cell of the grid."""

    method: str
    prompt_set: str
    seed: int

    @property
    def file_name(self) -> str:
        return f"{self.prompt_set}_{slug(self.method)}_{self.seed}.json"


def grid(methods: list[str], sets: list[str], seeds: list[int]) -> list[Run]:
    """Runs ordered by seed, so that an unfinished grid has about as many seeds of every method."""
    return [Run(method, name, seed) for seed in seeds for name in sets for method in methods]


class Recorder(TrainerCallback):
    """Evaluates during training, and measures the time of the steps without evaluation."""

    def __init__(self, model, tokenizer, test, spread, every: int, evaluate: Callable[..., dict], start: dict | None):
        self.model, self.tokenizer, self.test, self.spread, self.every = model, tokenizer, test, spread, every
        self.measure, self.start = evaluate, start
        self.evaluations: list[dict] = []
        self.seconds: list[dict] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.evaluate(0, last=state.max_steps == 0)

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        wall, cpu = time.perf_counter() - self.started[0], time.process_time() - self.started[1]
        self.seconds.append({"wall_seconds": wall, "cpu_seconds": cpu})
        last = state.global_step == state.max_steps
        if last or state.global_step % self.every == 0:
            self.evaluate(state.global_step, last)

    def evaluate(self, step: int, last: bool) -> None:
        known = self.start if step == 0 else None
        evaluation = {"step": step} | (known or self.measure(self.model, self.tokenizer, self.test))
        if self.spread is not None and (step == 0 or last):
            evaluation["by_difficulty"] = self.by_difficulty()
        self.evaluations.append(evaluation)

    def by_difficulty(self) -> list[float | None]:
        """Accuracy on unselected problems in bins of the base model's pass rate; `None` for an empty bin."""
        rates = prompt_sets.pass_rates(self.model, self.tokenizer, self.spread)
        edges = prompt_sets.BIN_EDGES
        bins = np.digitize(self.spread["base_pass_rate"], edges[1:-1])
        return [float(rates[bins == i].mean()) if (bins == i).any() else None for i in range(len(edges) - 1)]


def step_row(logs: dict, seconds: dict, prompts_per_step: int) -> dict:
    """Selected metrics of one step. Counts are totals of the step, fractions are over its prompts."""
    ada = {name.removeprefix("ada/"): value for name, value in logs.items() if name.startswith("ada/")}
    kept = ["frac_reward_zero_std/first_round", "frac_zero_advantage_groups", "frac_all_correct", "frac_all_wrong"]
    kept += [
        "frac_exit_condition_met",
        "pass_rate/mean",
        "samples_per_prompt/max",
        "estimator/brier",
        "prompt_weight/max",
    ]
    kept += ["estimator/brier_constant", "estimator/brier_ema", "estimator/brier_value", "estimator/brier_ema_value"]
    kept += [
        f"baseline/{name}" for name in ("explained_variance", "explained_variance_leave_one_out", "pseudo_counts")
    ]
    kept += [
        "prompts/frac_new",
        "prompts/retries_dropped",
        "prompts/resampled",
        "prompts/skipped",
        "prompts/pass_rate",
    ]
    kept += ["time/generate", *(f"active_prompts/round_{k}" for k in range(1, 5))]
    return {
        "step": logs["step"],
        "reward": logs["reward"],
        "entropy": logs["entropy"],
        "grad_norm": logs["grad_norm"],
        "rollouts": round(ada["samples_per_prompt/mean"] * ada.get("prompts/sampled", prompts_per_step)),
        "rounds": ada.get("rounds/mean", 1.0),
        "generated_tokens": round(ada["tokens/generated"]),
        "trained_tokens": round(ada["tokens/generated"] - ada.get("tokens/discarded", 0)),
        **{name: ada.get(name) for name in kept},
        **seconds,
    }


def train(run: Run, task_dir: Path, steps: int, eval_every: int) -> dict:
    """Train one cell of the grid. Returns its record, which can be written as JSON."""
    return {**run._asdict(), **train_once(run, METHODS[run.method], PROMPTS_PER_STEP, task_dir, steps, eval_every)}


def train_once(
    run,
    options: dict,
    prompts_per_step: int,
    task_dir: Path,
    steps: int,
    eval_every: int,
    task: Task = ADDITION,
    trainer_class: type[AdaGRPOTrainer] = AdaGRPOTrainer,
    start: dict | None = None,
) -> dict:
    """
    Train `run`, which has a method, a prompt set and a seed. Returns options, steps and evaluations. A step is one
    generation batch, also with several optimizer iterations (`num_iterations`). `start` is the evaluation before training, if
    it is known.
    """
    torch.set_num_threads(1)
    options = COMMON | task.options | options
    iterations = options.get("num_iterations", 1)
    model, tokenizer = task.load(task_dir / "base")
    train_rows, test, spread = task.read(task_dir, run.prompt_set)
    recorder = Recorder(model, tokenizer, test, spread, eval_every * iterations, task.evaluate, start)
    with tempfile.TemporaryDirectory() as directory:
        args = AdaGRPOConfig(
            directory,
            max_steps=steps * iterations,
            seed=run.seed,
            **{"per_device_train_batch_size": prompts_per_step * options.get("num_generations", 1)} | options,
        )
        trainer = trainer_class(
            model,
            task.reward,
            args,
            train_rows,
            processing_class=tokenizer,
            callbacks=[recorder],
            peft_config=task.peft_config,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [logs for logs in trainer.state.log_history if "ada/tokens/generated" in logs]
    rows = []
    for step, row in enumerate(logs, start=1):
        of_step = recorder.seconds[(step - 1) * iterations : step * iterations]
        seconds = {name: sum(part[name] for part in of_step) for name in of_step[0]}
        rows.append(step_row(row, seconds, prompts_per_step) | {"step": step})
    assert len(rows) == steps and len(recorder.seconds) == steps * iterations
    evaluations = [row | {"step": row["step"] // iterations} for row in recorder.evaluations]
    return {"options": options, "steps": rows, "evaluations": evaluations}


def train_and_save(run: Run, output_dir: Path, task_dir: Path, steps: int, eval_every: int) -> Run:
    record = train(run, task_dir, steps, eval_every)
    with atomic_write(output_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(record))
    return run


def run_missing(runs: list[Run], output_dir: Path, work, workers: int = 1) -> int:
    """Call `work(run)`, which writes `run.file_name`, for the runs without a file. Returns the number of calls."""
    output_dir.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not (output_dir / run.file_name).exists()]
    logger.info("%d runs, %d of them done before", len(runs), len(runs) - len(missing))
    started = time.perf_counter()
    if workers == 1:
        finished = map(work, missing)
    else:
        executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        finished = executor.map(work, missing)
    for done, run in enumerate(finished, start=1):
        per_run = (time.perf_counter() - started) / done
        logger.info("%d/%d %s: %.0f s per run", done, len(missing), " ".join(map(str, run)), per_run)
    return len(missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=prompt_sets.PROMPT_SETS, default=list(prompt_sets.PROMPT_SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval_every", type=int, default=EVAL_EVERY, help="Steps between evaluations.")
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning"))
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare(args.task_dir)
    if not (args.task_dir / "learning" / "hard_train.jsonl").exists():  # written last
        prompt_sets.build(args.task_dir / "base", args.task_dir / "learning")
    work = functools.partial(
        train_and_save,
        output_dir=args.output_dir / "runs",
        task_dir=args.task_dir,
        steps=args.steps,
        eval_every=args.eval_every,
    )
    run_missing(grid(args.methods, args.sets, args.seeds), args.output_dir / "runs", work, args.workers)


if __name__ == "__main__":
    main()
