"""
Baselines b_i of the advantages A_i = r_i − b_i. `AdaGRPOConfig.baseline` selects one of the classes below.

To add a baseline, write a class with the methods of [`Baseline`], return it from [`build_baseline`] and add its name to `CHOICES`
(config_validation.py). Once per generation batch the trainer calls `compute`, which must not change any state, and after the
advantages are known `update`. The pool mean is special: only its advantages depend on which rollouts of a pool are trained on, so
`RolloutBatch.compute_advantages` computes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import Pool, RunningRewardStd, batch_leave_one_out_baselines, prompt_weight
from ..core.advantages import PromptWeighting
from .ada_grpo_config import AdaGRPOConfig


if TYPE_CHECKING:
    from ..pass_rates.tracker import PassRateTracker


LARGEST_POOL = 32  # rollouts, M · N of the paper; a predicted pass rate is clamped at 1 / 32 in the prompt weight


class BaselineValues(NamedTuple):
    """
    What is needed for the advantages A_i = w · (r_i − b_i) [/ σ] of one generation batch ([`~core.baseline_advantages`]), by prompt.

    Args:
        baselines (`list[list[float]]`):
            b_i of each rollout of the prompt.
        weights (`list[float]`):
            w of each prompt, independent of this generation batch's rollouts.
        stds (`list[float]`, *optional*):
            σ; by default advantages are not divided.
        pseudo_counts (`list[float]`, *optional*):
            Number of rollouts that the estimate of each prompt's mean reward is worth, for the logs.
    """

    baselines: list[list[float]]
    weights: list[float]
    stds: list[float] | None = None
    pseudo_counts: list[float] | None = None


class Baseline(ABC):
    """Interface of the baselines. The same object exists on every rank and sees the pools of all ranks."""

    @abstractmethod
    def compute(self, pools: Sequence[Pool]) -> BaselineValues | None:
        """
        Compute the baselines of one generation batch, without changing any state. Collective.

        Args:
            pools (`Sequence[Pool]`):
                One pool per prompt of all ranks.

        Returns:
            [`BaselineValues`], or `None` for the mean of the prompt's own pool: [`~core.group_advantages`], which also corrects
            for the selection of a group.
        """

    def update(self, pools: Sequence[Pool]) -> None:  # noqa: B027 # stateless baselines need none
        """Update the state with the rewards of one generation batch, after its advantages were computed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""


class PoolMeanBaseline(Baseline):
    """b_i = mean reward of the prompt's own pool, as in GRPO and the paper. Stateless."""

    def compute(self, pools: Sequence[Pool]) -> None:
        return None


class BatchLeaveOneOutBaseline(Baseline):
    """
    b_i = Σ_{j ≠ i} r_j / (N − 1), the mean of all other rollouts of the generation batch (RLOO over the batch, REINFORCE++).

    Args:
        scaled (`bool`):
            Whether advantages are divided by the running standard deviation of earlier generations' rewards.
        weighting (`str` or `float`):
            See [`~core.prompt_weight`].
        tracker ([`~pass_rates.tracker.PassRateTracker`], *optional*):
            Source of the pass rates for prompt weights; without it all weights are 1.
    """

    def __init__(self, *, scaled: bool, weighting: PromptWeighting, tracker: "PassRateTracker | None" = None):
        self.scaled, self.weighting, self.tracker = scaled, weighting, tracker
        self.reward_std = RunningRewardStd()

    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        weights = [1.0] * len(pools)
        if self.tracker is not None:
            weights = [prompt_weight(p, LARGEST_POOL, self.weighting) for p in self.tracker.shared_estimates()]
        stds = self.reward_std.reward_stds(pools) if self.scaled else None
        return BaselineValues(batch_leave_one_out_baselines(pools), weights, stds)

    def update(self, pools: Sequence[Pool]) -> None:
        self.reward_std.observe([reward for pool in pools for reward in pool.rewards])

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.reward_std.state_dict()} if self.scaled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "scale" in state:
            self.reward_std.load_state_dict(state["scale"])


class EmpiricalBayesBaseline(Baseline):
    """
    b_i = (s·m_x + Σ_{j ≠ i} r_j) / (s + n − 1), the posterior mean of the prompt's reward given its other rollouts.

    m_x and s come from a [`~core.RewardEstimator`] (the prompt's history and, if there is one, a value network), shifted by
    the mean residual of the other prompts of the generation batch.

    `update` does nothing here: `PassRateTracker.observe` updates the estimator together with the value network, whose
    regression targets depend on it, and `PassRateTracker.save` writes both.

    Args:
        scaled (`bool`), weighting (`str` or `float`):
            As in [`BatchLeaveOneOutBaseline`].
        tracker ([`~pass_rates.tracker.PassRateTracker`]):
            Estimates of the prompts that were sampled last, and their estimator.
    """

    def __init__(self, *, scaled: bool, weighting: PromptWeighting, tracker: "PassRateTracker"):
        assert tracker.reward_estimator is not None
        self.scaled, self.weighting = scaled, weighting
        self.tracker, self.estimator = tracker, tracker.reward_estimator

    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        estimates = self.tracker.baseline_estimates()
        return BaselineValues(
            self.estimator.compute_baselines(estimates, self.tracker.predictions.keys, pools),
            [prompt_weight(estimate.pass_rate, LARGEST_POOL, self.weighting) for estimate in estimates],
            self.estimator.reward_std.reward_stds(pools) if self.scaled else None,
            [estimate.pseudo_counts for estimate in estimates],
        )


def build_baseline(args: AdaGRPOConfig, tracker: "PassRateTracker | None") -> Baseline:
    """Return the baseline that `args` select; `tracker` is needed where pass rates or rewards are estimated."""
    scaled, weighting = args.scale_rewards == "batch", args.prompt_weighting
    if args.baseline == "pool":
        return PoolMeanBaseline()
    if args.baseline == "batch":
        return BatchLeaveOneOutBaseline(scaled=scaled, weighting=weighting, tracker=tracker)
    assert tracker is not None
    return EmpiricalBayesBaseline(scaled=scaled, weighting=weighting, tracker=tracker)
