"""Balanced groups of Reinforce-Ada's Algorithm 2, downsampled from pools."""

import math

import numpy as np
import pytest

from ada_trl.core import select_groups

from .simulation import rollouts_of


NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "n", "expected"),
    [
        ([1] * 5 + [0] * 5, 4, (2, 2, 0)),
        ([1] * 5 + [0] * 5, 5, (2, 3, 0)),  # odd n: one more negative
        ([1] + [0] * 9, 4, (1, 3, 0)),  # too few of one kind
        ([1] * 9 + [0], 4, (3, 1, 0)),
        ([1] * 9, 3, (3, 0, 0)),
        ([0] * 9, 3, (0, 3, 0)),
        ([1, 1, 0, NAN, NAN], 4, (2, 1, 1)),  # unscored only if nothing else is left
        ([1, 1, 1, 0, NAN, NAN], 4, (3, 1, 0)),
        ([NAN] * 4, 4, (0, 0, 4)),
    ],
)
def test_numbers_of_selected_positives_negatives_and_unscored(rewards, n, expected):
    rollouts = rollouts_of([1, 0] * n, rewards)
    selected = select_groups(rollouts, n, [(0,), (1,)])
    assert len(selected) == 2 * n and (np.diff(selected) > 0).all()
    group = selected[n:]
    assert (rollouts.prompt_N[group] == 1).all()
    positives, scored = rollouts.is_positive_N[group].sum(), rollouts.is_scored_N[group].sum()
    assert (positives, scored - positives, n - scored) == expected


def test_a_group_depends_on_its_seed_and_pool_alone():
    pool = [1, 0] * 16
    alone = select_groups(rollouts_of(pool), 4, [(7, 1)])
    beside = select_groups(rollouts_of([1] * 5, pool, [0] * 9), 4, [(7, 0), (7, 1), None])
    assert beside[4:].tolist() == (alone + 5).tolist() and len(beside) == 8, "`None` selects nothing."
    assert len({tuple(select_groups(rollouts_of(pool), 4, [(7, step)])) for step in range(20)}) > 10


def test_every_rollout_of_a_kind_is_equally_likely():
    trials = 4000
    rollouts = rollouts_of(*[[1] * 4 + [0] * 4] * trials)
    selected = select_groups(rollouts, 4, [(1, step) for step in range(trials)])
    counts = np.bincount(rollouts.draw_N[selected], minlength=8)
    # Each is selected with probability 1/2; 5 standard deviations of a binomial.
    assert (abs(counts - trials / 2) < 5 * math.sqrt(trials / 4)).all()


def test_a_pool_smaller_than_the_group_is_rejected():
    with pytest.raises(ValueError, match=r"pool of 3 .* num_generations \(4\)"):
        select_groups(rollouts_of([1, 0, 1, 0], [1, 0, 1]), 4, [(0,), (0,)])
