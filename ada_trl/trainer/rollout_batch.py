"""Rollouts of a generation batch, with their advantages and metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from ..core import (
    BaselineEstimate,
    Pool,
    Rollout,
    baseline_advantages,
    explained_variance,
    group_advantages,
    normalize_rewards,
    posterior_baselines,
    sampling_metrics,
)
from ..core.metrics import mean_and_std
from ..core.pool import sample_std
from ..sampling.rollout_sampler import Completion
from .ada_grpo_config import AdaGRPOConfig
from .baselines import BaselineValues


POOL_COLUMNS = ("pool_size", "pool_positives")  # of the table of completions
MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that divide by the number of rows, masked or not


@dataclass
class RolloutBatch:
    """
    Rollouts that all ranks train on, prompt by prompt.

    Groups follow each other in the order of the prompts. They have `num_generations` rollouts each, or different numbers with the
    same sum; every rank receives the same number of rows either way.

    Args:
        pools (`Sequence[Pool]`):
            All rollouts of each prompt.
        groups (`list[list[Rollout]]`):
            The rollouts of each pool that are trained on.
        is_on_distribution (`Sequence[bool]`):
            Whether each prompt is an unbiased sample of the dataset.
        rollouts_per_round (`int`):
            Rollouts of the first round of a prompt.
        metrics (`dict[str, float]`):
            Logged under `ada/`.
        advantages (`list[list[float]]`):
            Advantages of each group; see [`compute_advantages`].
        rewards (`torch.Tensor`, *optional*):
            `(rows of all ranks, num_reward_funcs)`, if the rollouts were selected from several rounds.
        rows (`list[Completion]`):
            Completions of this rank, if they were selected from several rounds.
        hidden_states (`torch.Tensor`, *optional*):
            `(P, H)`, the policy's hidden states of the prompts, if they were captured while sampling.
    """

    pools: Sequence[Pool]
    groups: list[list[Rollout]]
    is_on_distribution: Sequence[bool]
    rollouts_per_round: int
    metrics: dict[str, float] = field(default_factory=dict)
    advantages: list[list[float]] = field(default_factory=list)
    rewards: torch.Tensor | None = None
    rows: list[Completion] = field(default_factory=list)
    hidden_states: torch.Tensor | None = None

    @property
    def has_zero_advantage(self) -> list[bool]:
        """Whether all advantages of a prompt are 0, by prompt."""
        return [not any(values) for values in self.advantages]

    @property
    def flat_advantages(self) -> list[float]:
        """Advantages of the rows of all ranks."""
        return [value for values in self.advantages for value in values]

    def per_row(self, values: Sequence[Any]) -> list[Any]:
        """Repeat one value per prompt for each of its rows."""
        return [value for value, group in zip(values, self.groups, strict=True) for _ in group]

    def pool_columns(self) -> dict[str, list[int]]:
        """Columns of the table of completions: size of each row's pool, and positives in it."""
        sizes, positives = [len(pool) for pool in self.pools], [pool.positives for pool in self.pools]
        return dict(zip(POOL_COLUMNS, (self.per_row(sizes), self.per_row(positives)), strict=True))

    def first_row_states(self, states: torch.Tensor, process_index: int) -> list[torch.Tensor | None]:
        """Return the hidden state of each prompt's first row if it is among `states`, those of this rank's rows, else `None`."""
        found: list[torch.Tensor | None] = [None] * len(self.pools)
        prompts = self.per_row(range(len(self.pools)))
        start = process_index * len(states)
        for i, prompt in enumerate(prompts[start : start + len(states)]):
            row = start + i
            if row == 0 or prompts[row - 1] != prompt:
                found[prompt] = states[i]
        return found

    def count_masked_rows(self, is_masked: Sequence[bool]) -> None:
        """Update `frac_zero_advantage_groups` if some rows, of those of all ranks, are left out of the loss."""
        masked = iter(is_masked)
        has_gradient = []
        for advantages in self.advantages:
            unmasked = [advantage for advantage in advantages if not next(masked)]
            if advantages:
                has_gradient.append(any(unmasked))
        self.metrics["frac_zero_advantage_groups"] = has_gradient.count(False) / len(has_gradient)

    def first_round_metrics(self, names: Sequence[str], *, each_prompt_once: bool) -> dict[str, list[float]]:
        """
        Compute GRPO's reward metrics from the first round of the prompts that are an unbiased sample of the dataset: `reward`,
        `reward_std`, `rewards/*` and `frac_reward_zero_std`. Each has one value per reward function of that name.

        Args:
            names (`Sequence[str]`):
                Names of the reward functions.
            each_prompt_once (`bool`):
                Whether all prompts have the same weight although their numbers of rollouts differ.
        """

        first_rounds = [
            pool.first_round(self.rollouts_per_round).rollouts
            for pool, included in zip(self.pools, self.is_on_distribution, strict=True)
            if included
        ]
        totals = [[rollout.reward for rollout in rollouts] for rollouts in first_rounds]
        mean, std = mean_and_std(totals, each_prompt_once=each_prompt_once)
        metrics = {"reward": [mean], "reward_std": [std]}
        for i, name in enumerate(names):
            values = [[rollout.rewards[i] for rollout in rollouts] for rollouts in first_rounds]
            mean, std = mean_and_std(values, each_prompt_once=each_prompt_once)
            metrics.setdefault(f"rewards/{name}/mean", []).append(mean)
            metrics.setdefault(f"rewards/{name}/std", []).append(std)
        return metrics | {"frac_reward_zero_std": [self.metrics["frac_reward_zero_std/first_round"]]}

    def compute_advantages(
        self, args: AdaGRPOConfig, reward_weights: Sequence[float], values: BaselineValues | None = None
    ) -> None:
        """
        Set the advantages, and add the metrics that depend on them.

        Args:
            values ([`~trainer.baselines.BaselineValues`], *optional*):
                By default the baseline is the mean of each prompt's pool.
        """
        if values is None:
            self.advantages = pool_advantages(self.pools, self.groups, args, reward_weights)
        else:
            stds: Sequence[float | None] = values.stds or [None] * len(self.pools)
            by_prompt = zip(self.pools, values.baselines, values.weights, stds, strict=True)
            self.advantages = [
                baseline_advantages(pool, baselines, weight=weight, std=std)
                for pool, baselines, weight, std in by_prompt
            ]
        sampling = sampling_metrics(
            self.pools,
            self.groups,
            self.advantages,
            args.exit_condition,
            samples_per_round=self.rollouts_per_round,
            max_rounds=args.sampling_strategy.rounds_per_step,
            num_generations=args.num_generations,
            weighting=args.prompt_weighting,
            is_on_distribution=self.is_on_distribution,
        )
        # The weights as applied, and an exit condition over several steps, take precedence over those of this step's pools alone.
        self.metrics = sampling | self.metrics | ({} if values is None else baseline_metrics(self.pools, values))


def baseline_metrics(pools: Sequence[Pool], values: BaselineValues) -> dict[str, float]:
    """
    Compute the prompt weights, and for estimated baselines the fraction of the rewards' variance that they explain, the same for the
    leave-one-out mean of each prompt (of prompts with several rollouts), and the pseudo-counts.
    """
    metrics = {"prompt_weight/mean": math.fsum(values.weights) / len(values.weights)}
    metrics["prompt_weight/max"] = max(values.weights)
    if values.pseudo_counts is not None:
        no_information = BaselineEstimate(math.nan, 0.0, math.nan)
        leave_one_out = [posterior_baselines(pool, no_information) for pool in pools]
        metrics["baseline/explained_variance"] = explained_variance(pools, values.baselines)
        metrics["baseline/explained_variance_leave_one_out"] = explained_variance(pools, leave_one_out)
        metrics["baseline/pseudo_counts"] = math.fsum(values.pseudo_counts) / len(values.pseudo_counts)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def pool_advantages(
    pools: Sequence[Pool], groups: Sequence[Sequence[Rollout]], args: AdaGRPOConfig, reward_weights: Sequence[float]
) -> list[list[float]]:
    """
    Compute [`~core.group_advantages`] of every group, divided according to `scale_rewards`. With
    `multi_objective_aggregation="normalize_then_sum"` ([GDPO](https://huggingface.co/papers/2601.05242)) reward functions are
    normalized one by one ([`~core.normalize_rewards`]), and advantages divided by the standard deviation over the batch.
    """
    by_batch = args.scale_rewards == "batch"
    if args.multi_objective_aggregation == "normalize_then_sum":
        normalized = [normalize_rewards(pool, reward_weights) for pool in pools]
        by_index = [{rollout.draw_index: rollout for rollout in pool.rollouts} for pool in normalized]
        groups = [
            [after[rollout.draw_index] for rollout in group] for after, group in zip(by_index, groups, strict=True)
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
            selection_correction=args.selection_correction,
        )
        for pool, group, std in zip(pools, groups, stds, strict=True)
    ]


def build_rollout_batch(
    pools: Sequence[Pool],
    groups: list[list[Rollout]],
    args: AdaGRPOConfig,
    is_on_distribution: Sequence[bool],
) -> RolloutBatch:
    """Build the batch of the selected groups. In modes with one round all rollouts belong to the first round."""
    strategy = args.sampling_strategy
    return RolloutBatch(
        pools=pools,
        groups=groups,
        is_on_distribution=is_on_distribution,
        rollouts_per_round=strategy.rollouts_per_round if strategy.is_sequential else max(map(len, pools)),
    )


def mask_rows(output: dict, masked: Sequence[bool], loss_type: str, accelerator: Accelerator) -> None:
    """
    Mask rows of zero-variance groups, so that the loss is that of a batch without them. Collective.

    Args:
        output (`dict`):
            Batch of this rank, as [`~trl.GRPOTrainer`] trains on it.
        masked (`Sequence[bool]`):
            Whether each row of all ranks is masked.
        loss_type (`str`):
            As in [`~trl.GRPOConfig`].
        accelerator (`Accelerator`):
            The run's accelerator.
    """
    rows = len(output["advantages"])
    local = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    is_trained = ~torch.tensor(masked[local], device=output["completion_mask"].device)
    output["completion_mask"] = output["completion_mask"] * is_trained.unsqueeze(1)  # (B, T)
    loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
    output["num_items_in_batch"] = accelerator.gather(loss_mask.sum()).sum()
    if loss_type in MEAN_OVER_ROWS:  # masked rows still count in these losses' divisor
        output["advantages"] = output["advantages"] * len(masked) / max(sum(not m for m in masked), 1)


def skip_zero_advantage_rows(inputs: dict, loss_type: str, accelerator: Accelerator) -> dict:
    """
    Remove rows whose advantage is 0 from a micro-batch, without changing the gradient of its loss. Collective.

    Without a KL term or an entropy bonus such a row adds nothing to the gradient, but its forward and backward pass cost as much
    as any other. Losses that divide by the number of rows or tokens of the micro-batch divide by fewer then; advantages are scaled
    accordingly. Every rank keeps as many rows as the one with the most others, and at least one: TRL gathers values of the rows
    for its metrics, and every rank has to take part in the backward pass.

    Args:
        inputs (`dict`):
            A micro-batch of [`~trl.GRPOTrainer`], rows first in every tensor.
        loss_type (`str`):
            As in [`~trl.GRPOConfig`].
        accelerator (`Accelerator`):
            The run's accelerator.
    """
    total = len(inputs["advantages"])
    # An override may return advantages of tokens, (B, T).
    is_trained = (inputs["advantages"] != 0).view(total, -1).any(dim=1)
    if "pixel_values" in inputs:  # they are not ordered by row
        is_trained = torch.ones_like(is_trained)
    number = max(int(accelerator.gather(is_trained.sum()).max()), 1)
    if number == total:
        return inputs
    is_trained[torch.argsort((~is_trained).int(), stable=True)[:number]] = True  # the first of the other rows fill up
    trained = {
        name: value[is_trained] if isinstance(value, torch.Tensor) and value.dim() and len(value) == total else value
        for name, value in inputs.items()
    }
    if loss_type in MEAN_OVER_ROWS:
        trained["advantages"] = trained["advantages"] * len(trained["advantages"]) / total
    elif loss_type == "bnpo":
        tokens, trained_tokens = (batch["completion_mask"] * batch.get("tool_mask", 1) for batch in (inputs, trained))
        trained["advantages"] = trained["advantages"] * trained_tokens.sum() / tokens.sum().clamp(min=1)
    return trained
