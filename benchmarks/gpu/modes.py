"""
Three steps in every mode in bfloat16, and whether `adaptive_sampling="uniform"` trains the weights of `GRPOTrainer`.
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import build_tokenizer, problems

from .. import names
from ..common import markdown
from .training import options_of_run, peak_memory_gib, random_model, reset_memory, run_trainer
from .units import Unit, run, succeeded


STEPS = 3
GRPO = {"adaptive_sampling": "uniform", "num_generations": 4, "scale_rewards": "group"}
TWO_ROUNDS = {"max_rounds": 2}  # more take longer and show nothing else
MODES = {
    names.GRPO_4: GRPO,
    names.BATCH: {"baseline": "batch"},
    names.SEQ_BALANCE: {"adaptive_sampling": "seq-balance"} | TWO_ROUNDS,
    names.SEQ_POS: {"adaptive_sampling": "seq-pos"} | TWO_ROUNDS,
    f"{names.EST} (EMA)": {"adaptive_sampling": "est", "pass_rate_estimator": "ema"},
    f"{names.EST} (value head)": {"adaptive_sampling": "est", "pass_rate_estimator": "value"},
    f"{names.BATCH}, retries": {"baseline": "batch", "retries": 3},
    "zero-variance groups: resample": GRPO | {"zero_variance_groups": "resample"} | TWO_ROUNDS,
    "zero-variance groups: mask": GRPO | {"zero_variance_groups": "mask"},
    "zero-variance groups: skip": GRPO | {"zero_variance_groups": "skip"},
}


class Size(NamedTuple):
    """Model and batch; with few wide layers, generation takes less time than in usual models of this size."""

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


def train(size: Size, options: dict[str, Any], is_ada: bool) -> tuple[torch.nn.Module, list[dict], list[float]]:
    """Train the random model. Returns it, the logs of the steps, and their seconds."""
    config_class, trainer_class = (AdaGRPOConfig, AdaGRPOTrainer) if is_ada else (GRPOConfig, GRPOTrainer)
    defaults = options_of_run(size.rows, size.micro_batch, size.tokens, STEPS) | {"learning_rate": 1e-5, "bf16": True}
    with tempfile.TemporaryDirectory() as directory:
        args = config_class(directory, **defaults | options)
        trainer = trainer_class(size.model(), reward, args, problems(4096, seed=0), processing_class=build_tokenizer())
        logs, seconds = run_trainer(trainer)
    return trainer.accelerator.unwrap_model(trainer.model), logs, seconds


def measure(size: Size, options: dict, is_ada: bool = True) -> dict:
    """Time and memory of the steps in bfloat16 (autocast); the first one warms up."""
    reset_memory()
    _, logs, seconds = train(size, options, is_ada)
    return {"step_seconds": seconds, "memory_gib": peak_memory_gib(), "logs": logs}


def same_weights(size: Size) -> dict:
    """
    Train with `GRPOTrainer` and with `adaptive_sampling="uniform"` in float32 with deterministic algorithms.

    Raises:
        `ValueError`: if the weights differ in a single bit.
    """
    # Operations without a deterministic form only warn: a repeated run of TRL tells whether they matter.
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = {"bf16": False, "num_generations": 4}

    def weights(is_ada: bool) -> dict[str, torch.Tensor]:
        ours = {"adaptive_sampling": "uniform", "scale_rewards": "group", "epsilon_high": None} if is_ada else {}
        model, *_ = train(size, options | ours, is_ada)
        return {name: weight.cpu() for name, weight in model.state_dict().items()}

    def differing(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, weight in some.items() if not torch.equal(weight, other[name])]

    try:
        trl, ours = weights(False), weights(True)
        if different := differing(trl, ours):
            repeated = len(differing(trl, weights(False)))
            raise ValueError(
                f"{len(different)} of {len(trl)} tensors differ from those of GRPOTrainer, the first one is "
                f"{different[0]}; in a repeated run of GRPOTrainer, {repeated} differ."
            )
    finally:
        torch.use_deterministic_algorithms(False)
    return {"tensors": len(trl)}


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    size = SMOKE if smoke else Size()
    units = [Unit("GRPOTrainer", measure, {"size": size, "is_ada": False, "options": {"num_generations": 4}})]
    units += [Unit(name, measure, {"size": size, "options": options}) for name, options in MODES.items()]
    units.insert(2, Unit("same weights as GRPOTrainer", same_weights, {"size": size}))
    results = run(units, output_dir / "modes.json", limit)

    rows = [results[unit.name] | {"mode": unit.name} for unit in units if "logs" in results.get(unit.name, {})]
    columns = {
        "Mode": lambda row: row["mode"],
        "Step, s": lambda row: f"{mean(row['step_seconds'][1:]):.2f}",
        "Memory, GiB": lambda row: f"{row['memory_gib']:.1f}" if row["memory_gib"] else "–",
        "Losses": lambda row: ", ".join(f"{step['loss']:.4f}" for step in row["logs"]),
    }
    print(markdown(rows, columns))
    if "tensors" in results.get("same weights as GRPOTrainer", {}):
        print(f"uniform = GRPOTrainer: all {results['same weights as GRPOTrainer']['tensors']} tensors are bit-equal.")
    return succeeded(units, results)
