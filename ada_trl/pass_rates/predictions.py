"""Predictions for the prompts of one step, from before they were sampled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import PromptFeatures
from ..core.pass_rate_ema import PromptCounts


class PassRatePredictions(NamedTuple):
    """
    Predictions for the prompts of one step, from before it was sampled; one entry per prompt of all ranks.

    Args:
        keys (`list[str]`):
            Identities of the prompts.
        prompts (`list[Any]`):
            The prompts, or their text where no value network needs more.
        inputs (`Any`, *optional*):
            Inputs of the value networks; `None` without one, and until the prompts are predicted.
        counts (`list[PromptCounts]`, *optional*):
            Outcomes of the prompts in earlier steps, copied.
        ema, value, joint (`list[float]`, *optional*):
            p̂ of the three estimators `"ema"`, `"value"` and `"ema+value"`; the last two equal the first without a value
            network.
        features ([`~core.PromptFeatures`], *optional*):
            Inputs of the reward estimator.
    """

    keys: list[str]
    prompts: list[Any]
    inputs: Any = None
    counts: list[PromptCounts] = []
    ema: list[float] = []
    value: list[float] = []
    joint: list[float] = []
    features: PromptFeatures | None = None

    def restrict_to(self, indices: Sequence[int]) -> "PassRatePredictions":
        """Return the predictions of the prompts at `indices` only."""
        chosen = list(indices)

        def take(values: Any) -> Any:
            if isinstance(values, PromptFeatures):
                return PromptFeatures(*map(take, values))
            if isinstance(values, np.ndarray):
                return values[..., chosen]  # the prompts are the last axis
            if isinstance(values, torch.Tensor):
                return values[chosen]
            return [values[i] for i in chosen] if values else values  # nothing before the prompts are predicted

        return PassRatePredictions(*map(take, self))
