"""
Expected gradients of the paper's advantages, exactly or by simulation (see `assert_mean`).

The policy is a Bernoulli variable with pass rate p = σ(θ): the score of a positive is 1 − p, that of a negative is −p, and
∇p = p(1 − p).
"""

import math

import numpy as np
import pytest

from ada_trl.core import ExitCondition, group_advantages, prompt_weight, select_group

from .simulation import assert_mean, pool_of, sample_pools


def gradient_estimates(p, *, pool_size=32, prompts=4000, **options):
    """Gradient estimate of each prompt: the mean over the group of advantage × score, from pools of a fixed size."""
    pools = sample_pools(np.full(prompts, p), ExitCondition(10**9), samples_per_round=pool_size, max_rounds=1, seed=1)
    estimates = []
    for i, pool in enumerate(pools):
        group = select_group(pool, 4, (2, i))
        scores = [1 - p if pool.is_positive(rollout) else -p for rollout in group]
        estimates.append(np.dot(group_advantages(pool, group, **options), scores) / 4)
    return estimates


@pytest.mark.parametrize("p", [0.3, 0.5, 0.8])
def test_the_paper_form_has_the_documented_effective_weight(p):
    effective = ((1 - p) ** 2 + p**2) / (2 * p * (1 - p))
    # With 512 rollouts per pool, E[p̂] = p exactly and there are always n/2 of both kinds.
    assert_mean(gradient_estimates(p, pool_size=512, prompts=500, weighting="none"), effective * p * (1 - p))
    assert p == 0.5 or effective > 1.2


@pytest.mark.parametrize(
    ("p", "weighting"), [(0.1, "none"), (0.8, "none"), (0.1, "inverse_sqrt"), (0.5, "inverse_sqrt"), (0.5, "inverse")]
)
def test_selection_correction_gives_the_weight_times_the_gradient(p, weighting):
    """E[w(p̂) p̂(1−p̂)] over Binomial(32, p), which is w(p) ∇p up to O(1/pool size)."""
    size = 32
    exact = (
        sum(
            math.comb(size, k)
            * p**k
            * (1 - p) ** (size - k)
            * prompt_weight(k / size, size, weighting)
            * k
            * (size - k)
            for k in range(1, size)
        )
        / size**2
    )
    assert_mean(gradient_estimates(p, pool_size=size, weighting=weighting, selection_correction=True), exact)
    if weighting == "none":
        assert exact == pytest.approx(p * (1 - p) * (size - 1) / size)  # the baseline contains the rollout itself


@pytest.mark.parametrize(("positives", "size"), [(1, 8), (3, 8), (2, 24), (31, 32)])
def test_the_correction_is_exact_for_the_selection(positives, size):
    """Given the pool, the mean over all groups that may be selected is the mean over the whole pool, for any exit condition."""
    p, q = 0.3, positives / size
    pool = pool_of(*[1.0] * positives + [0.0] * (size - positives))
    group = select_group(pool, 4, (0,))  # rollouts of a kind are alike, so that one group stands for all
    for is_corrected in (True, False):
        advantages = group_advantages(pool, group, weighting="none", selection_correction=is_corrected)
        scores = [1 - p if pool.is_positive(rollout) else -p for rollout in group]
        whole = q * (1 - q) * ((1 - p) + p)
        assert (np.dot(advantages, scores) / 4 == pytest.approx(whole)) == is_corrected
