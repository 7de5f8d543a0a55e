"""
Monte Carlo: what the estimators do on average.

Tolerances are five standard errors of the mean, taken from the sample itself: with the fixed seeds the tests are
deterministic, and a wrong formula of the size that matters here is dozens of standard errors away.
"""

import math

import numpy as np
import pytest

from ada_trl.core import (
    ExitCondition,
    Pool,
    Rollout,
    eliminate,
    group_advantages,
    prompt_weight,
    select_group,
    zero_gradient_probability,
)


def close_to(samples, expected):
    samples = np.asarray(samples, dtype=float)
    tolerance = 5 * samples.std(ddof=1) / math.sqrt(len(samples))
    assert tolerance < 0.1 * abs(expected), "too few samples to say anything"
    assert samples.mean() == pytest.approx(expected, abs=tolerance)


def bernoulli_pools(p, num_prompts, exit_condition, samples_per_round, max_rounds, seed=0):
    rng = np.random.default_rng(seed)

    def draw(rows):
        rewards = (rng.random(len(rows)) < p).astype(float).tolist()
        return [Rollout(draw, reward, reward) for (_, draw), reward in zip(rows, rewards, strict=True)]

    return eliminate(
        num_prompts,
        draw,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        positive_threshold=0.7,
    )


def expected_pool_mean(p, m, rounds, exit_condition):
    """Exact E[pool mean] under early stopping, by dynamic programming over the number of positives."""
    pmf = [math.comb(m, k) * p**k * (1 - p) ** (m - k) for k in range(m + 1)]
    active, expectation = {0: 1.0}, 0.0
    for r in range(1, rounds + 1):
        reached = {}
        for positives, probability in active.items():
            for k, q in enumerate(pmf):
                reached[positives + k] = reached.get(positives + k, 0.0) + probability * q
        active = {}
        for positives, probability in reached.items():
            resolved = positives >= exit_condition.min_positives and r * m - positives >= exit_condition.min_negatives
            if resolved or r == rounds:
                expectation += probability * positives / (r * m)
            else:
                active[positives] = probability
    return expectation


@pytest.mark.parametrize("p", [0.1, 0.3, 0.7])
def test_one_at_a_time_until_the_first_positive_takes_one_over_p_draws(p):
    pools = bernoulli_pools(p, 4000, ExitCondition(1), samples_per_round=1, max_rounds=400)
    close_to([len(pool) for pool in pools], 1 / p)


@pytest.mark.parametrize(("p", "m", "n"), [(0.05, 8, 4), (0.2, 8, 4), (0.2, 4, 3)])
def test_expected_draws_in_rounds(p, m, n):
    pools = bernoulli_pools(p, 4000, ExitCondition(1), samples_per_round=m, max_rounds=n)
    close_to([len(pool) for pool in pools], m * (1 - (1 - p) ** (m * n)) / (1 - (1 - p) ** m))


@pytest.mark.parametrize(
    ("exit_condition", "known"), [(ExitCondition(1), 0.077), (ExitCondition(2, 2), 0.067)], ids=["pos", "balance"]
)
def test_early_stopping_biases_the_pool_mean_by_the_known_amount(exit_condition, known):
    expected = expected_pool_mean(0.05, 8, 4, exit_condition)
    assert expected == pytest.approx(known, abs=1e-3)
    pools = bernoulli_pools(0.05, 8000, exit_condition, samples_per_round=8, max_rounds=4)
    close_to([pool.mean for pool in pools], expected)
    assert expected > 1.3 * 0.05


def test_first_round_is_unbiased_for_the_signal_loss_of_grpo():
    rng = np.random.default_rng(0)
    for p in (0.1, 0.5, 0.9):
        samples = [zero_gradient_probability((rng.random(8) < p).tolist(), 4) for _ in range(8000)]
        close_to(samples, p**4 + (1 - p) ** 4)


# A one-parameter Bernoulli policy with pass rate p = σ(θ): the score of a positive is 1 − p, that of a negative is −p,
# and ∇p = p(1 − p).


def gradients(p, *, n=4, pool_size=32, prompts=4000, **kwargs):
    """Gradient estimate of each prompt: the mean over the group of advantage × score, from pools of a fixed size."""
    pools = bernoulli_pools(p, prompts, ExitCondition(10**9), samples_per_round=pool_size, max_rounds=1, seed=1)
    estimates = []
    for i, pool in enumerate(pools):
        group = select_group(pool, n, (2, i))
        advantages = group_advantages(pool, group, **kwargs)
        scores = [1 - p if pool.is_positive(rollout) else -p for rollout in group]
        estimates.append(np.dot(advantages, scores) / n)
    return estimates


@pytest.mark.parametrize("p", [0.3, 0.5, 0.8])
def test_paper_form_has_the_stated_effective_weight(p):
    effective = ((1 - p) ** 2 + p**2) / (2 * p * (1 - p))
    # With 512 rollouts per pool, E[p̂] = p exactly and both sides are never short of n/2.
    close_to(gradients(p, pool_size=512, prompts=500, weighting="none"), effective * p * (1 - p))
    assert p == 0.5 or effective > 1.2


def pool_expectation(p, size, value):
    """E over Binomial(size, p) of value(p̂), degenerate pools (no gradient) left out."""
    return sum(math.comb(size, k) * p**k * (1 - p) ** (size - k) * value(k / size) for k in range(1, size))


@pytest.mark.parametrize(
    ("p", "weighting"), [(0.1, "none"), (0.8, "none"), (0.1, "inverse_sqrt"), (0.5, "inverse_sqrt"), (0.5, "inverse")]
)
def test_selection_correction_gives_the_weight_times_the_gradient(p, weighting):
    """Corrected: p̂(1−p̂)[(1−p) + p] · w(p̂). Its expectation is w(p) ∇p up to O(1/pool size), stated exactly here."""
    size = 32
    exact = pool_expectation(p, size, lambda q: prompt_weight(q, size, weighting) * q * (1 - q))
    close_to(gradients(p, pool_size=size, weighting=weighting, selection_correction=True), exact)
    if weighting == "none":
        assert exact == pytest.approx(p * (1 - p) * (size - 1) / size)  # the baseline contains the rollout itself

    large = 2048
    assert pool_expectation_normal(p, large, weighting) == pytest.approx(
        prompt_weight(p, large, weighting) * p * (1 - p), rel=5e-3
    )


def pool_expectation_normal(p, size, weighting):
    """The same expectation for a large pool, by sampling-free quadrature over p̂ ± 8 standard deviations."""
    k = np.arange(1, size)
    log_pmf = [
        math.lgamma(size + 1)
        - math.lgamma(i + 1)
        - math.lgamma(size - i + 1)
        + i * math.log(p)
        + (size - i) * math.log(1 - p)
        for i in k
    ]
    values = [prompt_weight(i / size, size, weighting) * (i / size) * (1 - i / size) for i in k]
    return float(np.dot(np.exp(log_pmf), values))


@pytest.mark.parametrize(("positives", "size"), [(1, 8), (3, 8), (2, 24), (31, 32)])
def test_correction_is_exact_for_the_selection(positives, size):
    """Given the pool, the mean over all groups that may be selected is the mean over the whole pool, whatever stopped it."""
    p, rewards = 0.3, [1.0] * positives + [0.0] * (size - positives)
    pool = Pool(0.7, [Rollout(i, reward, reward) for i, reward in enumerate(rewards)])
    group = select_group(pool, 4, (0,))  # rollouts of a side are alike here, so one group stands for all
    for corrected in (True, False):
        advantages = group_advantages(pool, group, weighting="none", selection_correction=corrected)
        scores = [1 - p if pool.is_positive(rollout) else -p for rollout in group]
        q = positives / size
        whole = q * (1 - q) * ((1 - p) + p)
        assert (np.dot(advantages, scores) / 4 == pytest.approx(whole)) == corrected


def test_correction_and_paper_form_differ_where_they_should():
    p = 0.1
    paper = np.mean(gradients(p, pool_size=256, prompts=500, weighting="none"))
    corrected = np.mean(gradients(p, pool_size=256, prompts=500, weighting="none", selection_correction=True))
    assert paper / corrected == pytest.approx(((1 - p) ** 2 + p**2) / (2 * p * (1 - p)), rel=0.05)


def test_pool_statistics_of_a_uniform_round_are_unbiased():
    pools = bernoulli_pools(0.2, 4000, ExitCondition(10**9), samples_per_round=8, max_rounds=1)
    close_to([Pool(0.7, pool.rollouts).mean for pool in pools], 0.2)
