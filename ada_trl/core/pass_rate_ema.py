"""What is known about a prompt before it is sampled."""

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
    What one prompt has shown.

    Args:
        discounted_draws (`float`):
            n_x, scored rollouts, those of t visits ago weighted by λ^t.
        discounted_positives (`float`):
            k_x, positive rollouts, likewise.
        draws (`int`):
            Scored rollouts over the whole run.
        positives (`int`):
            Positive rollouts over the whole run.
        last_step (`int`):
            Step of the last visit.
    """

    discounted_draws: float = 0.0
    discounted_positives: float = 0.0
    draws: int = 0
    positives: int = 0
    last_step: int = 0


class EMAPassRate:
    """
    Pass rates from discounted counts with a Beta prior
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Reinforce-Ada-Est, "EMA on counts"): at each visit

    n_x ← λ n_x + draws, k_x ← λ k_x + positives, p̂_x = (k_x + α) / (n_x + α + β).

    Counts and not means are averaged, because E[positives] = p · E[draws] whatever rule stopped the sampling (Wald's
    identity), whereas the mean of a pool that was stopped early is biased.

    A prompt's counts are discounted once per step in which it is visited: with what the policy learns from it, not
    with time. Duplicates within a step share one estimate and one visit. A visit without a scored rollout says
    nothing and leaves the prompt as it was.

    With `prior="empirical"`, α and β are those that make the run's own recent data most likely (see
    [`fit_beta_prior`]), once a discounted number of 32 prompts has been visited; until then, the given prior.

    Args:
        decay (`float`, *optional*, defaults to `0.9`):
            λ, above 0 and at most 1; 1 never forgets.
        alpha (`float`, *optional*, defaults to `1.0`):
            Positives that the prior is worth.
        beta (`float`, *optional*, defaults to `16.0`):
            Negatives that the prior is worth.
        prior (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"` or `"empirical"`.

    Raises:
        `ValueError`: for a decay outside (0, 1], an α or β that is not positive, or an unknown prior.
    """

    def __init__(
        self, *, decay: float = 0.9, alpha: float = 1.0, beta: float = 16.0, prior: PriorKind = "fixed"
    ) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay ({decay}) must be above 0 and at most 1. Use 1 to never forget.")
        if not (0 < alpha < math.inf and 0 < beta < math.inf):
            raise ValueError(f"alpha ({alpha}) and beta ({beta}) of the prior must be positive and finite.")
        if prior not in ("fixed", "empirical"):
            raise ValueError(f"prior ({prior!r}) must be one of 'fixed', 'empirical'.")
        self.decay = decay
        self.prior = prior
        self.alpha, self.beta = alpha, beta
        self.counts: dict[str, PromptCounts] = {}
        self._tally = np.zeros((3, 0))  # see `_tally_counts`
        self._tallied_prompts = 0.0

    @property
    def prior_mean(self) -> float:
        """What an unseen prompt is predicted to pass."""
        return self.alpha / (self.alpha + self.beta)

    def predict(self, keys: Sequence[str]) -> list[float]:
        """p̂, one per key, strictly between 0 and 1."""
        return [
            (c.discounted_positives + self.alpha) / (c.discounted_draws + self.alpha + self.beta)
            for c in self.known(keys)
        ]

    def known(self, keys: Sequence[str]) -> list[PromptCounts]:
        """What every prompt has shown so far, one per key; zeros for an unseen one."""
        unseen = PromptCounts()
        return [self.counts.get(key, unseen) for key in keys]

    def observe(
        self,
        keys: Sequence[str],
        positives: Sequence[int],
        draws: Sequence[int],
        *,
        step: int,
        is_on_distribution: Sequence[bool] | None = None,
    ) -> None:
        """
        Take in everything that was drawn in one step: call it once per step, with all prompts of all processes.

        Args:
            keys (`Sequence[str]`):
                One per prompt; duplicates are added up.
            positives (`Sequence[int]`):
                Positive rollouts of each prompt.
            draws (`Sequence[int]`):
                Scored rollouts of each prompt.
            step (`int`):
                What to record as the step of this visit.
            is_on_distribution (`Sequence[bool]`, *optional*):
                Which prompts stand for all, so that an empirical prior is fitted to them; by default, all. A prompt that
                returns because it has not passed does not.

        Raises:
            `ValueError`: if a prompt has more positives than draws, or a negative count.
        """
        totals: dict[str, tuple[int, int]] = {}
        representative_keys = {
            key
            for key, is_representative in zip(keys, is_on_distribution or [True] * len(keys), strict=True)
            if is_representative
        }
        for key, k, n in zip(keys, positives, draws, strict=True):
            check_counts(key, k, n)
            previous = totals.get(key, (0, 0))
            totals[key] = (previous[0] + k, previous[1] + n)
        totals = {key: total for key, total in totals.items() if total[1] > 0}
        for key, (k, n) in totals.items():
            counts = self.counts.setdefault(key, PromptCounts())
            counts.discounted_draws = self.decay * counts.discounted_draws + n
            counts.discounted_positives = self.decay * counts.discounted_positives + k
            counts.draws += n
            counts.positives += k
            counts.last_step = step
        shown = [total for key, total in totals.items() if key in representative_keys]
        if self.prior == "empirical" and shown:
            self._learn_prior(shown)

    def _learn_prior(self, totals: list[tuple[int, int]]) -> None:
        new = beta_binomial_sufficient_stats(totals)
        width = max(new.shape[1], self._tally.shape[1])
        old, new = (np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (self._tally, new))
        self._tally = self.decay * old + new
        self._tallied_prompts = self.decay * self._tallied_prompts + len(totals)
        if self._tallied_prompts >= MIN_PROMPTS_FOR_PRIOR:
            self.alpha, self.beta = fit_beta_prior(self._tally, self.alpha, self.beta)

    def state_dict(self) -> dict[str, Any]:
        """Counts of all prompts and, for the empirical prior, what it was fitted to. Plain numbers, strings, lists."""
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


def check_counts(key: Any, positives: float, draws: float) -> None:
    """
    Check that 0 <= `positives` <= `draws`.

    Raises:
        `ValueError`: if not, naming the prompt by `key`.
    """
    if not 0 <= positives <= draws:
        raise ValueError(
            f"Prompt {key!r} has {positives} positives in {draws} draws; it takes 0 <= positives <= draws. Pass the "
            "number of positive and of scored rollouts."
        )


def beta_binomial_sufficient_stats(totals: ArrayLike) -> np.ndarray:
    """
    The sufficient statistics of a Beta prior for `(positives, draws)` pairs: `(3, max draws)`, in column i the number
    of prompts with more than i positives, more than i negatives and more than i draws.
    """
    k, n = np.array(totals).T  # (num_prompts,) each
    columns = np.arange(n.max())[:, None]  # (max draws, 1)
    return np.stack([(counts > columns).sum(axis=1) for counts in (k, n - k, n)]).astype(np.float64)


def fit_beta_prior(tally: np.ndarray, alpha: float, beta: float) -> tuple[float, float]:
    """
    Maximum-likelihood Beta prior of beta-binomial counts, from a start that is improved on.

    With A_i, B_i, C_i the rows of `tally`, the log-likelihood is
    Σ_i A_i ln(α + i) + B_i ln(β + i) − C_i ln(α + β + i). Each iteration of
    α ← α · [Σ A_i / (α + i)] / [Σ C_i / (α + β + i)] (β likewise, with B_i) maximises a lower bound that touches it, so
    the likelihood never falls (Minka's fixed point). The likelihood does not depend on the rule that stopped the
    sampling: counts of early-stopped pools need no correction, which they would with the method of moments.

    Args:
        tally (`np.ndarray`):
            From [`beta_binomial_sufficient_stats`], or a weighted sum of such.
        alpha, beta (`float`):
            Where to start.

    Returns:
        `tuple[float, float]`: α and β, each between 0.02 and 200: without any positive (or negative) α (or β) tends
        to 0, and when all prompts are equally hard both tend to infinity.
    """
    i = np.arange(tally.shape[1])
    more_positives, more_negatives, more_draws = tally
    for _ in range(PRIOR_ITERATIONS):
        shared = (more_draws / (alpha + beta + i)).sum()
        new_alpha = alpha * (more_positives / (alpha + i)).sum() / shared
        new_beta = beta * (more_negatives / (beta + i)).sum() / shared
        alpha, beta = np.clip([new_alpha, new_beta], *PRIOR_BOUNDS).tolist()
    return alpha, beta


def brier_metrics(
    predictions: ArrayLike, positives: ArrayLike, draws: ArrayLike, *, prefix: str = "brier"
) -> dict[str, float]:
    """
    How good predictions made **before** sampling were: the mean over all scored rollouts of (p̂_x − y)², y = 1 for a
    positive.

    A prompt's rollouts add p(1 − p) + (p̂ − p)² each in expectation, whatever rule stopped the sampling, so two
    predictors are comparable on the same rollouts; the first part is noise that no prediction avoids. The baseline
    predicts the batch's own mean for every prompt: it is the best constant, known only in hindsight.

    Args:
        predictions (`ArrayLike`):
            p̂_x, one per prompt.
        positives, draws (`ArrayLike`):
            What was then observed.
        prefix (`str`, *optional*, defaults to `"brier"`):
            Name of the first metric.

    Returns:
        `dict[str, float]`: `{prefix}` and `{prefix}_batch_mean`; NaN if nothing was scored.
    """
    p, k, n = (np.asarray(values, dtype=np.float64) for values in (predictions, positives, draws))
    if not n.sum():
        return {prefix: math.nan, f"{prefix}_constant": math.nan}
    mean = k.sum() / n.sum()
    return {
        prefix: float((k * (1 - p) ** 2 + (n - k) * p**2).sum() / n.sum()),
        f"{prefix}_constant": float(mean * (1 - mean)),
    }
