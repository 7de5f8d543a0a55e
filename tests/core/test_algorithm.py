"""Algorithm 2 of Reinforce-Ada on scripted pools: who stays active, who is selected, every advantage."""

import itertools
import math
import random
import subprocess
import sys

import pytest

from ada_trl.core import (
    ExitCondition,
    Pool,
    Rollout,
    eliminate,
    group_advantages,
    prompt_weight,
    rollouts_by_estimate,
    sampling_metrics,
    select_group,
    zero_gradient_probability,
)
from ada_trl.core.metrics import zero_signal_of_grpo


NAN = math.nan
BALANCE = ExitCondition(2, 2)
POS = ExitCondition(1)


class ScriptedDraw:
    """Deals out each prompt's rewards in order and remembers which prompts were asked for in each round."""

    def __init__(self, *scripts):
        self.scripts = scripts
        self.asked = []

    def __call__(self, rows):
        self.asked.append([prompt for prompt, _ in itertools.groupby(prompt for prompt, _ in rows)])
        return [
            Rollout(draw, self.scripts[prompt][draw], self.scripts[prompt][draw], source=(prompt, draw))
            for prompt, draw in rows
        ]


def make_pool(*rewards, threshold=0.7):
    return Pool(threshold, [Rollout(i, reward, reward) for i, reward in enumerate(rewards)])


def run(*scripts, exit_condition=BALANCE, samples_per_round=4, max_rounds=3):
    draw = ScriptedDraw(*scripts)
    pools = eliminate(
        len(scripts),
        draw,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        positive_threshold=0.7,
    )
    return pools, draw.asked


MIXED = [1, 0, 1, 0] + [NAN] * 8
HARD = [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
EASY = [1] * 12
NEVER = [0] * 12


# Who stays active


def test_balance_keeps_a_prompt_until_both_quotas_are_met():
    pools, asked = run(MIXED, HARD, EASY)
    assert asked == [[0, 1, 2], [1, 2], [1, 2]]
    assert [len(pool) for pool in pools] == [4, 12, 12]
    assert [BALANCE(pool) for pool in pools] == [True, True, False]


def test_pos_retires_an_easy_prompt_after_one_round():
    pools, asked = run(MIXED, HARD, EASY, NEVER, exit_condition=POS)
    assert asked == [[0, 1, 2, 3], [1, 3], [3]]
    assert [len(pool) for pool in pools] == [4, 8, 4, 12]


def test_no_prompt_exceeds_the_cap_and_the_cap_is_no_error():
    pools, _ = run(NEVER, EASY, samples_per_round=3, max_rounds=2)
    assert [len(pool) for pool in pools] == [6, 6]


def test_rewards_stay_with_their_prompt():
    pools, _ = run(HARD, EASY, MIXED)
    for prompt, pool in enumerate(pools):
        assert [rollout.source for rollout in pool.rollouts] == [(prompt, draw) for draw in range(len(pool))]


def test_duplicate_prompts_have_separate_pools():
    pools, asked = run(HARD, MIXED, HARD)
    assert asked == [[0, 1, 2], [0, 2], [0, 2]]
    assert pools[0].rollouts == [r._replace(source=(0, r.draw_index)) for r in pools[2].rollouts]


def test_unscored_rollouts_count_towards_the_cap_only():
    pools, asked = run([NAN] * 12, exit_condition=POS)
    assert asked == [[0]] * 3
    assert (len(pools[0]), pools[0].scored, pools[0].positives, pools[0].negatives) == (12, 0, 0, 0)


def test_threshold_is_strict():
    assert make_pool(0.7, 0.71, 0.69).positives == 1


# Who is selected


def composition(pool, n, seed=(0,)):
    group = select_group(pool, n, seed)
    assert len({rollout.draw_index for rollout in group}) == len(group) == n
    positives = sum(pool.is_positive(rollout) for rollout in group)
    unscored = sum(not pool.is_scored(rollout) for rollout in group)
    return positives, n - positives - unscored, unscored


@pytest.mark.parametrize(
    ("rewards", "n", "expected"),
    [
        ([1] * 5 + [0] * 5, 4, (2, 2, 0)),
        ([1] * 5 + [0] * 5, 5, (2, 3, 0)),  # odd n: the extra one is negative
        ([1] + [0] * 9, 4, (1, 3, 0)),  # topped up from the other side
        ([1] * 9 + [0], 4, (3, 1, 0)),
        ([1] * 9, 3, (3, 0, 0)),
        ([0] * 9, 3, (0, 3, 0)),
        ([1, 1, 0, NAN, NAN], 4, (2, 1, 1)),  # unscored only when nothing else is left
        ([1, 1, 1, 0, NAN, NAN], 4, (3, 1, 0)),
        ([NAN] * 4, 4, (0, 0, 4)),
    ],
)
def test_balanced_selection(rewards, n, expected):
    assert composition(make_pool(*rewards), n) == expected


def test_selection_ignores_arrival_order_but_not_the_seed():
    pool = make_pool(*[1, 0] * 16)
    shuffled = Pool(0.7, random.Random(0).sample(pool.rollouts, len(pool)))
    assert [r.draw_index for r in shuffled.rollouts] != [r.draw_index for r in pool.rollouts]
    assert select_group(pool, 4, (7, 1)) == select_group(shuffled, 4, (7, 1))
    assert len({tuple(r.draw_index for r in select_group(pool, 4, (7, step))) for step in range(20)}) > 10


def test_statistics_ignore_arrival_order():
    rewards = [0.1 * i + 1e-9 * i**2 for i in range(40)]
    pools = [make_pool(*random.Random(seed).sample(rewards, 40)) for seed in range(5)]
    assert len({(pool.mean, pool.std, pool.pass_rate) for pool in pools}) == 1


def test_every_rollout_of_a_side_is_equally_likely():
    pool = make_pool(*[1] * 4 + [0] * 4)
    counts = [0] * 8
    trials = 4000
    for step in range(trials):
        for rollout in select_group(pool, 4, (1, step)):
            counts[rollout.draw_index] += 1
    # Each is drawn with probability 1/2; 5 standard deviations of a binomial.
    assert all(abs(count - trials / 2) < 5 * math.sqrt(trials / 4) for count in counts)


def test_a_pool_smaller_than_the_group_is_refused():
    with pytest.raises(ValueError, match=r"pool of 3 .* num_generations \(4\)"):
        select_group(make_pool(1, 0, 1), 4, (0,))


# Every advantage


def test_advantages_use_the_whole_pool():
    pool = make_pool(1, 0, 0, 0, 0, 0, 0, 1)  # p = 1/4, mean 1/4
    group = [pool.rollouts[i] for i in (0, 1, 2, 7)]
    assert group_advantages(pool, group, weighting="none") == pytest.approx([0.75, -0.25, -0.25, 0.75])
    assert group_advantages(pool, group) == pytest.approx([1.5, -0.5, -0.5, 1.5])  # × 1/√p = 2
    assert group_advantages(pool, group, weighting="inverse") == pytest.approx([3, -1, -1, 3])


def test_signed_rewards_keep_their_own_baseline():
    """Rewards ±1 with 4 of 32 correct: a baseline rebuilt from 0/1 counts would give +0.875 and −1.125."""
    pool = make_pool(*[1] * 4 + [-1] * 28)
    group = select_group(pool, 4, (0,))
    assert group_advantages(pool, group, weighting="none") == pytest.approx([1.75, 1.75, -0.25, -0.25])


def test_continuous_rewards_are_not_rounded_to_pass_or_fail():
    pool = make_pool(0.9, 0.8, 0.1, 0.2)
    assert group_advantages(pool, pool.rollouts, weighting="none") == pytest.approx([0.4, 0.3, -0.4, -0.3])


def test_signal_and_reward_may_differ():
    pool = Pool(0.7, [Rollout(0, 5.0, 1.0), Rollout(1, 6.0, 0.0), Rollout(2, 1.0, NAN)])
    assert (pool.positives, pool.negatives, pool.pass_rate, pool.mean) == (1, 1, 0.5, 5.5)
    assert group_advantages(pool, pool.rollouts, weighting="none") == pytest.approx([-0.5, 0.5, 0])


def test_scaling_by_a_standard_deviation():
    pool = make_pool(1, 0, 1, 0)
    assert pool.std == pytest.approx(math.sqrt(1 / 3))
    scaled = group_advantages(pool, pool.rollouts, weighting="none", std=pool.std)
    assert scaled == pytest.approx([value / (math.sqrt(1 / 3) + 1e-4) for value in (0.5, -0.5, 0.5, -0.5)])


def test_selection_correction_restores_the_pool_proportions():
    pool = make_pool(1, 1, 0, 0, 0, 0, 0, 0)  # p = 1/4
    group = [pool.rollouts[i] for i in (0, 1, 2, 3)]
    corrected = group_advantages(pool, group, weighting="none", selection_correction=True)
    assert corrected == pytest.approx([0.5 * 0.75, 0.5 * 0.75, 1.5 * -0.25, 1.5 * -0.25])
    assert sum(corrected) == pytest.approx(0)


@pytest.mark.parametrize("rewards", [[1] * 8, [0] * 8, [0.1] * 6, [NAN] * 8, [0.1] * 7 + [NAN]])
@pytest.mark.parametrize("correction", [False, True])
def test_a_pool_without_contrast_gives_exactly_zero(rewards, correction):
    pool = make_pool(*rewards)
    group = select_group(pool, 4, (0,))
    for std in (None, pool.std):
        assert group_advantages(pool, group, std=std, selection_correction=correction) == [0.0] * 4


def test_unscored_rollouts_get_no_advantage_and_no_say_in_the_baseline():
    pool = make_pool(1, 0, NAN, NAN)
    assert group_advantages(pool, pool.rollouts, weighting="none") == [0.5, -0.5, 0.0, 0.0]


def test_weight_is_clamped_at_one_over_the_pool_size():
    assert prompt_weight(0.0, 32, "inverse_sqrt") == pytest.approx(math.sqrt(32))
    assert prompt_weight(0.0, 32, "inverse") == pytest.approx(32)
    assert prompt_weight(0.25, 32, "inverse_sqrt") == 2
    assert prompt_weight(1.0, 32, "inverse") == 1
    assert prompt_weight(NAN, 32, "inverse") == 1


@pytest.mark.parametrize("p", [0.01, 0.25, 0.7])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_weight_is_the_derivative_of_the_power_objective(alpha, p):
    """f(p) = p^α / α, whose limit at α = 0 is log p up to a constant; the derivative is taken numerically."""

    def f(p):
        return math.log(p) if alpha == 0 else p**alpha / alpha

    step = 1e-6 * p
    assert prompt_weight(p, 10**6, alpha) == pytest.approx((f(p + step) - f(p - step)) / (2 * step), rel=1e-6)


def test_names_of_weights_are_powers():
    for name, alpha in {"inverse": 0, "inverse_sqrt": 0.5, "none": 1}.items():
        for p in (0.0, 0.1, 1.0):
            assert prompt_weight(p, 32, name) == prompt_weight(p, 32, alpha)


def metrics_of(pools, exit_condition=BALANCE, n=4, m=4, rounds=3):
    groups = [select_group(pool, n, (i,)) for i, pool in enumerate(pools)]
    advantages = [group_advantages(pool, group) for pool, group in zip(pools, groups, strict=True)]
    sizes = {"samples_per_round": m, "max_rounds": rounds, "num_generations": n}
    return sampling_metrics(pools, groups, advantages, exit_condition, **sizes, weighting="inverse_sqrt")


def test_metrics_of_a_scripted_step():
    pools, _ = run(MIXED, HARD, EASY, NEVER)
    metrics = metrics_of(pools)
    assert metrics["samples_per_prompt/mean"] == (4 + 12 + 12 + 12) / 4
    assert metrics["rounds/mean"] == 2.5
    assert [metrics[f"active_prompts/round_{k}"] for k in (1, 2, 3)] == [4, 3, 3]
    assert [metrics[f"frac_missing_positives/round_{k}"] for k in (1, 2, 3)] == [0.5, 0.5, 0.25]
    assert [metrics[f"frac_missing_negatives/round_{k}"] for k in (1, 2, 3)] == [0.25] * 3
    assert [metrics[f"success_reward/{name}"] for name in ("min", "mean", "max")] == [0, 6 / 16, 1]
    assert metrics["frac_exit_condition_met"] == 0.5
    assert metrics["frac_all_correct"] == metrics["frac_all_wrong"] == 0.25
    assert metrics["frac_reward_zero_std/first_round"] == 0.75  # HARD, EASY and NEVER start uniform
    assert metrics["frac_zero_advantage_groups"] == 0.5
    assert metrics["frac_recovered_groups"] == 0.25
    assert metrics["reward/macro_mean"] == pytest.approx((1 / 2 + 2 / 12 + 1 + 0) / 4)
    assert metrics["reward/micro_mean"] == pytest.approx((2 + 2 + 12 + 0) / 40)
    assert metrics["reward/trained"] == pytest.approx((2 + 2 + 4 + 0) / 16)
    assert metrics["pass_rate/mean"] == pytest.approx((0.5 + 0 + 1 + 0) / 4)


def test_a_prompt_with_one_positive_of_many_is_short_of_positives():
    pools, _ = run([1] + [0] * 11)
    metrics = metrics_of(pools)
    assert metrics["frac_exit_condition_met"] == metrics["frac_all_wrong"] == metrics["frac_all_correct"] == 0
    assert [metrics[f"frac_missing_positives/round_{k}"] for k in (1, 2, 3)] == [1, 1, 1]
    assert [metrics[f"frac_missing_negatives/round_{k}"] for k in (1, 2, 3)] == [0, 0, 0]


def test_rounds_that_did_not_happen_are_counted_as_zero():
    pools, _ = run(MIXED, MIXED)
    metrics = metrics_of(pools, rounds=3)
    assert [metrics[f"active_prompts/round_{k}"] for k in (1, 2, 3)] == [2, 0, 0]
    assert [metrics[f"frac_missing_positives/round_{k}"] for k in (1, 2, 3)] == [0, 0, 0]


def test_metrics_of_unscored_pools_are_finite_or_nan_never_an_error():
    pools, _ = run([NAN] * 12)
    metrics = metrics_of(pools)
    assert metrics["frac_unscored"] == 1
    assert metrics["frac_zero_advantage_groups"] == 1
    assert metrics["frac_missing_positives/round_3"] == metrics["frac_missing_negatives/round_3"] == 1
    assert math.isnan(metrics["success_reward/min"]) and math.isnan(metrics["success_reward/max"])
    assert math.isnan(metrics["reward/micro_mean"])


@pytest.mark.parametrize(("positives", "m", "n"), [(0, 8, 4), (1, 8, 4), (4, 8, 4), (7, 8, 4), (3, 4, 4), (2, 9, 3)])
def test_zero_signal_probability_counts_subsets(positives, m, n):
    rewards = [1.0] * positives + [0.0] * (m - positives)
    subsets = list(itertools.combinations(rewards, n))
    expected = sum(len(set(subset)) == 1 for subset in subsets) / len(subsets)
    assert zero_gradient_probability(rewards, n) == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(0.4, 0.6), (2.0, 5.0), (5.0, 1.0)])
def test_zero_signal_of_small_pools_is_that_of_grpo_on_average(shape):
    """Budgets of 2 to 6 from noisy estimates: easy prompts have small pools, which is no reason to call them better."""
    rng = random.Random(0)
    rates = [rng.betavariate(*shape) for _ in range(4000)]
    sizes = [2 + int(4.99 * (1 - min(max(p + rng.gauss(0, 0.2), 0), 1))) for p in rates]
    rewards = [[float(rng.random() < p) for _ in range(size)] for p, size in zip(rates, sizes, strict=True)]
    pools = [Pool(0.7, [Rollout(i, r, r) for i, r in enumerate(values)]) for values in rewards]
    expected = sum(p**4 + (1 - p) ** 4 for p in rates) / len(rates)
    assert zero_signal_of_grpo(pools, 4).mean() == pytest.approx(expected, abs=0.015)


def test_samples_by_estimate_are_means_over_bins():
    found = rollouts_by_estimate([0.0, 0.09, 0.1, 0.55, 1.0, 1.0], [32, 16, 8, 4, 2, 3])
    assert found == {"rollouts_at_0.05": 24, "rollouts_at_0.15": 8, "rollouts_at_0.55": 4, "rollouts_at_0.95": 2.5}


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("ada_trl.core, ada_trl.planning.outcomes, ada_trl.planning.difficulty", {"torch", "trl", "transformers"}),
        ("ada_trl.plan", {"torch", "transformers"}),  # whose options are parsed by TRL's parser
    ],
)
def test_core_and_planning_start_without_torch(modules, without):
    code = f"import sys, {modules}; print({without!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
