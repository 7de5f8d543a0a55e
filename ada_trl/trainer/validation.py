"""
Defaults that depend on other options, and checks of the options and of the trainer's arguments.

A check is here if an invalid value would go unnoticed, or would be noticed only after a model is loaded. Every error states the
value, the constraint and a fix.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..core.advantages import MAX_ADVANTAGE, POWERS
from ..core.allocation import check_budget, check_rule
from ..sampling.prompts import WITHOUT_QUEUE
from ..utils.logging import get_logger


if TYPE_CHECKING:
    from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)


CHOICES = {
    "adaptive_sampling": ("seq-balance", "seq-pos", "est", "uniform"),
    "pass_rate_estimator": ("ema", "value"),
    "baseline": ("pool", "batch"),
    "zero_variance_groups": ("keep", "mask", "skip", "resample"),
    "vllm_weight_sync": ("nccl", "lora", "disk"),
}

# Options and values of ada_trl 0.1 that do not exist any more, and what to use instead.
REMOVED = {
    "prompt_oversampling": "leave it out: prompts are sampled in the order of the dataset",
    "value_model": "use pass_rate_estimator='value', the value head on the policy",
    "pass_rate_prior": "leave it out: the prior is the paper's, Beta(1, 16)",
    "selection_correction": "leave it out, as in the paper",
    "baseline='posterior'": "use baseline='batch'",
    "pass_rate_estimator='ema+value'": "use 'ema' or 'value'",
}
# Fields whose default depends on other fields. They are derived again when a trainer is built, unless they were set.
DERIVED = (
    *("adaptive_sampling", "num_generations", "num_generations_eval", "samples_per_round", "max_rounds"),
    *("prompt_weighting", "pass_rate_estimator", "vllm_weight_sync_dir"),
)
WEIGHTED_SUM = (
    "sum"  # of `success_reward`: that of all reward functions, for example if each of them scores other prompts
)
MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that divide by the number of rows, masked or not
EVALUATED_GENERATIONS = 8  # completions per prompt in an evaluation where a training step samples one

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come from the
# queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")


def check_removed(options: Mapping[str, Any]) -> None:
    """
    Check that no option of an earlier version is set that was removed.

    Raises:
        `ValueError`: If one is.
    """
    for name, value in options.items():
        key = name if name in REMOVED else f"{name}={value!r}"
        if key in REMOVED:
            raise ValueError(
                f"{name} ({value!r}) was removed in ada_trl 0.2, because the benchmarks do not support it (see "
                f"docs/negative_results.md); {REMOVED[key]}."
            )


def check_types(args: "AdaGRPOConfig", annotations: Mapping[str, Any]) -> None:
    """
    Check choices and types first, because the checks below and those of TRL compute with the values.

    Args:
        args ([`AdaGRPOConfig`]):
            Configuration to check.
        annotations (`Mapping[str, Any]`):
            Types of its fields by name.

    Raises:
        `ValueError`: If a value is not one of the choices, or not a number where the type is a number.
    """
    for name, choices in CHOICES.items():
        value = getattr(args, name)
        if value not in choices and not (value is None and name in ("adaptive_sampling", "pass_rate_estimator")):
            raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}.")
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, annotation in annotations.items():
        kinds, value = set(get_args(annotation) or [annotation]), getattr(args, name)
        is_numeric = bool(kinds & {int, float}) and str not in kinds
        if not is_numeric or (value is None and (NoneType in kinds or defaults[name] is None)):
            continue
        if isinstance(value, np.integer | np.floating):
            value = value.item()
            setattr(args, name, value)  # checkpoints contain the arguments as JSON, which has no NumPy numbers
        if not isinstance(value, int | float) or (float not in kinds and value != int(value)):
            kind = "number" if float in kinds else "whole number"
            raise ValueError(f"{name} ({value!r}) must be a {kind}.")
    if args.num_generations is not None and args.num_generations < 1:
        raise ValueError(f"num_generations ({args.num_generations}) must be at least 1.")


def resolve_sampling(args: "AdaGRPOConfig") -> None:
    """Set `adaptive_sampling` and `num_generations`, if they are `None`, to the defaults for the baseline."""
    if args.adaptive_sampling is None:
        args.adaptive_sampling = "uniform" if args.baseline == "batch" else "seq-balance"
    if args.num_generations is None:
        # The advantage of a rollout does not depend on other rollouts of its prompt with the batch baseline.
        args.num_generations = 1 if args.baseline == "batch" and args.adaptive_sampling != "est" else 4


def placeholder_group_size(args: "AdaGRPOConfig") -> int:
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


def resolve_defaults(args: "AdaGRPOConfig") -> None:
    """Set the other fields of `args` that are `None` to defaults that depend on the other fields."""
    # GRPOConfig takes booleans.
    args.scale_rewards = {"true": "group", "false": "none"}.get(str(args.scale_rewards).lower(), args.scale_rewards)
    if args.max_rounds is None and (args.is_sequential or args.zero_variance_groups == "resample"):
        # At most 8 * num_generations rollouts of a prompt in a step, as with the paper's 4 rounds of 2 * num_generations.
        args.max_rounds = 8 if args.is_sequential else 4
    if args.samples_per_round is None and args.is_sequential:
        args.samples_per_round = args.num_generations
    if args.prompt_weighting is None:
        # The division by the standard deviation of the group is a prompt weight as well.
        is_weighted = args.adaptive_sampling != "uniform" and args.baseline == "pool" and args.scale_rewards != "group"
        args.prompt_weighting = "inverse_sqrt" if is_weighted else "none"
    args.prompt_weighting = _read_weighting(args.prompt_weighting)
    if args.adaptive_sampling == "est":
        args.allocation_rule = check_rule(args.allocation_rule)  # type: ignore[assignment] # a name or a number
        args.pass_rate_estimator = args.pass_rate_estimator or "ema"
    if args.vllm_weight_sync_dir is None:
        args.vllm_weight_sync_dir = os.path.join(args.output_dir, "vllm_weight_sync")
    if args.num_generations_eval is None and args.num_generations == 1:
        rows = args.per_device_eval_batch_size * args.world_size
        args.num_generations_eval = EVALUATED_GENERATIONS if rows % EVALUATED_GENERATIONS == 0 else None


def _read_weighting(weighting: Any) -> Any:
    """
    Return a name of `prompt_weighting` as it is, and a number, which a command line passes as a string, as a float.

    Raises:
        `ValueError`: If it is neither a name nor a number from 0 to 1.
    """
    if weighting in POWERS:
        return weighting
    try:
        alpha = float(weighting)
    except (TypeError, ValueError):
        alpha = math.nan
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"prompt_weighting ({weighting!r}) must be one of 'inverse_sqrt', 'inverse', 'none', or a number alpha "
            "from 0 to 1 for the weight p^(alpha - 1)."
        )
    return alpha


class Rule(NamedTuple):
    """A value that an option must not have: the condition for it, the constraint (with names of other options), and a fix."""

    option: str
    is_violated: Callable[["AdaGRPOConfig"], bool]
    constraint: str
    fix: str


RULES = [
    Rule(
        "scale_rewards",
        lambda args: args.scale_rewards not in ("none", "group", "batch"),
        "must be one of 'none', 'group', 'batch'",
        "Use 'none' as in the paper",
    ),
    Rule(
        "positive_threshold",
        lambda args: not math.isfinite(args.positive_threshold),
        "must be finite: a rollout is positive if its reward is greater",
        "Use 0.7 for binary rewards",
    ),
    Rule(
        "max_rounds",
        lambda args: args.max_rounds is not None and args.max_rounds < 1,
        "must be at least 1",
        "Leave it out for the default",
    ),
    Rule("retries", lambda args: args.retries < 0, "must be at least 0", "Use 3, or 0 for none"),
    Rule(
        "retries",
        lambda args: args.retries > 0 and args.adaptive_sampling == "est",
        "are not supported with adaptive_sampling='est', which gives unsolved prompts more rollouts in one step",
        "Leave one of them unset",
    ),
    Rule(
        "adaptive_sampling",
        lambda args: args.is_sequential and args.baseline == "batch",
        "requires baseline='pool'",
        "Use retries=3 instead, which samples unsolved prompts again in later steps, or baseline='pool'",
    ),
    Rule("min_samples", lambda args: args.min_samples < 1, "must be at least 1", "Use 2"),
    Rule("vllm_request_timeout", lambda args: args.vllm_request_timeout <= 0, "must be positive", "Use 300"),
    Rule(
        "max_staleness",
        lambda args: args.max_staleness not in (0, 1),
        "must be 0 or 1",
        "Use 1 to generate one step ahead",
    ),
    Rule(
        "num_generations",
        lambda args: args.generation_batch_size % args.num_generations != 0,
        "must divide generation_batch_size",
        "Change one of them",
    ),
    Rule(
        "num_generations",
        lambda args: args.num_generations == 1 and args.baseline == "pool",
        "requires baseline='batch' (also with an advantage_func): the group mean is undefined for a single rollout",
        "Set it, or num_generations >= 2",
    ),
    # Rounds
    Rule("min_positives", lambda args: args.min_positives < 1, "must be at least 1", "Leave it unset"),
    Rule("min_negatives", lambda args: args.min_negatives < 1, "must be at least 1", "Leave it unset"),
    Rule(
        "samples_per_round",
        lambda args: args.is_sequential and args.samples_per_round < args.num_generations,
        "must be at least num_generations ({num_generations}), because the first round alone must fill a group",
        "Raise it, lower num_generations, or leave it unset",
    ),
    Rule(
        "min_positives",
        lambda args: (
            args.is_sequential
            and args.min_positives + args.slot_rule.min_negatives > args.samples_per_round * args.max_rounds
        ),
        "and min_negatives ({min_negatives}) can never be reached within samples_per_round ({samples_per_round}) * max_rounds "
        "({max_rounds}) rollouts",
        "Lower min_positives and min_negatives, or raise max_rounds",
    ),
    # Combinations that are not defined
    Rule(
        "scale_rewards",
        lambda args: args.scale_rewards == "group" and args.baseline == "batch",
        "(or True) requires baseline='pool': dividing by the standard deviation of the group would bias the gradient of "
        "baseline='batch'",
        "Use scale_rewards='none' (False) or 'batch'",
    ),
    Rule(
        "multi_objective_aggregation",
        lambda args: args.multi_objective_aggregation != "sum_then_normalize" and args.baseline == "batch",
        "requires baseline='pool'",
        "Use 'sum_then_normalize', or baseline='pool'",
    ),
    Rule(
        "prompt_weighting",
        lambda args: args.prompt_weighting not in ("none", 1.0) and args.baseline == "batch",
        "requires baseline='pool': the pass rate of a prompt's own rollouts would bias the gradient of baseline='batch'",
        "Use prompt_weighting='none'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args: args.zero_variance_groups == "resample" and args.max_rounds == 1,
        "requires max_rounds >= 2 (the maximum number of prompts per batch slot), got 1",
        "Raise max_rounds, or use zero_variance_groups='keep'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args: args.zero_variance_groups == "resample" and args.adaptive_sampling == "est",
        "samples another prompt for as many rollouts, but adaptive_sampling='est' gives every prompt a different number",
        "Use 'uniform', 'seq-pos' or 'seq-balance'",
    ),
    Rule(
        "zero_variance_groups",
        lambda args: args.zero_variance_groups == "mask" and args.beta != 0 and args.loss_type in MEAN_OVER_ROWS,
        "with beta ({beta}) is not supported with loss_type='{loss_type}', which divides the KL term by the masked rows too",
        "Use loss_type='dapo', or zero_variance_groups='keep'",
    ),
    Rule(
        "max_staleness",
        lambda args: args.max_staleness > 0 and args.is_multi_round,
        "supports only modes with one sampling round per step",
        "Set max_staleness=0, or baseline='batch'",
    ),
    Rule(
        "max_staleness",
        lambda args: args.max_staleness > 0 and not args.vllm_importance_sampling_correction,
        "requires vllm_importance_sampling_correction=True, because the rollouts come from earlier weights",
        "Set it, or max_staleness=0",
    ),
    Rule(
        "generation_kwargs",
        lambda args: (
            args.use_vllm and not args.trains_as_grpo and dict(args.generation_kwargs or {}).get("seed") is not None
        ),
        "must not contain 'seed' with vLLM, because all rounds of a prompt would have the same completions",
        "Remove it",
    ),
]


class Use(NamedTuple):
    """Options that have an effect in some modes only."""

    options: tuple[str, ...]
    is_used: Callable[["AdaGRPOConfig"], bool]
    needed: str


USES = [
    Use(
        ("samples_per_round", "min_positives"),
        lambda args: args.is_sequential,
        "adaptive_sampling='seq-balance' or 'seq-pos'",
    ),
    Use(("retries",), lambda args: args.baseline == "batch", "baseline='batch'"),
    Use(
        ("min_negatives",),
        lambda args: args.adaptive_sampling == "seq-balance",
        "adaptive_sampling='seq-balance' ('seq-pos' counts successes only)",
    ),
    Use(
        ("max_rounds",),
        lambda args: args.is_sequential or args.zero_variance_groups == "resample",
        "adaptive_sampling='seq-balance' or 'seq-pos', or zero_variance_groups='resample'",
    ),
    Use(
        ("min_samples", "max_samples", "allocation_rule"),
        lambda args: args.adaptive_sampling == "est",
        "adaptive_sampling='est'",
    ),
    Use(
        ("pass_rate_estimator",),
        lambda args: args.adaptive_sampling == "est" or args.pass_rate_estimator == "ema",
        "adaptive_sampling='est' ('ema' alone also records pass rates in other modes)",
    ),
    Use(("zero_variance_groups",), lambda args: args.baseline == "pool", "baseline='pool'"),
    Use(
        ("vllm_weight_sync", "max_staleness"),
        lambda args: args.use_vllm and args.vllm_mode == "server",
        "use_vllm=True and vllm_mode='server'",
    ),
]

# Values with which no other term of the loss acts on rows with advantage 0, which zero_variance_groups='skip' leaves out.
NEUTRAL_FOR_SKIP = {"beta": 0.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0}


def check_rules(args: "AdaGRPOConfig") -> None:
    """
    Check the fields of `args` together.

    Raises:
        `ValueError`: If a value is invalid, or has no effect in the chosen mode.
    """
    for rule in RULES:
        if rule.is_violated(args):
            mode = f"adaptive_sampling={args.adaptive_sampling!r} and baseline={args.baseline!r}"
            raise ValueError(
                f"{rule.option} ({getattr(args, rule.option)!r}) {rule.constraint.format_map(vars(args))} (with {mode}). {rule.fix}."
            )
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for use in USES:
        for name in use.options:
            if getattr(args, name) != defaults[name] and not use.is_used(args):
                raise ValueError(
                    f"{name} ({getattr(args, name)!r}) is only used with {use.needed}, but adaptive_sampling="
                    f"{args.adaptive_sampling!r} and baseline={args.baseline!r}. Unset it or change the mode."
                )
    if args.uses_estimated_budgets:
        try:
            check_budget(1, args.num_generations, min_samples=args.min_samples, max_samples=args.max_samples)
        except ValueError as error:
            raise ValueError(f"{error} The budget per prompt is num_generations ({args.num_generations}).") from error
    for name, neutral in NEUTRAL_FOR_SKIP.items():
        if args.zero_variance_groups == "skip" and getattr(args, name) != neutral:
            raise ValueError(
                f"zero_variance_groups='skip' requires {name}={neutral}, got {getattr(args, name)}, which acts on rows with "
                "advantage 0 too. Use zero_variance_groups='keep'."
            )


# Arguments of the trainer


def check_arguments(
    args: "AdaGRPOConfig",
    *,
    train_dataset: Any,
    reward_funcs: Any,
    processing_class: Any,
    rollout_func: Any,
    environment_factory: Any,
    advantage_func: Any,
) -> None:
    """
    Check arguments of [`AdaGRPOTrainer`] that only some modes support, before a model is loaded or a server is contacted.

    Raises:
        `ValueError`: If an argument is not supported in the chosen mode, or `success_reward` is missing or unknown.
    """
    if rollout_func is not None and not (args.trains_as_grpo and advantage_func is None):
        raise ValueError(
            f"rollout_func is not supported with adaptive_sampling={args.adaptive_sampling!r} and baseline={args.baseline!r}: a "
            "rollout function contains a separate sampling loop. Use adaptive_sampling='uniform', baseline='pool' and "
            "prompt_weighting='none', or trl.GRPOTrainer."
        )
    check_value_head(args, environment_factory is not None, isinstance(processing_class, ProcessorMixin))
    if environment_factory is None:  # which may bring the prompts and a reward
        check_size(args, train_dataset)
        names = _reward_names(reward_funcs)
        if names is not None:
            check_success_reward(args, names)
    elif train_dataset is None and args.resamples_prompts:
        name = "retries" if args.retries else "zero_variance_groups"
        raise ValueError(
            f"{name} ({getattr(args, name)!r}) requires a train_dataset, because every reset of an environment without one is "
            "another problem. Pass a train_dataset, or set zero_variance_groups='keep' and retries=0."
        )


def check_value_head(args: "AdaGRPOConfig", has_environments: bool, has_images: bool) -> None:
    """
    Check that a value head reads the whole prompt.

    Raises:
        `ValueError`: If it would not, because an environment or an image adds to the text.
    """
    if args.pass_rate_estimator == "value" and (has_environments or has_images):
        name = "a vision-language model" if has_images else "environment_factory"
        raise ValueError(
            f"pass_rate_estimator ('value') is not supported with {name}: the value head reads only the text of the prompt. "
            "Use pass_rate_estimator='ema'."
        )


def check_success_reward(
    args: "AdaGRPOConfig", reward_names: Sequence[str], weights: Sequence[float] | None = None
) -> None:
    """
    Check that it is known which reward decides whether a rollout is a success.

    Args:
        args ([`AdaGRPOConfig`]), reward_names (`Sequence[str]`):
            Configuration, and names of the reward functions.
        weights (`Sequence[float]`, *optional*):
            Their weights as TRL has completed them, with those of environments; by default `reward_weights`.

    Raises:
        `ValueError`: If `success_reward` is not the name of exactly one reward function, or is unset although successes decide how
            prompts are sampled or weighted and several reward functions have a weight.
    """
    name, shown = args.success_reward, ", ".join(map(repr, reward_names)) or "none"
    if name not in (None, WEIGHTED_SUM) and reward_names.count(name) != 1:
        raise ValueError(
            f"success_reward ({name!r}) must name exactly one reward function; this trainer has {shown}. Use one of these "
            "names, or leave success_reward unset."
        )
    weights = weights or args.reward_weights or [1.0] * len(reward_names)
    if len(weights) != len(reward_names):
        return  # GRPOTrainer reports it
    if name is None and args.needs_successes and sum(weight != 0 for weight in weights) > 1:
        raise ValueError(
            f"success_reward (None) must be one of {shown} or {WEIGHTED_SUM!r}, because adaptive_sampling={args.adaptive_sampling!r} with "
            f"retries={args.retries} and prompt_weighting={args.prompt_weighting!r} depends on which rollouts are correct, and the sum of several rewards "
            "may exceed positive_threshold without a correct answer. Set it, or use baseline='batch' with retries=0."
        )


def _reward_names(reward_funcs: Any) -> list[str] | None:
    """Return the names that TRL gives to the reward functions, or `None` if there are none or a model is not loaded yet."""
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if any(function is None or isinstance(function, str) for function in functions):
        return None
    return [
        get_config_model_id(function.config).split("/")[-1]
        if isinstance(function, nn.Module)
        else get_callable_name(function)
        for function in functions
    ]


def check_size(args: "AdaGRPOConfig", dataset: Any) -> None:
    """Check that the training dataset has enough rows for one step, see [`report_too_few_prompts`]."""
    if isinstance(dataset, Dataset) and len(dataset) < args.prompts_per_step:
        report_too_few_prompts(args, f"only {len(dataset)}")


def report_too_few_prompts(args: "AdaGRPOConfig", found: str) -> None:
    """
    Report that the training dataset has fewer rows than a step has prompts, so that no step is run.

    Args:
        args ([`AdaGRPOConfig`]):
            Configuration of the run.
        found (`str`):
            Number of rows; the length of a stream is not known.

    Raises:
        `ValueError`: Except in the mode that equals GRPO, in which it is a warning, because [`~trl.GRPOTrainer`] accepts such a
            dataset.
    """
    text = (
        f"No training step can be run: each step needs {args.prompts_per_step} distinct prompts (generation_batch_size "
        f"{args.generation_batch_size} / num_generations {args.num_generations}), but the training dataset has {found}. Use a "
        "smaller batch, more rollouts per prompt or a larger dataset."
    )
    if not args.trains_as_grpo:
        raise ValueError(text)
    logger.warning(text)


def check_overrides(trainer: GRPOTrainer, base: type, args: "AdaGRPOConfig") -> None:
    """
    Check that no override of a subclass is without effect in the chosen mode.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, before or after its construction.
        base (`type`):
            The class whose methods count as not overridden.

    Raises:
        `ValueError`: If a method is overridden that the mode does not call.
    """
    unused: list[tuple[str, str, str]] = []
    if args.uses_prompt_queue:
        reason = "prompts come from the prompt queue instead of the data loader"
        unused += [(name, reason, WITHOUT_QUEUE) for name in DATA_LOADING]
    if args.use_vllm and args.vllm_mode == "server" and (args.is_multi_round or args.max_staleness):
        reason = "completions are requested from the server one by one"
        fix = "max_staleness=0 and a mode with one round per step, such as baseline='batch'"
        unused.append(("_generate_single_turn", reason, fix))
    for name, reason, fix in unused:
        if name in trainer.__dict__ or getattr(type(trainer), name) is not getattr(base, name):
            raise ValueError(
                f"{type(trainer).__name__}.{name} would have no effect with adaptive_sampling={args.adaptive_sampling!r}, "
                f"baseline={args.baseline!r}, zero_variance_groups={args.zero_variance_groups!r} and max_staleness="
                f"{args.max_staleness}: {reason}. Remove the override, or set {fix}."
            )


def check_own_advantages(args: "AdaGRPOConfig", name: str | None, advantage_func: Any) -> None:
    """
    Check that options do not contradict the user's advantages.

    Args:
        args ([`AdaGRPOConfig`]):
            Configuration of the run.
        name (`str`, *optional*):
            Name of the user's function; `None` if there is none.
        advantage_func (`Any`):
            The argument of the trainer.

    Raises:
        `ValueError`: If an option would have no effect, or decides before the advantages are known.
    """
    if name is not None and args.zero_variance_groups == "resample":
        raise ValueError(
            f"zero_variance_groups ('resample') is not supported with {name}, because prompts are replaced by the variance of their "
            "rewards, before advantages are computed. Use 'keep', 'skip' or 'mask', which act on the computed advantages."
        )
    if advantage_func is None:
        return
    if not callable(advantage_func):
        raise ValueError(
            f"advantage_func ({advantage_func!r}) must be a function that takes `Rollouts` and returns one number for each."
        )
    replaced = {
        "scale_rewards": args.scale_rewards != "none",
        "multi_objective_aggregation": args.multi_objective_aggregation != "sum_then_normalize",
        "prompt_weighting": args.is_set("prompt_weighting") and args.prompt_weighting not in ("none", 1.0),
    }
    for option, is_given in replaced.items():
        if is_given:
            raise ValueError(
                f"{option} ({getattr(args, option)!r}) has no effect with an advantage_func, which takes its place. Leave it unset."
            )


def check_advantages(advantages: Any, name: str, num_rollouts: int) -> np.ndarray:
    """
    Return the advantages that the user's function `name` has returned, as an array.

    Raises:
        `ValueError`: If it is not one number per rollout that the loss can represent.
    """
    if isinstance(advantages, torch.Tensor):
        if advantages.requires_grad:
            raise ValueError(
                f"{name} returned a tensor with a gradient, but advantages are constants in the loss. Return `.detach()` of it."
            )
        advantages = advantages.cpu()
    try:
        values = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} returned {type(advantages).__name__}, which is no array of numbers: {error}."
        ) from error
    if values.shape != (num_rollouts,):
        raise ValueError(
            f"{name} returned an array of shape {values.shape}, but it must have the shape ({num_rollouts},): one advantage for each "
            "of the rollouts that it was given."
        )
    is_valid = np.abs(values) <= MAX_ADVANTAGE  # NaN is not
    if not is_valid.all():
        raise ValueError(
            f"{name} returned {values[~is_valid][0]} for rollout {np.flatnonzero(~is_valid)[0]}, but advantages must be finite and at "
            f"most {MAX_ADVANTAGE:g}, so that the loss does not overflow. Return 0 for rollouts without a reward (NaN in "
            "rollouts.reward_N)."
        )
    return values
