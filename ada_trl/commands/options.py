"""
Options of `ada-trl train` and `ada-trl check`, and their help.

The configuration classes import torch, which takes seconds. Therefore `--help` prints a stored page, which
`python -m tests.documentation` writes from the parser and a test compares with it; `--help-all` uses the parser.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments

from .errors import UserError
from .parser import CommandParser, HelpFormatter, program


if TYPE_CHECKING:  # they import torch, which takes seconds
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

REQUIRED = (("model_name_or_path",), ("dataset_name", "datasets"), ("reward_funcs",))
HELP_PAGE = Path(__file__).with_name("train_help.txt")
EXAMPLE = "--config arithmetic/seq-balance.yaml --max_steps 20"
DESCRIPTIONS = {
    "train": "Train a causal language model with Reinforce-Ada.",
    "check": "Validate a configuration in about a minute, and report the cost of a step: samples and scores some prompts, sends "
    "the weights to the server, makes one optimizer step on rows of maximum length, and leaves no files behind. Takes the "
    "arguments of train.",
}
USAGE = (
    "Options are set in a YAML file or on the command line, which takes precedence. Of several files the last one takes "
    "precedence; a recipe that comes with the package is found by its name. With several processes: accelerate launch "
    "-m {package}.{command} …"
)
GENERAL = ("help", "config", "help_all", "debug")
# The inherited fields that a first run is likely to set.
MOST_USED = {
    "Data": ("dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "prepare"),
    "Training": tuple(
        "max_steps learning_rate per_device_train_batch_size gradient_accumulation_steps beta loss_type "
        "max_completion_length temperature use_vllm vllm_mode use_peft lora_r dtype bf16 use_cpu eval_strategy eval_steps "
        "save_steps logging_steps log_completions report_to resume_from_checkpoint seed".split()
    ),
}


@dataclass
class AdaScriptArguments(ScriptArguments, DatasetMixtureConfig):
    """Script arguments of `ada-trl train`: TRL's, a mixture of datasets, reward functions and a preparation of the task."""

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
            "help": "Call of a function that creates the model or the dataset, if one of them is missing in its output_dir: "
            "`my_package.prepare(output_dir='outputs/task')`."
        },
    )

    def __post_init__(self) -> None:
        for source in self.datasets:
            values = source if isinstance(source, dict) else getattr(source, "__dict__", {})
            if not isinstance(values.get("path"), str):
                raise UserError(
                    f"datasets: {source} is not a mapping with a `path` that is text. Write `- path: outputs/easy`."
                )
            fraction = values.get("fraction")
            if fraction is not None and not (isinstance(fraction, int | float) and fraction >= 0):
                raise UserError(
                    f"datasets: {source} has a fraction that is not a number of at least 0. Write `fraction: 0.5`."
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


def print_help(command: str) -> None:
    """Print the stored page of `--help`."""
    description = textwrap.fill(DESCRIPTIONS[command] + " " + USAGE.format(package=__package__, command=command), 114)
    print(f"usage: {program(command)} --config … [options]\n\n{description}\n")
    print(HELP_PAGE.read_text(encoding="utf-8"))
    print(f"example:\n  {program(command)} {EXAMPLE}")


def build_parser(command: str) -> CommandParser:
    """Return the parser of `train` and `check`, with every field of the three configuration classes."""
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

    classes = (AdaScriptArguments, AdaGRPOConfig, ModelConfig)
    parser = CommandParser(classes, command=command, description=DESCRIPTIONS[command], example=EXAMPLE)
    # The help of transformers says that the option is not used; `train` uses it.
    resume = next(action for action in parser._actions if action.dest == "resume_from_checkpoint")
    resume.help = "Checkpoint to continue from: a directory, or `true` for the last one of `output_dir`."
    return parser


def help_page() -> str:
    """Return the options of `--help`: required ones, those of [`AdaGRPOConfig`], and the most used inherited ones."""
    from ..trainer.ada_grpo_config import AdaGRPOConfig

    # A field that is true by default has a second action, --no_<field>, after its own.
    actions = {action.dest: action for action in reversed(build_parser("train")._actions)}
    # Without a value, `--debug` is removed before parsing (`errors.run`); with one, it is a field of transformers.
    actions["debug"] = argparse.ArgumentParser().add_argument(
        "--debug", action="store_true", help="Show the traceback of an error."
    )
    required = (*(names[0] for names in REQUIRED), "output_dir")
    own = tuple(AdaGRPOConfig.__annotations__)  # declared there: new fields, and those with another default than TRL's
    groups = {"Options": GENERAL, "Required (a recipe sets them)": required, "Reinforce-Ada": own, **MOST_USED}
    formatter = HelpFormatter("")
    for title, names in groups.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names])
        formatter.end_section()
    return formatter.format_help()
