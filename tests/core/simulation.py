"""Pools of known rewards, simulated sampling, and means of samples."""

import math

import numpy as np
import pytest

from ada_trl.core import Pool, Rollout
from benchmarks.common import bernoulli_pools


def pool_of(*rewards, threshold=0.7):
    return Pool(threshold, [Rollout(i, reward, reward) for i, reward in enumerate(rewards)])


def pools_of(rows):
    return [pool_of(*map(float, row)) for row in rows]


def sample_pools(pass_rates, exit_condition, *, samples_per_round, max_rounds, seed=0):
    """Pools of binary rewards, one per entry of `pass_rates`."""
    sizes = {"samples_per_round": samples_per_round, "max_rounds": max_rounds}
    return bernoulli_pools(pass_rates, np.random.default_rng(seed), exit_condition, **sizes)


def assert_mean(samples, expected, scale=None):
    """
    Assert that the mean of `samples` is within five standard errors of `expected`, and that these are small against `scale`.

    Seeds are fixed, so that the tests are deterministic; a wrong formula of a relevant size is dozens of standard errors away.
    """
    samples = np.asarray(samples, dtype=float)
    tolerance = 5 * samples.std(ddof=1) / math.sqrt(len(samples))
    assert tolerance < 0.1 * (scale or abs(expected)), "too few samples"
    assert samples.mean() == pytest.approx(expected, abs=tolerance)
