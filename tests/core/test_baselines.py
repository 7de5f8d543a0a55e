"""The batch baseline: unbiased with any rewards, also with retries across steps, by exact enumeration."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ada_trl.core import ExitCondition, RunningRewardStd, baseline_advantages, batch_leave_one_out_baselines
from ada_trl.core.baselines import LARGEST_DEVIATION

from .simulation import pool_of, pools_of


NAN = math.nan


# Retries across steps: one prompt is sampled until the exit condition is met, in each step beside other prompts


def answers_of_steps(p, exit_condition, per_step, max_steps):
    """Each sequence of steps that sampling can end with, as rewards by step, and its probability."""
    stack = [((), 1.0)]
    while stack:
        steps, probability = stack.pop()
        for rewards in itertools.product((0.0, 1.0), repeat=per_step):
            more, q = (*steps, rewards), probability * math.prod(p if r else 1 - p for r in rewards)
            if exit_condition(pool_of(*itertools.chain(*more))) or len(more) == max_steps:
                yield more, q
            else:
                stack.append((more, q))


def expected_gradient(p, other, shape, to_advantages):
    """E[Σ A ∇ log π] of the prompt over its steps and E[N], exactly; the other prompt of each step has pass rate `other`."""
    gradient = num_rollouts = 0.0
    for steps, probability in answers_of_steps(p, *shape):
        num_rollouts += probability * sum(map(len, steps))
        for others in itertools.product((0.0, 1.0), repeat=len(steps)):
            q = probability * math.prod(other if r else 1 - other for r in others)
            for advantages, rewards in zip(to_advantages(steps, others), steps, strict=True):
                gradient += q * sum(a * (r - p) for a, r in zip(advantages, rewards, strict=True))
    return gradient, num_rollouts


def batch_of_each_step(steps, others):
    return [advantages_of([[*rewards], [other]])[0] for rewards, other in zip(steps, others, strict=True)]


def mean_of_all_steps(steps, others):
    """The mean over the whole history, which contains later steps that r_i had an influence on."""
    everything = [*itertools.chain(*steps), *others]
    means = [[(sum(everything) - r) / (len(everything) - 1) for r in rewards] for rewards in steps]
    return [[r - m for r, m in zip(*pair, strict=True)] for pair in zip(steps, means, strict=True)]


def advantages_of(rewards, stds=None):
    pools = pools_of(rewards)
    baselines = batch_leave_one_out_baselines(pools)
    stds = [None] * len(pools) if stds is None else stds
    return [baseline_advantages(pool, b, std=std) for pool, b, std in zip(pools, baselines, stds, strict=True)]


RETRIES = {  # exit condition, rollouts per step, steps
    "uniform": (ExitCondition(0), 2, 1),
    "seq-pos n=1": (ExitCondition(1), 1, 4),
    "seq-pos n=2": (ExitCondition(1), 2, 3),
    "seq-balance": (ExitCondition(1, 1), 1, 4),
}


@pytest.mark.parametrize("shape", RETRIES)
@pytest.mark.parametrize(("p", "other"), [(0.3, 0.7), (0.05, 0.5)])
def test_the_expected_gradient_of_a_retried_prompt_is_the_number_of_rollouts_times_the_gradient(p, other, shape):
    gradient, num_rollouts = expected_gradient(p, other, RETRIES[shape], batch_of_each_step)
    assert gradient == pytest.approx(num_rollouts * p * (1 - p), rel=1e-12)
    if shape != "uniform":
        biased, _ = expected_gradient(p, other, RETRIES[shape], mean_of_all_steps)
        assert abs(biased / gradient - 1) > 0.01, "The enumeration does not find a wrong baseline."


# By hand


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


# A batch of three prompts


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


def test_the_expected_gradient_of_a_batch_is_that_of_the_mean_reward():
    np.testing.assert_allclose(expected_batch_gradient(advantages_of), TRUTH, rtol=1e-12)


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
        return advantages_of(rewards, scale.reward_stds(pools_of(rewards)))

    expected = expected_batch_gradient(lambda rewards: clipped_reward_change(rewards, scale.reward_stds))
    np.testing.assert_allclose(expected_batch_gradient(to_advantages), expected, rtol=1e-12)
    if earlier == [-2.0, 3.0]:
        np.testing.assert_allclose(expected, TRUTH / scale.std, rtol=1e-12)


def batch_mean_including_the_reward(rewards):
    mean = sum(map(sum, rewards)) / sum(SIZES)
    return [[r - mean for r in own] for own in rewards]


def std_including_the_reward(rewards):
    return advantages_of(rewards, [float(np.std(np.concatenate(rewards)))] * 3)


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


# Any rewards


REWARDS = st.lists(
    st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=1, max_size=3), min_size=2, max_size=4
)


def scale_after(*batches):
    scale = RunningRewardStd()
    for rewards in batches:
        scale.observe(list(itertools.chain(*rewards)))
    return scale


@settings(max_examples=100, deadline=None)
@given(before=REWARDS, now=REWARDS, other=st.floats(-1000, 1000), data=st.data())
def test_a_rollout_has_no_influence_on_its_own_baseline_and_divisor(before, now, other, data):
    i = data.draw(st.integers(0, len(now) - 1))
    j = data.draw(st.integers(0, len(now[i]) - 1))
    changed = [list(row) for row in now]
    changed[i][j] = other
    found = []
    for rewards in (now, changed):
        pools = pools_of(rewards)
        stds = [scale.reward_stds(pools)[i] for scale in (scale_after(), scale_after(before))]
        found.append([batch_leave_one_out_baselines(pools)[i][j], *stds])
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 5.0), (100.0, 0.0), (0.01, -3.0)])
def test_shifted_and_scaled_rewards_give_the_same_scaled_advantages(factor, shift):
    found = []
    for a, c in ((1.0, 0.0), (factor, shift)):
        rng, scale = np.random.default_rng(0), scale_after()
        for _ in range(5):
            rewards = a * rng.random((3, 2)) + c
            found.append(advantages_of(rewards, scale.reward_stds(pools_of(rewards))))
            scale.observe(rewards.flatten())
    np.testing.assert_allclose(found[:5], found[5:], rtol=1e-6, atol=1e-8)


def test_the_running_standard_deviation_continues_from_its_state():
    rng, scale, resumed = np.random.default_rng(0), RunningRewardStd(), RunningRewardStd()
    for step in range(30):
        if step == 14:  # amid a change of the rewards
            assert scale.small_variances
            resumed.load_state_dict(json.loads(json.dumps(scale.state_dict())))
        rewards = rng.normal(size=16) * (1.0 if step < 10 else 0.01)
        for one in (scale, resumed)[: 1 + (step >= 14)]:
            one.observe(rewards)
    assert resumed.state_dict() == scale.state_dict()
