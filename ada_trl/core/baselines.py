"""What a rollout is compared with, where that is known before the draw: a posterior of the prompt's mean reward."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .advantages import PromptWeighting, prompt_weight
from .pool import Pool


LARGEST_POOL = 32  # rollouts, M · N of the paper
LARGEST_DEVIATION = 1.5  # where advantages are scaled: farther away than this counts as this far


class BaselineEstimate(NamedTuple):
    """
    What is expected of a prompt before it is sampled.

    Args:
        mean (`float`):
            m, the expected reward of a rollout.
        strength (`float`):
            s ≥ 0, what the expectation is worth in rollouts.
        pass_rate (`float`):
            p̂, the expected share of positive rollouts, between 0 and 1; what the prompt's weight is made of.
    """

    mean: float
    strength: float
    pass_rate: float

    def weight(self, weighting: PromptWeighting) -> float:
        """The prompt's weight, known before the draw: see [`prompt_weight`], for a pool of the paper's largest size, 32."""
        return prompt_weight(self.pass_rate, LARGEST_POOL, weighting)

    def updated(self, rewards: Sequence[float]) -> "BaselineEstimate":
        """The prior of somebody who has seen `rewards` too. Its pass rate, and so the prompt's weight, stays."""
        strength = self.strength + len(rewards)
        if not strength or math.isinf(strength):
            return self
        known = self.strength * self.mean if self.strength else 0.0
        mean = (known + math.fsum(rewards)) / strength
        return self._replace(mean=mean, strength=strength)


def posterior_baselines(pool: Pool, prior: BaselineEstimate) -> list[float]:
    """
    b_i = (s·m + Σ_{j ≠ i} r_j) / (s + number of these j),

    the mean of the posterior that everything but r_i gives. It contains neither r_i nor anything that r_i had an influence
    on, so

    E[Σ_i (r_i − b_i) ∇log π(y_i)] = E[N] · ∇(mean reward)

    for any prior, any real rewards and any rule that decides *after a step* whether the prompt is asked again in the next
    one, with a prior that knows the steps before (Wald's identity: whether a rollout is drawn depends on the past only, and
    b_i is independent of it). The prior decides about the variance alone. A strength of 0 is leave-one-out, an infinite
    one the prior's mean; where nothing else is known (s = 0 and no other rollout) b_i is m, the limit s → 0.

    Relatives: value-baseline REINFORCE; [SPO](https://huggingface.co/papers/2509.13232), one rollout against a
    KL-discounted Beta tracker; leave-one-out shrinkage ([2511.03710](https://huggingface.co/papers/2511.03710)). The
    discounted Beta baseline of [2603.18444](https://huggingface.co/papers/2603.18444) contains r_i and is biased.

    Args:
        pool (`Pool`):
            Everything the prompt drew. Rollouts without a reward are left out of all sums.
        prior ([`BaselineEstimate`]):
            From before the draw.

    Returns:
        `list[float]`: b_i of each of `pool.rollouts`, in their order; NaN for those without a reward, and where nothing is
        known at all.
    """
    scored = [rollout.reward for rollout in pool.rollouts if not math.isnan(rollout.reward)]
    baselines = []
    for rollout in pool.rollouts:
        if math.isnan(rollout.reward):
            baselines.append(math.nan)
            continue
        others = list(scored)
        others.remove(rollout.reward)  # one that is equal serves as well as this one
        baselines.append(prior.updated(others).mean)
    return baselines


def leave_one_out_sums(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each prompt the sum of the other prompts' values, `(…, P)`, and of their counts, `(P,)`."""
    return values.sum(axis=-1, keepdims=True) - values, counts.sum() - counts


def shift_by_batch_residual(
    priors: Sequence[BaselineEstimate], pools: Sequence[Pool], *, shrinkage: float
) -> list[BaselineEstimate]:
    """
    Priors moved by what *other* prompts of the step have shown, so that a level that is wrong for all of them (in the
    first steps, because the policy has just improved, or because a penalty grows) costs next to nothing:

    m_x ← m_x + Σ_{y ≠ x} Σ_j (r_yj − m_y) / (N_{y ≠ x} + c),

    with N the number of these rollouts. A rollout has no influence on other prompts' rewards, as long as they are sampled
    independently of it, so the baseline stays unbiased; the noise that this adds is at most 1/N of the rewards' variance.

    Args:
        shrinkage (`float`):
            c, the rollouts after which a residual counts half; 0 takes the priors' common level from the other prompts
            alone. Without any other rollout that leaves nothing, a mean of NaN worth 0 rollouts.
    """
    counts = np.array([len(pool.rewards) for pool in pools], dtype=float)
    residuals = np.array(
        [math.fsum(r - prior.mean for r in pool.rewards) for pool, prior in zip(pools, priors, strict=True)]
    )
    moved = []
    for prior, others, drawn in zip(priors, *leave_one_out_sums(residuals, counts), strict=True):
        if drawn + shrinkage > 0:
            moved.append(prior._replace(mean=prior.mean + float(others) / (float(drawn) + shrinkage)))
        else:
            moved.append(prior._replace(mean=math.nan, strength=0.0))
    return moved


def batch_leave_one_out_baseline(pools: Sequence[Pool], pass_rates: Sequence[float]) -> list[BaselineEstimate]:
    """
    Priors that know nothing but the other prompts of the step: their mean reward, worth as many rollouts as they have drawn.
    With them [`posterior_baselines`] is the mean of *all other* rollouts of the step, b_i = Σ_{j ≠ i} r_j / (N − 1).

    Args:
        pass_rates (`Sequence[float]`):
            What the prompts' weights are made of, from before the draw.
    """
    blank = [BaselineEstimate(0.0, 0.0, rate) for rate in pass_rates]
    counts = np.array([len(pool.rewards) for pool in pools], dtype=float)
    _, drawn = leave_one_out_sums(counts, counts)
    return [
        prior._replace(strength=float(number))
        for prior, number in zip(shift_by_batch_residual(blank, pools, shrinkage=0.0), drawn, strict=True)
    ]


def posterior_advantages(
    pool: Pool,
    prior: BaselineEstimate,
    *,
    weighting: PromptWeighting = "none",
    std: float | None = None,
) -> list[float]:
    """
    A_i = w(p̂) · (r_i − b_i) [/ σ], with b_i from [`posterior_baselines`] and p̂ of the prior.

    Weight, b_i and σ are known without r_i, so the expected gradient is exactly w · E[N] · ∇(mean reward). With σ it is that of
    the mean of the rewards as they are cut off, / σ: what lies far outside counts, but does not decide the update. Both hold for
    *all* rollouts of the pool: training on a selection of them brings a bias back.

    Args:
        pool (`Pool`), prior ([`BaselineEstimate`]):
            As in [`posterior_baselines`].
        weighting (`str` or `float`, *optional*, defaults to `"none"`):
            See [`BaselineEstimate.weight`].
        std (`float`, *optional*):
            σ to divide by, of rewards that these rollouts have no influence on; `None` does not divide. (r_i − b_i) / σ is
            cut off at ±[`LARGEST_DEVIATION`], and 0 where σ is 0: nothing is known about the scale.

    Returns:
        `list[float]`: one advantage per rollout of the pool, in their order; exactly 0 for rollouts without a reward.
    """
    weight = prior.weight(weighting)
    baselines = posterior_baselines(pool, prior)
    differences = [
        0.0 if math.isnan(baseline) else rollout.reward - baseline
        for rollout, baseline in zip(pool.rollouts, baselines, strict=True)
    ]
    return [weight * _in_deviations(difference, std) for difference in differences]


def _in_deviations(difference: float, std: float | None) -> float:
    if std is None:
        return difference
    return max(-LARGEST_DEVIATION, min(LARGEST_DEVIATION, difference / std)) if std > 0 else 0.0


def explained_variance(pools: Sequence[Pool], baselines: Sequence[Sequence[float]]) -> float:
    """
    Share of the variance of the rewards that the baselines explain, 1 − Σ (r_i − b_i)² / Σ (r_i − r̄)², with r̄ the mean of
    all: 0 is what one constant for the whole batch would do, below 0 is worse than that. NaN without variance.
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
