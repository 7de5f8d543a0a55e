# /// script
# dependencies = ["ada_trl", "math-verify"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
"""Your own advantage: a baseline per source of the data, and a penalty on long completions."""

from dataclasses import replace

import numpy as np
from datasets import Dataset, load_dataset
from trl.rewards import accuracy_reward

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Rollouts


PENALTY_PER_TOKEN = 0.1 / 1024


def baseline_per_source(rollouts: Rollouts) -> np.ndarray:
    """
    The reward minus the mean of all other rollouts from the same source, so that the gradient is unbiased; shape (N,).
    """
    source_N = np.unique(rollouts.columns["source"], return_inverse=True)[1]
    reward_N, has_reward_N = np.nan_to_num(rollouts.reward_N), rollouts.has_reward_N
    sum_N, count_N = (np.bincount(source_N, values)[source_N] for values in (reward_N, has_reward_N))
    advantage_N = reward_N - (sum_N - reward_N) / np.maximum(count_N - 1, 1)
    return np.where(has_reward_N & (count_N > 1), advantage_N, 0.0)


def with_length_penalty(rollouts: Rollouts) -> np.ndarray:
    """The same, with a penalty on the length of the completion in addition to the reward; shape (N,)."""
    penalized_N = rollouts.reward_N - PENALTY_PER_TOKEN * rollouts.length_N
    return baseline_per_source(replace(rollouts, reward_N=penalized_N))


def problems() -> Dataset:
    """Return problems of several sources, with the columns `prompt`, `solution` and `source`."""
    rows = load_dataset("AI-MO/NuminaMath-CoT", split="train")
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})


if __name__ == "__main__":
    trainer = AdaGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=AdaGRPOConfig(
            output_dir="out",
            # One rollout for each of 64 prompts per step; the function takes the place of the baseline.
            baseline="batch",
            retries=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=8,
            max_steps=200,
        ),
        train_dataset=problems(),
        advantage_func=with_length_penalty,
    )
    trainer.train()
