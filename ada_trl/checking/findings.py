"""What a handful of rollouts says about a run: lines of the report of `ada-trl check`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.metrics import threshold_outside_reward_range
from ..planning.difficulty import PassRateDistribution, fit_pass_rate_distribution
from ..planning.outcomes import sequential_outcome, single_round_outcome


if TYPE_CHECKING:  # it imports torch
    from ..trainer.ada_grpo_config import AdaGRPOConfig

MANY_TRUNCATED = 0.1


class CheckResult(NamedTuple):
    """
    A line of the report: what was checked, what was found, what to do about it, if anything, and whether nothing could be
    learnt that way.
    """

    checked: str
    found: str
    advice: str = ""
    is_fatal: bool = False


class Sample(NamedTuple):
    """
    What the prompts of all processes drew.

    Args:
        rewards (`np.ndarray`):
            Of each reward function, `(prompts, draws, num_reward_funcs)`.
        signals (`np.ndarray`):
            What decides between positive and negative, `(prompts, draws)`.
        lengths, truncated (`np.ndarray`):
            Generated tokens, and whether the cap ended them, `(prompts * draws,)`.
        seconds, reward_seconds (`float`):
            Of generation and scoring together, and of scoring, on the slowest process.
    """

    rewards: np.ndarray
    signals: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    seconds: float
    reward_seconds: float


def generation(args: "AdaGRPOConfig", sample: Sample) -> Iterator[CheckResult]:
    per_token = sample.seconds / max(sample.lengths.sum(), 1)
    yield CheckResult(
        "generation",
        f"{sample.lengths.size} completions of {sample.lengths.mean():.0f} tokens (longest {sample.lengths.max()}) in "
        f"{sample.seconds:.1f} s, {1 / max(per_token, 1e-9):.0f} tokens/s; reward functions {sample.reward_seconds:.1f} s",
        "Reward functions take most of the time."
        if sample.reward_seconds > sample.seconds / 2 and sample.seconds > 1
        else "",
    )
    share = sample.truncated.mean()
    advice = f"Raise max_completion_length ({args.max_completion_length}): what has no end has no answer."
    yield CheckResult("cut off", f"{share:.0%} of the completions", advice if share > MANY_TRUNCATED else "")


def rewards(args: "AdaGRPOConfig", sample: Sample, names: list[str]) -> Iterator[CheckResult]:
    for name, values in zip(names, np.moveaxis(sample.rewards, -1, 0), strict=True):
        scored = values[~np.isnan(values)]
        if not scored.size:
            yield CheckResult(f"reward {name}", "no completion scored", "It returns None or NaN; look at its columns.")
            continue
        advice = "It is the same for all: nothing to learn from it here." if np.ptp(scored) == 0 else ""
        missing = f"; {1 - scored.size / values.size:.0%} not scored" if scored.size < values.size else ""
        yield CheckResult(
            f"reward {name}", f"{scored.min():.3g} to {scored.max():.3g}, mean {scored.mean():.3g}{missing}", advice
        )
    if len(names) > 1 and args.success_reward is None and not args.is_vanilla_grpo:
        yield CheckResult(
            "signal", f"the weighted total of {' and '.join(names)}", "Name the one that decides: success_reward."
        )


def counts(args: "AdaGRPOConfig", sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Of each prompt, positive and scored rollouts, `(prompts,)` each."""
    scored = ~np.isnan(sample.signals)
    return (np.where(scored, sample.signals, -np.inf) > args.positive_threshold).sum(axis=1), scored.sum(axis=1)


def difficulty(args: "AdaGRPOConfig", sample: Sample) -> Iterator[CheckResult]:
    positives, draws = counts(args, sample)
    if not draws.any():
        yield CheckResult("pass rate", "unknown, nothing was scored", "Correct the reward functions.", True)
        return
    signals = sample.signals[~np.isnan(sample.signals)]
    low, high, mean = signals.min(), signals.max(), signals.mean()
    crossing, advice = low <= args.positive_threshold < high, ""
    if not crossing and low < high:
        advice = (
            f"The signal ranges from {low:.3g} to {high:.3g} and never crosses positive_threshold "
            f"({args.positive_threshold:g}): set it between, or see whether the prompts are of the right difficulty."
        )
    elif threshold_outside_reward_range(low, high, mean, positives.sum() / draws.sum()):
        advice = (
            f"The signal ranges from {low:.3g} to {high:.3g} with a mean of {mean:.3g}, and positive_threshold "
            f"({args.positive_threshold:g}) hardly tells any of it apart: set it to what counts as a success."
        )
    elif not crossing:
        advice = f"All of them {'pass: harder' if positives.any() else 'fail: easier'} prompts, or other rewards."
    per_prompt = " ".join(f"{k}/{n}" for k, n in zip(positives[:16], draws[:16], strict=True))
    found = f"{positives.sum() / draws.sum():.2f} of {draws.sum()} rollouts; by prompt {per_prompt}"
    yield CheckResult("pass rate", found, advice)


def expected(args: "AdaGRPOConfig", distribution: PassRateDistribution) -> tuple[float, float]:
    """Share of the places in a batch without a gradient and rollouts per place, of the run's own settings."""
    rates, weights = distribution
    if args.selects_groups:
        outcome = sequential_outcome(
            rates,
            args.exit_condition,
            samples_per_round=args.samples_per_round,
            max_rounds=args.max_rounds,
        )
    else:  # Est hands out as many on average, and rounds across steps share what a batch holds
        outcome = single_round_outcome(rates, args.num_generations)
    lost = 0.0 if args.baseline != "pool" else float(weights @ outcome.zero_signal)
    rollouts = float(weights @ outcome.rollouts)
    if args.zero_variance_groups == "resample":
        rollouts *= sum(lost**again for again in range(args.max_rounds))
        lost **= args.max_rounds
    return lost, rollouts


def forecast(args: "AdaGRPOConfig", sample: Sample, update_seconds: float) -> CheckResult:
    """Of one generation and the update on it. The sample is smaller than a step, so generation is at most that slow."""
    positives, draws = counts(args, sample)
    rollouts = float(args.num_generations)
    if draws.any():
        _, rollouts = expected(args, fit_pass_rate_distribution(positives, draws))
    prompts = args.prompts_per_step
    drawn = prompts * rollouts
    return CheckResult(
        "forecast",
        f"a step of {prompts} prompts: {drawn:.0f} rollouts, {drawn * sample.lengths.mean():.0f} tokens, at most "
        f"{sample.seconds * drawn / sample.lengths.size:.1f} s of sampling and {update_seconds:.1f} s of update",
    )
