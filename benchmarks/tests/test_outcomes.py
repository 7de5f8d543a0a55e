"""
Closed forms against simulation with the selection and the advantages of `ada_trl.core`,
and the simulation against its scheduler.

Simulated shares and means are compared with their exact expectation, within five exact standard deviations of the
mean: the chance that one comparison of a correct formula fails is below 6e-7, and all of them together below 1e-4.
"""

import math

import numpy as np
import pytest

from ada_trl.core import (
    Candidate,
    Rollouts,
    Slot,
    SlotRule,
    collect_rollouts,
    pool_advantages,
    sample_slots,
    sampled_prompts,
    select_groups,
)
from benchmarks.analyses.outcomes import (
    binomial_probability,
    pool_distribution,
    refill_outcome,
    sequential_outcome,
    single_round_outcome,
)
from benchmarks.common import BALANCE, BINARY, POS, bernoulli_rollouts


PASS_RATES = [0.0, 0.03, 0.2, 0.5, 0.95, 1.0]
CASES = [  # K_pos, K_neg, M, N, n
    (0, 0, 4, 1, 4),
    (0, 0, 16, 1, 16),
    (1, 0, 8, 4, 4),
    (3, 0, 4, 5, 4),  # more positives than a round usually has
    (5, 0, 4, 3, 4),  # than a round can have
    (2, 2, 8, 4, 4),
    (1, 1, 4, 8, 4),
    (2, 3, 5, 4, 5),
    (6, 2, 8, 3, 4),  # more than the group has room for
]


@pytest.mark.parametrize(("min_positives", "min_negatives", "m", "rounds"), [case[:4] for case in CASES])
def test_simulated_rollouts_are_those_of_the_scheduler(min_positives, min_negatives, m, rounds):
    """The same random numbers, through `sample_slots`."""
    rates, requests, rng = np.random.default_rng(1).random(50), [], np.random.default_rng(0)
    rule = SlotRule(min_positives, min_negatives, rounds)
    slots = [Slot(rule, BINARY, [Candidate(i)], m) for i in range(len(rates))]

    def collect():
        received = [(slot, draw, rng.random((m, 1)) < rates[slot]) for slot, draw in requests]
        requests.clear()
        return received

    sample_slots(slots, lambda *request: requests.append(request), collect)
    expected = collect_rollouts(slots, sampled_prompts(slots))
    found = bernoulli_rollouts(
        rates,
        np.random.default_rng(0),
        min_positives=min_positives,
        min_negatives=min_negatives,
        samples_per_round=m,
        max_rounds=rounds,
    )
    for name, values in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


def zero_gradient(rollouts: Rollouts, num_generations: int) -> np.ndarray:
    """Whether all advantages of the group that is trained on are 0, for each prompt."""
    selected = select_groups(rollouts, num_generations, [(i,) for i in range(rollouts.num_prompts)])
    return ~pool_advantages(rollouts)[selected].reshape(-1, num_generations).any(axis=1)


def close_to(mean, expected, variance, samples):
    assert mean == pytest.approx(expected, abs=5 * math.sqrt(max(variance, 0) / samples) + 1e-9)


@pytest.mark.parametrize(("min_positives", "min_negatives", "m", "rounds", "n"), CASES)
def test_closed_forms_agree_with_simulation(min_positives, min_negatives, m, rounds, n):
    exit_condition = {"min_positives": min_positives, "min_negatives": min_negatives}
    sampling = exit_condition | {"samples_per_round": m, "max_rounds": rounds}
    exact, outcome = pool_distribution(PASS_RATES, **sampling), sequential_outcome(PASS_RATES, **sampling)
    assert exact.probability.sum(axis=1) == pytest.approx(1)
    prompts = 1000
    for i, p in enumerate(PASS_RATES):
        rollouts = bernoulli_rollouts([p] * prompts, np.random.default_rng([0, m, rounds]), **sampling)
        sizes, zero = rollouts.size_P, outcome.zero_gradient[i]
        close_to(zero_gradient(rollouts, n).mean(), zero, zero * (1 - zero), prompts)
        spread = exact.probability[i] @ (exact.draws - outcome.rollouts[i]) ** 2
        close_to(sizes.mean(), outcome.rollouts[i], spread, prompts)
        close_to((sizes / m).mean(), outcome.rounds[i], spread / m**2, prompts)
        found = set(zip(sizes, rollouts.positives_P, strict=True))
        possible = exact.probability[i] > 0
        assert found <= set(zip(exact.draws[possible], exact.positives[possible], strict=True))
        if rounds > 1:  # every state, not only the two summaries
            for d, k, q in zip(exact.draws, exact.positives, exact.probability[i], strict=True):
                share = ((sizes == d) & (rollouts.positives_P == k)).mean()
                # A rare state is Poisson: five deviations of a count whose mean may be below 1 are too few.
                close_to(share, q, q + 25 / prompts, prompts)


def test_the_documented_special_cases():
    p = np.linspace(0, 1, 21)
    pos = sequential_outcome(p, **POS)
    assert pos.zero_gradient == pytest.approx((1 - p) ** 32 + p**8)
    inner = slice(1, None)
    assert pos.rounds[inner] == pytest.approx((1 - (1 - p[inner]) ** 32) / (1 - (1 - p[inner]) ** 8))
    for quota in (1, 2, 3):
        balance = sequential_outcome(p, **(BALANCE | {"min_positives": quota}))
        assert balance.zero_gradient == pytest.approx(p**32 + (1 - p) ** 32)
    uniform = sequential_outcome(p, samples_per_round=6)
    for got, expected in zip(single_round_outcome(p, 6), uniform, strict=True):
        assert got == pytest.approx(expected)
    assert single_round_outcome([0.5, 0.1], [2, 4]).zero_gradient == pytest.approx([0.5, 0.1**4 + 0.9**4])


def test_large_rounds_do_not_overflow():
    table = binomial_probability([0.0, 1e-3, 0.5, 1.0], 2048)
    assert table.sum(axis=1) == pytest.approx(1)
    assert table @ np.arange(2049) == pytest.approx([0, 2.048, 1024, 2048])


@pytest.mark.parametrize("max_rounds", [1, 3, 10])
def test_refill_agrees_with_throwing_collapsed_groups_away(max_rounds):
    """One round after another, over the places that are still empty."""
    rates, weights, n, places = np.array([0.02, 0.5, 0.97]), np.array([0.5, 0.2, 0.3]), 4, 3000
    rng = np.random.default_rng(1)
    empty, drawn, visited = places, 0, 0
    for _ in range(max_rounds):
        rollouts = bernoulli_rollouts(rng.choice(rates, size=empty, p=weights), rng, samples_per_round=n)
        drawn, visited = drawn + len(rollouts), visited + empty
        empty = zero_gradient(rollouts, n).sum()
    zero, rollouts, rounds = (value.item() for value in refill_outcome(rates, weights, n, max_rounds=max_rounds))
    lost = weights @ (rates**n + (1 - rates) ** n)
    close_to(empty / places, zero, zero * (1 - zero), places)
    close_to(visited / places, rounds, lost / (1 - lost) ** 2, places)  # a geometric is wider than a truncated one
    assert rollouts == pytest.approx(n * rounds)
    assert drawn == n * visited
