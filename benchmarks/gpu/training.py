"""Training of random models on the GPU, or on the CPU if there is none, for step times, memory and weights."""

import gc
import math
import tempfile
import time
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import build_tokenizer, problems

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


class Size(NamedTuple):
    """
    Model and batch. With few wide layers, generation with `transformers` takes less time than
    in usual models of this size.
    """

    hidden: int = 2048
    layers: int = 8
    vocabulary: int = 32_000
    rows: int = 64  # per step
    micro_batch: int = 64
    tokens: int = 64  # per completion: the random model almost never ends one itself

    def model(self) -> LlamaForCausalLM:
        """Random model: 398 million parameters with the default sizes."""
        return random_model(
            build_tokenizer(),
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(self.hidden // 256, 1),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )


SMOKE = Size(hidden=64, layers=2, vocabulary=64, rows=8, micro_batch=8, tokens=4)


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """1 for a quarter of the completions of a random model."""
    return [float(sum(ids) % 4 == 0) for ids in completion_ids]


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


def train(
    size: Size, steps: int, options: dict[str, Any], is_ada: bool = True
) -> tuple[torch.nn.Module, list[dict], list[float]]:
    """Train the random model. Returns it, the logs of the steps, and their seconds."""
    config_class, trainer_class = (AdaGRPOConfig, AdaGRPOTrainer) if is_ada else (GRPOConfig, GRPOTrainer)
    defaults = options_of_run(size.rows, size.micro_batch, size.tokens, steps) | {"learning_rate": 1e-5, "bf16": True}
    with tempfile.TemporaryDirectory() as directory:
        args = config_class(directory, **defaults | options)
        trainer = trainer_class(size.model(), reward, args, problems(4096, seed=0), processing_class=build_tokenizer())
        logs, seconds = run_trainer(trainer)
    return trainer.accelerator.unwrap_model(trainer.model), logs, seconds
