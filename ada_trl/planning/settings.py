"""Every way to sample with what it costs and gives on prompts of known difficulty, and the one to choose."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import ExitCondition, allocate, expected_rounds
from ..core.advantages import PromptWeighting
from .noise import Moments, noise, pool_moments, posterior_moments, uniform_moments
from .observed import Prompts
from .outcomes import Outcome, pool_distribution, refill_outcome, sequential_outcome, single_round_outcome


REFILL_ROUNDS = 10  # after which DAPO gives a place in the batch up
WEIGHTING: PromptWeighting = "inverse_sqrt"  # prompt_weighting's default in the paper's modes
ALWAYS = ("Posterior", "Batch", "Rounds")  # methods that have a gradient from every prompt
TIE = 1.1  # noise is computed under an assumption about the policy; such a difference is not to be relied on
LARGEST_STRENGTH = 32.0  # as the largest candidate of a run's priors


@dataclass
class Setting:
    """
    One way to sample, and what to expect of it on average over the prompts.

    Args:
        method (`str`):
            Name.
        fields (`dict[str, Any]`):
            The fields of `AdaGRPOConfig`.
        with_gradient (`float`):
            Share of the prompts in the update that have a gradient.
        recovered (`float`):
            Share of the prompts that GRPO with `num_generations` would lose and that have a gradient here, net.
        rollouts (`float`):
            Drawn per prompt in the update.
        per_gradient (`float`):
            Drawn per prompt with a gradient.
        rounds (`float`):
            Mean rounds per prompt.
        trained (`float`):
            Rollouts per prompt that the update trains on.
        noise (`float`):
            Rollouts needed for a given ratio of signal to noise ([`~planning.noise.noise`]), those of GRPO with
            `num_generations` being 1.
    """

    method: str
    fields: dict[str, Any]
    with_gradient: float
    recovered: float
    rollouts: float
    per_gradient: float
    rounds: float
    trained: float
    noise: float


def settings(prompts: Prompts, *, num_generations: int, budget: float, max_samples: int) -> list[Setting]:
    """
    All settings that are compared: GRPO of several sizes, DAPO, Seq-pos and Seq-balance with
    several M, N and quotas, Est with several means, the mean of all other rollouts, and the posterior baseline, also with rounds
    across steps, none with more than `max_samples` rollouts for a prompt.
    """
    n = num_generations
    rates, weights = prompts.distribution
    sizes = sorted({n, 2 * n, 4 * n, 8 * n, max(n, int(budget))} & set(range(max_samples + 1)))
    lost = float(weights @ single_round_outcome(rates, n).zero_signal)
    reference = uniform_moments(rates, n)
    unit = noise(reference, np.full(len(rates), n), weights)
    found = []

    def add(
        method: str,
        fields: dict[str, Any],
        outcome: Outcome,
        weights: np.ndarray,
        trained: float,
        moments: Moments,
    ) -> None:
        zero, rollouts, rounds = (float(weights @ value) for value in outcome)
        recovered = 0.0 if method == "DAPO" or not lost else 1 - zero / lost
        needed = noise(moments, outcome.rollouts, weights) / unit
        per_gradient = rollouts / max(1 - zero, 1e-12)
        found.append(Setting(method, fields, 1 - zero, recovered, rollouts, per_gradient, rounds, trained, needed))

    for size in sizes:
        fields = {"adaptive_sampling": "uniform", "num_generations": size}
        add("GRPO", fields, single_round_outcome(rates, size), weights, size, uniform_moments(rates, size))
    refill = refill_outcome(rates, weights, n, max_rounds=REFILL_ROUNDS)
    groups = refill.rollouts / n  # drawn for a place in the batch; those without a gradient add nothing
    fields = {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n}
    fields |= {"zero_variance_groups": "resample", "max_rounds": REFILL_ROUNDS}
    add("DAPO", fields, refill, np.ones(1), n, Moments(*(groups * (weights @ values) for values in reference)))
    for method, quotas in (("Seq-pos", (1, 0)), ("Seq-balance", (1, 1)), ("Seq-balance", (n // 2, n - n // 2))):
        for m in (n, 2 * n, 4 * n):
            for rounds in (r for r in (2, 4, 8) if r * m <= max_samples):
                sampling = {"samples_per_round": m, "max_rounds": rounds}
                outcome = sequential_outcome(rates, ExitCondition(*quotas), **sampling)
                pools = pool_distribution(rates, ExitCondition(*quotas), **sampling)
                fields = {"adaptive_sampling": method.lower(), "num_generations": n, **sampling}
                fields |= {"min_positives": quotas[0]} | ({"min_negatives": quotas[1]} if quotas[1] else {})
                add(method, fields, outcome, weights, n, pool_moments(rates, pools, n, weighting=WEIGHTING))
    for mean in sizes:
        fields = {"adaptive_sampling": "est-ema", "num_generations": mean}
        fields |= {"min_samples": min(2, mean), "max_samples": max_samples}
        outcome, shares, moments = _estimated_outcome(prompts, mean, min(2, mean), max_samples)
        add("Est", fields, outcome, shares, mean, moments)
    for size in sorted({1, 2, n}):
        number = {"num_generations": size} if size > 1 else {}
        outcome = Outcome(np.zeros(1), np.full(1, float(size)), np.ones(1))
        moments = _against_what_is_known(prompts, size)
        add("Posterior", {"baseline": "posterior"} | number, outcome, np.ones(1), size, moments)
    outcome = Outcome(np.zeros(1), np.ones(1), np.ones(1))
    moments = Moments(*(np.array([weights @ v]) for v in posterior_moments(rates, 1, float(weights @ rates), np.inf)))
    add("Batch", {"baseline": "batch"}, outcome, np.ones(1), 1, moments)
    for most in (r for r in (4, 8, 16) if r <= max_samples):
        fields = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "num_generations": 1, "max_rounds": most}
        tries = np.array([expected_rounds(p, 1, most) for p in rates])
        outcome = Outcome(np.zeros(1), *(np.array([weights @ tries]) for _ in range(2)))
        drawn = float(weights @ tries)
        add("Rounds", fields, outcome, np.ones(1), drawn, _against_what_is_known(prompts, 1, tries))
    return found


def _estimated_outcome(prompts: Prompts, mean: int, low: int, high: int) -> tuple[Outcome, np.ndarray, Moments]:
    """Est over all prompts at once, each with the budget that its own estimate earns; all `(X,)`, weights between."""
    rates = prompts.distribution.pass_rates
    estimates = np.clip(prompts.posterior @ rates, 0, 1)
    budgets = np.array(allocate(estimates, mean * len(estimates), min_samples=low, max_samples=high))
    zero, signal, power = np.empty((3, len(budgets)))
    for size in np.unique(budgets):
        these = budgets == size
        moments = uniform_moments(rates, int(size), weighting=WEIGHTING)
        by_rate = (single_round_outcome(rates, size).zero_signal, *moments)
        zero[these], signal[these], power[these] = (prompts.posterior[these] @ values for values in by_rate)
    shares = np.full(len(budgets), 1 / len(budgets))
    return Outcome(zero, budgets, np.ones(len(budgets))), shares, Moments(signal, power)


def _against_what_is_known(prompts: Prompts, size: int, tries: np.ndarray | float = 1.0) -> Moments:
    """
    The posterior baseline of a run that knows of each prompt what the file says: the mean m of its pass rate and, from the
    variance v, what that is worth in rollouts, m (1 − m) / v − 1. Mean over the prompts, `(1,)`, each asked `tries` times,
    by pass rate.
    """
    rates = prompts.distribution.pass_rates
    mean = np.clip(prompts.posterior @ rates, 0, 1)
    variance = np.maximum(prompts.posterior @ rates**2 - mean**2, 1e-12)
    strength = np.clip(mean * (1 - mean) / variance - 1, 0, LARGEST_STRENGTH)
    moments = posterior_moments(rates, size, mean[:, None], strength[:, None])  # (X, G)
    return Moments(*((prompts.posterior * values * tries).sum(axis=1).mean(keepdims=True) for values in moments))


def recommend(found: list[Setting], budget: float) -> Setting:
    """
    The setting with the least noise for its rollouts within the budget; of those within `TIE` of it, the one of fewest rollouts
    per prompt, which leaves most prompts to a step.

    Raises:
        `ValueError`: if nothing fits.
    """
    affordable = _affordable(found, budget)
    if not affordable:
        cheapest = min(s.rollouts for s in found)
        raise ValueError(
            f"A budget of {budget:g} rollouts per prompt is below the cheapest setting's {cheapest:g}. Raise --budget."
        )
    least = min(s.noise for s in affordable)
    return min((s for s in affordable if s.noise <= TIE * least), key=lambda s: (s.rollouts, s.noise))


def most_gradients(found: list[Setting], budget: float) -> list[Setting]:
    """
    The setting of each method with the most prompts that have a gradient within the budget, of equals the cheapest; where
    every prompt has one, as [`recommend`] chooses. In the order in which the methods come.
    """
    best = []
    for method in dict.fromkeys(s.method for s in found):
        own = _affordable([s for s in found if s.method == method], budget)
        if own and method in ALWAYS:
            best.append(recommend(own, budget))
        elif own:
            best.append(min(own, key=lambda s: (-round(s.with_gradient, 6), s.rollouts)))
    return best


def _affordable(found: list[Setting], budget: float) -> list[Setting]:
    return [s for s in found if s.rollouts <= budget + 1e-9]


def describe(setting: Setting) -> str:
    """The setting's parameters in a few letters."""
    f = setting.fields
    if setting.method in ("GRPO", "Posterior"):
        return f"n={f.get('num_generations', 1)}"
    if setting.method == "Batch":
        return "n=1"
    if setting.method == "DAPO":
        return f"n={setting.trained:g}"
    if setting.method == "Rounds":
        return f"n=1, at most {f['max_rounds']}"
    if setting.method == "Est":
        return f"mean {f['num_generations']}, {f['min_samples']} to {f['max_samples']}"
    return f"M={f['samples_per_round']}, N={f['max_rounds']}, K={f['min_positives']}+{f.get('min_negatives', 0)}"
