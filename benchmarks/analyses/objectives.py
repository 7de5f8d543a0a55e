"""
Objectives and allocations of the paper, as computed by `ada_trl.core`.

Figure 3 (v3): f(p) and its weight f'(p), for more powers than in the paper. Figure 7 (appendix B): 4096 rollouts allocated to 512
prompts with uniformly distributed pass rates, by the power rule (optimal for RFT) and by the rule of minimal variance.
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
    """(p^α − 1) / α, or log p for α = 0: all powers have value 0 and slope 1 at p = 1."""
    return np.log(p) if alpha == 0 else (p**alpha - 1) / alpha


def allocations() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Pass rates and allocated rollouts of all prompts by rule."""
    rates = (np.arange(PROMPTS) + 0.5) / PROMPTS
    options = {"min_samples": 1, "max_samples": TOTAL, "epsilon": 1e-9}
    return {rule: (rates, allocate(rates, TOTAL, rule=rule, **options)) for rule in RULES}


def plot() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    values, weights, samples = figure.subplots(1, 3)
    for i, (alpha, label) in enumerate(POWERS.items()):
        values.plot(GRID, objective(alpha, GRID), color=f"C{i}", label=label)
        weights.plot(GRID, [prompt_weight(p, 10**9, alpha) for p in GRID], color=f"C{i}")
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
    save_figure(figure, "objectives")


if __name__ == "__main__":
    plot()
