"""Posterior and batch baselines: unbiased for any estimate, any rewards and any exit condition, by exact enumeration."""

import itertools
import math

import numpy as np
import pytest

from ada_trl.core import (
    BaselineEstimate,
    ExitCondition,
    Pool,
    RewardEstimator,
    Rollout,
    RunningRewardStd,
    add_batch_information,
    baseline_advantages,
    batch_leave_one_out_baselines,
    explained_variance,
    posterior_baselines,
    prompt_weight,
    shift_by_batch_residual,
)
from ada_trl.core.baselines import LARGEST_DEVIATION

from .simulation import pool_of, pools_of, posterior_advantages


NAN = math.nan
ESTIMATES = [
    BaselineEstimate(0.5, 0, 0.5),
    BaselineEstimate(0.3, 4, 0.3),
    BaselineEstimate(-7.0, 2.5, 0.9),
    BaselineEstimate(0.2, math.inf, 0.05),
]
WEIGHTED = list(zip(ESTIMATES, ("none", "inverse_sqrt", "inverse", "inverse_sqrt"), strict=True))
SHAPES = {  # exit condition, samples per round, rounds
    "uniform n=1": (ExitCondition(0), 1, 1),
    "uniform n=3": (ExitCondition(0), 3, 1),
    "seq-pos M=1": (ExitCondition(1), 1, 5),
    "seq-pos M=2": (ExitCondition(1), 2, 3),
    "seq-balance": (ExitCondition(1, 1), 2, 3),
    "seq-balance M=3": (ExitCondition(2, 1), 3, 2),
}
ANSWERS = {  # probability and reward of each answer of a softmax policy; a reward above 0.7 is positive
    "binary": ([0.3, 0.7], [1.0, 0.0]),
    "hard": ([0.05, 0.95], [1.0, 0.0]),
    "real": ([0.2, 0.5, 0.3], [1.5, 0.4, -1.0]),
}


# One prompt, sampled until the exit condition is met


def every_pool(probabilities, rewards, exit_condition, samples_per_round, max_rounds):
    """All pools that sampling can end with, their answers and the probability of each."""
    stack = [((), 1.0)]
    while stack:
        answers, probability = stack.pop()
        for more in itertools.product(range(len(rewards)), repeat=samples_per_round):
            sampled = answers + more
            p = probability * math.prod(probabilities[a] for a in more)
            pool = pool_of(*[rewards[a] for a in sampled])
            if exit_condition(pool) or len(sampled) == samples_per_round * max_rounds:
                yield pool, sampled, p
            else:
                stack.append((sampled, p))


def expectations(answers, shape, to_advantages):
    """E[Σ A_i ∇log π(y_i)] by logit, and E[N], exactly."""
    probabilities, rewards = map(np.array, ANSWERS[answers])
    gradient, num_rollouts = np.zeros(len(rewards)), 0.0
    for pool, sampled, p in every_pool(probabilities, rewards, *SHAPES[shape]):
        for advantage, answer in zip(to_advantages(pool), sampled, strict=True):
            gradient += p * advantage * (np.eye(len(rewards))[answer] - probabilities)
        num_rollouts += p * len(pool)
    return gradient, num_rollouts


def mean_reward_gradient(answers):
    probabilities, rewards = map(np.array, ANSWERS[answers])
    return probabilities * (rewards - probabilities @ rewards)


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("estimate", "weighting"), WEIGHTED, ids=str)
def test_the_expected_gradient_is_the_weight_times_the_rollouts_times_the_gradient(
    answers, shape, estimate, weighting
):
    """Each round is compared with an estimate that includes the rounds before it, as with retries across steps."""
    weight = prompt_weight(estimate.pass_rate, 32, weighting)

    def to_advantages(pool):
        advantages, current, size = [], estimate, SHAPES[shape][1]
        for start in range(0, len(pool), size):
            this_round = Pool(0.7, pool.rollouts[start : start + size])
            advantages += posterior_advantages(this_round, current, weight=weight)
            current = current.updated(this_round.rewards)
        return advantages

    gradient, num_rollouts = expectations(answers, shape, to_advantages)
    np.testing.assert_allclose(gradient, weight * num_rollouts * mean_reward_gradient(answers), rtol=1e-9, atol=1e-12)


def over_all_rounds(pool):
    """Leave-one-out over the whole pool, which contains later rounds that r_i had an influence on."""
    return posterior_advantages(pool, BaselineEstimate(0.3, 4, 0.3))


def including_its_own_reward(pool):
    return [r - pool.mean for r in pool.rewards]


@pytest.mark.parametrize(
    ("shape", "biased"),
    [("seq-pos M=1", over_all_rounds), ("seq-pos M=2", over_all_rounds), ("seq-balance", over_all_rounds)]
    + [("uniform n=3", including_its_own_reward)],
)
def test_the_enumeration_finds_the_bias_of_wrong_baselines(shape, biased):
    gradient, num_rollouts = expectations("binary", shape, biased)
    assert abs(gradient / num_rollouts / mean_reward_gradient("binary") - 1).max() > 0.01


@pytest.mark.parametrize(
    ("rewards", "estimate", "expected"),
    [
        ([1.0, 0.0, 1.0], BaselineEstimate(0.25, 4, 0.25), [(1 + 1) / 6, (1 + 2) / 6, (1 + 1) / 6]),
        ([1.0, 0.0, 0.0, 2.0], BaselineEstimate(9.0, 0, 0.5), [2 / 3, 1, 1, 1 / 3]),  # leave-one-out
        ([1.0, 0.0, 0.0, 2.0], BaselineEstimate(NAN, 0, 0.5), [2 / 3, 1, 1, 1 / 3]),
        ([1.0, 0.0, 0.0, 2.0], BaselineEstimate(9.0, 1e12, 0.5), [9.0] * 4),
        ([1.0, 0.0, 0.0, 2.0], BaselineEstimate(9.0, math.inf, 0.5), [9.0] * 4),
        ([1.0], BaselineEstimate(0.4, 0, 0.4), [0.4]),  # nothing else is known
        ([NAN, 1.0, 0.0], BaselineEstimate(0.5, 2, 0.5), [NAN, 1 / 3, 2 / 3]),
    ],
)
def test_posterior_baselines_by_hand(rewards, estimate, expected):
    pool = pool_of(*rewards)
    found = posterior_baselines(pool, estimate)
    assert found == pytest.approx(expected, nan_ok=True)
    assert posterior_baselines(Pool(0.7, pool.rollouts[::-1]), estimate)[::-1] == pytest.approx(found, nan_ok=True)
    advantages = [0.0 if math.isnan(b) else r - b for r, b in zip(rewards, expected, strict=True)]
    assert posterior_advantages(pool, estimate) == pytest.approx(advantages)


def test_rollouts_without_a_success_reward_but_with_a_reward_have_an_advantage():
    pool = Pool(0.7, [Rollout(0, 1.0, NAN), Rollout(1, 0.0, 0.0), Rollout(2, NAN, 1.0)])
    assert posterior_advantages(pool, BaselineEstimate(0.5, 2, 0.5)) == pytest.approx([2 / 3, -2 / 3, 0.0])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e-9])
def test_equal_rewards_of_a_batch_have_no_advantage(reward):
    """The mean of the others is a sum of rounded numbers, which differs from the reward in most sizes of a batch."""
    for size in range(2, 129):
        pools = [pool_of(reward)] * size
        for pool, baselines in zip(pools, batch_leave_one_out_baselines(pools), strict=True):
            assert baseline_advantages(pool, baselines) == [0.0], size


def test_the_batch_baseline_is_the_mean_of_all_other_rollouts():
    found = batch_leave_one_out_baselines([pool_of(1.0, NAN), pool_of(0.0, 4.0)])
    assert found == [[2.0, pytest.approx(NAN, nan_ok=True)], [2.5, 0.5]]
    assert np.isnan(batch_leave_one_out_baselines([pool_of(1.0, NAN), pool_of(NAN)])[0]).all()


def test_scaled_residuals_are_clipped():
    scale = RunningRewardStd()
    scale.observe([0.0, 1e-6])
    pool = pool_of(1.0, -1.0)
    (std,) = scale.reward_stds([pool])
    advantages = baseline_advantages(pool, [0.0, 0.0], std=std)
    assert advantages == [LARGEST_DEVIATION, -LARGEST_DEVIATION]


def test_explained_variance():
    pools = [pool_of(1.0, 1.0), pool_of(0.0, 0.0)]
    assert explained_variance(pools, [[1.0, 1.0], [0.0, 0.0]]) == pytest.approx(1)
    assert explained_variance(pools, [[0.5, 0.5], [0.5, 0.5]]) == pytest.approx(0)
    assert explained_variance(pools, [[0.0, 0.0], [1.0, 1.0]]) == pytest.approx(-3)
    assert math.isnan(explained_variance(pools[:1], [[1.0, 1.0]]))


# A batch of three prompts


def test_shift_by_batch_residual_by_hand():
    estimates = [BaselineEstimate(0.0, 4, 0.1)] * 3
    pools = [pool_of(1.0), pool_of(0.0, 1.0), pool_of(5.0)]
    means = [estimate.mean for estimate in shift_by_batch_residual(estimates, pools, shrinkage=8)]
    assert means == pytest.approx([6 / (3 + 8), 6 / (2 + 8), 2 / (3 + 8)])
    (alone,) = shift_by_batch_residual(estimates[:1], pools[:1], shrinkage=0)
    assert math.isnan(alone.mean) and alone.pseudo_counts == 0


PROBABILITIES, SIZES = (0.3, 0.8, 0.1), (1, 2, 1)
TRUTH = np.array([size * p * (1 - p) for p, size in zip(PROBABILITIES, SIZES, strict=True)])


def expected_batch_gradient(to_advantages):
    """E[Σ A ∇ log π] by prompt, for binary rewards with PROBABILITIES and SIZES, exactly."""
    gradient = np.zeros(3)
    owners = [x for x, size in enumerate(SIZES) for _ in range(size)]
    for sampled in itertools.product((0.0, 1.0), repeat=len(owners)):
        p = math.prod(PROBABILITIES[x] if y else 1 - PROBABILITIES[x] for x, y in zip(owners, sampled, strict=True))
        values = iter(sampled)
        rewards = [[next(values) for _ in range(size)] for size in SIZES]
        for x, own in enumerate(to_advantages(rewards)):
            gradient[x] += p * sum(a * (y - PROBABILITIES[x]) for a, y in zip(own, rewards[x], strict=True))
    return gradient


def batch_advantages(baselines, pools, stds=(None, None, None)):
    return [baseline_advantages(pool, b, std=std) for pool, b, std in zip(pools, baselines, stds, strict=True)]


def posterior_baselines_of(estimates, pools):
    return [posterior_baselines(pool, estimate) for pool, estimate in zip(pools, estimates, strict=True)]


def estimated(generations):
    """Estimates after some generations of two rollouts per prompt."""
    estimator, rng = RewardEstimator(has_value_predictions=False), np.random.default_rng(0)
    for _ in range(generations):
        rewards = (rng.random((3, 2)) < np.array(PROBABILITIES)[:, None]).astype(float)
        estimator.observe(estimator.features("abc"), pools_of(rewards))
    return estimator.estimate(estimator.features("abc"), [0.5] * 3)


@pytest.mark.parametrize(
    "compute_estimates",
    [
        None,
        lambda pools: add_batch_information(estimated(0), "abc", pools, shrinkage=0.0),
        lambda pools: add_batch_information(estimated(5), "abc", pools, shrinkage=16.0),
        lambda pools: add_batch_information([BaselineEstimate(0.2, 3.0, 0.5)] * 3, "aab", pools, shrinkage=4.0),
    ],
    ids=["batch", "first generation", "estimator", "copies of a prompt"],
)
def test_the_expected_gradient_of_a_batch_is_that_of_the_mean_reward(compute_estimates):
    def to_advantages(rewards):
        pools = pools_of(rewards)
        if compute_estimates is None:
            return batch_advantages(batch_leave_one_out_baselines(pools), pools)
        return batch_advantages(posterior_baselines_of(compute_estimates(pools), pools), pools)

    np.testing.assert_allclose(expected_batch_gradient(to_advantages), TRUTH, rtol=1e-12)


def clipped_reward_change(rewards, reward_stds):
    """
    For each rollout y · (f(1) − f(0)), where f(r) is (r − b) / σ clipped, b the mean of all other rollouts and σ known without
    its prompt: as b and σ are independent of y, E[y (y − p) (f(1) − f(0))] is E[f(1) − f(0)] · p (1 − p).
    """
    found = []
    for x, (own, std) in enumerate(zip(rewards, reward_stds(pools_of(rewards)), strict=True)):
        others = [r for y, row in enumerate(rewards) if y != x for r in row]
        found.append([])
        for i, y in enumerate(own):
            b = np.mean(others + own[:i] + own[i + 1 :])
            f = [np.clip((r - b) / std, -LARGEST_DEVIATION, LARGEST_DEVIATION) if std else 0.0 for r in (0.0, 1.0)]
            found[-1].append(y * (f[1] - f[0]))
    return found


@pytest.mark.parametrize("earlier", [[], [0.0, 1.0, 1.0, 1.0], [-2.0, 3.0]], ids=["first", "as large", "larger"])
def test_scaled_advantages_follow_the_gradient_of_the_clipped_reward(earlier):
    """In the first generation σ is that of the other prompts, later of earlier ones; with a large one nothing is clipped."""
    scale = RunningRewardStd()
    if earlier:
        scale.observe(earlier)

    def to_advantages(rewards):
        pools = pools_of(rewards)
        return batch_advantages(batch_leave_one_out_baselines(pools), pools, scale.reward_stds(pools))

    expected = expected_batch_gradient(lambda rewards: clipped_reward_change(rewards, scale.reward_stds))
    np.testing.assert_allclose(expected_batch_gradient(to_advantages), expected, rtol=1e-12)
    if earlier == [-2.0, 3.0]:
        np.testing.assert_allclose(expected, TRUTH / scale.std, rtol=1e-12)


def batch_mean_including_the_reward(rewards):
    mean = sum(map(sum, rewards)) / sum(SIZES)
    return [[r - mean for r in own] for own in rewards]


def std_including_the_reward(rewards):
    pools, std = pools_of(rewards), float(np.std(np.concatenate(rewards)))
    return batch_advantages(batch_leave_one_out_baselines(pools), pools, [std] * 3)


def test_the_enumeration_finds_the_bias_of_wrong_batch_statistics():
    assert abs(expected_batch_gradient(batch_mean_including_the_reward) / TRUTH - 1).max() > 0.2
    weights = expected_batch_gradient(std_including_the_reward) / TRUTH
    assert weights.max() / weights.min() > 1.005  # prompts are weighted differently


# The running standard deviation


@pytest.mark.parametrize("outlier_at", [0, 20])
def test_one_outlier_is_forgotten(outlier_at):
    """One reward of 100 among 16 left σ at 2.41 instead of 0.48 for the rest of the run."""
    rng, scale = np.random.default_rng(0), RunningRewardStd()
    for step in range(80):
        rewards = (rng.random(16) < 0.35).astype(float)
        if step == outlier_at:
            rewards[0] = 100.0
        scale.observe(rewards)
        if step >= outlier_at + 12:
            assert 0.4 < scale.std < 0.6


def test_an_outlier_is_forgotten_although_most_generations_have_equal_rewards():
    """Their variance of 0 lowers the running mean below that of the others, so that only its bound remembers the outlier."""
    rng, scale = np.random.default_rng(0), RunningRewardStd()
    scale.observe([100.0] + [0.0] * 15)
    for _ in range(250):
        scale.observe((rng.random(16) < 0.005).astype(float))
    assert scale.std < 0.2  # of a true 0.07


def test_a_smaller_scale_is_followed_and_a_varying_one_is_averaged():
    rng, scale = np.random.default_rng(0), RunningRewardStd()
    for step in range(40):
        scale.observe(rng.normal(size=16) * (1.0 if step < 20 else 0.01))
    assert scale.std == pytest.approx(0.01, rel=0.2)
    # Rewards differ in every third generation only, as with easy prompts and a length penalty.
    varying = RunningRewardStd()
    restarts = [varying.observe(rng.normal(size=16) * (1.0 if step % 3 == 0 else 0.001)) for step in range(400)]
    assert not any(restarts) and varying.std > 0.4


def test_equal_rewards_neither_restart_the_mean_nor_lower_its_bound():
    scale = RunningRewardStd()
    scale.observe([0.0, 1.0])
    for _ in range(500):
        scale.observe([1.0] * 8)
    assert scale.std == pytest.approx(0.05)  # a tenth of the largest, 0.5
