"""Checks of the arguments of [`AdaGRPOTrainer`]. Every error states the value, the constraint and a fix."""

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from torch.optim import Optimizer
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_callable_name, get_config_model_id

from ..sampling.prompt_sources import WITHOUT_QUEUE
from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)

# Methods of GRPOTrainer and Trainer that are not called, or not with the rows that are trained on, where prompts come from the
# queue: a step may sample other prompts than the data loader's, or needs them before the data loader yields them.
DATA_LOADING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")

# Arguments of reward functions that a column of the same name would collide with.
RESERVED_COLUMNS = ("prompts", "completions")


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
    if not args.is_vanilla_grpo:
        raise ValueError(text)
    logger.warning(text)


def check_columns(dataset: Any, name: str, reserved: Sequence[str]) -> None:
    """
    Check the columns of a dataset, as far as they are known without streaming it.

    Args:
        dataset (`Any`):
            The dataset.
        name (`str`):
            `"training"` or `"evaluation"`, for the error.
        reserved (`Sequence[str]`):
            Names of arguments of reward functions that a column of the same name would collide with.

    Raises:
        `ValueError`: If it has no column `prompt`, or one with a name that GRPOTrainer uses for an argument of reward functions.
    """
    _check_format(dataset, name)
    columns = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None
    if not columns:
        return
    if "prompt" not in columns and not _is_added_by_transform("prompt", dataset):
        raise ValueError(
            f"The {name} dataset has no column 'prompt' (it has {', '.join(map(repr, columns))}). Rename the column "
            "that holds the prompts with `dataset.rename_column(..., 'prompt')`."
        )
    for column in reserved:
        if column in columns:
            raise ValueError(
                f"The {name} dataset has a column {column!r}, but GRPOTrainer passes an argument of this name to reward functions. "
                f"Rename the column with `dataset.rename_column({column!r}, ...)`."
            )


def _check_format(dataset: Any, name: str) -> None:
    if isinstance(dataset, Dataset):
        kind = dataset.format["type"]
        has_tables = kind in ("arrow", "polars")
    else:
        kind = getattr(getattr(dataset, "_formatting", None), "format_type", None)  # there is no public name for it
        has_tables = kind in ("arrow", "polars", "pandas")
    if has_tables:
        raise ValueError(
            f"The {name} dataset has the format {kind!r}, in which a row is a table, but GRPOTrainer needs a dictionary for each "
            "row. Use `dataset.with_format(None)`."
        )


def _is_added_by_transform(column: str, dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and len(dataset) > 0 and column in dataset[0]


def tokenize_prompts(tokenize: Callable[[list], tuple], prompts: list) -> tuple:
    """
    Tokenize the prompts of a batch and name the prompt that is the cause of an error, unlike tokenizers and models.

    Args:
        tokenize (`Callable[[list], tuple]`):
            GRPOTrainer's method, which returns the token ids and other inputs of the model.
        prompts (`list`):
            Prompts of dataset rows.

    Raises:
        `ValueError`: If a prompt that is neither text nor a conversation cannot be tokenized, or the first prompt has no token.
    """
    try:
        prompt_ids, *others = tokenize(prompts)
    except Exception as error:  # tokenizers raise different errors for a value of an unknown type
        for prompt in prompts:
            if not isinstance(prompt, str) and not _is_conversation(prompt):
                raise ValueError(
                    f"The prompt {prompt!r} cannot be tokenized: it must be a string or a list of messages with 'role' and "
                    "'content'. Convert or remove the rows of the dataset with such prompts."
                ) from error
        if len({type(prompt) for prompt in prompts}) > 1:
            raise ValueError(
                f"The {len(prompts)} prompts of the batch cannot be tokenized: some are strings and some are lists of messages, but "
                "all must be of one kind. Convert the strings to [{'role': 'user', 'content': prompt}]."
            ) from error
        raise
    if not len(prompt_ids[0]):
        raise ValueError(
            f"The first prompt of the batch ({prompts[0]!r}) has 0 tokens, so that GRPOTrainer cannot pad the others. Remove the rows "
            "of the dataset with empty prompts."
        )
    return prompt_ids, *others


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]


def check_arguments(
    args: AdaGRPOConfig,
    train_dataset: Any,
    eval_dataset: Any,
    reward_funcs: Any,
    processing_class: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> None:
    """
    Check arguments of [`AdaGRPOTrainer`] before a model is loaded or a server is contacted.

    Raises:
        `ValueError`: If an argument is not supported in the chosen mode, the dataset has no prompts, or `success_reward` is
            unknown.
    """
    check_support(args, rollout_func, environment_factory, processing_class)
    use_counts_beyond_text(args, environment_factory, processing_class)
    if environment_factory is not None:  # which may bring the prompts and a reward
        if train_dataset is None:
            check_environment_prompts(args)
        return
    # Reward models read only prompts and completions of the batch.
    reserved = RESERVED_COLUMNS if not args.remove_unused_columns and _has_functions(reward_funcs) else ()
    check_columns(train_dataset, "training", reserved)
    check_size(args, train_dataset)
    if args.eval_strategy != "no":
        for dataset in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            check_columns(dataset, "evaluation", reserved)
    names = _reward_names(reward_funcs)
    if names is not None:
        check_success_reward(args, names)


def check_environment_prompts(args: AdaGRPOConfig) -> None:
    """
    Check options that choose between prompts, for an environment without a dataset.

    Raises:
        `ValueError`: If there is one, which would have no effect: TRL creates as many rows as a step samples.
    """
    if args.prompt_oversampling > 1:
        name, default = "prompt_oversampling", "1"
    elif args.zero_variance_groups == "resample":
        name, default = "zero_variance_groups", "'keep'"
    else:
        return
    raise ValueError(
        f"{name} ({getattr(args, name)!r}) requires a train_dataset, because with an environment alone there are only as many "
        f"prompts as a step samples. Pass a train_dataset with more rows, or set {name}={default}."
    )


def check_support(args: AdaGRPOConfig, rollout_func: Any, environment_factory: Any, processing_class: Any) -> None:
    """
    Check the arguments of [`~trl.GRPOTrainer`] that only some modes support.

    Raises:
        `ValueError`: If an argument is not supported in the chosen mode.
    """
    if rollout_func is not None and not args.is_vanilla_grpo:
        fix = "adaptive_sampling='uniform', baseline='pool' and prompt_weighting='none'"
        _reject_argument(args, "rollout_func", "a rollout function contains a separate sampling loop", fix)
    if args.estimator_is_explicit or args.value_model is not None:
        for name, reason in _beyond_text(args, environment_factory, processing_class).items():
            _reject_argument(args, name, reason, "pass_rate_estimator='ema'")


def use_counts_beyond_text(args: AdaGRPOConfig, environment_factory: Any, processing_class: Any) -> None:
    """Set `pass_rate_estimator="ema"`, if it is a default, where a value network would not read the whole prompt."""
    for name, reason in _beyond_text(args, environment_factory, processing_class).items():
        logger.info(f"pass_rate_estimator is set to 'ema' with {name}: {reason}.")
        args.pass_rate_estimator = "ema"


def _beyond_text(args: AdaGRPOConfig, environment_factory: Any, processing_class: Any) -> dict[str, str]:
    """By argument: why a value network that reads the text of the prompt only cannot estimate its pass rate."""
    if not args.uses_value_network or (args.value_model is None and args.reuses_hidden_states):
        return {}
    found = {}
    if environment_factory is not None:
        found["environment_factory"] = "the environment adds to the prompt"
    if isinstance(processing_class, ProcessorMixin):
        found["a vision-language model"] = "the images are part of the prompt"
    return {name: f"the value network reads only the text of the prompt, but {why}" for name, why in found.items()}


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
    names = []
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if reward_funcs is None or isinstance(function, str):
            return None
        if not callable(function):
            raise ValueError(
                f"reward_funcs ({reward_funcs!r}) must be a function, a model, the name of a model, or a list of these. Pass a list."
            )
        is_model = isinstance(function, nn.Module)
        name = get_config_model_id(function.config).split("/")[-1] if is_model else get_callable_name(function)
        names.append(name)
    return names


def _has_functions(reward_funcs: Any) -> bool:
    """Whether there is a reward function, to which the columns of the dataset are passed, and not only reward models."""
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    return any(callable(function) and not isinstance(function, nn.Module) for function in functions)


def _reject_argument(args: AdaGRPOConfig, name: str, reason: str, fix: str) -> None:
    raise ValueError(
        f"{name} is not supported with adaptive_sampling={args.adaptive_sampling!r}, baseline={args.baseline!r} and "
        f"pass_rate_estimator={args.pass_rate_estimator!r}: {reason}. Use {fix}, or trl.GRPOTrainer."
    )


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
    if args.uses_prompt_queue:
        reason = "prompts come from the prompt queue instead of the data loader"
        for name in DATA_LOADING:
            if is_overridden(trainer, base, name):
                _reject_override(trainer, args, name, reason, WITHOUT_QUEUE)
    if args.use_vllm and args.vllm_mode == "server" and (args.is_multi_round or args.max_staleness):
        if is_overridden(trainer, base, "_generate_single_turn"):
            reason = "completions are requested from the server one by one"
            fix = "max_staleness=0 and a mode with one round per step, such as baseline='batch'"
            _reject_override(trainer, args, "_generate_single_turn", reason, fix)


def is_overridden(trainer: GRPOTrainer, base: type, name: str) -> bool:
    """Whether a subclass of `base`, or an attribute of the instance, replaces the method `name`."""
    return name in trainer.__dict__ or getattr(type(trainer), name) is not getattr(base, name)


def _reject_override(trainer: GRPOTrainer, args: AdaGRPOConfig, name: str, reason: str, fix: str) -> None:
    raise ValueError(
        f"{type(trainer).__name__}.{name} would have no effect with adaptive_sampling={args.adaptive_sampling!r}, "
        f"baseline={args.baseline!r}, zero_variance_groups={args.zero_variance_groups!r}, prompt_oversampling="
        f"{args.prompt_oversampling} and max_staleness={args.max_staleness}: {reason}. Remove the override, or set {fix}."
    )


def read_settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """
    Return the options from which parts of the trainer are constructed. GRPOTrainer copies some of them to attributes, and in the
    mode that equals it only the size of the groups concerns other parts.
    """
    args, copied = trainer.args, ["num_generations"]
    if not args.is_vanilla_grpo:
        copied += ["scale_rewards", "multi_objective_aggregation"]
    names = AdaGRPOConfig.__annotations__.keys() - GRPOConfig.__dataclass_fields__.keys()
    settings = {f"args.{name}": getattr(args, name) for name in names}
    for name in copied:
        settings |= {f"args.{name}": getattr(args, name), name: getattr(trainer, name)}
    return settings


def check_settings(trainer: GRPOTrainer, before: dict[str, Any]) -> None:
    """
    Check that the options have not changed since the construction.

    Raises:
        `ValueError`: If one has, because it would have no effect, or an effect on a part of the trainer only.
    """
    now = read_settings(trainer)
    for name, value in before.items():
        if now[name] != value:
            raise ValueError(
                f"trainer.{name} was changed from {value!r} to {now[name]!r} after construction, which would not affect all parts of the "
                "trainer. Set it in the AdaGRPOConfig and construct another trainer."
            )


def check_trainable(model: nn.Module, optimizer: Optimizer | None) -> None:
    """
    Check that the model can be trained at all.

    Args:
        optimizer (`torch.optim.Optimizer`, *optional*):
            Optimizer of the user.

    Raises:
        `ValueError`: If none of its parameters requires a gradient, or the optimizer has none of those that do.
    """
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError(
            f"The model ({type(model).__name__}) has 0 trainable parameters, so that nothing would be trained. Load a PEFT "
            "adapter with PeftModel.from_pretrained(..., is_trainable=True), pass a peft_config, or set requires_grad."
        )
    given = [id(p) for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
    if given and trainable.isdisjoint(given):
        raise ValueError(
            f"The optimizer has {len(given)} parameters, but none of the {len(trainable)} trainable ones of the model, so that "
            "nothing would be trained. Create it from the model that is trained (after get_peft_model, instead of a peft_config)."
        )


def check_prompt_format(trainer: GRPOTrainer) -> None:
    """
    Check that the prompts can be rendered, as far as their format is known without streaming them.

    Raises:
        `ValueError`: If prompts are conversational and the tokenizer has no chat template, or strings although there are tools.
    """
    tokenizer = trainer.processing_class
    has_template = getattr(tokenizer, "chat_template", None) or trainer.chat_template
    has_template = has_template or trainer.rollout_func is not None or "chat_template" in trainer.chat_template_kwargs
    has_tools = bool(trainer.tools) and trainer.environment_factories is None  # an environment may change the prompt
    if has_template and not has_tools:
        return
    datasets = {"training": trainer.train_dataset}
    if trainer.args.eval_strategy != "no":
        sets = trainer.eval_dataset
        sets = sets if isinstance(sets, dict) else {"": sets}
        datasets |= {f"evaluation {name!r}" if name else "evaluation": dataset for name, dataset in sets.items()}
    for name, dataset in datasets.items():
        # A transform is not called, because it may draw random numbers.
        if not isinstance(dataset, Dataset) or not len(dataset) or dataset.format["type"] == "custom":
            continue
        row = dataset[0]  # of a dataset in Arrow or pandas format no dictionary
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if _is_conversation(prompt) and not has_template:
            raise ValueError(
                f"The prompts of the {name} dataset are conversational, but {type(tokenizer).__name__} has no chat template "
                "(chat_template=None). Set tokenizer.chat_template, use an instruction-tuned checkpoint, or pass prompts as strings."
            )
        if isinstance(prompt, str) and has_tools:
            raise ValueError(
                f"The prompts of the {name} dataset are strings (the first is {prompt!r}), but tools require conversations. Convert "
                "them to [{'role': 'user', 'content': prompt}]."
            )
