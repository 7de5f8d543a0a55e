"""Pass rates from a value network and a prompt's own outcomes together."""

from collections.abc import Sequence

import numpy as np

from ..core.grid_selector import GridSelector
from ..core.pass_rate_ema import PromptCounts


PSEUDO_COUNTS = (4.0, 1.0, 2.0, 8.0, 16.0, 32.0)  # s; the first one is used until something was observed
ERROR_MEMORY = 0.95  # weight of the errors of earlier steps


class JointPassRate:
    """
    Beta posterior mean p̂ = (s h + k) / (s + n), with the prediction h of a value network as the prior mean and the prompt's
    discounted outcomes, k positives in n rollouts. `selector` holds the state and selects s, the candidate with the lowest
    squared error on the rollouts sampled next.
    """

    def __init__(self) -> None:
        self.selector = GridSelector(ERROR_MEMORY, {"pseudo_counts": PSEUDO_COUNTS})

    def predict(self, value_predictions: Sequence[float], counts: Sequence[PromptCounts]) -> list[float]:
        """Compute p̂, one per prompt, from h and the prompts' outcomes so far."""
        s = self.selector.selected["pseudo_counts"]
        return [
            (s * h + c.discounted_positives) / (s + c.discounted_rollouts)
            for h, c in zip(value_predictions, counts, strict=True)
        ]

    def observe(
        self,
        value_predictions: Sequence[float],
        counts: Sequence[PromptCounts],
        positives: Sequence[int],
        num_rollouts: Sequence[int],
    ) -> None:
        """
        Add the candidates' errors on one step.

        Args:
            value_predictions (`Sequence[float]`), counts (`Sequence[PromptCounts]`):
                As in [`predict`], from before the step.
            positives, num_rollouts (`Sequence[int]`):
                Outcomes of the step: positive and scored rollouts of each prompt.
        """
        h, k, n = (
            np.asarray(values, dtype=np.float64)[:, None] for values in (value_predictions, positives, num_rollouts)
        )
        earlier = np.array([(c.discounted_positives, c.discounted_rollouts) for c in counts]).reshape(-1, 2)  # (P, 2)
        s = self.selector.candidates["pseudo_counts"]  # (S,)
        p = (s * h + earlier[:, :1]) / (s + earlier[:, 1:])  # (P, S)
        self.selector.observe((k * (1 - p) ** 2 + (n - k) * p**2).sum(axis=0))
