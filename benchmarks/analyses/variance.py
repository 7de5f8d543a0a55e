"""
Mean and noise of every gradient estimator on a bandit that can be solved exactly.

The policy is a softmax over four answers, one of which is correct. Given the number of positive rollouts of a pool,
`ada_trl.core` determines the selection and every advantage; which incorrect answer a negative rollout has is
independent of that. So the expectation over all pools (`pool_distribution`) and the law of total variance give the
estimator's mean and covariance without sampling. `python -m benchmarks.analyses.variance` writes
`docs/figures/variance.png` and its table into `benchmarks/README.md`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ada_trl.core import pool_advantages, select_groups
from ada_trl.core.advantages import PromptWeighting, Scale

from .. import names
from ..common import BALANCE, COLORS, DEFAULT, POS, binary_rollouts, fill, markdown, save_figure
from .outcomes import pool_distribution
from .signal_loss import est_budgets


ARMS = 4
GRID = np.round(1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 47))), 6)
TABLE_RATES = (0.02, 0.1, 0.5, 0.9)
OBJECTIVES = {"p": 0.0, "√p": -0.5, "log p": -1.0}  # f and the exponent of its weight f'(p), up to a constant


@dataclass(frozen=True)
class Estimator:
    """
    Sampling of the pools, and their advantages.

    Args:
        sampling (`dict[str, int]`):
            Options of [`pool_distribution`]; empty for Est, which trains on all rollouts of its budget.
        num_generations (`int`):
            n.
        weighting, scale:
            See [`~core.pool_advantages`].
    """

    sampling: dict[str, int] = field(default_factory=lambda: BALANCE)
    num_generations: int = 4
    weighting: PromptWeighting = "none"
    scale: Scale = "none"


GRPO_4 = {"sampling": {"samples_per_round": 4}}
GRPO_16 = {"sampling": {"samples_per_round": 16}, "num_generations": 16}
ESTIMATORS = {
    "GRPO n=4, no std normalization": Estimator(**GRPO_4),
    "GRPO n=4": Estimator(**GRPO_4, scale="group"),
    "GRPO n=16, no std normalization": Estimator(**GRPO_16),
    "GRPO n=16": Estimator(**GRPO_16, scale="group"),
    "Reinforce-Ada Est": Estimator({}, weighting="inverse_sqrt"),
    "Reinforce-Ada Seq-pos (1/√p)": Estimator(POS, weighting="inverse_sqrt"),
    "Reinforce-Ada Seq-balance (Algorithm 2)": Estimator(),
    "Reinforce-Ada Seq-balance (1/√p)": Estimator(weighting="inverse_sqrt"),
    names.SMALL_ROUNDS: Estimator(DEFAULT, weighting="inverse_sqrt"),
    "Reinforce-Ada Seq-balance (1/p)": Estimator(weighting="inverse"),
}


def policy(p: float) -> np.ndarray:
    """π, `(ARMS,)`: the correct answer first, the incorrect ones with equal probabilities."""
    return np.array([p, *[(1 - p) / (ARMS - 1)] * (ARMS - 1)])


def pass_rate_gradient(pi: np.ndarray) -> np.ndarray:
    """∇p with respect to the logits, `(ARMS,)`: p · (e_correct − π)."""
    return pi[0] * (np.eye(len(pi))[0] - pi)


def moments(estimator: Estimator, pi: np.ndarray) -> tuple[np.ndarray, float, float]:
    """
    Mean `(ARMS,)` and trace of the covariance of a prompt's gradient estimate, and its expected rollouts.

    The estimate is the mean over the group of advantage × ∇ log π(answer). The groups of Est have different sizes in
    one token-mean loss, so its mean is weighted with N_x / 4, where 4 is the mean size.
    """
    budget = int(est_budgets(pi[:1])[0])
    sampling = estimator.sampling or {"samples_per_round": budget}
    size, scale = (estimator.num_generations, 1.0) if estimator.sampling else (budget, budget / 4)
    pools = pool_distribution(pi[:1], **sampling)
    probability = pools.probability[0]
    rollouts = binary_rollouts(pools.positives, pools.draws)
    group = select_groups(rollouts, size, [(0,)] * rollouts.num_prompts)
    advantage_N = np.zeros(len(rollouts))
    advantage_N[group] = pool_advantages(rollouts, weighting=estimator.weighting, scale=estimator.scale)[group]
    up_P = rollouts.sum(advantage_N * rollouts.is_positive_N)
    down_P = rollouts.sum(advantage_N * ~rollouts.is_positive_N)
    down_square_P = rollouts.sum(advantage_N**2 * ~rollouts.is_positive_N)

    scores = np.eye(len(pi)) - pi  # ∇ log π of each answer
    wrong = pi[1:] / pi[1:].sum()
    score_wrong = wrong @ scores[1:]
    spread_wrong = wrong @ (scores[1:] ** 2).sum(axis=1) - score_wrong @ score_wrong
    given_PA = scale * (np.outer(up_P, scores[0]) + np.outer(down_P, score_wrong)) / size
    within_P = scale**2 * down_square_P * spread_wrong / size**2
    mean, square = probability @ given_PA, probability @ ((given_PA**2).sum(axis=1) + within_P)
    return mean, square - mean @ mean, float(probability @ pools.draws)


class Gradient(NamedTuple):
    """
    An estimator at one pass rate.

    Args:
        weight (`float`):
            Factor of ∇p in the expected gradient.
        noise_per_rollout (`float`):
            Standard deviation of the estimate divided by the norm of its mean, times √rollouts.
    """

    weight: float
    noise_per_rollout: float


def gradient(name: str, p: float) -> Gradient:
    pi = policy(p)
    mean, variance, rollouts = moments(ESTIMATORS[name], pi)
    exact = pass_rate_gradient(pi)
    return Gradient(mean @ exact / (exact @ exact), np.sqrt(variance * rollouts) / np.linalg.norm(mean))


REFERENCE = f"{names.GRPO_4}, no std normalization"
SHOWN = {  # in the figure: style
    REFERENCE: {"color": COLORS[names.GRPO_4]},
    f"{names.SEQ_POS} (1/√p)": {"color": COLORS[names.SEQ_POS]},
    names.ALGORITHM_2: {"color": COLORS[names.SEQ_BALANCE], "linestyle": ":", "linewidth": 2.2},
    names.HYBRID: {"color": COLORS[names.SEQ_BALANCE]},
}


def plot() -> None:
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    weight, noise = figure.subplots(1, 2)
    reference = np.array([gradient(REFERENCE, p).noise_per_rollout for p in GRID])
    for name, style in SHOWN.items():
        found = [gradient(name, p) for p in GRID]
        weight.plot(GRID, [one.weight for one in found], label=names.short(name), **style)
        noise.plot(GRID, np.array([one.noise_per_rollout for one in found]) / reference, **style)
    for objective, power in OBJECTIVES.items():
        weight.plot(GRID, GRID**power, color="0.6", linewidth=0.9, zorder=1)
        weight.annotate(f"f = {objective}", (GRID[0], GRID[0] ** power), xytext=(-3, 0), textcoords="offset points",
                        ha="right", va="center", color="0.4", fontsize="small")  # fmt: skip
    weight.set(
        title="Effective weight (expected gradient / ∇p)",
        ylabel="Effective weight",
        yscale="log",
        xlim=(0.0022, 0.995),
    )
    noise.set(title=f"Noise at equal cost ({REFERENCE}: 1)", ylabel="Relative noise", ylim=(0, 1.4))
    for axis in (weight, noise):
        axis.set(xlabel="Pass rate", xscale="logit")
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["0.01", "0.1", "0.5", "0.9", "0.99"])
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*weight.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, "variance")


def exponent(name: str) -> float:
    """The exponent of p in the effective weight, between p = 0.1 and 0.5."""
    return np.log(gradient(name, 0.1).weight / gradient(name, 0.5).weight) / np.log(0.1 / 0.5)


def table() -> str:
    columns = {"Effective weight, noise at equal cost": lambda name: name}
    columns |= {f"p = {p}": lambda name, p=p: "{:.2f}, {:.1f}".format(*gradient(name, p)) for p in TABLE_RATES}
    columns["weight ∝ p^"] = lambda name: f"{exponent(name):.2f}"
    return markdown([name for name in ESTIMATORS if not name.endswith("no std normalization")], columns)


def main() -> None:
    plot()
    fill("variance", table())


if __name__ == "__main__":
    main()
