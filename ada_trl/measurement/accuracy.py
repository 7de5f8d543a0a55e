"""average@k, unbiased pass@k, intervals from resampling prompts, difficulty bins."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


NUM_RESAMPLES = 10_000
_CHUNK = 500  # resamples at a time, which bounds the memory


def pass_at_k(correct: Sequence[int] | np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """
    Unbiased estimate of the probability that at least one of k completions is correct, `(num_prompts,)`.

    1 − C(n − c, k) / C(n, k), equation 1 of [Evaluating Large Language Models Trained on
    Code](https://huggingface.co/papers/2107.03374): the share of all subsets of k of the n = `num_samples` completions
    with a correct one among them. At k = 1 it is the pass rate c / n.

    Args:
        correct (`Sequence[int]`):
            c, the number of correct completions of each prompt.
        num_samples (`int`):
            n, the number of completions of each prompt.
        k (`int`):
            At most n.

    Raises:
        `ValueError`: if k is not between 1 and n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_samples} completions per prompt. Choose k between 1 and "
            f"{num_samples}, or sample more."
        )
    subsets = math.comb(num_samples, k)
    by_count = {c: 1 - math.comb(num_samples - c, k) / subsets for c in set(correct)}
    return np.array([by_count[c] for c in correct], dtype=float)


def bootstrap_interval(
    values: Sequence[Sequence[float] | np.ndarray],
    *,
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of the mean of all values, from resampling prompts with replacement.

    Prompts are resampled within their data set, so that every data set keeps its size and thus its share in the mean.
    The interval covers the choice of prompts and, since each value is itself a measurement, the sampling of completions.

    Args:
        values (`Sequence[Sequence[float]]`):
            One number per prompt, for each data set. For the difference of two models, the prompts' differences.
        level (`float`, *optional*, defaults to `0.95`):
            Confidence level.
        num_resamples (`int`, *optional*, defaults to `10000`), seed (`int`, *optional*, defaults to `0`):
            Of the resampling.

    Returns:
        `tuple[float, float]`: lower and upper end. NaN without any prompt; of one prompt both are its value.
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


def difficulty_bins(pass_rates: ArrayLike, edges: Sequence[float]) -> list[tuple[str, np.ndarray]]:
    """
    Prompts by pass rate: those of the first edge exactly, then those above an edge and up to the next one.

    Args:
        pass_rates (`ArrayLike`):
            Of each prompt, by the model that defines the difficulty.
        edges (`Sequence[float]`):
            Increasing, from 0 to 1.

    Returns:
        `list[tuple[str, np.ndarray]]`: name and prompt positions of each bin, from hard to easy, empty ones included.
    """
    increasing = all(low < high for low, high in zip(edges, edges[1:], strict=False))  # False with a NaN
    if not increasing or len(edges) < 2 or edges[0] != 0 or edges[-1] != 1:
        raise ValueError(f"difficulty_edges ({list(edges)}) must increase from 0 to 1.")
    rates = np.asarray(pass_rates, dtype=float)
    bins = [("0", np.flatnonzero(rates == 0))]
    for low, high in zip(edges, edges[1:], strict=False):
        bins.append((f"({low:g}, {high:g}]", np.flatnonzero((rates > low) & (rates <= high))))
    return bins
