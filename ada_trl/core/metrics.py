"""Pools to numbers."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .advantages import PromptWeighting, prompt_weight
from .exit_conditions import ExitCondition
from .pass_rate_ema import beta_binomial_sufficient_stats, fit_beta_prior
from .pool import Pool, Rollout


def zero_gradient_probability(rewards: Sequence[float], num_generations: int) -> float:
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


def zero_signal_of_grpo(pools: Sequence[Pool], num_generations: int) -> np.ndarray:
    """
    [`zero_gradient_probability`] of uniformly drawn pools, `(num_prompts,)`, also of those that are smaller than n =
    `num_generations`.

    GRPO would have drawn the rollouts missing in a small pool too. A contrast that is there already would have stayed;
    equal rewards would have stayed equal with probability E[p^missing] (all positive) or E[(1 − p)^missing], over what
    is left to know about p: a Beta prior fitted to the small pools of this batch, and the pool itself. A plug-in of
    estimated pass rates would be too small however well calibrated they are (Jensen), and letting a pool of two stand for
    a group of four too large.
    """
    shares = np.array(
        [zero_gradient_probability([r.reward for r in pool.rollouts], num_generations) for pool in pools]
    )
    small = [i for i, pool in enumerate(pools) if pool.scored and len(pool) < num_generations]
    if not small:
        return shares
    alpha, beta = fit_beta_prior(
        beta_binomial_sufficient_stats([(pools[i].positives, pools[i].scored) for i in small]), 1.0, 1.0
    )
    for i in small:
        pool = pools[i]
        same = alpha + pool.positives if pool.positives else beta + pool.negatives
        more = np.arange(num_generations - len(pool))
        shares[i] *= np.prod((same + more) / (alpha + beta + pool.scored + more))
    return shares


def mean_and_std(values: Sequence[Sequence[float]], *, each_prompt_once: bool) -> tuple[float, float]:
    """
    Mean and standard deviation of rewards, NaN left out, with Bessel's correction as in TRL.

    Args:
        values (`Sequence[Sequence[float]]`):
            Rewards of each prompt.
        each_prompt_once (`bool`):
            Whether each prompt weighs the same, so that the mean is that of the prompts' means, or each reward.

    Returns:
        `tuple[float, float]`: NaN if there are no values; the standard deviation of fewer than two is NaN too.
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
    is_on_distribution: Sequence[bool] | None = None,
) -> dict[str, float]:
    """
    The adaptive figures of one step, one number each, over all prompts of all processes.

    Shares are of prompts, between 0 and 1. `pass_rate/*` and `frac_reward_zero_std/first_round` are read off the first round,
    which is uniform sampling: early stopping biases the pass rate of the whole pool upwards.

    With N_x scored rollouts of mean r̄_x per prompt, the batch-level reward differs from the prompt-level one by
    (`reward/micro_mean` − `reward/macro_mean`) · mean(N_x) = Cov(N_x, r̄_x), over the
    prompts with N_x > 0; mean(N_x) is `samples_per_prompt/mean` when everything is scored.

    `frac_missing_positives/round_<k>` is the share of prompts that lack positives after k rounds, whether or not they lack
    negatives too; after the last round these are the unresolved ones, by what they are unresolved for.

    Args:
        pools, groups, advantages:
            One entry per prompt.
        exit_condition (`ExitCondition`):
            What resolved means.
        samples_per_round (`int`):
            M; a pool of k·M rollouts took k rounds.
        max_rounds (`int`):
            N. What is counted by round is there for all of them, also where no prompt got so far.
        num_generations (`int`):
            n, the group size of the GRPO that `frac_reward_zero_std/first_round` compares with.
        weighting (`str` or `float`):
            See [`prompt_weight`].
        is_on_distribution (`Sequence[bool]`, *optional*):
            Which prompts stand for the data set: `pass_rate/*`, `signal/*` and `frac_reward_zero_std/first_round` are of these, NaN
            where there are none. By default, all.
    """
    sizes = np.array([len(pool) for pool in pools])
    rounds = -(-sizes // samples_per_round)
    resolved = np.array([exit_condition(pool) for pool in pools])
    first_rounds = [
        Pool(p.positive_threshold, (r for r in p.rollouts if r.draw_index < samples_per_round)) for p in pools
    ]
    zero_before = zero_signal_of_grpo(first_rounds, num_generations)
    zero_after = np.array([not any(group_advantages) for group_advantages in advantages])
    stand_for_all = np.ones(len(pools), dtype=bool) if is_on_distribution is None else np.array(is_on_distribution)
    sample = [pool for pool, is_representative in zip(first_rounds, stand_for_all, strict=True) if is_representative]
    pass_rates = [pool.pass_rate for pool in sample]
    weights = [prompt_weight(p.pass_rate, max(p.scored, 1), weighting) for p in pools]
    signals = [rollout.success_reward for pool in sample for rollout in pool.rollouts if pool.is_scored(rollout)]

    metrics = {
        "samples_per_prompt/mean": sizes.mean(),
        "samples_per_prompt/min": sizes.min(),
        "samples_per_prompt/max": sizes.max(),
        "rounds/mean": rounds.mean(),
        "frac_exit_condition_met": resolved.mean(),
        "frac_all_correct": np.mean([p.scored > 0 and p.negatives == 0 for p in pools] & ~resolved),
        "frac_all_wrong": np.mean([p.scored > 0 and p.positives == 0 for p in pools] & ~resolved),
        "frac_unscored": np.mean([p.scored == 0 for p in pools] & ~resolved),
        "frac_reward_zero_std/first_round": _nanmean(zero_before[stand_for_all]),
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
        "success_reward/mean": _nanmean(signals),
        "success_reward/min": min(signals, default=math.nan),
        "success_reward/max": max(signals, default=math.nan),
    }
    positives, negatives = _counts_by_round(pools, samples_per_round, max_rounds)
    for k in range(1, max_rounds + 1):
        metrics[f"active_prompts/round_{k}"] = (rounds >= k).sum()
        metrics[f"frac_missing_positives/round_{k}"] = np.mean(positives[:, k - 1] < exit_condition.min_positives)
        metrics[f"frac_missing_negatives/round_{k}"] = np.mean(negatives[:, k - 1] < exit_condition.min_negatives)
    return {name: float(value) for name, value in metrics.items()}


def threshold_outside_reward_range(low: float, high: float, mean: float, pass_rate: float) -> bool:
    """
    Whether rewards differ where the threshold sees next to no difference: nearly all or none are positive (less than 5 % are
    of the other kind), though their mean lies far from that end of their range. That of rewards of 0 and 1 never does.
    """
    if not low < high:
        return False
    return (pass_rate < 0.05 or pass_rate > 0.95) and abs((mean - low) / (high - low) - pass_rate) > 0.25


def rollouts_by_estimate(estimates: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """
    The allocation curve: mean rollouts of the prompts by what they were expected to pass, in ten bins that are named by
    their middle. Bins without a prompt are left out, so that a mean over steps is one over the steps that had some.
    """
    bins = np.clip((np.asarray(estimates, dtype=float) * 10).astype(int), 0, 9)
    drawn = np.asarray(sizes, dtype=float)
    return {f"rollouts_at_{(2 * i + 1) / 20:.2f}": float(drawn[bins == i].mean()) for i in sorted(set(bins.tolist()))}


def completion_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """
    What GRPO logs of its completions, of tokens per completion and whether the cap cut it off.

    Lengths of terminated completions are 0 if there are none, as in TRL.
    """
    all_lengths, cut_off = np.asarray(lengths, dtype=float), np.asarray(truncated, dtype=bool)
    terminated = all_lengths[~cut_off] if not cut_off.all() else np.zeros(1)
    metrics = {"clipped_ratio": cut_off.mean()}
    for name, values in (("length", all_lengths), ("terminated_length", terminated)):
        metrics |= {f"mean_{name}": values.mean(), f"min_{name}": values.min(), f"max_{name}": values.max()}
    return {f"completions/{name}": float(value) for name, value in metrics.items()}


def _counts_by_round(pools: Sequence[Pool], samples_per_round: int, max_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Positives and negatives of each pool after each round, `(num_prompts, max_rounds)` both."""
    scored = [[rollout for rollout in pool.rollouts if pool.is_scored(rollout)] for pool in pools]
    last = max_rounds - 1
    cells = [
        i * max_rounds + min(r.draw_index // samples_per_round, last) for i, pool in enumerate(scored) for r in pool
    ]
    positive = [pools[i].is_positive(rollout) for i, pool in enumerate(scored) for rollout in pool]
    counts = np.zeros((2, len(pools) * max_rounds), dtype=int)
    np.add.at(counts, (np.array(positive, dtype=int), np.array(cells, dtype=int)), 1)
    negatives, positives = counts.reshape(2, len(pools), max_rounds).cumsum(axis=2)
    return positives, negatives


def _nanmean(values: Sequence[float]) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return math.fsum(scored) / len(scored) if scored else math.nan


def _nanpercentile(values: Sequence[float], q: float) -> float:
    scored = [value for value in values if not math.isnan(value)]
    return float(np.percentile(scored, q)) if scored else math.nan
