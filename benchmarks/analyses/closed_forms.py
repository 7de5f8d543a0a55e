"""
Closed forms of the paper's figures 3, 7 and 10 (v3), as computed by `ada_trl.core`.

Figure 3: f(p) and its weight f'(p), for more powers than in the paper. Figure 7 (appendix B): 4096 rollouts allocated
to 512 prompts with uniformly distributed pass rates, by the power rule (optimal for RFT) and by the rule of minimal
variance. Figure 10 (appendix D, simulated in the paper): expected rollouts per prompt by exit condition.
`python -m benchmarks.analyses.closed_forms` writes `docs/figures/objectives.png` and `docs/figures/sampling_cost.png`.
"""

import numpy as np
from matplotlib.figure import Figure

from ada_trl.core import allocate, prompt_weights

from ..common import binary_rollouts, save_figure
from .outcomes import Outcome, sequential_outcome


GRID = np.arange(1, 201) / 200
POWERS = {1.0: "p  (none)", 0.5: "√p  (inverse_sqrt)", 0.25: "p^¼  (0.25)", 0.0: "log p  (inverse)"}
PROMPTS, TOTAL = 512, 4096
RULES = {"power": "power: 1/√p", "variance": "variance: √((1 − p) / p)"}


def objective(alpha: float, p: np.ndarray) -> np.ndarray:
    """(p^α − 1) / α, or log p for α = 0: all powers have value 0 and slope 1 at p = 1."""
    return np.log(p) if alpha == 0 else (p**alpha - 1) / alpha


def allocations() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Pass rates and allocated rollouts of all prompts by rule."""
    rates = (np.arange(PROMPTS) + 0.5) / PROMPTS
    options = {"min_samples": 1, "max_samples": TOTAL, "epsilon": 1e-9}
    return {rule: (rates, allocate(rates, TOTAL, rule=rule, **options)) for rule in RULES}


def objectives() -> Figure:
    """Figures 3 and 7 of the paper."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    values, weights, samples = figure.subplots(1, 3)
    pools = binary_rollouts(np.arange(1, 201), 200)  # with the pass rates of the grid
    for i, (alpha, label) in enumerate(POWERS.items()):
        values.plot(GRID, objective(alpha, GRID), color=f"C{i}", label=label)
        weights.plot(GRID, prompt_weights(pools, alpha), color=f"C{i}")
    for rule, (rates, sizes) in allocations().items():
        samples.step(rates, sizes, label=RULES[rule], where="mid")
    values.set(title="Objective f(p), up to constants", ylabel="f(p)", ylim=(-4, 0.1))
    weights.set(title="Prompt weight f'(p)", ylabel="f'(p)", ylim=(0, 8))
    samples.set(title="Allocation of 4096 rollouts to 512 prompts", ylabel="Rollouts", ylim=(0, 50))
    for panel in (values, weights, samples):
        panel.set(xlabel="Pass rate")
        panel.grid(alpha=0.3)
    values.legend(frameon=False, title="f  (prompt_weighting)", fontsize="small", title_fontsize="small")
    samples.legend(frameon=False, title="allocation_rule", fontsize="small", title_fontsize="small")
    return figure


# Rollouts by exit condition

QUOTAS = (1, 2, 4, 8)
LARGEST = (32, 64, 128)
ROUNDS = 8
METHODS = {"Seq-pos": ("min_positives",), "Seq-balance": ("min_positives", "min_negatives")}


def cost(method: str, quota: int, largest: int, pass_rates) -> Outcome:
    """Outcome by pass rate of at most `ROUNDS` rounds with `largest` rollouts in total."""
    exit_condition = dict.fromkeys(METHODS[method], quota)
    return sequential_outcome(pass_rates, samples_per_round=largest // ROUNDS, max_rounds=ROUNDS, **exit_condition)


def sampling_cost() -> Figure:
    """Figure 10 of the paper."""
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
    return figure


def main() -> None:
    save_figure(objectives(), "objectives")
    save_figure(sampling_cost(), "sampling_cost")


if __name__ == "__main__":
    main()
