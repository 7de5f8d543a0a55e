"""Baseline objects: computing changes no state, updating does, and state continues."""

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


class Tracker:
    """Stands in for the tracker of a run with three prompts."""

    def __init__(self):
        self.reward_estimator = RewardEstimator(has_value_predictions=False)
        self.predictions = SimpleNamespace(keys=["a", "b", "c"])

    def baseline_estimates(self):
        return self.reward_estimator.estimate(self.features(), self.shared_estimates())

    def shared_estimates(self):
        return [0.1, 0.5, 0.9]

    def features(self):
        return self.reward_estimator.features(self.predictions.keys)

    def observe(self, pools):
        self.reward_estimator.observe(self.features(), pools)


def random_pools(rng):
    return [Pool(0.5, [Rollout(i, r, r) for i, r in enumerate(rng.random(2).tolist())]) for _ in range(3)]


def build(name, scale_rewards="batch"):
    tracker = None if name == "pool" else Tracker()
    if name == "batch":
        tracker.reward_estimator = None
    return build_baseline(SimpleNamespace(baseline=name, scale_rewards=scale_rewards), tracker), tracker


@pytest.mark.parametrize("name", ["pool", "batch", "posterior"])
def test_computing_changes_nothing_and_can_be_repeated(name):
    baseline, tracker = build(name)
    rng = np.random.default_rng(0)
    for _ in range(4):
        pools = random_pools(rng)
        before = copy.deepcopy((baseline.state_dict(), getattr(tracker, "reward_estimator", None)))
        first, again = baseline.compute(pools), baseline.compute(pools)
        assert first == again
        after = (baseline.state_dict(), getattr(tracker, "reward_estimator", None))
        assert before[0] == after[0]
        if name == "posterior":
            assert (
                before[1].state_dict() == after[1].state_dict() and before[1].history.keys() == after[1].history.keys()
            )
            tracker.observe(pools)
        baseline.update(pools)


def test_each_option_gives_its_class():
    for name, kind in (
        ("pool", GroupMeanBaseline),
        ("batch", BatchLeaveOneOutBaseline),
        ("posterior", EmpiricalBayesBaseline),
    ):
        for scale_rewards in ("none", "batch"):
            baseline, _ = build(name, scale_rewards)
            assert type(baseline) is kind
            estimates, stds = baseline.compute(random_pools(np.random.default_rng(0)))
            assert (estimates is None) == (name == "pool")
            assert (stds is None) == (name == "pool" or scale_rewards == "none")


def test_the_batch_baseline_is_a_leave_one_out_mean_divided_by_the_std_of_earlier_generations():
    baseline, _ = build("batch")
    rewards = [[1.0, 3.0], [0.0, 2.0], [5.0, 1.0]]
    pools = [Pool(0.5, [Rollout(i, r, r) for i, r in enumerate(row)]) for row in rewards]
    baseline.update(pools)
    estimates, stds = baseline.compute(pools)
    assert estimates == [
        BaselineEstimate(2.0, 4.0, 0.1),
        BaselineEstimate(2.5, 4.0, 0.5),
        BaselineEstimate(1.5, 4.0, 0.9),
    ]
    assert stds == pytest.approx([np.std(rewards)] * 3)


def test_the_scale_of_the_batch_mean_continues_from_its_state():
    rng = np.random.default_rng(0)
    whole, _ = build("batch")
    for _ in range(5):
        whole.update(random_pools(rng))
    resumed, _ = build("batch")
    resumed.load_state_dict(whole.state_dict())
    pools = random_pools(rng)
    assert resumed.compute(pools) == whole.compute(pools)
    assert not build("batch", "none")[0].state_dict()
