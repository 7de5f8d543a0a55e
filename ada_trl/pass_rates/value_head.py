"""Linear value networks on the policy's hidden state, for pass rates or mean rewards."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from .network import ValueNetwork, outcome_tensor


VALUE_HEAD_FILE = "ada_value_head.safetensors"
REWARD_HEAD_FILE = "ada_reward_head.safetensors"

_SLOWEST_AVERAGE = 0.02  # weight of a new batch in the feature statistics: the policy, and so its features, drift
_VARIANCE_FLOOR = 1e-6
_LARGEST = torch.finfo(torch.float16).max
_CLIP = 5.0  # standard deviations; the statistics of the first few batches are rough


class LinearHead(ValueNetwork):
    """
    g(w · z + b) of the standardized features z of a prompt: a [`~pass_rates.network.ValueNetwork`] of one layer.

    Each `observe` takes AdamW steps on the last `replay_size` prompts, which are stored in float16. A larger batch is used
    whole.

    Features are standardized by running means and variances per dimension: hidden states share a large common part and a few
    dimensions of huge scale, which after a layer norm would hide the differences between prompts. The head is in float32 on
    the CPU, starts with the same prediction for every prompt and uses no random numbers, so that ranks that observe the same
    gathered features hold the same head.

    Args:
        hidden_size (`int`):
            H, the number of features.
        bias (`float`, *optional*, defaults to `0.0`):
            Initial value of b.
    """

    kind = "value head"
    learning_rate, weight_decay = 0.04, 0.01  # of AdamW, for features of norm 1
    gradient_steps = 8
    replay_size = 4096
    _memory = {
        "features.observations": "_observations",
        "features.mean": "_mean",
        "features.mean_square": "_mean_square",
        "replay.features": "_features",
        "replay.counts": "_outcomes",
    }
    _growing = ("replay.features", "replay.counts")

    def __init__(self, hidden_size: int, *, bias: float = 0.0) -> None:
        self.hidden_size = hidden_size
        # w and b in one tensor: a step's cost is the number of tensors and operations, not their size.
        self.weight = nn.Parameter(torch.zeros(hidden_size + 1, dtype=torch.float32))
        self.weight.data[-1] = bias
        super().__init__({"weight": self.weight}, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)
        self._observations = torch.tensor(0)
        self._mean = torch.zeros(hidden_size, dtype=torch.float64)
        self._mean_square = torch.zeros(hidden_size, dtype=torch.float64)
        self._features = torch.zeros(0, hidden_size, dtype=torch.float16)  # (R, H)
        self._outcomes = torch.zeros(0, 2, dtype=torch.float32)  # (R, 2), sums and numbers of rollouts

    @staticmethod
    def link(values: torch.Tensor) -> torch.Tensor:
        """Map the linear output to a prediction (the link function g)."""
        raise NotImplementedError

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # training may run within autocast, but the head is in float32
    def predict(self, inputs: torch.Tensor) -> list[float]:
        """Predict each row of the features `inputs` `(P, H)`."""
        return self.link(self._standardize(self._check_features(inputs)) @ self.weight).tolist()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def observe(self, inputs: torch.Tensor, sums: Sequence[float], num_rollouts: Sequence[int]) -> None:
        features = self._check_features(inputs)
        outcomes, is_scored = outcome_tensor(sums, num_rollouts)
        if not is_scored.any():
            return
        features, outcomes = features[is_scored], outcomes[is_scored]
        self._update_statistics(features)
        size = max(self.replay_size, len(features))
        self._features = torch.cat([self._features, features.clamp(-_LARGEST, _LARGEST).half()])[-size:]
        self._outcomes = torch.cat([self._outcomes, outcomes])[-size:]
        inputs = self._standardize(self._features)
        k, n = (self._outcomes / self._outcomes[:, 1].sum()).T
        for _ in range(self.gradient_steps):
            # The gradient in closed form, since autograd may be off here (inference mode).
            self.weight.grad = inputs.T @ (n * self.link(inputs @ self.weight) - k)
            self.optimizer.step()

    def _check_features(self, features: torch.Tensor) -> torch.Tensor:
        if features.ndim != 2 or features.size(1) != self.hidden_size:
            raise ValueError(
                f"Features of shape {tuple(features.shape)} do not fit a head of hidden_size ({self.hidden_size}); it "
                "takes (prompts, hidden_size). Build the head for the model that the features come from."
            )
        return features.detach().to("cpu", torch.float32)

    def _update_statistics(self, features: torch.Tensor) -> None:
        self._observations += 1
        weight = max(1 / self._observations.item(), _SLOWEST_AVERAGE)
        features = features.double()
        self._mean += weight * (features.mean(dim=0) - self._mean)
        self._mean_square += weight * (features.square().mean(dim=0) - self._mean_square)

    def _standardize(self, features: torch.Tensor) -> torch.Tensor:
        """
        Convert features `(P, H)` to `(P, H + 1)`: about zero mean and unit variance per dimension, divided by √H (0 before any
        observation), and a 1 for b.
        """
        variance = (self._mean_square - self._mean.square()).clamp(min=_VARIANCE_FLOOR)
        standardized = ((features - self._mean) / variance.sqrt()).clamp(-_CLIP, _CLIP) / math.sqrt(self.hidden_size)
        return nn.functional.pad(standardized.float() * bool(self._observations), (0, 1), value=1.0)


class PassRateHead(LinearHead):
    """
    p̂ = σ(w · z + b), by cross-entropy on counts of positives.

    Args:
        prior_mean (`float`, *optional*, defaults to `1/17`):
            Prediction before any update, between 0 and 1.
    """

    filename = VALUE_HEAD_FILE
    link = staticmethod(torch.sigmoid)

    def __init__(self, hidden_size: int, *, prior_mean: float = 1 / 17) -> None:
        super().__init__(hidden_size, bias=math.log(prior_mean / (1 - prior_mean)))


class RewardHead(LinearHead):
    """ẑ = w · z + b, by least squares on rewards in standard deviations from their mean, for [`~core.RewardEstimator`]."""

    kind = "reward head"
    filename = REWARD_HEAD_FILE

    @staticmethod
    def link(values: torch.Tensor) -> torch.Tensor:
        return values
