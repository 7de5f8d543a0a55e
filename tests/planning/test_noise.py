"""The noise of an update in closed form: against the core's own advantages, and by what it must say of simple cases."""

import itertools

import numpy as np
import pytest

from ada_trl.core import (
    BaselineEstimate,
    ExitCondition,
    Pool,
    Rollout,
    group_advantages,
    posterior_advantages,
    select_group,
)
from ada_trl.planning.noise import Moments, noise, pool_moments, posterior_moments, uniform_moments
from ada_trl.planning.outcomes import pool_distribution


RATES = np.array([0.0, 0.05, 0.3, 0.5, 0.9, 1.0])


def enumerated(p, size, to_advantages):
    """E[Σ A_i (y_i − p)] and E[Σ A_i²] over every sequence of rewards."""
    signal = power = 0.0
    for rewards in itertools.product((1.0, 0.0), repeat=size):
        pool = Pool(0.5, [Rollout(i, r, r) for i, r in enumerate(rewards)])
        advantages, y = np.array(to_advantages(pool)), np.array(rewards)
        probability = np.prod(np.where(y == 1, p, 1 - p))
        signal += probability * advantages @ (y - p)
        power += probability * advantages @ advantages
    return signal, power


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strength", [0.0, 2.5, 1e9])
def test_a_posterior_is_as_noisy_as_the_cores_advantages_are(size, strength):
    found = posterior_moments(RATES, size, 0.4, strength)
    for i, p in enumerate(RATES):
        prior = BaselineEstimate(0.4, strength, 0.4)
        expected = enumerated(p, size, lambda pool, prior=prior: posterior_advantages(pool, prior))
        assert (found.signal[i], found.power[i]) == pytest.approx(expected, abs=1e-9)


def test_one_prior_for_each_prompt():
    found = posterior_moments(RATES, 2, RATES[:, None], np.full((len(RATES), 1), 3.0))
    assert found.signal.shape == found.power.shape == (len(RATES), len(RATES))
    for i, mean in enumerate(RATES):
        assert found.power[i] == pytest.approx(posterior_moments(RATES, 2, mean, 3.0).power)


@pytest.mark.parametrize("weighting", ["none", "inverse_sqrt"])
def test_a_pool_is_as_noisy_as_the_cores_advantages_are(weighting):
    found = uniform_moments(RATES, 4, weighting=weighting)
    for i, p in enumerate(RATES):
        expected = enumerated(p, 4, lambda pool: group_advantages(pool, pool.rollouts, weighting=weighting))
        assert (found.signal[i], found.power[i]) == pytest.approx(expected, abs=1e-12)


def test_a_group_of_a_pool_that_stopped_early_by_monte_carlo():
    p, rng, runs = 0.3, np.random.default_rng(0), 4000
    exit_condition = ExitCondition(1, 1)
    pools = pool_distribution([p], exit_condition, samples_per_round=4, max_rounds=3)
    found = pool_moments([p], pools, 4)
    samples = []
    for run in range(runs):
        pool = Pool(0.5)
        while len(pool) < 12 and not (len(pool) and exit_condition(pool)):
            for r in (rng.random(4) < p).astype(float).tolist():
                pool.add(Rollout(len(pool), r, r))
        group = select_group(pool, 4, (run,))
        a, y = np.array(group_advantages(pool, group, weighting="none")), np.array([r.reward for r in group])
        samples.append([a @ (y - p), a @ a])
    error = 5 * np.std(samples, axis=0) / np.sqrt(runs)
    assert np.abs(np.mean(samples, axis=0) - [found.signal[0], found.power[0]]).max() < error.max()
    assert (np.abs(np.mean(samples, axis=0) - [found.signal[0], found.power[0]]) < error).all()


def test_what_it_says_of_grpo_and_of_a_right_prior():
    """A group mean over n needs n / (n − 1) times the rollouts of a baseline that is right, at any pass rate."""
    for p in (0.05, 0.5):
        right = noise(posterior_moments(np.array([p]), 1, p, np.inf), np.ones(1), np.ones(1))
        for n in (2, 4, 8):
            assert noise(uniform_moments([p], n), np.full(1, n), np.ones(1)) / right == pytest.approx(n / (n - 1))
    assert noise(Moments(np.zeros(1), np.ones(1)), np.ones(1), np.ones(1)) == np.inf
