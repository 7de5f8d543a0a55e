"""What prompts are expected to earn: for any rewards, without a look at what is compared, and as good as it should be."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ada_trl.core import (
    BaselineEstimate,
    JointPassRate,
    Pool,
    RewardEstimator,
    Rollout,
    RunningRewardStd,
    add_batch_information,
    batch_leave_one_out_baseline,
    posterior_advantages,
    posterior_baselines,
    shift_by_batch_residual,
)
from ada_trl.core.baselines import LARGEST_DEVIATION
from ada_trl.core.empirical_bayes import DECAYS, PSEUDO_COUNTS, SHRINKAGE_COUNTS, VALUE_WEIGHTS
from ada_trl.core.pass_rate_ema import PromptCounts
from ada_trl.pass_rates.value_head import RewardHead


def pools_of(rewards):
    return [Pool(0.7, (Rollout(i, r, r) for i, r in enumerate(row))) for row in rewards]


def compared(belief, keys, rewards, guesses=None):
    """What a generation is compared with, `(P, n)`, and what is learnt from it."""
    pools, expectation = pools_of(rewards), belief.features(keys, guesses)
    priors = add_batch_information(
        belief.estimate(expectation, [0.5] * len(keys)), keys, pools, shrinkage=belief.shrinkage
    )
    belief.observe(expectation, pools)
    return np.array([posterior_baselines(p, q) for p, q in zip(pools, priors, strict=True)])


# The formula


def test_by_hand():
    belief = RewardEstimator(has_value_predictions=True)
    assert compared(belief, ["a", "b"], [[3.0], [1.0]]).tolist() == [[1.0], [3.0]]  # the other prompt, and that is all
    assert belief.mean_reward == 2.0 and belief.reward_std.std == 1.0
    s, discount, share = PSEUDO_COUNTS[0], DECAYS[0], VALUE_WEIGHTS[0]
    residual = 3.0 - 1.0  # of the first prompt against the level that the other one shows
    first, new = belief.estimate(belief.features(["a", "c"], [0.5, -1.0]), [0.1, 0.2])
    assert first == BaselineEstimate(pytest.approx(2.0 + (s * share * 0.5 + residual) / (s + 1)), s + 1, 0.1)
    assert new == BaselineEstimate(pytest.approx(2.0 - share), s, 0.2)
    compared(belief, ["a"], [[5.0, 5.0]])
    draws, residuals = belief.history["a"][:, DECAYS.index(discount)]
    assert draws == pytest.approx(discount * 1 + 2)
    assert residuals == pytest.approx(
        discount * residual + 2 * 5.0 - 2 * 2.0
    )  # nobody else is there to move the level


def test_the_head_alone_remembers_nothing_and_counts_alone_guess_nothing():
    forgetful, blind = (
        RewardEstimator(has_value_predictions=True, use_history=False),
        RewardEstimator(has_value_predictions=False),
    )
    for belief in (forgetful, blind):
        for _ in range(3):
            compared(belief, ["a", "b"], [[1.0], [0.0]])
    (prior,) = forgetful.estimate(forgetful.features(["a"], [0.0]), [0.5])
    assert prior.mean == forgetful.mean_reward and prior.pseudo_counts == PSEUDO_COUNTS[0] and not forgetful.history
    with_guess, without = (blind.estimate(blind.features(["a"], guess), [0.5]) for guess in ([9.0], None))
    assert with_guess == without and without[0].mean > blind.mean_reward


@pytest.mark.parametrize("strength", [1.0, 4.0])
def test_of_two_valued_rewards_it_is_the_mean_of_a_beta_posterior(strength):
    """A guess h worth s rollouts, k of n positive: Beta(s h + k, s (1 − h) + n − k)."""
    h, k, n = 0.3, 5, 8
    belief = RewardEstimator(has_value_predictions=True)
    belief.mean_reward, belief.reward_std.variance = 0.4, 0.24
    belief.selector.errors[:] = 1
    belief.selector.errors[VALUE_WEIGHTS.index(1.0), DECAYS.index(1.0), PSEUDO_COUNTS.index(strength), 0] = 0
    belief.history["a"] = np.array([[n] * len(DECAYS), [k - 0.4 * n] * len(DECAYS)])
    (prior,) = belief.estimate(belief.features(["a"], [(h - 0.4) / math.sqrt(0.24)]), [0.5])
    assert prior.mean == pytest.approx((strength * h + k) / (strength + n)) and prior.pseudo_counts == strength + n


# How good it is: the noise E(r − b)² / Var(r | x) of 48 prompts, 16 rows per step; 1 is perfect.


def beta_rewards(rng, means, n):
    return rng.beta(4 * means[:, None], 4 * (1 - means[:, None]), (len(means), n))


def coins(rng, means, n):
    return (rng.random((len(means), n)) < means[:, None]).astype(float)


SETTINGS = {  # how rewards are drawn at step t, and their variance given the mean
    "0 and 1": (lambda rng, m, n, t: coins(rng, m, n), lambda m: m * (1 - m)),
    "0 to 0.7": (lambda rng, m, n, t: 0.7 * beta_rewards(rng, m, n), lambda m: 0.49 * m * (1 - m) / 5),
    "1 to 100": (lambda rng, m, n, t: 1 + 99 * beta_rewards(rng, m, n), lambda m: 99**2 * m * (1 - m) / 5),
    "-5 to 0": (lambda rng, m, n, t: 5 * beta_rewards(rng, m, n) - 5, lambda m: 25 * m * (1 - m) / 5),
    "a drift": (lambda rng, m, n, t: coins(rng, m, n) - 0.05 * t, lambda m: m * (1 - m)),
}


def noise(draw, variance, n, guess=None, seed=0, steps=300, rows=16, prompts=48):
    rng = np.random.default_rng(seed)
    means, belief, order = (
        rng.uniform(0.05, 0.95, prompts),
        RewardEstimator(has_value_predictions=guess is not None),
        [],
    )
    squares = expected = 0.0
    for t in range(steps):
        if len(order) < rows // n:
            order = list(rng.permutation(prompts))
        asked = np.array([order.pop() for _ in range(rows // n)])
        rewards = draw(rng, means[asked], n, t)
        guesses = None if guess is None else guess(rng, means[asked])
        baselines = compared(belief, [str(i) for i in asked], rewards, guesses)
        squares += ((rewards - baselines) ** 2).sum()
        expected += n * variance(means[asked]).sum()
    return squares / expected


# One seed scatters by about .01 (4,800 rewards, of which the excess over 1 is a tenth): the bounds are ten deviations away.
@pytest.mark.parametrize(("n", "most"), [(1, 1.2), (4, 1.15)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_noise_is_nearly_that_of_a_perfect_baseline(setting, n, most):
    assert 0.95 < noise(*SETTINGS[setting], n) < most


def test_the_bounds_tell_a_worse_baseline():
    """The mean of all other rollouts of the step has three times as much, where rewards scatter little within a prompt."""
    draw, variance = SETTINGS["1 to 100"]
    rng = np.random.default_rng(0)
    means = rng.uniform(0.05, 0.95, 48)
    squares = expected = 0.0
    for _ in range(300):
        asked = rng.choice(48, 16, replace=False)
        rewards = draw(rng, means[asked], 1, 0)
        others = (rewards.sum() - rewards) / 15
        squares, expected = squares + ((rewards - others) ** 2).sum(), expected + variance(means[asked]).sum()
    assert squares / expected > 2.5


def test_a_guess_that_is_noise_is_not_believed_and_one_that_knows_is():
    draw, variance = SETTINGS["0 and 1"]
    knows = noise(draw, variance, 1, lambda rng, m: (m - 0.5) / 0.5)
    noisy = noise(draw, variance, 1, lambda rng, m: rng.normal(size=len(m)))
    nothing = noise(draw, variance, 1)
    assert knows < nothing - 0.02 and noisy < nothing + 0.06


def test_what_a_guess_is_worth_is_found_with_one_rollout_per_prompt():
    """A likelihood of single draws could not tell; the next draws of the same prompts can."""
    rng, belief = np.random.default_rng(0), RewardEstimator(has_value_predictions=False)
    means = rng.beta(2.0, 2.0, 200)  # around a level of 1/2, worth 4 rollouts
    for _ in range(60):
        asked = rng.permutation(200)[:64]
        compared(belief, [str(i) for i in asked], coins(rng, means[asked], 1))
    assert belief.metrics()["value_pseudo_counts"] in (2.0, 4.0, 8.0)
    assert belief.metrics()["discount"] == 1.0


def test_old_rewards_are_forgotten_where_prompts_change():
    rng, belief = np.random.default_rng(0), RewardEstimator(has_value_predictions=False)
    means = rng.random(64)
    for _ in range(60):
        moving = rng.random(64) < 0.3
        means[moving] = rng.random(moving.sum())
        compared(belief, [str(i) for i in range(64)], coins(rng, means, 1))
    assert belief.metrics()["discount"] == 0.7


# What it must not see


rewards_of_prompts = st.lists(
    st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=1, max_size=3), min_size=2, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(before=rewards_of_prompts, now=rewards_of_prompts, other=st.floats(-1000, 1000), data=st.data())
def test_a_rollout_has_no_influence_on_its_own_baseline(before, now, other, data):
    """Nor on what it is divided by. Duplicates inform each other, and that is allowed: they are other draws."""
    i = data.draw(st.integers(0, len(now) - 1))
    j = data.draw(st.integers(0, len(now[i]) - 1))
    keys = data.draw(st.lists(st.sampled_from("ab"), min_size=len(now), max_size=len(now)))
    changed = [list(row) for row in now]
    changed[i][j] = other
    found = []
    for rewards in (now, changed):
        belief = RewardEstimator(has_value_predictions=False)
        for _ in range(2):
            learn(belief, "abcd"[: len(before)], before)
        pools = pools_of(rewards)
        priors = belief.estimate(belief.features(keys), [0.5] * len(keys))
        priors = add_batch_information(priors, keys, pools, shrinkage=belief.shrinkage)
        baseline = posterior_baselines(pools[i], priors[i])[j]
        of_batch = posterior_baselines(pools[i], batch_leave_one_out_baseline(pools, [0.5] * len(keys))[i])[j]
        scale = [fresh.reward_stds(pools)[i] for fresh in (belief.reward_std, RunningRewardStd())]
        found.append([baseline, of_batch, *scale])
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-9, nan_ok=True)


def learn(belief, keys, rewards):
    belief.observe(belief.features(list(keys)), pools_of(rewards))


def test_recentred_by_hand():
    priors = [BaselineEstimate(0.0, 4, 0.1)] * 3
    pools = pools_of([[1.0], [0.0, 1.0], [5.0]])
    means = [prior.mean for prior in shift_by_batch_residual(priors, pools, shrinkage=8)]
    assert means == pytest.approx([6 / (3 + 8), 6 / (2 + 8), 2 / (3 + 8)])
    (alone,) = shift_by_batch_residual(priors[:1], pools[:1], shrinkage=0)
    assert math.isnan(alone.mean) and alone.pseudo_counts == 0


# Unbiased, by enumeration of all outcomes of a generation


PROBABILITIES, SIZES = (0.3, 0.8, 0.1), (1, 2, 1)


def expected_gradient(to_advantages):
    """E[Σ A ∇ log π] by prompt, of coins with PROBABILITIES drawn SIZES times each, exactly."""
    gradient = np.zeros(3)
    owners = [x for x, size in enumerate(SIZES) for _ in range(size)]
    for drawn in itertools.product((0.0, 1.0), repeat=len(owners)):
        p = math.prod(PROBABILITIES[x] if y else 1 - PROBABILITIES[x] for x, y in zip(owners, drawn, strict=True))
        values, rewards = iter(drawn), []
        for size in SIZES:
            rewards.append([next(values) for _ in range(size)])
        for x, own in enumerate(to_advantages(rewards)):
            gradient[x] += p * sum(a * (y - PROBABILITIES[x]) for a, y in zip(own, rewards[x], strict=True))
    return gradient


def against(priors, pools, stds=None):
    stds = stds or [None] * len(pools)
    return [posterior_advantages(pool, prior, std=std) for pool, prior, std in zip(pools, priors, stds, strict=True)]


TRUTH = np.array([size * p * (1 - p) for p, size in zip(PROBABILITIES, SIZES, strict=True)])


def trained_belief():
    belief, rng = RewardEstimator(has_value_predictions=False), np.random.default_rng(0)
    for _ in range(5):
        learn(belief, "abc", coins(rng, np.array(PROBABILITIES), 2))
    return belief


BASELINES = {
    "batch": lambda pools: batch_leave_one_out_baseline(pools, [0.5] * 3),
    "first generation": lambda pools: add_batch_information(
        RewardEstimator(has_value_predictions=False).estimate(
            RewardEstimator(has_value_predictions=False).features("abc"), [0.5] * 3
        ),
        "abc",
        pools,
        shrinkage=0.0,
    ),
    "belief": lambda pools: add_batch_information(
        trained_belief().estimate(trained_belief().features("abc"), [0.5] * 3), "abc", pools, shrinkage=16.0
    ),
    "copies": lambda pools: add_batch_information([BaselineEstimate(0.2, 3.0, 0.5)] * 3, "aab", pools, shrinkage=4.0),
}


@pytest.mark.parametrize("name", BASELINES)
def test_the_expected_gradient_is_that_of_the_mean_reward(name):
    found = expected_gradient(lambda rewards: against(BASELINES[name](pools_of(rewards)), pools_of(rewards)))
    np.testing.assert_allclose(found, TRUTH, rtol=1e-12)


def test_a_batch_mean_that_contains_the_reward_would_be_biased():
    def leaking(rewards):
        mean = sum(map(sum, rewards)) / sum(SIZES)
        return [[r - mean for r in own] for own in rewards]

    assert abs(expected_gradient(leaking) / TRUTH - 1).max() > 0.2


def utility(rewards, known):
    """
    For each rollout y · (f(1) − f(0)), where f(r) is (r − b) / σ cut off, b the mean of all other rollouts and σ what is known
    without its prompt: as b and σ are independent of y, E[y (y − p) (f(1) − f(0))] is E[f(1) − f(0)] · p (1 − p).
    """
    pools, found = pools_of(rewards), []
    for x, (own, std) in enumerate(zip(rewards, known(pools), strict=True)):
        others = [r for y, row in enumerate(rewards) if y != x for r in row]
        weights = []
        for i in range(len(own)):
            b = np.mean(others + own[:i] + own[i + 1 :])
            cut = [np.clip((r - b) / std, -LARGEST_DEVIATION, LARGEST_DEVIATION) if std else 0.0 for r in (0.0, 1.0)]
            weights.append(cut[1] - cut[0])
        found.append([y * weight for y, weight in zip(own, weights, strict=True)])
    return found


@pytest.mark.parametrize("seen", [[], [0.0, 1.0, 1.0, 1.0], [-2.0, 3.0]], ids=["first", "as large", "larger"])
def test_scaled_advantages_follow_the_gradient_of_the_cut_reward(seen):
    """In the first generation σ is that of the other prompts, later of earlier ones; with a large one nothing is cut off."""
    scale = RunningRewardStd()
    if seen:
        scale.observe(seen)

    def scaled(rewards):
        pools = pools_of(rewards)
        return against(batch_leave_one_out_baseline(pools, [0.5] * 3), pools, scale.reward_stds(pools))

    expected = expected_gradient(lambda rewards: utility(rewards, scale.reward_stds))
    np.testing.assert_allclose(expected_gradient(scaled), expected, rtol=1e-12)
    if seen == [-2.0, 3.0]:
        np.testing.assert_allclose(expected, TRUTH / scale.std, rtol=1e-12)


def test_a_deviation_that_contains_the_reward_would_weigh_prompts_differently():
    def leaking(rewards):
        pools = pools_of(rewards)
        std = float(np.std(np.concatenate(rewards)))
        return against(batch_leave_one_out_baseline(pools, [0.5] * 3), pools, [std] * 3)

    weights = expected_gradient(leaking) / TRUTH
    assert weights.max() / weights.min() > 1.005  # of exact expectations


# Any scale


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 5.0), (100.0, 0.0), (0.01, -3.0), (7.0, 100.0)])
@pytest.mark.parametrize("scaled", [False, True])
def test_shifted_and_scaled_rewards_give_the_same_advantages(factor, shift, scaled):
    found = {}
    for a, c in ((1.0, 0.0), (factor, shift)):
        rng, belief, advantages = np.random.default_rng(3), RewardEstimator(has_value_predictions=True), []
        means = rng.uniform(0.05, 0.95, 24)
        for _ in range(40):
            asked = rng.permutation(24)[:8]
            pools = pools_of(a * beta_rewards(rng, means[asked], 2) + c)
            keys = [str(i) for i in asked]
            expectation = belief.features(keys, means[asked] - 0.5)
            priors = belief.estimate(expectation, [0.5] * 8)
            priors = add_batch_information(priors, keys, pools, shrinkage=belief.shrinkage)
            stds = belief.reward_std.reward_stds(pools) if scaled else None
            advantages += [against(priors, pools, stds)]
            belief.observe(expectation, pools)
        found[a, c] = np.array(advantages) / (1.0 if scaled else a)
    np.testing.assert_allclose(found[factor, shift], found[1.0, 0.0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("constant", [0.0, 1.0, -3.3, 1e6])
@pytest.mark.parametrize("n", [1, 4])
def test_constant_rewards_teach_nothing_at_all(constant, n):
    belief = RewardEstimator(has_value_predictions=True)
    for step in range(30):
        keys = [str((step * 4 + i) % 7) for i in range(4)]
        pools = pools_of([[constant] * n] * 4)
        expectation = belief.features(keys, [0.5, -0.5, 1.0, 0.0])
        priors = add_batch_information(
            belief.estimate(expectation, [0.5] * 4), keys, pools, shrinkage=belief.shrinkage
        )
        for baseline in ("posterior", "batch"):
            priors = priors if baseline == "posterior" else batch_leave_one_out_baseline(pools, [0.5] * 4)
            assert not np.any(against(priors, pools, belief.reward_std.reward_stds(pools)))
            assert np.abs(against(priors, pools)).max() <= 1e-9 * max(abs(constant), 1)
        belief.observe(expectation, pools)


@pytest.mark.parametrize("rows", [16, 64])
def test_steps_without_contrast_hold_no_share_of_the_update(rows):
    """
    Every prompt at p = 0.02: a deviation of the same step would be 0 + 1e-4 in (1 − p)^64 = 27 % of the steps, and those would
    hold all of the summed squared advantage. Here a failure counts (b/σ)² ≈ p / (1 − p) and a success 1.5², so those steps hold less
    than their share.
    """
    rng, belief, silent, total, largest = (
        np.random.default_rng(0),
        RewardEstimator(has_value_predictions=False),
        0.0,
        0.0,
        0.0,
    )
    share = 0.98**rows
    for _ in range(400):
        keys, pools = [str(i) for i in rng.integers(0, 200, rows)], pools_of(coins(rng, np.full(rows, 0.02), 1))
        expectation = belief.features(keys)
        priors = add_batch_information(
            belief.estimate(expectation, [0.5] * rows), keys, pools, shrinkage=belief.shrinkage
        )
        values = np.array(against(priors, pools, belief.reward_std.reward_stds(pools)))
        belief.observe(expectation, pools)
        total, largest = total + (values**2).sum(), max(largest, np.abs(values).max())
        silent += (values**2).sum() * (not any(pool.positives for pool in pools))
    assert silent < share * total and largest == LARGEST_DEVIATION


def test_a_long_time_without_contrast_breaks_neither_level_nor_head():
    """The deviation that guesses and errors are measured in would vanish with it, were it not for its bound."""
    rng, features = np.random.default_rng(0), torch.randn(100_000, 32, generator=torch.Generator().manual_seed(0))
    belief, head, largest = RewardEstimator(has_value_predictions=True), RewardHead(32), 0.0
    for step in range(460):
        rows = rng.choice(len(features), 32, replace=False)
        mean = 0.5 if step < 100 else 1.0 if step < 400 else 0.9
        rewards = (rng.random(32) < mean).astype(float)
        guesses = head.predict(features[rows])
        baselines = compared(belief, [str(row) for row in rows], rewards[:, None], guesses)[:, 0]
        deviations = (rewards - belief.mean_reward) / belief.reward_std.std
        head.observe(features[rows], deviations.tolist(), [1] * 32)
        if step >= 400:
            largest = max(largest, np.abs(rewards - baselines).max())
    assert 0.8 < belief.mean_reward < 1 and largest < 1.5  # it was 21 for both


def test_what_lies_far_outside_of_everything_seen_is_cut_off():
    scale = RunningRewardStd()
    scale.observe([0.0, 1e-6])
    pool = Pool(0.7, [Rollout(0, 1.0, 1.0), Rollout(1, -1.0, -1.0)])
    (std,) = scale.reward_stds([pool])
    assert posterior_advantages(pool, BaselineEstimate(0.0, 1e9, 0.5), std=std) == [
        LARGEST_DEVIATION,
        -LARGEST_DEVIATION,
    ]


def test_rewards_without_a_signal_are_compared_too():
    pool = Pool(0.7, [Rollout(0, 1.0, math.nan), Rollout(1, 0.0, 0.0), Rollout(2, math.nan, 1.0)])
    assert posterior_advantages(pool, BaselineEstimate(0.5, 2, 0.5)) == pytest.approx([2 / 3, -2 / 3, 0.0])
    belief = RewardEstimator(has_value_predictions=False)
    learn(belief, "a", [[1.0]])
    belief.observe(belief.features(["a"]), [pool])
    assert belief.history["a"][0, 0] == pytest.approx(DECAYS[0] + 2)


# State


def test_it_continues_from_its_state():
    def generations(seed):
        rng = np.random.default_rng(seed)
        return [(list("abcd"), beta_rewards(rng, np.array([0.1, 0.4, 0.6, 0.9]), 2)) for _ in range(8)]

    whole, half = RewardEstimator(has_value_predictions=True), RewardEstimator(has_value_predictions=True)
    for keys, rewards in generations(0):
        compared(whole, keys, rewards, [0.1, 0.0, -0.1, 0.2])
        compared(half, keys, rewards, [0.1, 0.0, -0.1, 0.2])
    resumed = RewardEstimator(has_value_predictions=True)
    resumed.load_state_dict(half.state_dict())
    resumed.history = half.history
    for keys, rewards in generations(1):
        np.testing.assert_array_equal(compared(whole, keys, rewards), compared(resumed, keys, rewards))
    assert whole.state_dict() == resumed.state_dict()
    other = RewardEstimator(has_value_predictions=False)  # which chooses anew, and goes on with level and scale
    other.load_state_dict(half.state_dict())
    assert not other.selector.errors.any() and other.mean_reward == half.mean_reward


def test_nothing_scored_teaches_nothing():
    belief = RewardEstimator(has_value_predictions=True)
    before = belief.state_dict()
    belief.observe(belief.features(["a"]), [Pool(0.7, [Rollout(0, math.nan, math.nan)])])
    assert belief.state_dict() == before and not belief.history


@pytest.mark.parametrize("number", [len(VALUE_WEIGHTS), len(DECAYS), len(PSEUDO_COUNTS), len(SHRINKAGE_COUNTS)])
def test_candidates_can_differ(number):
    assert number > 1


# Pass rates


@pytest.mark.parametrize("true_strength", [1.0, 4.0, 16.0])
def test_what_a_guess_of_a_pass_rate_is_worth_is_found(true_strength):
    rng = np.random.default_rng(0)
    guess = rng.uniform(0.1, 0.9, 20_000)
    p = rng.beta(true_strength * guess, true_strength * (1 - guess))
    counts = [PromptCounts(6.0, float(k)) for k in rng.binomial(6, p)]
    strength = JointPassRate()
    assert strength.pseudo_counts == 4.0
    strength.observe(guess, counts, rng.binomial(4, p), np.full(20_000, 4))
    assert (
        strength.pseudo_counts == true_strength
    )  # the next candidate is several standard errors of the difference behind
    resumed = JointPassRate()
    resumed.load_state_dict(strength.state_dict())
    assert resumed.pseudo_counts == true_strength
