"""
Train with Reinforce-Ada from a configuration file.

`ada-trl train --config arithmetic/seq-balance.yaml [--any_field value]`, or with several processes
`accelerate launch -m ada_trl.commands.train …`. Later configuration files override earlier ones.
"""

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments

from ..utils.files import last_checkpoint
from . import start
from .errors import UserError, user_errors
from .options import build_parser, print_help
from .run_setup import build_trainer, checkpoint_to_resume


if TYPE_CHECKING:  # they import torch, which takes seconds
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

REQUIRED = (("model_name_or_path",), ("dataset_name", "datasets"), ("reward_funcs",))


@dataclass
class AdaScriptArguments(ScriptArguments, DatasetMixtureConfig):
    """Script arguments of `ada-trl train`: TRL's, a mixture of data sets, reward functions and a preparation of the task."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory."}
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: dotted import paths (`my_package.rewards.accuracy`, looked up in the current "
            "directory too; `trl.rewards.accuracy_reward`), calls with keyword arguments of functions that create one, or reward models "
            "by name or local path."
        },
    )
    prepare: str | None = field(
        default=None,
        metadata={
            "help": "Call of a function that creates the model or the data set, if one of them is missing in its output_dir: "
            "`my_package.prepare(output_dir='outputs/task')`."
        },
    )

    def __post_init__(self) -> None:
        for source in self.datasets:
            path = source.get("path") if isinstance(source, dict) else getattr(source, "path", None)
            if not isinstance(path, str):
                raise UserError(
                    f"datasets: {source} is not a mapping with a `path` that is text. Write `- path: outputs/easy`."
                )
        super().__post_init__()


def parse_args(
    args: list[str] | None = None, command: str = "train", required: Sequence[Sequence[str]] = REQUIRED
) -> tuple[AdaScriptArguments, "AdaGRPOConfig", "ModelConfig"]:
    """
    Parse a command line (default: `sys.argv`) into script, trainer and model arguments.

    Args:
        args (`list[str]`, *optional*):
            Words of the command line.
        command (`str`, *optional*, defaults to `"train"`):
            Command in help and messages.
        required (`Sequence[Sequence[str]]`, *optional*):
            Groups of fields; one field of each group must be set.

    Raises:
        `UserError`: for a file that is missing or not a mapping, and for a field that is unknown, missing, or has an
            invalid value.
    """
    args = sys.argv[1:] if args is None else list(args)
    if {"--help", "-h"} & set(args):
        print_help(command)
        raise SystemExit(0)
    return build_parser(command).parse_args_and_config(args, required)


def silence_library_warnings() -> None:
    """Hide warnings of libraries about settings that a user of the command cannot change."""
    warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated")
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
