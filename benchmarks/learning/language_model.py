"""
Comparisons on a pretrained language model with LoRA on all linear layers (recipes/reasoning).

- `EQUAL_TOKENS`: every method samples about 64 rollouts per step, so methods with fewer rollouts per prompt see more
  prompts. No prompt is sampled in two steps, except by retries.
- `PAPER`: the paper's protocol. Every method trains on 16 prompts per step;
  additional rollouts are the cost of a method.

The evaluation is exact: an answer is a single string, so one forward pass gives the probability of sampling it, and
with it pass@k. Only on the set `steps`, whose longer answers contain intermediate steps, accuracy is measured by
sampling (`long_answers.py`).

`benchmarks.learning.confirmation` trains them. The runs before the plans are stored as `language_model` and
`language_rates`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ada_trl.commands.run_setup import make_lm_head_inputs_contiguous
from ada_trl.utils.files import atomic_write
from recipes.reasoning import task as reasoning
from recipes.reasoning import written_steps
from recipes.reasoning.task import MAX_ANSWER_TOKENS, pass_rates, solved

from .. import names
from ..common import BALANCE, DEFAULT, POS
from . import long_answers
from .prompt_sets import by_family, pass_at_k
from .training import Run, Task, train_once


ROLLOUTS_PER_STEP, STEPS, RATE = 64, 150, 3e-4
PASS_AT = (1, 4, 16, 64)
# Stored results of the comparison of learning rates, whose base model is that of the paper's protocol.
RATES = "language_rates"
LONG_SET, LONG_MICRO_BATCH = "steps", 16  # 64 rows of longer answers run out of 12 GiB
CUT_SET, CUT_SIZE = "mixture-1024", 1024  # the first training problems of the mixture, which a run sees several times
PAPER_PROMPTS = 16
MICRO_BATCH = 64  # 256 rows at once run out of 24 GiB
PAPER_SUFFIX = f", {PAPER_PROMPTS} prompts"
LONGER_SUFFIX = ", longer run"  # runs have the same name and seed as shorter ones otherwise


def _grpo(n: int, **options) -> dict:
    return {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n, **options}


UNWEIGHTED = {"prompt_weighting": "none"}
HYBRID_3_PROMPTS = f"{names.HYBRID}, 3 prompts"
SMALL_ROUNDS_3_PROMPTS = f"{names.SMALL_ROUNDS}, 3 prompts"
EST_EMA, EST_VALUE = f"{names.EST} (EMA) n=4", f"{names.EST} (value head) n=8"
EQUAL_TOKENS = {
    names.GRPO_4: _grpo(4),
    names.GRPO_8: _grpo(8),
    HYBRID_3_PROMPTS: {"num_generations": 4, **BALANCE},
    SMALL_ROUNDS_3_PROMPTS: {"num_generations": 4, **DEFAULT},
    EST_EMA: {"num_generations": 4, "adaptive_sampling": "est", "pass_rate_estimator": "ema"},
    names.BATCH: {"baseline": "batch"},
    names.BATCH_2_ITERATIONS: {"baseline": "batch", "num_iterations": 2},
    names.BATCH_2: {"baseline": "batch", "num_generations": 2},
    names.BATCH_4: {"baseline": "batch", "num_generations": 4},
    **{names.batch_retries(retries): {"baseline": "batch", "retries": retries} for retries in (1, 2, 3, 7)},
}
PAPER = {
    # As in EQUAL_TOKENS, but from the same base model as the other runs here:
    # a base that is trained again differs slightly.
    names.GRPO_4 + PAPER_SUFFIX: _grpo(4),
    names.GRPO_16 + PAPER_SUFFIX: _grpo(16),
    names.ALGORITHM_2 + PAPER_SUFFIX: BALANCE | {"num_generations": 4} | UNWEIGHTED,
    names.HYBRID + PAPER_SUFFIX: BALANCE | {"num_generations": 4},
    names.SMALL_ROUNDS + PAPER_SUFFIX: DEFAULT | {"num_generations": 4},
    names.SEQ_POS_2 + PAPER_SUFFIX: POS | {"adaptive_sampling": "seq-pos", "num_generations": 4} | UNWEIGHTED,
    EST_VALUE + PAPER_SUFFIX: {"adaptive_sampling": "est", "pass_rate_estimator": "value", "num_generations": 8},
}
LONGER_RUN = {method + LONGER_SUFFIX: options for method, options in EQUAL_TOKENS.items()}
METHODS = EQUAL_TOKENS | PAPER | LONGER_RUN
PROMPTS_PER_STEP = dict.fromkeys(PAPER, PAPER_PROMPTS) | {
    **{names.GRPO_4: 16, names.GRPO_8: 8, names.BATCH_2: 32, names.BATCH_4: 16, EST_EMA: 16},
    **dict.fromkeys((HYBRID_3_PROMPTS, SMALL_ROUNDS_3_PROMPTS), 3),  # about 64 rollouts on average
}
PROMPTS_PER_STEP |= {method + LONGER_SUFFIX: prompts for method, prompts in PROMPTS_PER_STEP.items()}


def folder_of(prompt_set: str) -> str:
    """Folder of the problems of a set."""
    return "mixture" if prompt_set == CUT_SET else prompt_set


def read(task_dir: Path, name: str) -> tuple[Dataset, Dataset]:
    """Training and test problems of a set."""
    files = {split: str(task_dir / folder_of(name) / f"{split}.jsonl") for split in ("train", "test")}
    data = load_dataset("json", data_files=files)
    train = data["train"]
    return train.select(range(min(CUT_SIZE, len(train)))) if name == CUT_SET else train, data["test"]


def load(base: Path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    make_lm_head_inputs_contiguous(model)
    return model, AutoTokenizer.from_pretrained(base)


def evaluate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> dict:
    """
    Exact accuracy and pass@k; by family also the probability that a group of four rollouts has zero reward variance.
    """
    rates = np.asarray(pass_rates(model, tokenizer, rows))
    families = np.asarray(rows["family"])

    frac_zero_variance = rates**4 + (1 - rates) ** 4
    return {
        "accuracy": float(rates.mean()),
        "by_family": by_family(rates, families),
        "frac_zero_variance": by_family(frac_zero_variance, families) | {"all": float(frac_zero_variance.mean())},
        **{f"pass@{k}": float(pass_at_k(rates, k)) for k in PASS_AT},
    }


def task(prompt_set: str) -> Task:
    lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    short = Task(
        solved,
        {"max_completion_length": MAX_ANSWER_TOKENS},
        ROLLOUTS_PER_STEP,
        STEPS,
        read=read,
        evaluate=evaluate,
        load=load,
        peft_config=lora,
    )
    if prompt_set != LONG_SET:
        return short
    return short._replace(
        reward=written_steps.solved,
        options={"max_completion_length": written_steps.MAX_COMPLETION_TOKENS},
        evaluate=long_answers.evaluate,
    )


def prepare_task(
    prompt_set: str, task_dir: Path, seed: int = 0, model: str | None = None, start_steps: int | None = None
) -> dict:
    """
    Write the problems and the base model, if they are missing. Returns the evaluation before training. `model` is a
    name on the hub or a local folder; by default SmolLM2-135M-Instruct. `start_steps`: supervised steps, by default
    the recipe's.
    """
    steps = {} if start_steps is None else {"steps": start_steps}
    (written_steps if prompt_set == LONG_SET else reasoning).prepare(task_dir, model, seed=seed, **steps)
    return evaluate_base(prompt_set, task_dir)


def evaluate_base(prompt_set: str, task_dir: Path) -> dict:
    """The evaluation before training, the same for all runs; stored in the task's folder."""
    path = task_dir / f"before_training_{prompt_set}.json"
    if not path.exists():
        model, tokenizer = load(task_dir / "base")
        model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        evaluation = task(prompt_set).evaluate(model, tokenizer, read(task_dir, prompt_set)[1])
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(evaluation))
    return json.loads(path.read_text(encoding="utf-8"))


def train_and_save(
    run: Run, runs_dir: Path, task_dir: Path, steps: int, eval_every: int, micro_batch: int = MICRO_BATCH, **more
) -> Run:
    """
    Train and write `run.file_name`, with at most `micro_batch` rows in a forward pass; `more` are further fields of
    `AdaGRPOConfig`, such as `use_cpu=False`.
    """
    options = METHODS[run.method] | more
    prompts = PROMPTS_PER_STEP.get(run.method, ROLLOUTS_PER_STEP)
    rows = prompts * options.get("num_generations", 1)
    micro_batch = min(rows, micro_batch, LONG_MICRO_BATCH if run.prompt_set == LONG_SET else rows)
    options |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": rows // micro_batch}
    start = evaluate_base(run.prompt_set, task_dir)
    record = train_once(run, options, prompts, task_dir, steps, eval_every, task(run.prompt_set), start)
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(record))
    return run
