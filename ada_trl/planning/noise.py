"""
How noisy an update is for the rollouts that it takes: exact, by prompt.

What is assumed of a policy, which nobody knows: a rollout's ∇ log π has a random direction and the same length for all, and
what it has in common with ∇p is the one direction of the prompt's logit, 1 − p for a positive and −p for a negative. So the
signal of a prompt is E[Σ A_i (y_i − p)] and the power of its noise E[Σ A_i²].
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core import Pool, Rollout, group_advantages, select_group
from ..core.advantages import PromptWeighting
from .outcomes import PoolDistribution, binomial_probability


class Moments(NamedTuple):
    """
    What the rollouts of a prompt that are trained on add to an update, one number per pass rate, `(num_pass_rates,)` each.

    Args:
        signal (`np.ndarray`):
            E[Σ A_i (y_i − p)]; ∇p times the number of rollouts is p (1 − p) times their number.
        power (`np.ndarray`):
            E[Σ A_i²].
    """

    signal: np.ndarray
    power: np.ndarray


def noise(moments: Moments, rollouts: np.ndarray, weights: np.ndarray) -> float:
    """
    Rollouts to draw for a given ratio of signal to noise, up to a factor that is the same for all settings:
    E[rollouts] · E[power] / E[signal]², over prompts. Infinite without any signal.

    Args:
        moments ([`Moments`]):
            By prompt or by pass rate.
        rollouts (`np.ndarray`):
            Expected number drawn, trained on or not, likewise.
        weights (`np.ndarray`):
            Shares of the prompts.
    """
    signal, power, drawn = (float(weights @ values) for values in (*moments, rollouts))
    return drawn * power / signal**2 if signal > 0 else np.inf


def pool_moments(
    pass_rates: ArrayLike, pools: PoolDistribution, num_generations: int, *, weighting: PromptWeighting = "none"
) -> Moments:
    """
    Against the mean of the prompt's own pool, for the group of `num_generations` that [`~core.select_group`] takes from
    every pool that sampling can end with.
    """
    states = [
        _group(int(draws), int(positives), num_generations, weighting)
        for draws, positives in zip(pools.draws, pools.positives, strict=True)
    ]
    return _expectation(pass_rates, pools.probability, np.array(states))


def uniform_moments(pass_rates: ArrayLike, size: int, *, weighting: PromptWeighting = "none") -> Moments:
    """[`pool_moments`] where all of `size` rollouts are trained on: GRPO, or Est with this budget."""
    pools = PoolDistribution(np.full(size + 1, size), np.arange(size + 1), binomial_probability(pass_rates, size))
    return pool_moments(pass_rates, pools, size, weighting=weighting)


def posterior_moments(
    pass_rates: np.ndarray, size: int, mean: float | np.ndarray, strength: float | np.ndarray
) -> Moments:
    """
    Against a posterior ([`~core.posterior_baselines`]), all of `size` rollouts trained on. With b_i = (s·m + Σ_{j≠i} r_j) /
    (s + n − 1) the signal is that of ∇p, and

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
    s = np.maximum(s, 1e-12)  # without any strength and without others, b_i is m
    share = 1 / (1 + others / s)
    variance = p * (1 - p) * (1 + others / (s + others) ** 2)
    power = size * (variance + share**2 * (p - m) ** 2)
    return Moments(np.broadcast_to(size * p * (1 - p), power.shape), power)


def _expectation(pass_rates: ArrayLike, probability: np.ndarray, states: np.ndarray) -> Moments:
    """`states`, `(num_states, 3)`: Σ A_i over positives, over negatives, Σ A_i²."""
    p = np.asarray(pass_rates, dtype=np.float64)
    up, down, power = (probability @ states).T
    return Moments((1 - p) * up - p * down, power)


@cache
def _group(draws: int, positives: int, size: int, weighting: PromptWeighting) -> tuple[float, float, float]:
    """Of the group of a pool with so many draws and positives: Σ A_i over positives, over negatives, Σ A_i²."""
    pool = Pool(0.5, [Rollout(i, float(i < positives), float(i < positives)) for i in range(draws)])
    group = select_group(pool, size, seed=(0,))
    values = np.array(group_advantages(pool, group, weighting=weighting))
    positive = np.array([pool.is_positive(rollout) for rollout in group])
    return float(values[positive].sum()), float(values[~positive].sum()), float(values @ values)
