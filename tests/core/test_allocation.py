"""Budgets from pass rates: exact sums, bounds, proportions, and no dependence on the order of the prompts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_trl.core import allocate, check_budget


# Few distinct values as well as any: ties are the interesting case.
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
def test_sums_exactly_within_the_bounds(problem):
    pass_rates, total, options = problem
    budgets = allocate(pass_rates, total, **options)
    assert sum(budgets) == total
    assert all(type(budget) is int for budget in budgets)
    assert all(options["min_samples"] <= budget <= options["max_samples"] for budget in budgets)


@given(problems())
def test_harder_prompts_never_get_less(problem):
    pass_rates, total, options = problem
    budgets = allocate(pass_rates, total, **options)
    by_difficulty = sorted(zip(pass_rates, budgets, strict=True), key=lambda pair: (pair[0], -pair[1]))
    assert [budget for _, budget in by_difficulty] == sorted(budgets, reverse=True)


@given(problems())
def test_equal_estimates_differ_by_at_most_one_and_by_position(problem):
    pass_rates, total, options = problem
    budgets = allocate(pass_rates, total, **options)
    for p in set(pass_rates):
        equal = [budget for q, budget in zip(pass_rates, budgets, strict=True) if q == p]
        assert equal == sorted(equal, reverse=True) and equal[0] - equal[-1] <= 1


@given(problems(), st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_prompts(problem, random):
    pass_rates, total, options = problem
    shuffled = random.sample(pass_rates, len(pass_rates))
    before = zip(pass_rates, allocate(pass_rates, total, **options), strict=True)
    after = zip(shuffled, allocate(shuffled, total, **options), strict=True)
    assert sorted(before) == sorted(after)


@given(problems())
def test_proportional_up_to_rounding_among_the_prompts_at_no_bound(problem):
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


def test_paper_rule_by_hand():
    # (p + ε)^(−1/2) is 10, 5, 2, 1 times a constant: 36 rollouts are c = 2 each unit.
    pass_rates = [0.0, 0.03, 0.24, 0.99]
    assert allocate(pass_rates, 36, min_samples=0, max_samples=99) == [20, 10, 4, 2]
    # At most 12 for the first: 24 are left for 5 + 2 + 1 units, c = 3.
    assert allocate(pass_rates, 36, min_samples=0, max_samples=12) == [12, 12, 8, 4]
    assert allocate(pass_rates, 36, min_samples=0, max_samples=15) == [15, 13, 5, 3]  # c = 21 / 8
    # At least 4 for the last two: 28 are left for 10 + 5 units, c = 28 / 15.
    assert allocate(pass_rates, 36, min_samples=4, max_samples=99) == [19, 9, 4, 4]


def test_variance_rule_by_hand():
    # √((1 − p + ε) / (p + ε)) at ε = 0.01: √101 = 10.05, √(0.925 / 0.095) = 3.12, √(1 / 101) = 0.0995
    pass_rates = [0.0, 0.085, 1.0]
    weights = [weight(p, "variance") for p in pass_rates]
    budgets = allocate(pass_rates, 10**6, min_samples=0, max_samples=10**6, rule="variance")
    assert budgets == pytest.approx([10**6 * w / sum(weights) for w in weights], abs=1)
    # p = 0.1 against 0.9 is √(0.91 / 0.11 · 0.91 / 0.11) = 8.27 to 1
    assert allocate([0.1, 0.9], 1000, min_samples=1, max_samples=1000, rule="variance") == [892, 108]


def log_objective_variance(pass_rates, sizes):
    """Σ p(1−p) / (N p²): the variance of Σ_x ∇p / p, up to the same factor for all prompts, from N_x rollouts each."""
    return float(np.sum((1 - pass_rates) / (sizes * pass_rates)))


def least_variance(pass_rates, total):
    """A numerical minimiser that knows nothing of the rule: moves rollouts between prompts while that helps."""
    sizes = np.full(len(pass_rates), total / len(pass_rates))
    step = sizes[0] / 2
    while step > 1e-4:
        gain = (1 - pass_rates) / pass_rates * (1 / sizes - 1 / (sizes + step))  # of one step more
        loss = np.where(
            sizes > step, (1 - pass_rates) / pass_rates * (1 / np.maximum(sizes - step, 1e-9) - 1 / sizes), np.inf
        )
        receives, gives = int(gain.argmax()), int(loss.argmin())
        if gain[receives] > loss[gives] * (1 + 1e-12):
            sizes[receives] += step
            sizes[gives] -= step
        else:
            step /= 2
    return sizes


def test_variance_rule_is_where_a_numerical_minimiser_ends():
    pass_rates = (np.arange(64) + 0.5) / 64
    best = least_variance(pass_rates, 512)
    options = {"min_samples": 0, "max_samples": 10**9, "epsilon": 1e-9}
    found = {
        rule: np.array(allocate(pass_rates, 512 * 10**4, rule=rule, **options)) / 10**4
        for rule in ("variance", "power")
    }
    assert found["variance"] == pytest.approx(best, rel=0.01, abs=0.01)
    assert log_objective_variance(pass_rates, best) == pytest.approx(17.9, abs=0.05)
    assert log_objective_variance(pass_rates, found["variance"]) == pytest.approx(17.9, abs=0.05)
    assert log_objective_variance(pass_rates, found["power"]) == pytest.approx(19.4, abs=0.05)
    # With ε = 0.01 it costs little, and √(1 − p) / p, what this package did once, is worse than either.
    default = np.array(allocate(pass_rates, 512 * 10**4, rule="variance", min_samples=0, max_samples=10**9)) / 10**4
    assert log_objective_variance(pass_rates, default) == pytest.approx(18.2, abs=0.05)
    wrong = np.sqrt(1.01 - pass_rates) / (pass_rates + 0.01)
    assert log_objective_variance(pass_rates, 512 * wrong / wrong.sum()) == pytest.approx(22.7, abs=0.05)


def test_variance_rule_with_its_advantages_is_the_log_objective():
    """Without a weight and divided by σ, N_x rollouts count N_x ∇p / σ ∝ ∇p / p."""
    pass_rates = np.array([0.05, 0.2, 0.5, 0.8])
    budgets = np.array(allocate(pass_rates, 10**6, min_samples=0, max_samples=10**6, rule="variance", epsilon=1e-9))
    weights = budgets / np.sqrt(pass_rates * (1 - pass_rates))
    assert weights * pass_rates == pytest.approx(np.full(4, weights[0] * pass_rates[0]), rel=1e-3)


def test_reward_std_rule_gives_most_to_prompts_that_pass_half_of_the_time():
    budgets = allocate([0.5, 0.02, 0.9, 0.98, 0.1], 40, min_samples=1, max_samples=32, rule="reward_std")
    assert sum(budgets) == 40 and budgets[0] > budgets[2] == budgets[4] > budgets[1] == budgets[3]
    weights = [math.sqrt((p + 0.01) * (1.01 - p)) for p in (0.5, 0.02, 0.9, 0.98, 0.1)]
    for budget, weight in zip(budgets, weights, strict=True):
        assert abs(budget - 40 * weight / sum(weights)) <= 1


def test_exponent_zero_is_uniform_and_one_is_inverse():
    assert allocate([0.0, 0.5, 1.0, 0.1], 16, min_samples=1, max_samples=16, rule=0) == [4] * 4
    assert allocate([0.09, 0.19, 0.39], 28, min_samples=1, max_samples=28, rule=1) == [16, 8, 4]


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rule", ["power", "variance", "reward_std"])
def test_equal_pass_rates_share_equally_and_the_rest_by_position(p, rule):
    assert allocate([p] * 4, 18, min_samples=1, max_samples=32, rule=rule) == [5, 5, 4, 4]
    assert allocate([p], 7, min_samples=1, max_samples=32, rule=rule) == [7]
    assert allocate([], 0, min_samples=1, max_samples=32, rule=rule) == []


def test_extreme_pass_rates_go_to_the_bounds():
    assert allocate([0.0, 1.0], 10, min_samples=1, max_samples=9, rule=4) == [9, 1]
    assert allocate([0.0, 0.0, 1.0], 16, min_samples=2, max_samples=8, rule=4) == [7, 7, 2]
    # 101^(−300) is 0 in floating point, and still what the hardest prompt leaves over is shared.
    assert allocate([0.0, 1.0, 1.0], 12, min_samples=0, max_samples=8, rule=300) == [8, 2, 2]


@pytest.mark.parametrize(
    ("total", "low", "high", "message"),
    [
        (7, 2, 8, r"budget of 7 .* 4 prompts min_samples \(2\) each, which takes 8. Lower min_samples"),
        (33, 2, 8, r"budget of 33 .* 4 prompts with max_samples \(8\) each, which takes 32. Raise max_samples"),
        (8, 3, 2, r"min_samples \(3\) must be between 0 and max_samples \(2\)"),
        (8, -1, 8, r"min_samples \(-1\) must be between 0"),
    ],
)
def test_infeasible_bounds_are_refused(total, low, high, message):
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
        (0.5, {"epsilon": 0}, r"epsilon \(0\) must be positive"),
        (0.5, {"rule": "linear"}, r"allocation_rule \('linear'\) must be one of 'power', 'variance'"),
    ],
)
def test_what_has_no_weight_is_refused(pass_rate, options, message):
    with pytest.raises(ValueError, match=message):
        allocate([0.2, pass_rate], 8, min_samples=1, max_samples=8, **options)
