"""Unbiased pass@k, bootstrap intervals over prompts, and difficulty bins."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ada_trl.core import pass_at_k


__all__ = ["bootstrap_interval", "difficulty_bins", "pass_at_k"]

_CHUNK = 500  # resamples at a time, which bounds the memory


def bootstrap_interval(
    values: Sequence[Sequence[float] | np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of the mean of all values.

    Prompts are resampled with replacement within their dataset, so that every dataset keeps its size and its weight in
    the mean. The interval includes the variance of the choice of prompts and, since each value is itself an estimate,
    of the sampling of completions.

    `values` has one number per prompt, for each dataset: for the difference of two models, the prompts' differences.
    Returns the lower and the upper end at confidence `level`; NaN if there are no prompts.
    """
    arrays = [np.asarray(v, dtype=float) for v in values if len(v)]
    if not arrays:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    sums = np.zeros(num_resamples)
    for array in arrays:
        for start in range(0, num_resamples, _CHUNK):
            chunk = slice(start, min(start + _CHUNK, num_resamples))
            drawn = rng.integers(len(array), size=(chunk.stop - chunk.start, len(array)))
            sums[chunk] += array[drawn].sum(axis=1)
    means = sums / sum(map(len, arrays))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def difficulty_bins(pass_rates: ArrayLike) -> list[tuple[str, np.ndarray]]:
    """Bin prompts by pass rate as the paper's table 5: name and prompt positions of each bin, including empty ones."""
    rates = np.asarray(pass_rates, dtype=float)
    bins = [("0", np.flatnonzero(rates == 0))]
    for low, high in ((0, 0.2), (0.2, 0.5), (0.5, 1)):
        bins.append((f"({low:g}, {high:g}]", np.flatnonzero((rates > low) & (rates <= high))))
    return bins
