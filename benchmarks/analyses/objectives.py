"""
The objectives and the allocations of the paper, as `ada_trl.core` computes them.

Figure 3 (v3): f(p) and its weight f'(p), here for more powers. Figure 7 (appendix B): rollouts of 512 prompts of all pass rates,
4096 together, by the power rule, which is the best one for RFT, and by the rule of least variance with a baseline.
`python -m benchmarks.analyses.objectives` writes `docs/figures/objectives.png`.
"""

import numpy as np

from ada_trl.core import allocate, prompt_weight

from ..common import save_figure


GRID = np.linspace(0.005, 1, 200)
POWERS = {1.0: "p  (none)", 0.5: "√p  (inverse_sqrt)", 0.25: "p^¼  (0.25)", 0.0: "log p  (inverse)"}
PROMPTS, TOTAL = 512, 4096
RULES = {"power": "power: 1/√p", "variance": "variance: √((1 − p) / p)"}


def objective(alpha: float, p: np.ndarray) -> np.ndarray:
    """p^α / α, shifted so that all powers meet at p = 1, where they also have the same slope: (p^α − 1) / α, or log p."""
    return np.log(p) if alpha == 0 else (p**alpha - 1) / alpha


def allocations() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Pass rates and rollouts of all prompts by each rule."""
    rates = (np.arange(PROMPTS) + 0.5) / PROMPTS
    options = {"min_samples": 1, "max_samples": TOTAL, "epsilon": 1e-9}
    return {rule: (rates, allocate(rates, TOTAL, rule=rule, **options)) for rule in RULES}


def plot() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    values, weights, samples = figure.subplots(1, 3)
    for i, (alpha, label) in enumerate(POWERS.items()):
        values.plot(GRID, objective(alpha, GRID), color=f"C{i}", label=label)
        weights.plot(GRID, [prompt_weight(p, 10**9, alpha) for p in GRID], color=f"C{i}")
    for rule, (rates, sizes) in allocations().items():
        samples.step(rates, sizes, label=RULES[rule], where="mid")
    values.set(ylabel="Objective f(p), up to constants", ylim=(-4, 0.1))
    weights.set(ylabel="Weight f'(p)", ylim=(0, 8))
    samples.set(ylabel="Rollouts (4096 for 512 prompts)", ylim=(0, 50))
    for panel in (values, weights, samples):
        panel.set(xlabel="Pass rate")
        panel.grid(alpha=0.3)
    values.legend(frameon=False, title="f  (prompt_weighting)", fontsize="small", title_fontsize="small")
    samples.legend(frameon=False, title="allocation_rule", fontsize="small", title_fontsize="small")
    save_figure(figure, "objectives")


if __name__ == "__main__":
    plot()
