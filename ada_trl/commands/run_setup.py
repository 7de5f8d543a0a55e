"""Everything that `train` and `check` need before they start: reward functions, model, data, trainer."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from .dataset_loading import load_split
from .errors import UserError, user_errors
from .options import AdaScriptArguments
from .reward_funcs import load_reward_funcs, read_call


if TYPE_CHECKING:  # they import torch, which takes seconds
    from datasets import Dataset
    from transformers import PreTrainedModel
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig
    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer


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
            "vllm_mode='server' also start a server; docs/running.md has its flags."
        )
    data = script_args.dataset_name or script_args.datasets
    for name, value in (("model_name_or_path", model_args.model_name_or_path), ("dataset_name", data)):
        if not value:
            raise UserError(f"{name} is not set. Give it in the configuration file or as --{name}.")
    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    prepare(script_args, training_args, model_args)
    with user_errors(ValueError, OSError):
        train_dataset, eval_dataset = load_data(script_args, evaluate=training_args.eval_strategy != "no")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    with user_errors(ValueError, TypeError, OSError, ImportError, VLLMServerError):
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


def prepare(script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig") -> None:
    """Call the recipe's function that creates the model and the data, once per machine, if one of them is missing."""
    if not script_args.prepare:
        return
    function, arguments = read_call(script_args.prepare)
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
        `ValueError`: if the dataset or its split is missing, or both a dataset and a mixture are given.
    """
    from trl import get_dataset

    from ..recipes.math.prompts import with_prompts

    if script_args.datasets and script_args.dataset_name:
        raise ValueError(
            f"dataset_name ({script_args.dataset_name!r}) has no effect if datasets, a mixture, is set too. Leave one of them out."
        )
    splits = get_dataset(script_args) if script_args.datasets else None

    def load(split: str) -> "Dataset":
        if splits is not None:
            return with_prompts(splits[split])
        name, config = script_args.dataset_name, script_args.dataset_config
        return with_prompts(load_split(name, split, config, streaming=script_args.dataset_streaming))

    return load(script_args.dataset_train_split), load(script_args.dataset_test_split) if evaluate else None


def make_lm_head_inputs_contiguous(model: "PreTrainedModel") -> None:
    """
    Make the inputs of the LM head contiguous: on a CPU, torch otherwise copies the head's weight once per row, which is
    half of a step's time with 64 rows and a vocabulary of 49,000 tokens.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda head, inputs: tuple(part.contiguous() for part in inputs))
