"""
Expected rollouts per prompt of Seq-pos and Seq-balance, for exit conditions with K in {1, 2, 4, 8} and N_max in {32, 64, 128}.

Figure 10 of the paper (v3, appendix D) simulates them in rounds of M = N_max / 8; here they are closed forms.
`python -m benchmarks.analyses.sampling_cost` writes `docs/figures/sampling_cost.png` and its table into
`docs/reproducing_the_paper.md`. With `--pass_rates RUN` it prints the table for the prompts of a run instead.
"""

import argparse
from pathlib import Path

import numpy as np

from ada_trl.core import ExitCondition

from ..common import fill, markdown, save_figure
from .outcomes import Outcome, sequential_outcome
from .paper import read_difficulty


QUOTAS = (1, 2, 4, 8)
LARGEST = (32, 64, 128)
ROUNDS = 8
GRID = np.linspace(0.005, 0.995, 199)
TABLE_RATES = (0.02, 0.1, 0.5, 0.9)
METHODS = {"Seq-pos": lambda quota: ExitCondition(quota), "Seq-balance": lambda quota: ExitCondition(quota, quota)}


def cost(method: str, quota: int, largest: int, pass_rates) -> Outcome:
    """Outcome by pass rate of at most `ROUNDS` rounds with `largest` rollouts in total."""
    condition = METHODS[method](quota)
    return sequential_outcome(pass_rates, condition, samples_per_round=largest // ROUNDS, max_rounds=ROUNDS)


def table(show) -> str:
    """Rollouts by method, N_max and quota; `show` formats a cell from method, quota and N_max."""
    rows = [(method, largest) for method in METHODS for largest in LARGEST]
    columns = {"Rollouts per prompt": lambda row: f"{row[0]}, N_max = {row[1]}, M = {row[1] // ROUNDS}"}
    columns |= {f"K = {quota}": lambda row, quota=quota: show(row[0], quota, row[1]) for quota in QUOTAS}
    return markdown(rows, columns)


def at_pass_rates(method: str, quota: int, largest: int) -> str:
    return " / ".join(f"{rollouts:.1f}" for rollouts in cost(method, quota, largest, TABLE_RATES).rollouts)


def cells_of_prompts(rates: np.ndarray, weights: np.ndarray):
    """A function that formats cells for a distribution of pass rates: mean rollouts, and the fraction with a zero gradient."""

    def show(method: str, quota: int, largest: int) -> str:
        out = cost(method, quota, largest, rates)
        return f"{weights @ out.rollouts:.1f} ({weights @ out.zero_gradient:.1%})"

    return show


def plot() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for row, method in zip(figure.subplots(2, 3, sharex=True), METHODS, strict=True):
        for panel, largest in zip(row, LARGEST, strict=True):
            for i, quota in enumerate(QUOTAS):
                panel.plot(GRID, cost(method, quota, largest, GRID).rollouts, color=f"C{i}", label=f"K = {quota}")
            panel.axhline(largest / 2, color="grey", linestyle=":", label="half of the maximum")
            panel.set(ylim=(0, 1.05 * largest))
            panel.set_title(f"{method}: rounds of {largest // ROUNDS}, at most {largest} rollouts", fontsize="medium")
            panel.grid(alpha=0.3)
        row[0].set_ylabel("Rollouts per prompt")
        required = {"Seq-pos": "required positives", "Seq-balance": "required positives,\nand required negatives"}[
            method
        ]
        row[-1].legend(title=required, frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    for panel in row:
        panel.set_xlabel("Pass rate")
    save_figure(figure, "sampling_cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass_rates", "--pass-rates", type=Path, help="Run or checkpoint with stored pass rates.")
    options = parser.parse_args()
    if options.pass_rates:
        distribution = read_difficulty(options.pass_rates)
        if distribution is None:
            parser.error(f"{options.pass_rates} has no stored pass rates; train with --pass_rate_estimator ema")
        print(table(cells_of_prompts(*distribution)))
        print("\nMean rollouts per prompt (in brackets: fraction of prompts with a zero gradient).")
        return
    plot()
    fill("sampling-cost", table(at_pass_rates))


if __name__ == "__main__":
    main()
