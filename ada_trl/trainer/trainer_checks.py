"""
Checks of a trainer in its mode: of its arguments before a model is loaded or a server is contacted, and of the trainer
at the end of its construction and at the start of `train()`. (Rules for the options alone are in option_rules.py.)
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
from .ada_grpo_config import AdaGRPOConfig
from .mode import OF_CONSTRUCTION, WEIGHTED_SUM, Mode


logger = get_logger(__name__)

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come
# from the queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields
# them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")


def check_arguments(
    trainer: Any,
    base: type,
    args: AdaGRPOConfig,
    dataset: Any,
    rewards: Any,
    processor: Any,
    rollout_func: Any,
    envs: Any,
) -> None:
    """
    Check arguments of [`AdaGRPOTrainer`] that only some modes support, before a model is loaded or a server is
    contacted.

    Args:
        trainer ([`AdaGRPOTrainer`]), base (`type`), args ([`AdaGRPOConfig`]):
            The trainer with its mode, the class whose methods count as not overridden, and the configuration.
        dataset, rewards, processor, rollout_func, envs:
            `train_dataset`, `reward_funcs`, `processing_class`, `rollout_func` and `environment_factory`.

    Raises:
        `ValueError`: If an argument is not supported in the mode, or `success_reward` is missing or unknown.
    """
    mode = trainer.mode
    _check_support(trainer, base, args, dataset, rollout_func, envs is not None, isinstance(processor, ProcessorMixin))
    _check_own_advantages(trainer, args)
    check_size(args, mode, dataset)
    if envs is None:  # which may bring a reward
        names = _reward_names(rewards)
        if names is not None:
            check_success_reward(args, mode, names)
    elif dataset is None and mode.resamples_prompts:
        name = "retries" if mode.retries else "zero_variance_groups"
        raise ValueError(
            f"{name} ({getattr(mode, name)!r}) requires a train_dataset, because every reset of an environment "
            "without one is another problem. Pass a train_dataset, or set zero_variance_groups='keep' and retries=0."
        )


def check_trainer(trainer: Any, base: type) -> None:
    """
    The same for a constructed trainer, of which options, attributes and methods may have been set since, and what only
    a constructed one knows.
    """
    args, mode, has_environments = trainer.args, trainer.mode, trainer.environment_factories is not None
    has_images = trl_private.is_vision_language_model(trainer)
    _check_support(trainer, base, args, trainer.train_dataset, trainer.rollout_func, has_environments, has_images)
    check_scheduled(trainer)
    if mode.max_staleness and not trainer.vllm.samples_async:
        raise ValueError(
            f"max_staleness ({mode.max_staleness}) is not supported with tools, environments, or reward models under "
            "FSDP or DeepSpeed, because rollouts are requested one step ahead. Set max_staleness=0."
        )
    if mode.zero_variance_groups == "skip" and trainer.aux_loss_enabled:
        raise ValueError(
            "zero_variance_groups='skip' is not supported with the auxiliary loss of a Mixture-of-Experts model, "
            "which acts on all rows. Use zero_variance_groups='keep', or router_aux_loss_coef=0."
        )


def check_scheduled(trainer: Any) -> None:
    """The part of [`check_trainer`] that depends on options which a callback may change during training."""
    _check_own_advantages(trainer, trainer.args)
    check_success_reward(trainer.args, trainer.mode, trainer.reward_func_names, trainer.reward_weights.tolist())


def check_same_construction(args: AdaGRPOConfig, before: dict[str, Any]) -> None:
    """Check that the options which only the construction of a trainer reads have the values of that time."""
    for name in OF_CONSTRUCTION:
        if getattr(args, name) != before[name]:
            raise ValueError(
                f"{name} ({getattr(args, name)!r}) was {before[name]!r} when this trainer was built, which alone "
                f"reads it. Build another trainer, or set {name}={before[name]!r}."
            )


def _check_support(
    trainer: Any, base: type, args: AdaGRPOConfig, dataset: Any, rollout_func: Any, has_envs: bool, has_images: bool
) -> None:
    mode = trainer.mode
    _check_overrides(trainer, base, args)
    if rollout_func is not None and not (mode.trains_as_grpo and trainer.advantage_func is None):
        raise ValueError(
            f"rollout_func is not supported with adaptive_sampling={mode.adaptive_sampling!r} and "
            f"baseline={mode.baseline!r}: a rollout function contains a separate sampling loop. Use "
            "adaptive_sampling='uniform', baseline='pool' and prompt_weighting='none', or trl.GRPOTrainer."
        )
    if mode.pass_rate_estimator == "value" and (has_envs or has_images):
        name = "a vision-language model" if has_images else "environment_factory"
        raise ValueError(
            f"pass_rate_estimator ('value') is not supported with {name}: the value head reads only the text of the "
            "prompt. Use pass_rate_estimator='ema'."
        )
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if mode.uses_prompt_queue and isinstance(dataset, IterableDataset) and getattr(args, name) == "epoch":
            raise ValueError(
                f"{name} ('epoch') is not supported with a stream and retries, zero_variance_groups='resample' or "
                f"max_staleness=1, where the trainer does not see the end of an epoch. Set {name}='steps'."
            )


def check_success_reward(
    args: AdaGRPOConfig, mode: Mode, reward_names: Sequence[str], weights: Sequence[float] | None = None
) -> None:
    """
    Check that `success_reward` is the name of exactly one reward function, and set if successes decide how prompts are
    sampled or weighted and several functions have a weight: of `weights`, as TRL has completed them, or
    `reward_weights`.
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
            f"{constraint}, because {depends} on which rollouts are correct, and the sum of several rewards may "
            f"exceed positive_threshold without a correct answer. Set it, or use {alternative}.{rename}"
        )


def _reward_names(reward_funcs: Any) -> list[str] | None:
    """The names that TRL gives to the reward functions; `None` if there are none, or a model is not loaded yet."""
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
    Report that no step is run because the training dataset has only `found` rows: an error, except in the mode that
    equals GRPO, because [`~trl.GRPOTrainer`] accepts such a dataset.
    """
    text = (
        f"No training step can be run: each step needs {args.prompts_per_step} distinct prompts "
        f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), but the "
        f"training dataset has {found}. Use a smaller batch, more rollouts per prompt or a larger dataset."
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
                f"{type(trainer).__name__}.{name} would have no effect with "
                f"adaptive_sampling={mode.adaptive_sampling!r}, baseline={mode.baseline!r}, "
                f"zero_variance_groups={mode.zero_variance_groups!r} and max_staleness={mode.max_staleness}: "
                f"{reason}. Remove the override, or set {fix}."
            )


def _check_own_advantages(trainer: Any, args: AdaGRPOConfig) -> None:
    """Check that no option contradicts the user's advantages: has no effect, or decides before they are known."""
    name, advantage_func = trainer.own_advantages, trainer.advantage_func
    if name is not None and trainer.mode.zero_variance_groups == "resample":
        raise ValueError(
            f"zero_variance_groups ('resample') is not supported with {name}, because prompts are replaced by the "
            "variance of their rewards, before advantages are computed. Use 'keep', 'skip' or 'mask', which act on "
            "the computed advantages."
        )
    if advantage_func is None:
        return
    if not callable(advantage_func):
        raise ValueError(
            f"advantage_func ({advantage_func!r}) must be a function that takes `Rollouts` and returns one number for "
            "each."
        )
    replaced = {
        "scale_rewards": args.scale_rewards != "none",
        "multi_objective_aggregation": args.multi_objective_aggregation != "sum_then_normalize",
        "prompt_weighting": args.is_set("prompt_weighting") and trainer.mode.is_weighted,
    }
    for option, is_given in replaced.items():
        if is_given:
            raise ValueError(
                f"{option} ({getattr(args, option)!r}) has no effect with an advantage_func, which takes its place. "
                "Leave it unset."
            )


def has_whole_groups(dataset: Any, num_processes: int, rows: int, num_generations: int) -> bool:
    """
    Whether the rows of all processes, `rows` each, consist of whole groups, one after another. If the dataset of a
    prepared data loader is a stream, each process reads its own shards, and no group can span two of them.
    """
    reads_own_shards = num_processes > 1 and isinstance(dataset, IterableDataset)
    return not reads_own_shards or rows % num_generations == 0
