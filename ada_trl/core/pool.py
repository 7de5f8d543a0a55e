"""Rollouts of one prompt in one step, with their real rewards."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple


class Rollout(NamedTuple):
    """
    Reward of a completion. The completion itself stays on the rank that generated it.

    Args:
        draw_index (`int`):
            Position in the prompt's sampling schedule, from 0: round × samples per round + index within the round. It
            identifies the rollout inside its pool, whatever order rollouts arrived in.
        reward (`float`):
            Weighted total reward; NaN if no reward function scored the completion.
        success_reward (`float`):
            Reward that is compared with the threshold: the total reward, or that of one named reward function.
        rewards (`tuple[float, ...]`):
            One reward per reward function, unweighted; NaN where a function returned `None`.
        location (`Any`, *optional*):
            Location of the completion, not interpreted here.
    """

    draw_index: int
    reward: float
    success_reward: float
    rewards: tuple[float, ...] = ()
    location: Any = None


class Pool:
    """
    All rollouts of one prompt in one step, and the statistics that the advantages are computed from.

    Statistics use the real rewards, ignore NaN, and are summed exactly (`math.fsum`), so they do not depend on the
    order of arrival. A rollout whose success reward or reward is NaN is *unscored*: neither positive nor negative, but it
    counts towards the size.

    Args:
        positive_threshold (`float`):
            A rollout is positive when its success reward is strictly greater.
    """

    def __init__(self, positive_threshold: float, rollouts: Iterable[Rollout] = ()):
        self.positive_threshold = positive_threshold
        self.rollouts: list[Rollout] = []
        self.positives = 0
        self.negatives = 0
        for rollout in rollouts:
            self.add(rollout)

    def __len__(self) -> int:
        return len(self.rollouts)

    def add(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)
        if self.is_positive(rollout):
            self.positives += 1
        elif self.is_scored(rollout):
            self.negatives += 1

    def is_scored(self, rollout: Rollout) -> bool:
        return not (math.isnan(rollout.success_reward) or math.isnan(rollout.reward))

    def is_positive(self, rollout: Rollout) -> bool:
        return self.is_scored(rollout) and rollout.success_reward > self.positive_threshold

    def first_round(self, size: int) -> "Pool":
        """Return the pool of the first `size` rollouts, which is uniform sampling whatever the exit condition is."""
        return Pool(self.positive_threshold, (rollout for rollout in self.rollouts if rollout.draw_index < size))

    @property
    def scored(self) -> int:
        """Number of rollouts that are positive or negative."""
        return self.positives + self.negatives

    @property
    def scored_rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if self.is_scored(rollout)]

    @property
    def rewards(self) -> list[float]:
        """Rewards that are not NaN, whether or not the success reward is NaN."""
        return [rollout.reward for rollout in self.rollouts if not math.isnan(rollout.reward)]

    @property
    def pass_rate(self) -> float:
        """p̂ = positives / scored rollouts; NaN if nothing was scored."""
        return self.positives / self.scored if self.scored else math.nan

    @property
    def mean(self) -> float:
        """r̄, the mean reward of the whole pool (the baseline); NaN if nothing was scored."""
        rewards = self.scored_rewards
        return math.fsum(rewards) / len(rewards) if rewards else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the rewards with Bessel's correction, as in TRL; 0 for fewer than two."""
        return sample_std(self.scored_rewards)

    @property
    def has_zero_variance(self) -> bool:
        """Whether all scored rewards are equal, so that the baseline r̄ gives every rollout the advantage 0."""
        return len(set(self.scored_rewards)) <= 1


def sample_std(values: list[float]) -> float:
    """Standard deviation with Bessel's correction, summed exactly; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
