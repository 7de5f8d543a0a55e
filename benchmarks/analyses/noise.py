"""
Signal and noise of a policy-gradient update by pass rate, in closed form.

Model of the policy: ∇ log π of each rollout has the same length and a random direction, except for its component along the
gradient of the prompt's logit, which is 1 − p for a positive and −p for a negative rollout. The signal of a prompt is then
E[Σ A_i (y_i − p)], and the power of its noise is E[Σ A_i²].
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ada_trl.core import Pool, Rollout, group_advantages

from .outcomes import binomial_probability


class Moments(NamedTuple):
    """
    Contribution of a prompt's rollouts to an update, one number per pass rate, `(num_pass_rates,)` each.

    Args:
        signal (`np.ndarray`):
            E[Σ A_i (y_i − p)]. For the unscaled policy gradient this is p (1 − p) times the number of rollouts.
        power (`np.ndarray`):
            E[Σ A_i²].
    """

    signal: np.ndarray
    power: np.ndarray


def noise(moments: Moments, rollouts: np.ndarray, weights: np.ndarray) -> float:
    """
    Rollouts for a given signal-to-noise ratio, up to a factor common to all settings: E[rollouts] · E[power] / E[signal]²
    over prompts. Infinite if the signal is zero.

    Args:
        moments ([`Moments`]):
            By prompt or by pass rate.
        rollouts (`np.ndarray`):
            Expected number of sampled rollouts, by prompt or by pass rate.
        weights (`np.ndarray`):
            Fraction of the prompts, sum 1.
    """
    signal, power, sampled = (float(weights @ values) for values in (*moments, rollouts))
    return sampled * power / signal**2 if signal > 0 else np.inf


def uniform_moments(pass_rates: ArrayLike, size: int) -> Moments:
    """Moments with the group mean as baseline and all of `size` rollouts trained on: GRPO, or Est with this budget."""
    p = np.asarray(pass_rates, dtype=np.float64)
    groups = np.array([_group_sums(positives, size) for positives in range(size + 1)])
    positive, negative, power = (binomial_probability(p, size) @ groups).T
    return Moments((1 - p) * positive - p * negative, power)


def posterior_moments(
    pass_rates: np.ndarray, size: int, mean: float | np.ndarray, strength: float | np.ndarray
) -> Moments:
    """
    Moments with the posterior baseline ([`~core.posterior_baselines`]) and all of `size` rollouts trained on.

    With b_i = (s·m + Σ_{j≠i} r_j) / (s + n − 1) the signal is that of ∇p, and

    E[(r_i − b_i)²] = p (1 − p) · (1 + (n − 1) / (s + n − 1)²) + (s / (s + n − 1))² · (p − m)².

    Args:
        pass_rates (`np.ndarray`):
            p.
        size (`int`):
            n.
        mean, strength (`float` or `np.ndarray`):
            m and s of the prior; they and the pass rates broadcast.
    """
    p, m, s = (np.asarray(values, dtype=np.float64) for values in (pass_rates, mean, strength))
    others = size - 1
    s = np.maximum(s, 1e-12)  # with s = 0 and n = 1, b_i is m
    share = 1 / (1 + others / s)
    variance = p * (1 - p) * (1 + others / (s + others) ** 2)
    power = size * (variance + share**2 * (p - m) ** 2)
    return Moments(np.broadcast_to(size * p * (1 - p), power.shape), power)


@cache
def _group_sums(positives: int, size: int) -> tuple[float, float, float]:
    """Σ A_i over positive rollouts, Σ A_i over negative rollouts, and Σ A_i² of a group with `positives` successes."""
    pool = Pool(0.5, [Rollout(i, float(i < positives), float(i < positives)) for i in range(size)])
    values = np.array(group_advantages(pool, pool.rollouts, weighting="none"))
    return float(values[:positives].sum()), float(values[positives:].sum()), float(values @ values)
