"""Linear value networks on the policy's hidden state, for pass rates or mean rewards."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .network import ValueNetwork, scored_rows


VALUE_HEAD_FILE = "ada_value_head.safetensors"
REWARD_HEAD_FILE = "ada_reward_head.safetensors"

_SLOWEST_AVERAGE = 0.02  # weight of a new batch in the feature statistics: the policy, and so its features, drift
_VARIANCE_FLOOR = 1e-6
_LARGEST = torch.finfo(torch.float16).max
_CLIP = 5.0  # standard deviations; the statistics of the first few batches are rough


class LinearHead(ValueNetwork):
    """
    g(w · z + b) of the standardised features z of a prompt: a [`~pass_rates.network.ValueNetwork`] of one layer.

    Each `observe` takes AdamW steps on the last `replay_size` observations, which are kept in float16.

    Features are standardised by running means and variances per dimension: hidden states share a large common part
    and a few dimensions of huge scale, in which a layer norm drowns what tells prompts apart. The head lives on the CPU
    in float32, starts with the same prediction for every prompt, draws no random numbers, and is a function of what it was
    given: ranks that observe the same gathered features hold the same head.

    Args:
        hidden_size (`int`):
            H, the number of features.
        bias (`float`):
            Initial value of b.
        learning_rate (`float`, *optional*, defaults to `0.04`):
            Learning rate of AdamW, for features of norm 1.
        weight_decay (`float`, *optional*, defaults to `0.01`):
            Weight decay of AdamW.
        gradient_steps (`int`, *optional*, defaults to `8`):
            AdamW steps per `observe`.
        replay_size (`int`, *optional*, defaults to `4096`):
            Number of most recent prompts that are trained on. A larger batch is used whole; 0 trains on the batch alone.
    """

    kind = "value head"
    takes_counts = True
    _memory = {
        "features.observations": "_observations",
        "features.mean": "_mean",
        "features.mean_square": "_mean_square",
        "replay.features": "_features",
        "replay.counts": "_counts",
    }

    def __init__(
        self,
        hidden_size: int,
        *,
        bias: float = 0.0,
        learning_rate: float = 0.04,
        weight_decay: float = 0.01,
        gradient_steps: int = 8,
        replay_size: int = 4096,
    ) -> None:
        self.hidden_size = hidden_size
        self.gradient_steps = gradient_steps
        self.replay_size = replay_size
        # w and b in one tensor: a step's cost is the number of tensors and operations, not their size.
        self.weight = nn.Parameter(torch.zeros(hidden_size + 1))
        self.weight.data[-1] = bias
        super().__init__({"weight": self.weight}, lr=learning_rate, weight_decay=weight_decay, fused=True)
        self._observations = torch.tensor(0)
        self._mean = torch.zeros(hidden_size, dtype=torch.float64)
        self._mean_square = torch.zeros(hidden_size, dtype=torch.float64)
        self._features = torch.zeros(0, hidden_size, dtype=torch.float16)  # (R, H)
        self._counts = torch.zeros(0, 2)  # (R, 2): sums, numbers of rollouts

    @staticmethod
    def link(values: torch.Tensor) -> torch.Tensor:
        """Link function g: maps the linear output to a prediction."""
        raise NotImplementedError

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> list[float]:
        """Predict each row of the features `inputs` `(P, H)`."""
        return self.link(self._standardise(self._checked(inputs)) @ self.weight).tolist()

    @torch.no_grad()
    def observe(self, inputs: torch.Tensor, sums: Sequence[float], num_rollouts: Sequence[int]) -> None:
        features = self._checked(inputs)
        counts, scored = scored_rows(sums, num_rollouts, are_counts=self.takes_counts)
        if not scored.any():
            return
        features, counts = features[scored], counts[scored]
        self._update_statistics(features)
        keep = max(self.replay_size, len(features))
        self._features = torch.cat([self._features, features.clamp(-_LARGEST, _LARGEST).half()])[-keep:]
        self._counts = torch.cat([self._counts, counts])[-keep:]
        inputs = self._standardise(self._features)
        k, n = (self._counts / self._counts[:, 1].sum()).T
        for _ in range(self.gradient_steps):
            # Written out, so that a step can be taken wherever autograd is off.
            self.weight.grad = inputs.T @ (n * self.link(inputs @ self.weight) - k)
            self.optimizer.step()

    def _checked(self, features: torch.Tensor) -> torch.Tensor:
        if features.ndim != 2 or features.size(1) != self.hidden_size:
            raise ValueError(
                f"Features of shape {tuple(features.shape)} do not fit a head of hidden_size ({self.hidden_size}); it "
                "takes (prompts, hidden_size). Build the head for the model that the features come from."
            )
        return features.detach().to("cpu", torch.float32)

    def _update_statistics(self, features: torch.Tensor) -> None:
        self._observations += 1
        share = max(1 / self._observations.item(), _SLOWEST_AVERAGE)
        features = features.double()
        self._mean += share * (features.mean(dim=0) - self._mean)
        self._mean_square += share * (features.square().mean(dim=0) - self._mean_square)

    def _standardise(self, features: torch.Tensor) -> torch.Tensor:
        """
        `(P, H)` to `(P, H + 1)`: about zero mean and unit variance per dimension, over √H (0 before any observation),
        and a 1 for b.
        """
        variance = (self._mean_square - self._mean.square()).clamp(min=_VARIANCE_FLOOR)
        standardised = ((features - self._mean) / variance.sqrt()).clamp(-_CLIP, _CLIP) / math.sqrt(self.hidden_size)
        return nn.functional.pad(standardised.float() * bool(self._observations), (0, 1), value=1.0)

    def _shapes(self) -> dict[str, tuple]:
        return super()._shapes() | {"replay.features": (None, self.hidden_size), "replay.counts": (None, 2)}


class PassRateHead(LinearHead):
    """
    p̂ = σ(w · z + b), by cross-entropy on counts of positives.

    Args:
        prior_mean (`float`, *optional*, defaults to `1/17`):
            Prediction before any update.

    Raises:
        `ValueError`: for a prior mean outside (0, 1).
    """

    filename = VALUE_HEAD_FILE
    link = staticmethod(torch.sigmoid)

    def __init__(self, hidden_size: int, *, prior_mean: float = 1 / 17, **options: Any) -> None:
        if not 0 < prior_mean < 1:
            raise ValueError(f"prior_mean ({prior_mean}) must be between 0 and 1, both excluded.")
        super().__init__(hidden_size, bias=math.log(prior_mean / (1 - prior_mean)), **options)


class RewardHead(LinearHead):
    """ẑ = w · z + b, by least squares on rewards in standard deviations from their mean, for [`~core.RewardEstimator`]."""

    kind = "reward head"
    filename = REWARD_HEAD_FILE
    takes_counts = False

    @staticmethod
    def link(values: torch.Tensor) -> torch.Tensor:
        return values
