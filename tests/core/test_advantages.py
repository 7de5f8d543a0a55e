"""
Advantages: the paper's by hand and in expectation; the batch baseline's unbiased for any rewards, by exact
enumeration.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_trl.core import (
    batch_advantages,
    needs_more,
    normalize_each_reward,
    pool_advantages,
    prompt_weights,
    select_groups,
)
from ada_trl.core.advantages import LARGEST_DEVIATION

from .simulation import assert_mean, by_prompt, rollouts_of, sample_binary


NAN = math.nan
REWARDS = st.one_of(
    st.sampled_from([0.0, 1.0, NAN]), st.floats(-100, 100, width=32)
)  # as reward functions return them
POOLS = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5)


# The pool's mean


QUARTER = [1, 0, 0, 0, 0, 0, 0, 1]  # p = mean = 1/4, 1/√p = 2


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        (QUARTER, {"weighting": "none"}, [0.75] + [-0.25] * 6 + [0.75]),
        (QUARTER, {}, [1.5] + [-0.5] * 6 + [1.5]),
        (QUARTER, {"weighting": "inverse"}, [3] + [-1] * 6 + [3]),
        # A baseline from counts of 0 and 1 would give +0.875 and −1.125.
        ([1] * 4 + [-1] * 28, {"weighting": "none"}, [1.75] * 4 + [-0.25] * 28),
        ([0.9, 0.8, 0.1, 0.2], {"weighting": "none"}, [0.4, 0.3, -0.4, -0.3]),
        ([1, 0, NAN, NAN], {"weighting": "none"}, [0.5, -0.5, 0.0, 0.0]),
        ([1, 0, 1, 0], {"weighting": "none", "scale": "group"}, np.array([0.5, -0.5] * 2) / (math.sqrt(1 / 3) + 1e-4)),
    ],
)
def test_pool_advantages_use_the_real_rewards_of_the_whole_pool(rewards, options, expected):
    found = pool_advantages(rollouts_of(rewards), **options)
    assert found.tolist() == pytest.approx(list(expected))
    with_others = pool_advantages(rollouts_of([1, 0], rewards, [0] * 5), **options)
    np.testing.assert_allclose(with_others[2:-5], found)


def test_the_scale_of_a_batch_is_that_of_all_rewards():
    pools = [1.0, 0, 0, 0], [5.0, 3.0, NAN]
    std = np.std([1, 0, 0, 0, 5, 3], ddof=1) + 1e-4
    unscaled = pool_advantages(rollouts_of(*pools), weighting="none")
    np.testing.assert_allclose(pool_advantages(rollouts_of(*pools), weighting="none", scale="batch"), unscaled / std)


@pytest.mark.parametrize("rewards", [[1] * 8, [0] * 8, [0.1] * 6, [NAN] * 8, [0.1] * 7 + [NAN]])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_a_zero_variance_pool_gives_exactly_zero(rewards, scale):
    advantages = pool_advantages(rollouts_of([1, 0], rewards), scale=scale)
    assert not advantages[2:].any() and advantages[:2].all()


@pytest.mark.parametrize(
    ("rewards", "weighting", "expected"),
    [
        ([0] * 32, "inverse_sqrt", math.sqrt(32)),  # clamped at one over the size of the pool
        ([0] * 32, "inverse", 32),
        ([0] * 32, "none", 1),
        (QUARTER, "inverse_sqrt", 2),
        ([1] * 4, "inverse", 1),
        ([NAN] * 4, "inverse", 1),
    ],
)
def test_prompt_weights(rewards, weighting, expected):
    assert prompt_weights(rollouts_of(rewards), weighting).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("positives", [10, 250, 700])
@pytest.mark.parametrize(
    ("weighting", "alpha"), [("inverse", 0.0), (0.25, 0.25), ("inverse_sqrt", 0.5), (0.8, 0.8), ("none", 1.0)]
)
def test_the_weight_is_the_derivative_of_the_power_objective(weighting, alpha, positives):
    """f(p) = p^α / α, whose limit at α = 0 is log p up to a constant; the derivative is computed numerically."""

    def f(p):
        return math.log(p) if alpha == 0 else p**alpha / alpha

    p, rollouts = positives / 1000, rollouts_of([1] * positives + [0] * (1000 - positives))
    step = 1e-6 * p
    expected = pytest.approx([(f(p + step) - f(p - step)) / (2 * step)], rel=1e-6)
    assert prompt_weights(rollouts, weighting) == prompt_weights(rollouts, alpha) == expected


@pytest.mark.parametrize("p", [0.3, 0.5, 0.8])
def test_the_paper_form_has_the_documented_effective_weight(p):
    """
    Of the gradient of a Bernoulli policy, p = σ(θ): the score of a positive is 1 − p, that of a negative −p, and ∇p =
    p(1 − p). With 512 rollouts per pool, E[p̂] = p exactly and there are always n/2 of both kinds.
    """
    prompts, options = 500, {"samples_per_round": 512, "max_rounds": 1, "seed": 1}
    rollouts = sample_binary(np.full(prompts, p), min_positives=0, **options)
    selected = select_groups(rollouts, 4, [(2, i) for i in range(prompts)])
    scores = np.where(rollouts.is_positive_N, 1 - p, -p)
    gradient = (pool_advantages(rollouts, weighting="none") * scores)[selected].reshape(prompts, 4).mean(axis=1)
    effective = ((1 - p) ** 2 + p**2) / (2 * p * (1 - p))
    assert_mean(gradient, effective * p * (1 - p))
    assert p == 0.5 or effective > 1.2


def test_rewards_are_normalized_one_by_one_with_statistics_of_the_whole_pool():
    rewards = [(0.0, 1.0), (1.0, NAN), (1.0, 3.0), (0.0, 2.0), (NAN, NAN)]
    totals = [1.0, 1.0, 4.0, 2.0, NAN]
    rollouts = normalize_each_reward(rollouts_of(totals, success=[totals], rewards=rewards), np.array([1.0, 1.0]))
    a_std, b_std = (1 / 3) ** 0.5 + 1e-4, 1.0 + 1e-4  # of 0, 1, 1, 0 and of 1, 3, 2
    sums = [-0.5 / a_std - 1 / b_std, 0.5 / a_std, 0.5 / a_std + 1 / b_std, -0.5 / a_std, NAN]
    assert rollouts.reward_N.tolist() == pytest.approx(sums, nan_ok=True)
    assert rollouts.success_reward_N.tolist() == pytest.approx(totals, nan_ok=True)


# The mean of all other rollouts


def advantages_of_a_loop(rewards, scale):
    """For each rollout, the mean and the standard deviation of all others."""
    flat = [reward for pool in rewards for reward in pool]
    expected = []
    for i, reward in enumerate(flat):
        others = [other for j, other in enumerate(flat) if j != i and not math.isnan(other)]
        if math.isnan(reward) or not others:
            expected.append(0.0)
            continue
        advantage = reward - np.mean(others)
        if scale == "batch":
            advantage = np.clip(advantage / (np.std(others) + 1e-4), -LARGEST_DEVIATION, LARGEST_DEVIATION)
        expected.append(advantage)
    return expected


@pytest.mark.parametrize("scale", ["none", "batch"])
@given(pools=POOLS)
def test_batch_advantages_are_those_of_a_loop_over_all_others(scale, pools):
    """So no rollout has an influence on its own baseline and divisor."""
    found = batch_advantages(rollouts_of(*pools), scale=scale)
    assert found.tolist() == pytest.approx(advantages_of_a_loop(pools, scale), rel=1e-6, abs=1e-6)


def test_a_batch_has_no_scale_of_a_group():
    with pytest.raises(ValueError, match=r"scale_rewards \('group'\) must be 'none' or 'batch'"):
        batch_advantages(rollouts_of([1.0, 0.0]), scale="group")


def test_rollouts_without_a_success_reward_but_with_a_reward_have_an_advantage():
    rollouts = rollouts_of([1.0, 0.0], [NAN, 2.0], success=[[NAN, 0.0], [1.0, NAN]])
    assert batch_advantages(rollouts).tolist() == [0.0, -1.5, 0.0, 1.5]
    assert pool_advantages(rollouts, weighting="none").tolist() == [0.5, -0.5, 0.0, 0.0]


def test_scaled_advantages_are_continuous_where_the_other_rewards_are_equal():
    """0.7 and 0.70000005 are float32 sums of 0.1, 0.2 and 0.4 in two orders."""
    only_success = batch_advantages(rollouts_of([1.0], *[[0.0]] * 7), scale="batch")
    assert only_success[0] == LARGEST_DEVIATION
    nearly_equal = batch_advantages(rollouts_of([1.0], *[[0.0]] * 6, [1e-6]), scale="batch")
    np.testing.assert_allclose(nearly_equal, only_success, atol=1e-5)
    assert abs(batch_advantages(rollouts_of(*[[0.7], [0.70000005]] * 8), scale="batch")).max() < 1e-3


def test_an_outlier_is_clipped_however_similar_the_other_rewards_are():
    """The standard deviation of the others, 5e-4, is far below the rounding error of sums that contain the outlier."""
    assert batch_advantages(rollouts_of([0.0, 1e-3, 1e6]), scale="batch")[2] == 1.5


def test_scaled_advantages_do_not_depend_on_the_distance_of_the_rewards_from_zero():
    """The squares of the distant rewards, 1e16, have rounding errors of the size of the variance."""
    near, far = (batch_advantages(rollouts_of([shift, shift + 1, shift + 3]), scale="batch") for shift in (0.0, 1e8))
    np.testing.assert_allclose(far, near, rtol=1e-6)


@pytest.mark.parametrize("scale", ["none", "batch"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e-9, 1e6])
def test_equal_rewards_of_a_batch_have_no_advantage(reward, scale):
    """The mean of the others is a sum of rounded numbers, which differs from the reward in most sizes of a batch."""
    for size in range(2, 129):
        assert not batch_advantages(rollouts_of(*[[reward]] * size), scale=scale).any(), size


# Expected gradients of Bernoulli policies, exactly

PROBABILITIES, SIZES = (0.3, 0.8, 0.1), (1, 2, 1)
TRUTH = np.array([size * p * (1 - p) for p, size in zip(PROBABILITIES, SIZES, strict=True)])


def expected_batch_gradient(to_advantages):
    """E[Σ A ∇ log π] by prompt, for binary rewards with PROBABILITIES and SIZES."""
    gradient = np.zeros(3)
    owners = [x for x, size in enumerate(SIZES) for _ in range(size)]
    for sampled in itertools.product((0.0, 1.0), repeat=len(owners)):
        p = math.prod(PROBABILITIES[x] if y else 1 - PROBABILITIES[x] for x, y in zip(owners, sampled, strict=True))
        values = iter(sampled)
        rewards = [[next(values) for _ in range(size)] for size in SIZES]
        for x, own in enumerate(to_advantages(rewards)):
            gradient[x] += p * sum(a * (y - PROBABILITIES[x]) for a, y in zip(own, rewards[x], strict=True))
    return gradient


def advantages_of(rewards, scale="none"):
    rollouts = rollouts_of(*rewards)
    return by_prompt(rollouts, batch_advantages(rollouts, scale=scale))


def clipped_reward_change(rewards):
    """
    For each rollout y · (f(1) − f(0)), where f(r) is (r − b) / σ clipped, with b and σ of all other rollouts: as they
    are independent of y, E[y (y − p) (f(1) − f(0))] is E[f(1) − f(0)] · p (1 − p).
    """
    changed = []
    for x, own in enumerate(rewards):
        changed.append([])
        for i, y in enumerate(own):
            versions = [[list(row) for row in rewards] for _ in range(2)]
            versions[0][x][i], versions[1][x][i] = 0.0, 1.0
            low, high = (_own_advantage(version, x, i) for version in versions)
            changed[-1].append(y * (high - low))
    return changed


def _own_advantage(rewards, x, i):
    others = [r for y, row in enumerate(rewards) for j, r in enumerate(row) if (y, j) != (x, i)]
    scaled = (rewards[x][i] - np.mean(others)) / (np.std(others) + 1e-4)
    return np.clip(scaled, -LARGEST_DEVIATION, LARGEST_DEVIATION)


def test_the_expected_gradient_of_a_batch_is_that_of_the_mean_reward():
    np.testing.assert_allclose(expected_batch_gradient(advantages_of), TRUTH, rtol=1e-12)


def test_scaled_advantages_follow_the_gradient_of_the_clipped_reward():
    expected = expected_batch_gradient(clipped_reward_change)
    np.testing.assert_allclose(expected_batch_gradient(lambda r: advantages_of(r, "batch")), expected, rtol=1e-12)


# Retries across steps: one prompt is sampled until its exit condition is met, in each step beside another prompt


def rewards_of_steps(p, min_positives, min_negatives, per_step, max_steps):
    """Each sequence of steps that sampling can end with, as rewards by step, and its probability."""
    stack = [((), 1.0)]
    while stack:
        steps, probability = stack.pop()
        for rewards in itertools.product((0.0, 1.0), repeat=per_step):
            more, q = (*steps, rewards), probability * math.prod(p if r else 1 - p for r in rewards)
            positives, total = sum(map(sum, more)), per_step * len(more)
            if len(more) < max_steps and needs_more(positives, total - positives, min_positives, min_negatives):
                stack.append((more, q))
            else:
                yield more, q


def expected_gradient(p, other, shape):
    """E[Σ A ∇ log π] of the prompt over its steps, and E[N]; the other prompt of each step has pass rate `other`."""
    gradient = num_rollouts = 0.0
    for steps, probability in rewards_of_steps(p, *shape):
        num_rollouts += probability * sum(map(len, steps))
        for others in itertools.product((0.0, 1.0), repeat=len(steps)):
            q = probability * math.prod(other if r else 1 - other for r in others)
            for rewards, other_reward in zip(steps, others, strict=True):
                advantages, _ = advantages_of([[*rewards], [other_reward]])
                gradient += q * sum(a * (r - p) for a, r in zip(advantages, rewards, strict=True))
    return gradient, num_rollouts


SHAPES = {  # K_pos, K_neg, rollouts per step, steps
    "uniform": (0, 0, 2, 1),
    "seq-pos n=1": (1, 0, 1, 4),
    "seq-pos n=2": (1, 0, 2, 3),
    "seq-balance": (1, 1, 1, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("p", "other"), [(0.3, 0.7), (0.05, 0.5)])
def test_the_expected_gradient_of_a_retried_prompt_is_the_number_of_rollouts_times_the_gradient(p, other, shape):
    gradient, num_rollouts = expected_gradient(p, other, SHAPES[shape])
    assert gradient == pytest.approx(num_rollouts * p * (1 - p), rel=1e-12)
