"""
GRPO, the batch mean and the posterior baseline on a pretrained language model (recipes/reasoning).

Every method draws 64 rollouts per step; one with fewer per prompt sees more prompts, none of them twice. LoRA on all linear
layers. The evaluation is exact: an answer is one string, so one forward pass gives the probability of sampling it, and with it
pass@k.

`python -m benchmarks.learning.language_model` writes one file per run to `outputs/learning/language_model/`; stopped and started
again, it goes on with the runs that are missing. `--store` adds them to the results in the repository.
"""

import argparse
import functools
import json
import logging
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ada_trl.commands.train import make_lm_head_inputs_contiguous
from ada_trl.utils.files import atomic_write
from recipes.reasoning.task import MAX_ANSWER_TOKENS, SETS, pass_rates, prepare, solved

from ..common import RESULTS, load_rows, save_rows
from .equal_tokens import Run
from .prompt_sets import pass_at_k
from .run import Task, run_missing, train_once


ROLLOUTS_PER_STEP, STEPS, RATE = 64, 150, 3e-4
PASS_AT = (1, 4, 16, 64)
MEANS = {  # over all steps until an evaluation
    "frac_zero_advantage_groups": "zero_variance",
    "baseline/explained_variance": "explained_variance",
    "entropy": "entropy",
    "time/generate": "generating_seconds",
}
PROMPTS_PER_STEP = {"GRPO n=4": 16, "GRPO n=8": 8, "DAPO n=4": 4, "Seq-balance": 3}  # the last two draw about 64, too
METHODS = {
    "GRPO n=4": {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4},
    "Posterior n=1": {"baseline": "posterior"},
    "Batch n=1": {"baseline": "batch"},
    "GRPO n=8": {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 8},
    "Posterior n=1, 1 of 3": {"baseline": "posterior", "prompt_oversampling": 3},
    "Posterior n=1, 2 iterations": {"baseline": "posterior", "num_iterations": 2},
    "Rounds across steps": {
        **{"baseline": "posterior", "adaptive_sampling": "seq-pos", "num_generations": 1},
        **{"max_rounds": 8},
    },
    "DAPO n=4": {
        **{"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4},
        **{"zero_variance_groups": "resample", "max_rounds": 8},
    },
    "Seq-balance": {"selection_correction": False, "num_generations": 4},
}


def read(task_dir: Path, name: str) -> tuple[Dataset, Dataset, None]:
    files = {split: str(task_dir / name / f"{split}.jsonl") for split in ("train", "test")}
    data = load_dataset("json", data_files=files)
    return data["train"], data["test"], None


def load(base: Path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    make_lm_head_inputs_contiguous(model)
    return model, AutoTokenizer.from_pretrained(base)


def evaluate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> dict:
    """Accuracy and pass@k, exact; by family the accuracy and the groups of GRPO n=4 whose rollouts would all score the same."""
    rates = np.asarray(pass_rates(model, tokenizer, rows))
    families = np.asarray(rows["family"])

    def by_family(values: np.ndarray) -> dict[str, float]:
        return {name: float(values[families == name].mean()) for name in sorted(set(families))}

    alike = rates**4 + (1 - rates) ** 4
    return {
        "accuracy": float(rates.mean()),
        "by_family": by_family(rates),
        "alike": by_family(alike) | {"all": float(alike.mean())},
        **{f"pass@{k}": float(pass_at_k(rates, k)) for k in PASS_AT},
    }


def task() -> Task:
    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return Task(
        solved,
        {"max_completion_length": MAX_ANSWER_TOKENS},
        ROLLOUTS_PER_STEP,
        STEPS,
        rates=(RATE,),
        read=read,
        evaluate=evaluate,
        load=load,
        peft_config=lora,
    )


def train_and_save(run: Run, runs_dir: Path, task_dir: Path, steps: int, eval_every: int) -> Run:
    options = METHODS[run.method] | {"learning_rate": run.rate}
    prompts = PROMPTS_PER_STEP.get(run.method, ROLLOUTS_PER_STEP)
    record = run._asdict() | train_once(run, options, prompts, task_dir, steps, eval_every, task())
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(record))
    return run


def results(runs_dir: Path) -> list[dict]:
    """One row per evaluation of a run and family ("all" is the whole set), with what was spent until then."""
    rows = {}
    for row in load_rows("language_model") if (RESULTS / "language_model.parquet").exists() else []:
        rows[Run(*(row[name] for name in Run._fields)), row["step"], row["family"]] = row
    for path in sorted(runs_dir.glob("*.json")):
        record = json.loads(path.read_text())
        run = Run(*(record[name] for name in Run._fields))
        for evaluation in record["evaluations"]:
            steps = record["steps"][: evaluation["step"]]
            spent = {
                name: sum(step[name] for step in steps) for name in ("generated_tokens", "rollouts", "cpu_seconds")
            }
            for name, column in MEANS.items():
                values = [value for step in steps if (value := step.get(name)) is not None]
                spent[column] = mean(values) if values else None
            by_family = evaluation["by_family"]
            for family, accuracy in {"all": evaluation["accuracy"], **by_family}.items():
                whole = {f"pass@{k}": evaluation[f"pass@{k}"] if family == "all" else None for k in PASS_AT}
                row = {"step": evaluation["step"], "family": family, "accuracy": accuracy}
                row |= {"alike": evaluation.get("alike", {}).get(family)}
                rows[run, evaluation["step"], family] = run._asdict() | row | whole | spent
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval_every", type=int, default=25, help="Steps between evaluations.")
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/reasoning"), help="Base model and data.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/language_model"))
    parser.add_argument("--store", action="store_true", help="Only add the runs there are to the stored results.")
    args = parser.parse_args()
    if args.store:
        save_rows(results(args.output_dir), "language_model")
        return

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare(args.task_dir)
    work = functools.partial(
        train_and_save, runs_dir=args.output_dir, task_dir=args.task_dir, steps=args.steps, eval_every=args.eval_every
    )
    runs = [Run(method, name, seed, args.rate) for seed in args.seeds for name in args.sets for method in args.methods]
    run_missing(runs, args.output_dir, work, args.workers)


if __name__ == "__main__":
    main()
