"""Algorithm 2 of Reinforce-Ada on given pools: the selected group and every advantage."""

import math
import random

import pytest

from ada_trl.core import Pool, Rollout, group_advantages, prompt_weight, select_group

from .simulation import pool_of


NAN = math.nan


# Pools


def test_pool_statistics_ignore_the_order_of_arrival():
    rewards = [0.1 * i + 1e-9 * i**2 for i in range(40)]
    pools = [pool_of(*random.Random(seed).sample(rewards, 40)) for seed in range(5)]
    assert len({(pool.mean, pool.std, pool.pass_rate) for pool in pools}) == 1


def test_positives_are_counted_by_the_success_reward_strictly_above_the_threshold():
    assert pool_of(0.7, 0.71, 0.69).positives == 1
    pool = Pool(0.7, [Rollout(0, 5.0, 1.0), Rollout(1, 6.0, 0.0), Rollout(2, 1.0, NAN)])
    assert (pool.positives, pool.negatives, pool.pass_rate, pool.mean) == (1, 1, 0.5, 5.5)
    assert group_advantages(pool, pool.rollouts, weighting="none") == pytest.approx([-0.5, 0.5, 0])


# Selection


@pytest.mark.parametrize(
    ("rewards", "n", "expected"),
    [
        ([1] * 5 + [0] * 5, 4, (2, 2, 0)),
        ([1] * 5 + [0] * 5, 5, (2, 3, 0)),  # odd n: one more negative
        ([1] + [0] * 9, 4, (1, 3, 0)),  # too few of one kind
        ([1] * 9 + [0], 4, (3, 1, 0)),
        ([1] * 9, 3, (3, 0, 0)),
        ([0] * 9, 3, (0, 3, 0)),
        ([1, 1, 0, NAN, NAN], 4, (2, 1, 1)),  # unscored only if nothing else is left
        ([1, 1, 1, 0, NAN, NAN], 4, (3, 1, 0)),
        ([NAN] * 4, 4, (0, 0, 4)),
    ],
)
def test_numbers_of_selected_positives_negatives_and_unscored(rewards, n, expected):
    pool = pool_of(*rewards)
    group = select_group(pool, n, (0,))
    assert len({rollout.draw_index for rollout in group}) == len(group) == n
    positives = sum(pool.is_positive(rollout) for rollout in group)
    unscored = sum(not pool.is_scored(rollout) for rollout in group)
    assert (positives, n - positives - unscored, unscored) == expected


def test_selection_depends_on_the_seed_and_not_on_the_order_of_arrival():
    pool = pool_of(*[1, 0] * 16)
    shuffled = Pool(0.7, random.Random(0).sample(pool.rollouts, len(pool)))
    assert shuffled.rollouts != pool.rollouts
    assert select_group(pool, 4, (7, 1)) == select_group(shuffled, 4, (7, 1))
    assert len({tuple(r.draw_index for r in select_group(pool, 4, (7, step))) for step in range(20)}) > 10


def test_every_rollout_of_a_kind_is_equally_likely():
    pool = pool_of(*[1] * 4 + [0] * 4)
    counts = [0] * 8
    trials = 4000
    for step in range(trials):
        for rollout in select_group(pool, 4, (1, step)):
            counts[rollout.draw_index] += 1
    # Each is selected with probability 1/2; 5 standard deviations of a binomial.
    assert all(abs(count - trials / 2) < 5 * math.sqrt(trials / 4) for count in counts)


def test_a_pool_smaller_than_the_group_is_rejected():
    with pytest.raises(ValueError, match=r"pool of 3 .* num_generations \(4\)"):
        select_group(pool_of(1, 0, 1), 4, (0,))


# Advantages


QUARTER = [1, 0, 0, 0, 0, 0, 0, 1]  # p = mean = 1/4, 1/√p = 2


@pytest.mark.parametrize(
    ("rewards", "selected", "options", "expected"),
    [
        (QUARTER, (0, 1, 2, 7), {"weighting": "none"}, [0.75, -0.25, -0.25, 0.75]),
        (QUARTER, (0, 1, 2, 7), {}, [1.5, -0.5, -0.5, 1.5]),
        (QUARTER, (0, 1, 2, 7), {"weighting": "inverse"}, [3, -1, -1, 3]),
        # A baseline from counts of 0 and 1 would give +0.875 and −1.125.
        ([1] * 4 + [-1] * 28, (0, 1, 30, 31), {"weighting": "none"}, [1.75, 1.75, -0.25, -0.25]),
        ([0.9, 0.8, 0.1, 0.2], range(4), {"weighting": "none"}, [0.4, 0.3, -0.4, -0.3]),
        ([1, 0, NAN, NAN], range(4), {"weighting": "none"}, [0.5, -0.5, 0.0, 0.0]),
        (
            [1, 0, 1, 0],
            range(4),
            {"weighting": "none", "std": math.sqrt(1 / 3)},
            [r / (math.sqrt(1 / 3) + 1e-4) for r in (0.5, -0.5, 0.5, -0.5)],
        ),
    ],
)
def test_advantages_use_the_real_rewards_of_the_whole_pool(rewards, selected, options, expected):
    pool = pool_of(*rewards)
    assert group_advantages(pool, [pool.rollouts[i] for i in selected], **options) == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[1] * 8, [0] * 8, [0.1] * 6, [NAN] * 8, [0.1] * 7 + [NAN]])
def test_a_zero_variance_pool_gives_exactly_zero(rewards):
    pool = pool_of(*rewards)
    group = select_group(pool, 4, (0,))
    for std in (None, pool.std):
        assert group_advantages(pool, group, std=std) == [0.0] * 4


@pytest.mark.parametrize(
    ("pass_rate", "weighting", "expected"),
    [(0.0, "inverse_sqrt", math.sqrt(32)), (0.0, "inverse", 32), (0.0, "none", 1), (0.25, "inverse_sqrt", 2)]
    + [(1.0, "inverse", 1), (NAN, "inverse", 1)],
)
def test_the_weight_is_clamped_at_one_over_the_pool_size(pass_rate, weighting, expected):
    assert prompt_weight(pass_rate, 32, weighting) == pytest.approx(expected)


@pytest.mark.parametrize("p", [0.01, 0.25, 0.7])
@pytest.mark.parametrize(
    ("weighting", "alpha"), [("inverse", 0.0), (0.25, 0.25), ("inverse_sqrt", 0.5), (0.8, 0.8), ("none", 1.0)]
)
def test_the_weight_is_the_derivative_of_the_power_objective(weighting, alpha, p):
    """f(p) = p^α / α, whose limit at α = 0 is log p up to a constant; the derivative is computed numerically."""

    def f(p):
        return math.log(p) if alpha == 0 else p**alpha / alpha

    step = 1e-6 * p
    expected = pytest.approx((f(p + step) - f(p - step)) / (2 * step), rel=1e-6)
    assert prompt_weight(p, 10**6, weighting) == prompt_weight(p, 10**6, alpha) == expected
