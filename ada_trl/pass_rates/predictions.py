"""What was expected of the prompts of one step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import PromptFeatures
from ..core.pass_rate_ema import PromptCounts


class PassRatePredictions(NamedTuple):
    """
    What was expected of the prompts of one step, before it was sampled; one entry per prompt of all processes.

    Args:
        keys (`list[str]`):
            Identities.
        prompts (`list[Any]`):
            The prompts themselves, or what is known of them.
        inputs (`Any`, *optional*):
            What the value networks saw; `None` without one, and until the prompts are predicted.
        counts (`list[PromptCounts]`, *optional*):
            What the prompts had shown, copied.
        from_counts, from_network, joint (`list[float]`, *optional*):
            p̂ by estimator; the last two are those of the counts without a network.
        expectation ([`~core.PromptFeatures`], *optional*):
            Of their rewards.
    """

    keys: list[str]
    prompts: list[Any]
    inputs: Any = None
    counts: list[PromptCounts] = []
    from_counts: list[float] = []
    from_network: list[float] = []
    joint: list[float] = []
    expectation: PromptFeatures | None = None

    def keep(self, indices: Sequence[int]) -> "PassRatePredictions":
        """Of these prompts only."""

        def chosen(values: Any) -> Any:
            if isinstance(values, torch.Tensor | np.ndarray):
                return values[..., list(indices)] if isinstance(values, np.ndarray) else values[list(indices)]
            return [values[i] for i in indices] if values else values

        expectation = self.expectation
        if expectation is not None:
            expectation = PromptFeatures(*map(chosen, expectation))
        inputs = None if self.inputs is None else chosen(self.inputs)
        of_prompts = {name: chosen(getattr(self, name)) for name in ("keys", "prompts", "counts", *_ESTIMATES)}
        return self._replace(inputs=inputs, expectation=expectation, **of_prompts)


_ESTIMATES = ("from_counts", "from_network", "joint")
