"""Maximum-likelihood distribution of true pass rates from noisy counts of successes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ada_trl.core.pass_rate_ema import beta_binomial_sufficient_stats, fit_beta_prior


GRID_SIZE = 129
MAX_ITERATIONS = 2000
START_DRAWS = 64  # where EM starts from, more draws are scaled down to so many
TOLERANCE = 1e-3  # nats of log-likelihood per iteration, of all prompts together: far below any statistical effect


class PassRateDistribution(NamedTuple):
    """
    A distribution of true pass rates on a grid.

    Args:
        pass_rates (`np.ndarray`):
            p, ascending, `(G,)`.
        weights (`np.ndarray`):
            Fraction of the prompts, `(G,)`, sum 1.
    """

    pass_rates: np.ndarray
    weights: np.ndarray


def likelihood(pass_rates: np.ndarray, positives: ArrayLike, draws: ArrayLike) -> np.ndarray:
    """p^k (1−p)^(n−k), each row relative to its largest value, `(num_prompts, G)`; counts may be fractional."""
    k, n = (np.asarray(values, dtype=np.float64)[:, None] for values in (positives, draws))
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(pass_rates), np.log1p(-pass_rates)
    zero = np.zeros((len(k), len(pass_rates)))
    log = np.multiply(k, log_p, where=k > 0, out=zero.copy()) + np.multiply(n - k, log_q, where=n > k, out=zero)
    return np.exp(log - log.max(axis=1, keepdims=True))


def fit_pass_rate_distribution(positives: ArrayLike, draws: ArrayLike) -> PassRateDistribution:
    """
    The distribution of true pass rates that makes the counts most likely, by expectation maximisation on a grid.

    A histogram of k/n is wider than that of p: prompts of p = 1/2 look like anything between 1/4 and 3/4 with 16
    draws, and one that fails 16 times may still pass 5 % of the time. The likelihood p^k (1−p)^(n−k) does not depend on the rule that stopped the sampling, so counts of
    early-stopped pools need no correction.

    EM starts from the fitted beta-binomial and ends when an iteration gains less than 0.001 nats. So what the counts do
    not tell (n draws determine n moments of p; prompts that failed n times may have any p well below 1/n) stays close
    to the smooth start instead of breaking up into atoms.

    Args:
        positives (`ArrayLike`):
            k, one per prompt; may be fractional (discounted counts).
        draws (`ArrayLike`):
            n; prompts without draws say nothing and are left out.

    Raises:
        `ValueError`: if no prompt has draws.
    """
    k, n = (np.asarray(values, dtype=np.float64) for values in (positives, draws))
    if not (n > 0).any():
        raise ValueError(f"None of the {len(n)} prompts has any draws, so nothing is known about their pass rates.")
    (k, n), repeats = np.unique(np.stack([k, n])[:, n > 0], axis=1, return_counts=True)
    grid = np.sin(np.linspace(0, np.pi / 2, GRID_SIZE)) ** 2  # steps in proportion to a binomial's standard deviation
    weights = _beta_weights(grid, k, n, repeats)
    given = likelihood(grid, k, n)  # (pairs, G)
    previous = -np.inf
    for _ in range(MAX_ITERATIONS):
        evidence = given @ weights
        total = float(repeats @ np.log(evidence))
        if total - previous < TOLERANCE:
            break
        previous = total
        weights = weights * ((repeats / evidence) @ given) / repeats.sum()
    return PassRateDistribution(grid, weights)


def _beta_weights(grid: np.ndarray, k: np.ndarray, n: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    """Starting point of EM: the beta distribution fitted to the counts, as integers of a moderate size."""
    size = np.rint(np.clip(n, 1, START_DRAWS))
    whole = np.stack([np.rint(k / n * size), size], axis=1).astype(int)
    alpha, beta = fit_beta_prior(beta_binomial_sufficient_stats(np.repeat(whole, repeats, axis=0)), 1.0, 1.0)
    p = np.clip(grid, grid[1] / 4, 1 - grid[1] / 4)  # the end points stand for half a step
    log = (alpha - 0.5) * np.log(p) + (beta - 0.5) * np.log1p(-p)
    weights = np.exp(log - log.max())
    return weights / weights.sum()
