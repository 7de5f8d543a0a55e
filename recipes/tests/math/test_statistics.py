"""pass@k against brute force, intervals against enumeration, bins against their definition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada_trl.recipes.math.statistics import bootstrap_interval, difficulty_bins, pass_at_k


@given(st.data())
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_completion(data):
    rewards = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    k = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k([sum(rewards)], len(rewards), k) == pytest.approx([expected], abs=1e-12)


def test_pass_at_k_by_hand():
    # n = 4, k = 2, 6 subsets: without a correct one are C(4, 2) = 6, C(3, 2) = 3, C(2, 2) = 1, none, none.
    assert pass_at_k([0, 1, 2, 3, 4], 4, 2).tolist() == pytest.approx([0, 1 / 2, 5 / 6, 1, 1])
    assert pass_at_k([0, 1, 2, 3, 4], 4, 1).tolist() == [0, 0.25, 0.5, 0.75, 1]
    # The numerically stable product of the Codex paper, at a size where binomials overflow a float.
    assert pass_at_k([3], 2048, 512)[0] == pytest.approx(1 - np.prod(1 - 512 / np.arange(2046, 2049)))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_beyond_the_samples_is_rejected(k):
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from 4 completions"):
        pass_at_k([1], 4, k)


def test_interval_of_a_tiny_set_by_hand():
    """The mean of two draws from {0, 1} is 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
    assert bootstrap_interval([[0, 1]], level=0.95) == (0, 1)
    assert bootstrap_interval([[0, 1]], level=0.4) == (0.5, 0.5)  # 0.3 and 0.7 lie in the middle half
    assert bootstrap_interval([[0.25]]) == (0.25, 0.25)
    assert all(map(math.isnan, bootstrap_interval([[]])))


def test_interval_is_that_of_all_resamples():
    """All 4⁴ resamples of four values, enumerated. No quantile below is near a jump of their distribution."""
    values = [0, 0.25, 0.5, 1]
    means = sorted(sum(drawn) / 4 for drawn in itertools.product(values, repeat=4))
    for level in (0.5, 0.8, 0.95):
        low, high = ((1 - level) / 2, (1 + level) / 2)
        expected = (means[math.ceil(low * 256) - 1], means[math.ceil(high * 256) - 1])
        assert bootstrap_interval([values], level=level) == expected


def test_data_sets_keep_their_size():
    """Resampling within constant datasets has no variance, whatever the difference between them."""
    assert bootstrap_interval([[0.0] * 3, [1.0]]) == (0.25, 0.25)


def test_intervals_depend_on_the_seed_only():
    values = [np.random.default_rng(1).random(40)]
    assert bootstrap_interval(values) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)


def test_bins_partition_the_prompts():
    bins = difficulty_bins([0, 0.01, 0.2, 0.21, 1, 0.5, 0])
    assert [(name, members.tolist()) for name, members in bins] == [
        ("0", [0, 6]),
        ("(0, 0.2]", [1, 2]),
        ("(0.2, 0.5]", [3, 5]),
        ("(0.5, 1]", [4]),
    ]
