# /// script
# dependencies = ["ada_trl"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
"""
Your own advantage: win rates, for graded rewards that mean the same on every prompt.

They count only the order of the rewards. An outlier weighs as much as any other rollout, and a small penalty as much
as it reorders: one for length teaches a model to be short where most completions are wrong. Measurements:
benchmarks/README.md, "Graded rewards".
"""

import numpy as np
from datasets import Dataset

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Rollouts


def win_rates(rollouts: Rollouts) -> np.ndarray:
    """
    Fraction of the other rollouts of the batch with a lower reward minus the fraction with a higher one; shape (N,).

    For rewards of 0 and 1 this is the reward minus the mean of the others. Rollouts without a reward have advantage 0
    and are not compared.
    """
    has_reward_N = rollouts.has_reward_N
    ascending = np.sort(rollouts.reward_N[has_reward_N])
    lower_N = np.searchsorted(ascending, rollouts.reward_N, side="left")
    higher_N = len(ascending) - np.searchsorted(ascending, rollouts.reward_N, side="right")
    return np.where(has_reward_N, (lower_N - higher_N) / max(len(ascending) - 1, 1), 0.0)


def negative_error(completions: list[str], answer: list[int], **kwargs) -> list[float]:
    """Minus the distance from the answer; the shortest number is taken for a completion without digits."""
    digits = ["".join(character for character in text if character.isdigit()) or "0" for text in completions]
    return [-abs(float(number) - right) for number, right in zip(digits, answer, strict=True)]


def sums() -> Dataset:
    """Return problems with the columns `prompt` and `answer`."""
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    return Dataset.from_dict({"prompt": [f"{a} + {b} =" for a, b in pairs], "answer": [a + b for a, b in pairs]})


if __name__ == "__main__":
    trainer = AdaGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B",
        reward_funcs=negative_error,
        args=AdaGRPOConfig(
            output_dir="out",
            # One rollout for each of 64 prompts per step; the function takes the place of the baseline.
            baseline="batch",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=8,
            max_completion_length=16,
            max_steps=200,
        ),
        train_dataset=sums(),
        advantage_func=win_rates,
    )
    trainer.train()
