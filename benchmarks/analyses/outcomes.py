"""Closed forms by pass rate: the probability that a group has no gradient, rollouts and rounds."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ada_trl.core import needs_more


class PoolDistribution(NamedTuple):
    """
    Every pool that sampling can end with, and how likely it is.

    Args:
        draws (`np.ndarray`):
            Size of the pool, `(num_states,)`.
        positives (`np.ndarray`):
            Positives in it, `(num_states,)`.
        probability (`np.ndarray`):
            `(num_pass_rates, num_states)`; rows sum to 1.
    """

    draws: np.ndarray
    positives: np.ndarray
    probability: np.ndarray

    @property
    def has_zero_variance(self) -> np.ndarray:
        """True where all rewards of the pool are equal, so that all advantages are 0, `(num_states,)`."""
        return (self.positives == 0) | (self.positives == self.draws)


class Outcome(NamedTuple):
    """
    What to expect of a prompt, one number per pass rate, `(num_pass_rates,)` each.

    Args:
        zero_gradient (`np.ndarray`):
            Probability that all advantages of the group trained on are 0.
        rollouts (`np.ndarray`):
            Expected rollouts drawn.
        rounds (`np.ndarray`):
            Expected rounds.
    """

    zero_gradient: np.ndarray
    rollouts: np.ndarray
    rounds: np.ndarray


def binomial_probability(pass_rates: ArrayLike, size: int) -> np.ndarray:
    """P(k positives among `size` rollouts), `(num_pass_rates, size + 1)`."""
    p = np.asarray(pass_rates, dtype=np.float64)[:, None]
    table = np.ones((len(p), 1))
    for _ in range(size):  # Pascal's rule in probabilities: exact at p = 0 and 1, no factorial to overflow
        table = np.pad(table * (1 - p), ((0, 0), (0, 1))) + np.pad(table * p, ((0, 0), (1, 0)))
    return table


def pool_distribution(
    pass_rates: ArrayLike,
    *,
    min_positives: int = 0,
    min_negatives: int = 0,
    samples_per_round: int,
    max_rounds: int = 1,
) -> PoolDistribution:
    """
    The exact distribution of the pool that [`~core.sample_slots`] ends with, for independent rollouts that are
    positive with probability p ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2).

    The number of positives of the pools that are still active, round by round: each adds Binomial(M, p) positives,
    and the pools that meet the exit condition, or have drawn M · N, leave with what they have.

    Args:
        pass_rates (`ArrayLike`):
            p, between 0 and 1.
        min_positives, min_negatives (`int`):
            Exit condition after each round, see [`~core.needs_more`]; by default one round meets it.
        samples_per_round (`int`):
            M.
        max_rounds (`int`):
            N.
    """
    one_round = binomial_probability(pass_rates, samples_per_round)  # (P, M + 1)
    active = np.ones((len(one_round), 1))
    sizes, positives, probabilities = [], [], []
    for draws in range(samples_per_round, samples_per_round * max_rounds + 1, samples_per_round):
        reached = np.zeros((len(one_round), draws + 1))
        for k in range(samples_per_round + 1):
            reached[:, k : k + active.shape[1]] += active * one_round[:, k : k + 1]
        k = np.arange(draws + 1)
        leaves = ~needs_more(k, draws - k, min_positives, min_negatives) | (draws == samples_per_round * max_rounds)
        sizes.append(np.full(leaves.sum(), draws))
        positives.append(np.flatnonzero(leaves))
        probabilities.append(reached[:, leaves])
        active = np.where(leaves, 0.0, reached)
    return PoolDistribution(np.concatenate(sizes), np.concatenate(positives), np.concatenate(probabilities, axis=1))


def sequential_outcome(pass_rates: ArrayLike, *, samples_per_round: int, **sampling: int) -> Outcome:
    """
    Reinforce-Ada-Seq with binary rewards: an expectation over [`pool_distribution`], which has the same options.

    The baseline is the mean of the whole pool, so a zero gradient is a property of the pool, whatever group is
    selected. Its probability is (1−p)^(MN) + p^M for *pos* with K_pos = 1 (no positive at the cap, or a first round
    without a negative) and p^(MN) + (1−p)^(MN) for *balance* with K_pos, K_neg ≥ 1.
    """
    pools = pool_distribution(pass_rates, samples_per_round=samples_per_round, **sampling)
    rollouts = pools.probability @ pools.draws
    return Outcome(pools.probability @ pools.has_zero_variance, rollouts, rollouts / samples_per_round)


def single_round_outcome(pass_rates: ArrayLike, sizes: ArrayLike) -> Outcome:
    """
    GRPO with n rollouts, or Reinforce-Ada-Est with N_x: zero signal with probability p^N + (1−p)^N.

    Args:
        pass_rates (`ArrayLike`):
            p, between 0 and 1.
        sizes (`int` or `ArrayLike`):
            Rollouts of all prompts, or one number per pass rate.
    """
    p = np.asarray(pass_rates, dtype=np.float64)
    size = np.broadcast_to(np.asarray(sizes, dtype=np.float64), p.shape)
    return Outcome(p**size + (1 - p) ** size, size.copy(), np.ones_like(p))


def refill_outcome(pass_rates: ArrayLike, weights: ArrayLike, num_generations: int, *, max_rounds: int) -> Outcome:
    """
    DAPO's dynamic sampling, of a *place in the batch* and not of a prompt: groups without a gradient are thrown away
    and each is replaced by a fresh prompt's, for at most `max_rounds` rounds.

    With z = Σ_x weight_x · (p_x^n + (1−p_x)^n) a place stays empty with probability z^N and takes (1 − z^N) / (1 − z)
    rounds. Each round draws for the empty places only. Implementations that draw whole batches and throw the surplus
    away cost more.

    Args:
        pass_rates (`ArrayLike`):
            p of the prompts that the batch is filled from.
        weights (`ArrayLike`):
            Their shares, which sum to 1.
        num_generations (`int`):
            n.
        max_rounds (`int`):
            N.

    Returns:
        [`Outcome`]: of one place, arrays of shape `(1,)`.
    """
    lost = float(np.dot(weights, single_round_outcome(pass_rates, num_generations).zero_gradient))
    rounds = sum(lost**r for r in range(max_rounds))
    return Outcome(*(np.array([value]) for value in (lost**max_rounds, num_generations * rounds, rounds)))
