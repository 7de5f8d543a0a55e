"""
Baselines b_i of the advantages A_i = r_i − b_i. `AdaGRPOConfig.baseline` selects one of the classes below.

To add a baseline, write a class with the methods of [`Baseline`] and return it from [`build_baseline`]. Once per generation
the trainer calls `compute`, which must not change any state, and after the advantages are known `update`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import BaselineEstimate, Pool, RunningRewardStd, batch_leave_one_out_baseline
from ..pass_rates.tracker import PassRateTracker
from .ada_grpo_config import AdaGRPOConfig


BaselineValues = tuple[list[BaselineEstimate] | None, list[float] | None]


class Baseline(ABC):
    """Interface of the baselines. The same object exists on every rank and sees the pools of all ranks."""

    @abstractmethod
    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        """
        Compute the baseline of each prompt of one generation, without changing any state. Collective.

        Args:
            pools (`Sequence[Pool]`):
                One pool per prompt of all ranks, `P` in all.

        Returns:
            `tuple`: two lists of length `P`, or `None`. The first holds the estimates for
            [`~core.posterior_advantages`]; `None` means that [`~core.group_advantages`] applies. The second holds the
            standard deviations to divide by; `None` means that advantages are not divided.
        """

    def update(self, pools: Sequence[Pool]) -> None:  # noqa: B027 # stateless baselines need none
        """Update the state with the rewards of one generation, after its advantages were computed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""


class GroupMeanBaseline(Baseline):
    """b_i = mean reward of the prompt's own pool, as in GRPO and the paper. Stateless."""

    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        return None, None


class BatchLeaveOneOutBaseline(Baseline):
    """
    b_i = Σ_{j ≠ i} r_j / (N − 1), the mean of all other rollouts of the generation (RLOO over the batch, REINFORCE++).

    Args:
        scaled (`bool`):
            Whether advantages are divided by the running standard deviation of earlier generations' rewards.
        tracker ([`~pass_rates.tracker.PassRateTracker`], *optional*):
            Source of the pass rates for prompt weights; `None` if nothing depends on them.
    """

    def __init__(self, *, scaled: bool, tracker: PassRateTracker | None = None):
        self.scaled, self.tracker = scaled, tracker
        self.reward_std = RunningRewardStd()

    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        rates = [math.nan] * len(pools) if self.tracker is None else self.tracker.shared_estimates()
        stds = self.reward_std.reward_stds(pools) if self.scaled else None
        return batch_leave_one_out_baseline(pools, rates), stds

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
    the mean residual of the other prompts of the generation.

    `update` does nothing here: `PassRateTracker.observe` updates the estimator together with the value network, whose
    regression targets depend on it, and `PassRateTracker.save` writes both.

    Args:
        scaled (`bool`):
            As in [`BatchLeaveOneOutBaseline`].
        tracker ([`~pass_rates.tracker.PassRateTracker`]):
            Estimates of the prompts that were sampled last, and their estimator.
    """

    def __init__(self, *, scaled: bool, tracker: PassRateTracker):
        assert tracker.reward_estimator is not None
        self.scaled, self.tracker, self.estimator = scaled, tracker, tracker.reward_estimator

    def compute(self, pools: Sequence[Pool]) -> BaselineValues:
        estimates = self.estimator.compute_baseline(
            self.tracker.baseline_estimates(), self.tracker.predictions.keys, pools
        )
        return estimates, self.estimator.reward_std.reward_stds(pools) if self.scaled else None


def build_baseline(args: AdaGRPOConfig, tracker: PassRateTracker | None) -> Baseline:
    """Return the baseline that `args` select; `tracker` is needed where pass rates or rewards are estimated."""
    scaled = args.scale_rewards == "batch"
    if args.baseline == "batch":
        return BatchLeaveOneOutBaseline(scaled=scaled, tracker=tracker)
    if tracker is not None and tracker.reward_estimator is not None:
        return EmpiricalBayesBaseline(scaled=scaled, tracker=tracker)
    return GroupMeanBaseline()
