"""Empirical-Bayes estimate of the mean reward of each prompt, from the rewards of earlier generation batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .baselines import (
    BaselineEstimate,
    ResidualSums,
    add_batch_information,
    batch_leave_one_out_baselines,
    is_level_shift,
    posterior_baselines,
    residual_of_others,
)
from .grid_selector import GridSelector
from .pool import Pool


# Candidates; the first of each is used until something was observed.
VALUE_WEIGHTS = (0.5, 0.0, 1.0)  # κ, weight of a value prediction
PSEUDO_COUNTS = (8.0, 0.5, 1.0, 2.0, 4.0, 16.0, 32.0, 64.0)  # s, rollouts that a value prediction is worth
DECAYS = (0.9, 1.0, 0.7)  # λ, of a prompt's earlier rollouts each time the prompt is sampled
SHRINKAGE_COUNTS = (16.0, 0.0, 4.0, 64.0, 256.0)  # c, rollouts of others at which their mean residual counts half

ERROR_MEMORY = 0.98  # weight of the errors of earlier generation batches
MIN_ERROR_UNIT = 1 / 8  # smallest unit of a generation batch's errors, relative to the variance of its rewards
MIN_AVERAGE_WEIGHT = 0.1  # weight of a new generation batch in the running variance, after the first ten
MIN_STD_RATIO = 0.1  # smallest divisor of rewards, relative to the largest standard deviation
MAX_VARIANCE_DECAY = 0.98  # of the largest variance, in each generation batch whose rewards differ
# Largest variance of a generation batch, relative to the running mean, that counts as a change of scale.
RESTART_RATIO = 1 / 16
RESTART_AFTER = 8  # consecutive generation batches of such a small variance
RECENT_MEMORY = 0.25  # weight of earlier generation batches in the comparison with the batch mean
MISLED_RATIO = 2.0  # squared error, relative to that of the batch mean, from which the batch mean is used instead
MIN_PROMPTS_TO_SWITCH = 4  # of a generation batch, for this comparison


class RunningRewardStd:
    """
    Running mean of the variance of the rewards within a generation batch, known before the next generation batch is sampled.

    The mean restarts when the variances of [`RESTART_AFTER`] consecutive generation batches are all far below it: the reward
    function has changed, or an outlier has entered the mean. Batches whose rewards are all equal count in the mean, but
    say nothing about the scale of the rewards and are left out of this comparison.
    """

    def __init__(self) -> None:
        self.variance = self.largest = 0.0  # σ², current and (slowly decaying) largest
        self.generations = 0
        self.small_variances: list[float] = []  # of the latest generation batches, if they are far below the mean

    @property
    def bounded_variance(self) -> float:
        """σ², but at least a hundredth of its largest value: generation batches of equal rewards would let it vanish."""
        return max(self.variance, MIN_STD_RATIO**2 * self.largest)

    @property
    def std(self) -> float:
        """Square root of `bounded_variance`; 0 until rewards have differed."""
        return math.sqrt(self.bounded_variance)

    def observe(self, rewards: Sequence[float] | np.ndarray) -> bool:
        """Update the running variance with all rewards of one generation batch. Return whether it has restarted."""
        if not len(rewards):
            return False
        variance = float(np.var(rewards)) if len(set(rewards)) > 1 else 0.0  # exactly 0, not a rounding error
        if variance > 0:
            self.largest *= MAX_VARIANCE_DECAY
            # With the bound, which generation batches of equal rewards do not lower: an outlier may have entered that one alone.
            is_small = variance < RESTART_RATIO * self.bounded_variance
            self.small_variances = [*self.small_variances, variance] if is_small else []
        if len(self.small_variances) >= RESTART_AFTER:
            self.variance = self.largest = float(np.mean(self.small_variances))
            self.generations, self.small_variances = len(self.small_variances), []
            return True
        self.generations += 1
        weight = max(1 / self.generations, MIN_AVERAGE_WEIGHT)
        self.variance += weight * (variance - self.variance)
        self.largest = max(self.largest, self.variance)
        return False

    def reward_stds(self, pools: Sequence[Pool]) -> list[float]:
        """
        Return, per pool, a standard deviation that its rewards can be divided by without a bias: σ of earlier generation batches.
        Until rewards have differed, that of the other prompts in this generation batch, 0 if their rewards are all equal.
        """
        if self.largest:
            return [self.std] * len(pools)
        owners = np.repeat(np.arange(len(pools)), [len(pool.rewards) for pool in pools])
        all_rewards = np.concatenate([pool.rewards for pool in pools])
        others = [all_rewards[owners != i] for i in range(len(pools))]
        return [float(rewards.std()) if len(set(rewards)) > 1 else 0.0 for rewards in others]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists."""
        return vars(self) | {"small_variances": list(self.small_variances)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        vars(self).update({name: state[name] for name in vars(self)})


class PromptFeatures(NamedTuple):
    """
    Inputs of [`RewardEstimator`] for the prompts of one generation batch, before they are sampled; one entry per prompt.

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
    sums the residuals of the prompt's earlier rollouts from the mean of *their* generation batch, and N_x counts them; both are
    discounted by λ each time the prompt is sampled. For binary rewards this equals the Beta posterior mean, for Gaussian
    rewards the normal posterior mean. When a generation batch's baseline is computed, μ is corrected by the residuals of all
    *other* prompts ([`~core.shift_by_batch_residual`], with c).

    κ, λ, s and c are selected together from a grid ([`~core.grid_selector.GridSelector`]), by the squared error of the
    baseline on rollouts that had no influence on it, which is the noise of the update. This works without a value network
    and with one rollout per prompt, where a likelihood of counts does not identify s (a single trial of a beta-binomial is a
    Bernoulli variable). A generation batch has no influence on its own baseline, so the baseline is unbiased whatever is selected.

    Changes of the reward function: a shift of all rewards is corrected within the generation batch in which it happens
    ([`~core.baselines.is_level_shift`]). While the estimate's recent squared error is more than twice that of the batch mean
    (rewards have become much smaller, say, and histories are in the old units), [`compute_baselines`] returns the batch mean.
    When the running standard deviation restarts, histories and errors are dropped as well.

    The estimates are equivariant: shifting all rewards by a constant or multiplying them by a positive one does the same to
    every m_x, from the second generation batch on.

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
        self.recent_errors = [0.0, 0.0]  # discounted mean squared errors: of the estimate, and of the batch mean
        self.is_misled = False  # whether the batch mean has recently been much better

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
        """Estimate the mean rewards, one per prompt; `pass_rates` are for the prompt weights."""
        value_weight, decay, pseudo_count, _ = self.selector.indices
        deviations, total_counts = self._posterior(features)
        selected_deviations = deviations[value_weight, decay, pseudo_count]  # (P,)
        selected_counts = total_counts[decay, pseudo_count]  # (P,)
        return [
            BaselineEstimate((self.mean_reward or 0.0) + float(deviation), float(count), rate)
            for deviation, count, rate in zip(selected_deviations, selected_counts, pass_rates, strict=True)
        ]

    def compute_baselines(
        self, estimates: Sequence[BaselineEstimate], keys: Sequence[str], pools: Sequence[Pool]
    ) -> list[list[float]]:
        """
        Compute b_i for the rollouts of each pool: from `estimates` and the rest of the generation batch
        ([`~core.add_batch_information`]), or the batch mean while the estimates are much worse. All arguments have one entry per
        prompt.
        """
        if self.is_misled:
            return batch_leave_one_out_baselines(pools)
        estimates = add_batch_information(
            estimates, keys, pools, shrinkage=self.shrinkage, reward_std=self.reward_std.std
        )
        return [posterior_baselines(pool, estimate) for pool, estimate in zip(pools, estimates, strict=True)]

    def observe(self, features: PromptFeatures, pools: Sequence[Pool]) -> None:
        """
        Update with the rewards of one generation batch.

        Args:
            features ([`PromptFeatures`]):
                Those that its estimates were computed from.
            pools (`Sequence[Pool]`):
                One pool per prompt. Rollouts without a reward are left out.
        """
        rewards = [np.array(pool.rewards) for pool in pools]
        all_rewards = np.concatenate(rewards)
        if not len(all_rewards):
            return
        is_first = self.mean_reward is None
        mean = all_rewards.mean() if self.mean_reward is None else self.mean_reward
        residuals = _residual_sums(rewards, mean)
        n, sums, _ = residuals
        deviations, total_counts = self._posterior(features)  # (K, L, S, P), (L, S, P)
        std = self.reward_std.std
        shifted = residuals.shifted(deviations)
        corrections = [  # (K, L, S, P) by shrinkage count; nothing is shrunk before any mean is known
            residual_of_others(shifted, shrinkage=0.0 if is_first else shrinkage, reward_std=std)[0]
            for shrinkage in self.shrinkage_counts
        ]
        # The selection before this generation batch's errors are added, with which its baseline was computed.
        *best, shrinkage = self.selector.indices
        selected_deviations, correction = deviations[tuple(best)], corrections[shrinkage][tuple(best)]  # (P,)
        if not is_first:
            by_shrinkage = [_squared_error(deviations + shift, total_counts, residuals) for shift in corrections]
            errors = np.stack(by_shrinkage, axis=-1) / len(all_rewards)  # (K, L, S, C)
            # In units of the running variance, as a weight that depends on this generation batch's rewards would bias the selection;
            # but after a change to much larger rewards one generation batch must not outweigh all earlier ones.
            variance = max(MIN_ERROR_UNIT * float(all_rewards.var()), self.reward_std.bounded_variance)
            if variance > 0:
                self.selector.observe(errors / variance)
            self._compare_with_batch_mean(float(errors[(*best, shrinkage)]), residuals)
        if self.use_history:
            self._update_history(features.keys, n, sums - n * correction)
        if not is_first:
            batch = ResidualSums(*(values.sum() for values in residuals.shifted(selected_deviations)))
            is_shift = is_level_shift(batch, (n > 0).sum(), std)
            mean += batch.sums / (batch.num_rollouts + (0.0 if is_shift else self.shrinkage_counts[shrinkage]))
        self.mean_reward = float(mean)
        if self.reward_std.observe(all_rewards):
            # Histories and errors are in the scale of the earlier rewards.
            self.history = {}
            self.selector.reset()

    def _compare_with_batch_mean(self, error: float, residuals: ResidualSums) -> None:
        """Update `is_misled` with the estimate's mean squared error in one generation batch and the residuals from its mean."""
        n, sums, squares = residuals
        total, num_rollouts = sums.sum(), n.sum()
        if num_rollouts < 2:
            return
        # Σ (r_i − mean of the others)² = (N / (N − 1))² · Σ (r_i − mean)²
        scatter = max(float(squares.sum() - total**2 / num_rollouts), 0.0)
        batch_error = float(scatter / num_rollouts * (num_rollouts / (num_rollouts - 1)) ** 2)
        of_estimate, of_batch = self.recent_errors
        of_estimate, of_batch = RECENT_MEMORY * of_estimate + error, RECENT_MEMORY * of_batch + batch_error
        self.recent_errors = [of_estimate, of_batch]
        if self.is_misled:
            self.is_misled = of_estimate > of_batch
            return
        # Rewards of few prompts may be equal by chance, so that the batch mean seems to have no error. The margin falls with
        # the square of the number of prompts, and is negligible with 32.
        num_prompts = int((n > 0).sum())
        if num_prompts < MIN_PROMPTS_TO_SWITCH:
            return
        margin = 8 * self.reward_std.bounded_variance / num_prompts**2
        self.is_misled = of_estimate > MISLED_RATIO * (of_batch + margin)

    def _update_history(self, keys: Sequence[str], n: np.ndarray, residuals: np.ndarray) -> None:
        sums: dict[str, np.ndarray] = {}  # a prompt that is in the batch twice is discounted once
        for key, count, residual in zip(keys, n, residuals, strict=True):
            if count:
                sums[key] = sums.get(key, 0) + np.array([[count], [residual]])
        for key, own in sums.items():
            earlier = self.history.get(key, np.zeros((2, len(DECAYS))))
            self.history[key] = earlier * self.decays + own

    def _posterior(self, features: PromptFeatures) -> tuple[np.ndarray, np.ndarray]:
        """Compute m_x − μ, `(K, L, S, P)`, and s + N_x, `(L, S, P)`, for all candidates."""
        predicted = self.value_weights[:, None] * self.reward_std.std * features.value_predictions  # (K, P)
        total_counts = self.pseudo_counts[:, None] + features.num_rollouts[:, None, :]  # (L, S, P)
        weighted_sum = self.pseudo_counts[:, None] * predicted[:, None, None, :] + features.residuals[:, None, :]
        return weighted_sum / total_counts, total_counts

    def state_dict(self) -> dict[str, Any]:
        """Return all state except `history`, as numbers and lists."""
        return {
            "mean_reward": self.mean_reward,
            "reward_std": self.reward_std.state_dict(),
            "errors": self.selector.state_dict(),
            "recent_errors": self.recent_errors,
            "is_misled": self.is_misled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.mean_reward = state["mean_reward"]
        self.reward_std.load_state_dict(state["reward_std"])
        self.recent_errors, self.is_misled = list(state["recent_errors"]), state["is_misled"]
        self.selector.load_state_dict(state["errors"])  # ignored if a value network was added or removed

    def metrics(self) -> dict[str, float]:
        """Return the selected hyperparameters by their log keys."""
        selected = self.selector.selected
        return {
            "value_weight": selected["value_weight"],
            "value_pseudo_counts": selected["pseudo_counts"],
            "discount": selected["decay"],
        }


def _residual_sums(rewards: Sequence[np.ndarray], mean: float) -> ResidualSums:
    """Sum the residuals of each prompt's `rewards` from one `mean`."""
    residuals = [values - mean for values in rewards]
    return ResidualSums(
        num_rollouts=np.array([len(values) for values in residuals], dtype=float),
        sums=np.array([values.sum() for values in residuals]),
        squares=np.array([(values**2).sum() for values in residuals]),
    )


def _squared_error(deviations: np.ndarray, total_counts: np.ndarray, residuals: ResidualSums) -> np.ndarray:
    """
    Compute Σ (r_i − b_i)² over all rollouts, with b_i = (s m + Σ_{j≠i} r_j) / (s + n − 1) within each prompt, `(K, L, S)`;
    all rewards are relative to the same mean.
    """
    n, sums, squares = residuals
    posterior_sums = total_counts * deviations + sums  # (K, L, S, P)
    posterior_counts = total_counts + n
    errors = posterior_counts**2 * squares - 2 * posterior_counts * posterior_sums * sums + n * posterior_sums**2
    return (errors / (posterior_counts - 1).clip(min=1e-12) ** 2 * (n > 0)).sum(axis=-1)
