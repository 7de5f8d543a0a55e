"""
The probability of a zero gradient and the expected rollouts by pass rate, in closed form and simulated with `ada_trl.core`.

`python -m benchmarks.analyses.signal_loss` writes `benchmarks/results/signal_loss.parquet` and its table into
`docs/reproducing_the_paper.md`. `--plot` uses the stored data.
"""

import math

import numpy as np

from ada_trl.core import allocate

from .. import names
from ..common import BALANCE, DEFAULT, POS, bernoulli_rollouts, computed_or_stored, fill, markdown, zero_gradient
from .outcomes import refill_outcome, sequential_outcome, single_round_outcome


METHODS = {  # name: sampling, n; the rollouts of Est depend on the pass rate
    names.GRPO_4: ({"samples_per_round": 4}, 4),
    names.GRPO_16: ({"samples_per_round": 16}, 16),
    names.DAPO: ({"samples_per_round": 4}, 4),
    names.SEQ_POS: (POS, 4),
    names.SEQ_BALANCE: (BALANCE, 4),
    f"{names.SEQ_BALANCE} (M=4, K=1+1)": (DEFAULT, 4),
    names.EST: ({}, 2),
}
DAPO_ROUNDS = 10
GRID = np.round(1 / (1 + np.exp(-np.linspace(-5.3, 5.3, 61))), 6)
SIMULATED = slice(4, None, 7)
PROMPTS = 2000
TABLE_RATES = (0.02, 0.1, 0.5, 0.9, 0.98)


def est_budgets(pass_rates: np.ndarray) -> np.ndarray:
    """N_x of Est with exact pass rates, at 4 rollouts per prompt on average over uniformly distributed pass rates."""
    others = (np.arange(1000) + 0.5) / 1000
    budgets = allocate(others, 4000, min_samples=2, max_samples=32)
    return np.array(budgets)[np.clip((pass_rates * 1000).astype(int), 0, 999)]


def expected(method: str, pass_rates: np.ndarray):
    """Probability of a zero gradient, expected rollouts and rounds, by pass rate."""
    sampling, n = METHODS[method]
    if method == names.EST:
        return single_round_outcome(pass_rates, est_budgets(pass_rates))
    if method == names.DAPO:  # for a dataset in which all prompts have this pass rate
        outcomes = [refill_outcome([p], [1.0], n, max_rounds=DAPO_ROUNDS) for p in pass_rates]
        return [np.concatenate(values) for values in zip(*outcomes, strict=True)]
    return sequential_outcome(pass_rates, **sampling)


def simulate(method: str, p: float, rng: np.random.Generator) -> tuple[float, float]:
    """Fraction with a zero gradient and rollouts per prompt, of `PROMPTS` prompts."""
    sampling, n = METHODS[method]
    if method == names.EST:
        n = int(est_budgets(np.array([p]))[0])
        sampling = {"samples_per_round": n}
    empty, drawn = PROMPTS, 0
    for _ in range(DAPO_ROUNDS if method == names.DAPO else 1):
        if not empty:
            break
        rollouts = bernoulli_rollouts([p] * empty, rng, **sampling)
        drawn += len(rollouts)
        empty = zero_gradient(rollouts, n).sum()
    return empty / PROMPTS, drawn / PROMPTS


def compute() -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for method in METHODS:
        rates = np.concatenate([GRID, TABLE_RATES])
        simulated = {p: simulate(method, p, rng) for p in GRID[SIMULATED]}
        for p, zero, rollouts, _ in zip(rates, *expected(method, rates), strict=True):
            zero_simulated, rollouts_simulated = simulated.get(p, (None, None))
            rows.append(
                {
                    "method": method,
                    "pass_rate": p,
                    "frac_zero_variance": zero,
                    "rollouts": rollouts,
                    "frac_zero_variance_simulated": zero_simulated,
                    "rollouts_simulated": rollouts_simulated,
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """P(zero gradient) / rollouts at a few pass rates, and the difference between simulation and closed form."""
    value = {(r["method"], r["pass_rate"]): r for r in rows}

    def show(p):
        return lambda m: f"{value[m['method'], p]['frac_zero_variance']:.1%} / {value[m['method'], p]['rollouts']:.1f}"

    columns = {"P(zero gradient) / rollouts": lambda m: m["method"]} | {f"p = {p}": show(p) for p in TABLE_RATES}
    dots = [r for r in value.values() if r["frac_zero_variance_simulated"] is not None]
    z = [
        abs(r["frac_zero_variance_simulated"] - r["frac_zero_variance"])
        / math.sqrt(max(r["frac_zero_variance"] * (1 - r["frac_zero_variance"]), 1 / PROMPTS) / PROMPTS)
        for r in dots
    ]
    return (
        markdown([{"method": m} for m in METHODS], columns)
        + f"\n\nSimulated with {PROMPTS} prompts at {len(dots)} points, the fractions differ from the closed forms by at most "
        f"{max(z):.1f} standard errors."
    )


def main() -> None:
    rows = computed_or_stored("signal_loss", compute, __doc__)
    fill("signal-loss", table(rows))


if __name__ == "__main__":
    main()
