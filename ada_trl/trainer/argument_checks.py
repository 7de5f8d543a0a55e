"""What the trainer's arguments show to be unsupported, refused before a model is loaded or a server is met."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import ProcessorMixin
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig
from .config_checks import check_prompt_column, check_size


logger = get_logger(__name__)


def check_arguments(args: AdaGRPOConfig, given: Mapping[str, Any]) -> None:
    """
    Check the arguments of [`AdaGRPOTrainer`] that are not in its configuration.

    Args:
        args ([`AdaGRPOConfig`]):
            Its configuration.
        given (`Mapping[str, Any]`):
            All its arguments, by the names that they have in [`~trl.GRPOTrainer`].

    Raises:
        `ValueError`: for what the mode of sampling cannot honour, a data set without prompts, or an unknown
            `success_reward`.
    """
    check_support(args, given.get("rollout_func"), given.get("environment_factory"), given.get("processing_class"))
    if given.get("environment_factory") is None:  # which may bring the prompts and a reward
        check_prompt_column(given.get("train_dataset"))
        check_size(args, given.get("train_dataset"))
        names = _reward_names(given.get("reward_funcs"))
        if names is not None:
            check_success_reward(args, names)


def check_support(args: AdaGRPOConfig, rollout_func: Any, environment_factory: Any, processing_class: Any) -> None:
    """
    Raises:
        `ValueError`: for an argument of [`~trl.GRPOTrainer`] that the mode of sampling cannot honour.
    """
    if rollout_func is not None and not args.is_vanilla_grpo:
        remedy = "adaptive_sampling='uniform' and baseline='pool'"
        _refuse(args, "rollout_func", "it brings its own sampling loop", remedy)
    if environment_factory is not None:
        _check_estimator(args, "environment_factory", "the prompt is not all that a model reads there")
    if isinstance(processing_class, ProcessorMixin):
        _check_estimator(args, "a vision-language model", "the images belong to the prompt")


def _check_estimator(args: AdaGRPOConfig, name: str, reason: str) -> None:
    """A value network reads what generation does, or the prompt alone: then counts take its place, unless it was asked for."""
    if not args.uses_value_network or (args.value_model is None and args.reuses_hidden_states):
        return
    if args.estimator_is_explicit or args.value_model is not None or args.adaptive_sampling == "est-value":
        _refuse(args, name, f"the value network reads prompts alone, and {reason}", "pass_rate_estimator='ema'")
    logger.info(f"pass_rate_estimator is 'ema', since with {name} {reason}.")
    args.pass_rate_estimator = "ema"


def check_success_reward(args: AdaGRPOConfig, reward_names: Sequence[str]) -> None:
    """
    Raises:
        `ValueError`: if `success_reward` is not exactly one of the reward functions' names.
    """
    name = args.success_reward
    if name is not None and reward_names.count(name) != 1:
        raise ValueError(
            f"success_reward ({name!r}) must name exactly one reward function; this trainer has "
            f"{', '.join(map(repr, reward_names)) or 'none'}."
        )


def _reward_names(reward_funcs: Any) -> list[str] | None:
    """The names that TRL gives to the reward functions; `None` if there are none, or a model that it has yet to load."""
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
