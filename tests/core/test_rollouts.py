"""The record of a batch: statistics of each prompt, equal to loops over its rollouts, and sums of several rewards."""

import math
import re
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_trl.core import Rollouts, Scoring, batch_advantages

from .simulation import by_prompt, rollouts_of


NAN, INF = math.nan, math.inf
REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.7, NAN]), st.floats(-100, 100))
POOLS = st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=6), min_size=1, max_size=5)


@given(POOLS)
def test_statistics_are_those_of_a_loop(pools):
    rewards = [[reward for reward, _ in pool] for pool in pools]
    success = [[s for _, s in pool] for pool in pools]
    rollouts = rollouts_of(*rewards, success=success)
    assert rollouts.size_P.tolist() == [len(pool) for pool in pools]
    for prompt, pool in enumerate(pools):
        scored = [(r, s) for r, s in pool if not math.isnan(r) and not math.isnan(s)]
        positives = sum(s > 0.7 for _, s in scored)
        values = [r for r, _ in pool if not math.isnan(r)]
        assert rollouts.scored_P[prompt] == len(scored)
        assert (rollouts.positives_P[prompt], rollouts.negatives_P[prompt]) == (positives, len(scored) - positives)
        assert rollouts.is_abstained_P[prompt] == (bool(values) and not scored)
        assert rollouts.has_zero_variance_P[prompt] == (len(set(values)) <= 1)
        expected = (positives / len(scored) if scored else NAN, np.mean(values) if values else NAN)
        found = (rollouts.pass_rate_P[prompt], rollouts.mean_P[prompt])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
        std = np.std(values, ddof=1) if len(values) > 1 else 0.0
        assert rollouts.std_P[prompt] == pytest.approx(std, rel=1e-6, abs=1e-6)


def test_positives_are_counted_by_the_success_reward_strictly_above_the_threshold():
    assert rollouts_of([0.7, 0.71, 0.69]).positives_P.tolist() == [1]
    rollouts = rollouts_of([5.0, 6.0, 1.0], success=[[1.0, 0.0, NAN]])
    assert (rollouts.positives_P[0], rollouts.negatives_P[0], rollouts.mean_P[0]) == (1, 1, 4.0)


def test_a_part_of_the_rollouts_has_the_same_prompts():
    rollouts = rollouts_of([1, 2, 3], [4], [5, 6])
    first = rollouts.where(rollouts.draw_N < 2)
    assert by_prompt(first, first.reward_N) == [[1, 2], [4], [5, 6]]
    assert rollouts.where(rollouts.prompt_N == 1).size_P.tolist() == [0, 1, 0]


def test_the_record_of_a_batch_has_the_rollouts_in_order_of_sampling():
    scoring = Scoring((1.0, 2.0), 0.5, success_column=0)
    rollouts = Rollouts.score([np.array([[1.0, 0.0], [0.0, NAN]]), np.array([[NAN, 3.0]])], scoring)
    assert rollouts.prompt_N.tolist() == [0, 0, 1] and rollouts.draw_N.tolist() == [0, 1, 0]
    assert rollouts.reward_N.tolist() == [1.0, 0.0, 6.0]
    assert rollouts.success_reward_N.tolist() == pytest.approx([1.0, 0.0, NAN], nan_ok=True)
    assert rollouts.is_positive_N.tolist() == [True, False, False]


def test_rollouts_for_a_test_of_an_advantage_function():
    """The example of the docstring, and what it does not show."""
    code = re.search(r"```python\n(.*?)```", Rollouts.of.__doc__, re.DOTALL)[1]
    exec(textwrap.dedent(code), {})
    rollouts = Rollouts.of(
        [[[1, 0.5], [0, None]], [[None, None]]],
        columns={"level": [None, np.int64(2)], "tags": [["a"], ["a", "b"]], "mixed": [1, "a"], "empty": [None] * 2},
        lengths=[[5, 7], [9]],
        attempts=[0, 2],
        threshold=1.2,
    )
    assert rollouts.reward_N.tolist() == pytest.approx([1.5, 0, NAN], nan_ok=True)
    assert rollouts.is_positive_N.tolist() == [True, False, False]
    assert (rollouts.prompt_N.tolist(), rollouts.draw_N.tolist()) == ([0, 0, 1], [0, 1, 0])
    assert (rollouts.length_N.tolist(), rollouts.attempt_N.tolist()) == ([5, 7, 9], [0, 0, 2])
    assert rollouts.columns["level"].tolist() == pytest.approx([NAN, NAN, 2], nan_ok=True)
    others = {name: rollouts.columns[name].tolist() for name in ("tags", "mixed", "empty")}
    assert others == {"tags": [["a"], ["a"], ["a", "b"]], "mixed": [1, 1, "a"], "empty": [None] * 3}
    assert len(batch_advantages(rollouts)) == 3


def test_a_reward_of_weight_0_may_not_be_enough():
    rewards = np.array([[1.0, NAN], [1.0, 0.5]])
    for needs_weight, first in ((False, 0.0), (True, NAN)):
        reward_N, _ = Scoring((0.0, 1.0), 0.5, needs_weight=needs_weight).totals(rewards)
        assert reward_N.tolist() == pytest.approx([first, 0.5], nan_ok=True)


@pytest.mark.parametrize(
    ("weights", "rewards", "total"),
    [
        ((1.0, 2.0), [1.0, 0.5], 2.0),
        ((1.0, 2.0), [NAN, 0.5], 1.0),  # a function that did not score a rollout adds nothing
        ((1.0, 2.0), [NAN, NAN], NAN),
        ((0.0, 1.0), [1.0, NAN], 0.0),  # also if all others have the weight 0
        ((1.0, 1.0), [INF, 0.5], 0.5),
        ((1.0, 1.0), [-INF, NAN], NAN),
        ((10.0, 1.0), [3e38, 0.0], NAN),  # more than float32 has
        ((0.1, 0.2), [1.0, 1.0], float(np.float32(0.1) + np.float32(0.2))),
    ],
)
def test_sums_of_rewards_are_those_of_grpo(weights, rewards, total):
    scoring = Scoring(weights, 0.5)
    reward_N, success_N = scoring.totals(scoring.clean(np.array([rewards])))
    for found in (reward_N, success_N):
        assert found.tolist() == pytest.approx([total], rel=1e-7, nan_ok=True)


def test_rollouts_are_distinguished_by_the_rewards_that_have_a_weight():
    rewards = np.array([[1.0, 0.0, 5.0], [0.0, 1.0, 6.0], [1.0, 0.0, 7.0], [NAN, 0.0, 8.0], [NAN, 0.0, 9.0]])
    first, second, third, fourth, fifth = Scoring((1.0, 1.0, 0.0), 0.5).distinguish(rewards)
    assert first == third and first != second and fourth == fifth and fourth not in (first, second)
