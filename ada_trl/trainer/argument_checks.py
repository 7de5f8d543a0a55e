"""What the trainer's arguments show to be unsupported, refused before a model is loaded or a server is met."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import ProcessorMixin
from trl.trainer.utils import get_callable_name, get_config_model_id

from .ada_grpo_config import AdaGRPOConfig
from .config_checks import check_prompt_column


COUNTS_INSTEAD = "adaptive_sampling='seq-balance', or 'est' with pass_rate_estimator='counts'"


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
            `exit_reward`.
    """
    has_environment = given.get("environment_factory") is not None
    if not has_environment:
        check_prompt_column(given.get("train_dataset"))
        names = _reward_names(given.get("reward_funcs"))
        if names is not None:
            check_exit_reward(args, names)
    check_no_images(args, isinstance(given.get("processing_class"), ProcessorMixin))
    if not args.is_plain_grpo and given.get("rollout_func") is not None:
        remedy = "adaptive_sampling='uniform' and baseline='pool'"
        _refuse(args, "rollout_func", "it brings its own sampling loop", remedy)
    if args.uses_value_network and has_environment:
        _refuse(args, "environment_factory", "the value network reads the prompt alone", COUNTS_INSTEAD)


def check_no_images(args: AdaGRPOConfig, has_processor: bool) -> None:
    """
    Raises:
        `ValueError`: for a vision-language model with a value network; `has_processor` tells one.
    """
    if args.uses_value_network and has_processor:
        _refuse(args, "a vision-language model", "the value head does not see the images", COUNTS_INSTEAD)


def check_exit_reward(args: AdaGRPOConfig, reward_names: Sequence[str]) -> None:
    """
    Raises:
        `ValueError`: if `exit_reward` is not exactly one of the reward functions' names.
    """
    name = args.exit_reward
    if name is not None and reward_names.count(name) != 1:
        raise ValueError(
            f"exit_reward ({name!r}) must name exactly one reward function; this trainer has "
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
