"""The value network of Reinforce-Ada-Est: a linear head on the policy's hidden state that predicts pass rates."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..utils.files import atomic_write
from .success_counts import PRIOR_MEAN


VALUE_HEAD_FILE = "ada_value_head.safetensors"

_SLOWEST_AVERAGE = 0.02  # weight of a new batch in the feature statistics: the policy, and so its features, drift
_VARIANCE_FLOOR = 1e-6
_LARGEST = torch.finfo(torch.float16).max
_CLIP = 5.0  # standard deviations; the statistics of the first few batches are rough
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_MEMORY = {  # tensors that are state but not trained: name in the file to attribute
    "features.observations": "_observations",
    "features.mean": "_mean",
    "features.mean_square": "_mean_square",
    "replay.features": "_features",
    "replay.counts": "_outcomes",
}


class ValueHead:
    """
    p̂ = σ(w · z + b) of the standardized features z of a prompt: V_φ of Reinforce-Ada-Est
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996)), trained online by AdamW on the cross-entropy of
    observed counts,

    −Σ [k log p̂ + (n − k) log(1 − p̂)] / Σ n, of k positives in n rollouts,

    which does not depend on the rule that stopped the sampling. Each `observe` takes AdamW steps on the last
    `replay_size` prompts, which are stored in float16. A larger batch is used whole.

    Features are standardized by running means and variances per dimension: hidden states share a large common part and
    a few dimensions of huge scale, which after a layer norm would hide the differences between prompts. The head is in
    float32 on the CPU, starts with the same prediction for every prompt and uses no random numbers, so that ranks that
    observe the same gathered features hold the same head.

    Args:
        hidden_size (`int`):
            H, the number of features.
    """

    learning_rate, weight_decay = 0.04, 0.01  # of AdamW, for features of norm 1
    gradient_steps = 8  # AdamW steps per `observe`
    replay_size = 4096

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        # w and b in one tensor: a step's cost is the number of tensors and operations, not their size.
        self.weight = nn.Parameter(torch.zeros(hidden_size + 1, dtype=torch.float32))
        self.weight.data[-1] = math.log(PRIOR_MEAN / (1 - PRIOR_MEAN))
        self.optimizer = torch.optim.AdamW(
            [self.weight], lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        # AdamW would create these in its first step; a head can be saved before that.
        self.optimizer.state[self.weight] = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros_like(self.weight),
            "exp_avg_sq": torch.zeros_like(self.weight),
        }
        self._observations = torch.tensor(0)
        self._mean = torch.zeros(hidden_size, dtype=torch.float64)
        self._mean_square = torch.zeros(hidden_size, dtype=torch.float64)
        self._features = torch.zeros(0, hidden_size, dtype=torch.float16)  # (R, H)
        self._outcomes = torch.zeros(0, 2, dtype=torch.float32)  # (R, 2), positive and scored rollouts

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # training may run within autocast, but the head is in float32
    def predict(self, features: torch.Tensor) -> list[float]:
        """Return p̂ for each row of `features` `(P, H)`."""
        return torch.sigmoid(self._standardize(_to_cpu(features)) @ self.weight).tolist()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def observe(self, features: torch.Tensor, positives: Sequence[int], num_rollouts: Sequence[int]) -> None:
        """
        Train on one step. Call it once per step, with all prompts of all ranks in the same order everywhere.

        Args:
            features (`torch.Tensor`):
                Features of the prompts `(P, H)`, as in the predictions.
            positives, num_rollouts (`Sequence[int]`):
                Positive and scored rollouts of each prompt; a prompt without a scored one is left out.
        """
        outcomes = torch.stack(
            [torch.as_tensor(values, dtype=torch.float32) for values in (positives, num_rollouts)], 1
        )
        is_scored = outcomes[:, 1] > 0
        if not is_scored.any():
            return
        features, outcomes = _to_cpu(features)[is_scored], outcomes[is_scored]
        self._update_statistics(features)
        size = max(self.replay_size, len(features))
        self._features = torch.cat([self._features, features.clamp(-_LARGEST, _LARGEST).half()])[-size:]
        self._outcomes = torch.cat([self._outcomes, outcomes])[-size:]
        inputs = self._standardize(self._features)
        k, n = (self._outcomes / self._outcomes[:, 1].sum()).T
        for _ in range(self.gradient_steps):
            # The gradient in closed form, since autograd may be off here (inference mode).
            self.weight.grad = inputs.T @ (n * torch.sigmoid(inputs @ self.weight) - k)
            self.optimizer.step()

    def _update_statistics(self, features: torch.Tensor) -> None:
        self._observations += 1
        weight = max(1 / self._observations.item(), _SLOWEST_AVERAGE)
        features = features.double()
        self._mean += weight * (features.mean(dim=0) - self._mean)
        self._mean_square += weight * (features.square().mean(dim=0) - self._mean_square)

    def _standardize(self, features: torch.Tensor) -> torch.Tensor:
        """
        Convert features `(P, H)` to `(P, H + 1)`: about zero mean and unit variance per dimension, divided by √H (0
        before any observation), and a 1 for b.
        """
        variance = (self._mean_square - self._mean.square()).clamp(min=_VARIANCE_FLOOR)
        standardized = ((features - self._mean) / variance.sqrt()).clamp(-_CLIP, _CLIP) / math.sqrt(self.hidden_size)
        return nn.functional.pad(standardized.float() * bool(self._observations), (0, 1), value=1.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights, AdamW's moments and step, and all else that `observe` depends on."""
        moments = {f"weight.{moment}": self.optimizer.state[self.weight][moment] for moment in _MOMENTS}
        memory = {name: getattr(self, attribute) for name, attribute in _MEMORY.items()}
        tensors = {"weight": self.weight, **memory, **moments}
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict()`. Learning rate and steps stay those of this object."""
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            for moment in _MOMENTS:
                self.optimizer.state[self.weight][moment].copy_(state[f"weight.{moment}"])
        for name, attribute in _MEMORY.items():
            setattr(self, attribute, state[name].to(getattr(self, attribute), copy=True))

    def save(self, path: str | Path) -> None:
        """Write the state as safetensors, atomically."""
        with atomic_write(path) as temporary:
            save_file(self.state_dict(), temporary)

    def load(self, path: str | Path) -> None:
        """
        Continue from a file that `save` wrote. Nothing in it is executed or unpickled.

        Raises:
            `FileNotFoundError`: if there is no such file; a run without one starts from the prior.
            `SafetensorError`, `KeyError` or `RuntimeError`: if the file is truncated or corrupt, or of another model.
        """
        self.load_state_dict(load_file(path))


def _to_cpu(features: torch.Tensor) -> torch.Tensor:
    return features.detach().to("cpu", torch.float32)
