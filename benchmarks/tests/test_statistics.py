"""Intervals against tables and simulation, and the words that they allow."""

import math

import pytest

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
    paired,
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
