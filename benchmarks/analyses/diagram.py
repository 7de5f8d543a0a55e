"""
The figure of docs/method.md: one step of the default mode on five prompts, computed with `ada_trl.core`.

`python -m benchmarks.analyses.diagram` writes `docs/figures/one_step.png`.
"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from ada_trl.core import Rollouts, pool_advantages, prompt_weights, select_groups

from ..common import COLORS, DEFAULT, FIGURES, bernoulli_rollouts


PROMPTS = {"3+4=": 0.9, "12+34=": 0.5, "58+67=": 0.3, "431+978=": 0.1, "8765+4329=": 0.02}  # prompt: pass rate
M, N, GROUP = DEFAULT["samples_per_round"], DEFAULT["max_rounds"], 4
SEED = 72  # chosen so that the outcome of every prompt is typical of its pass rate
WIDTH, HEIGHT = 830, 400  # as shown in a README on GitHub
TOP, ROW = 122, 44
COLUMNS = {  # left edge: title, and the setting of the default mode
    8: ("① Prompts", "dataset order"),
    148: (
        "② Rollouts",
        f"rounds of {M}, until {DEFAULT['min_positives']} is correct and {DEFAULT['min_negatives']} incorrect",
    ),
    510: ("③ Baseline", "mean of the pool"),
    638: ("④ Weight", "1/√p"),
    728: (f"⑤ Group of {GROUP}", "advantages"),
}
CORRECT, INCORRECT, GREY = COLORS["GRPO n=8"], "#8a8a8a", "#666666"


def sample() -> Rollouts:
    return bernoulli_rollouts([*PROMPTS.values()], np.random.default_rng(SEED), **DEFAULT)


def dot(axis, x: float, y: float, correct: bool, selected: bool = False) -> None:
    face, edge = CORRECT if correct else "white", "black" if selected else CORRECT if correct else INCORRECT
    size, width = (7, 1.5) if selected else (4.6, 1)
    axis.plot(x, y, "o", markersize=size, markerfacecolor=face, markeredgecolor=edge, markeredgewidth=width)


def draw_rows(axis, rollouts: Rollouts) -> None:
    advantage_N, weight_P = pool_advantages(rollouts), prompt_weights(rollouts, "inverse_sqrt")
    is_selected_N = np.zeros(len(rollouts), dtype=bool)
    is_selected_N[select_groups(rollouts, GROUP, [(SEED, i) for i in range(len(PROMPTS))])] = True
    is_selected_N &= advantage_N != 0  # a group without a gradient is not outlined
    y_P = TOP + ROW * np.arange(len(PROMPTS)) - 12
    for prompt, draw, *kind in zip(
        rollouts.prompt_N, rollouts.draw_N, rollouts.is_positive_N, is_selected_N, strict=True
    ):
        dot(axis, rollout_x(draw), y_P[prompt], *kind)
    for prompt, (text, y) in enumerate(zip(PROMPTS, y_P, strict=True)):
        axis.text(8, y, text, va="center", family="monospace", fontsize=9.5)
        axis.text(542, y, f"{rollouts.mean_P[prompt]:.2f}", va="center", ha="center")
        if rollouts.has_zero_variance_P[prompt]:
            axis.text(638, y, "zero-variance group", va="center", color=GREY, style="italic")
            continue
        axis.text(664, y, f"× {weight_P[prompt]:.1f}", va="center", ha="center")
        for correct, shift in ((True, -8), (False, 8)):
            of_kind = is_selected_N & (rollouts.prompt_N == prompt) & (rollouts.is_positive_N == correct)
            values = advantage_N[of_kind]
            axis.text(728, y + shift, f"{len(values)} ×", va="center")
            dot(axis, 764, y + shift, correct)
            axis.text(822, y + shift, f"{values[0]:+.2f}".replace("-", "−"), va="center", ha="right")


def rollout_x(index: int) -> float:
    return 152 + 9.6 * index + 6 * (index // M)


def figure() -> Figure:
    drawn = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axis = drawn.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axis.axis("off")
    for x, (title, setting) in COLUMNS.items():
        axis.text(x, 24, title, fontweight="bold", fontsize=9.5)
        axis.text(x, 46, setting, color=GREY, fontsize=9)
    axis.plot([8, WIDTH - 8], [60, 60], color="#cccccc", linewidth=0.8)
    axis.text(140, 84, "round", color=GREY, fontsize=9, ha="right")
    for round_index in range(N):
        axis.text(rollout_x(round_index * M) - 4, 84, str(round_index + 1), color=GREY, fontsize=9)
    draw_rows(axis, sample())
    y = TOP + ROW * len(PROMPTS) - 8
    for x, correct, selected, text in (
        (14, True, False, "correct"),
        (84, False, False, "incorrect"),
        (172, True, True, "in the group"),
    ):
        dot(axis, x, y, correct, selected)
        axis.text(x + 11, y, text, va="center", color=GREY, fontsize=9)
    box = FancyBboxPatch(
        (8, HEIGHT - 42), WIDTH - 16, 32, boxstyle="round,pad=0,rounding_size=6", fc="#eef3f7", ec="#9db4c6"
    )
    axis.add_patch(box)
    axis.annotate("", (775, HEIGHT - 43), (775, y - 14), arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    text = "GRPOTrainer, unchanged: loss, KL, clipping, LoRA, distributed training, checkpoints, evaluation"
    axis.text(WIDTH / 2, HEIGHT - 25.5, text, va="center", ha="center")
    return drawn


def main() -> None:
    figure().savefig(FIGURES / "one_step.png", dpi=200)


if __name__ == "__main__":
    main()
