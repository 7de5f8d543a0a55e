"""
The README's second figure: one step of the default mode on five prompts, computed with `ada_trl.core`.

`python -m benchmarks.analyses.diagram` writes `docs/figures/one_step.png`.
"""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from ada_trl.core import ExitCondition, Pool, group_advantages, prompt_weight, select_group

from ..common import COLORS, FIGURES, bernoulli_pools


PROMPTS = {"3+4=": 0.9, "12+34=": 0.5, "58+67=": 0.3, "431+978=": 0.1, "8765+4329=": 0.02}  # prompt: pass rate
M, N, GROUP = 8, 4, 4
SEED = 47  # chosen so that the outcome of every prompt is typical of its pass rate
WIDTH, HEIGHT = 830, 400  # as shown in a README on GitHub
TOP, ROW = 122, 44
COLUMNS = {  # left edge: title, and the setting of the default mode
    8: ("① Prompts", "dataset order"),
    148: ("② Rollouts", f"rounds of {M}, until {GROUP // 2} are correct and {GROUP // 2} incorrect"),
    510: ("③ Baseline", "mean of the pool"),
    638: ("④ Weight", "1/√p"),
    728: (f"⑤ Group of {GROUP}", "advantages"),
}
CORRECT, INCORRECT, GREY = COLORS["GRPO n=8"], "#8a8a8a", "#666666"


def pools() -> list[Pool]:
    rng = np.random.default_rng(SEED)
    condition = ExitCondition(GROUP // 2, GROUP // 2)
    return bernoulli_pools(list(PROMPTS.values()), rng, condition, samples_per_round=M, max_rounds=N)


def dot(axis, x: float, y: float, correct: bool, selected: bool = False) -> None:
    face, edge = CORRECT if correct else "white", "black" if selected else CORRECT if correct else INCORRECT
    size, width = (7, 1.5) if selected else (4.6, 1)
    axis.plot(x, y, "o", markersize=size, markerfacecolor=face, markeredgecolor=edge, markeredgewidth=width)


def draw_row(axis, y: float, text: str, pool: Pool, index: int) -> None:
    group = select_group(pool, GROUP, (SEED, index))
    advantages = group_advantages(pool, group)
    has_gradient = any(advantages)
    axis.text(8, y, text, va="center", family="monospace", fontsize=9.5)
    for rollout in pool.rollouts:
        selected = has_gradient and rollout.draw_index in {r.draw_index for r in group}
        dot(axis, rollout_x(rollout.draw_index), y, pool.is_positive(rollout), selected)
    axis.text(542, y, f"{pool.mean:.2f}", va="center", ha="center")
    if not has_gradient:
        axis.text(638, y, "zero-variance group", va="center", color=GREY, style="italic")
        return
    axis.text(664, y, f"× {prompt_weight(pool.pass_rate, pool.scored, 'inverse_sqrt'):.1f}", va="center", ha="center")
    for correct, shift in ((True, -8), (False, 8)):
        values = [a for a, r in zip(advantages, group, strict=True) if pool.is_positive(r) == correct]
        axis.text(728, y + shift, f"{len(values)} ×", va="center")
        dot(axis, 764, y + shift, correct)
        axis.text(822, y + shift, f"{values[0]:+.2f}".replace("-", "−"), va="center", ha="right")


def rollout_x(index: int) -> float:
    return 152 + 10.2 * index + 9 * (index // M)


def figure() -> Figure:
    drawn = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axis = drawn.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axis.axis("off")
    for x, (title, setting) in COLUMNS.items():
        axis.text(x, 24, title, fontweight="bold", fontsize=9.5)
        axis.text(x, 46, setting, color=GREY, fontsize=9)
    axis.plot([8, WIDTH - 8], [60, 60], color="#cccccc", linewidth=0.8)
    for round_index in range(N):
        axis.text(rollout_x(round_index * M) - 4, 84, f"round {round_index + 1}", color=GREY, fontsize=9)
    for index, (text, pool) in enumerate(zip(PROMPTS, pools(), strict=True)):
        draw_row(axis, TOP + ROW * index - 12, text, pool, index)
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
