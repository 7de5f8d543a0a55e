"""
The README's first picture and every number on its first screen, from stored results and closed forms only.

`python -m benchmarks.analyses.overview` draws `docs/figures/overview.png` and fills the places marked in `README.md`.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ada_trl.core import ExitCondition

from ..common import FIGURES, README, fill
from ..learning import figures
from ..learning.figures import CHEAP, draw_contrast, draw_tokens
from ..learning.report import (
    BATCH,
    CHOOSING,
    DEFAULT,
    HARD_SET,
    MAIN_SET,
    POSTERIOR,
    ROUNDS,
    STRONG,
    before_training,
    final,
    is_zero_variance,
    language_table,
    show,
    standing,
    stored,
    stored_language,
    verdict,
)
from ..learning.statistics import by_seed, paired_difference
from .outcomes import Outcome, sequential_outcome, single_round_outcome


OUTCOMES = {  # the settings of the learning benchmark and the paper
    CHEAP: lambda p: single_round_outcome(p, 4),
    STRONG: lambda p: single_round_outcome(p, 8),
    DEFAULT: lambda p: sequential_outcome(p, ExitCondition(2, 2), samples_per_round=8, max_rounds=4),
    # Compared with what others earned or what was expected, so one rollout teaches whatever it scores.
    BATCH: lambda p: Outcome(*np.broadcast_arrays(0.0, 1.0, np.ones(len(p)))),
}
STYLES = figures.FIRST | figures.OTHERS
LEARNT = {method: STYLES[method] for method in (CHEAP, STRONG, BATCH, POSTERIOR, CHOOSING, ROUNDS)}
PASS_RATES = 1 / (1 + np.exp(-np.linspace(-5, 5, 201)))
CAPTION_RATE = 0.1
TITLE = {"fontweight": "bold", "fontsize": 10.5, "loc": "left"}
PIXELS = 830  # width of a picture in a README on GitHub


def outcome(method: str, pass_rate: float) -> Outcome:
    """What a prompt of one pass rate loses and costs."""
    return Outcome(*(float(value[0]) for value in OUTCOMES[method]([pass_rate])))


def caption(lost_there: float) -> str:
    """The picture in words; `lost_there` is the share of GRPO's groups that teach the language model nothing."""
    grpo, ours = outcome(CHEAP, CAPTION_RATE), outcome(DEFAULT, CAPTION_RATE)
    return (
        f"*Left, exact: a prompt that is solved once in {1 / CAPTION_RATE:.0f} tries gives GRPO with "
        f"{grpo.rollouts:.0f} rollouts (n={grpo.rollouts:.0f}) no gradient in {grpo.zero_signal:.0%} of the steps. "
        f"Seq-balance gets that down to {ours.zero_signal:.0%}, for {ours.rollouts:.0f} rollouts; compared with what other "
        "prompts earned, every single rollout teaches. Right, measured: a language model of 135 million parameters on "
        f"eight families of reasoning tasks, where {lost_there:.0%} of GRPO's groups teach nothing before training; means and "
        "95% intervals over seeds.*"
    )


def hard_families(language: pd.DataFrame) -> str:
    """The set where nearly all fails, in a sentence, whoever wins."""
    whole = language[language["family"] == "all"]
    ours = final(by_seed(whole, HARD_SET, BATCH))
    said = []
    for other in (CHEAP, STRONG, POSTERIOR):
        difference = paired_difference(ours, final(by_seed(whole, HARD_SET, other)))
        said.append(f"{standing(*difference)} {other} ({show(difference, sign=True)})")
    before = before_training(whole, HARD_SET)["accuracy"]
    return (
        f"On seven [hard families](docs/benchmarks.md#a-language-model) ({before:.3f} before training, "
        f"{is_zero_variance(language, HARD_SET):.0%} of GRPO's groups without contrast) `batch` ends {', '.join(said)}."
    )


def figure(language: pd.DataFrame) -> Figure:
    """Left: what is lost and recovered, and for how many rollouts. Right: a language model's accuracy, and what GRPO loses there."""
    drawn = Figure(figsize=(PIXELS / 100, 5.9), layout="constrained")
    axes = drawn.subplots(2, 2, width_ratios=[1, 1.08])
    draw_signal(axes[0][0], axes[1][0])
    above, below = axes[:, 1]
    whole = language[language["family"] == "all"]
    shown = {method: style for method, style in LEARNT.items() if len(by_seed(whole, MAIN_SET, method)) > 2}
    draw_tokens(above, whole, MAIN_SET, scale=100, styles=shown)
    above.set_title("Accuracy of a language model", **TITLE)
    above.set_ylabel("%")
    above.set_xlabel("Generated tokens")
    draw_contrast(below, language, MAIN_SET, scale=100)
    below.set_title(f"Its groups of {CHEAP} that teach nothing", **TITLE)
    below.set_xlabel("% of each family's, before training")
    lines = {}
    for axis in (axes[0][0], above):
        lines |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    drawn.legend(
        lines.values(),
        lines,
        loc="outside lower center",
        ncols=(len(lines) + 1) // 2,
        frameon=False,
        columnspacing=1.2,
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def draw_signal(lost, cost) -> None:
    found = {method: OUTCOMES[method](PASS_RATES) for method in OUTCOMES}
    for method, values in found.items():
        style = {"color": STYLES[method]["color"], "linewidth": 1.6}
        lost.plot(PASS_RATES, 100 * values.zero_signal, **style, label=figures.short(method))
        cost.plot(PASS_RATES, values.rollouts, **style)
    both = (100 * found[method].zero_signal for method in (DEFAULT, CHEAP))
    lost.fill_between(PASS_RATES, *both, color=STYLES[DEFAULT]["color"], alpha=0.13, linewidth=0)
    for p in (0.055, 0.945):
        lost.text(
            p,
            54,
            "frac_recovered_groups",
            color=STYLES[DEFAULT]["color"],
            ha="center",
            rotation=-58 if p < 0.5 else 58,
        )
    lost.set_title("Steps in which a prompt teaches nothing", **TITLE)
    lost.set_ylabel("%")
    lost.set_ylim(0, 100)
    cost.set_title("Rollouts drawn for it", **TITLE)
    cost.set_ylabel("Rollouts per prompt")
    cost.set_ylim(0, 34)
    cost.set_xlabel("Pass rate of the prompt")
    for axis in (lost, cost):
        axis.set_xscale("logit")
        axis.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["1%", "10%", "50%", "90%", "99%"])
        axis.minorticks_off()


def main() -> None:
    equal, *_, single = stored()
    language = stored_language()
    figure(language).savefig(FIGURES / "overview.png", dpi=200)
    fill("overview", caption(is_zero_variance(language, MAIN_SET)), README)
    mixture = language_table(language, MAIN_SET, brief=True)
    fill("language-mixture", f"{mixture}\n\n{hard_families(language)}", README)
    fill("verdict", verdict(equal, single), README)


if __name__ == "__main__":
    main()
