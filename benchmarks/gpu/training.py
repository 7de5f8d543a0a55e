"""Training of a random model with every method, for its step time, memory and weights."""

import gc
import tempfile
import time
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import build_tokenizer, problems


class Size(NamedTuple):
    """Model and batch. With few wide layers, generation with `transformers` takes less time than in usual models of this size."""

    hidden: int = 2048
    layers: int = 8
    vocabulary: int = 32_000
    rows: int = 64  # per step
    micro_batch: int = 64
    tokens: int = 64  # per completion: the random model almost never ends one itself

    def model(self) -> LlamaForCausalLM:
        """Random model in float32 on the device: 398 million parameters with the default sizes."""
        set_seed(0)
        tokenizer = build_tokenizer()
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(self.hidden // 256, 1),
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return LlamaForCausalLM(config)


SMOKE = Size(hidden=64, layers=2, vocabulary=64, rows=8, micro_batch=8, tokens=4)


def prompts(frac_certain: float) -> Dataset:
    """Prompts of which the given fraction gets reward 1 for any completion."""
    rows = problems(4096, seed=0)
    return rows.add_column("certain", [i % 100 < 100 * frac_certain for i in range(len(rows))])


def reward(completion_ids: list[list[int]], certain: list[bool], **kwargs) -> list[float]:
    """1 for a quarter of the completions of a random model, and for all of the prompts marked as certain."""
    return [float(known or sum(ids) % 4 == 0) for ids, known in zip(completion_ids, certain, strict=True)]


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


def train(
    size: Size, steps: int, options: dict[str, Any], frac_certain: float = 0.0, is_ada: bool = True
) -> tuple[torch.nn.Module, list[dict], list[float]]:
    """Train the random model. Returns it, the logs of the steps, and their seconds."""
    config_class, trainer_class = (AdaGRPOConfig, AdaGRPOTrainer) if is_ada else (GRPOConfig, GRPOTrainer)
    clock = Clock()
    micro_batch = min(size.rows, size.micro_batch)
    with tempfile.TemporaryDirectory() as directory:
        defaults = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": size.rows // micro_batch,
            "max_completion_length": size.tokens,
            "max_steps": steps,
            "learning_rate": 1e-5,
            "logging_steps": 1,
            "gradient_checkpointing": False,
            "bf16": True,
            "use_cpu": not torch.cuda.is_available(),
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "log_level": "error",
        }
        trainer = trainer_class(
            size.model(),
            reward,
            config_class(directory, **defaults | options),
            prompts(frac_certain),
            processing_class=build_tokenizer(),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return trainer.accelerator.unwrap_model(trainer.model), logs, clock.seconds


def measure(size: Size, steps: int, options: dict[str, Any], frac_certain: float = 0.0, is_ada: bool = True) -> dict:
    """
    Train in bfloat16 (autocast) and measure the steps after the first one, which warms up.

    Raises:
        `ValueError`: if a loss or a weight is not finite.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, logs, seconds = train(size, steps, options, frac_certain, is_ada)
    if bad := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
        raise ValueError(f"{len(bad)} weights are not finite after {steps} steps, the first one is {bad[0]}.")
    losses = torch.tensor([step["loss"] for step in logs])
    if not losses.isfinite().all():
        raise ValueError(f"The losses {losses.tolist()} are not finite.")
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "rows": size.rows,
        "tokens": size.tokens,
        "step_seconds": seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "logs": logs,
    }
