"""Pass rates from discounted counts of successes, with the paper's Beta prior."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


ALPHA, BETA = 1.0, 16.0  # prior pseudo-counts of positives and negatives, as in the authors' code
PRIOR_MEAN = ALPHA / (ALPHA + BETA)


@dataclass
class PromptCounts:
    """
    Observed outcomes of one prompt.

    Args:
        rollouts, positives (`int`):
            Scored and positive rollouts over the whole run.
        last_step (`int`):
            Last step in which the prompt was sampled.
        discounted_rollouts, discounted_positives (`float`):
            n_x and k_x, scored and positive rollouts; those from t samplings of the prompt ago have weight λ^t.
    """

    rollouts: int = 0
    positives: int = 0
    last_step: int = 0
    discounted_rollouts: float = 0.0
    discounted_positives: float = 0.0


class EMAPassRate:
    """
    Pass rates from discounted counts with a Beta prior
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Reinforce-Ada-Est, "EMA on counts"): each time a
    prompt is sampled,

    n_x ← λ n_x + rollouts, k_x ← λ k_x + positives, p̂_x = (k_x + α) / (n_x + α + β), with α = 1 and β = 16.

    Counts and not means are averaged, because E[positives] = p · E[rollouts] whatever rule stopped the sampling
    (Wald's identity), whereas the mean of a pool that was stopped early is biased.

    A prompt's counts are discounted once per step in which it is sampled: its pass rate changes mostly when the policy
    is trained on it, not with time. Duplicates within a step share one estimate and one discount. A step without a
    scored rollout of the prompt leaves its counts as they are.

    Args:
        decay (`float`, *optional*, defaults to `0.9`):
            λ, above 0 and at most 1; 1 does not discount.
    """

    def __init__(self, *, decay: float = 0.9) -> None:
        self.decay = decay
        self.counts: dict[str, PromptCounts] = {}

    def predict(self, keys: Sequence[str]) -> list[float]:
        """Predict p̂, one per key, strictly between 0 and 1."""
        return [
            (c.discounted_positives + ALPHA) / (c.discounted_rollouts + ALPHA + BETA)
            for c in (self.counts.get(key, PromptCounts()) for key in keys)
        ]

    def observe(
        self,
        keys: Sequence[str],
        positives: Sequence[int],
        num_rollouts: Sequence[int],
        *,
        step: int,
    ) -> None:
        """
        Update with the outcomes of one step. Call it once per step, with all prompts of all ranks.

        Args:
            keys (`Sequence[str]`):
                One per prompt; duplicates are added up.
            positives, num_rollouts (`Sequence[int]`):
                Positive and scored rollouts of each prompt.
            step (`int`):
                The step, recorded as `last_step`.
        """
        totals: dict[str, tuple[int, int]] = {}
        for key, k, n in zip(keys, positives, num_rollouts, strict=True):
            previous = totals.get(key, (0, 0))
            totals[key] = (previous[0] + k, previous[1] + n)
        for key, (k, n) in totals.items():
            if not n:
                continue
            counts = self.counts.setdefault(key, PromptCounts())
            counts.discounted_rollouts = self.decay * counts.discounted_rollouts + n
            counts.discounted_positives = self.decay * counts.discounted_positives + k
            counts.rollouts += n
            counts.positives += k
            counts.last_step = step


def brier_metrics(predictions: ArrayLike, positives: ArrayLike, num_rollouts: ArrayLike) -> dict[str, float]:
    """
    Compute the Brier score of predictions made **before** sampling: the mean over all scored rollouts of (p̂_x − y)²,
    y = 1 for a positive.

    A prompt's rollouts add p(1 − p) + (p̂ − p)² each in expectation, whatever rule stopped the sampling, so two
    predictors are comparable on the same rollouts; the first part is noise that no prediction avoids. The reference
    `_constant` predicts the batch mean for every prompt, which is the best constant with hindsight.

    Args:
        predictions (`ArrayLike`):
            p̂_x, one per prompt.
        positives, num_rollouts (`ArrayLike`):
            Outcomes: positive and scored rollouts.

    Returns:
        `dict[str, float]`: `brier` and `brier_constant`; NaN if nothing was scored.
    """
    p, k, n = (np.asarray(values, dtype=np.float64) for values in (predictions, positives, num_rollouts))
    if not n.sum():
        return {"brier": math.nan, "brier_constant": math.nan}
    mean = k.sum() / n.sum()
    brier = (k * (1 - p) ** 2 + (n - k) * p**2).sum() / n.sum()
    return {"brier": float(brier), "brier_constant": float(mean * (1 - mean))}
