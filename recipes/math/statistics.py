"""Unbiased pass@k, bootstrap intervals over prompts, and difficulty bins."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


_CHUNK = 500  # resamples at a time, which bounds the memory


def pass_at_k(correct: Sequence[int] | np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """
    Estimate without bias the probability that at least one of k completions is correct, `(num_prompts,)`.

    1 − C(n − c, k) / C(n, k), equation 1 of [Evaluating Large Language Models Trained on
    Code](https://huggingface.co/papers/2107.03374): the share of all subsets of k of the n = `num_samples` completions
    that contain a correct one. For k = 1 it is the pass rate c / n.

    Args:
        correct (`Sequence[int]`), num_samples (`int`):
            c and n: the number of correct completions of each prompt, and of all its completions.
        k (`int`):
            At most n, else a `ValueError` is raised.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_samples} completions per prompt. Choose k between 1 and "
            f"{num_samples}, or sample more."
        )
    subsets = math.comb(num_samples, k)  # exact integers, which do not overflow
    by_count = {c: 1 - math.comb(num_samples - c, k) / subsets for c in set(correct)}
    return np.array([by_count[c] for c in correct], dtype=float)


def bootstrap_interval(
    values: Sequence[Sequence[float] | np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of the mean of all values.

    Prompts are resampled with replacement within their data set, so that every data set keeps its size and thus its share
    in the mean. The interval covers the choice of prompts and, since each value is itself a measurement, the sampling of
    completions.

    `values` has one number per prompt, for each data set: for the difference of two models, the prompts' differences.
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
