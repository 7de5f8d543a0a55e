"""
Which sampling settings fit your prompts and your budget?

`ada-trl plan --pass_rates FILE` reads how hard your prompts are for your model, computes for every setting what share of
prompts would have a gradient, what that costs and how noisy the update is, and recommends the one with the least noise.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .cli import start
from .cli.checks import check_installed
from .cli.errors import UserError
from .cli.parser import CommandParser
from .core import ExitCondition, allocate, expected_rounds
from .planning.noise import Moments, noise, pool_moments, posterior_moments, uniform_moments
from .planning.observed import Prompts, read_prompts
from .planning.outcomes import Outcome, pool_distribution, refill_outcome, sequential_outcome, single_round_outcome
from .utils.tables import markdown_table


REFILL_ROUNDS = 10  # after which DAPO gives a place in the batch up
WEIGHTING = "inverse_sqrt"  # prompt_weighting's default in the paper's modes
ALWAYS = ("Posterior", "Batch", "Rounds")  # methods that have a gradient from every prompt
TIE = 1.1  # noise is computed under an assumption about the policy; such a difference is not to be relied on
LARGEST_STRENGTH = 32.0  # as the largest candidate of a run's priors


@dataclass(kw_only=True)
class PlanArguments:
    """
    Arguments of `ada-trl plan`.

    Args:
        pass_rates (`str`):
            What [`read_prompts`] reads.
        column (`str`, *optional*, defaults to `"pass_rate"`):
            Column of the pass rates in a file without counts.
        draws (`int`, *optional*):
            Draws behind each pass rate, where the file does not say. If `None`, pass rates are exact then.
        budget (`float`, *optional*, defaults to `16`):
            Mean rollouts per prompt.
        num_generations (`int`, *optional*, defaults to `4`):
            n, rollouts per prompt that are trained on.
        max_samples (`int`, *optional*, defaults to `32`):
            Most rollouts of a prompt.
        write (`list[str]`, *optional*):
            Files to write; `.md`, `.json` (all settings) or `.png`.
    """

    pass_rates: str = field(
        metadata={
            "help": "A run or checkpoint with a difficulty record, a folder that `ada-trl data` wrote, or a Parquet, CSV "
            "or JSON Lines file."
        }
    )
    column: str = field(default="pass_rate", metadata={"help": "Column of pass rates in a file without counts."})
    draws: int | None = field(
        default=None,
        metadata={"help": "Draws behind each pass rate, where the file does not say; without, pass rates are exact."},
    )
    budget: float = field(default=16.0, metadata={"help": "Mean rollouts per prompt."})
    num_generations: int = field(default=4, metadata={"help": "n, rollouts per prompt that are trained on."})
    max_samples: int = field(default=32, metadata={"help": "Most rollouts of a prompt."})
    write: list[str] = field(
        default_factory=list, metadata={"help": "Files to write: .md, .json (all settings) or .png."}
    )

    def __post_init__(self):
        for name in self.write:
            if Path(name).suffix not in (".md", ".json", ".png"):
                raise UserError(f"--write {name}: expected a name that ends in .md, .json or .png.")
            if Path(name).suffix == ".png":
                check_installed("matplotlib", "plots", f"draws {name}")
        if not 2 <= self.num_generations <= self.max_samples:
            raise UserError(
                f"--num_generations ({self.num_generations}) must be between 2 and --max_samples ({self.max_samples})."
            )
        if not (math.isfinite(self.budget) and self.budget > 0):
            raise UserError(f"--budget ({self.budget}) must be a positive number of rollouts per prompt.")
        if self.draws is not None and self.draws < 1:
            raise UserError(f"--draws ({self.draws}) must be at least 1.")


@dataclass
class Setting:
    """
    One way to sample, and what to expect of it on average over the prompts.

    Args:
        method (`str`):
            Name.
        fields (`dict[str, Any]`):
            The fields of `AdaGRPOConfig`.
        with_gradient (`float`):
            Share of the prompts in the update that have a gradient.
        recovered (`float`):
            Share of the prompts that GRPO with `num_generations` would lose and that have a gradient here, net.
        rollouts (`float`):
            Drawn per prompt in the update.
        per_gradient (`float`):
            Drawn per prompt with a gradient.
        rounds (`float`):
            Mean rounds per prompt.
        trained (`float`):
            Rollouts per prompt that the update trains on.
        noise (`float`):
            Rollouts needed for a given ratio of signal to noise ([`~planning.noise.noise`]), those of GRPO with
            `num_generations` being 1.
    """

    method: str
    fields: dict[str, Any]
    with_gradient: float
    recovered: float
    rollouts: float
    per_gradient: float
    rounds: float
    trained: float
    noise: float


def settings(prompts: Prompts, *, num_generations: int, budget: float, max_samples: int) -> list[Setting]:
    """
    All settings that are compared: GRPO of several sizes, DAPO, Seq-pos and Seq-balance with
    several M, N and quotas, Est with several means, the mean of all other rollouts, and the posterior baseline, also with rounds
    across steps, none with more than `max_samples` rollouts for a prompt.
    """
    n = num_generations
    rates, weights = prompts.distribution
    sizes = sorted({n, 2 * n, 4 * n, 8 * n, max(n, int(budget))} & set(range(max_samples + 1)))
    lost = float(weights @ single_round_outcome(rates, n).zero_signal)
    reference = uniform_moments(rates, n)
    unit = noise(reference, np.full(len(rates), n), weights)
    found = []

    def add(method, fields, outcome: Outcome, weights: np.ndarray, trained: float, moments: Moments) -> None:
        zero, rollouts, rounds = (float(weights @ value) for value in outcome)
        recovered = 0.0 if method == "DAPO" or not lost else 1 - zero / lost
        needed = noise(moments, outcome.rollouts, weights) / unit
        per_gradient = rollouts / max(1 - zero, 1e-12)
        found.append(Setting(method, fields, 1 - zero, recovered, rollouts, per_gradient, rounds, trained, needed))

    for size in sizes:
        fields = {"adaptive_sampling": "uniform", "num_generations": size}
        add("GRPO", fields, single_round_outcome(rates, size), weights, size, uniform_moments(rates, size))
    refill = refill_outcome(rates, weights, n, max_rounds=REFILL_ROUNDS)
    groups = refill.rollouts / n  # drawn for a place in the batch; those without a gradient add nothing
    fields = {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": n}
    fields |= {"unresolved": "replace", "max_replacements": REFILL_ROUNDS - 1}
    add("DAPO", fields, refill, np.ones(1), n, Moments(*(groups * (weights @ values) for values in reference)))
    for method, quotas in (("Seq-pos", (1, 0)), ("Seq-balance", (1, 1)), ("Seq-balance", (n // 2, n - n // 2))):
        for m in (n, 2 * n, 4 * n):
            for rounds in (r for r in (2, 4, 8) if r * m <= max_samples):
                sampling = {"samples_per_round": m, "max_rounds": rounds}
                outcome = sequential_outcome(rates, ExitCondition(*quotas), **sampling)
                pools = pool_distribution(rates, ExitCondition(*quotas), **sampling)
                fields = {"adaptive_sampling": method.lower(), "num_generations": n, **sampling}
                fields |= {"min_positives": quotas[0]} | ({"min_negatives": quotas[1]} if quotas[1] else {})
                add(method, fields, outcome, weights, n, pool_moments(rates, pools, n, weighting=WEIGHTING))
    for mean in sizes:
        fields = {"adaptive_sampling": "est-ema", "num_generations": mean}
        fields |= {"min_samples": min(2, mean), "max_samples": max_samples}
        outcome, shares, moments = _estimated_outcome(prompts, mean, min(2, mean), max_samples)
        add("Est", fields, outcome, shares, mean, moments)
    for size in sorted({1, 2, n}):
        number = {"num_generations": size} if size > 1 else {}
        outcome = Outcome(np.zeros(1), np.full(1, float(size)), np.ones(1))
        moments = _against_what_is_known(prompts, size)
        add("Posterior", {"baseline": "posterior"} | number, outcome, np.ones(1), size, moments)
    outcome = Outcome(np.zeros(1), np.ones(1), np.ones(1))
    moments = Moments(*(np.array([weights @ v]) for v in posterior_moments(rates, 1, float(weights @ rates), np.inf)))
    add("Batch", {"baseline": "batch"}, outcome, np.ones(1), 1, moments)
    for most in (r for r in (4, 8, 16) if r <= max_samples):
        fields = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "num_generations": 1, "max_rounds": most}
        tries = np.array([expected_rounds(p, 1, most) for p in rates])
        outcome = Outcome(np.zeros(1), *(np.array([weights @ tries]) for _ in range(2)))
        mean = float(weights @ tries)
        add("Rounds", fields, outcome, np.ones(1), mean, _against_what_is_known(prompts, 1, tries))
    return found


def _estimated_outcome(prompts: Prompts, mean: int, low: int, high: int) -> tuple[Outcome, np.ndarray, Moments]:
    """Est over all prompts at once, each with the budget that its own estimate earns; all `(X,)`, weights between."""
    rates = prompts.distribution.pass_rates
    estimates = np.clip(prompts.posterior @ rates, 0, 1)
    budgets = np.array(allocate(estimates, mean * len(estimates), min_samples=low, max_samples=high))
    zero, signal, power = np.empty((3, len(budgets)))
    for size in np.unique(budgets):
        these = budgets == size
        moments = uniform_moments(rates, int(size), weighting=WEIGHTING)
        by_rate = (single_round_outcome(rates, size).zero_signal, *moments)
        zero[these], signal[these], power[these] = (prompts.posterior[these] @ values for values in by_rate)
    shares = np.full(len(budgets), 1 / len(budgets))
    return Outcome(zero, budgets, np.ones(len(budgets))), shares, Moments(signal, power)


def _against_what_is_known(prompts: Prompts, size: int, tries: np.ndarray | float = 1.0) -> Moments:
    """
    The posterior baseline of a run that knows of each prompt what the file says: the mean m of its pass rate and, from the
    variance v, what that is worth in rollouts, m (1 − m) / v − 1. Mean over the prompts, `(1,)`, each asked `tries` times,
    by pass rate.
    """
    rates = prompts.distribution.pass_rates
    mean = np.clip(prompts.posterior @ rates, 0, 1)
    variance = np.maximum(prompts.posterior @ rates**2 - mean**2, 1e-12)
    strength = np.clip(mean * (1 - mean) / variance - 1, 0, LARGEST_STRENGTH)
    moments = posterior_moments(rates, size, mean[:, None], strength[:, None])  # (X, G)
    return Moments(*((prompts.posterior * values * tries).sum(axis=1).mean(keepdims=True) for values in moments))


def recommend(found: list[Setting], budget: float) -> Setting:
    """
    The setting with the least noise for its rollouts within the budget; of those within `TIE` of it, the one of fewest rollouts
    per prompt, which leaves most prompts to a step.

    Raises:
        `ValueError`: if nothing fits.
    """
    affordable = _affordable(found, budget)
    if not affordable:
        cheapest = min(s.rollouts for s in found)
        raise ValueError(
            f"A budget of {budget:g} rollouts per prompt is below the cheapest setting's {cheapest:g}. Raise --budget."
        )
    least = min(s.noise for s in affordable)
    return min((s for s in affordable if s.noise <= TIE * least), key=lambda s: (s.rollouts, s.noise))


def most_gradients(found: list[Setting], budget: float) -> list[Setting]:
    """
    The setting of each method with the most prompts that have a gradient within the budget, of equals the cheapest; where
    every prompt has one, as [`recommend`] chooses. In the order in which the methods come.
    """
    best = []
    for method in dict.fromkeys(s.method for s in found):
        own = _affordable([s for s in found if s.method == method], budget)
        if own and method in ALWAYS:
            best.append(recommend(own, budget))
        elif own:
            best.append(min(own, key=lambda s: (-round(s.with_gradient, 6), s.rollouts)))
    return best


def _affordable(found: list[Setting], budget: float) -> list[Setting]:
    return [s for s in found if s.rollouts <= budget + 1e-9]


def describe(setting: Setting) -> str:
    """The setting's parameters in a few letters."""
    f = setting.fields
    if setting.method in ("GRPO", "Posterior"):
        return f"n={f.get('num_generations', 1)}"
    if setting.method == "Batch":
        return "n=1"
    if setting.method == "DAPO":
        return f"n={setting.trained:g}"
    if setting.method == "Rounds":
        return f"n=1, at most {f['max_rounds']}"
    if setting.method == "Est":
        return f"mean {f['num_generations']}, {f['min_samples']} to {f['max_samples']}"
    return f"M={f['samples_per_round']}, N={f['max_rounds']}, K={f['min_positives']}+{f.get('min_negatives', 0)}"


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


def figure(prompts: Prompts, found: list[Setting], budget: float):
    """Pass rates as observed and as fitted; what all settings cost, recover and leave of noise. A `matplotlib.figure.Figure`."""
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


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), print the plan, write what was asked for."""
    parser = CommandParser(
        PlanArguments,
        command="plan",
        description="Which sampling settings fit your prompts and your budget? Reads how hard the prompts are for the "
        "model, "
        "finds for every setting the share of prompts with a gradient, its cost and its noise, and recommends one.",
        example="--pass_rates outputs/run --budget 16 --write plan.md plan.png",
    )
    (options,) = parser.parse_args_and_config(args)
    prompts = read_prompts(options.pass_rates, column=options.column, draws=options.draws)
    found = settings(
        prompts, num_generations=options.num_generations, budget=options.budget, max_samples=options.max_samples
    )
    print(report(prompts, found, options.budget))
    for name in options.write:
        write(Path(name), prompts, found, options.budget)


if __name__ == "__main__":
    start("plan")
