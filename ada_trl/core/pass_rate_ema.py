"""Pass rates from discounted counts of outcomes, with a Beta prior."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike


PriorKind = Literal["fixed", "empirical"]

PAPER_PRIOR = (1.0, 16.0)  # alpha and beta in the authors' code
MIN_PROMPTS_FOR_PRIOR = 32  # discounted number of prompts before a prior is fitted
PRIOR_ITERATIONS = 100  # per step, from the previous fit
PRIOR_BOUNDS = (0.02, 200.0)  # of alpha and beta; without spread in the pass rates the fit would run to infinity


@dataclass
class PromptCounts:
    """
    Observed outcomes of one prompt.

    Args:
        discounted_rollouts (`float`):
            n_x, scored rollouts; those from t samplings of the prompt ago have weight λ^t.
        discounted_positives (`float`):
            k_x, positive rollouts, likewise.
        num_rollouts (`int`):
            Scored rollouts over the whole run.
        positives (`int`):
            Positive rollouts over the whole run.
        last_step (`int`):
            Last step in which the prompt was sampled.
    """

    discounted_rollouts: float = 0.0
    discounted_positives: float = 0.0
    num_rollouts: int = 0
    positives: int = 0
    last_step: int = 0


class EMAPassRate:
    """
    Pass rates from discounted counts with a Beta prior
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Reinforce-Ada-Est, "EMA on counts"): each time a
    prompt is sampled,

    n_x ← λ n_x + rollouts, k_x ← λ k_x + positives, p̂_x = (k_x + α) / (n_x + α + β).

    Counts and not means are averaged, because E[positives] = p · E[rollouts] whatever rule stopped the sampling (Wald's
    identity), whereas the mean of a pool that was stopped early is biased.

    A prompt's counts are discounted once per step in which it is sampled: its pass rate changes mostly when the policy is
    trained on it, not with time. Duplicates within a step share one estimate and one discount. A step without a scored
    rollout of the prompt leaves its counts as they are.

    With `prior="empirical"`, α and β are those that make the run's own recent data most likely (see
    [`fit_beta_prior`]), once the discounted number of observed prompts reaches 32; until then, the given prior.

    Args:
        decay (`float`, *optional*, defaults to `0.9`):
            λ, above 0 and at most 1; 1 does not discount.
        alpha, beta (`float`, *optional*, default to `1.0` and `16.0`):
            Pseudo-counts of positives and negatives in the prior, above 0.
        prior (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"` or `"empirical"`.
    """

    def __init__(
        self, *, decay: float = 0.9, alpha: float = 1.0, beta: float = 16.0, prior: PriorKind = "fixed"
    ) -> None:
        self.decay = decay
        self.prior = prior
        self.alpha, self.beta = alpha, beta
        self.counts: dict[str, PromptCounts] = {}
        self._tally = np.zeros((3, 0))  # see `beta_binomial_sufficient_stats`
        self._tallied_prompts = 0.0

    @property
    def prior_mean(self) -> float:
        """Predicted pass rate of a prompt without outcomes."""
        return self.alpha / (self.alpha + self.beta)

    def predict(self, keys: Sequence[str]) -> list[float]:
        """Predict p̂, one per key, strictly between 0 and 1."""
        return [
            (c.discounted_positives + self.alpha) / (c.discounted_rollouts + self.alpha + self.beta)
            for c in self.get_counts(keys)
        ]

    def get_counts(self, keys: Sequence[str]) -> list[PromptCounts]:
        """Return the outcomes of each prompt so far, one per key; zeros for a new one."""
        empty = PromptCounts()
        return [self.counts.get(key, empty) for key in keys]

    def observe(
        self,
        keys: Sequence[str],
        positives: Sequence[int],
        num_rollouts: Sequence[int],
        *,
        step: int,
        is_on_distribution: Sequence[bool] | None = None,
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
            is_on_distribution (`Sequence[bool]`, *optional*):
                Which prompts are an unbiased sample of the dataset, so that an empirical prior is fitted to them; by
                default, all. A prompt that is retried because it is unsolved is not.

        Raises:
            `ValueError`: if a prompt has more positives than rollouts, or a negative count.
        """
        totals: dict[str, tuple[int, int]] = {}
        on_distribution = is_on_distribution or [True] * len(keys)
        prior_keys = {key for key, is_included in zip(keys, on_distribution, strict=True) if is_included}
        for key, k, n in zip(keys, positives, num_rollouts, strict=True):
            check_counts(key, k, n)
            previous = totals.get(key, (0, 0))
            totals[key] = (previous[0] + k, previous[1] + n)
        totals = {key: total for key, total in totals.items() if total[1] > 0}
        for key, (k, n) in totals.items():
            counts = self.counts.setdefault(key, PromptCounts())
            counts.discounted_rollouts = self.decay * counts.discounted_rollouts + n
            counts.discounted_positives = self.decay * counts.discounted_positives + k
            counts.num_rollouts += n
            counts.positives += k
            counts.last_step = step
        prior_totals = [total for key, total in totals.items() if key in prior_keys]
        if self.prior == "empirical" and prior_totals:
            self._fit_prior(prior_totals)

    def _fit_prior(self, totals: list[tuple[int, int]]) -> None:
        new = beta_binomial_sufficient_stats(totals)
        width = max(new.shape[1], self._tally.shape[1])
        old, new = (np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (self._tally, new))
        self._tally = self.decay * old + new
        self._tallied_prompts = self.decay * self._tallied_prompts + len(totals)
        if self._tallied_prompts >= MIN_PROMPTS_FOR_PRIOR:
            self.alpha, self.beta = fit_beta_prior(self._tally, self.alpha, self.beta)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of all prompts and the data of an empirical prior, as numbers, strings and lists."""
        state: dict[str, Any] = {"counts": {key: vars(counts).copy() for key, counts in self.counts.items()}}
        if self.prior == "empirical":
            state["prior"] = {
                "alpha": self.alpha,
                "beta": self.beta,
                "tally": self._tally.tolist(),
                "tallied_prompts": self._tallied_prompts,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Continue from `state_dict()`. The decay and the kind of prior stay those of this object; a fitted prior in the
        state is used by an empirical one only.
        """
        self.counts = {key: PromptCounts(**counts) for key, counts in state["counts"].items()}
        fitted = state.get("prior")
        if self.prior == "empirical" and fitted is not None:
            self.alpha, self.beta = fitted["alpha"], fitted["beta"]
            self._tally = np.array(fitted["tally"], dtype=np.float64).reshape(3, -1)
            self._tallied_prompts = fitted["tallied_prompts"]


def check_counts(key: Any, positives: float, num_rollouts: float) -> None:
    """
    Check that 0 <= `positives` <= `num_rollouts`.

    Raises:
        `ValueError`: if not, naming the prompt by `key`.
    """
    if not 0 <= positives <= num_rollouts:
        raise ValueError(
            f"Prompt {key!r} has {positives} positives in {num_rollouts} rollouts; 0 <= positives <= rollouts must hold. Pass "
            "the number of positive and of scored rollouts."
        )


def beta_binomial_sufficient_stats(totals: ArrayLike) -> np.ndarray:
    """
    Compute the sufficient statistics of a Beta prior for `(positives, rollouts)` pairs: `(3, max rollouts)`, in column i the
    number of prompts with more than i positives, more than i negatives and more than i rollouts.
    """
    k, n = np.array(totals).T  # (num_prompts,) each
    columns = np.arange(n.max())[:, None]  # (max rollouts, 1)
    return np.stack([(counts > columns).sum(axis=1) for counts in (k, n - k, n)]).astype(np.float64)


def fit_beta_prior(tally: np.ndarray, alpha: float, beta: float) -> tuple[float, float]:
    """
    Fit a Beta prior to beta-binomial counts by maximum likelihood, improving on the given start.

    With A_i, B_i, C_i the rows of `tally`, the log-likelihood is
    Σ_i A_i ln(α + i) + B_i ln(β + i) − C_i ln(α + β + i). Each iteration of
    α ← α · [Σ A_i / (α + i)] / [Σ C_i / (α + β + i)] (β likewise, with B_i) maximizes a lower bound that touches it, so
    the likelihood never falls (Minka's fixed point). The likelihood does not depend on the rule that stopped the
    sampling: counts of early-stopped pools need no correction, which they would with the method of moments.

    Args:
        tally (`np.ndarray`):
            From [`beta_binomial_sufficient_stats`], or a weighted sum of such.
        alpha, beta (`float`):
            Start of the iteration.

    Returns:
        `tuple[float, float]`: α and β, each between 0.02 and 200: without any positive (or negative) α (or β) tends
        to 0, and if all prompts are equally hard both tend to infinity.
    """
    i = np.arange(tally.shape[1])
    more_positives, more_negatives, more_rollouts = tally
    for _ in range(PRIOR_ITERATIONS):
        shared = (more_rollouts / (alpha + beta + i)).sum()
        new_alpha = alpha * (more_positives / (alpha + i)).sum() / shared
        new_beta = beta * (more_negatives / (beta + i)).sum() / shared
        alpha, beta = np.clip([new_alpha, new_beta], *PRIOR_BOUNDS).tolist()
    return alpha, beta


def brier_metrics(predictions: ArrayLike, positives: ArrayLike, num_rollouts: ArrayLike) -> dict[str, float]:
    """
    Compute the Brier score of predictions made **before** sampling: the mean over all scored rollouts of (p̂_x − y)², y = 1
    for a positive.

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
