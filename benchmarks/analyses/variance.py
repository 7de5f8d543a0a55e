"""
Mean and noise of every gradient estimator on a bandit that can be solved exactly.

The policy is a softmax over four answers of which one is right. Given how many rollouts of a pool are positive, the core
decides who is selected and every advantage; which wrong answer a negative rollout gave is independent of that. So the
expectation over all pools ([`~core.power.pool_distribution`]) and the law of total variance give the estimator's mean and
covariance without sampling. `python -m benchmarks.analyses.variance` writes `benchmarks/results/variance.parquet`, `docs/figures/variance.png` and its table into
`docs/reproducing_the_paper.md`; `--plot` starts from the stored data.
"""

from dataclasses import dataclass

import numpy as np

from ada_trl.core import ExitCondition, Pool, Rollout, group_advantages, select_group
from ada_trl.core.advantages import PromptWeighting

from ..common import COLORS, ONE_ROUND, computed_or_stored, fill, markdown, save_figure
from .outcomes import pool_distribution
from .signal_loss import est_budgets


ARMS = 4
GRID = np.round(1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 47))), 6)
TABLE_RATES = (0.02, 0.1, 0.5, 0.9)
OBJECTIVES = {"p": 0.0, "√p": -0.5, "log p": -1.0}  # f and the exponent of its weight f'(p), up to a constant


@dataclass(frozen=True)
class Estimator:
    """
    How pools are drawn and turned into advantages.

    Args:
        exit_condition, samples_per_round, max_rounds, num_generations:
            K, M, N and n; `samples_per_round=None` is Est's budget, all of which is trained on.
        weighting, selection_correction:
            See [`~core.group_advantages`].
        divide_by_std (`bool`):
            As GRPO does.
        floor (`float`):
            Pass rates are clamped below at this value before they are weighted.
    """

    exit_condition: ExitCondition = ExitCondition(2, 2)
    samples_per_round: int | None = 8
    max_rounds: int = 4
    num_generations: int = 4
    weighting: PromptWeighting = "none"
    selection_correction: bool = False
    divide_by_std: bool = False
    floor: float = 0.0


GRPO = {"exit_condition": ONE_ROUND, "max_rounds": 1}
ESTIMATORS = {
    "GRPO n=4": Estimator(**GRPO, samples_per_round=4),
    "GRPO n=4, /σ": Estimator(**GRPO, samples_per_round=4, divide_by_std=True),
    "GRPO n=16": Estimator(**GRPO, samples_per_round=16, num_generations=16),
    "GRPO n=16, /σ": Estimator(**GRPO, samples_per_round=16, num_generations=16, divide_by_std=True),
    "Est": Estimator(**GRPO, samples_per_round=None, weighting="inverse_sqrt"),
    "Seq-pos, 1/√p": Estimator(ExitCondition(1), weighting="inverse_sqrt"),
    "Seq-balance, none": Estimator(),
    "Seq-balance, 1/√p": Estimator(weighting="inverse_sqrt"),
    "Seq-balance, 1/p": Estimator(weighting="inverse"),
    "Seq-balance, none, corrected": Estimator(selection_correction=True),
    "Seq-balance, 1/√p, corrected": Estimator(weighting="inverse_sqrt", selection_correction=True),
    "Seq-balance, 1/p, corrected": Estimator(weighting="inverse", selection_correction=True),
    "Seq-balance, 1/p, floor 0.1": Estimator(weighting="inverse", floor=0.1),
    "Seq-balance, 1/p, corrected, floor 0.1": Estimator(weighting="inverse", selection_correction=True, floor=0.1),
}


def policy(p: float) -> np.ndarray:
    """π, `(ARMS,)`: the right answer first, the wrong ones alike."""
    return np.array([p, *[(1 - p) / (ARMS - 1)] * (ARMS - 1)])


def pass_rate_gradient(pi: np.ndarray) -> np.ndarray:
    """∇p with respect to the logits, `(ARMS,)`: p · (e_right − π)."""
    return pi[0] * (np.eye(len(pi))[0] - pi)


def advantages(estimator: Estimator, draws: int, positives: int) -> tuple[np.ndarray, np.ndarray]:
    """The core's advantages for a pool with so many positives: of the selected positives, of the selected negatives."""
    rewards = [1.0] * positives + [0.0] * (draws - positives)
    pool = Pool(0.5, [Rollout(i, reward, reward) for i, reward in enumerate(rewards)])
    size = draws if estimator.samples_per_round is None else estimator.num_generations
    group = select_group(pool, size, (0,))
    values = np.array(
        group_advantages(
            pool,
            group,
            weighting=estimator.weighting,
            selection_correction=estimator.selection_correction,
            std=pool.std if estimator.divide_by_std else None,
        )
    )
    if positives and pool.pass_rate < estimator.floor:
        exponent = {"none": 0.0, "inverse_sqrt": -0.5, "inverse": -1.0}[estimator.weighting]
        values *= (estimator.floor / pool.pass_rate) ** exponent
    right = np.array([pool.is_positive(rollout) for rollout in group])
    return values[right], values[~right]


def moments(estimator: Estimator, pi: np.ndarray) -> tuple[np.ndarray, float, float]:
    """
    Mean `(ARMS,)` and trace of the covariance of a prompt's gradient estimate, and its expected rollouts.

    The estimate is the mean over the group of advantage × ∇ log π(answer). Est's groups have different sizes in one
    token-mean loss, so that its mean counts N_x / 4 times, 4 being the mean size.
    """
    m = estimator.samples_per_round or int(est_budgets(pi[:1])[0])
    pools = pool_distribution(pi[:1], estimator.exit_condition, samples_per_round=m, max_rounds=estimator.max_rounds)
    scale = 1.0 if estimator.samples_per_round else m / 4
    scores = np.eye(len(pi)) - pi  # ∇ log π of each answer
    wrong = pi[1:] / pi[1:].sum()
    score_wrong = wrong @ scores[1:]
    spread_wrong = wrong @ (scores[1:] ** 2).sum(axis=1) - score_wrong @ score_wrong
    mean, square = np.zeros(len(pi)), 0.0
    for draws, positives, probability in zip(pools.draws, pools.positives, pools.probability[0], strict=True):
        up, down = advantages(estimator, draws, positives)
        size = len(up) + len(down)
        given = scale * (up.sum() * scores[0] + down.sum() * score_wrong) / size
        within = scale**2 * (down**2).sum() * spread_wrong / size**2
        mean += probability * given
        square += probability * (given @ given + within)
    return mean, square - mean @ mean, float(pools.probability[0] @ pools.draws)


def compute() -> list[dict]:
    rows = []
    for name, estimator in ESTIMATORS.items():
        for p in sorted({*GRID, *TABLE_RATES}):
            pi = policy(p)
            mean, variance, rollouts = moments(estimator, pi)
            gradient = pass_rate_gradient(pi)
            row = {"estimator": name, "pass_rate": p, "rollouts": rollouts}
            row["weight"] = mean @ gradient / (gradient @ gradient)
            row["off_direction"] = np.linalg.norm(mean - row["weight"] * gradient) / np.linalg.norm(mean)
            row["noise"] = np.sqrt(variance) / np.linalg.norm(mean)
            row["noise_per_rollout"] = row["noise"] * np.sqrt(rollouts)
            rows.append(row)
    return rows


DRAWN = (
    "GRPO n=4",
    "GRPO n=16",
    "Est",
    "Seq-pos, 1/√p",
    "Seq-balance, 1/√p",
    "Seq-balance, 1/√p, corrected",
)  # of the table


OBJECTIVE_LINES = dict(zip(OBJECTIVES, ("-", "--", ":"), strict=False))


def style(name: str) -> dict:
    method = name.split(",")[0]
    weight_colors = {"none": "#fcae91", "1/√p": "#fb6a4a", "1/p": "#a50f15"}
    color = weight_colors[name.split(", ")[1]] if method == "Seq-balance" else COLORS[method]
    return {"color": color, "linestyle": "--" if "corrected" in name else ":" if "/σ" in name else "-"}


def plot(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for name in DRAWN:
        points = [r for r in rows if r["estimator"] == name]
        p = [r["pass_rate"] for r in points]
        for axis, column in zip(axes, ("weight", "noise", "noise_per_rollout"), strict=True):
            axis.plot(p, [r[column] for r in points], label=name, **style(name))
    p = np.array(GRID)
    for objective, power in OBJECTIVES.items():
        axes[0].plot(
            p, p**power, color="black", linewidth=0.8, label=f"f = {objective}", linestyle=OBJECTIVE_LINES[objective]
        )
    for axis, label in zip(
        axes,
        (
            "Effective weight: E[estimate] / ∇p",
            "Noise / signal of one prompt's estimate",
            "Noise / signal × √rollouts (equal cost)",
        ),
        strict=True,
    ):
        axis.set(xlabel="Pass rate", ylabel=label, xscale="logit", yscale="log")
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["0.01", "0.1", "0.5", "0.9", "0.99"])
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, "variance")
    plt.close(figure)


def exponent(points: dict[float, dict]) -> float:
    """The exponent that the effective weight follows between p = 0.1 and 0.5."""
    return np.log(points[0.1]["weight"] / points[0.5]["weight"]) / np.log(0.1 / 0.5)


def table(rows: list[dict]) -> str:
    found = {(r["estimator"], r["pass_rate"]): r for r in rows}
    names = list(dict.fromkeys(r["estimator"] for r in rows))

    def show(p):
        return lambda row: "{weight:.2f} / {noise_per_rollout:.1f}".format(**found[row["name"], p])

    columns = {"Effective weight / noise at equal cost": lambda row: row["name"]}
    columns |= {f"p = {p}": show(p) for p in TABLE_RATES}
    columns["weight ∝ p^"] = lambda row: f"{exponent({p: found[row['name'], p] for p in TABLE_RATES}):.2f}"
    return markdown([{"name": name} for name in names], columns)


def main() -> None:
    rows = computed_or_stored("variance", compute, __doc__)
    plot(rows)
    fill("variance", table(rows))


if __name__ == "__main__":
    main()
