"""
Help of `ada-trl train` and `ada-trl check`.

The configuration classes import torch, which takes seconds. Therefore `--help` prints a stored page, which
`python -m tests.documentation` writes from the parser and a test compares with it; `--help-all` uses the parser.
"""

import argparse
import textwrap
from pathlib import Path

from .parser import CommandParser, HelpFormatter, program


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
REQUIRED = ("model_name_or_path", "dataset_name", "reward_funcs", "output_dir")
# The inherited fields that a first run is likely to set.
MOST_USED = {
    "Data": ("dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "prepare"),
    "Training": tuple(
        "max_steps learning_rate per_device_train_batch_size gradient_accumulation_steps beta loss_type "
        "max_completion_length temperature use_vllm vllm_mode use_peft lora_r dtype bf16 use_cpu eval_strategy eval_steps "
        "save_steps logging_steps log_completions report_to resume_from_checkpoint seed".split()
    ),
}


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
    from .train import AdaScriptArguments

    classes = (AdaScriptArguments, AdaGRPOConfig, ModelConfig)
    return CommandParser(classes, command=command, description=DESCRIPTIONS[command], example=EXAMPLE)


def help_page() -> str:
    """Return the options of `--help`: required ones, those of [`AdaGRPOConfig`], and the most used inherited ones."""
    from ..trainer.ada_grpo_config import AdaGRPOConfig

    # A field that is true by default has a second action, --no_<field>, after its own.
    actions = {action.dest: action for action in reversed(build_parser("train")._actions)}
    # Without a value, `--debug` is removed before parsing (`errors.run`); with one, it is a field of transformers.
    actions["debug"] = argparse.ArgumentParser().add_argument(
        "--debug", action="store_true", help="Show the traceback of an error."
    )
    own = tuple(AdaGRPOConfig.__annotations__)  # declared there: new fields, and those with another default than TRL's
    groups = {"Options": GENERAL, "Required (a recipe sets them)": REQUIRED, "Reinforce-Ada": own, **MOST_USED}
    formatter = HelpFormatter("")
    for title, names in groups.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names])
        formatter.end_section()
    return formatter.format_help()
