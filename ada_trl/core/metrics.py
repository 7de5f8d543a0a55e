"""Pools to numbers."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .advantages import PromptWeighting, prompt_weight
from .exit_conditions import ExitCondition
from .pool import Pool, Rollout


def zero_signal_probability(rewards: Sequence[float], num_generations: int) -> float:
    """
    Probability that GRPO with `num_generations` rollouts would have had no gradient on this prompt: the share of all
    subsets of that size whose scored rewards are all equal, Σ_v C(c_v, n) / C(M, n).

    Unbiased for p^n + (1−p)^n from M ≥ n uniform draws, with less noise than looking at one subset. NaN rewards are
    left out; with fewer than `num_generations` scored rewards the whole sample stands for the group.
    """
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if len(scored) < num_generations:
        return float(len(set(scored)) <= 1)
    same = sum(math.comb(count, num_generations) for count in Counter(scored).values())
    return same / math.comb(len(scored), num_generations)


def sampling_metrics(
    pools: Sequence[Pool],
    groups: Sequence[Sequence[Rollout]],
    advantages: Sequence[Sequence[float]],
    exit_condition: ExitCondition,
    *,
    samples_per_round: int,
    weighting: PromptWeighting,
) -> dict[str, float]:
    """
    The adaptive figures of one step, one number each, over all prompts of all processes.

    Shares are of prompts, between 0 and 1. `pass_rate/*` and `zero_signal/first_round` are read off the first round,
    which is uniform sampling: early stopping biases the pass rate of the whole pool upwards.

    Args:
        pools, groups, advantages:
            One entry per prompt.
        exit_condition (`ExitCondition`):
            What resolved means.
        samples_per_round (`int`):
            M; a pool of k·M rollouts took k rounds.
        weighting (`str`):
            See [`prompt_weight`].
    """
    sizes = np.array([len(pool) for pool in pools])
    rounds = -(-sizes // samples_per_round)
    resolved = np.array([exit_condition(pool) for pool in pools])
    first_rounds = [[r for r in pool.rollouts if r.draw < samples_per_round] for pool in pools]
    zero_before = np.array(
        [
            zero_signal_probability([r.reward for r in first_round], len(group))
            for first_round, group in zip(first_rounds, groups, strict=True)
        ]
    )
    zero_after = np.array([not any(group_advantages) for group_advantages in advantages])
    pass_rates = [Pool(p.positive_threshold, first).pass_rate for p, first in zip(pools, first_rounds, strict=True)]
    weights = [prompt_weight(pool.pass_rate, max(pool.scored, 1), weighting) for pool in pools]

    metrics = {
        "samples_per_prompt/mean": sizes.mean(),
        "samples_per_prompt/max": sizes.max(),
        "rounds/mean": rounds.mean(),
        "resolved": resolved.mean(),
        "unresolved/all_positive": np.mean([p.scored > 0 and p.negatives == 0 for p in pools] & ~resolved),
        "unresolved/all_negative": np.mean([p.scored > 0 and p.positives == 0 for p in pools] & ~resolved),
        "unresolved/unscored": np.mean([p.scored == 0 for p in pools] & ~resolved),
        "zero_signal/first_round": zero_before.mean(),
        "zero_signal/final": zero_after.mean(),
        "recovered": (zero_before * ~zero_after).mean(),
        "reward/selected": _nanmean([r.reward for group in groups for r in group]),
        "reward/prompt_level": _nanmean([pool.mean for pool in pools]),
        "reward/batch_level": _nanmean([r.reward for pool in pools for r in pool.rollouts]),
        "pass_rate/mean": _nanmean(pass_rates),
        "pass_rate/p10": _nanpercentile(pass_rates, 10),
        "pass_rate/p90": _nanpercentile(pass_rates, 90),
        "prompt_weight/mean": np.mean(weights),
        "prompt_weight/max": np.max(weights),
    }
    for k in range(1, rounds.max() + 1):
        metrics[f"active_prompts/round_{k}"] = (rounds >= k).sum()
    return {name: float(value) for name, value in metrics.items()}


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """
    What GRPO logs of its completions, of tokens per completion and whether the cap cut it off.

    Lengths of terminated completions are 0 if there are none, as in TRL.
    """
    lengths, truncated = np.asarray(lengths, dtype=float), np.asarray(truncated, dtype=bool)
    terminated = lengths[~truncated] if not truncated.all() else np.zeros(1)
    metrics = {"clipped_ratio": truncated.mean()}
    for name, values in (("length", lengths), ("terminated_length", terminated)):
        metrics |= {f"mean_{name}": values.mean(), f"min_{name}": values.min(), f"max_{name}": values.max()}
    return {f"completions/{name}": float(value) for name, value in metrics.items()}


def _nanmean(values: Sequence[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _nanpercentile(values: Sequence[float], q: float) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return float(np.percentile(scored, q)) if scored else math.nan
