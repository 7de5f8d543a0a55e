"""What is refused before training, with both values and the remedy."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from datasets import Dataset, IterableDataset
from trl import GRPOConfig

from ..core.advantages import POWERS
from ..core.allocation import check_rule
from ..sampling.strategies import STRATEGIES, strategy_class
from ..utils.logging import get_logger


logger = get_logger(__name__)


CHOICES = {
    "adaptive_sampling": tuple(STRATEGIES),
    "pass_rate_estimator": ("ema", "value", "ema+value"),
    "baseline": ("pool", "posterior", "batch"),
    "zero_variance_groups": ("keep", "mask", "resample"),
    "vllm_weight_sync": ("nccl", "lora", "disk"),
}

_ESTIMATES = ("ema_decay", "pass_rate_prior")


def check_types(args: GRPOConfig, annotations: Mapping[str, Any]) -> None:
    """
    Check what the checks below and TRL's compute with, before they do.

    Args:
        args ([`AdaGRPOConfig`]):
            Its fields that are numbers.
        annotations (`Mapping[str, Any]`):
            Types of its fields by name.

    Raises:
        `ValueError`: for a choice that there is not, or a number that is none.
    """
    for name, choices in CHOICES.items():
        value = getattr(args, name)
        if value not in choices and not (value is None and name in ("adaptive_sampling", "pass_rate_estimator")):
            raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}.")
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, annotation in annotations.items():
        kinds, value = set(get_args(annotation) or [annotation]), getattr(args, name)
        if (
            not kinds & {int, float}
            or str in kinds
            or (value is None and (NoneType in kinds or defaults[name] is None))
        ):
            continue
        if not isinstance(value, int | float) or (float not in kinds and value != int(value)):
            kind = "number" if float in kinds else "whole number"
            raise ValueError(f"{name} ({value!r}) must be a {kind}.")
    if args.num_generations is not None and args.num_generations < 1:
        raise ValueError(f"num_generations ({args.num_generations}) must be at least 1, the rollouts of a prompt.")


def resolve_sampling(args: GRPOConfig) -> None:
    """Give `adaptive_sampling` and `num_generations`, where they are `None`, the value that belongs to the baseline."""
    alone = args.baseline != "pool"  # a rollout that needs no other one of its prompt
    if args.adaptive_sampling is None:
        args.adaptive_sampling = "uniform" if alone else "seq-balance"
    if args.num_generations is None:
        args.num_generations = 1 if alone and args.adaptive_sampling == "uniform" else 4


def placeholder_group_size(args: GRPOConfig) -> int:
    """
    A group size of at least 2 that divides the generation batch, for the checks of [`~trl.GRPOConfig`].

    The generation batch is a multiple of each of these numbers, whichever of them are set.
    """
    per_generation = args.steps_per_generation or args.gradient_accumulation_steps
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for size in (args.generation_batch_size, args.per_device_train_batch_size, per_generation, processes):
        if size is not None and size >= 2:
            return int(size)
    raise ValueError(
        f"num_generations=1 with baseline={args.baseline!r} requires a generation batch of at least 2 rollouts, got 1: raise "
        "per_device_train_batch_size."
    )


def resolve_defaults(args: GRPOConfig) -> None:
    """Give the fields of `args` that are `None` the value that follows from the others."""
    strategy = strategy_class(args.adaptive_sampling, args.baseline)
    if args.samples_per_round is None and strategy.is_sequential:
        args.samples_per_round = args.num_generations * (1 if strategy.retries_across_steps else 2)
    if args.selection_correction is None and strategy.is_sequential and not strategy.retries_across_steps:
        args.selection_correction = True
    if args.prompt_weighting is None:
        args.prompt_weighting = strategy.default_weighting
    if args.pass_rate_estimator is None and args.needs_pass_rate_estimates:
        args.pass_rate_estimator = "ema+value"
        args.estimator_is_explicit = False
    if args.vllm_weight_sync_dir is None:
        args.vllm_weight_sync_dir = os.path.join(args.output_dir, "vllm_weight_sync")


def check_config(args: GRPOConfig) -> None:
    """
    Check the fields of `args` together.

    Raises:
        `ValueError`: for a value that cannot be honoured in the chosen mode.
    """
    if args.scale_rewards not in ("none", "group", "batch"):
        raise ValueError(f"scale_rewards ({args.scale_rewards!r}) must be one of 'none', 'group', 'batch'.")
    if not math.isfinite(args.positive_threshold):
        raise ValueError(
            f"positive_threshold ({args.positive_threshold}) must be a finite number: a rollout is positive when its "
            "signal is greater. Use 0.7 for rewards of 0 and 1."
        )
    _check_weight(args)
    strategy = strategy_class(args.adaptive_sampling, args.baseline)
    if strategy.uses_estimated_budgets:
        args.allocation_rule = check_rule(args.allocation_rule)
    _check_vllm(args)
    _check_estimates(args)
    _check_stream(args)
    _check_staleness(args)
    if not args.uses_value_network:
        _refuse(
            args,
            ("value_model",),
            "pass_rate_estimator='value' or 'ema+value', for 'est', baseline='posterior' or prompt_oversampling",
        )
    if not args.tracks_pass_rates:
        _refuse(args, _ESTIMATES, "'est', baseline='posterior', prompt_oversampling or pass_rate_estimator='ema'")
    used = {*strategy.options, *(("max_rounds",) if args.zero_variance_groups == "resample" else ())}
    for other in STRATEGIES.values():
        _refuse(args, [name for name in other.options if name not in used], other.used_by)
    if not strategy.is_sequential or strategy.retries_across_steps:
        _refuse(
            args, ("selection_correction",), "'seq-balance' or 'seq-pos' with baseline='pool', which select groups"
        )
    if args.num_generations == 1 and args.baseline == "pool":
        raise ValueError(
            "num_generations (1) leaves a rollout nothing to be compared with but itself. Set baseline='posterior', which "
            "compares it with what was expected of its prompt, or at least 2."
        )
    if args.baseline != "pool":
        _check_baseline(args)
    if strategy.retries_across_steps and args.samples_per_round != args.num_generations:
        raise ValueError(
            f"samples_per_round ({args.samples_per_round}) must be num_generations ({args.num_generations}) with "
            f"baseline={args.baseline!r}, which trains on every rollout of a round. Leave samples_per_round unset."
        )
    if strategy.uses_estimated_budgets and args.zero_variance_groups == "resample":
        raise ValueError(
            "zero_variance_groups='resample' samples another prompt for as many rollouts, but adaptive_sampling="
            f"{args.adaptive_sampling!r} gives every prompt a different number. Use 'uniform', 'seq-pos' or 'seq-balance'."
        )
    args.sampling_strategy  # noqa: B018 (its constructor checks the options together)


def _refuse(args: GRPOConfig, names: Sequence[str], needed: str) -> None:
    """Options that are set and would be ignored."""
    fields = {field.name: field for field in dataclasses.fields(args)}
    for name in names:
        field = fields[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if getattr(args, name) != default:
            raise ValueError(
                f"{name} ({getattr(args, name)}) has no effect with adaptive_sampling={args.adaptive_sampling!r} and "
                f"baseline={args.baseline!r}. It is for {needed}. Change the mode or leave {name} unset."
            )


def _check_weight(args: GRPOConfig) -> None:
    """Names stay names, numbers become floats: a command line gives strings."""
    weighting = args.prompt_weighting
    if weighting not in POWERS:
        try:
            args.prompt_weighting = float(weighting)
        except (TypeError, ValueError):
            args.prompt_weighting = math.nan
        if not 0 <= args.prompt_weighting <= 1:
            raise ValueError(
                f"prompt_weighting ({weighting!r}) must be one of 'inverse_sqrt', 'inverse', 'none', or a number alpha "
                "from 0 to 1 for the weight p^(alpha - 1)."
            )


def _check_stream(args: GRPOConfig) -> None:
    """Which prompts are asked."""
    for name in ("prompt_oversampling", "max_rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} ({getattr(args, name)}) must be at least 1.")
    if args.zero_variance_groups == "resample" and args.max_rounds == 1:
        raise ValueError(
            "max_rounds (1) leaves zero_variance_groups='resample' no other prompt to ask. Raise max_rounds, the prompts that are asked "
            "one after another, or use zero_variance_groups='keep'."
        )


def _check_baseline(args: GRPOConfig) -> None:
    """What holds where no statistic of the rollouts that are compared may divide them."""
    _refuse(args, ("zero_variance_groups",), "baseline='pool', which knows prompts without contrast")
    if args.scale_rewards == "group":
        raise ValueError(
            "scale_rewards='group' (True is the same) divides by the standard deviation of the rollouts that are compared, "
            f"which makes baseline={args.baseline!r} biased. Use scale_rewards='none' (False) or 'batch'."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} normalizes rewards by the prompt's own "
            "rollouts, which a baseline of "
            f"{args.baseline!r} does without. Use 'sum_then_normalize', or baseline='pool'."
        )
    if args.generation_batch_size == 1 and "batch" in (args.baseline, args.scale_rewards):
        raise ValueError(
            "generation_batch_size (1) leaves no other rollout to compare with, or to know the rewards' deviation from, as "
            f"baseline={args.baseline!r} with scale_rewards={args.scale_rewards!r} needs it. Raise per_device_train_batch_size."
        )
    if args.baseline == "batch" and not args.needs_pass_rate_estimates and args.prompt_weighting not in ("none", 1.0):
        raise ValueError(
            f"prompt_weighting ({args.prompt_weighting!r}) weighs a prompt by the pass rate that is expected of it, which "
            "baseline='batch' does not estimate. Use prompt_weighting='none', or baseline='posterior'."
        )


def _check_estimates(args: GRPOConfig) -> None:
    if args.pass_rate_estimator not in (None, "ema") and not args.needs_pass_rate_estimates:
        raise ValueError(
            f"pass_rate_estimator ({args.pass_rate_estimator!r}) trains a value network, on which nothing depends with "
            f"adaptive_sampling={args.adaptive_sampling!r} and baseline={args.baseline!r}. It is for "
            "adaptive_sampling='est', baseline='posterior' or prompt_oversampling. Use 'ema' to keep a record, or leave it "
            "unset."
        )
    if not 0 < args.ema_decay <= 1:
        raise ValueError(f"ema_decay ({args.ema_decay}) must be above 0 and at most 1. Use 1 to never forget.")
    prior = args.pass_rate_prior
    if prior is not None and (len(prior) != 2 or not all(0 < value < math.inf for value in prior)):
        raise ValueError(
            f"pass_rate_prior ({prior}) must be two positive numbers, the positives and negatives that it is worth, "
            "such as [1.0, 16.0]."
        )


def _check_vllm(args: GRPOConfig) -> None:
    if args.vllm_request_timeout <= 0:
        raise ValueError(f"vllm_request_timeout ({args.vllm_request_timeout}) must be positive.")
    if not (args.use_vllm and args.vllm_mode == "server"):
        if args.vllm_weight_sync != "nccl":
            raise ValueError(
                f"vllm_weight_sync={args.vllm_weight_sync!r} is for a vLLM server, but use_vllm={args.use_vllm} and "
                f"vllm_mode={args.vllm_mode!r}. Set use_vllm=True and vllm_mode='server', or leave vllm_weight_sync unset."
            )


def _check_staleness(args: GRPOConfig) -> None:
    """Generation one step ahead."""
    if args.max_staleness not in (0, 1):
        raise ValueError(
            f"max_staleness ({args.max_staleness}) must be 0, or 1 for rollouts that are one step ahead of the training."
        )
    if not args.max_staleness:
        return
    if not (args.use_vllm and args.vllm_mode == "server"):
        raise ValueError(
            f"max_staleness ({args.max_staleness}) lets a vLLM server work beside the trainer, but use_vllm="
            f"{args.use_vllm} and vllm_mode={args.vllm_mode!r}. Set use_vllm=True and vllm_mode='server', or max_staleness=0."
        )
    if not args.vllm_importance_sampling_correction:
        raise ValueError(
            f"max_staleness ({args.max_staleness}) trains on rollouts of earlier weights, which only "
            "vllm_importance_sampling_correction=True makes up for. Set it, or max_staleness=0."
        )
    if args.max_rounds_per_step > 1:
        raise ValueError(
            f"max_staleness ({args.max_staleness}) is for one round of rollouts per step: further rounds of "
            f"adaptive_sampling={args.adaptive_sampling!r} and zero_variance_groups={args.zero_variance_groups!r} would be waited for all the "
            "same. Set max_staleness=0, or baseline='posterior'."
        )


def check_size(args: GRPOConfig, dataset: Any) -> None:
    """
    Raises:
        `ValueError`: if a training data set has fewer rows than a step asks prompts, so that there would be no step. Plain
            GRPO takes it with a warning, as [`~trl.GRPOTrainer`] does.
    """
    prompts = args.prompts_per_step
    if not isinstance(dataset, Dataset) or len(dataset) >= prompts:
        return
    words = (
        f"A step asks {prompts} different prompts (generation_batch_size {args.generation_batch_size} / num_generations "
        f"{args.num_generations}), but the training data set has only {len(dataset)}. Use a smaller batch, more "
        "rollouts per prompt or a larger data set."
    )
    if not args.is_vanilla_grpo:
        raise ValueError(words)
    logger.warning(f"{words} As it is, there is no step to train.")


def check_prompt_column(dataset: Any) -> None:
    """
    Check that a training data set has prompts, as far as that can be told without streaming it.

    Raises:
        `ValueError`: if it has no column `prompt`.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None
    if not columns or "prompt" in columns:
        return
    if isinstance(dataset, Dataset) and len(dataset) and "prompt" in dataset[0]:  # made by `with_transform`
        return
    raise ValueError(
        f"The training data set has no column 'prompt' (it has {', '.join(map(repr, columns))}). Rename the column "
        "that holds the prompts with `dataset.rename_column(..., 'prompt')`."
    )
