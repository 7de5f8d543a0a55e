"""Prompt weights, and advantages with the pool's own statistics."""

import math
from collections.abc import Sequence

from .pool import Pool, Rollout, sample_std


PromptWeighting = str | float  # a name of `POWERS`, or α

POWERS = {"inverse": 0.0, "inverse_sqrt": 0.5, "none": 1.0}  # α of the power objective by its name
STD_EPSILON = 1e-4  # as in TRL's GRPOTrainer
MAX_ADVANTAGE = 1e12  # larger ones overflow float32 in the loss or in the norm of the gradient, and weights become NaN


def clip_advantage(advantage: float) -> float:
    """Clip an advantage to ±[`MAX_ADVANTAGE`], which only rewards close to the largest float32 reach."""
    return max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, advantage))


def prompt_weight(pass_rate: float, pool_size: int, weighting: PromptWeighting) -> float:
    """
    Compute the prompt weight f'(p̂) = p̂^(α−1) of a power objective J_f = E[f(p(x))], f(p) = p^α / α
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), v3).

    | `weighting` | α | f'(p) | |
    |---|---|---|---|
    | `"none"` | 1 | 1 | Algorithm 2; f(p) = p |
    | `"inverse_sqrt"` | 1/2 | p^(−1/2) | the hybrid: the other half of 1/p is in the number of rollouts |
    | `"inverse"` | 0 | 1/p | f(p) = log p |

    Args:
        pass_rate (`float`):
            p̂; with NaN (nothing was scored) the weight is 1, and all advantages are 0.
        pool_size (`int`):
            Number of rollouts that p̂ was computed from. p̂ is clamped below at 1 / `pool_size`, which only affects pools
            without a positive: the weight is at most `pool_size`^(1−α).
        weighting (`str` or `float`):
            A name, or α between 0 and 1.
    """
    if math.isnan(pass_rate):
        return 1.0
    alpha = POWERS[weighting] if isinstance(weighting, str) else weighting
    return max(pass_rate, 1 / pool_size) ** (alpha - 1)


def group_advantages(
    pool: Pool,
    group: Sequence[Rollout],
    *,
    weighting: PromptWeighting = "inverse_sqrt",
    std: float | None = None,
    selection_correction: bool = False,
) -> list[float]:
    """
    Compute A_i = c_i · w(p̂) · (r_i − r̄) [/ (σ + 1e-4)], with r̄ and p̂ of the **whole pool** and the real reward r_i
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2, global statistics).

    With n/2 positives and n/2 negatives selected, the paper's form (c_i = 1) follows [(1−p)² + p²] / (2p(1−p)) · ∇p
    instead of ∇p. `selection_correction` multiplies the k₊ selected positives by p̂·n/k₊ and the k₋ negatives by
    (1−p̂)·n/k₋, which undoes the *selection* exactly: given the pool, the group's expected gradient is that of the whole
    pool. A side that is absent from the group cannot be corrected for. The effect of early stopping and of the cap on the
    pool remains: with Seq-balance (M = 8, N = 4, n = 4) and weight 1 the gradient is 1.13, 1.19, 0.91 and 1.19 times
    ∇p at p = 0.02, 0.1, 0.5 and 0.9.

    Args:
        pool (`Pool`):
            All rollouts of the prompt.
        group (`Sequence[Rollout]`):
            The n selected rollouts.
        weighting (`str` or `float`, *optional*, defaults to `"inverse_sqrt"`):
            See [`prompt_weight`].
        std (`float`, *optional*):
            σ to divide by; `None` does not divide.
        selection_correction (`bool`, *optional*, defaults to `False`):
            Whether to correct for the balanced selection.

    Returns:
        `list[float]`: one advantage per selected rollout; exactly 0 for unscored rollouts and for a pool whose scored
        rewards are all equal.
    """
    if pool.has_zero_variance:
        return [0.0] * len(group)
    baseline = pool.mean
    scale = prompt_weight(pool.pass_rate, pool.scored, weighting)
    if std is not None:
        scale /= std + STD_EPSILON
    positive_factor = negative_factor = 1.0
    if selection_correction:
        selected_positives = sum(pool.is_positive(rollout) for rollout in group)
        selected_negatives = sum(pool.is_scored(rollout) for rollout in group) - selected_positives
        positive_factor = pool.pass_rate * len(group) / max(selected_positives, 1)
        negative_factor = (1 - pool.pass_rate) * len(group) / max(selected_negatives, 1)
    advantages = []
    for rollout in group:
        factor = positive_factor if pool.is_positive(rollout) else negative_factor
        advantage = clip_advantage(scale * factor * (rollout.reward - baseline))
        advantages.append(advantage if pool.is_scored(rollout) else 0.0)
    return advantages


def normalize_rewards(pool: Pool, reward_weights: Sequence[float]) -> Pool:
    """
    Replace the rewards of a pool by Σ_k w_k · (r_k − r̄_k) / (σ_k + 1e-4): each reward function is normalized with its
    statistics over the **whole pool** before the weighted sum, so that functions of a large scale do not dominate
    ([GDPO](https://huggingface.co/papers/2601.05242)). Success rewards stay the same. A function that did not score a
    rollout adds 0 to its sum; a rollout that no function scored keeps the reward NaN.
    """
    columns = []
    for k, weight in enumerate(reward_weights):
        values = [rollout.rewards[k] for rollout in pool.rollouts]
        scored = [value for value in values if not math.isnan(value)]
        mean, scale = math.fsum(scored) / max(len(scored), 1), weight / (sample_std(scored) + STD_EPSILON)
        columns.append([0.0 if math.isnan(value) else scale * (value - mean) for value in values])
    normalized = []
    for rollout, summands in zip(pool.rollouts, zip(*columns, strict=True), strict=True):
        reward = math.nan if math.isnan(rollout.reward) else math.fsum(summands)
        normalized.append(rollout._replace(reward=reward))
    return Pool(pool.positive_threshold, normalized)
