"""What a rollout is compared with, where that is known before the draw: a posterior of the prompt's mean reward."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .advantages import STD_EPSILON, PromptWeighting, prompt_weight
from .pool import Pool


LARGEST_POOL = 32  # rollouts, M · N of the paper
RECENTRING_SHRINKAGE = 8  # rollouts of other prompts, before their residuals count half


class Prior(NamedTuple):
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

    def updated(self, rewards: Sequence[float]) -> "Prior":
        """The prior of somebody who has seen `rewards` too. Its pass rate, and so the prompt's weight, stays."""
        strength = self.strength + len(rewards)
        if not strength or math.isinf(strength):
            return self
        known = self.strength * self.mean if self.strength else 0.0
        mean = (known + math.fsum(rewards)) / strength
        return self._replace(mean=mean, strength=strength)


def posterior_baselines(pool: Pool, prior: Prior, *, samples_per_round: int) -> list[float]:
    """
    b_i = (s·m + Σ_{j in earlier rounds} r_j + Σ_{j ≠ i in the same round} r_j) / (s + number of these j),

    the mean of the posterior that everything but r_i and what came after it gives. It contains neither r_i nor anything
    that r_i had an influence on, so

    E[Σ_i (r_i − b_i) ∇log π(y_i)] = E[N] · ∇(mean reward)

    for any prior, any real rewards and any rule that decides *after a round* whether there is another one (Wald's
    identity: round by round, whether a rollout is drawn depends on the past only, and b_i is independent of it). The prior
    decides about the variance alone. A strength of 0 is leave-one-out, an infinite one the prior's mean; where nothing
    else is known (s = 0 and no other rollout) b_i is m, the limit s → 0.

    Relatives: value-baseline REINFORCE; [SPO](https://huggingface.co/papers/2509.13232), one rollout against a
    KL-discounted Beta tracker; leave-one-out shrinkage ([2511.03710](https://huggingface.co/papers/2511.03710)). The
    discounted Beta baseline of [2603.18444](https://huggingface.co/papers/2603.18444) contains r_i and is biased.

    Args:
        pool (`Pool`):
            Everything the prompt drew. Unscored rollouts are left out of all sums.
        prior ([`Prior`]):
            From before the first draw.
        samples_per_round (`int`):
            M: rollout `draw` belongs to round `draw // M`.

    Returns:
        `list[float]`: b_i of each of `pool.rollouts`, in their order; NaN for unscored ones.
    """
    rounds: dict[int, list[float]] = {}
    for rollout in pool.rollouts:
        if pool.is_scored(rollout):
            rounds.setdefault(rollout.draw // samples_per_round, []).append(rollout.reward)
    before: dict[int, Prior] = {}
    known = prior
    for index in sorted(rounds):
        before[index] = known
        known = known.updated(rounds[index])
    baselines = []
    for rollout in pool.rollouts:
        if not pool.is_scored(rollout):
            baselines.append(math.nan)
            continue
        index = rollout.draw // samples_per_round
        others = list(rounds[index])
        others.remove(rollout.reward)  # one that is equal serves as well as this one
        baselines.append(before[index].updated(others).mean)
    return baselines


def recentred(priors: Sequence[Prior], pools: Sequence[Pool], lanes: Sequence[int] | None = None) -> list[Prior]:
    """
    Priors moved by what *other* prompts of the step have shown, so that a level that is wrong for all of them (in the
    first steps, or because the policy has just improved) costs next to nothing:

    m_x ← m_x + Σ_{y ≠ x} Σ_j (r_yj − m_y) / (N_{y ≠ x} + 8),

    with N the number of these rollouts. A rollout has no influence on other prompts' rewards, as long as they are sampled
    independently of it, so the baseline stays unbiased; the noise that this adds is 1/N of the rewards' variance.

    Args:
        lanes (`Sequence[int]`, *optional*):
            By pool, its lane: whether a prompt is asked may depend on what others of the same lane have shown, which are
            then left out like the prompt itself. If `None`, each has one of its own.
    """
    lanes = range(len(pools)) if lanes is None else lanes
    residuals, scored = defaultdict(list), Counter()
    for pool, prior, lane in zip(pools, priors, lanes, strict=True):
        residuals[lane] += [r - prior.mean for r in pool.scored_rewards]
        scored[lane] += pool.scored
    by_lane = {lane: math.fsum(values) for lane, values in residuals.items()}
    total, drawn = math.fsum(by_lane.values()), scored.total()
    return [
        prior._replace(mean=prior.mean + (total - by_lane[lane]) / (drawn - scored[lane] + RECENTRING_SHRINKAGE))
        for prior, lane in zip(priors, lanes, strict=True)
    ]


def posterior_advantages(
    pool: Pool,
    prior: Prior,
    *,
    samples_per_round: int,
    weighting: PromptWeighting = "none",
    weight_floor: float | None = None,
    std: float | None = None,
) -> list[float]:
    """
    A_i = w(p̂) · (r_i − b_i) [/ (σ + 1e-4)], with b_i from [`posterior_baselines`] and p̂ of the prior.

    The weight is known before the draw, so the expected gradient is exactly w · E[N] · ∇(mean reward). That holds for
    *all* rollouts of the pool: training on a selection of them brings a bias back.

    Args:
        pool (`Pool`), prior ([`Prior`]), samples_per_round (`int`):
            As in [`posterior_baselines`].
        weighting (`str` or `float`, *optional*, defaults to `"none"`), weight_floor (`float`, *optional*):
            See [`prompt_weight`]; without a floor it is 1/32, as for a pool of the paper's largest size.
        std (`float`, *optional*):
            σ to divide by; `None` does not divide.

    Returns:
        `list[float]`: one advantage per rollout of the pool, in their order; exactly 0 for unscored rollouts.
    """
    scale = prompt_weight(prior.pass_rate, LARGEST_POOL, weighting, floor=weight_floor)
    if std is not None:
        scale /= std + STD_EPSILON
    baselines = posterior_baselines(pool, prior, samples_per_round=samples_per_round)
    return [
        0.0 if math.isnan(baseline) else scale * (rollout.reward - baseline)
        for rollout, baseline in zip(pool.rollouts, baselines, strict=True)
    ]


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
