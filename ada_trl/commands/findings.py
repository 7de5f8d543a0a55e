"""Findings of `ada-trl check`: conclusions from a few rollouts of a few prompts."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core import needs_more
from ..core.metrics import threshold_outside_reward_range
from ..core.pass_at_k import pass_at_k
from ..trainer.mode import Mode


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
        total_rewards, success_rewards (`np.ndarray`):
            Weighted sums, and rewards that are compared with `positive_threshold`, `(prompts, rollouts)` each.
        mean_length, max_length (`float`):
            Generated tokens of a completion.
        truncated (`float`):
            Fraction of completions that reached the maximum length.
        seconds, reward_seconds (`float`):
            Time of generation and scoring together, and of scoring alone, on the slowest process.
    """

    rewards: np.ndarray
    total_rewards: np.ndarray
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


def difficulty(args: "AdaGRPOConfig", sample: Sample) -> CheckResult:
    """Describe the pass rates, and whether the threshold separates the rewards."""
    is_scored = ~np.isnan(sample.success_rewards)
    is_positive = np.where(is_scored, sample.success_rewards, -np.inf) > args.float32_threshold
    positives, scored = is_positive.sum(axis=1), is_scored.sum(axis=1)  # by prompt
    if not scored.any():
        return CheckResult("pass rate", "unknown, nothing was scored", "Correct the reward functions.", True)
    values = sample.success_rewards[is_scored]
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
    elif not args.retries:
        once, later = (pass_at_k(positives, is_positive.shape[1], k).mean() for k in (1, 3))
        advice = (
            "baseline='batch' with retries=2 samples a prompt in up to 3 steps, until one rollout is correct: this solves "
            f"{later:.0%} of these prompts, a single rollout {once:.0%}."
        )
    per_prompt = " ".join(f"{k}/{n}" for k, n in zip(positives[:16], scored[:16], strict=True))
    found = f"{pass_rate:.2f} of {scored.sum()} rollouts; by prompt {per_prompt}"
    is_constant = np.nanmin(sample.total_rewards) == np.nanmax(sample.total_rewards)
    return CheckResult("pass rate", found, advice, bool(is_constant))


def expected_sampling(
    args: "AdaGRPOConfig", counts_PK: np.ndarray, total_K: np.ndarray, success_K: np.ndarray
) -> tuple[float, float]:
    """
    Simulate the sampling of prompts whose rollouts had K different outcomes `counts_PK` times. The outcomes' probabilities are
    drawn from their posterior under a Dirichlet prior of total weight 1, with two outcomes that of Jeffreys.

    Args:
        total_K, success_K (`np.ndarray`):
            Weighted sum and success reward of each outcome.

    Returns:
        `tuple[float, float]`: the fraction of groups that have a gradient, and rollouts per group.
    """
    rng = np.random.default_rng(0)
    repeats = math.ceil(SIMULATED_GROUPS / len(counts_PK))
    weights_SK = rng.standard_gamma(np.tile(counts_PK, (repeats, 1)) + 1 / len(total_K))
    rates_SK = weights_SK / weights_SK.sum(axis=1, keepdims=True)

    mode = Mode.of(args)
    rule, is_positive_K = mode.slot_rule, success_K > args.float32_threshold
    drawn_SK = np.zeros(rates_SK.shape, dtype=int)
    active = np.arange(len(rates_SK))
    for _ in range(rule.max_rounds):  # with one round, Est's budgets have this mean
        drawn_SK[active] += rng.multinomial(mode.round_size, rates_SK[active])
        positives, negatives = (drawn_SK[active][:, kind].sum(axis=1) for kind in (is_positive_K, ~is_positive_K))
        active = active[needs_more(positives, negatives, rule.min_positives, rule.min_negatives)]
    rollouts = float(drawn_SK.sum(axis=1).mean())
    if mode.baseline == "batch":
        return 1.0, rollouts
    lost = _share_of_equal(drawn_SK, total_K)
    if mode.zero_variance_groups == "resample":
        replaced = _share_of_equal(drawn_SK, success_K)
        rollouts *= sum(replaced**retry for retry in range(mode.candidates_per_slot))
        lost *= replaced ** (mode.candidates_per_slot - 1)
    return 1 - lost, rollouts


def _share_of_equal(drawn_SK: np.ndarray, reward_K: np.ndarray) -> float:
    """Share of the groups in which only outcomes of equal rewards were drawn."""
    drawn_rewards_SK = np.where(drawn_SK > 0, reward_K, np.nan)
    return float((np.nanmin(drawn_rewards_SK, axis=1) == np.nanmax(drawn_rewards_SK, axis=1)).mean())


def step_cost(args: "AdaGRPOConfig", sample: Sample, update_seconds: float) -> CheckResult:
    """Estimate the cost of a step. Larger batches generate faster, so the time is an upper bound."""
    # A generation batch may take several steps, and a step several generation batches.
    batches = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    unit, per = ("step", "") if batches >= 1 else ("generation batch", " per step")
    fraction, rollouts, prompts = "", float(args.num_generations), args.prompts_per_step * max(int(batches), 1)
    pairs_PR2 = np.stack([sample.total_rewards, sample.success_rewards], axis=-1)
    prompt, draw = np.nonzero(~np.isnan(pairs_PR2).any(axis=-1))
    pairs_K2, outcome = np.unique(pairs_PR2[prompt, draw], axis=0, return_inverse=True)
    if len(pairs_K2) > 1:  # equal rewards do not determine any pass rate
        counts_PK = np.zeros((len(pairs_PR2), len(pairs_K2)))
        np.add.at(counts_PK, (prompt, outcome.ravel()), 1)
        with_gradient, rollouts = expected_sampling(args, counts_PK, *pairs_K2.T)
        fraction = f" ({with_gradient:.0%} of them with a gradient)"
    drawn = prompts * rollouts
    return CheckResult(
        "cost",
        f"a {unit} of {prompts} prompts{fraction}: {drawn:.0f} rollouts, {drawn * sample.mean_length:.0f} tokens, at most "
        f"{sample.seconds * drawn / sample.success_rewards.size:.1f} s of sampling and {update_seconds:.1f} s of update{per}",
    )
