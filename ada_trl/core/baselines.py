"""
Baselines that do not depend on the rollout they are subtracted from: the leave-one-out mean of the batch, and the
posterior mean of the prompt's reward. Pure functions; `trainer/baselines.py` has the objects that the trainer uses.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .advantages import clip_advantage
from .pool import Pool


LEVEL_SHIFT = 5.0  # standard errors of a mean residual that show a change of the common mean
ROUNDING = 1e-12  # relative error of a sum of the rewards of a batch
LARGEST_DEVIATION = 1.5  # scaled residuals (r − b) / σ are clipped to ± this


def batch_leave_one_out_baselines(pools: Sequence[Pool]) -> list[list[float]]:
    """
    Compute b_i = Σ_{j ≠ i} r_j / (N − 1), the mean reward of all other rollouts of the generation batch (RLOO over the batch).

    Returns:
        `list[list[float]]`: b_i for the rollouts of each pool, in their order; NaN for rollouts without a reward, and if no other
        rollout has one.
    """
    rewards = [reward for pool in pools for reward in pool.rewards]
    total, num_others = math.fsum(rewards), len(rewards) - 1
    if num_others < 1:
        return [[math.nan] * len(pool) for pool in pools]
    return [[(total - rollout.reward) / num_others for rollout in pool.rollouts] for pool in pools]


def baseline_advantages(
    pool: Pool, baselines: Sequence[float], *, weight: float = 1.0, std: float | None = None
) -> list[float]:
    """
    Compute A_i = w · (r_i − b_i) [/ σ].

    If w, b_i and σ do not depend on r_i, the expected gradient is exactly w · E[N] · ∇(mean reward). With σ it is the
    gradient of the mean of the *clipped* rewards, divided by σ: outliers count, but do not dominate the update. Both hold
    only if *all* rollouts of the pool are trained on; a selection of them makes the gradient biased again.

    Args:
        pool (`Pool`), baselines (`Sequence[float]`):
            All rollouts of the prompt in this step, and b_i of each.
        weight (`float`, *optional*, defaults to `1.0`):
            w, the prompt weight.
        std (`float`, *optional*):
            σ to divide by, from rewards that these rollouts have no influence on; `None` does not divide. (r_i − b_i) / σ
            is clipped to ±[`LARGEST_DEVIATION`], and 0 if σ is 0, because the scale is unknown then.

    Returns:
        `list[float]`: one advantage per rollout of the pool, in their order; exactly 0 where b_i is NaN.
    """
    advantages = []
    for rollout, baseline in zip(pool.rollouts, baselines, strict=True):
        # Where all rewards are equal, a baseline from their sum may differ by rounding; the advantage is 0 nevertheless.
        is_equal = math.isclose(rollout.reward, baseline, rel_tol=ROUNDING)
        residual = 0.0 if is_equal or math.isnan(baseline) else rollout.reward - baseline
        if std is not None:
            scaled = residual / std if std > 0 else 0.0
            residual = max(-LARGEST_DEVIATION, min(LARGEST_DEVIATION, scaled))
        advantages.append(clip_advantage(weight * residual))
    return advantages


class BaselineEstimate(NamedTuple):
    """
    Estimate of a prompt's mean reward that does not depend on the prompt's rollouts in this step.

    Args:
        mean (`float`):
            m, the estimated mean reward of a rollout.
        pseudo_counts (`float`):
            s ≥ 0, the number of rollouts that the estimate is worth.
        pass_rate (`float`):
            p̂, the estimated fraction of positive rollouts, between 0 and 1, for the prompt weight.
    """

    mean: float
    pseudo_counts: float
    pass_rate: float

    def updated(self, rewards: Sequence[float]) -> "BaselineEstimate":
        """Return the estimate after also observing `rewards`. The pass rate, and so the prompt weight, stays the same."""
        pseudo_counts = self.pseudo_counts + len(rewards)
        if not pseudo_counts or math.isinf(pseudo_counts):
            return self
        # A mean that is worth 0 rollouts may be NaN, and must not enter the sum.
        estimated_sum = self.pseudo_counts * self.mean if self.pseudo_counts else 0.0
        mean = (estimated_sum + math.fsum(rewards)) / pseudo_counts
        return self._replace(mean=mean, pseudo_counts=pseudo_counts)


class ResidualSums(NamedTuple):
    """Sums of the residuals of each prompt's rollouts from an estimate of their mean, and of the squared residuals."""

    num_rollouts: np.ndarray  # (P,)
    sums: np.ndarray  # (…, P)
    squares: np.ndarray  # (…, P)

    def shifted(self, means: np.ndarray) -> "ResidualSums":
        """Return the sums of the residuals minus `means`, `(…, P)`."""
        n, sums, squares = self
        return ResidualSums(n, sums - n * means, squares - 2 * means * sums + n * means**2)


def posterior_baselines(pool: Pool, estimate: BaselineEstimate) -> list[float]:
    """
    Compute b_i = (s·m + Σ_{j ≠ i} r_j) / (s + number of these j), the posterior mean given every rollout of the prompt
    except rollout i. It contains neither r_i nor anything that r_i had an influence on, so

    E[Σ_i (r_i − b_i) ∇log π(y_i)] = E[N] · ∇(mean reward)

    for any estimate, any real rewards, and any rule that decides *after a step* whether the prompt is sampled again in the
    next one, with an estimate that includes the earlier steps (Wald's identity: whether a rollout is sampled depends on the
    past only, and b_i is independent of it). The estimate determines the variance alone. With `pseudo_counts=0` this is
    leave-one-out, with infinite ones the estimate's mean; without any other information (s = 0 and no other rollout) b_i is
    m, the limit s → 0.

    Related work: value-baseline REINFORCE; [SPO](https://huggingface.co/papers/2509.13232), one rollout and a KL-discounted
    Beta tracker; leave-one-out shrinkage ([2511.03710](https://huggingface.co/papers/2511.03710)). The discounted Beta
    baseline of [2603.18444](https://huggingface.co/papers/2603.18444) contains r_i and is biased.

    Args:
        pool (`Pool`):
            All rollouts of the prompt in this step. Rollouts without a reward are left out of all sums.
        estimate ([`BaselineEstimate`]):
            Estimate of the prompt's mean reward.

    Returns:
        `list[float]`: b_i for each of `pool.rollouts`, in their order; NaN for rollouts without a reward, and if there is
        no information at all.
    """
    rewards = pool.rewards
    baselines = []
    for rollout in pool.rollouts:
        if math.isnan(rollout.reward):
            baselines.append(math.nan)
            continue
        others = list(rewards)
        others.remove(rollout.reward)  # an equal reward of another rollout may be removed instead: the sum is the same
        baselines.append(estimate.updated(others).mean)
    return baselines


def sum_over_others(values: np.ndarray) -> np.ndarray:
    """Return, for each prompt, the sum of the other prompts' values; the prompts are the last axis."""
    return values.sum(axis=-1, keepdims=True) - values


def is_level_shift(residuals: ResidualSums, num_prompts: Any, reward_std: float) -> np.ndarray:
    """
    Test whether the mean residual of some rollouts shows a change of the common mean of all rewards: it is more than
    [`LEVEL_SHIFT`] standard errors from 0. The standard error counts prompts, not rollouts, since rollouts of one prompt are
    correlated, and takes at least the running standard deviation, because a few rewards may be equal by chance.

    Args:
        residuals ([`ResidualSums`]):
            Sums over the prompts that are tested together.
        num_prompts (`int` or `np.ndarray`):
            Number of these prompts. Fewer than three never show a shift.
        reward_std (`float`):
            σ of earlier generation batches.
    """
    n = np.maximum(residuals.num_rollouts, 1)
    mean = residuals.sums / n
    variance = np.maximum(residuals.squares / n - mean**2, reward_std**2)
    return (num_prompts >= 3) & (mean**2 * num_prompts > LEVEL_SHIFT**2 * variance)


def residual_of_others(
    residuals: ResidualSums, *, shrinkage: float, reward_std: float
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute the shrunken mean residual of the *other* prompts' rollouts, Σ_{y ≠ x} Σ_j (r_yj − m_y) / (N_{y ≠ x} + c), and its
    divisor, both of the shape of `residuals.sums`. `shrinkage` (c) and `reward_std` are those of [`shift_by_batch_residual`].
    """
    num_rollouts, sums, squares = residuals
    others = ResidualSums(sum_over_others(num_rollouts), sum_over_others(sums), sum_over_others(squares))
    other_prompts = sum_over_others((num_rollouts > 0).astype(float))
    is_shift = is_level_shift(others, other_prompts, reward_std)
    divisors = others.num_rollouts + np.where(is_shift, 0.0, shrinkage)
    mean = np.divide(others.sums, divisors, out=np.zeros_like(others.sums), where=divisors > 0)
    return mean, divisors


def shift_by_batch_residual(
    estimates: Sequence[BaselineEstimate], pools: Sequence[Pool], *, shrinkage: float, reward_std: float = math.inf
) -> list[BaselineEstimate]:
    """
    Shift each estimate by the mean residual of the *other* prompts of the step, so that an error common to all estimates
    (in the first steps, after the policy has improved, or while a penalty grows) adds almost no noise:

    m_x ← m_x + Σ_{y ≠ x} Σ_j (r_yj − m_y) / (N_{y ≠ x} + c),

    with N_{y ≠ x} the number of these rollouts. A rollout has no influence on other prompts' rewards as long as they are
    sampled independently of it, so the baseline stays unbiased; the added noise is at most 1/N of the rewards' variance.

    Args:
        shrinkage (`float`):
            c, the number of rollouts at which the mean residual counts half. With 0 the common mean of the estimates comes
            from the other prompts alone; without any other rollout the result is then a mean of NaN worth 0 rollouts.
        reward_std (`float`, *optional*):
            σ of earlier generation batches. With it, a residual of the other prompts that shows a change of the common mean
            ([`is_level_shift`]) is added in full, as with a shrinkage of 0: shrinking would leave a large part of it.
    """
    num_rollouts = np.array([len(pool.rewards) for pool in pools], dtype=float)
    sums, squares = np.zeros(len(pools)), np.zeros(len(pools))
    for i, (pool, estimate) in enumerate(zip(pools, estimates, strict=True)):
        sums[i] = math.fsum(reward - estimate.mean for reward in pool.rewards)
        squares[i] = math.fsum((reward - estimate.mean) ** 2 for reward in pool.rewards)
    residuals = ResidualSums(num_rollouts, sums, squares)
    corrections, divisors = residual_of_others(residuals, shrinkage=shrinkage, reward_std=reward_std)
    return [
        estimate._replace(mean=estimate.mean + correction)
        if divisor > 0
        else estimate._replace(mean=math.nan, pseudo_counts=0.0)
        for estimate, correction, divisor in zip(estimates, corrections.tolist(), divisors.tolist(), strict=True)
    ]


def add_batch_information(
    estimates: Sequence[BaselineEstimate],
    keys: Sequence[str],
    pools: Sequence[Pool],
    *,
    shrinkage: float,
    reward_std: float = math.inf,
) -> list[BaselineEstimate]:
    """
    Add the rest of the step to each estimate: the mean residual of the other prompts ([`shift_by_batch_residual`]) and the
    rewards of other copies of the same prompt (equal `keys`). These are sampled independently of the prompt's own rollouts,
    so the baseline stays unbiased. `shrinkage` and `reward_std` are those of [`shift_by_batch_residual`].
    """
    shifted = shift_by_batch_residual(estimates, pools, shrinkage=shrinkage, reward_std=reward_std)
    copies: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        copies.setdefault(key, []).append(i)
    updated = []
    for i, (estimate, key) in enumerate(zip(shifted, keys, strict=True)):
        rewards = [reward for j in copies[key] if j != i for reward in pools[j].rewards]
        updated.append(estimate.updated(rewards))
    return updated


def explained_variance(pools: Sequence[Pool], baselines: Sequence[Sequence[float]]) -> float:
    """
    Compute the fraction of the rewards' variance that the baselines explain, 1 − Σ (r_i − b_i)² / Σ (r_i − r̄)², with r̄ the
    mean of all: 0 equals one constant for the whole batch, below 0 is worse than that. NaN without variance.
    """
    pairs = [
        (rollout.reward, baseline)
        for pool, values in zip(pools, baselines, strict=True)
        for rollout, baseline in zip(pool.rollouts, values, strict=True)
        if not math.isnan(baseline)
    ]
    mean = math.fsum(reward for reward, _ in pairs) / max(len(pairs), 1)
    total = math.fsum((reward - mean) ** 2 for reward, _ in pairs)
    return 1 - math.fsum((reward - b) ** 2 for reward, b in pairs) / total if total else math.nan
