"""What the rollouts of a step are compared with: `baseline` chooses one."""

import math
from collections.abc import Sequence
from typing import Any

from ..core import Pool, Prior, RewardScale, batch_priors, recentred
from ..core.belief import Belief
from ..estimation.tracker import PassRateTracker
from .ada_grpo_config import AdaGRPOConfig


Expected = tuple[list[Prior] | None, list[float] | None]


class WithPool:
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


class WithBatch(WithPool):
    """With the mean of all other rollouts of the generation; `tracker` knows the pass rates, if anything depends on them."""

    def __init__(self, scaled: bool, tracker: PassRateTracker | None):
        self.scaled, self.tracker = scaled, tracker
        self.scale = RewardScale()

    def expect(self, pools: Sequence[Pool]) -> Expected:
        rates = [math.nan] * len(pools) if self.tracker is None else self.tracker.shared_estimates()
        stds = self.scale.known_deviations(pools) if self.scaled else None
        self.scale.observe([reward for pool in pools for reward in pool.rewards])
        return batch_priors(pools, rates), stds

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale.state_dict()} if self.scaled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "scale" in state:
            self.scale.load_state_dict(state["scale"])


class WithPosterior(WithPool):
    """With what was expected of the prompt, the level of the other prompts, and its other rollouts."""

    def __init__(self, scaled: bool, tracker: PassRateTracker, belief: Belief):
        self.scaled, self.tracker, self.belief = scaled, tracker, belief

    def expect(self, pools: Sequence[Pool]) -> Expected:
        priors = informed(self.tracker.priors(), self.tracker.visit.keys, pools, shrinkage=self.belief.shrinkage)
        return priors, self.belief.scale.known_deviations(pools) if self.scaled else None


def informed(priors: Sequence[Prior], keys: Sequence[str], pools: Sequence[Pool], *, shrinkage: float) -> list[Prior]:
    """
    Priors that know of the rest of the step: of the level of the other prompts' rewards ([`~core.recentred`]) and of the
    other copies of the same prompt, which `keys` tell. They are sampled independently, so a rollout has no influence on what
    they tell about it.
    """
    priors = recentred(priors, pools, shrinkage=shrinkage)
    by_key: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        by_key.setdefault(key, []).append(i)
    return [
        prior.updated([reward for j in by_key[key] if j != i for reward in pools[j].rewards])
        for i, (prior, key) in enumerate(zip(priors, keys, strict=True))
    ]


def compared_with(args: AdaGRPOConfig, tracker: PassRateTracker | None) -> WithPool:
    """What `args` name, with a tracker where pass rates are estimated."""
    scaled = args.scale_rewards == "batch"
    if args.baseline == "batch":
        return WithBatch(scaled, tracker)
    if tracker is not None and tracker.belief is not None:
        return WithPosterior(scaled, tracker, tracker.belief)
    return WithPool()
