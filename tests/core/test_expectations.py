"""
Expected gradients of the paper's advantages by simulation (see `assert_mean`).

The policy is a Bernoulli variable with pass rate p = σ(θ): the score of a positive is 1 − p, that of a negative is −p, and
∇p = p(1 − p).
"""

import numpy as np
import pytest

from ada_trl.core import ExitCondition, group_advantages, select_group

from .simulation import assert_mean, sample_pools


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
