"""Checks of the trainer's arguments, of overrides, and of what an advantage function returns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..core.advantages import MAX_ADVANTAGE
from ..sampling.prompts import WITHOUT_QUEUE
from ..utils.logging import get_logger
from .ada_grpo_config import WEIGHTED_SUM, AdaGRPOConfig


logger = get_logger(__name__)

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come from the
# queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")


def check_arguments(
    args: AdaGRPOConfig,
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
    check_size(args, train_dataset)
    if args.uses_prompt_queue and isinstance(train_dataset, IterableDataset):
        for name in ("save_strategy", "eval_strategy", "logging_strategy"):
            if getattr(args, name) == "epoch":
                raise ValueError(
                    f"{name} ('epoch') is not supported with a stream and retries, zero_variance_groups='resample' or "
                    f"max_staleness=1, where the trainer does not see the end of an epoch. Set {name}='steps'."
                )
    if environment_factory is None:  # which may bring a reward
        names = _reward_names(reward_funcs)
        if names is not None:
            check_success_reward(args, names)
    elif train_dataset is None and args.resamples_prompts:
        name = "retries" if args.retries else "zero_variance_groups"
        raise ValueError(
            f"{name} ({getattr(args, name)!r}) requires a train_dataset, because every reset of an environment without one is "
            "another problem. Pass a train_dataset, or set zero_variance_groups='keep' and retries=0."
        )


def check_value_head(args: AdaGRPOConfig, has_environments: bool, has_images: bool) -> None:
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
    args: AdaGRPOConfig, reward_names: Sequence[str], weights: Sequence[float] | None = None
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
    name = args.success_reward
    choices = [reward for reward in reward_names if reward_names.count(reward) == 1] + [WEIGHTED_SUM]
    constraint = f"success_reward ({name!r}) must be {' or '.join(map(repr, choices))}"
    repeated = sorted(set(reward_names) - set(choices))
    rename = (
        f" Functions that share a name ({', '.join(repeated)}) need different names to be chosen." if repeated else ""
    )
    if name is not None and name not in choices:
        raise ValueError(
            f"{constraint}, the name of one reward function or the weighted sum of all. Use one of these.{rename}"
        )
    weights = weights or args.reward_weights or [1.0] * len(reward_names)
    if len(weights) != len(reward_names):
        return  # GRPOTrainer reports it
    if name is None and args.needs_successes and sum(weight != 0 for weight in weights) > 1:
        mode = f"adaptive_sampling={args.adaptive_sampling!r} with prompt_weighting={args.prompt_weighting!r} depends"
        alternative = "baseline='batch'"
        if args.retries:
            mode, alternative = "retries depend", "retries=0"
        elif args.baseline == "batch":
            alternative = "adaptive_sampling='uniform'"
        raise ValueError(
            f"{constraint}, because {mode} on which rollouts are correct, and the sum of several rewards may exceed "
            f"positive_threshold without a correct answer. Set it, or use {alternative}.{rename}"
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


def check_size(args: AdaGRPOConfig, dataset: Any) -> None:
    """Check that the training dataset has enough rows for one step, see [`report_too_few_prompts`]."""
    if isinstance(dataset, Dataset) and len(dataset) < args.prompts_per_step:
        report_too_few_prompts(args, f"only {len(dataset)}")


def report_too_few_prompts(args: AdaGRPOConfig, found: str) -> None:
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


def check_overrides(trainer: GRPOTrainer, base: type, args: AdaGRPOConfig) -> None:
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


def check_own_advantages(args: AdaGRPOConfig, name: str | None, advantage_func: Any) -> None:
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


def has_whole_groups(dataset: Any, num_processes: int, rows: int, num_generations: int) -> bool:
    """
    Whether the rows of all processes consist of whole groups, one after another.

    Args:
        dataset (`Any`):
            Dataset of a prepared data loader. If it is a stream with at least as many shards as there are processes, each of these
            reads its own shards, and no group can span two of them.
        num_processes (`int`), rows (`int`), num_generations (`int`):
            Processes, rows of one of them, and rows of a group.
    """
    reads_own_shards = num_processes > 1 and isinstance(dataset, IterableDataset)
    return not reads_own_shards or rows % num_generations == 0


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
    if isinstance(advantages, np.ma.MaskedArray):
        advantages = advantages.filled(0)
    if isinstance(advantages, pd.Series) and not advantages.index.equals(pd.RangeIndex(len(advantages))):
        raise ValueError(
            f"{name} returned a pandas Series whose index is not 0, 1, …, {len(advantages) - 1}, but advantages are matched with "
            "rollouts by position. Return `.to_numpy()` of a Series in the order of the rollouts."
        )
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
