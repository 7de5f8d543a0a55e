"""Training of random models on the GPU, or on the CPU if there is none, for step times, memory and weights."""

import gc
import math
import time
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from trl import GRPOTrainer

from ..common import QUIET


def random_model(tokenizer: PreTrainedTokenizerBase, **sizes) -> LlamaForCausalLM:
    """Model with random weights in float32; `sizes` are options of `LlamaConfig`."""
    set_seed(0)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer)} | sizes, **special))


def options_of_run(rows: int, micro_batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Options of a trainer with `rows` completions of at most `tokens` tokens per step."""
    micro_batch = min(rows, micro_batch)
    return QUIET | {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "max_completion_length": tokens,
        "max_steps": steps,
        "use_cpu": not torch.cuda.is_available(),
    }


class Clock(TrainerCallback):
    """Wall time of every step, with everything that it has started on the GPU."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = self._now()

    def on_step_end(self, args, state, control, **kwargs):
        now = self._now()
        self.seconds.append(now - self.last)
        self.last = now


def run_trainer(trainer: GRPOTrainer) -> tuple[list[dict], list[float]]:
    """
    Train. Returns the logs of the steps, and their seconds.

    Raises:
        `ValueError`: if a loss or a weight is not finite.
    """
    clock = Clock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    if bad := [name for name, weight in trainer.model.named_parameters() if not weight.isfinite().all()]:
        raise ValueError(f"{len(bad)} weights are not finite after {len(logs)} steps, the first one is {bad[0]}.")
    if not all(math.isfinite(step["loss"]) for step in logs):
        raise ValueError(f"The losses {[step['loss'] for step in logs]} are not finite.")
    return logs, clock.seconds


def reset_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
