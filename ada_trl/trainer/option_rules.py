"""
Rules for the options of [`AdaGRPOConfig`] alone, checked whenever a [`~trainer.mode.Mode`] is made of them: when a
configuration or a trainer is constructed, and at the start of `train()`. (What a trainer and its arguments must have
is in trainer_checks.py.)

A rule is here if an invalid value would go unnoticed, or would be noticed only after a model is loaded. Every error
states the value, the constraint and a fix.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.allocation import check_budget


MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that divide by the number of rows, masked or not


class Rule(NamedTuple):
    """
    A value that an option must not have: the condition for it, by the configuration and its mode, the constraint (with
    names of other options), and a fix.
    """

    option: str
    is_violated: Callable[[Any, Any], bool]
    constraint: str
    fix: str


MINIMA = {"max_rounds": 1, "retries": 0, "min_samples": 1, "min_positives": 1, "min_negatives": 1}

RULES = [
    Rule(
        "scale_rewards",
        lambda args, mode: args.scale_rewards not in ("none", "group", "batch"),
        "must be one of 'none', 'group', 'batch'",
        "Use 'none' as in the paper",
    ),
    Rule(
        "positive_threshold",
        lambda args, mode: not math.isfinite(args.positive_threshold),
        "must be finite: a rollout is positive if its reward is greater",
        "Use 0.7 for binary rewards",
    ),
    Rule(
        "retries",
        lambda args, mode: args.retries > 0 and args.adaptive_sampling == "est",
        "are not supported with adaptive_sampling='est', which gives unsolved prompts more rollouts in one step",
        "Leave one of them unset",
    ),
    Rule(
        "adaptive_sampling",
        lambda args, mode: mode.is_sequential and args.baseline == "batch",
        "requires baseline='pool'",
        "Use retries=2 instead, which samples unsolved prompts again in later steps, or baseline='pool'",
    ),
    Rule(
        "num_generations",
        lambda args, mode: args.generation_batch_size % args.num_generations != 0,
        "must divide generation_batch_size",
        "Change one of them",
    ),
    Rule(
        "num_generations",
        lambda args, mode: args.num_generations == 1 and args.baseline == "pool",
        "requires baseline='batch' (also with an advantage_func): the group mean is undefined for a single rollout",
        "Set it, or num_generations >= 2",
    ),
    Rule(
        "accelerator_config",
        lambda args, mode: args.accelerator_config.split_batches and not mode.trains_as_grpo,
        "must not have split_batches, because a generation batch has per_device_train_batch_size rows per process",
        "Remove it, and divide per_device_train_batch_size by the number of processes",
    ),
    # Rounds
    Rule(
        "samples_per_round",
        lambda args, mode: mode.is_sequential and args.samples_per_round < args.num_generations,
        "must be at least num_generations ({num_generations}), because the first round alone must fill a group",
        "Raise it, lower num_generations, or leave it unset",
    ),
    Rule(
        "min_positives",
        lambda args, mode: (
            mode.is_sequential
            and args.min_positives + mode.slot_rule.min_negatives > args.samples_per_round * args.max_rounds
        ),
        "and min_negatives ({min_negatives}) can never be reached within samples_per_round ({samples_per_round}) * "
        "max_rounds ({max_rounds}) rollouts",
        "Lower min_positives and min_negatives, or raise max_rounds",
    ),
    Rule(
        "min_samples",
        lambda args, mode: (
            mode.is_estimated
            and args.min_samples < args.max_samples
            and args.num_generations in (args.min_samples, args.max_samples)
        ),
        "and max_samples ({max_samples}) give every prompt the same number of rollouts, because num_generations "
        "({num_generations}) is the mean",
        "Use min_samples < num_generations < max_samples",
    ),
    # Combinations that are not defined
    Rule(
        "scale_rewards",
        lambda args, mode: args.scale_rewards == "group" and args.baseline == "batch",
        "(or True) requires baseline='pool': dividing by the standard deviation of the group would bias the gradient "
        "of baseline='batch'",
        "Use scale_rewards='none' (False) or 'batch'",
    ),
    Rule(
        "multi_objective_aggregation",
        lambda args, mode: args.multi_objective_aggregation != "sum_then_normalize" and args.baseline == "batch",
        "requires baseline='pool'",
        "Use 'sum_then_normalize', or baseline='pool'",
    ),
    Rule(
        "prompt_weighting",
        lambda args, mode: mode.is_weighted and args.baseline == "batch",
        "requires baseline='pool': the pass rate of a prompt's own rollouts would bias the gradient of "
        "baseline='batch'",
        "Use prompt_weighting='none'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args, mode: args.zero_variance_groups == "resample" and args.max_rounds == 1,
        "requires max_rounds >= 2 (the maximum number of prompts per batch slot), got 1",
        "Raise max_rounds, or use zero_variance_groups='keep'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args, mode: args.zero_variance_groups == "resample" and args.adaptive_sampling == "est",
        "samples another prompt for as many rollouts, but adaptive_sampling='est' gives every prompt a different "
        "number",
        "Use 'uniform', 'seq-pos' or 'seq-balance'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args, mode: args.zero_variance_groups == "mask" and args.beta != 0 and args.loss_type in MEAN_OVER_ROWS,
        "with beta ({beta}) is not supported with loss_type='{loss_type}', which divides the KL term by the masked "
        "rows too",
        "Use loss_type='dapo', or zero_variance_groups='keep'",
    ),
    Rule(
        "max_staleness",
        lambda args, mode: args.max_staleness > 0 and mode.is_multi_round,
        "supports only modes with one sampling round per step",
        "Set max_staleness=0, or baseline='batch'",
    ),
    Rule(
        "max_staleness",
        lambda args, mode: args.max_staleness > 0 and not args.vllm_importance_sampling_correction,
        "requires vllm_importance_sampling_correction=True, because the rollouts come from earlier weights",
        "Set it, or max_staleness=0",
    ),
    Rule(
        "generation_kwargs",
        lambda args, mode: (
            args.use_vllm and not mode.trains_as_grpo and dict(args.generation_kwargs or {}).get("seed") is not None
        ),
        "must not contain 'seed' with vLLM, because all rounds of a prompt would have the same completions",
        "Remove it",
    ),
]


class Use(NamedTuple):
    """Options that have an effect in some modes only."""

    options: tuple[str, ...]
    is_used: Callable[[Any, Any], bool]
    needed: str
    decided_by: tuple[str, ...] = ("adaptive_sampling", "baseline")


USES = [
    Use(
        ("samples_per_round", "min_positives"),
        lambda args, mode: mode.is_sequential,
        "adaptive_sampling='seq-balance' or 'seq-pos'",
    ),
    Use(("retries",), lambda args, mode: args.baseline == "batch", "baseline='batch'"),
    Use(
        ("min_negatives",),
        lambda args, mode: args.adaptive_sampling == "seq-balance",
        "adaptive_sampling='seq-balance' ('seq-pos' counts successes only)",
    ),
    Use(
        ("max_rounds",),
        lambda args, mode: mode.is_sequential or args.zero_variance_groups == "resample",
        "adaptive_sampling='seq-balance' or 'seq-pos', or zero_variance_groups='resample'",
    ),
    Use(
        ("min_samples", "max_samples", "allocation_rule"),
        lambda args, mode: args.adaptive_sampling == "est",
        "adaptive_sampling='est'",
    ),
    Use(
        ("pass_rate_estimator",),
        lambda args, mode: args.adaptive_sampling == "est" or args.pass_rate_estimator == "ema",
        "adaptive_sampling='est' ('ema' alone also records pass rates in other modes)",
    ),
    Use(("zero_variance_groups",), lambda args, mode: args.baseline == "pool", "baseline='pool'"),
    Use(
        ("vllm_weight_sync", "max_staleness"),
        lambda args, mode: args.use_vllm and args.vllm_mode == "server",
        "use_vllm=True and vllm_mode='server'",
        ("use_vllm", "vllm_mode"),
    ),
]

# Values with which no other term of the loss acts on rows with advantage 0, which zero_variance_groups='skip' leaves
# out.
NEUTRAL_FOR_SKIP = {"beta": 0.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}


def check_rules(args: Any, mode: Any) -> None:
    """
    Check the fields of a configuration together.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]):
            The configuration, with all fields resolved, and its mode.

    Raises:
        `ValueError`: If a value is invalid, or has no effect in the chosen mode.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for use in USES:
        for name in use.options:
            if getattr(args, name) != defaults[name] and not use.is_used(args, mode):
                present = " and ".join(f"{option}={getattr(args, option)!r}" for option in use.decided_by)
                raise ValueError(
                    f"{name} ({getattr(args, name)!r}) is only used with {use.needed}, but {present}. Unset it, or "
                    "change these."
                )
    for name, minimum in MINIMA.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} ({value!r}) must be at least {minimum}. Leave it unset for the default.")
    for rule in RULES:
        if rule.is_violated(args, mode):
            mode = f"adaptive_sampling={args.adaptive_sampling!r} and baseline={args.baseline!r}"
            raise ValueError(
                f"{rule.option} ({getattr(args, rule.option)!r}) {rule.constraint.format_map(vars(args))} (with "
                f"{mode}). {rule.fix}."
            )
    if mode.is_estimated:
        try:
            check_budget(1, args.num_generations, min_samples=args.min_samples, max_samples=args.max_samples)
        except ValueError as error:
            raise ValueError(f"{error} The budget per prompt is num_generations ({args.num_generations}).") from error
    for name, neutral in NEUTRAL_FOR_SKIP.items():
        if args.zero_variance_groups == "skip" and getattr(args, name) != neutral:
            raise ValueError(
                f"zero_variance_groups='skip' requires {name}={neutral}, got {getattr(args, name)}, which acts on "
                "rows with advantage 0 too. Use zero_variance_groups='keep'."
            )
