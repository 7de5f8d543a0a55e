"""
Training and evaluation of one run of a learning benchmark, and the table of its results.

`run_missing` writes one file per run, so that a restarted benchmark continues with the runs that are missing; `store`
adds the runs' evaluations to the results in the repository.
"""

import importlib.metadata
import json
import logging
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import MAX_ANSWER_TOKENS

from ..common import QUIET, ROOT, load_rows, save_rows


logger = logging.getLogger(__name__)

COMMON = QUIET | {
    "max_completion_length": MAX_ANSWER_TOKENS,
    "temperature": 1.0,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "bf16": False,
    "dataloader_pin_memory": False,
    "use_cpu": True,
}


class Task(NamedTuple):
    """A learning task. Its base model is in the folder `base` of the task's directory."""

    reward: Callable
    options: dict  # in addition to COMMON
    rollouts_per_step: int
    steps: int
    read: Callable[[Path, str], tuple[Dataset, Dataset]]  # training and test prompts
    evaluate: Callable[..., dict]  # of model, tokenizer and test prompts
    load: Callable[[Path], tuple]  # model and tokenizer
    peft_config: Any = None


class Run(NamedTuple):
    """One cell of a grid."""

    method: str
    prompt_set: str
    seed: int
    rate: float

    @property
    def file_name(self) -> str:
        return f"{self.prompt_set}_{slug(self.method)}_{self.rate:g}_{self.seed}.json"


def slug(text: str) -> str:
    """A method's name as part of a file name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower())


class Recorder(TrainerCallback):
    """Evaluates during training, and measures the CPU time of the steps without evaluation."""

    def __init__(self, model, tokenizer, test: Dataset, every: int, evaluate: Callable[..., dict], start: dict | None):
        self.model, self.tokenizer, self.test, self.every = model, tokenizer, test, every
        self.measure, self.start = evaluate, start
        self.evaluations: list[dict] = []
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.evaluate(0, self.start)

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.process_time() - self.started)
        if state.global_step == state.max_steps or state.global_step % self.every == 0:
            self.evaluate(state.global_step)

    def evaluate(self, step: int, known: dict | None = None) -> None:
        self.evaluations.append({"step": step} | (known or self.measure(self.model, self.tokenizer, self.test)))


def step_row(logs: dict, cpu_seconds: float, prompts_per_step: int) -> dict:
    """Selected metrics of one step. Counts are totals of the step, fractions are over its prompts."""
    ada = {name.removeprefix("ada/"): value for name, value in logs.items() if name.startswith("ada/")}
    generated = round(ada["tokens/generated"])
    return {
        "reward": logs["reward"],
        "entropy": logs.get("entropy"),
        "rollouts": round(ada["samples_per_prompt/mean"] * ada.get("prompts/sampled", prompts_per_step)),
        "generated_tokens": generated,
        "trained_tokens": generated - round(ada.get("tokens/discarded", 0)),
        "frac_zero_advantage_groups": ada.get("frac_zero_advantage_groups"),
        "cpu_seconds": cpu_seconds,
    }


def train_once(
    run: Run,
    options: dict,
    prompts_per_step: int,
    task_dir: Path,
    steps: int,
    eval_every: int,
    task: Task,
    start: dict | None = None,
    advantage_func: Callable | None = None,
) -> dict:
    """
    Train `run`. Returns its record, which can be written as JSON: options, steps and evaluations. A step is one
    generation batch, also with several optimizer iterations (`num_iterations`). `start` is the evaluation before
    training, if it is known.
    """
    torch.set_num_threads(1)
    options = COMMON | task.options | options | {"learning_rate": run.rate}
    iterations = options.get("num_iterations", 1)
    model, tokenizer = task.load(task_dir / "base")
    train_rows, test = task.read(task_dir, run.prompt_set)
    recorder = Recorder(model, tokenizer, test, eval_every * iterations, task.evaluate, start)
    with tempfile.TemporaryDirectory() as directory:
        args = AdaGRPOConfig(
            directory,
            max_steps=steps * iterations,
            seed=run.seed,
            **{"per_device_train_batch_size": prompts_per_step * options.get("num_generations", 1)} | options,
        )
        trainer = AdaGRPOTrainer(
            model,
            task.reward,
            args,
            train_rows,
            processing_class=tokenizer,
            callbacks=[recorder],
            peft_config=task.peft_config,
            advantage_func=advantage_func,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [logs for logs in trainer.state.log_history if "ada/tokens/generated" in logs]
    assert len(logs) == steps and len(recorder.seconds) == steps * iterations
    rows = []
    for i, row in enumerate(logs):
        seconds = sum(recorder.seconds[i * iterations : (i + 1) * iterations])
        rows.append({"step": i + 1} | step_row(row, seconds, prompts_per_step))
    evaluations = [row | {"step": row["step"] // iterations} for row in recorder.evaluations]
    device = torch.cuda.get_device_name() if trainer.args.device.type == "cuda" else "CPU"
    return run._asdict() | provenance(device) | {"options": options, "steps": rows, "evaluations": evaluations}


def provenance(device: str) -> dict:
    """Device ("CPU" or the GPU's name), commit of the repository (empty outside of one), and versions of packages."""
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    described = subprocess.run(commit, capture_output=True, text=True)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    return {"device": device, "commit": described.stdout.strip(), "versions": ", ".join(versions)}


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


SUMS = ("generated_tokens", "trained_tokens", "rollouts", "cpu_seconds")
MEANS = ("frac_zero_advantage_groups", "entropy")
PROVENANCE = ("device", "commit", "versions")


def evaluation_rows(record: dict) -> list[dict]:
    """
    One row per evaluation with the sums and means of its steps so far, and one per evaluation and family of problems.
    The `family` of the whole set is "all".
    """
    rows = []
    for evaluation in record["evaluations"]:
        run = {name: record[name] for name in Run._fields} | {name: record.get(name) for name in PROVENANCE}
        run["step"] = evaluation["step"]
        steps = record["steps"][: evaluation["step"]]
        sums = {name: sum(step[name] for step in steps) for name in SUMS}
        means = {}
        for name in MEANS:
            values = [step[name] for step in steps if step.get(name) is not None]
            means[name] = mean(values) if values else None
        measured = {name: value for name, value in evaluation.items() if not isinstance(value, dict)}
        zero_variance = evaluation.get("frac_zero_variance", {})
        rows.append(run | {"family": "all", "frac_zero_variance": zero_variance.get("all")} | sums | means | measured)
        for family, accuracy in evaluation.get("by_family", {}).items():
            own = {"family": family, "accuracy": accuracy, "frac_zero_variance": zero_variance.get(family)}
            rows.append(run | own)
    return rows


def stored_runs(name: str) -> set[Run]:
    """The runs in the stored results `name`; none if there are no such results."""
    return {Run(*(row[field] for field in Run._fields)) for row in load_rows(name, missing_ok=True)}


def store(name: str, runs_dir: Path) -> None:
    """Add the evaluations of the runs in `runs_dir` to the stored results `name`."""
    rows = load_rows(name, missing_ok=True)
    for path in sorted(runs_dir.glob("*.json")):
        rows += evaluation_rows(json.loads(path.read_text(encoding="utf-8")))
    unique = {tuple(row[field] for field in (*Run._fields, "step", "family")): row for row in rows}
    save_rows(list(unique.values()), name)
