"""What the rollouts of a step are compared with: `baseline` chooses one."""

import math
from collections.abc import Sequence
from typing import Any

from ..core import BaselineEstimate, Pool, RunningRewardStd, batch_leave_one_out_baseline, shift_by_batch_residual
from ..core.empirical_bayes import RewardEstimator
from ..pass_rates.tracker import PassRateTracker
from .ada_grpo_config import AdaGRPOConfig


Expected = tuple[list[BaselineEstimate] | None, list[float] | None]


class GroupMeanBaseline:
    """With the mean of the prompt's own rollouts, which nothing else has to be known for."""

    def expect(self, pools: Sequence[Pool]) -> Expected:
        """
        By prompt, the priors of [`~core.posterior_advantages`] and the deviations to divide by, and learn from the rewards. Both
        are `None` where a pool is compared with itself, the deviations also where nothing is divided. Collective.
        """
        return None, None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class BatchLeaveOneOutBaseline(GroupMeanBaseline):
    """With the mean of all other rollouts of the generation; `tracker` knows the pass rates, if anything depends on them."""

    def __init__(self, scaled: bool, tracker: PassRateTracker | None):
        self.scaled, self.tracker = scaled, tracker
        self.scale = RunningRewardStd()

    def expect(self, pools: Sequence[Pool]) -> Expected:
        rates = [math.nan] * len(pools) if self.tracker is None else self.tracker.shared_estimates()
        stds = self.scale.reward_stds(pools) if self.scaled else None
        self.scale.observe([reward for pool in pools for reward in pool.rewards])
        return batch_leave_one_out_baseline(pools, rates), stds

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale.state_dict()} if self.scaled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "scale" in state:
            self.scale.load_state_dict(state["scale"])


class EmpiricalBayesBaseline(GroupMeanBaseline):
    """With what was expected of the prompt, the level of the other prompts, and its other rollouts."""

    def __init__(self, scaled: bool, tracker: PassRateTracker, belief: RewardEstimator):
        self.scaled, self.tracker, self.belief = scaled, tracker, belief

    def expect(self, pools: Sequence[Pool]) -> Expected:
        priors = add_batch_information(
            self.tracker.priors(), self.tracker.visit.keys, pools, shrinkage=self.belief.shrinkage
        )
        return priors, self.belief.scale.reward_stds(pools) if self.scaled else None


def add_batch_information(
    priors: Sequence[BaselineEstimate], keys: Sequence[str], pools: Sequence[Pool], *, shrinkage: float
) -> list[BaselineEstimate]:
    """
    Priors that know of the rest of the step: of the level of the other prompts' rewards ([`~core.shift_by_batch_residual`]) and of the
    other copies of the same prompt, which `keys` tell. They are sampled independently, so a rollout has no influence on what
    they tell about it.
    """
    priors = shift_by_batch_residual(priors, pools, shrinkage=shrinkage)
    by_key: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return [
        prior.updated([reward for j in by_key[key] if j != i for reward in pools[j].rewards])
        for i, (prior, key) in enumerate(zip(priors, keys, strict=True))
    ]


def build_baseline(args: AdaGRPOConfig, tracker: PassRateTracker | None) -> GroupMeanBaseline:
    """What `args` name, with a tracker where pass rates are estimated."""
    scaled = args.scale_rewards == "batch"
    if args.baseline == "batch":
        return BatchLeaveOneOutBaseline(scaled, tracker)
    if tracker is not None and tracker.belief is not None:
        return EmpiricalBayesBaseline(scaled, tracker, tracker.belief)
    return GroupMeanBaseline()
