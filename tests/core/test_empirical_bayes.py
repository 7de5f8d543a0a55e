"""The reward estimator: its formula, its noise in simulations with fixed seeds, changes of the reward function, and its state."""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ada_trl.core import (
    BaselineEstimate,
    RewardEstimator,
    RunningRewardStd,
    add_batch_information,
    baseline_advantages,
    batch_leave_one_out_baselines,
    posterior_baselines,
)
from ada_trl.core.baselines import LARGEST_DEVIATION
from ada_trl.core.empirical_bayes import DECAYS, PSEUDO_COUNTS, VALUE_WEIGHTS
from ada_trl.pass_rates.value_head import RewardHead

from .simulation import pool_of, pools_of


def observe_generation(estimator, keys, rewards, predictions=None):
    """Pools, baselines and divisors of a generation; the estimator is updated afterwards."""
    pools, features = pools_of(rewards), estimator.features(keys, predictions)
    baselines = estimator.compute_baselines(estimator.estimate(features, [0.5] * len(keys)), keys, pools)
    stds = estimator.reward_std.reward_stds(pools)
    estimator.observe(features, pools)
    return pools, baselines, stds


def baselines_of_generation(*generation):
    return np.array(observe_generation(*generation)[1])


def advantages_of_generation(*generation):
    """Advantages without and with division by the standard deviation of the rewards, `(P, n)` each."""
    pools, baselines, stds = observe_generation(*generation)
    return [
        np.array([baseline_advantages(*args, std=std) for *args, std in zip(pools, baselines, divisors, strict=True)])
        for divisors in ([None] * len(pools), stds)
    ]


# The formula


def test_estimates_by_hand():
    estimator = RewardEstimator(has_value_predictions=True)
    baselines = baselines_of_generation(estimator, ["a", "b"], [[3.0], [1.0]])
    assert baselines.tolist() == [[1.0], [3.0]]  # the other prompt alone
    assert estimator.mean_reward == 2.0 and estimator.reward_std.std == 1.0
    s, decay, value_weight = PSEUDO_COUNTS[0], DECAYS[0], VALUE_WEIGHTS[0]
    residual = 3.0 - 1.0  # of the first prompt from the mean of the other one
    first, new = estimator.estimate(estimator.features(["a", "c"], [0.5, -1.0]), [0.1, 0.2])
    assert first == BaselineEstimate(pytest.approx(2.0 + (s * value_weight * 0.5 + residual) / (s + 1)), s + 1, 0.1)
    assert new == BaselineEstimate(pytest.approx(2.0 - value_weight), s, 0.2)
    baselines_of_generation(estimator, ["a"], [[5.0, 5.0]])
    num_rollouts, residuals = estimator.history["a"][:, DECAYS.index(decay)]
    assert num_rollouts == pytest.approx(decay * 1 + 2)
    assert residuals == pytest.approx(decay * residual + 2 * 5.0 - 2 * 2.0)  # no other prompt changes the mean


def test_without_history_and_without_value_predictions():
    without_history = RewardEstimator(has_value_predictions=True, use_history=False)
    without_predictions = RewardEstimator(has_value_predictions=False)
    for estimator in (without_history, without_predictions):
        for _ in range(3):
            baselines_of_generation(estimator, ["a", "b"], [[1.0], [0.0]])
    (estimate,) = without_history.estimate(without_history.features(["a"], [0.0]), [0.5])
    assert estimate[:2] == (without_history.mean_reward, PSEUDO_COUNTS[0]) and not without_history.history
    ignored, none = (
        without_predictions.estimate(without_predictions.features(["a"], prediction), [0.5])
        for prediction in ([9.0], None)
    )
    assert ignored == none and none[0].mean > without_predictions.mean_reward


@pytest.mark.parametrize("pseudo_counts", [1.0, 4.0])
def test_for_binary_rewards_it_is_the_mean_of_a_beta_posterior(pseudo_counts):
    """A prediction h worth s rollouts, k of n positive: Beta(s h + k, s (1 − h) + n − k)."""
    h, k, n = 0.3, 5, 8
    estimator = RewardEstimator(has_value_predictions=True)
    estimator.mean_reward, estimator.reward_std.variance = 0.4, 0.24
    estimator.selector.errors[:] = 1
    estimator.selector.errors[VALUE_WEIGHTS.index(1.0), DECAYS.index(1.0), PSEUDO_COUNTS.index(pseudo_counts), 0] = 0
    estimator.history["a"] = np.array([[n] * len(DECAYS), [k - 0.4 * n] * len(DECAYS)])
    (estimate,) = estimator.estimate(estimator.features(["a"], [(h - 0.4) / math.sqrt(0.24)]), [0.5])
    assert estimate.mean == pytest.approx((pseudo_counts * h + k) / (pseudo_counts + n))
    assert estimate.pseudo_counts == pseudo_counts + n


# Noise: E(r − b)² / Var(r | x), 1 for a perfect baseline


def binary(rng, means, n):
    return (rng.random((len(means), n)) < means[:, None]).astype(float)


def beta(rng, means, n):
    return rng.beta(4 * means[:, None], 4 * (1 - means[:, None]), (len(means), n))


def simulate(rewards_at, variance_at, *, n=1, prompts=48, rows=16, steps=300, seed=0, predict=None):
    """Squared errors of the baseline and the variance that no baseline avoids, per generation, `(steps,)` each."""
    rng = np.random.default_rng(seed)
    means = rng.uniform(0.05, 0.95, prompts)
    estimator = RewardEstimator(has_value_predictions=predict is not None)
    order, errors, variances = [], [], []
    for t in range(steps):
        if len(order) < rows // n:
            order = list(rng.permutation(prompts))
        sampled = np.array([order.pop() for _ in range(rows // n)])
        rewards = rewards_at(rng, means[sampled], n, t)
        predictions = None if predict is None else predict(rng, means[sampled])
        baselines = baselines_of_generation(estimator, [str(i) for i in sampled], rewards, predictions)
        errors.append(((rewards - baselines) ** 2).sum())
        variances.append(n * variance_at(means[sampled], t).sum())
    return np.array(errors), np.array(variances)


def noise(*args, **options):
    errors, variances = simulate(*args, **options)
    return errors.sum() / variances.sum()


BINARY = (lambda rng, m, n, t: binary(rng, m, n), lambda m, t: m * (1 - m))
REWARDS = {  # rewards at step t, and their variance given the mean
    "0 and 1": BINARY,
    "0 to 0.7": (lambda rng, m, n, t: 0.7 * beta(rng, m, n), lambda m, t: 0.49 * m * (1 - m) / 5),
    "1 to 100": (lambda rng, m, n, t: 1 + 99 * beta(rng, m, n), lambda m, t: 99**2 * m * (1 - m) / 5),
    "-5 to 0": (lambda rng, m, n, t: 5 * beta(rng, m, n) - 5, lambda m, t: 25 * m * (1 - m) / 5),
    "a drift": (lambda rng, m, n, t: binary(rng, m, n) - 0.05 * t, lambda m, t: m * (1 - m)),
}


# One seed scatters by about .01 (4,800 rewards, of which the excess over 1 is a tenth): the bounds are ten deviations away. The
# batch mean has 2.5 to 3 if rewards vary little within a prompt.
@pytest.mark.parametrize(("n", "most"), [(1, 1.2), (4, 1.15)])
@pytest.mark.parametrize("rewards", REWARDS)
def test_the_noise_is_nearly_that_of_a_perfect_baseline(rewards, n, most):
    assert 0.95 < noise(*REWARDS[rewards], n=n) < most


def test_good_value_predictions_are_used_and_random_ones_are_not():
    good = noise(*BINARY, predict=lambda rng, m: (m - 0.5) / 0.5)
    random = noise(*BINARY, predict=lambda rng, m: rng.normal(size=len(m)))
    without = noise(*BINARY)
    assert good < without - 0.02 and random < without + 0.06


def test_pseudo_counts_are_identified_with_one_rollout_per_prompt():
    """A likelihood of single rollouts could not; the next rollouts of the same prompts can."""
    rng, estimator = np.random.default_rng(0), RewardEstimator(has_value_predictions=False)
    means = rng.beta(2.0, 2.0, 200)  # the global mean 1/2 is worth 4 rollouts
    for _ in range(60):
        sampled = rng.permutation(200)[:64]
        baselines_of_generation(estimator, [str(i) for i in sampled], binary(rng, means[sampled], 1))
    assert estimator.metrics()["value_pseudo_counts"] in (2.0, 4.0, 8.0)
    assert estimator.metrics()["discount"] == 1.0


def test_earlier_rewards_are_discounted_if_prompts_change():
    rng, estimator = np.random.default_rng(0), RewardEstimator(has_value_predictions=False)
    means = rng.random(64)
    for _ in range(60):
        is_changed = rng.random(64) < 0.3
        means[is_changed] = rng.random(is_changed.sum())
        baselines_of_generation(estimator, [str(i) for i in range(64)], binary(rng, means, 1))
    assert estimator.metrics()["discount"] == 0.7


# Changes of the reward function


CHANGE_AT, AFTER = 60, 40  # generations before and after the change
CHANGES = {  # factor of all rewards, and their shift in standard deviations, from the change on
    "none": (1.0, 0.0),
    "/10": (0.1, 0.0),
    "/100": (0.01, 0.0),
    "x100": (100.0, 0.0),
    "shift up": (1.0, 200.0),
    "shift down": (1.0, -200.0),
    "both": (0.01, 2.0),
}
CONFIGURATIONS = {
    "n=1": {"n": 1, "prompts": 48, "rows": 16},
    "n=1, many prompts": {"n": 1, "prompts": 640, "rows": 64},
    "n=4": {"n": 4, "prompts": 64, "rows": 64},
}
FEW_PROMPTS = {"n=1, few prompts": {"n": 1, "prompts": 48, "rows": 6}}


@cache
def simulate_change(change, configuration, seed, has_predictions):
    factor, shift = CHANGES[change]

    def rewards_at(rng, means, n, t):
        rewards = binary(rng, means, n)
        return factor * rewards + 0.5 * shift if t >= CHANGE_AT else rewards  # their standard deviation is about 0.5

    return simulate(
        rewards_at,
        lambda means, t: (factor if t >= CHANGE_AT else 1.0) ** 2 * means * (1 - means),
        steps=CHANGE_AT + AFTER,
        seed=seed,
        predict=(lambda rng, means: (means - 0.5) / 0.5) if has_predictions else None,
        **(CONFIGURATIONS | FEW_PROMPTS)[configuration],
    )


def noise_after_change(change, configuration, start, stop, has_predictions=False):
    """Noise over three seeds, in generations counted from the change."""
    runs = [simulate_change(change, configuration, seed, has_predictions) for seed in range(3)]
    errors, variances = (sum(run[i][CHANGE_AT + start : CHANGE_AT + stop].sum() for run in runs) for i in (0, 1))
    return errors / variances


# The batch mean has 1.42 (1 + Var(p) / E[p(1 − p)], times N / (N − 1)); before the change was handled, the noise was 15 to 3,000
# after a change to smaller rewards, and 2.2 to 7.6 after a shift. Two generations of three seeds have 96 to 384 rewards, so
# that 3 is more than five standard errors above 1.42.
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("change", [change for change in CHANGES if change != "none"])
def test_noise_is_small_again_within_three_generations(change, configuration):
    assert noise_after_change(change, configuration, 3, 5) < 3
    assert noise_after_change(change, configuration, 3, 12) < 2


@pytest.mark.parametrize("change", ["/10", "/100"])
def test_noise_is_small_again_with_few_prompts(change):
    """It was 11 and 1,050 where the comparison with the batch mean began with 8 prompts."""
    assert noise_after_change(change, "n=1, few prompts", 3, 12) < 3


@pytest.mark.parametrize("change", ["/10", "/100", "shift up"])
def test_noise_is_small_again_with_value_predictions(change):
    assert noise_after_change(change, "n=1", 3, 12, has_predictions=True) < 2


@pytest.mark.parametrize("change", ["/10", "/100", "shift up", "both"])
def test_histories_are_learnt_again_after_a_change(change):
    """Two epochs later the noise is below that of the batch mean, 1.42, again: 1.05 to 1.2."""
    assert noise_after_change(change, "n=1", 16, 40) < 1.32


@pytest.mark.parametrize("change", ["shift up", "shift down"])
def test_a_shift_of_all_rewards_adds_no_noise_even_in_its_generation(change):
    assert noise_after_change(change, "n=1", 0, 1) < 2  # it was 43,000
    without = noise_after_change("none", "n=1", 0, 40)
    assert noise_after_change(change, "n=1", 0, 40) == pytest.approx(without, abs=0.03)


@pytest.mark.parametrize(("configuration", "before"), [("n=1", 1.065), ("n=1, many prompts", 1.166), ("n=4", 1.035)])
def test_handling_changes_adds_no_noise_without_a_change(configuration, before):
    """`before` was measured with the same seeds before changes were handled."""
    assert noise_after_change("none", configuration, -50, 40) < before + 0.02


# No influence on its own baseline, and any scale


rewards_of_prompts = st.lists(
    st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=1, max_size=3), min_size=2, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(before=rewards_of_prompts, now=rewards_of_prompts, other=st.floats(-1000, 1000), data=st.data())
def test_a_rollout_has_no_influence_on_its_own_baseline_and_divisor(before, now, other, data):
    """Copies of a prompt have an influence on each other, since they are independent rollouts."""
    i = data.draw(st.integers(0, len(now) - 1))
    j = data.draw(st.integers(0, len(now[i]) - 1))
    keys = data.draw(st.lists(st.sampled_from("ab"), min_size=len(now), max_size=len(now)))
    changed = [list(row) for row in now]
    changed[i][j] = other
    found = []
    for rewards in (now, changed):
        estimator, pools = RewardEstimator(has_value_predictions=False), pools_of(rewards)
        for _ in range(2):
            estimator.observe(estimator.features(list("abcd"[: len(before)])), pools_of(before))
        estimates = estimator.estimate(estimator.features(keys), [0.5] * len(keys))
        estimates = add_batch_information(estimates, keys, pools, shrinkage=estimator.shrinkage)
        baselines = [posterior_baselines(pools[i], estimates[i]), batch_leave_one_out_baselines(pools)[i]]
        stds = [scale.reward_stds(pools)[i] for scale in (estimator.reward_std, RunningRewardStd())]
        found.append([*(of_prompt[j] for of_prompt in baselines), *stds])
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 5.0), (100.0, 0.0), (0.01, -3.0), (7.0, 100.0)])
def test_shifted_and_scaled_rewards_give_the_same_advantages(factor, shift):
    found = []
    for a, c in ((1.0, 0.0), (factor, shift)):
        rng, estimator, advantages = np.random.default_rng(3), RewardEstimator(has_value_predictions=True), []
        means = rng.uniform(0.05, 0.95, 24)
        for _ in range(40):
            sampled = rng.permutation(24)[:8]
            rewards = a * beta(rng, means[sampled], 2) + c
            advantages.append(
                advantages_of_generation(estimator, [str(i) for i in sampled], rewards, means[sampled] - 0.5)
            )
        found.append(np.array(advantages) / np.array([a, 1.0])[:, None, None])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("constant", [0.0, 1.0, -3.3, 1e6])
@pytest.mark.parametrize("n", [1, 4])
def test_constant_rewards_have_no_advantage(constant, n):
    estimator = RewardEstimator(has_value_predictions=True)
    for step in range(30):
        keys, rewards = [str((step * 4 + i) % 7) for i in range(4)], [[constant] * n] * 4
        unscaled, scaled = advantages_of_generation(estimator, keys, rewards, [0.5, -0.5, 1.0, 0.0])
        assert not scaled.any() and np.abs(unscaled).max() <= 1e-9 * max(abs(constant), 1)


@pytest.mark.parametrize("rows", [16, 64])
def test_steps_of_equal_rewards_do_not_dominate_the_update(rows):
    """
    Every prompt at p = 0.02: a standard deviation of the same step would be 0 + 1e-4 in (1 − p)^64 = 27 % of the steps, which
    would have all of the summed squared advantage. Here a failure counts (b/σ)² ≈ p / (1 − p) and a success 1.5², so that these
    steps have less than their share.
    """
    rng, estimator = np.random.default_rng(0), RewardEstimator(has_value_predictions=False)
    of_equal_rewards = total = largest = 0.0
    for _ in range(400):
        keys, rewards = [str(i) for i in rng.integers(0, 200, rows)], binary(rng, np.full(rows, 0.02), 1)
        _, scaled = advantages_of_generation(estimator, keys, rewards)
        total, largest = total + (scaled**2).sum(), max(largest, np.abs(scaled).max())
        of_equal_rewards += (scaled**2).sum() * (not rewards.any())
    assert of_equal_rewards < 0.98**rows * total and largest == LARGEST_DEVIATION


def test_the_estimates_stay_bounded_after_many_generations_of_equal_rewards():
    """The standard deviation, the unit of predictions and errors, would vanish without its lower bound."""
    rng, features = np.random.default_rng(0), torch.randn(100_000, 32, generator=torch.Generator().manual_seed(0))
    estimator, head, largest = RewardEstimator(has_value_predictions=True), RewardHead(32), 0.0
    for step in range(460):
        rows = rng.choice(len(features), 32, replace=False)
        mean = 0.5 if step < 100 else 1.0 if step < 400 else 0.9
        rewards = (rng.random(32) < mean).astype(float)
        predictions = head.predict(features[rows])
        baselines = baselines_of_generation(estimator, [str(row) for row in rows], rewards[:, None], predictions)[:, 0]
        deviations = (rewards - estimator.mean_reward) / estimator.reward_std.std
        head.observe(features[rows], deviations.tolist(), [1] * 32)
        if step >= 400:
            largest = max(largest, np.abs(rewards - baselines).max())
    assert 0.8 < estimator.mean_reward < 1 and largest < 1.5  # it was 21 for both


# State


def test_it_continues_from_its_state_also_amid_a_change_of_the_rewards():
    rng, resumed, misled = np.random.default_rng(0), None, []
    estimator = RewardEstimator(has_value_predictions=True)
    keys, predictions = [str(i) for i in range(16)], np.linspace(-1, 1, 16)
    for step in range(40):
        rewards = binary(rng, np.full(16, 0.5), 1) * (1.0 if step < 10 else 0.01)
        if step == 14:
            assert estimator.is_misled and estimator.reward_std.small_variances
            resumed = RewardEstimator(has_value_predictions=True)
            resumed.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
            resumed.history = dict(estimator.history)
        expected = baselines_of_generation(estimator, keys, rewards, predictions)
        if resumed is not None:
            np.testing.assert_array_equal(baselines_of_generation(resumed, keys, rewards, predictions), expected)
        misled.append(estimator.is_misled)
    assert resumed.state_dict() == estimator.state_dict()
    assert any(misled) and not misled[-1]
    other = RewardEstimator(has_value_predictions=False)  # selects again, and continues with mean and scale
    other.load_state_dict(estimator.state_dict())
    assert not other.selector.errors.any() and other.mean_reward == estimator.mean_reward


def test_rollouts_without_a_reward_change_nothing():
    estimator = RewardEstimator(has_value_predictions=True)
    before = estimator.state_dict()
    estimator.observe(estimator.features(["a"]), [pool_of(math.nan)])
    assert estimator.state_dict() == before and not estimator.history


def test_a_prompt_that_is_twice_in_a_batch_is_discounted_once():
    estimator = RewardEstimator(has_value_predictions=False)
    for _ in range(2):
        observe_generation(estimator, ["a", "a", "b"], [[1.0], [0.0], [1.0]])
    np.testing.assert_allclose(estimator.history["a"][0], 2 * np.array(DECAYS) + 2)
