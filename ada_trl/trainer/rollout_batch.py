"""The update batch that is replayed through the parent."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ..core import (
    BaselineEstimate,
    Pool,
    Rollout,
    explained_variance,
    group_advantages,
    mean_and_std,
    normalize_rewards,
    posterior_advantages,
    posterior_baselines,
    sampling_metrics,
)
from ..core.pool import sample_std
from ..sampling.rollout_sampler import Completion
from .ada_grpo_config import AdaGRPOConfig


@dataclass
class RolloutBatch:
    """
    The update batch of all processes, handed to the parent in place of what it would have generated and scored.

    Groups follow each other in the order of the prompts. They have `num_generations` rollouts each, or different
    numbers with the same sum; rows are dealt out to the processes in equal shares either way. What a rollout is worth is
    known after [`judge`].
    """

    pools: Sequence[Pool]  # per prompt
    groups: list[list[Rollout]]
    rewards: torch.Tensor  # (batch of all processes, num_reward_funcs)
    is_on_distribution: Sequence[bool]  # per prompt: whether it stands for the data set
    samples_per_round: int
    metrics: dict[str, float] = field(default_factory=dict)
    advantages: list[list[float]] = field(default_factory=list)
    # Of this process, see `take`:
    local: slice = field(default_factory=lambda: slice(0))  # its rows of the batch
    rows: list[Completion] = field(default_factory=list)
    states: torch.Tensor | None = None  # (P, H), the policy's hidden states of the prompts, if they were caught

    @property
    def is_zero_variance(self) -> list[bool]:
        """By prompt, whether all its advantages are 0."""
        return [not any(values) for values in self.advantages]

    @property
    def first_round(self) -> list[list[Rollout]]:
        """By prompt that stands for the data set, its first round."""
        return [
            [rollout for rollout in pool.rollouts if rollout.draw_index < self.samples_per_round]
            for pool, is_representative in zip(self.pools, self.is_on_distribution, strict=True)
            if is_representative
        ]

    def per_row(self, values: Sequence[Any]) -> list[Any]:
        """One value per prompt to one per row."""
        return [value for value, group in zip(values, self.groups, strict=True) for _ in group]

    def by_prompt(self, states: torch.Tensor) -> list[torch.Tensor | None]:
        """Of each prompt whose first row of the batch is on this process, the state of that row."""
        found: list[torch.Tensor | None] = [None] * len(self.pools)
        prompts = self.per_row(range(len(self.pools)))
        for i, prompt in enumerate(prompts[self.local]):
            row = self.local.start + i
            if row == 0 or prompts[row - 1] != prompt:
                found[prompt] = states[i]
        return found

    def take(self, rows: list[Completion], process_index: int) -> None:
        """Put in this process's share of the completions; `process_index` says whose it is."""
        self.local = slice(process_index * len(rows), (process_index + 1) * len(rows))
        self.rows = rows

    def first_round_rewards(self, names: Sequence[str], each_prompt_once: bool) -> dict[str, float]:
        """What GRPO logs of its rewards, of the first round; `names` are those of the reward functions."""

        def statistics(value: Callable[[Rollout], float]) -> tuple[float, float]:
            values = [[value(rollout) for rollout in rollouts] for rollouts in self.first_round]
            return mean_and_std(values, each_prompt_once=each_prompt_once)

        mean, std = statistics(attrgetter("reward"))
        metrics = {"reward": mean, "reward_std": std}
        for i, name in enumerate(names):
            mean, std = statistics(lambda rollout, i=i: rollout.rewards[i])  # type: ignore[misc] # its default is an int
            metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
        return metrics | {"frac_reward_zero_std": self.metrics["frac_reward_zero_std/first_round"]}

    def judge(
        self,
        args: AdaGRPOConfig,
        reward_weights: Sequence[float],
        priors: Sequence[BaselineEstimate] | None = None,
        stds: Sequence[float] | None = None,
    ) -> None:
        """
        Put in advantages and metrics.

        Args:
            priors (`Sequence[BaselineEstimate]`, *optional*):
                What each prompt is compared with; by default the mean of its pool.
            stds (`Sequence[float]`, *optional*):
                With `priors`, by prompt what advantages are divided by.
        """
        if priors is None:
            self.advantages = pool_advantages(self.pools, self.groups, args, reward_weights)
        else:
            self.advantages, metrics = self._compared_with(priors, stds or [None] * len(priors), args)
            self.metrics |= metrics
        sampled = sampling_metrics(
            self.pools,
            self.groups,
            self.advantages,
            args.exit_condition,
            samples_per_round=self.samples_per_round,
            max_rounds=args.sampling_strategy.rounds(args),
            num_generations=args.num_generations,
            weighting=args.prompt_weighting,
            is_on_distribution=self.is_on_distribution,
        )
        self.metrics = sampled | self.metrics  # what was known from before the draw, or of earlier steps, counts

    def _compared_with(
        self, priors: Sequence[BaselineEstimate], stds: Sequence[float | None], args: AdaGRPOConfig
    ) -> tuple[list[list[float]], dict[str, float]]:
        """
        [`~core.posterior_advantages`] of everything that was drawn, and how good the baseline was: the share of the variance
        of the rewards that it explains, beside that of the leave-one-out mean of the same rollouts (of prompts with more than
        one), and what it was worth in rollouts.
        """
        ordered = [
            Pool(pool.positive_threshold, sorted(pool.rollouts, key=attrgetter("draw_index"))) for pool in self.pools
        ]
        advantages, baselines, leave_one_out = [], [], []
        for pool, prior, std in zip(ordered, priors, stds, strict=True):
            advantages.append(posterior_advantages(pool, prior, weighting=args.prompt_weighting, std=std))
            baselines.append(posterior_baselines(pool, prior))
            nothing = BaselineEstimate(math.nan, 0.0, prior.pass_rate)
            leave_one_out.append(posterior_baselines(pool, nothing))
        weights = [prior.weight(args.prompt_weighting) for prior in priors]
        metrics = {
            "prompt_weight/mean": math.fsum(weights) / len(weights),
            "prompt_weight/max": max(weights),
            "baseline/explained_variance": explained_variance(ordered, baselines),
            "baseline/explained_variance_leave_one_out": explained_variance(ordered, leave_one_out),
            "baseline/pseudo_counts": math.fsum(prior.pseudo_counts for prior in priors) / len(priors),
        }
        return advantages, {name: value for name, value in metrics.items() if not math.isnan(value)}


def pool_advantages(
    pools: Sequence[Pool], groups: Sequence[Sequence[Rollout]], args: AdaGRPOConfig, reward_weights: Sequence[float]
) -> list[list[float]]:
    """
    [`~core.group_advantages`] of every group, scaled as `scale_rewards` says. With
    `multi_objective_aggregation="normalize_then_sum"` ([GDPO](https://huggingface.co/papers/2601.05242)) of pools whose
    reward functions were normalized one by one, divided by the standard deviation over all of them.
    """
    by_batch = args.scale_rewards == "batch"
    if args.multi_objective_aggregation == "normalize_then_sum":
        normalized = [normalize_rewards(pool, reward_weights) for pool in pools]
        by_draw = [{rollout.draw_index: rollout for rollout in pool.rollouts} for pool in normalized]
        groups = [
            [after[rollout.draw_index] for rollout in group] for after, group in zip(by_draw, groups, strict=True)
        ]
        pools, by_batch = normalized, True
    stds: list[float | None] = [None] * len(pools)
    if by_batch:
        stds = [sample_std([reward for pool in pools for reward in pool.scored_rewards])] * len(pools)
    elif args.scale_rewards == "group":
        stds = [pool.std for pool in pools]
    return [
        group_advantages(
            pool,
            group,
            weighting=args.prompt_weighting,
            std=std,
            selection_correction=bool(args.selection_correction),
        )
        for pool, group, std in zip(pools, groups, stds, strict=True)
    ]


def build_rollout_batch(
    pools: Sequence[Pool],
    groups: list[list[Rollout]],
    args: AdaGRPOConfig,
    device: torch.device,
    is_on_distribution: Sequence[bool] | None = None,
) -> RolloutBatch:
    """
    The update on the selected groups. What is drawn in one round is all of it the first one. `is_on_distribution` tells which prompts
    stand for the data set (by default, all; where none does, nothing is said about it).
    """
    rewards = [rollout.rewards for group in groups for rollout in group]
    return RolloutBatch(
        pools=pools,
        groups=groups,
        rewards=torch.tensor(rewards, dtype=torch.float32, device=device),
        is_on_distribution=[True] * len(pools) if is_on_distribution is None else is_on_distribution,
        samples_per_round=args.sampling_strategy.round_size(args)
        if args.sampling_strategy.in_rounds
        else max(map(len, pools)),
    )


def uniform_pools(
    rewards: list[list[float]], totals: list[float], signals: list[float], args: AdaGRPOConfig
) -> tuple[list[Pool], dict[str, float]]:
    """What uniform sampling has drawn, as pools with the metrics of a sampling that stops after the first round."""
    n = args.num_generations
    rollouts = [
        Rollout(i % n, total, signal, tuple(per_func))
        for i, (total, signal, per_func) in enumerate(zip(totals, signals, rewards, strict=True))
    ]
    groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
    pools = [Pool(args.positive_threshold, group) for group in groups]
    metrics = sampling_metrics(
        pools,
        groups,
        [group_advantages(pool, group, weighting="none") for pool, group in zip(pools, groups, strict=True)],
        args.exit_condition,
        samples_per_round=n,
        max_rounds=1,
        num_generations=n,
        weighting="none",
    )
    return pools, metrics
