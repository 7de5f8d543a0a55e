"""What an expectation is worth, and what a positive earns: learnt from what was drawn, before it is used."""

import math

import numpy as np
import pytest

from ada_trl.core import Pool, Prior, Rollout, posterior_advantages, recentred
from ada_trl.core.priors import PriorStrength, RewardLevels, _beta_binomial


BASES, CAPS = (4.0, 1.0, 2.0, 8.0, 16.0, 32.0), (8.0, 2.0, 4.0, 16.0, 32.0, 64.0)


def test_the_likelihood_is_the_beta_binomial_one():
    alpha, beta = np.array([[0.5, 3.0, 10.0]]), np.array([[2.0, 3.0, 0.1]])

    def log_beta(a, b):
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    for k, n in ((0, 4), (3, 4), (1, 1), (0, 0)):
        expected = [log_beta(a + k, b + n - k) - log_beta(a, b) for a, b in zip(alpha[0], beta[0], strict=True)]
        found = _beta_binomial(alpha, beta, [k], [n])
        assert found[0] == pytest.approx(expected)


def run(true_strength, known_draws, num_prompts=4000, seed=0):
    """Prompts whose pass rates scatter around a guess as a Beta of `true_strength`, some seen before."""
    rng = np.random.default_rng(seed)
    guess = rng.uniform(0.1, 0.9, num_prompts)
    p = rng.beta(true_strength * guess, true_strength * (1 - guess))
    k, draws = rng.binomial(known_draws, p), np.full(num_prompts, float(known_draws))
    strength = PriorStrength(BASES, CAPS)
    strength.observe(guess, k, draws, rng.binomial(4, p), np.full(num_prompts, 4))
    return strength.best


@pytest.mark.parametrize("true_strength", [1.0, 4.0, 16.0])
def test_the_strength_of_a_guess_is_found(true_strength):
    assert run(true_strength, known_draws=0)[0] == true_strength  # 4000 prompts: the next candidate is 30 nats behind


def test_counts_are_trusted_as_far_as_they_are_true():
    base, cap = run(4.0, known_draws=20)
    assert base == 4.0 and cap >= 16.0


def test_old_news_is_worth_less():
    """Counts of a policy that has moved on since: each prompt's pass rate has been drawn anew around the old one."""
    rng = np.random.default_rng(0)
    old = rng.uniform(0.1, 0.9, 4000)
    now = rng.beta(3 * old, 3 * (1 - old))
    strength = PriorStrength(BASES, CAPS)
    strength.observe(
        np.full(4000, 0.5), rng.binomial(200, old), np.full(4000, 200.0), rng.binomial(4, now), np.full(4000, 4)
    )
    assert strength.best[1] in (2.0, 4.0)


def test_a_guess_of_known_strength_leaves_the_cap_to_be_chosen():
    rng = np.random.default_rng(0)
    p = rng.beta(2, 2, 2000)
    strength = PriorStrength(BASES[:1], CAPS)
    strength.observe(
        np.full(2000, 0.5),
        rng.binomial(64, p),
        np.full(2000, 64.0),
        rng.binomial(4, p),
        [4] * 2000,
        guess_strength=4.0,
    )
    assert strength.best == (4.0, 64.0)


def test_before_anything_was_seen_the_first_candidates_are_in_use_and_state_comes_back():
    fresh = PriorStrength(BASES, CAPS)
    assert fresh.best == (4.0, 8.0)
    seen = PriorStrength(BASES, CAPS)
    seen.observe([0.1, 0.9], [0, 0], [0, 0], [1, 0], [1, 1])
    resumed = PriorStrength(BASES, CAPS)
    resumed.load_state_dict(seen.state_dict())
    assert resumed.state_dict() == seen.state_dict() and any(seen.state_dict())
    other = PriorStrength(BASES[:1], CAPS)
    other.load_state_dict(seen.state_dict())  # of another kind of guess
    assert other.best == fresh.best


def test_levels_of_two_valued_rewards_are_exact():
    levels = RewardLevels()
    assert levels.mean_reward(0.3) == pytest.approx(0.3)  # as if rewards were 0 and 1
    for _ in range(200):
        levels.observe([-1.0] * 3, [2.0])
    assert [levels.mean_reward(p) for p in (0, 0.5, 1)] == pytest.approx([-1, 0.5, 2], abs=1e-6)
    before = levels.mean_reward(1.0)
    levels.observe([-1.0], [])
    assert levels.mean_reward(1.0) == before  # a kind that was not seen keeps what is known of it
    resumed = RewardLevels()
    resumed.load_state_dict(levels.state_dict())
    assert resumed.mean_reward(0.4) == levels.mean_reward(0.4)


def pools_of(rewards):
    return [Pool(0.7, (Rollout(i, r, r) for i, r in enumerate(row))) for row in rewards]


def test_recentring_by_hand():
    pools = pools_of([[1.0, 1.0], [0.0], [1.0]])
    priors = [Prior(0.0, 4, 0.1)] * 3
    assert [prior.mean for prior in recentred(priors, pools)] == pytest.approx([1 / (2 + 8), 3 / (3 + 8), 2 / (3 + 8)])


def test_a_recentred_prior_does_not_see_its_own_rewards():
    priors = [Prior(0.2, 4, 0.2)] * 3
    first, *_ = recentred(priors, pools_of([[1.0, 1.0], [0.0], [1.0]]))
    again, *_ = recentred(priors, pools_of([[0.0, -5.0], [0.0], [1.0]]))
    assert first.mean == pytest.approx(again.mean, abs=1e-12)


def test_recentring_repairs_a_level_that_is_wrong_for_all():
    rng = np.random.default_rng(1)
    pools = pools_of((rng.random((128, 1)) < 0.6).astype(float))
    wrong = [Prior(0.05, 6, 0.05)] * 128

    def noise(priors):
        return np.mean(
            [posterior_advantages(p, q, samples_per_round=1)[0] ** 2 for p, q in zip(pools, priors, strict=True)]
        )

    assert noise(recentred(wrong, pools)) < 0.5 * noise(wrong)
