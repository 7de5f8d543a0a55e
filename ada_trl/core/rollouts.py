"""All rollouts of a generation batch on arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(eq=False)
class Rollouts:
    """
    All rollouts of a generation batch, of all processes. Suffixes give shapes: N rollouts, P prompts, F reward functions.

    The rollouts of a prompt are its *pool*. They are sorted by prompt and draw, so that no sum and no choice depends on the
    order in which completions arrive. A rollout is *scored* if it has a reward and a success reward; only then it is positive
    or negative.

    Args:
        prompt_N (`np.ndarray` of `int`):
            Prompt of each rollout, ascending. The same text twice in a batch is two prompts.
        draw_N (`np.ndarray` of `int`):
            Position among the rollouts of the prompt, from 0, ascending within a prompt.
        rewards_NF (`np.ndarray` of `float`):
            Unweighted rewards, one column per reward function; NaN where a function returned `None`.
        reward_N (`np.ndarray` of `float`):
            Weighted sum of the rewards; NaN if no function with a weight scored the rollout.
        success_reward_N (`np.ndarray` of `float`):
            Reward that is compared with the threshold: `reward_N`, or the column of `success_reward`.
        threshold (`float`):
            A rollout is positive if its success reward is strictly greater.
        num_prompts (`int`):
            P.
    """

    prompt_N: np.ndarray
    draw_N: np.ndarray
    rewards_NF: np.ndarray
    reward_N: np.ndarray
    success_reward_N: np.ndarray
    threshold: float
    num_prompts: int

    def __len__(self) -> int:
        return len(self.prompt_N)

    @cached_property
    def is_scored_N(self) -> np.ndarray:
        return ~np.isnan(self.reward_N) & ~np.isnan(self.success_reward_N)

    @cached_property
    def is_positive_N(self) -> np.ndarray:
        return self.is_scored_N & (self.success_reward_N > self.threshold)

    @cached_property
    def size_P(self) -> np.ndarray:
        """Number of rollouts of each prompt, scored or not."""
        return np.bincount(self.prompt_N, minlength=self.num_prompts)

    @cached_property
    def scored_P(self) -> np.ndarray:
        return np.bincount(self.prompt_N[self.is_scored_N], minlength=self.num_prompts)

    @cached_property
    def positives_P(self) -> np.ndarray:
        return np.bincount(self.prompt_N[self.is_positive_N], minlength=self.num_prompts)

    @cached_property
    def negatives_P(self) -> np.ndarray:
        return self.scored_P - self.positives_P

    @cached_property
    def pass_rate_P(self) -> np.ndarray:
        """p̂ = positives / scored rollouts; NaN if nothing was scored."""
        return self.positives_P / np.where(self.scored_P > 0, self.scored_P, np.nan)

    @cached_property
    def mean_P(self) -> np.ndarray:
        """r̄, the mean reward of the scored rollouts of each prompt; NaN if nothing was scored."""
        sum_P = self.sum(np.where(self.is_scored_N, self.reward_N, 0.0))
        return sum_P / np.where(self.scored_P > 0, self.scored_P, np.nan)

    @cached_property
    def std_P(self) -> np.ndarray:
        """Standard deviation of the scored rewards of each prompt with Bessel's correction, as in TRL; 0 for fewer than two."""
        deviation_N = np.where(self.is_scored_N, self.reward_N - self.mean_P[self.prompt_N], 0.0)
        return np.sqrt(self.sum(deviation_N**2) / np.maximum(self.scored_P - 1, 1))

    @cached_property
    def has_zero_variance_P(self) -> np.ndarray:
        """Whether all scored rewards of a prompt are equal, so that every rollout equals the mean."""
        low_P, high_P = np.full(self.num_prompts, np.inf), np.full(self.num_prompts, -np.inf)
        np.minimum.at(low_P, self.prompt_N[self.is_scored_N], self.reward_N[self.is_scored_N])
        np.maximum.at(high_P, self.prompt_N[self.is_scored_N], self.reward_N[self.is_scored_N])
        return high_P <= low_P

    def sum(self, values_N: np.ndarray) -> np.ndarray:
        """Sum over the rollouts of each prompt, `(P,)`."""
        return np.bincount(self.prompt_N, weights=values_N, minlength=self.num_prompts)

    def where(self, mask_N: np.ndarray) -> "Rollouts":
        """The rollouts at which the mask is true; the prompts stay the same ones."""
        return replace(
            self,
            prompt_N=self.prompt_N[mask_N],
            draw_N=self.draw_N[mask_N],
            rewards_NF=self.rewards_NF[mask_N],
            reward_N=self.reward_N[mask_N],
            success_reward_N=self.success_reward_N[mask_N],
        )

    @classmethod
    def score(cls, rewards_by_prompt: Sequence[np.ndarray], scoring: "Scoring") -> "Rollouts":
        """Build the record of a batch from the rewards `(rollouts, F)` of each prompt in order of sampling."""
        sizes = [len(rewards) for rewards in rewards_by_prompt]
        rewards_NF = scoring.clean(np.concatenate(rewards_by_prompt))
        reward_N, success_reward_N = scoring.totals(rewards_NF)
        return cls(
            prompt_N=np.repeat(np.arange(len(sizes)), sizes),
            draw_N=np.concatenate([np.arange(size) for size in sizes]),
            rewards_NF=rewards_NF,
            reward_N=reward_N,
            success_reward_N=success_reward_N,
            threshold=scoring.threshold,
            num_prompts=len(sizes),
        )


@dataclass(frozen=True)
class Scoring:
    """
    What the rewards of several reward functions amount to.

    Args:
        weights (`tuple[float, ...]`):
            Weight of each reward function in the sum.
        threshold (`float`):
            A rollout is positive if its success reward is strictly greater.
        success_column (`int`, *optional*):
            Reward function whose reward is the success reward; by default the weighted sum is.
    """

    weights: tuple[float, ...]
    threshold: float
    success_column: int | None = None

    def clean(self, rewards_NF: np.ndarray) -> np.ndarray:
        """The rewards in float64 with NaN (unscored) in place of infinities, which would turn every mean into NaN."""
        rewards_NF = np.asarray(rewards_NF, dtype=np.float64)
        return np.where(np.isinf(rewards_NF), np.nan, rewards_NF)

    def totals(self, rewards_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Weighted sum and success reward of each rollout, both `(N,)`, from `clean` rewards.

        The sum is computed in float32, as [`~trl.GRPOTrainer`] does, so that equal sums are the same ones here and there. It is
        NaN if no function with a weight scored the rollout, or if it exceeds float32.
        """
        weights_F = np.array(self.weights, dtype=np.float32)
        with np.errstate(over="ignore"):
            reward_N = np.nansum(rewards_NF.astype(np.float32) * weights_F, axis=1).astype(np.float64)
        reward_N[(np.isnan(rewards_NF) | (weights_F == 0)).all(axis=1) | np.isinf(reward_N)] = np.nan
        return reward_N, reward_N if self.success_column is None else rewards_NF[:, self.success_column]

    def distinguish(self, rewards_NF: np.ndarray) -> np.ndarray:
        """One tuple per rollout, `(N,)`, equal for rollouts with the same reward from every function with a weight."""
        weighted = np.where(np.isnan(rewards_NF), np.inf, rewards_NF)[:, np.array(self.weights) != 0]
        tuples = np.empty(len(rewards_NF), dtype=object)
        tuples[:] = list(map(tuple, weighted.tolist()))
        return tuples
