"""
The noise of one prompt's gradient with the group mean and with the batch mean as baseline, in closed form.

Noise: rollouts for a given signal-to-noise ratio of the update, relative to GRPO with n = 4 and without std
normalization.

Model of the policy: ∇ log π of each rollout has the same length and a random direction, except for its component along
the gradient of the prompt's logit, which is 1 − p for a positive and −p for a negative rollout. The signal of a prompt
is then E[Σ A_i (y_i − p)], and the power of its noise is E[Σ A_i²].

`python -m benchmarks.analyses.baselines` writes its table into `docs/method.md`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ada_trl.core import pool_advantages

from .. import names
from ..common import ROOT, binary_rollouts, fill, markdown
from .outcomes import binomial_probability


DOCUMENT = ROOT / "docs" / "method.md"
TABLE_RATES = (0.02, 0.1, 0.3, 0.5, 0.9)
REFERENCE = f"{names.GRPO_4}, no std normalization"


class Moments(NamedTuple):
    """
    Contribution of a prompt's rollouts to an update, one number per pass rate, `(num_pass_rates,)` each.

    Args:
        signal (`np.ndarray`):
            E[Σ A_i (y_i − p)]. For the unscaled policy gradient this is p (1 − p) times the number of rollouts.
        power (`np.ndarray`):
            E[Σ A_i²].
    """

    signal: np.ndarray
    power: np.ndarray


def uniform_moments(pass_rates: np.ndarray, size: int) -> Moments:
    """Moments with the group mean as baseline and all of `size` rollouts trained on."""
    p = np.asarray(pass_rates, dtype=np.float64)
    groups = binary_rollouts(np.arange(size + 1), size)  # one for each number of positives
    advantage_N = pool_advantages(groups, weighting="none")
    sums = (advantage_N * groups.is_positive_N, advantage_N * ~groups.is_positive_N, advantage_N**2)
    positive, negative, power = (binomial_probability(p, size) @ groups.sum(values) for values in sums)
    return Moments((1 - p) * positive - p * negative, power)


def batch_moments(pass_rates: np.ndarray, mean: float) -> Moments:
    """Moments of one rollout whose baseline is `mean`, the mean reward of the other rollouts of a large batch."""
    p = np.asarray(pass_rates, dtype=np.float64)
    return Moments(p * (1 - p), p * (1 - p) + (p - mean) ** 2)


class Baseline(NamedTuple):
    """Rollouts per prompt, and their moments by pass rate."""

    num_generations: int
    moments: Callable[[np.ndarray], Moments]


def _group(n: int) -> Baseline:
    return Baseline(n, lambda p: uniform_moments(p, n))


def _batch(mean: float) -> Baseline:
    return Baseline(1, lambda p: batch_moments(p, mean))


GROUP = {f"GRPO n={n}, no std normalization": _group(n) for n in (2, 4, 8, 16)}
BATCH = {f"{names.BATCH}, mean reward {mean}": _batch(mean) for mean in (0.2, 0.5, 0.8)}
BASELINES = GROUP | BATCH


def rollouts_for_equal_noise(name: str, pass_rates: np.ndarray) -> np.ndarray:
    """Rollouts with this baseline for the signal-to-noise ratio of the reference, as a multiple of the reference's."""

    def needed(baseline: Baseline) -> np.ndarray:
        signal, power = baseline.moments(pass_rates)
        return baseline.num_generations * power / signal**2

    return needed(BASELINES[name]) / needed(BASELINES[REFERENCE])


def table() -> str:
    """Rollouts for equal noise at a few pass rates."""
    columns = {"Rollouts for equal noise": lambda name: name}
    for p in TABLE_RATES:
        columns[f"p = {p}"] = lambda name, p=p: f"{rollouts_for_equal_noise(name, np.array([p])).item():.2f}"
    return markdown([REFERENCE, *BATCH], columns)


def uniform_batch(baseline: Baseline) -> float:
    """Rollouts for equal noise of an update on prompts whose pass rates are distributed uniformly."""
    rates = (np.arange(1000) + 0.5) / 1000

    def needed(one: Baseline) -> float:
        signal, power = (values.mean() for values in one.moments(rates))
        return one.num_generations * power / signal**2

    return needed(baseline) / needed(BASELINES[REFERENCE])


def sentences() -> str:
    """The results in words."""
    name = f"{names.BATCH}, mean reward 0.5"
    at_the_mean = 1 - rollouts_for_equal_noise(name, np.array([0.5])).item()
    return (
        f"For the signal-to-noise ratio of GRPO n=4, the batch baseline needs {at_the_mean:.0%} fewer rollouts for "
        "prompts whose pass rate is the mean reward of the batch, and many times more for prompts far from it; over "
        f"a batch with uniformly distributed pass rates it needs {uniform_batch(BATCH[name]) - 1:.1%} more."
    )


def main() -> None:
    fill("baselines", f"{table()}\n\n{sentences()}", DOCUMENT)


if __name__ == "__main__":
    main()
