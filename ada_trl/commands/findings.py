"""Findings of `ada-trl check`: conclusions from a few rollouts of a few prompts."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core import needs_more
from ..core.metrics import threshold_outside_reward_range


if TYPE_CHECKING:  # it imports torch
    from ..trainer.ada_grpo_config import AdaGRPOConfig

MANY_TRUNCATED = 0.1
SIMULATED_GROUPS = 4000  # at least; enough for the precision of the printed percentage


class CheckResult(NamedTuple):
    """Line of the report. `is_fatal` means that a run could not learn anything."""

    checked: str
    found: str
    advice: str = ""
    is_fatal: bool = False


class Sample(NamedTuple):
    """
    Rollouts of the prompts of all processes.

    Args:
        rewards (`np.ndarray`):
            By reward function, `(prompts, rollouts, num_reward_funcs)`; NaN where a function has not scored.
        success_rewards (`np.ndarray`):
            Rewards that are compared with `positive_threshold`, `(prompts, rollouts)`.
        mean_length, max_length (`float`):
            Generated tokens of a completion.
        truncated (`float`):
            Fraction of completions that reached the maximum length.
        seconds, reward_seconds (`float`):
            Time of generation and scoring together, and of scoring alone, on the slowest process.
    """

    rewards: np.ndarray
    success_rewards: np.ndarray
    mean_length: float
    max_length: float
    truncated: float
    seconds: float
    reward_seconds: float


def generation(args: "AdaGRPOConfig", sample: Sample) -> Iterator[CheckResult]:
    """Describe speed and lengths."""
    slow_rewards = sample.seconds > 1 and sample.reward_seconds > sample.seconds / 2
    speed = sample.mean_length * sample.success_rewards.size / max(sample.seconds, 1e-9)
    yield CheckResult(
        "generation",
        f"{sample.success_rewards.size} completions of {sample.mean_length:.0f} tokens (longest {sample.max_length:.0f}) in "
        f"{sample.seconds:.1f} s, {speed:.0f} tokens/s; reward functions {sample.reward_seconds:.1f} s",
        "Reward functions take most of the time." if slow_rewards else "",
    )
    advice = (
        f"Raise max_completion_length ({args.max_completion_length}): the answer of a truncated completion is cut off."
    )
    found = f"{sample.truncated:.0%} of the completions"
    yield CheckResult("truncated", found, advice if sample.truncated > MANY_TRUNCATED else "")


def rewards(sample: Sample, names: list[str]) -> Iterator[CheckResult]:
    """Describe the range of each reward function."""
    for name, values in zip(names, np.moveaxis(sample.rewards, -1, 0), strict=True):
        scored = values[~np.isnan(values)]
        if not scored.size:
            yield CheckResult(f"reward {name}", "no completion scored", "It returns None or NaN; check its columns.")
            continue
        advice = (
            "All completions received the same reward, so there is no learning signal." if np.ptp(scored) == 0 else ""
        )
        missing = f"; {1 - scored.size / values.size:.0%} not scored" if scored.size < values.size else ""
        found = f"{scored.min():.3g} to {scored.max():.3g}, mean {scored.mean():.3g}{missing}"
        yield CheckResult(f"reward {name}", found, advice)


def counts(args: "AdaGRPOConfig", sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Count positive and scored rollouts of each prompt, `(prompts,)` each."""
    scored = ~np.isnan(sample.success_rewards)
    positive = np.where(scored, sample.success_rewards, -np.inf) > args.float32_threshold
    return positive.sum(axis=1), scored.sum(axis=1)


def difficulty(args: "AdaGRPOConfig", sample: Sample) -> CheckResult:
    """Describe the pass rates, and whether the threshold separates the rewards."""
    positives, scored = counts(args, sample)
    if not scored.any():
        return CheckResult("pass rate", "unknown, nothing was scored", "Correct the reward functions.", True)
    values = sample.success_rewards[~np.isnan(sample.success_rewards)]
    low, high, mean = values.min(), values.max(), values.mean()
    pass_rate = positives.sum() / scored.sum()
    advice = ""
    if low == high:
        advice = (
            f"All rollouts {'pass: use harder' if positives.any() else 'fail: use easier'} prompts, or other rewards."
        )
    elif not low <= args.float32_threshold < high or threshold_outside_reward_range(low, high, mean, pass_rate):
        advice = (
            f"Rewards range from {low:.3g} to {high:.3g} with a mean of {mean:.3g}, and positive_threshold "
            f"({args.positive_threshold:g}) separates almost none of them: set it to the reward of a success, or check the "
            "difficulty of the prompts."
        )
    per_prompt = " ".join(f"{k}/{n}" for k, n in zip(positives[:16], scored[:16], strict=True))
    return CheckResult("pass rate", f"{pass_rate:.2f} of {scored.sum()} rollouts; by prompt {per_prompt}", advice)


def expected_sampling(args: "AdaGRPOConfig", positives: np.ndarray, scored: np.ndarray) -> tuple[float, float]:
    """
    Simulate the sampling of prompts with these counts, whose pass rates are drawn from their posterior under Jeffreys'
    prior.

    Returns:
        `tuple[float, float]`: the fraction of groups that have a gradient, and rollouts per group.
    """
    rng = np.random.default_rng(0)
    repeats = math.ceil(SIMULATED_GROUPS / len(positives))
    rates = rng.beta(positives + 0.5, scored - positives + 0.5, (repeats, len(positives))).ravel()

    rule, size = args.slot_rule, args.round_size
    positives, negatives = np.zeros(len(rates), dtype=int), np.zeros(len(rates), dtype=int)
    active = np.arange(len(rates))
    for _ in range(args.rounds_per_step):  # with one round, Est's budgets have this mean
        drawn = rng.binomial(size, rates[active])
        positives[active] += drawn
        negatives[active] += size - drawn
        more = needs_more(positives[active], negatives[active], rule.min_positives, rule.min_negatives)
        active = active[more]
    rollouts = float((positives + negatives).mean())
    if args.baseline == "batch":
        return 1.0, rollouts
    lost = float(((positives == 0) | (negatives == 0)).mean())
    if args.zero_variance_groups == "resample":
        rollouts *= sum(lost**retry for retry in range(args.prompts_per_slot))
        lost **= args.prompts_per_slot
    return 1 - lost, rollouts


def step_cost(args: "AdaGRPOConfig", sample: Sample, update_seconds: float) -> CheckResult:
    """Estimate the cost of a step. Larger batches generate faster, so the time is an upper bound."""
    positives, scored = counts(args, sample)
    # A generation batch may take several steps, and a step several generation batches.
    batches = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    unit, per = ("step", "") if batches >= 1 else ("generation batch", " per step")
    fraction, rollouts, prompts = "", float(args.num_generations), args.prompts_per_step * max(int(batches), 1)
    if 0 < positives.sum() < scored.sum():
        with_gradient, rollouts = expected_sampling(args, positives, scored)
        fraction = f" ({with_gradient:.0%} of them with a gradient)"
    drawn = prompts * rollouts
    return CheckResult(
        "cost",
        f"a {unit} of {prompts} prompts{fraction}: {drawn:.0f} rollouts, {drawn * sample.mean_length:.0f} tokens, at most "
        f"{sample.seconds * drawn / sample.success_rewards.size:.1f} s of sampling and {update_seconds:.1f} s of update{per}",
    )
