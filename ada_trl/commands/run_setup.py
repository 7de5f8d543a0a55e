"""Everything that `train` and `check` need before they start: reward functions, model, data, trainer, checkpoint."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.files import last_checkpoint
from .errors import SETUP_ERRORS, UserError, one_line, user_errors
from .options import AdaScriptArguments
from .reward_funcs import load_reward_funcs, read_call


if TYPE_CHECKING:  # they import torch, which takes seconds
    from datasets import Dataset
    from transformers import PreTrainedModel
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig
    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer

logger = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "adapter_config.json")


def build_trainer(
    script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig"
) -> "AdaGRPOTrainer":
    """
    Load the dataset and the model, and build the trainer.

    Raises:
        `UserError`: if the model, the dataset, its split or a reward function is missing, or an option is rejected.
    """
    from trl import get_peft_config, get_quantization_config

    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
    from ..vllm.errors import VLLMServerError

    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    prepare(script_args, training_args, model_args)
    check_model(model_args.model_name_or_path, revision=model_args.model_revision)
    for name in reward_funcs:
        if isinstance(name, str):
            _check_reward_model(name)
    evaluate = training_args.eval_strategy != "no"
    with user_errors(*SETUP_ERRORS, TypeError):  # values of the wrong type in `datasets` and `model_init_kwargs`
        train_dataset, eval_dataset = load_data(script_args, evaluate)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    with user_errors(*SETUP_ERRORS, TypeError, VLLMServerError):
        trainer = AdaGRPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=reward_funcs,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    if trainer.accelerator.device.type == "cpu":
        make_lm_head_inputs_contiguous(trainer.model)
    return trainer


def check_model(name: str, option: str = "--model_name_or_path", revision: str | None = None) -> None:
    """
    Check that a model exists, before anything slow begins.

    Args:
        name (`str`):
            A directory with a model or an adapter, or a name on the hub.
        option (`str`):
            The option with this value, for messages.
        revision (`str`, *optional*):
            Branch, tag or commit on the hub.

    Raises:
        `UserError`: if it is neither, or the user has no access to it.
    """
    path = Path(name)
    if not path.exists():
        return _check_model_on_hub(name, option, revision)
    if any((path / file).is_file() for file in MODEL_FILES):
        return None
    last = last_checkpoint(path)
    hint = f"It has checkpoints; give {last}." if last else "A dataset belongs to --dataset_name."
    raise UserError(f"{option} {name!r} is not a model: it has no {' or '.join(MODEL_FILES)}. {hint}")


def _check_model_on_hub(name: str, option: str, revision: str | None) -> None:
    from huggingface_hub import errors, hf_hub_download

    try:
        hf_hub_download(name, MODEL_FILES[0], revision=revision)
    except (
        errors.HFValidationError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.LocalEntryNotFoundError,
    ) as error:
        raise UserError(
            f"{option} {name!r}{f' ({revision})' if revision else ''} is neither a directory here nor a model that the hub or its "
            f"cache provides ({one_line(error)[:200]}). Correct the name; for a private or gated model run `hf auth login`."
        ) from error
    except errors.EntryNotFoundError:
        return  # an adapter; loading it reports any other missing file


def _check_reward_model(name: str) -> None:
    import trl.rewards

    if name in dir(trl.rewards):
        raise UserError(f"reward_funcs {name!r} has no dot, so it names a reward model. Write trl.rewards.{name}.")
    try:
        check_model(name, "reward_funcs")
    except UserError as error:
        raise UserError(f"{error} A function needs its module: trl.rewards.accuracy_reward.") from error


def prepare(script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig") -> None:
    """Call the recipe's function that creates the model and the data, once per machine, if one of them is missing."""
    if not script_args.prepare:
        return
    function, arguments = read_call(script_args.prepare)
    if "output_dir" not in arguments:
        raise UserError(f"prepare ({script_args.prepare!r}) needs the keyword output_dir, the directory it writes to.")
    paths = [Path(name) for name in (model_args.model_name_or_path, script_args.dataset_name) if name]
    made = [path for path in paths if path.resolve().is_relative_to(Path(arguments["output_dir"]).resolve())]
    if not all(path.exists() for path in made):
        with training_args.main_process_first(desc="creating the model and the data"):
            if not all(path.exists() for path in made):  # another process may have made them meanwhile
                function(**arguments)


def load_data(script_args: AdaScriptArguments, evaluate: bool) -> tuple["Dataset", "Dataset | None"]:
    """
    Load the training set and, if `evaluate`, the evaluation set: from a file, a directory, the hub, or a mixture.

    Raises:
        `ValueError`: if the dataset or its split is missing.
    """
    from trl import get_dataset

    from ..recipes.math.prompts import with_prompts
    from ..utils.dataset_loading import load_splits, take_split

    name = script_args.dataset_name or "datasets"
    if script_args.datasets:
        if script_args.dataset_name:
            logger.warning("dataset_name %r is ignored, as datasets is set.", name)
        splits = get_dataset(script_args)
    else:
        splits = load_splits(name, script_args.dataset_config, streaming=script_args.dataset_streaming)

    def load(option: str) -> "Dataset":
        return with_prompts(take_split(splits, name, getattr(script_args, option), option=option))

    return load("dataset_train_split"), load("dataset_test_split") if evaluate else None


def checkpoint_to_resume(training_args: "AdaGRPOConfig") -> str | None:
    """
    Return the directory that `resume_from_checkpoint` names; `true` is the last checkpoint of `output_dir`.

    Raises:
        `UserError`: if there is none; the message names the last one of `output_dir`.
    """
    given = str(training_args.resume_from_checkpoint or "false")
    if given.lower() in ("false", "no"):
        return None
    last = last_checkpoint(training_args.output_dir)
    if given.lower() in ("true", "yes"):
        if last is None:
            raise UserError(
                f"resume_from_checkpoint is {given}, but {training_args.output_dir} has no checkpoint. Leave it out to "
                "start from the beginning, or correct output_dir."
            )
        return str(last)
    if not (Path(given) / "trainer_state.json").is_file():
        existing = f"the last one in {training_args.output_dir} is {last.name}" if last else "output_dir has none"
        raise UserError(f"resume_from_checkpoint {given!r} is not a checkpoint; {existing}. Correct the path.")
    return given


def make_lm_head_inputs_contiguous(model: "PreTrainedModel") -> None:
    """
    Make the inputs of the LM head contiguous: on a CPU, torch otherwise copies the head's weight once per row, which is
    half of a step's time with 64 rows and a vocabulary of 49,000 tokens.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda head, inputs: tuple(part.contiguous() for part in inputs))
