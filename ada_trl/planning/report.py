"""A plan as Markdown, as a figure, as a file."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..utils.tables import markdown_table
from .observed import Prompts
from .settings import TIE, Setting, describe, most_gradients, recommend


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(prompts: Prompts, found: list[Setting], budget: float) -> str:
    """The recommendation as Markdown; where no rollout has told prompts apart, one sentence about what to do."""
    best = recommend(found, budget)
    rates, weights = prompts.distribution
    for rate, word, remedy in ((0, "never", "easier"), (1, "always", "harder")):
        if (prompts.observed == rate).all():
            return (
                f"All of the {len(prompts.observed)} prompts {word} passed. There is nothing to learn from these at this budget: "
                f"take {remedy} prompts, or ask for more than right and wrong."
            )
    shown = [found[0], *(setting for setting in most_gradients(found, budget) if setting is not found[0])]
    shown += [best] * (best not in shown)  # GRPO of another size than the one with the most gradients, for instance
    columns = {
        "Method": lambda s: s.method + " **(recommended)**" * (s is best),
        "Settings": describe,
        "With gradient": lambda s: f"{s.with_gradient:.1%}",
        "Recovered": lambda s: "–" if s.method == "DAPO" else f"{s.recovered:.1%}",
        "Rollouts": lambda s: f"{s.rollouts:.1f}",
        "per gradient": lambda s: f"{s.per_gradient:.1f}" if s.per_gradient < 1000 else "–",
        "Noise": lambda s: f"{s.noise:.2f}",
        "Rounds": lambda s: f"{s.rounds:.2f}",
        "Trained": lambda s: f"{s.trained:.3g}",
    }
    rows = [[show(setting) for show in columns.values()] for setting in shown]
    paper = next((s for s in shown if s.method == "Seq-balance"), None)
    return (
        f"{len(prompts.observed)} prompts, mean pass rate {weights @ rates:.3f}; "
        f"{np.mean(prompts.observed == 0):.1%} never passed, {np.mean(prompts.observed == 1):.1%} always did. "
        f"Expected with infinitely many draws: {weights[rates < 0.01].sum():.1%} below 0.01, "
        f"{weights[rates > 0.99].sum():.1%} above 0.99.\n\n"
        f"Best setting of each method with at most {budget:g} rollouts per prompt:\n\n"
        + markdown_table(list(columns), rows)
        + "\n\n*With gradient*: share of the prompts in the update. *Recovered*: of the prompts that GRPO with "
        f"{describe(found[0])} loses. *Rollouts*: drawn per prompt in the update; *per gradient*: per prompt that has one. "
        f"*Noise*: rollouts, of all prompts, for an update as clear as that of GRPO with {describe(found[0])}, which is 1. "
        "DAPO replaces prompts instead of recovering them. *Rounds* asks a prompt again, in the next step, until it passes. Est assumes that its estimates are as good as this file, and "
        "Posterior and Rounds that a run knows of each prompt what this file says."
        f"\n\nRecommended, the least noise for a rollout (of those within {TIE - 1:.0%}, the fewest rollouts per prompt):"
        f"\n\n```yaml\n{_as_yaml(best)}\n```"
        + (
            f"\n\nIn the paper's mode, the most prompts with a gradient:\n\n```yaml\n{_as_yaml(paper)}\n```"
            if paper
            else ""
        )
    )


def _as_yaml(setting: Setting) -> str:
    return "\n".join(f"{name}: {value}" for name, value in setting.fields.items())


def figure(prompts: Prompts, found: list[Setting], budget: float) -> "Figure":
    """Pass rates as observed and as fitted; what all settings cost, recover and leave of noise."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    drawn = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    edges = np.linspace(0, 1, 10)
    left.hist(prompts.observed, edges, weights=np.full(len(prompts.observed), 1 / len(prompts.observed)), alpha=0.5)
    rates, weights = prompts.distribution
    left.hist(rates, edges, weights=weights, histtype="step", linewidth=1.8, color="black")
    left.legend(["fitted", "observed"], frameon=False)
    left.set(xlabel="Pass rate", ylabel="Share of the prompts")
    best = recommend(found, budget)
    for axis, name in ((middle, "with_gradient"), (right, "noise")):
        for method in dict.fromkeys(s.method for s in found):
            label = "DAPO (other prompts)" if method == "DAPO" else method
            points = sorted((s.rollouts, getattr(s, name)) for s in found if s.method == method)
            line = "o-" if method in ("GRPO", "Est", "Posterior") else "s" if method == "Batch" else "o"
            axis.plot(*zip(*points, strict=True), line, markersize=4, label=label)
        axis.plot(best.rollouts, getattr(best, name), "o", markersize=11, markerfacecolor="none", color="black")
        axis.axvline(budget, color="grey", linestyle=":")
        axis.set_xlabel("Rollouts drawn per prompt")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(ScalarFormatter())
    middle.set_ylabel("Prompts with a gradient")
    right.set(ylabel=f"Noise: rollouts for GRPO {describe(found[0])}'s clarity")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    return drawn


def write(path: Path, prompts: Prompts, found: list[Setting], budget: float) -> None:
    """Write the plan in the format that the suffix names: .md, .json (all settings) or .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        path.write_text(report(prompts, found, budget) + "\n")
    elif path.suffix == ".json":
        plan = {"budget": budget, "recommended": recommend(found, budget).fields}
        plan["settings"] = [dataclasses.asdict(setting) for setting in found]
        path.write_text(json.dumps(plan, indent=2) + "\n")
    else:
        figure(prompts, found, budget).savefig(path, dpi=110)
