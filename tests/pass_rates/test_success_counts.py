"""Pass rates from counts: closed forms, no bias from early stopping, state, calibration."""

import copy
import math

import numpy as np
import pytest

from ada_trl.pass_rates.success_counts import EMAPassRate, brier_metrics

from ..core.simulation import assert_mean, sample_binary


POS, BALANCE = {"min_positives": 1}, {"min_positives": 2, "min_negatives": 2}


def early_stopped_counts(pass_rates, seed, rule=POS):
    """Positives and rollouts of each prompt after at most four rounds of eight, as arrays."""
    rollouts = sample_binary(pass_rates, **rule, samples_per_round=8, max_rounds=4, seed=seed)
    return rollouts.positives_P, rollouts.scored_P


def observe(estimator, keys, counts, step):
    positives, num_rollouts = counts
    estimator.observe(keys, positives.tolist(), num_rollouts.tolist(), step=step)


# Closed forms


def test_the_constants_of_the_authors():
    """λ = 0.9 and the prior (1, 16): the predicted pass rate of a new prompt is 1/17."""
    estimator = EMAPassRate()
    assert estimator.predict(["new"]) == [1 / 17]
    estimator.observe(["x"], [2], [8], step=3)
    assert estimator.predict(["x", "new"]) == [(2 + 1) / (8 + 17), 1 / 17]
    estimator.observe(["x"], [1], [4], step=7)
    assert estimator.predict(["x"]) == [pytest.approx((0.9 * 2 + 1 + 1) / (0.9 * 8 + 4 + 17))]
    counts = estimator.counts["x"]  # totals of the run are not discounted
    assert (counts.positives, counts.rollouts, counts.last_step) == (3, 12, 7)


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_counts_are_discounted_each_time_the_prompt_is_sampled(decay):
    estimator = EMAPassRate(decay=decay)
    rng = np.random.default_rng(0)
    num_rollouts = rng.integers(1, 33, size=20)
    positives = rng.binomial(num_rollouts, 0.3)
    for step in range(20):
        # Outcomes of other prompts in between do not discount x.
        estimator.observe(["x", f"other {step}"], [int(positives[step]), 1], [int(num_rollouts[step]), 2], step=step)
        estimator.observe(["other"], [1], [2], step=step)
    weights = decay ** np.arange(19, -1, -1)
    expected = (weights @ positives + 1) / (weights @ num_rollouts + 17)
    assert estimator.predict(["x"]) == [pytest.approx(expected)]


def test_duplicates_within_a_step_share_one_estimate_and_one_discount():
    together, apart = EMAPassRate(), EMAPassRate()
    for step in range(3):
        together.observe(["x", "y", "x"], [1, 0, 3], [8, 8, 8], step=step)
        apart.observe(["x", "y"], [4, 0], [16, 8], step=step)
    assert together.counts == apart.counts
    assert together.counts["x"].discounted_rollouts == pytest.approx(16 * (1 + 0.9 + 0.81))


def test_a_step_without_scored_rollouts_changes_nothing():
    estimator = EMAPassRate()
    estimator.observe(["x"], [2], [8], step=1)
    before = copy.deepcopy(estimator.counts)
    estimator.observe(["x", "y"], [0, 0], [0, 0], step=2)
    assert estimator.counts == before
    assert "y" not in estimator.counts


# Early stopping


@pytest.mark.parametrize(
    ("decay", "rule", "known"), [(0.9, POS, 0.077), (1.0, BALANCE, 0.067)], ids=["pos", "balance"]
)
def test_counts_are_unbiased_under_early_stopping(decay, rule, known):
    """
    Wald's identity: E[positives] = p · E[rollouts] for any stopping rule, so also for discounted sums of them. The
    mean of the pool means is off by a third or more at p = 0.05 (0.077 for pos, 0.067 for balance).
    """
    p, prompts = 0.05, 2000
    estimator, keys, pool_means = EMAPassRate(decay=decay), [str(i) for i in range(prompts)], []
    for step in range(5):
        counts = early_stopped_counts(np.full(prompts, p), (step, 1), rule)
        observe(estimator, keys, counts, step)
        pool_means.append(counts[0] / counts[1])
    discounted = [estimator.counts[key] for key in keys]
    excess = [c.discounted_positives - p * c.discounted_rollouts for c in discounted]
    assert_mean(excess, 0, scale=p * np.mean([c.discounted_rollouts for c in discounted]))
    assert np.mean(pool_means) == pytest.approx(known, abs=4e-3)


# Calibration


def test_the_brier_score_is_the_mean_over_rollouts():
    metrics = brier_metrics([0.25, 0.5], [1, 3], [8, 4])
    outcomes = [(0.25, 1)] + [(0.25, 0)] * 7 + [(0.5, 1)] * 3 + [(0.5, 0)]
    assert metrics["brier"] == pytest.approx(np.mean([(p - y) ** 2 for p, y in outcomes]))
    assert metrics["brier_constant"] == pytest.approx(np.mean([(4 / 12 - y) ** 2 for _, y in outcomes]))
    assert all(math.isnan(value) for value in brier_metrics([0.5], [0], [0]).values())


def test_the_brier_score_is_comparable_under_early_stopping():
    """
    Per rollout p(1 − p) + (p̂ − p)² in expectation, weighted by rollouts, although the sampling was stopped early.
    """
    p, prediction = 0.1, 0.3
    excess = []
    for seed in range(400):
        positives, num_rollouts = early_stopped_counts(np.full(20, p), (seed, 8))
        total = brier_metrics([prediction] * 20, positives, num_rollouts)["brier"] * num_rollouts.sum()
        excess.append(total / 20 - (p * (1 - p) + (prediction - p) ** 2) * num_rollouts.mean())
    assert_mean(excess, 0, scale=1.0)
