"""Everything that `train` and `check` need before they start: reward functions, model, data, trainer, checkpoint."""

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.files import last_checkpoint
from .errors import UserError, one_line, user_errors
from .options import AdaScriptArguments
from .reward_funcs import load_reward_funcs, read_call


if TYPE_CHECKING:  # they import torch, which takes seconds
    from datasets import Dataset
    from transformers import PreTrainedModel
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig
    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer

logger = logging.getLogger(__name__)


def build_trainer(
    script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig"
) -> "AdaGRPOTrainer":
    """
    Load the dataset and the model, and build the trainer.

    Raises:
        `UserError`: if the model, the dataset, its split, a reward function or vLLM is missing, or an option is rejected.
    """
    from trl import get_peft_config, get_quantization_config

    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
    from ..vllm.errors import VLLMServerError

    if training_args.use_vllm and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "use_vllm requires vLLM, which is not installed here. Install the extra: pip install 'ada_trl[vllm]'. With "
            "vllm_mode='server' also start a server; docs/vllm.md lists its flags."
        )
    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    prepare(script_args, training_args, model_args)
    with user_errors():
        train_dataset, eval_dataset = load_data(script_args, evaluate=training_args.eval_strategy != "no")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    try:
        with user_errors(ValueError, TypeError, ImportError, VLLMServerError):
            trainer = AdaGRPOTrainer(
                model=model_args.model_name_or_path,
                reward_funcs=reward_funcs,
                args=training_args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                quantization_config=get_quantization_config(model_args),
                peft_config=get_peft_config(model_args),
            )
    except OSError as error:  # without the name, if the hub is not available
        models = [model_args.model_name_or_path, *(name for name in reward_funcs if isinstance(name, str))]
        raise UserError(
            f"{' or '.join(map(repr, models))} cannot be loaded: {one_line(error)} Correct the name."
        ) from error
    if trainer.accelerator.device.type == "cpu":
        make_lm_head_inputs_contiguous(trainer.model)
    return trainer


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
    checkpoint = last if given.lower() in ("true", "yes") else Path(given)
    if checkpoint is None or not (checkpoint / "trainer_state.json").is_file():
        found = (
            f"the last one in {training_args.output_dir} is {last}" if last else f"{training_args.output_dir} has none"
        )
        raise UserError(f"resume_from_checkpoint ({given}) is not a checkpoint; {found}. Correct it, or leave it out.")
    return str(checkpoint)


def make_lm_head_inputs_contiguous(model: "PreTrainedModel") -> None:
    """
    Make the inputs of the LM head contiguous: on a CPU, torch otherwise copies the head's weight once per row, which is
    half of a step's time with 64 rows and a vocabulary of 49,000 tokens.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda head, inputs: tuple(part.contiguous() for part in inputs))
