"""Findings of `ada-trl check`: conclusions from a few rollouts of a few prompts, and from the first step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core import Rollouts
from ..core.metrics import RewardKind, kind_of_rewards, threshold_outside_reward_range
from ..core.pass_at_k import pass_at_k


if TYPE_CHECKING:  # it imports torch
    from ..trainer.ada_grpo_config import AdaGRPOConfig

MANY_TRUNCATED = 0.1


class Finding(NamedTuple):
    """Line of the report. `is_fatal` means that a run could not learn anything."""

    checked: str
    found: str
    advice: str = ""
    is_fatal: bool = False


def generation(
    args: "AdaGRPOConfig", rollouts: Rollouts, logs: Mapping[str, float], reward_seconds: float
) -> Iterator[Finding]:
    """Describe lengths and speed, from the log of the evaluation and the seconds of its reward functions."""
    lengths, seconds, truncated = rollouts.length_N, logs["eval_runtime"], logs["eval_completions/clipped_ratio"]
    is_slow = seconds > 1 and reward_seconds > seconds / 2
    yield Finding(
        "generation",
        f"{len(rollouts)} completions of {lengths.mean():.0f} tokens (longest {lengths.max()}) in {seconds:.1f} s, "
        f"{lengths.sum() / max(seconds, 1e-9):.0f} tokens/s; reward functions {reward_seconds:.1f} s",
        "Reward functions take most of the time." if is_slow else "",
    )
    advice = (
        f"Raise max_completion_length ({args.max_completion_length}): the answer of a truncated completion is cut off."
    )
    yield Finding("truncated", f"{truncated:.0%} of the completions", advice if truncated > MANY_TRUNCATED else "")


def rewards(rollouts: Rollouts, names: Sequence[str]) -> Iterator[Finding]:
    """Describe the range of each reward function."""
    for name, reward_N in zip(names, rollouts.rewards_NF.T, strict=True):
        scored = reward_N[~np.isnan(reward_N)]
        if not len(scored):
            yield Finding(f"reward {name}", "no completion scored", "It returns None or NaN; check its columns.")
            continue
        is_constant = scored.min() == scored.max()
        advice = "All completions received the same reward, so there is no learning signal." if is_constant else ""
        missing = f"; {1 - len(scored) / len(reward_N):.0%} not scored" if len(scored) < len(reward_N) else ""
        found = f"{scored.min():.3g} to {scored.max():.3g}, mean {scored.mean():.3g}{missing}"
        yield Finding(f"reward {name}", found, advice)


def difficulty(args: "AdaGRPOConfig", rollouts: Rollouts) -> Finding:
    """Describe the pass rates, and whether the threshold separates the rewards."""
    success_rewards = rollouts.success_reward_N[rollouts.is_scored_N]
    if not len(success_rewards):
        return Finding("pass rate", "unknown, nothing was scored", "Correct the reward functions.", True)
    low, high, mean = success_rewards.min(), success_rewards.max(), success_rewards.mean()
    pass_rate = rollouts.is_positive_N.sum() / len(success_rewards)
    is_one_sided = not low <= rollouts.threshold < high
    advice = ""
    if low == high:
        advice = f"All rollouts {'pass: use harder' if pass_rate else 'fail: use easier'} prompts, or other rewards."
    elif is_one_sided or threshold_outside_reward_range(low, high, mean, pass_rate):
        advice = (
            f"Rewards range from {low:.3g} to {high:.3g} with a mean of {mean:.3g}, and positive_threshold "
            f"({args.positive_threshold:g}) separates almost none of them: set it to the reward of a success, or "
            "check the difficulty of the prompts."
        )
    elif not args.retries and _kind(rollouts) == "comparable":
        once, later = (pass_at_k(rollouts.positives_P, int(rollouts.size_P[0]), k).mean() for k in (1, 3))
        advice = (
            "baseline='batch' with retries=2 samples a prompt in up to 3 steps, until one rollout is correct: this "
            f"solves {later:.0%} of these prompts, a single rollout {once:.0%}."
        )
    counts = zip(rollouts.positives_P[:16], rollouts.scored_P[:16], strict=True)
    per_prompt = " ".join(f"{positives}/{scored}" for positives, scored in counts)
    found = f"{pass_rate:.2f} of {len(success_rewards)} rollouts; by prompt {per_prompt}"
    is_constant = np.nanmin(rollouts.reward_N) == np.nanmax(rollouts.reward_N)
    return Finding("pass rate", found, advice, bool(is_constant))


def across_prompts(args: "AdaGRPOConfig", rollouts: Rollouts) -> Finding:
    """Describe whether the rewards of different prompts can be compared, as the batch baseline does."""
    from ..trainer.reporting import advise_on_rewards  # imports torch

    kind = _kind(rollouts)
    if kind is None:
        return Finding("rewards across prompts", "unknown, nothing was scored")
    found = {
        "comparable": "differences within and between prompts are similar",
        "outliers": "a few are far below all others",
        "levels": "their level differs by prompt, which is for baseline='pool' only",
        "distinct": "most are different, and few prompts have two of them",
    }[kind]
    return Finding("rewards across prompts", found, advise_on_rewards(kind) if args.baseline == "batch" else "")


def _kind(rollouts: Rollouts) -> RewardKind | None:
    has_reward_N = rollouts.has_reward_N
    if not has_reward_N.any():
        return None
    return kind_of_rewards(rollouts.reward_N[has_reward_N], rollouts.prompt_N[has_reward_N])


def step_cost(
    args: "AdaGRPOConfig", prompts: int, logs: Mapping[str, float], sampling_seconds: float, update_seconds: float
) -> Finding:
    """Describe the cost of the first step, from what it has logged and the prompts of a generation batch."""
    # A generation batch may take several steps, and a step several generation batches, over which its log is averaged.
    batches = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    unit, per = ("step", "") if batches >= 1 else ("generation batch", " per step")
    number = max(int(batches), 1)
    rollouts = logs["ada/samples_per_prompt/mean"] * logs.get("ada/prompts/sampled", prompts) * number
    return Finding(
        "cost",
        f"a {unit} of {prompts * number} prompts ({1 - logs['ada/frac_zero_advantage_groups']:.0%} of them with a "
        f"gradient): {rollouts:.0f} rollouts, {logs['ada/tokens/generated'] * number:.0f} tokens, "
        f"{sampling_seconds:.1f} s of sampling and {update_seconds:.1f} s of update{per}",
    )
