"""
Train with Reinforce-Ada from a configuration file.

`ada-trl train --config arithmetic/seq-balance.yaml [--any_field value]`, or with several processes
`accelerate launch -m ada_trl.commands.train …`. Of several files, the later ones win.
"""

import logging
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, ScriptArguments

from ..utils.files import last_checkpoint
from . import start
from .checks import check_model
from .errors import SETUP_ERRORS, UserError, user_errors
from .options import add_general_options, build_parser, print_help
from .reward_funcs import load_reward_funcs, read_call


if TYPE_CHECKING:  # they import torch, which takes seconds
    from datasets import Dataset
    from transformers import PreTrainedModel
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig
    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer

logger = logging.getLogger(__name__)

REQUIRED = (("model_name_or_path",), ("dataset_name", "datasets"), ("reward_funcs",))
# Warnings of libraries about settings that a user of the command cannot change.
NOISE = (
    "`gradient_checkpointing` is deprecated",
    "`is_gradient_checkpointing` is deprecated",
    "'pin_memory' argument",
)


@dataclass
class AdaScriptArguments(ScriptArguments, DatasetMixtureConfig):
    """
    Script arguments of `ada-trl train`, on top of [`~trl.ScriptArguments`] and the mixtures of
    [`~trl.DatasetMixtureConfig`].

    Args:
        dataset_name (`str`, *optional*):
            Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory.
        reward_funcs (`list[str]`):
            Reward functions: dotted import paths of functions (`my_package.rewards.accuracy`, looked up in the current
            directory too; those of TRL are `trl.rewards.accuracy_reward` and so on), calls of functions that make one
            (`trl.rewards.get_repetition_penalty_reward(ngram_size=4)`), or reward models by name or local path.
        prepare (`str`, *optional*):
            Call of a function that makes the model or the data set. It is called if one of them is a path in the
            call's `output_dir` where there is nothing yet.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory."}
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: dotted import paths (`my_package.rewards.accuracy`, "
            "`trl.rewards.accuracy_reward`), calls with keyword arguments of functions that make one, or reward models "
            "by name or local path."
        },
    )
    prepare: str | None = field(
        default=None,
        metadata={
            "help": "Call of a function that makes the model or the data set, if one of them is missing in its output_dir: "
            "`my_package.prepare(output_dir='outputs/task')`."
        },
    )

    def __post_init__(self) -> None:
        for source in self.datasets:
            if isinstance(source, dict):
                unknown = ", ".join(map(repr, source.keys() - DatasetConfig.__dataclass_fields__.keys()))
                if not unknown and isinstance(source.get("path"), str):
                    continue
                flaw = f"has the unknown key {unknown}" if unknown else "has no `path` that is text"
            else:
                flaw = "is not a mapping"
            raise UserError(f"datasets: {source} {flaw}. Each data set needs a `path`: `- path: outputs/easy`.")
        super().__post_init__()


def parse_args(
    args: list[str] | None = None, command: str = "train", required: Sequence[Sequence[str]] = REQUIRED
) -> tuple[AdaScriptArguments, "AdaGRPOConfig", "ModelConfig"]:
    """
    Parse a command line (default: `sys.argv`) into script, trainer and model arguments.

    Args:
        args (`list[str]`, *optional*):
            The command line.
        command (`str`, *optional*, defaults to `"train"`):
            The command in help and messages.
        required (`Sequence[Sequence[str]]`, *optional*):
            Fields of which one must be set.

    Raises:
        `UserError`: for a file that is missing or not a mapping, and for a field that is unknown, missing, or has a value
            that it does not take.
    """
    args = sys.argv[1:] if args is None else list(args)
    if {"--help", "-h"} & set(args):
        print_help(command)
        raise SystemExit(0)
    parser = build_parser(command)
    if {"--help-all", "--help_all"} & set(args):
        add_general_options(parser)
        parser.print_help()
        raise SystemExit(0)
    try:
        return parser.parse_args_and_config(args, required)
    except UserError as error:
        if "bf16/gpu" not in str(error):
            raise
        raise UserError(
            "There is no GPU that can train in bf16. Set --bf16 false, or --use_cpu to use none."
        ) from error


def build_trainer(
    script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig"
) -> "AdaGRPOTrainer":
    """
    Load the data set and the model and build the trainer.

    Raises:
        `UserError`: if the model, the data set, its split or a reward function is missing, or an option is rejected.
    """
    from trl import get_peft_config, get_quantization_config

    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
    from ..vllm.errors import VLLMServerError

    reward_funcs = load_reward_funcs(script_args.reward_funcs)
    prepare(script_args, training_args, model_args)
    check_model(model_args.model_name_or_path)
    for name in reward_funcs:
        if isinstance(name, str):
            _check_reward_model(name)
    evaluate = training_args.eval_strategy != "no"
    with user_errors():
        train_dataset, eval_dataset = load_data(script_args, evaluate)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    with user_errors(*SETUP_ERRORS, VLLMServerError):
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


def make_lm_head_inputs_contiguous(model: "PreTrainedModel") -> None:
    """
    Make the inputs of the LM head contiguous: on a CPU, torch otherwise copies the head's weight once per row, which is
    half of a step's time with 64 rows and a vocabulary of 49,000 tokens.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda head, inputs: tuple(part.contiguous() for part in inputs))


def _check_reward_model(name: str) -> None:
    import trl.rewards

    if name in dir(trl.rewards):
        raise UserError(f"reward_funcs {name!r} has no dot, so it names a reward model. Write trl.rewards.{name}.")
    try:
        check_model(name, "reward_funcs")
    except UserError as error:
        raise UserError(f"{error} A function needs its module: trl.rewards.accuracy_reward.") from error


def prepare(script_args: AdaScriptArguments, training_args: "AdaGRPOConfig", model_args: "ModelConfig") -> None:
    """Call the recipe's function that makes the model and the data, once per machine, if one of them is missing."""
    if not script_args.prepare:
        return
    function, arguments = read_call(script_args.prepare)
    if "output_dir" not in arguments:
        raise UserError(f"prepare ({script_args.prepare!r}) needs the keyword output_dir, where it writes.")
    paths = [Path(name) for name in (model_args.model_name_or_path, script_args.dataset_name) if name]
    made = [path for path in paths if path.is_relative_to(arguments["output_dir"])]
    if not all(path.exists() for path in made):
        with training_args.main_process_first(desc="making the model and the data"):
            if not all(path.exists() for path in made):  # another process may have made them meanwhile
                function(**arguments)


def load_data(script_args: AdaScriptArguments, evaluate: bool) -> tuple["Dataset", "Dataset | None"]:
    """
    Load the training set and, if `evaluate`, the evaluation set: from a file, a directory, the hub, or a mixture.

    Raises:
        `ValueError`: if the data set or its split is missing.
    """
    from trl import get_dataset

    from ..recipes.math.prompts import with_prompts
    from ..utils.dataset_loading import load_splits, take_split

    name = script_args.dataset_name
    if script_args.datasets:
        if name:
            logger.warning("dataset_name %r is ignored, as datasets is set.", name)
        name, splits = "datasets", get_dataset(script_args)
    elif name:
        splits = load_splits(name, script_args.dataset_config, streaming=script_args.dataset_streaming)
    else:
        raise UserError("Neither dataset_name nor datasets is set.")
    options = ("dataset_train_split", "dataset_test_split")[: 1 + evaluate]
    train, *test = [with_prompts(take_split(splits, name, getattr(script_args, o), option=o)) for o in options]
    return train, test[0] if test else None


def checkpoint_to_resume(training_args: "AdaGRPOConfig") -> str | None:
    """
    Return the directory that `resume_from_checkpoint` names; `true` is the last checkpoint of `output_dir`.

    Raises:
        `UserError`: if there is none, naming the last one of `output_dir`.
    """
    asked = str(training_args.resume_from_checkpoint or "false")
    if asked.lower() in ("false", "no"):
        return None
    last = last_checkpoint(training_args.output_dir)
    if asked.lower() in ("true", "yes"):
        if last is None:
            raise UserError(
                f"resume_from_checkpoint is {asked}, but {training_args.output_dir} has no checkpoint. Leave it out to "
                "start from the beginning, or correct output_dir."
            )
        return str(last)
    if not (Path(asked) / "trainer_state.json").is_file():
        there = f"the last one in {training_args.output_dir} is {last.name}" if last else "output_dir has none"
        raise UserError(f"resume_from_checkpoint {asked!r} is not a checkpoint; {there}. Correct the path.")
    return asked


def silence_library_warnings() -> None:
    """Hide warnings of libraries that a user of the command cannot act on."""
    for text in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(text))
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), train and save to `output_dir`."""
    silence_library_warnings()
    script_args, training_args, model_args = parse_args(args)
    checkpoint = checkpoint_to_resume(training_args)
    trainer = build_trainer(script_args, training_args, model_args)
    from ..vllm.errors import VLLMServerError

    try:
        with user_errors(VLLMServerError):
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt as error:
        saved = last_checkpoint(training_args.output_dir)
        fix = f"the same command with --resume_from_checkpoint true continues from {saved}"
        raise KeyboardInterrupt(
            f"{trainer.state.global_step} of {trainer.state.max_steps} steps done; "
            f"{fix if saved else 'no checkpoint was saved (--save_steps)'}."
        ) from error
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    start("train")
