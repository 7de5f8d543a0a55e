"""
The README's first picture and every number on its first screen, from stored results and closed forms only.

`python -m benchmarks.analyses.overview` draws `docs/figures/overview.png` and fills the places marked in `README.md`.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ada_trl.core import ExitCondition
from ada_trl.planning.outcomes import Outcome, sequential_outcome, single_round_outcome

from ..common import COLORS, FIGURES, README, RESULTS, fill
from ..learning.figures import curves
from ..learning.prompt_sets import PROMPT_SETS
from ..learning.report import BASELINE, FAMILIES, FILES, show
from ..learning.run import PROMPTS_PER_STEP
from ..learning.statistics import accuracy_at, by_seed, common_budget, interval, paired_difference


SHOWN = "Seq-balance"  # the default mode: what the picture and the verdict are about
CHEAP = "GRPO n=4"
OUTCOMES = {  # the settings of the learning benchmark and the paper
    CHEAP: lambda p: single_round_outcome(p, 4),
    "GRPO n=16": lambda p: single_round_outcome(p, 16),
    SHOWN: lambda p: sequential_outcome(p, ExitCondition(2, 2), samples_per_round=8, max_rounds=4),
}
PASS_RATES = 1 / (1 + np.exp(-np.linspace(-5, 5, 201)))
CAPTION_RATE = 0.1
LINES = {  # method: how it is drawn; the order of the legend
    "GRPO n=4": {"marker": "v"},
    "GRPO n=8": {"marker": "^"},
    "GRPO n=16": {"marker": "s"},
    "DAPO n=4": {"marker": "X", "linestyle": "--"},
    "Seq-pos": {"marker": "D"},
    "Seq-balance": {"marker": "o", "linewidth": 2.4},
}
TITLE = {"fontweight": "bold", "fontsize": 10.5, "loc": "left"}
PIXELS = 830  # width of a picture in a README on GitHub


def outcome(method: str, pass_rate: float) -> Outcome:
    """What a prompt of one pass rate loses and costs."""
    return Outcome(*(float(value[0]) for value in OUTCOMES[method]([pass_rate])))


def caption() -> str:
    """The left half of the picture in words."""
    grpo, ours = outcome(CHEAP, CAPTION_RATE), outcome(SHOWN, CAPTION_RATE)
    return (
        f"*Left, exact: a prompt that is solved once in {1 / CAPTION_RATE:.0f} tries gives GRPO with "
        f"{grpo.rollouts:.0f} rollouts (n={grpo.rollouts:.0f}) no gradient in {grpo.zero_signal:.0%} of the steps. "
        f"{SHOWN} gets that down to {ours.zero_signal:.0%}, for {ours.rollouts:.0f} rollouts. Right, measured: a small "
        "model learns integer addition; means and 95% intervals over five seeds.*"
    )


def figure(evaluations: pd.DataFrame) -> Figure:
    """Left: what is lost and recovered, and for how many rollouts. Right: accuracy against generated tokens."""
    drawn = Figure(figsize=(PIXELS / 100, 5.9), layout="constrained")
    axes = drawn.subplots(2, 2, width_ratios=[1, 1.08])
    draw_signal(axes[0][0], axes[1][0])
    for axis, prompt_set in zip(axes[:, 1], PROMPT_SETS, strict=True):
        draw_accuracy(axis, evaluations, prompt_set)
    handles, labels = axes[0][1].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(LINES), frameon=False, columnspacing=1.2)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def draw_signal(lost, cost) -> None:
    found = {method: OUTCOMES[method](PASS_RATES) for method in OUTCOMES}
    for method, values in found.items():
        style = {"color": COLORS[method], "linewidth": LINES[method].get("linewidth", 1.6)}
        lost.plot(PASS_RATES, 100 * values.zero_signal, **style)
        cost.plot(PASS_RATES, values.rollouts, **style)
    both = (100 * found[method].zero_signal for method in (SHOWN, CHEAP))
    lost.fill_between(PASS_RATES, *both, color=COLORS[SHOWN], alpha=0.13, linewidth=0)
    for p in (0.055, 0.945):
        lost.text(p, 54, "recovered", color=COLORS[SHOWN], ha="center", rotation=-58 if p < 0.5 else 58)
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


def draw_accuracy(axis, evaluations: pd.DataFrame, prompt_set: str) -> None:
    for method, style in LINES.items():
        means, half = curves(evaluations, prompt_set, method, "accuracy")
        x, y = means["generated_tokens"], 100 * means["accuracy"]
        axis.plot(x, y, color=COLORS[method], label=method, markevery=[-1], markersize=6, **style)
        axis.fill_between(x, y - 100 * half, y + 100 * half, color=COLORS[method], alpha=0.12, linewidth=0)
    axis.set_title(f"Held-out accuracy, {prompt_set} set", **TITLE)
    axis.set_ylabel("%")
    axis.set_ylim(bottom=100 * evaluations[evaluations["prompt_set"] == prompt_set]["accuracy"].min())
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if prompt_set == list(PROMPT_SETS)[-1]:
        axis.set_xlabel("Generated tokens")


def verdict(steps: pd.DataFrame, evaluations: pd.DataFrame) -> str:
    """What the learning benchmark says about the default mode, and its price."""
    of_method = steps[steps["method"] == SHOWN]
    drawn = of_method["rollouts"].mean() / PROMPTS_PER_STEP
    trained = of_method["trained_tokens"].sum() / of_method["generated_tokens"].sum()
    tokens = {m: steps[steps["method"] == m]["generated_tokens"].sum() for m in (SHOWN, BASELINE)}
    hard = {m: _final(evaluations, "hard", m, "pass@8") for m in (SHOWN, BASELINE)}

    def per_step(method: str, other: str) -> str:
        return _against(evaluations, method, other, "step", _last_step)

    lines = {
        "The price": f"Seq-balance draws {drawn:.0f} rollouts per prompt and trains on 4 of them, {trained:.0%} of the "
        f"tokens. It generates {tokens[SHOWN] / tokens[BASELINE]:.1f} times the tokens of {BASELINE}",
        "At equal steps": per_step(SHOWN, BASELINE),
        "At equal generated tokens": _against(evaluations, SHOWN, CHEAP, "generated_tokens", _token_budget),
        "Within 8 tries": f"it solves {hard[SHOWN]:.0%} of the hard problems, {BASELINE} {hard[BASELINE]:.0%}",
        'With `prompt_weighting="none"`, at equal steps': per_step("Seq-balance, weight 1", BASELINE),
        "Est at the cost of GRPO n=8, at equal steps": per_step("Est-EMA n=8", BASELINE),
    }
    return "\n".join(f"- **{name}**: {text}." for name, text in lines.items())


def _against(evaluations: pd.DataFrame, method: str, other: str, axis: str, budget: Callable) -> str:
    """Paired difference of a method from another on each set, in a word and in numbers."""
    said = []
    for name in PROMPT_SETS:
        at = budget(evaluations, name)
        mean, half = paired_difference(*(_accuracies(evaluations, m, name, axis, at) for m in (method, other)))
        word = "level with" if abs(mean) <= half else "ahead of" if mean > 0 else "behind"
        said.append(f"{word} {'it' if said else other} on the {name} set ({show((mean, half), sign=True)})")
    return ", ".join(said)


def _accuracies(evaluations: pd.DataFrame, method: str, prompt_set: str, axis: str, budget: float) -> dict[int, float]:
    return {seed: accuracy_at(run, axis, budget) for seed, run in by_seed(evaluations, prompt_set, method).items()}


def _final(evaluations: pd.DataFrame, prompt_set: str, method: str, column: str) -> float:
    return interval([run[column].iloc[-1] for run in by_seed(evaluations, prompt_set, method).values()])[0]


def _last_step(evaluations: pd.DataFrame, prompt_set: str) -> float:
    return float(evaluations[evaluations["prompt_set"] == prompt_set]["step"].max())


def _token_budget(evaluations: pd.DataFrame, prompt_set: str) -> float:
    """As in the report: what the cheapest run of the methods with 4 rollouts per prompt spends in all its steps."""
    return common_budget(evaluations, prompt_set, "generated_tokens", FAMILIES[4])


def main() -> None:
    steps, evaluations = (pd.read_parquet(RESULTS / name) for name in FILES)
    figure(evaluations).savefig(FIGURES / "overview.png", dpi=200)
    fill("overview", caption(), README)
    fill("verdict", verdict(steps, evaluations), README)


if __name__ == "__main__":
    main()
