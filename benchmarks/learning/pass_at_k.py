"""
Exploration: a weight that keeps pass@k with one rollout per prompt. It is not part of a plan.

The gradient of pass@k / k is (1 − p)^(k−1) ∇p, where p is the prompt's pass rate. So multiplying each reward by
w_i = (1 − p̂_i)^(k−1) *before* the batch baseline,

    A_i = w_i r_i − mean over the others of w_j r_j,

optimizes pass@k with a single rollout, if r_i has no influence on p̂_i. Here p̂_i is π(y_i), the probability of the sampled
completion: with one correct completion, π(y_i) = p if it is correct, and a weight of a reward of 0 has no effect. For longer
completions it is almost 0. (Other estimates had no gain; 640cf9b has them.)

The weight can be combined with retries, which are sampled from the same distribution.

Methods of `python -m benchmarks.learning.language_model`: [`METHODS`].
"""

import numpy as np
import torch

from ada_trl import AdaGRPOTrainer
from ada_trl.core import Rollouts, batch_advantages

from .. import names
from ..common import BINARY


class PassAtKTrainer(AdaGRPOTrainer):
    """The batch baseline with weighted rewards; one rollout per prompt, one reward function, one process."""

    def __init__(self, *args, k: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.k = k

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.reward_N = rewards[:, 0].cpu().double().numpy()
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            advantage_N = weighted_advantages(self.reward_N, self._probabilities(output), self.k)
            output["advantages"] = torch.as_tensor(advantage_N).to(output["advantages"])
        return output

    @torch.no_grad()
    def _probabilities(self, output: dict) -> np.ndarray:
        mask_NT = output["completion_mask"]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], mask_NT], dim=1)
        logps_NT, *_ = self._get_per_token_logps_and_entropies(
            self.model, ids, attention, mask_NT.size(1), batch_size=self.args.per_device_train_batch_size
        )
        return (logps_NT * mask_NT).sum(1).exp().cpu().double().numpy()


def weighted_advantages(reward_N: np.ndarray, pass_rate_N: np.ndarray, k: int) -> np.ndarray:
    """A_i = w_i r_i − mean over the others of w_j r_j, w = (1 − p̂)^(k−1)."""
    weighted_N = (1 - pass_rate_N) ** (k - 1) * reward_N
    return batch_advantages(Rollouts.score([weighted_N[i : i + 1, None] for i in range(len(reward_N))], BINARY))


METHODS = {  # options, and arguments of the trainer
    f"{names.batch_retries(retries)}, pass@{k} weight": ({"baseline": "batch", "retries": retries}, {"k": k})
    for retries in (0, 1)
    for k in (2, 3)
}
