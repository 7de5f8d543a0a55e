"""
What a rollout should be compared with: exact noise of the gradient of one prompt, by baseline.

A softmax over four answers of which one is right, as in `benchmarks.analyses.variance`; uniform sampling of n rollouts. The
prior of the posterior baseline is right, stale by a factor of two (in the odds), or that of another prompt. `python -m
benchmarks.analyses.baselines` writes `benchmarks/results/baselines.parquet`, `docs/figures/baselines.png` and its table into
`docs/baseline.md`; `--plot` starts from the stored data.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ada_trl.core import BaselineEstimate, Pool, Rollout, group_advantages, posterior_advantages

from ..common import ROOT, computed_or_stored, fill, markdown, save_figure
from .outcomes import binomial_probability
from .variance import GRID, pass_rate_gradient, policy


STRENGTH = 8.0  # rollouts that the prior is worth
TABLE_RATES = (0.02, 0.1, 0.3, 0.5, 0.9)


def odds_times(p: float, factor: float) -> float:
    return factor * p / (1 - p + factor * p)


class Baseline(NamedTuple):
    """How many rollouts, and what they are compared with: the pool's own mean, or a posterior of this prior."""

    num_generations: int
    prior: Callable[[float], BaselineEstimate] | None
    style: dict


def _prior(mean: Callable[[float], float], strength: float = STRENGTH) -> Callable[[float], BaselineEstimate]:
    return lambda p: BaselineEstimate(mean(p), strength, mean(p))


def _right(p: float) -> float:
    return p


BASELINES = {
    "Pool mean, n=2": Baseline(2, None, {"color": "#56b4e9", "linestyle": ":"}),
    "Pool mean, n=4": Baseline(4, None, {"color": "#56b4e9"}),
    "Pool mean, n=8": Baseline(8, None, {"color": "#0072b2"}),
    "Pool mean, n=16": Baseline(16, None, {"color": "#00304f"}),
    "Posterior n=4, right prior": Baseline(4, _prior(_right), {"color": "#d55e00", "linestyle": ":"}),
    "Posterior n=2, right prior": Baseline(2, _prior(_right), {"color": "#d55e00", "linestyle": "--"}),
    "Posterior n=1, right prior": Baseline(1, _prior(_right), {"color": "#d55e00"}),
    "Posterior n=1, odds half as high": Baseline(1, _prior(lambda p: odds_times(p, 0.5)), {"color": "#e69f00"}),
    "Posterior n=1, odds twice as high": Baseline(
        1, _prior(lambda p: odds_times(p, 2.0)), {"color": "#e69f00", "linestyle": "--"}
    ),
    "Posterior n=1, no idea (0.5)": Baseline(1, _prior(lambda p: 0.5), {"color": "#7f7f7f"}),
    "Posterior n=4, no idea (0.5)": Baseline(4, _prior(lambda p: 0.5), {"color": "#7f7f7f", "linestyle": ":"}),
}


def advantages(baseline: Baseline, positives: int, p: float) -> tuple[np.ndarray, np.ndarray]:
    """The core's advantages of a pool with so many positives: of these, of the negatives."""
    n = baseline.num_generations
    pool = Pool(0.5, (Rollout(i, r, r) for i, r in enumerate([1.0] * positives + [0.0] * (n - positives))))
    if baseline.prior is None:
        values = group_advantages(pool, pool.rollouts, weighting="none")
    else:
        values = posterior_advantages(pool, baseline.prior(p))
    return np.array(values[:positives]), np.array(values[positives:])


def moments(baseline: Baseline, pi: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean `(ARMS,)` and trace of the covariance of the mean over the rollouts of advantage × ∇ log π(answer)."""
    n = baseline.num_generations
    scores = np.eye(len(pi)) - pi  # ∇ log π of each answer
    wrong = pi[1:] / pi[1:].sum()
    score_wrong = wrong @ scores[1:]
    spread_wrong = wrong @ (scores[1:] ** 2).sum(axis=1) - score_wrong @ score_wrong
    mean, square = np.zeros(len(pi)), 0.0
    for positives, probability in enumerate(binomial_probability(pi[:1], n)[0]):
        up, down = advantages(baseline, positives, pi[0])
        given = (up.sum() * scores[0] + down.sum() * score_wrong) / n
        mean += probability * given
        square += probability * (given @ given + (down**2).sum() * spread_wrong / n**2)
    return mean, square - mean @ mean


def compute() -> list[dict]:
    rows = []
    for name, baseline in BASELINES.items():
        for p in sorted({*GRID, *TABLE_RATES}):
            pi = policy(p)
            mean, variance = moments(baseline, pi)
            gradient = pass_rate_gradient(pi)
            rows.append(
                {
                    "baseline": name,
                    "pass_rate": p,
                    "weight": mean @ gradient / (gradient @ gradient),
                    "noise_per_rollout": np.sqrt(variance * baseline.num_generations) / np.linalg.norm(mean),
                }
            )
    return rows


def plot(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
    reference = {r["pass_rate"]: r["noise_per_rollout"] for r in rows if r["baseline"] == "Pool mean, n=4"}
    for name, baseline in BASELINES.items():
        points = [r for r in rows if r["baseline"] == name]
        p = [r["pass_rate"] for r in points]
        # Rollouts that are needed for the same noise: the square of the ratio.
        needed = [(r["noise_per_rollout"] / reference[r["pass_rate"]]) ** 2 for r in points]
        axis.plot(p, needed, label=name, **baseline.style)
    axis.set(
        ylabel="Rollouts for the same noise, pool mean n=4 is 1", ylim=(0, 1.6), xlabel="Pass rate", xscale="logit"
    )
    axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["0.01", "0.1", "0.5", "0.9", "0.99"])
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    save_figure(figure, "baselines")
    plt.close(figure)


def table(rows: list[dict]) -> str:
    found = {(r["baseline"], r["pass_rate"]): r for r in rows}

    def show(p):
        def cell(row):
            needed = (
                found[row["name"], p]["noise_per_rollout"] / found["Pool mean, n=4", p]["noise_per_rollout"]
            ) ** 2
            return f"{found[row['name'], p]['weight']:.2f} / {needed:.2f}"

        return cell

    columns = {"Signal kept / rollouts for the same noise": lambda row: row["name"]}
    return markdown([{"name": name} for name in BASELINES], columns | {f"p = {p}": show(p) for p in TABLE_RATES})


def main() -> None:
    rows = computed_or_stored("baselines", compute, __doc__)
    plot(rows)
    fill("baselines", table(rows), ROOT / "docs" / "baseline.md")


if __name__ == "__main__":
    main()
