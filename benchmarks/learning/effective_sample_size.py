"""
Effective sample size of importance-sampled rollouts by the length of completions and by TRL's `vllm_importance_sampling_mode`.

`python -m benchmarks.learning.effective_sample_size` trains the sorting task, measures the log-ratios of tokens that were sampled
one update earlier (as with `max_staleness=1`) and of tokens from a bfloat16 copy of the policy, stores the effective sample
sizes and writes the table of docs/vllm.md. `--plot` only writes the table. It takes about five CPU minutes.
"""

import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.sorting.task import MAX_COMPLETION_TOKENS, pretrain

from ..common import ROOT, computed_or_stored, fill, markdown
from . import prompt_sets, sorting
from .run import COMMON


NAME, PAGE = "effective_sample_size", ROOT / "docs" / "vllm.md"
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
CLIP_MAX = 3.0  # TRL's default `vllm_importance_sampling_clip_max`
LENGTHS = (48, 128, 512)
LONG = 32  # tokens of the longest completions as sampled; at most 48 are generated
SEQUENCES = 1000  # per measured step and length
COMPLETIONS, STEPS, EVERY, WARMUP = 512, 60, 5, 10
RATES = (2e-4, 8e-4)  # the first one is the tuned one
ROUNDING = "bfloat16 engine, float32 trainer"


def sample_ids(model, tokenizer, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids of prompts and completions at temperature 1, the mask of completion tokens, and the length of the prompts."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_COMPLETION_TOKENS)
    start = inputs["input_ids"].size(1)
    return ids, ids[:, start:] != tokenizer.pad_token_id, start


def token_logps(model, ids: torch.Tensor, start: int, pad_token_id: int) -> torch.Tensor:
    """Log-probabilities of the completion tokens, `(B, T)`."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=ids != pad_token_id).logits[:, start - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None]).squeeze(-1)


def sampled(engine, tokenizer, prompts: list[str]) -> tuple:
    """New completions of `engine` and the log-probabilities with which they were sampled."""
    ids, mask, start = sample_ids(engine, tokenizer, prompts)
    return ids, mask, start, token_logps(engine, ids, start, tokenizer.pad_token_id)


def log_ratios(model, tokenizer, ids, mask, start, sampled_logps) -> list[np.ndarray]:
    """Log-probability of each token under `model` minus that under the engine, by completion."""
    differences = token_logps(model, ids, start, tokenizer.pad_token_id) - sampled_logps
    return [row[kept].double().numpy() for row, kept in zip(differences, mask, strict=True)]


class LogRatioRecorder(TrainerCallback):
    """Records log-ratios of new completions between the policies before and after an update, by measured step."""

    def __init__(self, model, tokenizer, prompts: list[str]):
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self.steps: list[list[np.ndarray]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.is_measured = state.global_step >= WARMUP and state.global_step % EVERY == 0
        if self.is_measured:
            self.model.eval()
            self.completions = sampled(self.model, self.tokenizer, self.prompts)
            self.model.train()

    def on_step_end(self, args, state, control, **kwargs):
        if self.is_measured:
            self.model.eval()
            self.steps.append(log_ratios(self.model, self.tokenizer, *self.completions))
            self.model.train()


def held_out_prompts(base: Path) -> list[str]:
    _, test, _ = sorting.read(base, "sorting")
    return list(test["prompt"]) * (COMPLETIONS // len(test))


def record_updates(base: Path, rate: float, seed: int = 1) -> list[list[np.ndarray]]:
    """Train the sorting task with the batch baseline; log-ratios by measured step."""
    model, tokenizer = prompt_sets.load(base)
    recorder = LogRatioRecorder(model, tokenizer, held_out_prompts(base))
    with tempfile.TemporaryDirectory() as directory:
        options = COMMON | sorting.OPTIONS | {"learning_rate": rate, "max_steps": STEPS, "seed": seed}
        args = AdaGRPOConfig(directory, baseline="batch", per_device_train_batch_size=64, **options)
        train_rows = sorting.read(base, "sorting")[0]
        trainer = AdaGRPOTrainer(
            model, sorting.SORTING.reward, args, train_rows, processing_class=tokenizer, callbacks=[recorder]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return recorder.steps


def record_rounding(base: Path) -> list[list[np.ndarray]]:
    """Log-ratios of completions that were sampled from a bfloat16 copy of the base model."""
    model, tokenizer = prompt_sets.load(base)
    engine = copy.deepcopy(model).bfloat16()
    return [log_ratios(model, tokenizer, *sampled(engine, tokenizer, held_out_prompts(base)))]


def sequences(completions: list[np.ndarray], length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """
    Sequences of exactly `length` log-ratios, cut from random completions one after another.

    Completions of a sequence are independent given the update, so that real completions of this length may vary more.
    """
    needed, parts = SEQUENCES * length, []
    while needed > 0:
        parts += [completions[i] for i in rng.permutation(len(completions))]
        needed -= sum(map(len, completions))
    return list(np.concatenate(parts)[: SEQUENCES * length].reshape(SEQUENCES, length))


def token_weights(log_ratios: list[np.ndarray], mode: str, clip_max: float = CLIP_MAX) -> np.ndarray:
    """The weights by which TRL multiplies the loss of all tokens, from the log-ratios of each completion's tokens."""
    is_sequence = mode.startswith("sequence")
    ratios = np.concatenate([np.full(len(row), row.sum()) if is_sequence else row for row in log_ratios])
    ratios = np.exp(ratios)
    return np.minimum(ratios, clip_max) if mode.endswith("truncate") else np.where(ratios > clip_max, 0, ratios)


def ess_ratio(weights: np.ndarray) -> float:
    """Effective sample size divided by the number of weights, (Σw)²/(NΣw²)."""
    return float(weights.sum() ** 2 / (weights.size * (weights**2).sum()))


def measure(case: str, steps: list[list[np.ndarray]]) -> list[dict]:
    """One row per length: means over the measured steps."""
    spread = float(np.mean([np.concatenate(step).std() for step in steps]))
    groups = {
        f"{LONG} to {MAX_COMPLETION_TOKENS}, as sampled": [[row for row in step if len(row) >= LONG] for step in steps]
    }
    for length in LENGTHS:
        rng = np.random.default_rng(0)
        groups[f"{length}"] = [sequences(step, length, rng) for step in steps]
    rows = []
    for tokens, by_step in groups.items():
        row = {"case": case, "log_ratio_std": spread, "tokens": tokens}
        row["product"] = float(np.mean([ess_ratio(np.exp([r.sum() for r in completions])) for completions in by_step]))
        for mode in MODES:
            row[mode] = float(np.mean([ess_ratio(token_weights(completions, mode)) for completions in by_step]))
        rows.append(row)
    return rows


def compute() -> list[dict]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        pretrain(base, steps=600)
        rows = measure(ROUNDING, record_rounding(base))
        for rate in RATES:
            rows += measure(f"one update, learning rate {rate:.0e}".replace("e-0", "e-"), record_updates(base, rate))
    return rows


def table(rows: list[dict]) -> str:
    return markdown(
        rows,
        {
            "Mismatch": lambda row: row["case"],
            "Log-ratio, std per token": lambda row: f"{row['log_ratio_std']:.3f}",
            "Tokens": lambda row: row["tokens"],
            "product of all ratios (`ada/ess_ratio`)": lambda row: f"{row['product']:.2f}",
            **{f"`{mode}`": lambda row, mode=mode: f"{row[mode]:.2f}" for mode in MODES},
        },
    )


def main() -> None:
    fill("effective-sample-size", table(computed_or_stored(NAME, compute, __doc__)), PAGE)


if __name__ == "__main__":
    main()
