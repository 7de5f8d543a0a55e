# /// script
# dependencies = ["ada_trl", "math-verify"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
"""Your own advantage: the mean of a prompt's other rollouts, shrunk towards the mean of the batch (arXiv 2511.03710)."""

import numpy as np
from datasets import load_dataset
from trl.rewards import accuracy_reward

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Rollouts


PSEUDO_COUNT = 2.0  # the mean of the batch weighs as much as this number of rollouts


def shrunk_advantages(rollouts: Rollouts) -> np.ndarray:
    """r - b, where b depends on other rollouts only, so that the expected gradient is that of the mean reward; shape (N,)."""
    scored_N = rollouts.is_scored_N
    reward_N = np.where(scored_N, rollouts.reward_N, 0.0)
    reward_P, count_P = rollouts.sum(reward_N), rollouts.sum(scored_N)  # sums of each prompt
    others_N, num_others_N = reward_P[rollouts.prompt_N] - reward_N, count_P[rollouts.prompt_N] - 1
    # Rollouts of other prompts: so the batch mean contains neither this rollout nor its group.
    batch_N = (reward_P.sum() - reward_P)[rollouts.prompt_N] / np.maximum(count_P.sum() - count_P, 1)[
        rollouts.prompt_N
    ]
    baseline_N = (others_N + PSEUDO_COUNT * batch_N) / (num_others_N + PSEUDO_COUNT)
    return np.where(scored_N, reward_N - baseline_N, 0.0)


if __name__ == "__main__":
    trainer = AdaGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=AdaGRPOConfig(
            output_dir="out",
            adaptive_sampling="uniform",
            num_generations=2,  # 2 rollouts for each of 32 prompts per step
            per_device_train_batch_size=8,
            gradient_accumulation_steps=8,
            max_steps=200,
        ),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        advantage_func=shrunk_advantages,
    )
    trainer.train()
