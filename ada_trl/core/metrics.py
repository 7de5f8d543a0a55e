"""Metrics of pools, groups and completions; docs/metrics.md lists the names under which they are logged."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .advantages import PromptWeighting, prompt_weight
from .pass_rate_ema import beta_binomial_sufficient_stats, fit_beta_prior
from .pool import Pool, Rollout
from .sequential_sampling import ExitCondition


def zero_gradient_probability(rewards: Sequence[float], num_generations: int) -> float:
    """
    Estimate the probability that GRPO with `num_generations` rollouts has no gradient on a prompt: the fraction of all
    subsets of that size whose scored rewards are all equal, Σ_v C(c_v, n) / C(M, n).

    Unbiased for p^n + (1−p)^n from M ≥ n uniform rollouts, with less noise than a single subset. NaN rewards are
    left out; with fewer than `num_generations` scored rewards all of them are taken as the group.
    """
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if len(scored) < num_generations:
        return float(len(set(scored)) <= 1)
    same = sum(math.comb(count, num_generations) for count in Counter(scored).values())
    return same / math.comb(len(scored), num_generations)


def grpo_zero_variance_probability(pools: Sequence[Pool], num_generations: int) -> np.ndarray:
    """
    Estimate [`zero_gradient_probability`] from uniformly sampled pools, `(P,)`, also if they are smaller than n =
    `num_generations`.

    GRPO would also have sampled the rollouts missing in a small pool. If the pool's rewards differ, the group's would have
    differed; equal rewards would have stayed equal with probability E[p^missing] (all positive) or E[(1 − p)^missing], over
    the posterior of p given the pool and a Beta prior fitted to the small pools of this batch. The probability at estimated
    pass rates would be too small however well calibrated they are (Jensen), and that of the small pool itself too large.
    """
    probabilities = np.array(
        [zero_gradient_probability([r.reward for r in pool.rollouts], num_generations) for pool in pools]
    )
    small = [i for i, pool in enumerate(pools) if pool.scored and len(pool) < num_generations]
    if not small:
        return probabilities
    alpha, beta = fit_beta_prior(
        beta_binomial_sufficient_stats([(pools[i].positives, pools[i].scored) for i in small]), 1.0, 1.0
    )
    for i in small:
        pool = pools[i]
        same = alpha + pool.positives if pool.positives else beta + pool.negatives
        more = np.arange(num_generations - len(pool))
        probabilities[i] *= np.prod((same + more) / (alpha + beta + pool.scored + more))
    return probabilities


def mean_and_std(values: Sequence[Sequence[float]], *, each_prompt_once: bool) -> tuple[float, float]:
    """
    Compute mean and standard deviation of rewards, without NaN, with Bessel's correction as in TRL.

    Args:
        values (`Sequence[Sequence[float]]`):
            Rewards of each prompt.
        each_prompt_once (`bool`):
            Whether all prompts have the same weight, so that the mean is that of the prompts' means, or all rewards.

    Returns:
        `tuple[float, float]`: NaN if there are no values; the standard deviation of fewer than two is NaN as well.
    """
    scored = [[value for value in prompt if not math.isnan(value)] for prompt in values]
    x = np.array([value for prompt in scored for value in prompt])
    if not len(x):
        return math.nan, math.nan
    w = np.array([1 / len(prompt) if each_prompt_once else 1.0 for prompt in scored for _ in prompt])
    w /= w.sum()
    mean = (w * x).sum()
    bessel = 1 - (w**2).sum()
    return float(mean), math.sqrt((w * (x - mean) ** 2).sum() / bessel) if len(x) > 1 else math.nan


def sampling_metrics(
    pools: Sequence[Pool],
    groups: Sequence[Sequence[Rollout]],
    advantages: Sequence[Sequence[float]],
    exit_condition: ExitCondition,
    *,
    samples_per_round: int,
    max_rounds: int,
    num_generations: int,
    weighting: PromptWeighting,
    is_on_distribution: Sequence[bool],
) -> dict[str, float]:
    """
    Compute the metrics of adaptive sampling of one step over the prompts of all ranks.

    Values that start with `frac_` are fractions of the prompts. `pass_rate/*`, `success_reward/*` and `frac_reward_zero_std/first_round` are
    computed from the first round, which is uniform sampling: early stopping biases the pass rate of the whole pool upwards.
    With N_x scored rollouts of mean r̄_x per prompt, (`reward/micro_mean` − `reward/macro_mean`) · mean(N_x) = Cov(N_x, r̄_x).

    Args:
        pools, groups, advantages:
            One entry per prompt.
        exit_condition (`ExitCondition`):
            The exit condition of the mode.
        samples_per_round (`int`):
            M; a pool of k·M rollouts took k rounds.
        max_rounds (`int`):
            N. Metrics by round exist for all of them, also if no prompt was sampled as often.
        num_generations (`int`):
            n, the group size of the GRPO that `frac_reward_zero_std/first_round` compares with.
        weighting (`str` or `float`):
            See [`prompt_weight`].
        is_on_distribution (`Sequence[bool]`):
            Which prompts are an unbiased sample of the dataset. The metrics of the first round include only these, and are
            NaN if there are none.
    """
    sizes = np.array([len(pool) for pool in pools])
    rounds = -(-sizes // samples_per_round)
    exit_met = np.array([exit_condition(pool) for pool in pools])
    first_rounds = [pool.first_round(samples_per_round) for pool in pools]
    zero_before = grpo_zero_variance_probability(first_rounds, num_generations)
    zero_after = np.array([not any(group_advantages) for group_advantages in advantages])
    sample = [pool for pool, is_included in zip(first_rounds, is_on_distribution, strict=True) if is_included]
    pass_rates = [pool.pass_rate for pool in sample]
    weights = [prompt_weight(p.pass_rate, max(p.scored, 1), weighting) for p in pools]
    success_rewards = [
        rollout.success_reward for pool in sample for rollout in pool.rollouts if pool.is_scored(rollout)
    ]

    metrics = {
        "samples_per_prompt/mean": sizes.mean(),
        "samples_per_prompt/min": sizes.min(),
        "samples_per_prompt/max": sizes.max(),
        "rounds/mean": rounds.mean(),
        "frac_exit_condition_met": exit_met.mean(),
        "frac_all_correct": np.mean([p.scored > 0 and p.negatives == 0 for p in pools] & ~exit_met),
        "frac_all_wrong": np.mean([p.scored > 0 and p.positives == 0 for p in pools] & ~exit_met),
        "frac_unscored": np.mean([p.scored == 0 for p in pools] & ~exit_met),
        "frac_reward_zero_std/first_round": _nanmean(zero_before[np.array(is_on_distribution)]),
        "frac_zero_advantage_groups": zero_after[[len(group) > 0 for group in groups]].mean(),
        "frac_recovered_groups": (zero_before * ~zero_after).mean(),
        "reward/trained": _nanmean([r.reward for group in groups for r in group]),
        "reward/macro_mean": _nanmean([pool.mean for pool in pools]),
        "reward/micro_mean": _nanmean([reward for pool in pools for reward in pool.scored_rewards]),
        "pass_rate/mean": _nanmean(pass_rates),
        "pass_rate/p10": _nanpercentile(pass_rates, 10),
        "pass_rate/p90": _nanpercentile(pass_rates, 90),
        "prompt_weight/mean": np.mean(weights),
        "prompt_weight/max": np.max(weights),
        "success_reward/mean": _nanmean(success_rewards),
        "success_reward/min": min(success_rewards, default=math.nan),
        "success_reward/max": max(success_rewards, default=math.nan),
    }
    positives, negatives = _counts_by_round(pools, samples_per_round, max_rounds)
    for k in range(1, max_rounds + 1):
        metrics[f"active_prompts/round_{k}"] = (rounds >= k).sum()
        metrics[f"frac_missing_positives/round_{k}"] = np.mean(positives[:, k - 1] < exit_condition.min_positives)
        metrics[f"frac_missing_negatives/round_{k}"] = np.mean(negatives[:, k - 1] < exit_condition.min_negatives)
    return {name: float(value) for name, value in metrics.items()}


def threshold_outside_reward_range(low: float, high: float, mean: float, pass_rate: float) -> bool:
    """
    Whether rewards differ, but hardly with respect to the threshold: less than 5 % of them are positive, or negative, although
    their mean is far from that end of their range. Never true of rewards of 0 and 1.
    """
    if not low < high:
        return False
    return (pass_rate < 0.05 or pass_rate > 0.95) and abs((mean - low) / (high - low) - pass_rate) > 0.25


def rollouts_by_estimate(estimates: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """
    Compute the allocation curve: mean rollouts of the prompts in ten bins of the estimated pass rate, which are named by
    their middle. Bins without a prompt are left out, so that a mean over steps is one over the steps that had some.
    """
    bins = np.clip((np.asarray(estimates, dtype=float) * 10).astype(int), 0, 9)
    num_rollouts = np.asarray(sizes, dtype=float)
    return {
        f"rollouts_at_{(2 * i + 1) / 20:.2f}": float(num_rollouts[bins == i].mean())
        for i in sorted(set(bins.tolist()))
    }


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """
    Compute GRPO's metrics of completions from their numbers of tokens and whether each reached the maximum length.

    Lengths of terminated completions are 0 if there are none, as in TRL.
    """
    all_lengths, is_truncated = np.asarray(lengths, dtype=float), np.asarray(truncated, dtype=bool)
    terminated = all_lengths[~is_truncated] if not is_truncated.all() else np.zeros(1)
    metrics = {"clipped_ratio": is_truncated.mean()}
    for name, values in (("length", all_lengths), ("terminated_length", terminated)):
        metrics |= {f"mean_{name}": values.mean(), f"min_{name}": values.min(), f"max_{name}": values.max()}
    return {f"completions/{name}": float(value) for name, value in metrics.items()}


def _counts_by_round(pools: Sequence[Pool], samples_per_round: int, max_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the positives and the negatives of each pool after each round, `(P, N)` both."""
    counts = np.zeros((2, len(pools), max_rounds), dtype=int)
    for i, pool in enumerate(pools):
        for rollout in pool.rollouts:
            if pool.is_scored(rollout):
                round_index = min(rollout.draw_index // samples_per_round, max_rounds - 1)
                counts[int(pool.is_positive(rollout)), i, round_index] += 1
    negatives, positives = counts.cumsum(axis=2)
    return positives, negatives


def _nanmean(values: Sequence[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _nanpercentile(values: Sequence[float], q: float) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return float(np.percentile(scored, q)) if scored else math.nan
