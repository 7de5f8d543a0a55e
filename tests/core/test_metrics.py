"""Metrics of given rollouts, and the import of core without torch."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from ada_trl.core import SlotRule, detailed_metrics, pool_advantages, round_metrics, sampling_metrics, select_groups
from ada_trl.core.metrics import kind_of_rewards, mean_and_std, rollouts_by_estimate, zero_variance_probability

from .simulation import rollouts_of


NAN = math.nan
MIXED = [1, 0, 1, 0]
HARD = [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
EASY = [1] * 12
NEVER = [0] * 12


def metrics_of(*rewards):
    """Of pools after at most three rounds of four rollouts."""
    rollouts = rollouts_of(*rewards)
    selected = select_groups(rollouts, 4, [(i,) for i in range(len(rewards))])
    rule, options = SlotRule(2, 2, 3), {"samples_per_round": 4, "is_on_distribution_P": np.full(len(rewards), True)}
    metrics = detailed_metrics(rollouts, selected, rule, samples_per_round=4)
    metrics |= round_metrics(rollouts, rule, samples_per_round=4)
    return metrics | sampling_metrics(rollouts, selected, pool_advantages(rollouts), num_generations=4, **options)


def by_round(metrics, name):
    return [metrics[f"{name}/round_{k}"] for k in (1, 2, 3)]


def test_metrics_of_a_step_line_by_line():
    metrics = metrics_of(MIXED, HARD, EASY, NEVER)
    assert metrics["samples_per_prompt/mean"] == (4 + 12 + 12 + 12) / 4
    assert metrics["rounds/mean"] == 2.5
    assert by_round(metrics, "active_prompts") == [4, 3, 3]
    assert by_round(metrics, "frac_missing_positives") == [0.5, 0.5, 0.25]
    assert by_round(metrics, "frac_missing_negatives") == [0.25] * 3
    assert metrics["frac_exit_condition_met"] == 0.5
    assert metrics["frac_all_correct"] == metrics["frac_all_wrong"] == 0.25
    assert metrics["frac_reward_zero_std/first_round"] == 0.75  # HARD, EASY and NEVER start with equal rewards
    assert metrics["frac_zero_advantage_groups"] == 0.5
    assert metrics["frac_recovered_groups"] == 0.25
    assert metrics["reward/macro_mean"] == pytest.approx((1 / 2 + 2 / 12 + 1 + 0) / 4)
    assert metrics["reward/micro_mean"] == pytest.approx((2 + 2 + 12 + 0) / 40)
    assert metrics["reward/trained"] == pytest.approx((2 + 2 + 4 + 0) / 16)
    assert metrics["pass_rate/mean"] == pytest.approx((0.5 + 0 + 1 + 0) / 4)


def test_a_prompt_with_one_positive_of_many_is_missing_positives():
    metrics = metrics_of([1] + [0] * 11)
    assert metrics["frac_exit_condition_met"] == metrics["frac_all_wrong"] == metrics["frac_all_correct"] == 0
    assert by_round(metrics, "frac_missing_positives") == [1, 1, 1]
    assert by_round(metrics, "frac_missing_negatives") == [0, 0, 0]


def test_rounds_that_were_not_needed_have_no_active_prompts():
    metrics = metrics_of(MIXED, MIXED)
    assert by_round(metrics, "active_prompts") == [2, 0, 0]
    assert by_round(metrics, "frac_missing_positives") == [0, 0, 0]


def test_metrics_of_unscored_pools_are_nan():
    metrics = metrics_of([NAN] * 12)
    assert metrics["frac_zero_advantage_groups"] == 1
    assert metrics["frac_missing_positives/round_3"] == metrics["frac_missing_negatives/round_3"] == 1
    assert all(math.isnan(metrics[name]) for name in ("pass_rate/mean", "reward/macro_mean", "reward/micro_mean"))


def test_prompts_on_which_the_function_of_success_abstains_need_no_further_rounds():
    pools = [MIXED, [0.1, 0.2, 0.3, 0.4], [NAN] * 4, [0] * 4]
    rollouts = rollouts_of(*pools, success=[MIXED, [NAN] * 4, [NAN] * 4, [0] * 4])
    selected = select_groups(rollouts, 4, [(i,) for i in range(4)])
    rule = SlotRule(2, 2, 3)
    metrics = detailed_metrics(rollouts, selected, rule, samples_per_round=4)
    assert round_metrics(rollouts, rule, samples_per_round=4)["frac_exit_condition_met"] == 2 / 4
    assert metrics["frac_all_wrong"] == 1 / 4


@pytest.mark.parametrize(("positives", "m", "n"), [(0, 8, 4), (1, 8, 4), (4, 8, 4), (7, 8, 4), (3, 4, 4), (2, 9, 3)])
def test_zero_variance_probability_is_the_share_of_subsets(positives, m, n):
    """So that it is unbiased for p^n + (1 − p)^n."""
    rewards = [1.0] * positives + [0.0] * (m - positives)
    subsets = list(itertools.combinations(rewards, n))
    expected = sum(len(set(subset)) == 1 for subset in subsets) / len(subsets)
    found = zero_variance_probability(rollouts_of([1, 0, 0.5, NAN, 1], rewards, [NAN] * 4), n)
    assert found.tolist() == pytest.approx([0.0, expected, 1.0])


# Rewards of 512 prompts with several rollouts of each, as functions of the generator.
SHAPE = (512, 4)


def correct(rng, p):
    return (rng.random(SHAPE) < p).astype(float)


def errors(rng):
    """One wrong digit, most often the last one, or in 1 of 100 completions no number; some are right."""
    error = rng.integers(1, 10, SHAPE) * 10.0 ** rng.choice(4, SHAPE, p=(0.6, 0.3, 0.08, 0.02))
    error[rng.random(SHAPE) < 0.01] = np.inf
    error[rng.random(SHAPE) < 0.3] = 0
    return error


REWARDS = {
    **{f"{p} correct": ("comparable", lambda rng, p=p: correct(rng, p)) for p in (0.002, 0.02, 0.5, 0.9, 0.99, 0.998)},
    **{
        f"digits, {p} correct": ("comparable", lambda rng, p=p: rng.binomial(4, p, SHAPE) / 4)
        for p in (0.3, 0.8, 0.98)
    },
    "distance": ("comparable", lambda rng: 1 / (1 + errors(rng))),
    "partial credit": ("comparable", lambda rng: rng.beta(5, 3, SHAPE).round(2)),
    "two functions": ("comparable", lambda rng: correct(rng, 0.3) + 0.2 * correct(rng, 0.5)),
    "length": ("comparable", lambda rng: correct(rng, 0.8) - 0.02 * rng.integers(1, 9, SHAPE)),
    "rare high reward": ("comparable", lambda rng: 100 * correct(rng, 0.01) + 0.1 * rng.integers(0, 5, SHAPE)),
    "error": ("outliers", lambda rng: -np.minimum(errors(rng) / 100, 100)),
    "heavy tail": ("outliers", lambda rng: -rng.lognormal(0, 2, SHAPE)),
    "offset": ("levels", lambda rng: correct(rng, 0.3) + rng.uniform(0, 4, (512, 1))),
    "continuous": ("distinct", lambda rng: rng.normal(0, 1, SHAPE)),
    "continuous in bfloat16": (
        "distinct",
        lambda rng: torch.tensor(rng.normal(0, 3, SHAPE)).bfloat16().double().numpy(),
    ),
}


@pytest.mark.parametrize("scale", [1, 2.0**10, 2.0**-10])
@pytest.mark.parametrize("name", REWARDS)
def test_the_kind_of_rewards_of_several_rollouts_or_of_one_of_each_prompt(name, scale):
    """One rollout per prompt cannot tell levels of different prompts from a continuous score."""
    expected, sample = REWARDS[name]
    for seed in range(20):
        rewards = scale * sample(np.random.default_rng(seed))
        several = rewards[:128]
        assert kind_of_rewards(several.ravel(), np.repeat(np.arange(128), 4)) == expected.replace(
            "distinct", "comparable"
        )
        assert kind_of_rewards(rewards[:, 0], np.arange(512)) == expected.replace("levels", "distinct")


def test_levels_are_noticed_from_a_few_prompts_whatever_their_numbers():
    rng, prompt_N = np.random.default_rng(0), np.repeat([7, 3, 12, 5, 1, 8, 2, 0], 8)
    level_N = np.array([0.0, 1.0, 2.0, 3.0])[prompt_N % 4]
    order = rng.permutation(64)
    success_N = (rng.random(64) < 0.2).astype(float)
    assert kind_of_rewards((level_N + success_N)[order], prompt_N[order]) == "levels"
    assert kind_of_rewards(success_N, prompt_N) == "comparable"
    # Pass rates of 0 and 1.
    assert kind_of_rewards((prompt_N % 2).astype(float), prompt_N) == "comparable"


@pytest.mark.parametrize("rewards", [[0.5] * 9, [0.0, 1.0]])
def test_equal_rewards_and_two_of_one_prompt_are_comparable(rewards):
    assert kind_of_rewards(np.array(rewards), np.zeros(len(rewards), dtype=int)) == "comparable"


def test_rollouts_by_estimate_are_means_over_bins():
    found = rollouts_by_estimate([0.0, 0.09, 0.1, 0.55, 1.0, 1.0], [32, 16, 8, 4, 2, 3])
    assert found == {"rollouts_at_0.05": 24, "rollouts_at_0.15": 8, "rollouts_at_0.55": 4, "rollouts_at_0.95": 2.5}


def test_mean_and_std_with_each_prompt_once():
    def statistics(*values, each_prompt_once):
        rollouts = rollouts_of(*values)
        return mean_and_std(rollouts.reward_N, rollouts.prompt_N, each_prompt_once=each_prompt_once)

    mean, std = statistics([1.0, 0.0], [0.0, NAN], [1.0, 1.0, 1.0, 1.0], [NAN], each_prompt_once=True)
    assert mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert std**2 == pytest.approx((1 / 4) / (1 - (2 / 36 + 1 / 9 + 4 / 144)))
    equal = torch.tensor([[1.0, 0.0], [0.5, 0.25]])
    for once in (False, True):  # equal to TRL's if the groups have equal sizes
        found = statistics(*equal.tolist(), each_prompt_once=once)
        assert found == pytest.approx((equal.mean().item(), equal.std().item()))
    assert all(map(math.isnan, statistics([NAN], [NAN], each_prompt_once=True)))


def test_core_is_imported_without_torch():
    code = "import sys, ada_trl.core; print({'torch', 'trl', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
