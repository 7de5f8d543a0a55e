"""Intervals against tables and simulation, and the words that they allow."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.statistics import (
    AS_FAST,
    BETTER,
    FASTER,
    SAME,
    SLOWER,
    UNTESTED,
    WORSE,
    Interval,
    cell,
    comparison,
    interval,
    nominal_level,
    paired,
    smallest_p_values,
)


def test_interval_by_hand():
    assert interval([1, 2, 3, 4, 5]) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3))
    assert interval([1, 2, 3]) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-3))


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5]])
def test_fewer_than_three_seeds_have_no_interval(values):
    mean, half = interval(values)
    assert mean == 0.5 and math.isnan(half)


def test_differences_are_paired_over_common_seeds():
    found = interval(paired({1: 1.0, 2: 2.0, 3: 4.0, 9: 7.0}, {3: 3.0, 2: 1.5, 1: 0.0, 4: 9.0}))
    assert found == interval([1.0, 0.5, 1.0])


def test_two_looks_without_correction_have_a_type_1_error_of_8_6_percent():
    assert (smallest_p_values((3, 5)) < 0.05).mean() == pytest.approx(0.086, abs=0.0015)


def test_type_1_error_of_corrected_looks_is_5_percent():
    """Other random numbers than those of the correction: a comparison is reported if either look excludes 0."""
    values = np.random.default_rng(1).standard_normal((4000, 5))
    reported = [
        abs(row[:3].mean()) > _half(row[:3]) or interval(row, earlier_looks=(3,)).excludes_zero for row in values
    ]
    assert np.mean(reported) == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / len(values)))


def _half(values):
    """Half the interval of the first look, at the level of both looks."""
    quantile = stats.t.ppf(1 - nominal_level((3, 5)) / 2, len(values) - 1)
    return quantile * values.std(ddof=1) / math.sqrt(len(values))


def test_a_second_look_widens_the_interval_by_the_level_of_each_look():
    values = [0.1, 0.2, 0.4, 0.3, 0.2]
    once, twice = interval(values), interval(values, earlier_looks=(3,))
    level = nominal_level((3, 5))
    assert 0.026 < level < 0.03
    assert twice.half / once.half == pytest.approx(stats.t.ppf(1 - level / 2, 4) / stats.t.ppf(0.975, 4))
    assert interval(values[:3], earlier_looks=(3,)) == interval(values[:3]), "the first look is the only one"


@pytest.mark.parametrize(
    ("mean", "half", "words"),
    [
        (0.2, 0.1, BETTER),
        (-0.2, 0.1, WORSE),
        (0.1, 0.1, SAME),
        (-0.1, 0.2, SAME),
        (0.2, math.nan, UNTESTED),
        (math.nan, math.nan, UNTESTED),
    ],
)
def test_words_are_not_stronger_than_the_interval(mean, half, words):
    difference = Interval(mean, half)
    assert comparison(difference) == words
    assert cell(difference).startswith("**") == (words in (BETTER, WORSE))


def test_other_words_follow_the_same_test():
    words = (FASTER, AS_FAST, SLOWER)
    found = [comparison(Interval(mean, 0.1), words) for mean in (0.2, 0.0, -0.2)]
    assert found == list(words)


def test_text_of_an_interval():
    assert Interval(-0.0001, 0.01).text(sign=True) == "+0.000±0.010", "no minus before a zero"
    assert Interval(0.25, math.nan).text() == "0.250"
    assert Interval(math.nan, math.nan).text() == "–"
