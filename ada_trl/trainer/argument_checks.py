"""Checks of the trainer's arguments, made before a model is loaded or a server is contacted."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import ProcessorMixin
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig
from .config_checks import check_prompt_column, check_size


logger = get_logger(__name__)


def check_arguments(
    args: AdaGRPOConfig,
    train_dataset: Any,
    reward_funcs: Any,
    processing_class: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> None:
    """
    Check arguments of [`AdaGRPOTrainer`] before a model is loaded or a server is contacted.

    Raises:
        `ValueError`: for what the mode of sampling does not support, a data set without prompts, or an unknown
            `success_reward`.
    """
    check_support(args, rollout_func, environment_factory, processing_class)
    if environment_factory is None:  # which may bring the prompts and a reward
        check_prompt_column(train_dataset)
        check_size(args, train_dataset)
        names = _reward_names(reward_funcs)
        if names is not None:
            check_success_reward(args, names)


def check_support(args: AdaGRPOConfig, rollout_func: Any, environment_factory: Any, processing_class: Any) -> None:
    """
    Check the arguments of [`~trl.GRPOTrainer`] that only some modes support.

    Raises:
        `ValueError`: If an argument is not supported in the chosen mode.
    """
    if rollout_func is not None and not args.is_vanilla_grpo:
        remedy = "adaptive_sampling='uniform' and baseline='pool'"
        _refuse(args, "rollout_func", "a rollout function contains a separate sampling loop", remedy)
    if environment_factory is not None:
        _check_estimator(args, "environment_factory", "the environment adds to the prompt")
    if isinstance(processing_class, ProcessorMixin):
        _check_estimator(args, "a vision-language model", "the images are part of the prompt")


def _check_estimator(args: AdaGRPOConfig, name: str, reason: str) -> None:
    """
    Reject a value network that reads only the text of the prompt, if there is more to the prompt than text. If the user did
    not request it explicitly, fall back to success counts.
    """
    if not args.uses_value_network or (args.value_model is None and args.reuses_hidden_states):
        return
    if args.estimator_is_explicit or args.value_model is not None:
        _refuse(
            args,
            name,
            f"the value network reads only the text of the prompt, but {reason}",
            "pass_rate_estimator='ema'",
        )
    logger.info(
        f"pass_rate_estimator is set to 'ema': the value network reads only the text of the prompt, but with {name} {reason}."
    )
    args.pass_rate_estimator = "ema"


def check_success_reward(args: AdaGRPOConfig, reward_names: Sequence[str]) -> None:
    """
    Check that `success_reward` is a known reward function.

    Raises:
        `ValueError`: If it is not the name of exactly one reward function.
    """
    name = args.success_reward
    if name is not None and reward_names.count(name) != 1:
        raise ValueError(
            f"success_reward ({name!r}) must name exactly one reward function; this trainer has "
            f"{', '.join(map(repr, reward_names)) or 'none'}. Use one of these names, or leave success_reward unset."
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


def _refuse(args: AdaGRPOConfig, name: str, reason: str, remedy: str) -> None:
    raise ValueError(
        f"{name} is not supported with adaptive_sampling={args.adaptive_sampling!r}, baseline={args.baseline!r} and "
        f"pass_rate_estimator={args.pass_rate_estimator!r}: {reason}. Use {remedy}, or trl.GRPOTrainer."
    )
