"""
How often a prompt has no gradient and what it costs, in closed form and simulated with the real core.

`python -m benchmarks.analyses.signal_loss` writes `benchmarks/results/signal_loss.parquet`, `docs/figures/signal_loss.png` and its table into `docs/reproducing_the_paper.md`.
`--plot` draws figure and table from the stored data.
"""

import math

import numpy as np

from ada_trl.core import ExitCondition, allocate, group_advantages, select_group

from ..common import COLORS, ONE_ROUND, bernoulli_pools, computed_or_stored, fill, markdown, save_figure
from .outcomes import refill_outcome, sequential_outcome, single_round_outcome


BALANCE = ExitCondition(2, 2)
METHODS = {  # name: exit condition, M, N, n; Est draws by pass rate
    "GRPO n=4": (ONE_ROUND, 4, 1, 4),
    "GRPO n=16": (ONE_ROUND, 16, 1, 16),
    "DAPO n=4": (ONE_ROUND, 4, 10, 4),
    "Seq-pos": (ExitCondition(1), 8, 4, 4),
    "Seq-balance": (BALANCE, 8, 4, 4),
    "Est": (ONE_ROUND, None, 1, 2),
}
GRID = np.round(1 / (1 + np.exp(-np.linspace(-5.3, 5.3, 61))), 6)
SIMULATED = slice(4, None, 7)
PROMPTS = 2000
TABLE_RATES = (0.02, 0.1, 0.5, 0.9, 0.98)


def est_budgets(pass_rates: np.ndarray) -> np.ndarray:
    """N_x for GRPO n=4's cost over prompts of all pass rates alike, with exact estimates."""
    others = (np.arange(1000) + 0.5) / 1000
    budgets = allocate(others, 4000, min_samples=2, max_samples=32)
    return np.array(budgets)[np.clip((pass_rates * 1000).astype(int), 0, 999)]


def expected(method: str, pass_rates: np.ndarray):
    exit_condition, m, rounds, n = METHODS[method]
    if method == "Est":
        return single_round_outcome(pass_rates, est_budgets(pass_rates))
    if method == "DAPO n=4":  # each pass rate a data set of its own
        outcomes = [refill_outcome([p], [1.0], n, max_rounds=rounds) for p in pass_rates]
        return [np.concatenate(values) for values in zip(*outcomes, strict=True)]
    return sequential_outcome(pass_rates, exit_condition, samples_per_round=m, max_rounds=rounds)


def simulate(method: str, p: float, rng: np.random.Generator) -> tuple[float, float]:
    """Share without a gradient and rollouts per prompt of `PROMPTS` prompts."""
    exit_condition, m, rounds, n = METHODS[method]
    if method == "Est":
        m = n = int(est_budgets(np.array([p]))[0])
    empty, drawn = PROMPTS, 0
    for _ in range(rounds if method == "DAPO n=4" else 1):
        pools = bernoulli_pools(
            [p] * empty, rng, exit_condition, samples_per_round=m, max_rounds=1 if method == "DAPO n=4" else rounds
        )
        drawn += sum(map(len, pools))
        empty = sum(not any(group_advantages(pool, select_group(pool, n, (i,)))) for i, pool in enumerate(pools))
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
                    "part": "pass_rate",
                    "method": method,
                    "pass_rate": p,
                    "zero_signal": zero,
                    "rollouts": rollouts,
                    "zero_signal_simulated": zero_simulated,
                    "rollouts_simulated": rollouts_simulated,
                }
            )
    for m in (4, 8, 16, 32):
        for quota in (1, 2, 3, 4):
            out = sequential_outcome(TABLE_RATES, ExitCondition(quota, quota), samples_per_round=m, max_rounds=32 // m)
            for p, rollouts in zip(TABLE_RATES, out.rollouts, strict=True):
                rows.append({"part": "quota", "pass_rate": p, "m": m, "quota": quota, "rollouts": rollouts})
    columns = {name: None for row in (rows[0], rows[-1]) for name in row}
    return [columns | row for row in rows]


def plot(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    axes = axes.ravel()
    for method in METHODS:
        curve = [r for r in rows if r["method"] == method]
        curve.sort(key=lambda r: r["pass_rate"])
        dots = [r for r in curve if r["zero_signal_simulated"] is not None]
        p, style = (
            [r["pass_rate"] for r in curve],
            {"color": COLORS[method]} | ({"linestyle": "--"} if method.startswith("DAPO") else {}),
        )
        axes[0].plot(p, [r["zero_signal"] for r in curve], label=method, **style)
        axes[1].plot(p, [r["rollouts"] for r in curve], **style)
        axes[2].plot(p, [r["rollouts"] / (1 - r["zero_signal"]) for r in curve], **style)
        for axis, name in zip(axes, ("zero_signal_simulated", "rollouts_simulated"), strict=False):
            axis.plot([r["pass_rate"] for r in dots], [r[name] for r in dots], ".", markersize=7, color=COLORS[method])
    for axis, label in zip(
        axes, ("P(no gradient)", "Rollouts per prompt", "Rollouts per prompt with a gradient"), strict=False
    ):
        axis.set(xlabel="Pass rate", ylabel=label, xscale="logit")
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["0.01", "0.1", "0.5", "0.9", "0.99"])
        axis.xaxis.minorticks_off()
    axes[2].set_yscale("log")
    plot_quota(axes[3], rows)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, "signal_loss")
    plt.close(figure)


def plot_quota(axis, rows: list[dict]) -> None:
    for p, line in zip((0.02, 0.1, 0.5), (":", "--", "-"), strict=True):
        for m, color in zip((4, 8, 16), ("#fdbe85", "#fd8d3c", "#a63603"), strict=True):
            points = [r for r in rows if r["part"] == "quota" and (r["pass_rate"], r["m"]) == (p, m)]
            style = {"color": color, "linestyle": line, "marker": "o", "markersize": 3}
            axis.plot([r["quota"] for r in points], [r["rollouts"] for r in points], label=f"M={m}, p={p}", **style)
    axis.set(xlabel="Quota K of each side (Seq-balance, M·N = 32)", ylabel="Rollouts per prompt")
    axis.set_xticks([1, 2, 3, 4])
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def table(rows: list[dict]) -> str:
    """No gradient / rollouts at a few pass rates, and how far simulation and closed form are apart."""
    value = {(r["method"], r["pass_rate"]): r for r in rows if r["part"] == "pass_rate"}

    def show(p):
        return lambda m: f"{value[m['method'], p]['zero_signal']:.1%} / {value[m['method'], p]['rollouts']:.1f}"

    columns = {"No gradient / rollouts": lambda m: m["method"]} | {f"p = {p}": show(p) for p in TABLE_RATES}
    dots = [r for r in value.values() if r["zero_signal_simulated"] is not None]
    z = [
        abs(r["zero_signal_simulated"] - r["zero_signal"])
        / math.sqrt(max(r["zero_signal"] * (1 - r["zero_signal"]), 1 / PROMPTS) / PROMPTS)
        for r in dots
    ]
    return (
        markdown([{"method": m} for m in METHODS], columns)
        + f"\n\nSimulated with {PROMPTS} prompts at {len(dots)} points, the shares differ from the closed forms by at most "
        f"{max(z):.1f} standard errors."
    )


def main() -> None:
    rows = computed_or_stored("signal_loss", compute, __doc__)
    plot(rows)
    fill("signal-loss", table(rows))


if __name__ == "__main__":
    main()
