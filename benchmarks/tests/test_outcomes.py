"""
Closed forms against simulation through the real scheduler, selection and advantages.

Simulated shares and means are compared with their exact expectation, within five exact standard deviations of the
mean: the chance that one comparison of a correct formula fails is below 6e-7, and all of them together below 1e-4.
"""

import math

import numpy as np
import pytest

from ada_trl.core import ExitCondition, Rollout, eliminate, group_advantages, select_group
from benchmarks.analyses.outcomes import (
    binomial_probability,
    pool_distribution,
    refill_outcome,
    sequential_outcome,
    single_round_outcome,
)


PASS_RATES = [0.0, 0.03, 0.2, 0.5, 0.95, 1.0]
ONCE = ExitCondition(0)
CASES = [  # exit condition, M, N, n
    (ONCE, 4, 1, 4),
    (ONCE, 16, 1, 16),
    (ExitCondition(1), 8, 4, 4),
    (ExitCondition(3), 4, 5, 4),  # more positives than a round usually has
    (ExitCondition(5), 4, 3, 4),  # than a round can have
    (ExitCondition(2, 2), 8, 4, 4),
    (ExitCondition(1, 1), 4, 8, 4),
    (ExitCondition(2, 3), 5, 4, 5),
    (ExitCondition(6, 2), 8, 3, 4),  # more than the group has room for
]


def simulate(p, prompts, exit_condition, samples_per_round, max_rounds, n, seed=0):
    """Pools, and whether the selected group is without any advantage."""
    rng = np.random.default_rng([seed, samples_per_round, max_rounds])

    def draw(rows):
        rewards = (rng.random(len(rows)) < p).astype(float).tolist()
        return [Rollout(draw, reward, reward) for (_, draw), reward in zip(rows, rewards, strict=True)]

    pools = eliminate(
        prompts,
        draw,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        positive_threshold=0.7,
    )
    collapsed = [not any(group_advantages(pool, select_group(pool, n, (i,)))) for i, pool in enumerate(pools)]
    return pools, collapsed


def close_to(mean, expected, variance, samples):
    assert mean == pytest.approx(expected, abs=5 * math.sqrt(max(variance, 0) / samples) + 1e-9)


@pytest.mark.parametrize(("exit_condition", "m", "rounds", "n"), CASES)
def test_closed_forms_agree_with_the_scheduler(exit_condition, m, rounds, n):
    exact = pool_distribution(PASS_RATES, exit_condition, samples_per_round=m, max_rounds=rounds)
    outcome = sequential_outcome(PASS_RATES, exit_condition, samples_per_round=m, max_rounds=rounds)
    assert exact.probability.sum(axis=1) == pytest.approx(1)
    prompts = 1000
    for i, p in enumerate(PASS_RATES):
        pools, collapsed = simulate(p, prompts, exit_condition, m, rounds, n)
        sizes = np.array([len(pool) for pool in pools])
        zero = outcome.zero_gradient[i]
        close_to(np.mean(collapsed), zero, zero * (1 - zero), prompts)
        spread = exact.probability[i] @ (exact.draws - outcome.rollouts[i]) ** 2
        close_to(sizes.mean(), outcome.rollouts[i], spread, prompts)
        close_to((sizes / m).mean(), outcome.rounds[i], spread / m**2, prompts)
        found = {(len(pool), pool.positives) for pool in pools}
        possible = exact.probability[i] > 0
        assert found <= set(zip(exact.draws[possible], exact.positives[possible], strict=True))
        if rounds > 1:  # every state, not only the two summaries
            for d, k, q in zip(exact.draws, exact.positives, exact.probability[i], strict=True):
                share = np.mean([(len(pool), pool.positives) == (d, k) for pool in pools])
                # A rare state is Poisson: five deviations of a count whose mean may be below 1 are too few.
                close_to(share, q, q + 25 / prompts, prompts)


def test_the_documented_special_cases():
    p = np.linspace(0, 1, 21)
    pos = sequential_outcome(p, ExitCondition(1), samples_per_round=8, max_rounds=4)
    assert pos.zero_gradient == pytest.approx((1 - p) ** 32 + p**8)
    inner = slice(1, None)
    assert pos.rounds[inner] == pytest.approx((1 - (1 - p[inner]) ** 32) / (1 - (1 - p[inner]) ** 8))
    for quota in (1, 2, 3):
        balance = sequential_outcome(p, ExitCondition(quota, 2), samples_per_round=8, max_rounds=4)
        assert balance.zero_gradient == pytest.approx(p**32 + (1 - p) ** 32)
    uniform = sequential_outcome(p, ONCE, samples_per_round=6, max_rounds=1)
    for got, expected in zip(single_round_outcome(p, 6), uniform, strict=True):
        assert got == pytest.approx(expected)
    assert single_round_outcome([0.5, 0.1], [2, 4]).zero_gradient == pytest.approx([0.5, 0.1**4 + 0.9**4])


def test_large_rounds_do_not_overflow():
    table = binomial_probability([0.0, 1e-3, 0.5, 1.0], 2048)
    assert table.sum(axis=1) == pytest.approx(1)
    assert table @ np.arange(2049) == pytest.approx([0, 2.048, 1024, 2048])


@pytest.mark.parametrize("max_rounds", [1, 3, 10])
def test_refill_agrees_with_throwing_collapsed_groups_away(max_rounds):
    """Rounds of one round each through the scheduler, over the places that are still empty."""
    rates, weights, n, places = np.array([0.02, 0.5, 0.97]), np.array([0.5, 0.2, 0.3]), 4, 3000
    rng = np.random.default_rng(1)
    empty, drawn, visited = places, 0, 0
    for _ in range(max_rounds):
        p = rng.choice(rates, size=empty, p=weights)

        def draw(rows, p=p):
            rewards = (rng.random(len(rows)) < p[[prompt for prompt, _ in rows]]).astype(float).tolist()
            return [Rollout(draw, reward, reward) for (_, draw), reward in zip(rows, rewards, strict=True)]

        pools = eliminate(empty, draw, ONCE, samples_per_round=n, max_rounds=1, positive_threshold=0.7)
        drawn, visited = drawn + sum(map(len, pools)), visited + len(pools)
        groups = [select_group(pool, n, (i,)) for i, pool in enumerate(pools)]
        empty = sum(not any(group_advantages(pool, group)) for pool, group in zip(pools, groups, strict=True))
    zero, rollouts, rounds = (value.item() for value in refill_outcome(rates, weights, n, max_rounds=max_rounds))
    lost = weights @ (rates**n + (1 - rates) ** n)
    close_to(empty / places, zero, zero * (1 - zero), places)
    close_to(visited / places, rounds, lost / (1 - lost) ** 2, places)  # a geometric is wider than a truncated one
    assert rollouts == pytest.approx(n * rounds)
    assert drawn == n * visited
