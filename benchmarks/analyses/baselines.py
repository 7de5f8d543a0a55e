"""
The noise of one prompt's gradient with the group mean, the batch mean and the posterior mean as baseline, in closed form.

Noise: rollouts for a given signal-to-noise ratio of the update, relative to GRPO with n = 4 and without std normalization
(`benchmarks.analyses.noise`). `python -m benchmarks.analyses.baselines` writes
`docs/figures/baselines.png` and its table into `docs/method.md`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from .. import names
from ..common import COLORS, ROOT, fill, markdown, save_figure
from .noise import Moments, noise, posterior_moments, uniform_moments


DOCUMENT = ROOT / "docs" / "method.md"
GRID = 1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 93)))
TABLE_RATES = (0.02, 0.1, 0.3, 0.5, 0.9)
PSEUDO_COUNTS = 8.0  # of the prior
UNBOUNDED = 1e9  # pseudo-counts of a baseline that the prompt's own rollouts do not change
REFERENCE = f"{names.GRPO_4}, no std normalization"


class Baseline(NamedTuple):
    """Rollouts per prompt, and their moments by pass rate."""

    num_generations: int
    moments: Callable[[np.ndarray], Moments]


def _group(n: int) -> Baseline:
    return Baseline(n, lambda p: uniform_moments(p, n))


def _batch(mean: float) -> Baseline:
    return Baseline(1, lambda p: posterior_moments(p, 1, mean, UNBOUNDED))


def _posterior(n: int, odds_factor: float) -> Baseline:
    """A prior whose odds are `odds_factor` times the true ones."""
    return Baseline(n, lambda p: posterior_moments(p, n, odds_factor * p / (1 - p + odds_factor * p), PSEUDO_COUNTS))


GROUP = {f"GRPO n={n}, no std normalization": _group(n) for n in (2, 4, 8, 16)}
BATCH = {f"{names.BATCH}, mean reward {mean}": _batch(mean) for mean in (0.2, 0.5, 0.8)}
POSTERIOR = {
    f"{names.POSTERIOR}, correct prior": _posterior(1, 1.0),
    f"{names.POSTERIOR}, prior odds halved": _posterior(1, 0.5),
    f"{names.POSTERIOR}, prior odds doubled": _posterior(1, 2.0),
    "posterior baseline, n=4, correct prior": _posterior(4, 1.0),
}
BASELINES = GROUP | BATCH | POSTERIOR


def rollouts_for_equal_noise(name: str, pass_rates: np.ndarray) -> np.ndarray:
    """Rollouts with this baseline for the signal-to-noise ratio of the reference, as a multiple of the reference's."""

    def needed(baseline: Baseline) -> np.ndarray:
        signal, power = baseline.moments(pass_rates)
        return baseline.num_generations * power / signal**2

    return needed(BASELINES[name]) / needed(BASELINES[REFERENCE])


def figure() -> Figure:
    drawn = Figure(figsize=(10, 4), layout="constrained")
    axes = drawn.subplots(1, 3, sharey=True)
    blues = ("#9ecae1", COLORS[names.GRPO_4], COLORS[names.GRPO_8], COLORS[names.GRPO_16])
    oranges = ("#fdd08a", COLORS[names.BATCH], "#8c5e00")
    greens = (COLORS[names.POSTERIOR], "#66c2a5", "#00523b")
    for axis, title, shown, colors in (
        (axes[0], "Group mean (GRPO)", GROUP, blues),
        (axes[1], "Batch baseline, n=1", BATCH, oranges),
        (axes[2], "Posterior baseline, n=1", list(POSTERIOR)[:3], greens),
    ):
        for name, color, line in zip(shown, colors, ("-", "--", "-.", ":"), strict=False):
            label = name.removesuffix(", no std normalization").split(", ")[-1]
            axis.plot(
                GRID, rollouts_for_equal_noise(name, GRID), color=color, linestyle=line, linewidth=2, label=label
            )
        axis.axhline(1, color="0.8", linewidth=0.8, zorder=0)  # below the line of GRPO n=4
        axis.set(title=title, xlabel="Pass rate", xscale="logit", yscale="log", ylim=(0.5, 16))
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["0.01", "0.1", "0.5", "0.9", "0.99"])
        axis.xaxis.minorticks_off()
        axis.set_yticks([0.5, 0.75, 1, 2, 4, 8, 16], ["0.5", "0.75", "1", "2", "4", "8", "16"])
        axis.yaxis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small", loc="upper center")
    axes[0].set_ylabel("Rollouts for equal noise (GRPO n=4: 1)")
    return drawn


def table() -> str:
    """Rollouts for equal noise at a few pass rates."""
    columns = {"Rollouts for equal noise": lambda name: name}
    for p in TABLE_RATES:
        columns[f"p = {p}"] = lambda name, p=p: f"{rollouts_for_equal_noise(name, np.array([p])).item():.2f}"
    return markdown(list(BASELINES), columns)


def uniform_batch(baseline: Baseline) -> float:
    """Rollouts for equal noise of an update on prompts whose pass rates are distributed uniformly."""
    rates = (np.arange(1000) + 0.5) / 1000
    weights = np.full(len(rates), 1 / len(rates))
    needed, reference = (
        noise(one.moments(rates), np.full(len(rates), float(one.num_generations)), weights)
        for one in (baseline, BASELINES[REFERENCE])
    )
    return needed / reference


def sentences() -> str:
    """The results in words."""
    correct, *wrong = (1 - rollouts_for_equal_noise(name, GRID) for name in list(POSTERIOR)[:3])
    low, high = min(saved.min() for saved in wrong), max(saved.max() for saved in wrong)
    batch = BATCH[f"{names.BATCH}, mean reward 0.5"]
    at_the_mean = 1 - rollouts_for_equal_noise(f"{names.BATCH}, mean reward 0.5", np.array([0.5])).item()
    return (
        f"Rollouts for the signal-to-noise ratio of GRPO n=4: the posterior baseline with one rollout per prompt needs "
        f"{correct.min():.0%} fewer with the correct prior at every pass rate, and {low:.0%} to {high:.0%} fewer with prior odds "
        f"that are wrong by a factor of two. The batch baseline needs {at_the_mean:.0%} fewer for prompts whose pass rate is the "
        f"mean reward of the batch, and many times more for prompts far from it; over a batch with uniformly distributed pass "
        f"rates it needs {uniform_batch(batch) - 1:.1%} more."
    )


def main() -> None:
    save_figure(figure(), "baselines")
    fill("baselines", f"{table()}\n\n{sentences()}", DOCUMENT)


if __name__ == "__main__":
    main()
