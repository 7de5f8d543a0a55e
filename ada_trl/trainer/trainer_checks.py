"""
Checks of a trainer in its mode: of its arguments before a model is loaded or a server is contacted, and of the trainer at the end
of its construction and at the start of `train()`. (Rules for the options alone are in option_rules.py.)
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..sampling.prompts import WITHOUT_QUEUE
from ..utils.logging import get_logger
from . import trl_private
from .ada_grpo_config import WEIGHTED_SUM, AdaGRPOConfig
from .mode import OF_CONSTRUCTION, Mode


logger = get_logger(__name__)

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come from the
# queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")


def check_arguments(
    trainer: Any,
    base: type,
    args: AdaGRPOConfig,
    *,
    train_dataset: Any,
    reward_funcs: Any,
    processing_class: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> None:
    """
    Check arguments of [`AdaGRPOTrainer`] that only some modes support, before a model is loaded or a server is contacted.

    Args:
        trainer ([`AdaGRPOTrainer`]), base (`type`), args ([`AdaGRPOConfig`]):
            The trainer with its mode, the class whose methods count as not overridden, and the configuration.
        The others as in [`AdaGRPOTrainer`].

    Raises:
        `ValueError`: If an argument is not supported in the mode, or `success_reward` is missing or unknown.
    """
    _check_in_mode(
        trainer,
        base,
        args,
        dataset=train_dataset,
        rollout_func=rollout_func,
        has_environments=environment_factory is not None,
        has_images=isinstance(processing_class, ProcessorMixin),
    )
    _check_own_advantages(trainer, args)
    check_size(args, trainer.mode, train_dataset)
    if environment_factory is None:  # which may bring a reward
        names = _reward_names(reward_funcs)
        if names is not None:
            check_success_reward(args, trainer.mode, names)
    elif train_dataset is None and trainer.mode.resamples_prompts:
        name = "retries" if args.retries else "zero_variance_groups"
        raise ValueError(
            f"{name} ({getattr(args, name)!r}) requires a train_dataset, because every reset of an environment without one is "
            "another problem. Pass a train_dataset, or set zero_variance_groups='keep' and retries=0."
        )


def check_trainer(trainer: Any, base: type) -> None:
    """
    The same for a trainer, of which options, attributes and methods may have been set since its construction, and what only a
    constructed trainer knows.

    Raises:
        `ValueError`: as [`check_arguments`].
    """
    args, mode = trainer.args, trainer.mode
    _check_in_mode(
        trainer,
        base,
        args,
        dataset=trainer.train_dataset,
        rollout_func=trainer.rollout_func,
        has_environments=trainer.environment_factories is not None,
        has_images=trl_private.is_vision_language_model(trainer),
    )
    check_scheduled(trainer)
    if mode.max_staleness and not trainer.vllm.samples_async:
        raise ValueError(
            f"max_staleness ({mode.max_staleness}) is not supported with tools, environments, or reward models under FSDP or "
            "DeepSpeed, because rollouts are requested one step ahead. Set max_staleness=0."
        )
    if mode.zero_variance_groups == "skip" and trainer.aux_loss_enabled:
        raise ValueError(
            "zero_variance_groups='skip' is not supported with the auxiliary loss of a Mixture-of-Experts model, which acts on all "
            "rows. Use zero_variance_groups='keep', or router_aux_loss_coef=0."
        )


def check_scheduled(trainer: Any) -> None:
    """The part of [`check_trainer`] that depends on options which a callback may change during training."""
    _check_own_advantages(trainer, trainer.args)
    check_success_reward(trainer.args, trainer.mode, trainer.reward_func_names, trainer.reward_weights.tolist())


def check_same_construction(args: AdaGRPOConfig, before: dict[str, Any]) -> None:
    """
    Check that options which only the construction of a trainer reads have the values that they had then, `before`.

    Raises:
        `ValueError`: If one was set, or follows from others that were set.
    """
    for name in OF_CONSTRUCTION:
        if getattr(args, name) != before[name]:
            raise ValueError(
                f"{name} ({getattr(args, name)!r}) was {before[name]!r} when this trainer was built, which alone reads it. Build "
                f"another trainer, or set {name}={before[name]!r}."
            )


def _check_in_mode(
    trainer: Any,
    base: type,
    args: AdaGRPOConfig,
    *,
    dataset: Any,
    rollout_func: Any,
    has_environments: bool,
    has_images: bool,
) -> None:
    mode = trainer.mode
    _check_overrides(trainer, base, args)
    if rollout_func is not None and not (mode.trains_as_grpo and trainer.advantage_func is None):
        raise ValueError(
            f"rollout_func is not supported with adaptive_sampling={mode.adaptive_sampling!r} and baseline={mode.baseline!r}: a "
            "rollout function contains a separate sampling loop. Use adaptive_sampling='uniform', baseline='pool' and "
            "prompt_weighting='none', or trl.GRPOTrainer."
        )
    if mode.pass_rate_estimator == "value" and (has_environments or has_images):
        name = "a vision-language model" if has_images else "environment_factory"
        raise ValueError(
            f"pass_rate_estimator ('value') is not supported with {name}: the value head reads only the text of the prompt. "
            "Use pass_rate_estimator='ema'."
        )
    if mode.uses_prompt_queue and isinstance(dataset, IterableDataset):
        for name in ("save_strategy", "eval_strategy", "logging_strategy"):
            if getattr(args, name) == "epoch":
                raise ValueError(
                    f"{name} ('epoch') is not supported with a stream and retries, zero_variance_groups='resample' or "
                    f"max_staleness=1, where the trainer does not see the end of an epoch. Set {name}='steps'."
                )


def check_success_reward(
    args: AdaGRPOConfig, mode: Mode, reward_names: Sequence[str], weights: Sequence[float] | None = None
) -> None:
    """
    Check that it is known which reward decides whether a rollout is a success.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]), reward_names (`Sequence[str]`):
            Configuration, its mode, and names of the reward functions.
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
    if name is None and mode.needs_successes and sum(weight != 0 for weight in weights) > 1:
        depends = (
            f"adaptive_sampling={args.adaptive_sampling!r} with prompt_weighting={args.prompt_weighting!r} depends"
        )
        alternative = "baseline='batch'"
        if args.retries:
            depends, alternative = "retries depend", "retries=0"
        elif args.baseline == "batch":
            alternative = "adaptive_sampling='uniform'"
        raise ValueError(
            f"{constraint}, because {depends} on which rollouts are correct, and the sum of several rewards may exceed "
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


def check_size(args: AdaGRPOConfig, mode: Mode, dataset: Any) -> None:
    """Check that the training dataset has enough rows for one step, see [`report_too_few_prompts`]."""
    if isinstance(dataset, Dataset) and len(dataset) < args.prompts_per_step:
        report_too_few_prompts(args, mode, f"only {len(dataset)}")


def report_too_few_prompts(args: AdaGRPOConfig, mode: Mode, found: str) -> None:
    """
    Report that the training dataset has fewer rows than a step has prompts, so that no step is run.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]):
            Configuration of the run, and its mode.
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
    if not mode.trains_as_grpo:
        raise ValueError(text)
    logger.warning(text)


def _check_overrides(trainer: GRPOTrainer, base: type, args: AdaGRPOConfig) -> None:
    """Check that no override of a subclass is without effect in the mode, which does not call some methods."""
    mode = trainer.mode
    unused: list[tuple[str, str, str]] = []
    if mode.uses_prompt_queue:
        reason = "prompts come from the prompt queue instead of the data loader"
        unused += [(name, reason, WITHOUT_QUEUE) for name in DATA_LOADING]
    if args.use_vllm and args.vllm_mode == "server" and (mode.is_multi_round or mode.max_staleness):
        reason = "completions are requested from the server one by one"
        fix = "max_staleness=0 and a mode with one round per step, such as baseline='batch'"
        unused.append(("_generate_single_turn", reason, fix))
    for name, reason, fix in unused:
        if name in trainer.__dict__ or getattr(type(trainer), name) is not getattr(base, name):
            raise ValueError(
                f"{type(trainer).__name__}.{name} would have no effect with adaptive_sampling={mode.adaptive_sampling!r}, "
                f"baseline={mode.baseline!r}, zero_variance_groups={mode.zero_variance_groups!r} and max_staleness="
                f"{mode.max_staleness}: {reason}. Remove the override, or set {fix}."
            )


def _check_own_advantages(trainer: Any, args: AdaGRPOConfig) -> None:
    """Check that no option contradicts the user's advantages: has no effect, or decides before they are known."""
    name, advantage_func = trainer.own_advantages, trainer.advantage_func
    if name is not None and trainer.mode.zero_variance_groups == "resample":
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
        "prompt_weighting": args.is_set("prompt_weighting") and trainer.mode.is_weighted,
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
