"""Unbiased pass@k."""

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(correct: Sequence[int] | np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """
    Estimate without bias the probability that at least one of k completions is correct, `(num_prompts,)`.

    1 − C(n − c, k) / C(n, k), equation 1 of [Evaluating Large Language Models Trained on
    Code](https://huggingface.co/papers/2107.03374): the fraction of all subsets of k of the n = `num_samples`
    completions that contain a correct one. For k = 1 it is the pass rate c / n.

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


def pass_at_k_metrics(groups: Sequence[tuple[int, int]]) -> dict[str, float]:
    """
    Mean pass@k over prompts, for k = 1, 2, 4, … up to the number of completions of a prompt.

    Args:
        groups (`Sequence[tuple[int, int]]`):
            By prompt, the numbers of correct completions and of scored ones. A prompt with fewer than k does not count
            for k.
    """
    metrics, k = {}, 1
    while values := [float(pass_at_k([correct], number, k)[0]) for correct, number in groups if number >= k]:
        metrics[f"pass@{k}"] = math.fsum(values) / len(values)
        k *= 2
    return metrics
