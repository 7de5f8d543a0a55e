"""Baseline objects: computing changes no state, updating does, and training continues from the state."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from ada_trl.core import BaselineEstimate, Pool, RewardEstimator, Rollout
from ada_trl.trainer.baselines import (
    BatchLeaveOneOutBaseline,
    EmpiricalBayesBaseline,
    GroupMeanBaseline,
    build_baseline,
)


CLASSES = {"pool": GroupMeanBaseline, "batch": BatchLeaveOneOutBaseline, "posterior": EmpiricalBayesBaseline}


class Tracker:
    """Tracker of a run with three prompts."""

    def __init__(self, has_estimator):
        self.reward_estimator = RewardEstimator(has_value_predictions=False) if has_estimator else None
        self.predictions = SimpleNamespace(keys=["a", "b", "c"])

    def shared_estimates(self):
        return [0.1, 0.5, 0.9]

    def features(self):
        return self.reward_estimator.features(self.predictions.keys)

    def baseline_estimates(self):
        return self.reward_estimator.estimate(self.features(), self.shared_estimates())


def pools_of(rewards):
    return [Pool(0.5, [Rollout(i, r, r) for i, r in enumerate(row)]) for row in np.asarray(rewards).tolist()]


def random_pools(rng):
    return pools_of(rng.random((3, 2)))


def build(name, scale_rewards="batch"):
    tracker = None if name == "pool" else Tracker(has_estimator=name == "posterior")
    return build_baseline(SimpleNamespace(baseline=name, scale_rewards=scale_rewards), tracker), tracker


@pytest.mark.parametrize("name", CLASSES)
def test_computing_changes_no_state(name):
    baseline, tracker = build(name)
    estimator = getattr(tracker, "reward_estimator", None)
    rng = np.random.default_rng(0)
    for _ in range(4):
        pools = random_pools(rng)
        before = copy.deepcopy((baseline.state_dict(), estimator and (estimator.state_dict(), [*estimator.history])))
        assert baseline.compute(pools) == baseline.compute(pools)
        assert before == (baseline.state_dict(), estimator and (estimator.state_dict(), [*estimator.history]))
        if estimator is not None:
            estimator.observe(tracker.features(), pools)
        baseline.update(pools)


@pytest.mark.parametrize("scale_rewards", ["none", "batch"])
@pytest.mark.parametrize("name", CLASSES)
def test_each_option_selects_its_class(name, scale_rewards):
    baseline, _ = build(name, scale_rewards)
    assert type(baseline) is CLASSES[name]
    estimates, stds = baseline.compute(random_pools(np.random.default_rng(0)))
    assert (estimates is None) == (name == "pool")
    assert (stds is None) == (name == "pool" or scale_rewards == "none")


def test_the_batch_baseline_is_the_mean_of_the_other_prompts_and_continues_from_its_state():
    rewards = [[1.0, 3.0], [0.0, 2.0], [5.0, 1.0]]
    whole, resumed = build("batch")[0], build("batch")[0]
    whole.update(pools_of(rewards))
    estimates, stds = whole.compute(pools_of(rewards))
    assert estimates == [BaselineEstimate(*values) for values in ((2.0, 4.0, 0.1), (2.5, 4.0, 0.5), (1.5, 4.0, 0.9))]
    assert stds == pytest.approx([np.std(rewards)] * 3)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.compute(pools_of(rewards)) == (estimates, stds)
    assert not build("batch", "none")[0].state_dict()
