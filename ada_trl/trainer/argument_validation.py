"""Checks of the arguments of [`AdaGRPOTrainer`]. Every error states the value, the constraint and a fix."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import is_conversational
from trl.trainer.utils import get_callable_name, get_config_model_id, identity

from ..utils.logging import get_logger


logger = get_logger(__name__)

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come from the
# queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_get_collator_with_removed_columns")


def check_size(args: GRPOConfig, dataset: Any) -> None:
    """
    Check that the training dataset has enough rows for one step.

    Raises:
        `ValueError`: If it has fewer rows than a step has prompts, so that no step would be run. In the mode that equals
            GRPO it is a warning, because [`~trl.GRPOTrainer`] accepts such a dataset.
    """
    prompts = args.prompts_per_step
    if not isinstance(dataset, Dataset) or len(dataset) >= prompts:
        return
    words = (
        f"Each step needs {prompts} distinct prompts (generation_batch_size {args.generation_batch_size} / num_generations "
        f"{args.num_generations}), but the training dataset has only {len(dataset)}. Use a smaller batch, more rollouts "
        "per prompt or a larger dataset."
    )
    if not args.is_vanilla_grpo:
        raise ValueError(words)
    logger.warning(f"{words} No training step would be run.")


def report_no_step(args: GRPOConfig) -> None:
    """
    Report that a streaming dataset has ended before the first step. Its length is not known at construction.

    Raises:
        `ValueError`: Except in the mode that equals GRPO, in which it is a warning, as in [`check_size`].
    """
    words = (
        f"No training step was run: each step needs {args.prompts_per_step} prompts (generation_batch_size "
        f"{args.generation_batch_size} / num_generations {args.num_generations}), but the streaming training dataset has "
        "fewer. Use a smaller batch, more rollouts per prompt or a larger dataset."
    )
    if not args.is_vanilla_grpo:
        raise ValueError(words)
    logger.warning(words)


def check_prompt_column(dataset: Any) -> None:
    """
    Check that the training dataset has a column `prompt`, as far as that is known without streaming it.

    Raises:
        `ValueError`: If it has no such column.
    """
    columns = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None
    if not columns or "prompt" in columns:
        return
    if isinstance(dataset, Dataset) and len(dataset) and "prompt" in dataset[0]:  # added by `with_transform`
        return
    raise ValueError(
        f"The training dataset has no column 'prompt' (it has {', '.join(map(repr, columns))}). Rename the column "
        "that holds the prompts with `dataset.rename_column(..., 'prompt')`."
    )


def check_arguments(
    args: GRPOConfig,
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


def check_support(args: GRPOConfig, rollout_func: Any, environment_factory: Any, processing_class: Any) -> None:
    """
    Check the arguments of [`~trl.GRPOTrainer`] that only some modes support.

    Raises:
        `ValueError`: If an argument is not supported in the chosen mode.
    """
    if rollout_func is not None and not args.is_vanilla_grpo:
        remedy = "adaptive_sampling='uniform' and baseline='pool'"
        _reject_argument(args, "rollout_func", "a rollout function contains a separate sampling loop", remedy)
    if environment_factory is not None:
        _check_estimator(args, "environment_factory", "the environment adds to the prompt")
    if isinstance(processing_class, ProcessorMixin):
        _check_estimator(args, "a vision-language model", "the images are part of the prompt")


def _check_estimator(args: GRPOConfig, name: str, reason: str) -> None:
    """
    Reject a value network that reads only the text of the prompt, if there is more to the prompt than text. If the user did
    not request it explicitly, fall back to success counts.
    """
    if not args.uses_value_network or (args.value_model is None and args.reuses_hidden_states):
        return
    if args.estimator_is_explicit or args.value_model is not None:
        _reject_argument(
            args,
            name,
            f"the value network reads only the text of the prompt, but {reason}",
            "pass_rate_estimator='ema'",
        )
    logger.info(
        f"pass_rate_estimator is set to 'ema': the value network reads only the text of the prompt, but with {name} {reason}."
    )
    args.pass_rate_estimator = "ema"


def check_success_reward(args: GRPOConfig, reward_names: Sequence[str]) -> None:
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


def _reject_argument(args: GRPOConfig, name: str, reason: str, remedy: str) -> None:
    raise ValueError(
        f"{name} is not supported with adaptive_sampling={args.adaptive_sampling!r}, baseline={args.baseline!r} and "
        f"pass_rate_estimator={args.pass_rate_estimator!r}: {reason}. Use {remedy}, or trl.GRPOTrainer."
    )


def check_overrides(trainer: GRPOTrainer, base: type, args: GRPOConfig) -> None:
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
    if args.uses_prompt_queue:
        reason = "prompts come from the prompt queue instead of the data loader"
        remedy = (
            "zero_variance_groups='keep', prompt_oversampling=1, max_staleness=0 and, in Seq modes, baseline='pool'"
        )
        for name in DATA_LOADING:
            if is_overridden(trainer, base, name):
                _reject_override(trainer, args, name, reason, remedy)
        if getattr(trainer, "data_collator", identity) is not identity:
            _reject_override(trainer, args, "data_collator", reason, remedy)
    if args.use_vllm and args.vllm_mode == "server" and (args.is_multi_round or args.max_staleness):
        if is_overridden(trainer, base, "_generate_single_turn"):
            reason = "completions are requested from the server one by one"
            remedy = "max_staleness=0 and a mode with one round per step, such as baseline='batch'"
            _reject_override(trainer, args, "_generate_single_turn", reason, remedy)


def is_overridden(trainer: GRPOTrainer, base: type, name: str) -> bool:
    """Whether a subclass of `base`, or an attribute of the instance, replaces the method `name`."""
    return name in trainer.__dict__ or getattr(type(trainer), name) is not getattr(base, name)


def _reject_override(trainer: GRPOTrainer, args: GRPOConfig, name: str, reason: str, remedy: str) -> None:
    raise ValueError(
        f"{type(trainer).__name__}.{name} would have no effect with adaptive_sampling={args.adaptive_sampling!r}, "
        f"baseline={args.baseline!r}, zero_variance_groups={args.zero_variance_groups!r}, prompt_oversampling="
        f"{args.prompt_oversampling} and max_staleness={args.max_staleness}: {reason}. Remove the override, or set {remedy}."
    )


def check_trainable(model: nn.Module) -> None:
    """
    Check that the model can be trained at all.

    Raises:
        `ValueError`: If none of its parameters requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"The model ({type(model).__name__}) has 0 trainable parameters, so that nothing would be trained. Load a PEFT "
            "adapter with PeftModel.from_pretrained(..., is_trainable=True), or pass a peft_config."
        )


def check_chat_template(trainer: GRPOTrainer) -> None:
    """
    Check that conversational prompts can be rendered, as far as the format of the prompts is known without streaming them.

    Raises:
        `ValueError`: If the prompts are conversational and the tokenizer has no chat template.
    """
    tokenizer, dataset = trainer.processing_class, trainer.train_dataset
    has_template = getattr(tokenizer, "chat_template", None) or trainer.chat_template
    if has_template or trainer.rollout_func is not None or "chat_template" in trainer.chat_template_kwargs:
        return
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    prompt = dataset[0].get("prompt")
    if prompt is not None and is_conversational({"prompt": prompt}):
        raise ValueError(
            f"The prompts of the training dataset are conversational, but {type(tokenizer).__name__} has no chat template "
            "(chat_template=None). Set tokenizer.chat_template, use an instruction-tuned checkpoint, or pass prompts as strings."
        )
