"""Allocation of rollouts: exact sums, bounds, proportions, and independence of the order of the prompts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_trl.core import allocate
from ada_trl.core.allocation import check_budget


# Few distinct values as well as any, so that ties occur.
PASS_RATES = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), st.floats(0, 1, allow_subnormal=False))
RULES = st.one_of(
    st.just({"rule": "variance"}),
    st.builds(lambda rule: {"rule": rule}, st.sampled_from([0, "power", 1, 2, 150])),
)


@st.composite
def problems(draw):
    pass_rates = draw(st.lists(PASS_RATES, min_size=1, max_size=40))
    low = draw(st.integers(0, 6))
    high = draw(st.integers(low, low + draw(st.sampled_from([0, 1, 5, 60]))))
    total = draw(st.integers(low * len(pass_rates), high * len(pass_rates)))
    return pass_rates, total, {"min_samples": low, "max_samples": high, **draw(RULES)}


def weight(p, rule, epsilon=0.01):
    if rule == "variance":
        return math.sqrt((1 - p + epsilon) / (p + epsilon))
    return (p + epsilon) ** -(0.5 if rule == "power" else rule)


@given(problems())
def test_the_sum_is_exact_within_the_bounds_and_harder_prompts_never_get_less(problem):
    pass_rates, total, options = problem
    budgets = allocate(pass_rates, total, **options)
    assert sum(budgets) == total
    assert all(type(budget) is int for budget in budgets)
    assert all(options["min_samples"] <= budget <= options["max_samples"] for budget in budgets)
    by_difficulty = sorted(zip(pass_rates, budgets, strict=True), key=lambda pair: (pair[0], -pair[1]))
    assert [budget for _, budget in by_difficulty] == sorted(budgets, reverse=True)
    for p in set(pass_rates):  # equal estimates differ by at most one, and by position
        equal = [budget for q, budget in zip(pass_rates, budgets, strict=True) if q == p]
        assert equal == sorted(equal, reverse=True) and equal[0] - equal[-1] <= 1


@given(problems(), st.randoms(use_true_random=False))
def test_budgets_follow_a_permutation_of_the_prompts(problem, random):
    pass_rates, total, options = problem
    shuffled = random.sample(pass_rates, len(pass_rates))
    before = zip(pass_rates, allocate(pass_rates, total, **options), strict=True)
    after = zip(shuffled, allocate(shuffled, total, **options), strict=True)
    assert sorted(before) == sorted(after)


@given(problems())
def test_budgets_within_the_bounds_are_proportional_up_to_rounding(problem):
    """There is one c with N_x − 1 < c · w_x < N_x + 1 for all of them; prompts at a bound are on its right side."""
    pass_rates, total, options = problem
    low, high = options["min_samples"], options["max_samples"]
    smallest_c, largest_c = 0.0, math.inf
    budgets = allocate(pass_rates, total, **options)
    reference = max(weight(p, options["rule"]) for p in pass_rates)
    for p, budget in zip(pass_rates, budgets, strict=True):
        w = max(weight(p, options["rule"]) / reference, 1e-100)
        if budget > low:
            smallest_c = max(smallest_c, (budget - 1) / w)
        if budget < high:
            largest_c = min(largest_c, (budget + 1) / w)
    assert smallest_c <= largest_c * (1 + 1e-9)


PAPER = [0.0, 0.03, 0.24, 0.99]  # (p + ε)^(−1/2) is 10, 5, 2, 1 times a constant


@pytest.mark.parametrize(
    ("pass_rates", "total", "low", "high", "rule", "expected"),
    [
        (PAPER, 36, 0, 99, "power", [20, 10, 4, 2]),  # c = 2
        (PAPER, 36, 0, 12, "power", [12, 12, 8, 4]),  # c = 24 / (5 + 2 + 1)
        (PAPER, 36, 0, 15, "power", [15, 13, 5, 3]),  # c = 21 / 8
        (PAPER, 36, 4, 99, "power", [19, 9, 4, 4]),  # c = 28 / (10 + 5)
        ([0.0, 0.5, 1.0, 0.1], 16, 1, 16, 0, [4] * 4),  # uniform
        ([0.09, 0.19, 0.39], 28, 1, 28, 1, [16, 8, 4]),  # inverse
        ([0.0, 1.0], 10, 1, 9, 4, [9, 1]),
        ([0.0, 0.0, 1.0], 16, 2, 8, 4, [7, 7, 2]),
        ([0.0, 1.0, 1.0], 12, 0, 8, 300, [8, 2, 2]),  # 101^(−300) underflows to 0, and the rest is shared nevertheless
        ([0.1, 0.9], 1000, 1, 1000, "variance", [892, 108]),  # √(0.91 / 0.11 · 0.91 / 0.11) = 8.27 to 1
        ([0.5, 0.02, 0.9, 0.98, 0.1], 40, 1, 32, "reward_std", [14, 5, 8, 5, 8]),  # √((p + ε)(1 − p + ε)): most at 1/2
        ([], 0, 1, 32, "variance", []),
    ],
)
def test_budgets_by_hand(pass_rates, total, low, high, rule, expected):
    assert allocate(pass_rates, total, min_samples=low, max_samples=high, rule=rule) == expected


def log_objective_variance(pass_rates, sizes):
    """Σ p(1−p) / (N p²): the variance of Σ_x ∇p / p, up to the same factor for all prompts, from N_x rollouts each."""
    return float(np.sum((1 - pass_rates) / (sizes * pass_rates)))


def test_the_variance_rule_has_the_least_variance_of_the_log_objective():
    pass_rates = (np.arange(64) + 0.5) / 64

    def budgets(rule, **options):
        total = 512 * 10**4
        return np.array(allocate(pass_rates, total, rule=rule, min_samples=0, max_samples=total, **options)) / 10**4

    variance = budgets("variance", epsilon=1e-9)
    least, rng = log_objective_variance(pass_rates, variance), np.random.default_rng(0)
    for size in (0.01, 0.1, 1.0):  # any other allocation of the same total is worse
        other = variance * np.exp(size * rng.normal(size=(100, 64)))
        other *= 512 / other.sum(axis=1, keepdims=True)
        assert all(log_objective_variance(pass_rates, sizes) > least for sizes in other)
    assert least == pytest.approx(17.9, abs=0.05)
    assert log_objective_variance(pass_rates, budgets("power", epsilon=1e-9)) == pytest.approx(19.4, abs=0.05)
    assert log_objective_variance(pass_rates, budgets("variance")) == pytest.approx(18.2, abs=0.05)  # ε = 0.01
    # With its advantages it is the log objective: without a weight and divided by σ, N_x rollouts count N_x ∇p / σ ∝
    # ∇p / p.
    weights = variance / np.sqrt(pass_rates * (1 - pass_rates)) * pass_rates
    assert weights == pytest.approx(np.full(64, weights.mean()), rel=1e-3)


@pytest.mark.parametrize(
    ("total", "low", "high", "message"),
    [
        (7, 2, 8, r"budget of 7 .* 4 prompts min_samples \(2\) each, which takes 8. Lower min_samples"),
        (33, 2, 8, r"budget of 33 .* 4 prompts with max_samples \(8\) each, which takes 32. Raise max_samples"),
        (8, 3, 2, r"min_samples \(3\) must be between 0 and max_samples \(2\)"),
        (8, -1, 8, r"min_samples \(-1\) must be between 0"),
    ],
)
def test_infeasible_bounds_are_rejected(total, low, high, message):
    with pytest.raises(ValueError, match=message):
        allocate([0.1, 0.2, 0.3, 0.4], total, min_samples=low, max_samples=high)
    with pytest.raises(ValueError, match=message):
        check_budget(4, total, min_samples=low, max_samples=high)


@pytest.mark.parametrize(
    ("pass_rate", "options", "message"),
    [
        (math.nan, {}, "between 0 and 1, got nan"),
        (-0.1, {}, "between 0 and 1, got -0.1"),
        (1.1, {}, "between 0 and 1, got 1.1"),
        (0.5, {"rule": -1}, r"allocation_rule \(-1\) must be one of .* or a number of at least 0"),
        (0.5, {"rule": math.inf}, r"allocation_rule \(inf\)"),
        (0.5, {"rule": "linear"}, r"allocation_rule \('linear'\) must be one of 'power', 'variance'"),
    ],
)
def test_pass_rates_and_rules_without_a_weight_are_rejected(pass_rate, options, message):
    with pytest.raises(ValueError, match=message):
        allocate([0.2, pass_rate], 8, min_samples=1, max_samples=8, **options)
