"""Empirical-Bayes estimate of the mean reward of each prompt, from the rewards of earlier generations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .baselines import BaselineEstimate, leave_one_out_sums
from .grid_selector import GridSelector
from .pool import Pool


# Candidates; the first of each is used until something was observed.
VALUE_WEIGHTS = (0.5, 0.0, 1.0)  # κ, weight of a value prediction
PSEUDO_COUNTS = (8.0, 0.5, 1.0, 2.0, 4.0, 16.0, 32.0, 64.0)  # s, rollouts that a value prediction is worth
DECAYS = (0.9, 1.0, 0.7)  # λ, of a prompt's earlier rollouts each time the prompt is sampled
SHRINKAGE_COUNTS = (
    16.0,
    0.0,
    4.0,
    64.0,
    256.0,
)  # c, rollouts of other prompts at which their mean residual counts half

ERROR_MEMORY = 0.98  # weight of the errors of earlier generations
MIN_AVERAGE_WEIGHT = 0.1  # weight of a new generation in the running variance, after the first ten
MIN_STD_RATIO = 0.1  # smallest divisor of rewards, relative to the largest standard deviation


class RunningRewardStd:
    """Running mean of the variance of the rewards within a generation, known before the next generation is sampled."""

    def __init__(self) -> None:
        self.variance = self.largest = 0.0  # σ², current and largest
        self.generations = 0

    @property
    def bounded_variance(self) -> float:
        """σ², but at least a hundredth of its largest value: generations of equal rewards would let it vanish."""
        return max(self.variance, MIN_STD_RATIO**2 * self.largest)

    @property
    def std(self) -> float:
        """Square root of `bounded_variance`; 0 until rewards have differed."""
        return math.sqrt(self.bounded_variance)

    def observe(self, rewards: Sequence[float] | np.ndarray) -> None:
        """Update the running variance with all rewards of one generation."""
        if len(rewards):
            self.generations += 1
            weight = max(1 / self.generations, MIN_AVERAGE_WEIGHT)
            variance = float(np.var(rewards)) if len(set(rewards)) > 1 else 0.0  # exactly 0, not a rounding error
            self.variance += weight * (variance - self.variance)
            self.largest = max(self.largest, self.variance)

    def reward_stds(self, pools: Sequence[Pool]) -> list[float]:
        """
        Return, per pool, a standard deviation that its rewards can be divided by without a bias: σ of earlier generations.
        Until rewards have differed, that of the other prompts in this generation, 0 if their rewards are all equal.
        """
        if self.largest:
            return [self.std] * len(pools)
        owners = np.repeat(np.arange(len(pools)), [len(pool.rewards) for pool in pools])
        all_rewards = np.concatenate([pool.rewards for pool in pools])
        others = [all_rewards[owners != i] for i in range(len(pools))]
        return [float(rewards.std()) if len(set(rewards)) > 1 else 0.0 for rewards in others]

    def state_dict(self) -> dict[str, float]:
        """Return the state as numbers."""
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict()`."""
        vars(self).update({name: state[name] for name in vars(self)})


class PromptFeatures(NamedTuple):
    """
    Inputs of [`RewardEstimator`] for the prompts of one generation, before they are sampled; one entry per prompt.

    Args:
        keys (`list[str]`):
            Identities of the prompts.
        value_predictions (`np.ndarray` of shape `(P,)`):
            ẑ, in standard deviations of the rewards from their mean; 0 without a value network.
        num_rollouts, residuals (`np.ndarray` of shape `(L, P)`):
            N and S by decay: discounted number of the prompt's earlier rollouts, and the sum of their residuals from the
            mean reward at that time.
    """

    keys: list[str]
    value_predictions: np.ndarray
    num_rollouts: np.ndarray
    residuals: np.ndarray


class RewardEstimator:
    """
    Empirical-Bayes estimate of a prompt's mean reward: global mean plus a shrunken per-prompt deviation,

    m_x = μ + (s · κ σ ẑ_x + S_x) / (s + N_x),    worth s + N_x rollouts.

    μ and σ are mean and standard deviation of the run's rewards, ẑ_x is a value prediction (in standard deviations), S_x
    sums the residuals of the prompt's earlier rollouts from the mean of *their* generation, and N_x counts them; both are
    discounted by λ each time the prompt is sampled. For binary rewards this equals the Beta posterior mean, for Gaussian
    rewards the normal posterior mean. When a generation's baseline is computed, μ is corrected by the residuals of all
    *other* prompts ([`~core.shift_by_batch_residual`], with c).

    κ, λ, s and c are selected together from a grid ([`~core.grid_selector.GridSelector`]), by the squared error of the
    baseline on rollouts that had no influence on it, which is the noise of the update. This works without a value network
    and with one rollout per prompt, where a likelihood of counts does not identify s (a single draw of a beta-binomial is a
    Bernoulli variable). A generation has no influence on its own baseline, so the baseline is unbiased whatever is selected.

    The estimates are equivariant: shifting all rewards by a constant or multiplying them by a positive one does the same to
    every m_x, from the second generation on.

    Args:
        has_value_predictions (`bool`):
            Whether there is a value network; otherwise κ is 0.
        use_history (`bool`, *optional*, defaults to `True`):
            Whether a prompt's earlier rollouts count.
    """

    def __init__(self, *, has_value_predictions: bool, use_history: bool = True):
        self.use_history = use_history
        self.selector = GridSelector(
            ERROR_MEMORY,
            {
                "value_weight": VALUE_WEIGHTS if has_value_predictions else (0.0,),  # κ, axis K
                "decay": DECAYS,  # λ, axis L
                "pseudo_counts": PSEUDO_COUNTS,  # s, axis S
                "shrinkage_count": SHRINKAGE_COUNTS,  # c, axis C
            },
        )
        self.value_weights, self.decays, self.pseudo_counts, self.shrinkage_counts = self.selector.candidates.values()
        self.history: dict[str, np.ndarray] = {}  # by key, number of rollouts and residuals by decay, (2, L)
        self.mean_reward: float | None = None  # μ; `None` until something was observed
        self.reward_std = RunningRewardStd()  # σ

    @property
    def shrinkage(self) -> float:
        """c in use; 0 before any mean is known, so that the mean comes from the other prompts alone."""
        return 0.0 if self.mean_reward is None else self.selector.selected["shrinkage_count"]

    def features(self, keys: Sequence[str], value_predictions: Sequence[float] | None = None) -> PromptFeatures:
        """
        Collect the inputs of the estimate.

        Args:
            keys (`Sequence[str]`):
                Identities of the prompts.
            value_predictions (`Sequence[float]`, *optional*):
                ẑ, one per prompt, in standard deviations from the mean.
        """
        empty = np.zeros((2, len(DECAYS)))
        history = np.array([self.history.get(key, empty) if self.use_history else empty for key in keys])  # (P, 2, L)
        predictions = np.zeros(len(keys))
        if value_predictions is not None:
            predictions = np.asarray(value_predictions, dtype=np.float64)
        return PromptFeatures(list(keys), predictions, *history.transpose(1, 2, 0))

    def estimate(self, features: PromptFeatures, pass_rates: Sequence[float]) -> list[BaselineEstimate]:
        """Estimate the mean rewards, one per prompt; prompt weights will be computed from `pass_rates`."""
        value_weight, decay, pseudo_count, _ = self.selector.indices
        deviations, worth = self._posterior(features)
        selected_deviations = deviations[value_weight, decay, pseudo_count]  # (P,)
        selected_worth = worth[decay, pseudo_count]  # (P,)
        return [
            BaselineEstimate((self.mean_reward or 0.0) + float(deviation), float(rollouts), rate)
            for deviation, rollouts, rate in zip(selected_deviations, selected_worth, pass_rates, strict=True)
        ]

    def observe(self, features: PromptFeatures, pools: Sequence[Pool]) -> None:
        """
        Update with the rewards of one generation.

        Args:
            features ([`PromptFeatures`]):
                Those that its estimates were computed from.
            pools (`Sequence[Pool]`):
                One pool per prompt. Rollouts without a reward are left out.
        """
        rewards = [pool.rewards for pool in pools]
        all_rewards = np.array([reward for own in rewards for reward in own])
        if not len(all_rewards):
            return
        is_first = self.mean_reward is None
        mean = all_rewards.mean() if self.mean_reward is None else self.mean_reward
        n = np.array([len(own) for own in rewards], dtype=float)  # (P,)
        residuals = [np.array(own) - mean for own in rewards]
        sums = np.array([values.sum() for values in residuals])  # (P,)
        squares = np.array([(values**2).sum() for values in residuals])  # (P,)

        deviations, worth = self._posterior(features)  # (K, L, S, P), (L, S, P)
        sum_of_others, num_others = leave_one_out_sums(sums - n * deviations, n)
        # By shrinkage count; as in `compute`, nothing is shrunk before any mean is known.
        corrections = [
            self._correction(sum_of_others, num_others, 0.0 if is_first else c) for c in self.shrinkage_counts
        ]
        *selected, shrinkage = self.selector.indices  # before this generation's errors: as its baseline was computed
        if not is_first and self.reward_std.bounded_variance > 0:
            errors = [
                _squared_error(deviations + correction, worth, n, sums, squares) / len(all_rewards)
                for correction in corrections
            ]
            self.selector.observe(np.stack(errors, axis=-1) / self.reward_std.bounded_variance)
        correction = corrections[shrinkage][tuple(selected)]
        if self.use_history:
            self._update_history(features.keys, n, sums - n * correction)
        if not is_first:
            surprise = (sums - n * deviations[tuple(selected)]).sum()
            mean += surprise / (n.sum() + self.shrinkage_counts[shrinkage])
        self.mean_reward = float(mean)
        self.reward_std.observe(all_rewards)

    def _update_history(self, keys: Sequence[str], n: np.ndarray, residuals: np.ndarray) -> None:
        for key, count, residual in zip(keys, n, residuals, strict=True):
            if count:
                earlier = self.history.get(key, np.zeros((2, len(DECAYS))))
                self.history[key] = earlier * self.decays + np.array([[count], [residual]])

    def _posterior(self, features: PromptFeatures) -> tuple[np.ndarray, np.ndarray]:
        """Return the estimated deviations from the mean, `(K, L, S, P)`, and their worth in rollouts, `(L, S, P)`."""
        predicted = self.value_weights[:, None] * self.reward_std.std * features.value_predictions  # (K, P)
        worth = self.pseudo_counts[:, None] + features.num_rollouts[:, None, :]  # (L, S, P)
        weighted_sum = self.pseudo_counts[:, None] * predicted[:, None, None, :] + features.residuals[:, None, :]
        return weighted_sum / worth, worth

    @staticmethod
    def _correction(sum_of_others: np.ndarray, num_others: np.ndarray, shrinkage: float) -> np.ndarray:
        weight = num_others + shrinkage
        return np.divide(sum_of_others, weight, out=np.zeros_like(sum_of_others), where=weight > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return all state except `history`, as numbers and lists."""
        return {
            "mean_reward": self.mean_reward,
            "reward_std": self.reward_std.state_dict(),
            "errors": self.selector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.mean_reward = state["mean_reward"]
        self.reward_std.load_state_dict(state["reward_std"])
        self.selector.load_state_dict(state["errors"])  # ignored if a value network was added or removed

    def metrics(self) -> dict[str, float]:
        """Return the selected hyperparameters by their log keys."""
        selected = self.selector.selected
        return {
            "value_weight": selected["value_weight"],
            "value_pseudo_counts": selected["pseudo_counts"],
            "discount": selected["decay"],
        }


def _squared_error(
    deviations: np.ndarray, worth: np.ndarray, n: np.ndarray, sums: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """
    Compute Σ (r_i − b_i)² over all rollouts, with b_i = (s m + Σ_{j≠i} r_j) / (s + n − 1) within each prompt, `(K, L, S)`;
    all rewards are relative to the same mean.
    """
    total = worth * deviations + sums  # (K, L, S, P)
    posterior_worth = worth + n
    errors = posterior_worth**2 * squares - 2 * posterior_worth * total * sums + n * total**2
    return (errors / (posterior_worth - 1).clip(min=1e-12) ** 2 * (n > 0)).sum(axis=-1)
