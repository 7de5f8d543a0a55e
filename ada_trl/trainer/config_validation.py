"""Checks of the configuration. Every error states the value, the constraint and a fix."""

import dataclasses
import math
import os
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ..core.advantages import POWERS
from ..core.allocation import check_rule
from ..sampling.strategies import STRATEGIES, strategy_class
from ..utils.logging import get_logger


if TYPE_CHECKING:
    from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)


CHOICES = {
    "adaptive_sampling": tuple(STRATEGIES),
    "pass_rate_estimator": ("ema", "value", "ema+value"),
    "baseline": ("pool", "posterior", "batch"),
    "zero_variance_groups": ("keep", "mask", "skip", "resample"),
    "vllm_weight_sync": ("nccl", "lora", "disk"),
}


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
    needs_no_group = (
        args.baseline != "pool"
    )  # the advantage of a rollout does not depend on other rollouts of its prompt
    if args.adaptive_sampling is None:
        args.adaptive_sampling = "uniform" if needs_no_group else "seq-balance"
    if args.num_generations is None:
        args.num_generations = 1 if needs_no_group and args.adaptive_sampling == "uniform" else 4


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
    """Set the fields of `args` that are `None` to defaults that depend on the other fields."""
    strategy = strategy_class(args.adaptive_sampling, args.baseline)
    if args.samples_per_round is None and strategy.is_sequential:
        args.samples_per_round = args.num_generations * (1 if strategy.retries_across_steps else 2)
    # A command line passes numbers as strings.
    weighting: Any = strategy.default_weighting if args.prompt_weighting is None else args.prompt_weighting
    args.prompt_weighting = read_weighting(weighting)
    if strategy.uses_estimated_budgets:
        args.allocation_rule = check_rule(args.allocation_rule)  # type: ignore[assignment] # a name or a number
    if args.pass_rate_estimator is None and args.needs_pass_rate_estimates:
        args.pass_rate_estimator = "ema+value"
        args.estimator_is_explicit = False
    # GRPOConfig takes booleans.
    args.scale_rewards = {"true": "group", "false": "none"}.get(str(args.scale_rewards).lower(), args.scale_rewards)
    if args.vllm_weight_sync_dir is None:
        args.vllm_weight_sync_dir = os.path.join(args.output_dir, "vllm_weight_sync")


def check_config(args: "AdaGRPOConfig") -> None:
    """
    Check the fields of `args` together.

    Raises:
        `ValueError`: If a value is invalid, or has no effect in the chosen mode.
    """
    if args.scale_rewards not in ("none", "group", "batch"):
        raise ValueError(f"scale_rewards ({args.scale_rewards!r}) must be one of 'none', 'group', 'batch'.")
    if args.reward_weights is not None and not _are_finite(args.reward_weights):
        raise ValueError(
            f"reward_weights ({args.reward_weights!r}) must be a list of finite numbers, such as [1.0, 0.5]."
        )
    if not math.isfinite(args.positive_threshold):
        raise ValueError(
            f"positive_threshold ({args.positive_threshold}) must be finite: a rollout is positive if its reward "
            "is greater. Use 0.7 for binary rewards."
        )
    if args.num_generations == 1 and args.baseline == "pool":
        raise ValueError(
            "num_generations=1 requires baseline='batch' or 'posterior': the group mean is undefined for a single rollout. "
            "Set one of these, or num_generations >= 2."
        )
    _check_generation(args)
    _check_vllm(args)
    _check_estimates(args)
    _check_unused(args)
    _check_prompt_selection(args)
    if args.zero_variance_groups == "skip":
        _check_skipping(args)
    if args.baseline != "pool":
        _check_baseline(args)
    args.sampling_strategy  # noqa: B018 (its constructor checks the options together)


def _are_finite(values: Any) -> bool:
    try:
        return all(map(math.isfinite, values))
    except TypeError:  # not iterable, or not numbers
        return False


def _check_unused(args: "AdaGRPOConfig") -> None:
    """Reject options that are set but not used in the chosen mode."""
    strategy = strategy_class(args.adaptive_sampling, args.baseline)
    shared = {*strategy.options, *(("max_rounds",) if args.zero_variance_groups == "resample" else ())}
    modes = [([name for name in other.options if name not in shared], other.used_by) for other in STRATEGIES.values()]
    if not args.uses_value_network:
        needed = "pass_rate_estimator='value' or 'ema+value', in modes that estimate pass rates"
        modes.append((["value_model"], needed))
    if not args.tracks_pass_rates:
        needed = "'est', baseline='posterior', prompt_oversampling or pass_rate_estimator='ema'"
        modes.append((["ema_decay", "pass_rate_prior"], needed))
    if not args.selects_groups:
        modes.append((["selection_correction"], "adaptive_sampling='seq-balance' or 'seq-pos' and baseline='pool'"))
    if args.baseline != "pool":
        modes.append((["zero_variance_groups"], "baseline='pool'"))
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for names, needed in modes:
        for name in names:
            if getattr(args, name) != defaults[name]:
                raise ValueError(
                    f"{name} ({getattr(args, name)}) is only used with {needed}, but adaptive_sampling="
                    f"{args.adaptive_sampling!r} and baseline={args.baseline!r}. Unset it or change the mode."
                )


def read_weighting(weighting: Any) -> Any:
    """
    Return a name of `prompt_weighting` as it is, and a number as a float.

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


def _check_prompt_selection(args: "AdaGRPOConfig") -> None:
    """Check the options that select prompts."""
    for name in ("prompt_oversampling", "max_rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} ({getattr(args, name)}) must be at least 1.")
    strategy = strategy_class(args.adaptive_sampling, args.baseline)
    if args.zero_variance_groups == "resample" and args.max_rounds == 1:
        raise ValueError(
            "zero_variance_groups='resample' requires max_rounds >= 2 (the maximum number of prompts per batch slot), got "
            "1. Raise max_rounds, or use zero_variance_groups='keep'."
        )
    if args.zero_variance_groups == "resample" and strategy.uses_estimated_budgets:
        raise ValueError(
            "zero_variance_groups='resample' samples another prompt for as many rollouts, but adaptive_sampling="
            f"{args.adaptive_sampling!r} gives every prompt a different number. Use 'uniform', 'seq-pos' or 'seq-balance'."
        )
    if strategy.retries_across_steps and args.samples_per_round != args.num_generations:
        raise ValueError(
            f"samples_per_round ({args.samples_per_round}) must be num_generations ({args.num_generations}) with "
            f"baseline={args.baseline!r}, which trains on every rollout of a round. Leave samples_per_round unset."
        )


def _check_skipping(args: "AdaGRPOConfig") -> None:
    """Check that no other term of the loss acts on rows with advantage 0, which are left out."""
    needed = {
        "beta": (args.beta, 0.0),
        "entropy_coef": (args.entropy_coef, 0.0),
        "use_adaptive_entropy": (args.use_adaptive_entropy, False),
        "top_entropy_quantile": (args.top_entropy_quantile, 1.0),
    }
    for name, (value, neutral) in needed.items():
        if value != neutral:
            raise ValueError(
                f"zero_variance_groups='skip' requires {name}={neutral}, got {value}, which acts on rows with advantage 0 too. "
                "Use zero_variance_groups='keep'."
            )


def _check_baseline(args: "AdaGRPOConfig") -> None:
    """Check the options that are incompatible with `baseline="batch"` and `"posterior"`."""
    if args.scale_rewards == "group":
        raise ValueError(
            f"scale_rewards='group' (or True) requires baseline='pool', got baseline={args.baseline!r}: dividing by the "
            "standard deviation of the group would bias the gradient. Use scale_rewards='none' (False) or 'batch'."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} requires baseline='pool', got "
            f"baseline={args.baseline!r}. Use 'sum_then_normalize', or baseline='pool'."
        )
    if args.baseline == "batch" and not args.needs_pass_rate_estimates and args.prompt_weighting not in ("none", 1.0):
        raise ValueError(
            f"prompt_weighting ({args.prompt_weighting!r}) needs pass-rate estimates, which baseline='batch' does not "
            "compute. Use prompt_weighting='none', or baseline='posterior'."
        )


def _check_estimates(args: "AdaGRPOConfig") -> None:
    if args.pass_rate_estimator not in (None, "ema") and not args.needs_pass_rate_estimates:
        raise ValueError(
            f"pass_rate_estimator ({args.pass_rate_estimator!r}) is only used with adaptive_sampling='est', "
            f"baseline='posterior' or prompt_oversampling, but adaptive_sampling={args.adaptive_sampling!r} and "
            f"baseline={args.baseline!r}. Use 'ema' to record pass rates, or leave it unset."
        )
    if not 0 < args.ema_decay <= 1:
        raise ValueError(f"ema_decay ({args.ema_decay}) must be above 0 and at most 1. Use 1 for no discounting.")
    prior = args.pass_rate_prior
    if prior is not None and (len(prior) != 2 or not all(0 < value < math.inf for value in prior)):
        raise ValueError(
            f"pass_rate_prior ({prior}) must be two positive numbers (pseudo-counts of positives and negatives), "
            "such as [1.0, 16.0]."
        )


def _check_generation(args: "AdaGRPOConfig") -> None:
    """Check options in `generation_kwargs` that [`~trl.GRPOTrainer`] accepts and then fails with, or ignores."""
    options = args.generation_kwargs or {}
    if not isinstance(options, dict):
        raise ValueError(
            f"generation_kwargs ({options!r}) must be a mapping of options of `generate`. Write it as {{'repetition_penalty': 1.1}}."
        )
    for name in ("num_return_sequences", "n"):
        if options.get(name, 1) != 1:
            raise ValueError(
                f"generation_kwargs={{{name!r}: {options[name]}}} is not supported, because each row of the batch is one "
                "completion. Set num_generations instead."
            )
    if options.get("seed") is not None and args.use_vllm and not args.is_vanilla_grpo:
        raise ValueError(
            f"generation_kwargs={{'seed': {options['seed']}}} is not supported with vLLM, because all rounds of a prompt would have the "
            "same completions. Remove it."
        )
    if options.get("return_dict_in_generate") and not args.use_vllm:
        raise ValueError(
            "generation_kwargs={'return_dict_in_generate': True} is not supported, because GRPOTrainer reads the return value of "
            "`generate` as a tensor. Remove the option."
        )
    for name in ("stop_strings", "token_healing"):
        if options.get(name) not in (None, False) and not args.use_vllm:
            raise ValueError(
                f"generation_kwargs={{{name!r}: {options[name]!r}}} is not supported with use_vllm=False, because GRPOTrainer does "
                "not pass the tokenizer to `generate`. Use a stop token ('eos_token_id'), or use_vllm=True and "
                "generation_kwargs={'stop': [...]}."
            )


def _check_vllm(args: "AdaGRPOConfig") -> None:
    """Check the options of a vLLM server."""
    if args.vllm_request_timeout <= 0:
        raise ValueError(f"vllm_request_timeout ({args.vllm_request_timeout}) must be positive.")
    url = args.vllm_server_base_url
    if args.use_vllm and args.vllm_mode == "server" and url and not url.startswith(("http://", "https://")):
        raise ValueError(
            f"vllm_server_base_url ({url!r}) must start with 'http://' or 'https://'. Write 'http://{url}'."
        )
    if args.max_staleness not in (0, 1):
        raise ValueError(
            f"max_staleness ({args.max_staleness}) must be 0, or 1 to generate one step ahead of training."
        )
    for name, default in {"vllm_weight_sync": "nccl", "max_staleness": 0}.items():
        value = getattr(args, name)
        if value != default and not (args.use_vllm and args.vllm_mode == "server"):
            raise ValueError(
                f"{name}={value!r} requires a vLLM server, but use_vllm={args.use_vllm} and vllm_mode={args.vllm_mode!r}. "
                f"Set use_vllm=True and vllm_mode='server', or {name}={default!r}."
            )
    if args.max_staleness and not args.vllm_importance_sampling_correction:
        raise ValueError(
            f"max_staleness={args.max_staleness} requires vllm_importance_sampling_correction=True, because the rollouts "
            "come from earlier weights. Set it, or max_staleness=0."
        )
    if args.max_staleness and args.max_rounds_per_slot > 1:
        raise ValueError(
            f"max_staleness={args.max_staleness} supports only modes with one sampling round per step, but adaptive_sampling="
            f"{args.adaptive_sampling!r}, baseline={args.baseline!r} and zero_variance_groups={args.zero_variance_groups!r} "
            "have several. Set max_staleness=0, or baseline='batch' or 'posterior'."
        )
