"""
The README's first figure and the generated results of the README, from stored results and closed forms.

`python -m benchmarks.analyses.overview` draws `docs/figures/overview.png` and fills the marked places in `README.md`.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ada_trl.core import ExitCondition

from .. import names
from ..common import COLORS, FIGURES, README, fill
from ..learning.figures import draw_curves, draw_zero_variance
from ..learning.formatting import MIN_SEEDS
from ..learning.language_tables import (
    MAIN_SET,
    ORDER,
    of_all_families,
    paper_readme_table,
    rates_table,
    readme_sentences,
    reported_rates,
    stored_language,
    zero_variance,
)
from ..learning.language_tables import (
    caption as language_caption,
)
from ..learning.report import stored
from ..learning.tables import verdict
from .outcomes import Outcome, sequential_outcome, single_round_outcome


OUTCOMES = {  # the settings of the learning benchmark and the paper
    names.GRPO_4: lambda p: single_round_outcome(p, 4),
    names.SEQ_BALANCE: lambda p: sequential_outcome(p, ExitCondition(2, 2), samples_per_round=8, max_rounds=4),
    # The baseline is the mean reward of other prompts, so a single rollout has a non-zero advantage.
    names.BATCH: lambda p: Outcome(*np.broadcast_arrays(0.0, 1.0, np.ones(len(p)))),
}
LANGUAGE = (names.GRPO_4, names.BATCH)
PASS_RATES = 1 / (1 + np.exp(-np.linspace(-5, 5, 201)))
CAPTION_RATE = 0.1
TITLE = {"fontweight": "bold", "fontsize": 10.5, "loc": "left"}
PIXELS = 830  # width of a picture in a README on GitHub


def outcome(method: str, pass_rate: float) -> Outcome:
    """Probability of a zero gradient, rollouts and rounds at one pass rate."""
    return Outcome(*(float(value[0]) for value in OUTCOMES[method]([pass_rate])))


def caption(zero_variance_share: float) -> str:
    """The figure in words; `zero_variance_share` is the fraction of zero-variance groups of the language model."""
    grpo, ada = outcome(names.GRPO_4, CAPTION_RATE), outcome(names.SEQ_BALANCE, CAPTION_RATE)
    return (
        f"*Left (analytic): at a pass rate of {CAPTION_RATE:.0%}, GRPO with {grpo.rollouts:.0f} rollouts per prompt has a zero "
        f"gradient in {grpo.zero_gradient:.0%} of the steps. Seq-balance reduces this to {ada.zero_gradient:.0%}, with "
        f"{ada.rollouts:.0f} rollouts on average. With the batch baseline every rollout has a gradient (a noisier one for prompts "
        "[far from the mean of the batch](docs/method.md#gradient-variance)), unless all rewards in "
        "the batch are equal. Right (measured): SmolLM2-135M-Instruct on eight [families](recipes/reasoning/README.md) of "
        f"reasoning tasks, where {zero_variance_share:.0%} of GRPO's groups have zero reward variance before training. Lines are "
        "means over seeds; error bars are 95% intervals after the last step.*"
    )


def figure(language: pd.DataFrame) -> Figure:
    """Left: zero gradients and rollouts by pass rate. Right: a language model's accuracy, and its zero-variance groups."""
    drawn = Figure(figsize=(PIXELS / 100, 5.9), layout="constrained")
    axes = drawn.subplots(2, 2, width_ratios=[1, 1.08])
    draw_outcomes(axes[0][0], axes[1][0])
    above, below = axes[:, 1]
    draw_curves(above, of_all_families(language), MAIN_SET, LANGUAGE, scale=100, beside=True)
    above.set_title("Accuracy of a language model (135M)", **TITLE)
    above.set(ylabel="Accuracy (%)", xlabel="Generated tokens")
    draw_zero_variance(below, language, MAIN_SET, scale=100)
    below.set_title("Zero-variance groups by task family (GRPO, n=4)", **(TITLE | {"loc": "right"}))
    below.set_xlabel("Groups before training (%)")
    lines = {}
    for axis in (axes[0][0], above):
        lines |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    shown = {"loc": "outside lower center", "ncols": len(lines), "frameon": False, "columnspacing": 1.4}
    drawn.legend(lines.values(), lines, **shown)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def draw_outcomes(zero_gradient, rollouts) -> None:
    """P(zero gradient) and expected rollouts by pass rate."""
    for method, compute in OUTCOMES.items():
        found, style = compute(PASS_RATES), {"color": COLORS[method], "linewidth": 2}
        zero_gradient.plot(PASS_RATES, 100 * found.zero_gradient, **style, label=names.short(method))
        rollouts.plot(PASS_RATES, found.rollouts, **style)
    zero_gradient.set_title("P(zero gradient) by pass rate", **TITLE)
    zero_gradient.set(ylabel="Probability (%)", ylim=(-3, 100))  # so that the line at 0 is not covered by the axis
    rollouts.set_title("Expected rollouts per prompt", **TITLE)
    rollouts.set(ylabel="Rollouts", ylim=(0, 34), xlabel="Pass rate of the prompt")
    for axis in (zero_gradient, rollouts):
        axis.set_xscale("logit")
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["1%", "10%", "50%", "90%", "99%"])
        axis.minorticks_off()


def main() -> None:
    equal, *_, single = stored()
    language, rates = stored_language(), reported_rates()
    figure(rates).savefig(FIGURES / "overview.png", dpi=200)
    fill("overview", caption(zero_variance(rates, MAIN_SET)), README)
    seeds = rates.groupby("method")["seed"].nunique()
    shown = [method for method in ORDER if seeds.get(method, 0) >= MIN_SEEDS]
    table, about = rates_table(rates, for_readme=True), language_caption(rates, MAIN_SET, shown)
    fill("language-rates", f"{table}\n\n{about}", README)
    fill("language-paper", paper_readme_table(language), README)
    fill("language-other-sets", readme_sentences(language), README)
    fill("verdict", verdict(equal, single), README)


if __name__ == "__main__":
    main()
