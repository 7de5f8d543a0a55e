"""Parts that `train` and `check` share: reward functions, model, data and trainer, and the errors of the setup."""

import importlib.util
from contextlib import nullcontext
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
        `UserError`: if the model, the dataset, its split or a reward function is missing, or an option is rejected.
    """
    from trl import get_peft_config, get_quantization_config

    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
    from ..vllm.errors import VLLMServerError

    data = script_args.dataset_name or script_args.datasets
    for name, value in (("model_name_or_path", model_args.model_name_or_path), ("dataset_name", data)):
        if not value:
            raise UserError(f"{name} is not set. Give it in the configuration file or as --{name}.")
    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    prepare(script_args, training_args, model_args)
    evaluates = training_args.eval_strategy != "no" or training_args.eval_on_start
    with user_errors(ValueError, OSError):
        train_dataset, eval_dataset = load_data(script_args, evaluates)
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


def find_checkpoint(training_args: "AdaGRPOConfig") -> str | bool | None:
    """
    Return the checkpoint to resume from: a directory, or `True` for the last one of `output_dir`.

    Raises:
        `UserError`: if it does not exist.
    """
    given, output_dir = training_args.resume_from_checkpoint, training_args.output_dir
    checkpoint = {"true": True, "false": None}.get(str(given).lower(), given)  # a command line has only text
    folders = [*Path(output_dir).glob("checkpoint-*")] if checkpoint is True else [Path(checkpoint or "")]
    if checkpoint and not any((folder / "trainer_state.json").is_file() for folder in folders):
        where = f"output_dir ({output_dir}) has no checkpoint" if checkpoint is True else "that is no checkpoint"
        raise UserError(
            f"resume_from_checkpoint is {given}, but {where} (a folder with trainer_state.json). Correct it, or leave "
            "resume_from_checkpoint out."
        )
    return checkpoint


def check_requirements(training_args: "AdaGRPOConfig") -> None:
    """
    Check what a run needs besides the model and the data.

    Raises:
        `UserError`: if vLLM or a tracker is not installed, or there is no token for the hub.
    """
    from huggingface_hub import whoami
    from transformers.integrations import get_available_reporting_integrations

    if training_args.use_vllm and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "use_vllm requires vLLM, which is not installed here. Install the extra: pip install 'ada_trl[vllm]'. "
            "With vllm_mode='server' also start a server; docs/running.md has its flags."
        )
    trackers = get_available_reporting_integrations()
    # Not all that transformers has are in this list.
    if missing := {*training_args.report_to} - {*trackers, "azure_ml", "flyte"}:
        raise UserError(
            f"report_to ({', '.join(map(str, missing))}) is not available. Install the package of the tracker, or "
            f"choose from {', '.join(['none', *trackers])}."
        )
    if training_args.push_to_hub or (training_args.log_completions and training_args.log_completions_hub_repo):
        with user_errors(Exception):  # also of the network
            whoami(token=training_args.hub_token)


def run(trainer: "AdaGRPOTrainer", checkpoint: str | bool | None = None) -> None:
    """
    Train, with one thread for a small model.

    Raises:
        `UserError`: for an error of the vLLM server, and any before the training begins, which an option causes: an
            optimizer whose package is missing, a tracker without a login. Later ones, of reward functions for example,
            are raised as they are.
    """
    from transformers import TrainerCallback

    from ..utils.threads import bounded_threads
    from ..vllm.errors import VLLMServerError

    class Beginning(TrainerCallback):
        is_over = False

        def on_train_begin(self, *args, **kwargs):
            self.is_over = True

    beginning = Beginning()
    trainer.add_callback(beginning)
    try:
        with user_errors(VLLMServerError), bounded_threads(trainer.model):
            trainer.train(resume_from_checkpoint=checkpoint)
    except Exception:
        with nullcontext() if beginning.is_over else user_errors(Exception):
            raise


def prepare(script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig") -> None:
    """Call the recipe's function that creates the model and the data, once per machine, if one of them is missing."""
    if not script_args.prepare:
        return
    function, arguments = read_call(script_args.prepare)
    if not isinstance(arguments.get("output_dir"), str):
        raise UserError(
            f"prepare ({script_args.prepare!r}) needs output_dir='FOLDER', the folder that the function creates."
        )
    paths = [Path(name) for name in (model_args.model_name_or_path, script_args.dataset_name) if name]
    made = [path for path in paths if path.resolve().is_relative_to(Path(arguments["output_dir"]).resolve())]
    if not all(path.exists() for path in made):
        with training_args.main_process_first(desc="creating the model and the data"):
            if not all(path.exists() for path in made):  # another process may have made them meanwhile
                with user_errors(TypeError):
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
            f"dataset_name ({script_args.dataset_name!r}) has no effect if datasets, a mixture, is set too. Leave one "
            "of them out."
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
    Make the inputs of the LM head contiguous: on a CPU, torch otherwise copies the head's weight once per row, which
    is half of a step's time with 64 rows and a vocabulary of 49,000 tokens.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda head, inputs: tuple(part.contiguous() for part in inputs))
