"""Pass rates from counts: closed forms, the fitted prior, no bias from early stopping, state, calibration, and the joint estimate."""

import json
import math

import numpy as np
import pytest

from ada_trl.core import EMAPassRate, ExitCondition, brier_metrics
from ada_trl.core.grid_selector import GridSelector
from ada_trl.core.pass_rate_ema import PromptCounts, beta_binomial_sufficient_stats, fit_beta_prior
from ada_trl.pass_rates.joint_pass_rate import JointPassRate

from .simulation import assert_mean, sample_pools


POS = ExitCondition(1)


def early_stopped_counts(pass_rates, seed, exit_condition=POS):
    """Positives and rollouts of each prompt after at most four rounds of eight, as arrays."""
    pools = sample_pools(pass_rates, exit_condition, samples_per_round=8, max_rounds=4, seed=seed)
    return np.array([(pool.positives, pool.scored) for pool in pools]).T


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
    assert (counts.positives, counts.num_rollouts, counts.last_step) == (3, 12, 7)


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_counts_are_discounted_each_time_the_prompt_is_sampled(decay):
    estimator = EMAPassRate(decay=decay, alpha=2, beta=3)
    rng = np.random.default_rng(0)
    num_rollouts = rng.integers(1, 33, size=20)
    positives = rng.binomial(num_rollouts, 0.3)
    for step in range(20):
        # Outcomes of other prompts in between do not discount x.
        estimator.observe(["x", f"other {step}"], [int(positives[step]), 1], [int(num_rollouts[step]), 2], step=step)
        estimator.observe(["other"], [1], [2], step=step)
    weights = decay ** np.arange(19, -1, -1)
    expected = (weights @ positives + 2) / (weights @ num_rollouts + 5)
    assert estimator.predict(["x"]) == [pytest.approx(expected)]


def test_duplicates_within_a_step_share_one_estimate_and_one_discount():
    together, apart = EMAPassRate(), EMAPassRate()
    for step in range(3):
        together.observe(["x", "y", "x"], [1, 0, 3], [8, 8, 8], step=step)
        apart.observe(["x", "y"], [4, 0], [16, 8], step=step)
    assert together.state_dict() == apart.state_dict()
    assert together.counts["x"].discounted_rollouts == pytest.approx(16 * (1 + 0.9 + 0.81))


def test_a_step_without_scored_rollouts_changes_nothing():
    estimator = EMAPassRate(prior="empirical")
    estimator.observe(["x"], [2], [8], step=1)
    before = estimator.state_dict()
    estimator.observe(["x", "y"], [0, 0], [0, 0], step=2)
    assert estimator.state_dict() == before
    assert "y" not in estimator.counts


@pytest.mark.parametrize(("positives", "num_rollouts"), [(3, 2), (-1, 2)])
def test_impossible_counts_are_rejected(positives, num_rollouts):
    with pytest.raises(ValueError, match=f"'x' has {positives} positives in {num_rollouts} rollouts"):
        EMAPassRate().observe(["x"], [positives], [num_rollouts], step=0)


# Early stopping


@pytest.mark.parametrize(("decay", "exit_condition"), [(0.9, POS), (1.0, ExitCondition(2, 2))], ids=["pos", "balance"])
def test_counts_are_unbiased_under_early_stopping(decay, exit_condition):
    """
    Wald's identity: E[positives] = p · E[rollouts] for any stopping rule, so also for discounted sums of them. The mean
    of the pool means is off by a third or more at p = 0.05 (0.077 for pos, 0.067 for balance).
    """
    p, prompts = 0.05, 4000
    estimator, keys, pool_means = EMAPassRate(decay=decay), [str(i) for i in range(prompts)], []
    for step in range(5):
        counts = early_stopped_counts(np.full(prompts, p), (step, 1), exit_condition)
        observe(estimator, keys, counts, step)
        pool_means.append(counts[0] / counts[1])
    discounted = [estimator.counts[key] for key in keys]
    excess = [c.discounted_positives - p * c.discounted_rollouts for c in discounted]
    assert_mean(excess, 0, scale=p * np.mean([c.discounted_rollouts for c in discounted]))
    known = {1: 0.077, 2: 0.067}[exit_condition.min_positives]
    assert np.mean(pool_means) == pytest.approx(known, abs=2e-3)


# Fitted prior


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 16.0), (0.5, 0.5), (2.0, 6.0)])
@pytest.mark.parametrize("exit_condition", [POS, ExitCondition(2, 2), ExitCondition(10**9)])
def test_the_prior_is_recovered_whatever_stopped_the_sampling(alpha, beta, exit_condition):
    """The standard error of the mean of a prior, √(m(1−m)/(prompts · (1 + α + β))) at best, is doubled for p̂ ≠ p."""
    prompts = 3000
    pass_rates = np.random.default_rng(3).beta(alpha, beta, size=prompts)
    tally = beta_binomial_sufficient_stats(early_stopped_counts(pass_rates, 4, exit_condition).T)
    fitted = (1.0, 1.0)
    for _ in range(10):
        fitted = fit_beta_prior(tally, *fitted)
    mean, fitted_mean = alpha / (alpha + beta), fitted[0] / sum(fitted)
    error = math.sqrt(mean * (1 - mean) / (prompts * (1 + alpha + beta)))
    assert fitted_mean == pytest.approx(mean, abs=5 * 2 * error)
    assert sum(fitted) == pytest.approx(alpha + beta, rel=0.25)


def test_the_fit_reaches_the_maximum_of_the_likelihood():
    totals = [(0, 8), (1, 8), (0, 32), (3, 16), (6, 8), (8, 8), (2, 4)]
    alpha, beta = 1.0, 1.0
    for _ in range(20):
        alpha, beta = fit_beta_prior(beta_binomial_sufficient_stats(totals), alpha, beta)

    def log_likelihood(a, b):
        return sum(
            math.lgamma(k + a) + math.lgamma(n - k + b) + math.lgamma(a + b)
            - math.lgamma(n + a + b) - math.lgamma(a) - math.lgamma(b)
            for k, n in totals
        )  # fmt: skip

    best = log_likelihood(alpha, beta)
    assert all(
        log_likelihood(alpha * a, beta * b) < best for a, b in [(1.05, 1), (0.95, 1), (1, 1.05), (1, 0.95), (1.1, 1.1)]
    )


def test_the_prior_is_fitted_from_32_prompts_on_and_predicts_new_ones():
    estimator = EMAPassRate(decay=1, prior="empirical")
    pass_rates = np.random.default_rng(5).beta(6, 4, size=400)
    for step in range(40):
        assert (estimator.prior_mean == 1 / 17) == (step < 4)  # 8 prompts a step
        counts = early_stopped_counts(pass_rates[8 * step : 8 * step + 8], (step, 6))
        observe(estimator, [f"{step} {i}" for i in range(8)], counts, step)
    assert estimator.predict(["new"]) == [estimator.prior_mean] == [pytest.approx(0.6, abs=0.08)]


@pytest.mark.parametrize(("prompts_per_step", "is_fitted"), [(3, False), (4, True)])
def test_the_prior_is_not_fitted_to_fewer_than_4_prompts_per_step(prompts_per_step, is_fitted):
    """Discounted by 0.9 per step, 3 prompts per step never add up to the 32 that a fit takes; 4 do."""
    estimator = EMAPassRate(prior="empirical")
    for step in range(100):
        keys = [f"{step} {i}" for i in range(prompts_per_step)]
        estimator.observe(keys, [2] * prompts_per_step, [4] * prompts_per_step, step=step)
    assert (estimator.prior_mean != 1 / 17) == is_fitted


@pytest.mark.parametrize("positives", [0, 8])
def test_the_prior_of_a_run_with_equal_rewards_is_finite(positives):
    estimator = EMAPassRate(prior="empirical")
    for step in range(20):
        estimator.observe([str(i) for i in range(50)], [positives] * 50, [8] * 50, step=step)
    assert 0 < estimator.predict(["new"])[0] < 1
    assert abs(estimator.predict(["new"])[0] - positives / 8) < 0.01


# State


@pytest.mark.parametrize("prior", ["fixed", "empirical"])
def test_resumed_equals_uninterrupted_through_json(prior):
    def observe_steps(estimator, steps):
        for step in steps:
            keys = [str(i * (step + 1) % 60) for i in range(40)]
            observe(estimator, keys, early_stopped_counts(np.linspace(0.05, 0.95, 40), (step, 7)), step)

    whole, resumed = EMAPassRate(prior=prior), EMAPassRate(prior=prior)
    observe_steps(whole, range(3))
    state = whole.state_dict()
    text = json.dumps(state)
    observe_steps(whole, range(3, 6))
    assert json.dumps(state) == text, "The state is a copy."
    resumed.load_state_dict(json.loads(text))
    observe_steps(resumed, range(3, 6))
    assert resumed.state_dict() == whole.state_dict()
    keys = [*whole.counts, "new"]
    assert resumed.predict(keys) == whole.predict(keys)
    assert (whole.prior_mean == 1 / 17) == (prior == "fixed")


# Calibration


def test_the_brier_score_is_the_mean_over_rollouts():
    metrics = brier_metrics([0.25, 0.5], [1, 3], [8, 4])
    outcomes = [(0.25, 1)] + [(0.25, 0)] * 7 + [(0.5, 1)] * 3 + [(0.5, 0)]
    assert metrics["brier"] == pytest.approx(np.mean([(p - y) ** 2 for p, y in outcomes]))
    assert metrics["brier_constant"] == pytest.approx(np.mean([(4 / 12 - y) ** 2 for _, y in outcomes]))
    assert all(math.isnan(value) for value in brier_metrics([0.5], [0], [0]).values())


def test_the_brier_score_is_comparable_under_early_stopping():
    """Per rollout p(1 − p) + (p̂ − p)² in expectation, weighted by rollouts, although the sampling was stopped early."""
    p, prediction = 0.1, 0.3
    excess = []
    for seed in range(400):
        positives, num_rollouts = early_stopped_counts(np.full(20, p), (seed, 8))
        total = brier_metrics([prediction] * 20, positives, num_rollouts)["brier"] * num_rollouts.sum()
        excess.append(total / 20 - (p * (1 - p) + (prediction - p) ** 2) * num_rollouts.mean())
    assert_mean(excess, 0, scale=1.0)


# Joint estimate


def test_ties_go_to_the_first_candidate_whatever_the_rounding():
    for rounding in (1e-15, -1e-15):
        selector = GridSelector(0.9, {"a": (4.0, 1.0, 2.0), "b": (0.5, 1.0)})
        errors = np.full((3, 2), 0.3)
        errors[1, 1] += rounding
        selector.observe(errors)
        assert selector.selected == {"a": 4.0, "b": 0.5}
    better = np.full((3, 2), 0.3)
    better[2, 1] -= 1e-6
    selector.observe(better)
    assert selector.selected == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize("pseudo_counts", [1.0, 4.0, 16.0])
def test_the_pseudo_counts_of_predicted_pass_rates_are_found(pseudo_counts):
    """The next candidate is worse by several standard errors of the difference."""
    rng = np.random.default_rng(0)
    predictions = rng.uniform(0.1, 0.9, 20_000)
    p = rng.beta(pseudo_counts * predictions, pseudo_counts * (1 - predictions))
    counts = [PromptCounts(6.0, float(k)) for k in rng.binomial(6, p)]
    joint = JointPassRate()
    assert joint.selector.selected["pseudo_counts"] == 4.0
    joint.observe(predictions, counts, rng.binomial(4, p), np.full(20_000, 4))
    assert joint.selector.selected["pseudo_counts"] == pseudo_counts
    resumed = JointPassRate()
    resumed.selector.load_state_dict(joint.selector.state_dict())
    assert resumed.predict(predictions[:9], counts[:9]) == joint.predict(predictions[:9], counts[:9])
