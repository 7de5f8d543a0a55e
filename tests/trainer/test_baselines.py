"""Baseline objects: computing changes no state, updating does, and training continues from the state."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from ada_trl.core import RewardEstimator, baseline_advantages
from ada_trl.trainer.baselines import build_baseline

from ..core.simulation import pools_of


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


def random_pools(rng):
    return pools_of(rng.random((3, 2)))


def build(name, scale_rewards="batch"):
    tracker = None if name == "pool" else Tracker(has_estimator=name == "posterior")
    args = SimpleNamespace(baseline=name, scale_rewards=scale_rewards, prompt_weighting="inverse_sqrt")
    return build_baseline(args, tracker), tracker


@pytest.mark.parametrize("name", ["pool", "batch", "posterior"])
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


def test_the_batch_baseline_is_the_mean_of_the_other_rollouts_and_continues_from_its_state():
    rewards = [[1.0, 3.0], [0.0, 2.0], [5.0, 1.0]]
    whole, resumed = build("batch")[0], build("batch")[0]
    whole.update(pools_of(rewards))
    values = whole.compute(pools_of(rewards))
    assert values.baselines == [[11 / 5, 9 / 5], [12 / 5, 10 / 5], [7 / 5, 11 / 5]]
    assert values.stds == pytest.approx([np.std(rewards)] * 3)
    assert values.weights == pytest.approx([0.1**-0.5, 0.5**-0.5, 0.9**-0.5])
    resumed.load_state_dict(whole.state_dict())
    assert resumed.compute(pools_of(rewards)) == values
    assert not build("batch", "none")[0].state_dict()


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 5.0), (100.0, 0.0), (0.01, -3.0)])
@pytest.mark.parametrize("name", ["batch", "posterior"])
def test_shifted_and_scaled_rewards_give_the_same_advantages(name, factor, shift):
    found = []
    for a, c in ((1.0, 0.0), (factor, shift)):
        rng, (baseline, tracker) = np.random.default_rng(0), build(name)
        for _ in range(5):
            pools = pools_of(a * rng.random((3, 2)) + c)
            values = baseline.compute(pools)
            if name == "posterior":
                tracker.reward_estimator.observe(tracker.features(), pools)
            baseline.update(pools)
            of_generation = zip(pools, values.baselines, values.weights, values.stds, strict=True)
            found += [baseline_advantages(pool, b, weight=w, std=std) for pool, b, w, std in of_generation]
    np.testing.assert_allclose(found[:15], found[15:], rtol=1e-6, atol=1e-8)
