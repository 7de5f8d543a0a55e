"""
Exploration: a weight that keeps pass@k with one rollout per prompt. It is not part of a plan.

The gradient of pass@k / k is (1 − p)^(k−1) ∇p, where p is the prompt's pass rate. So multiplying each reward by
w_i = (1 − p̂_i)^(k−1) *before* the batch baseline,

    A_i = w_i r_i − mean over the others of w_j r_j,

optimizes pass@k with a single rollout, if r_i has no influence on p̂_i. Estimates of the pass rate:

- "probability": π(y_i), the probability of the sampled completion. With one correct completion, π(y_i) = p if it is correct; a
  weight of a reward of 0 has no effect. Almost 0 for longer completions.
- "counts": discounted counts of earlier visits of the prompt, with a prior of two rollouts at the mean of the batch.
- "value": a value head on the policy's hidden states (that of Est), trained on earlier steps. It also predicts new prompts.
- "value and counts": the counts, with a prior of two rollouts at the prediction of the value head.

The weight can be combined with retries, which are sampled from the same distribution.

Methods of `python -m benchmarks.learning.language_model`: [`METHODS`].
"""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np
import torch

from ada_trl import AdaGRPOTrainer
from ada_trl.core import Rollouts, batch_advantages
from ada_trl.pass_rates.hidden_states import last_hidden_states
from ada_trl.pass_rates.value_head import ValueHead

from .. import names
from ..common import BINARY


DECAY, PRIOR = 0.9, 2.0
Estimator = Literal["probability", "counts", "value", "value and counts"]


class PassAtKTrainer(AdaGRPOTrainer):
    """The batch baseline with weighted rewards; one rollout per prompt, one reward function, one process."""

    def __init__(self, *args, k: int, estimator: Estimator, **kwargs):
        super().__init__(*args, **kwargs)
        self.k, self.estimator = k, estimator
        # Discounted successes and visits by prompt.
        self.counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.head = ValueHead(self.model.get_output_embeddings().in_features)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.sampled = [str(prompt) for prompt in prompts], rewards[:, 0].cpu().double().numpy()
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            prompts, reward_N = self.sampled
            advantage_N = weighted_advantages(reward_N, self._pass_rates(prompts, reward_N, output), self.k)
            output["advantages"] = torch.as_tensor(advantage_N).to(output["advantages"])
        return output

    def _pass_rates(self, prompts: list[str], reward_N: np.ndarray, output: dict) -> np.ndarray:
        if self.estimator == "probability":
            return self._probabilities(output)
        prior_N = (
            self._predictions(reward_N, output)
            if "value" in self.estimator
            else np.full_like(reward_N, reward_N.mean())
        )
        if "counts" not in self.estimator:
            return prior_N
        counts_N2 = np.array([self.counts[prompt] for prompt in prompts])
        for prompt, reward in zip(prompts, reward_N, strict=True):  # after reading
            self.counts[prompt] = DECAY * self.counts[prompt] + (reward, 1)
        return (counts_N2[:, 0] + PRIOR * prior_N) / (counts_N2[:, 1] + PRIOR)

    def _predictions(self, reward_N: np.ndarray, output: dict) -> np.ndarray:
        """Predictions of the value head, which then observes the rewards."""
        states_NH = last_hidden_states(
            self.model, output["prompt_ids"], output["prompt_mask"], batch_size=self.args.per_device_train_batch_size
        )
        predicted_N = np.array(self.head.predict(states_NH))
        self.head.observe(states_NH, reward_N.astype(int).tolist(), [1] * len(reward_N))
        return predicted_N

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


METHODS = {  # arguments of the trainer, and options
    f"{names.batch_retries(retries)}, pass@{k} weight from {'the ' if estimator == 'probability' else ''}{estimator}": (
        {"k": k, "estimator": estimator},
        {"baseline": "batch", "retries": retries},
    )
    for retries in (0, 1)
    for k in (2, 3)
    for estimator in get_args(Estimator)
}
