"""Metrics of rollouts, groups and completions; docs/reference.md lists the names under which they are logged."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from .rollouts import Rollouts
from .sequential import SlotRule, needs_more


RewardKind = Literal["comparable", "outliers", "levels", "distinct"]


def zero_variance_probability(
    rollouts: Rollouts, num_generations: int, outcome_N: np.ndarray | None = None
) -> np.ndarray:
    """
    Estimate the probability that GRPO with `num_generations` rollouts has no gradient on a prompt, `(P,)`: the
    fraction of all subsets of that size whose rewards are all equal, Σ_v C(c_v, n) / C(M, n) with c_v of M rollouts of
    the reward v.

    Unbiased for p^n + (1−p)^n from M ≥ n uniform rollouts, with less noise than a single subset. Rollouts without a
    reward are left out; with fewer than `num_generations` others, these are the group.

    Args:
        rollouts ([`~core.Rollouts`]):
            Rollouts of the first round.
        num_generations (`int`):
            n.
        outcome_N (`np.ndarray`, *optional*):
            What is compared; by default the reward.
    """
    outcome = (rollouts.reward_N if outcome_N is None else outcome_N)[rollouts.has_reward_N]
    prompt = rollouts.prompt_N[rollouts.has_reward_N]
    codes = np.unique(outcome, return_inverse=True)[1].reshape(-1) if len(outcome) else np.zeros(0, dtype=int)
    kinds, counts = np.unique(np.stack([prompt, codes], axis=1), axis=0, return_counts=True)  # (K, 2) and (K,)
    pool_P = np.bincount(prompt, minlength=rollouts.num_prompts)
    group_P = np.clip(pool_P, 1, num_generations)
    of_kind = kinds[:, 0]
    fraction = np.ones(len(kinds))
    for drawn in range(num_generations):  # C(c, n) / C(M, n) as a product, factor by factor
        factor = np.maximum(counts - drawn, 0) / np.maximum(pool_P[of_kind] - drawn, 1)
        fraction *= np.where(drawn < group_P[of_kind], factor, 1.0)
    probability_P = np.bincount(of_kind, weights=fraction, minlength=rollouts.num_prompts)
    return np.where(pool_P > 0, probability_P, 1.0)


def mean_and_std(values_N: np.ndarray, prompt_N: np.ndarray, *, each_prompt_once: bool) -> tuple[float, float]:
    """
    Compute mean and standard deviation of rewards, without NaN, with Bessel's correction as in TRL.

    Args:
        values_N (`np.ndarray`), prompt_N (`np.ndarray`):
            Rewards, and the prompt of each.
        each_prompt_once (`bool`):
            Whether all prompts have the same weight, so that the mean is that of the prompts' means, or all rewards.

    Returns:
        `tuple[float, float]`: NaN if there are no values; the standard deviation of fewer than two is NaN as well.
    """
    is_value = ~np.isnan(values_N)
    x, prompt = values_N[is_value], prompt_N[is_value]
    if not len(x):
        return math.nan, math.nan
    w = 1 / np.bincount(prompt)[prompt] if each_prompt_once else np.ones(len(x))
    w = w / w.sum()
    mean = (w * x).sum()
    bessel = 1 - (w**2).sum()
    return float(mean), math.sqrt((w * (x - mean) ** 2).sum() / bessel) if len(x) > 1 else math.nan


def sampling_metrics(
    rollouts: Rollouts,
    selected: np.ndarray,
    advantage_N: np.ndarray,
    *,
    samples_per_round: int,
    num_generations: int,
    is_on_distribution_P: np.ndarray,
    outcome_N: np.ndarray | None = None,
) -> dict[str, float]:
    """
    Compute the metrics of adaptive sampling of one step over the prompts of all ranks.

    Values that start with `frac_` are fractions of the prompts. `pass_rate/mean` and
    `frac_reward_zero_std/first_round` are computed from the first round, which is uniform sampling: early stopping
    biases the pass rate of the whole pool upwards.

    Args:
        rollouts ([`~core.Rollouts`]):
            All rollouts of the step.
        selected (`np.ndarray`):
            Indices of the rollouts that are trained on.
        advantage_N (`np.ndarray`):
            Advantages of all rollouts.
        samples_per_round (`int`):
            M, the rollouts of a prompt in the first round.
        num_generations (`int`):
            n, the group size of the GRPO that `frac_reward_zero_std/first_round` compares with. NaN if a first round
            has fewer rollouts, or none can be compared.
        is_on_distribution_P (`np.ndarray`):
            Which prompts are an unbiased sample of the dataset. The metrics of the first round include only these, and
            are NaN if there are none.
        outcome_N (`np.ndarray`, *optional*):
            See [`zero_variance_probability`].
    """
    size_P = rollouts.size_P
    is_first_N = rollouts.draw_N < samples_per_round
    first = rollouts.where(is_first_N)
    zero_before_P = np.full(rollouts.num_prompts, np.nan)
    if first.size_P.min() >= num_generations > 1:
        first_outcome = None if outcome_N is None else outcome_N[is_first_N]
        zero_before_P = zero_variance_probability(first, num_generations, first_outcome)
    trained_P = np.bincount(rollouts.prompt_N[selected], minlength=rollouts.num_prompts) > 0
    has_gradient_P = np.zeros(rollouts.num_prompts, dtype=bool)
    has_gradient_P[rollouts.prompt_N[selected][advantage_N[selected] != 0]] = True
    metrics = {
        "samples_per_prompt/mean": size_P.mean(),
        "samples_per_prompt/max": size_P.max(),
        "frac_reward_zero_std/first_round": _nanmean(zero_before_P[is_on_distribution_P]),
        "frac_zero_advantage_groups": 1 - has_gradient_P[trained_P].mean(),
        "frac_recovered_groups": (zero_before_P * has_gradient_P).mean(),
        "pass_rate/mean": _nanmean(first.pass_rate_P[is_on_distribution_P]),
    }
    return {name: float(value) for name, value in metrics.items()}


def round_metrics(rollouts: Rollouts, rule: SlotRule, *, samples_per_round: int) -> dict[str, float]:
    """Compute the mean number of rounds per prompt, and how many prompts have met the exit condition."""
    rounds_P = -(-rollouts.size_P // samples_per_round)
    return {
        "rounds/mean": float(rounds_P.mean()),
        "frac_exit_condition_met": float(1 - _is_active(rollouts, rule).mean()),
    }


def detailed_metrics(
    rollouts: Rollouts, selected: np.ndarray, rule: SlotRule, *, samples_per_round: int
) -> dict[str, float]:
    """
    Compute further metrics, such as those of each round, for the figures of the paper. With N_x rewards of mean r̄_x
    per prompt, (`reward/micro_mean` − `reward/macro_mean`) · mean(N_x) = Cov(N_x, r̄_x).

    Args:
        rule ([`SlotRule`]):
            Exit condition and maximum number of rounds, for all of which there are metrics, also if no prompt was
            sampled as often.
        The others as in [`sampling_metrics`].
    """
    rounds_P = -(-rollouts.size_P // samples_per_round)
    is_active_P = _is_active(rollouts, rule)
    is_one_sided_P = (rollouts.scored_P > 0) & is_active_P
    metrics = {
        "frac_all_correct": (is_one_sided_P & (rollouts.negatives_P == 0)).mean(),
        "frac_all_wrong": (is_one_sided_P & (rollouts.positives_P == 0)).mean(),
        "reward/trained": _nanmean(rollouts.reward_N[selected]),
        "reward/macro_mean": _nanmean(rollouts.mean_P),
        "reward/micro_mean": _nanmean(rollouts.reward_N),
    }
    round_N = np.minimum(rollouts.draw_N // samples_per_round, rule.max_rounds - 1)
    is_negative_N = rollouts.is_scored_N & ~rollouts.is_positive_N
    for k in range(1, rule.max_rounds + 1):
        positives_P = rollouts.sum(rollouts.is_positive_N & (round_N < k))
        negatives_P = rollouts.sum(is_negative_N & (round_N < k))
        metrics[f"active_prompts/round_{k}"] = (rounds_P >= k).sum()
        metrics[f"frac_missing_positives/round_{k}"] = (positives_P < rule.min_positives).mean()
        metrics[f"frac_missing_negatives/round_{k}"] = (negatives_P < rule.min_negatives).mean()
    return {name: float(value) for name, value in metrics.items()}


def first_round_metrics(
    rollouts: Rollouts,
    names: Sequence[str],
    *,
    rollouts_per_round: int,
    is_on_distribution_P: np.ndarray,
    each_prompt_once: bool,
) -> dict[str, list[float]]:
    """
    Compute GRPO's reward metrics from the first round of the prompts that are an unbiased sample of the dataset:
    `reward`, `reward_std` and `rewards/*`. Each has one value per reward function of that name.

    Args:
        rollouts ([`~core.Rollouts`]):
            All rollouts of the step.
        names (`Sequence[str]`):
            Names of the reward functions.
        rollouts_per_round (`int`):
            Rollouts of the first round of a prompt.
        is_on_distribution_P (`np.ndarray`):
            Which prompts are included.
        each_prompt_once (`bool`):
            Whether all prompts have the same weight although their numbers of rollouts differ.
    """
    first = rollouts.where((rollouts.draw_N < rollouts_per_round) & is_on_distribution_P[rollouts.prompt_N])
    mean, std = mean_and_std(first.reward_N, first.prompt_N, each_prompt_once=each_prompt_once)
    metrics = {"reward": [mean], "reward_std": [std]}
    for name, rewards_N in zip(names, first.rewards_NF.T, strict=True):
        mean, std = mean_and_std(rewards_N, first.prompt_N, each_prompt_once=each_prompt_once)
        metrics.setdefault(f"rewards/{name}/mean", []).append(mean)
        metrics.setdefault(f"rewards/{name}/std", []).append(std)
    return metrics


def threshold_outside_reward_range(low: float, high: float, mean: float, pass_rate: float) -> bool:
    """
    Whether rewards differ, but hardly with respect to the threshold: less than 5 % of them are positive, or negative,
    although their mean is far from that end of their range. Never true of rewards of 0 and 1.
    """
    if not low < high:
        return False
    return (pass_rate < 0.05 or pass_rate > 0.95) and abs((mean - low) / (high - low) - pass_rate) > 0.25


def kind_of_rewards(reward_N: np.ndarray, prompt_N: np.ndarray) -> RewardKind:
    """
    Tell whether rewards can be compared with the mean reward of other prompts. 512 rewards are sufficient for all that
    were measured (benchmarks/README.md, "Graded rewards"); fewer may miss outliers.

    - `"outliers"`: rare low rewards dominate the variance. The lowest is more than 5 standard deviations below the
      mean, and more than 20 times as far below the median as half of those below it, which none of a few values of
      similar distances is. High outliers do not count: a rare success is to be learned from.
    - `"levels"`: three quarters of the variance are between prompts, and there are more than two rewards.
    - `"distinct"`, with less than two rollouts per prompt: many rewards are different, as those of a reward model,
      whose level differs by prompt. A continuous score with the same meaning on every prompt looks the same.

    With less than two rollouts per prompt, levels of a few different values look as `"comparable"`.

    Args:
        reward_N (`np.ndarray`), prompt_N (`np.ndarray` of `int`):
            Rewards, without NaN, and the prompt of each.
    """
    low = np.median(reward_N) - reward_N
    low = low[low > 0]
    if reward_N.mean() - reward_N.min() > 5 * reward_N.std() and low.max() > 20 * np.median(low):
        return "outliers"
    prompt, size = np.unique(prompt_N, return_inverse=True, return_counts=True)[1:]
    distinct = len(np.unique(reward_N))
    if len(reward_N) < 2 * len(size):
        return "distinct" if distinct > 0.4 * len(reward_N) else "comparable"  # at most 0.2 in all others measured
    deviation_N = reward_N - (np.bincount(prompt, weights=reward_N) / size)[prompt]
    within = (deviation_N**2).sum() / (len(reward_N) - len(size))
    return "levels" if distinct > 2 and within < reward_N.var(ddof=1) / 4 else "comparable"


def rollouts_by_estimate(estimates: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """
    Compute the allocation curve: mean rollouts of the prompts in ten bins of the estimated pass rate, which are named
    by their middle. Bins without a prompt are left out, so that a mean over steps is one over the steps that had some.
    """
    bins = np.clip((np.asarray(estimates, dtype=float) * 10).astype(int), 0, 9)
    num_rollouts = np.asarray(sizes, dtype=float)
    return {
        f"rollouts_at_{(2 * i + 1) / 20:.2f}": float(num_rollouts[bins == i].mean())
        for i in sorted(set(bins.tolist()))
    }


def completion_metrics(lengths: ArrayLike, truncated: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float]:
    """
    Compute GRPO's metrics of completions from their numbers of tokens and whether each reached the maximum length.

    Lengths of terminated completions are 0 if there are none, as in TRL; everything is NaN without a completion.
    `weights` are those of the completions in the means, by default equal ones.
    """
    all_lengths, is_truncated = np.asarray(lengths, dtype=float), np.asarray(truncated, dtype=bool)
    w = np.ones(len(all_lengths)) if weights is None else np.asarray(weights, dtype=float)
    parts = {"length": (all_lengths, w), "terminated_length": (all_lengths[~is_truncated], w[~is_truncated])}
    metrics = {"clipped_ratio": np.average(is_truncated, weights=w) if len(w) else math.nan}
    for name, (values, own) in parts.items():
        if not len(values):
            values, own = np.array([0.0 if len(w) else math.nan]), np.ones(1)
        metrics |= {f"mean_{name}": np.average(values, weights=own), f"min_{name}": values.min()}
        metrics[f"max_{name}"] = values.max()
    return {f"completions/{name}": float(value) for name, value in metrics.items()}


def _is_active(rollouts: Rollouts, rule: SlotRule) -> np.ndarray:
    """Which prompts would be sampled further without a maximum number of rounds."""
    is_unmet_P = needs_more(rollouts.positives_P, rollouts.negatives_P, rule.min_positives, rule.min_negatives)
    return is_unmet_P & ~rollouts.is_abstained_P


def _nanmean(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else math.nan
