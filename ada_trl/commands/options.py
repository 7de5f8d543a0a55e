"""Options of `ada-trl train` and `ada-trl check`: TRL's parser with several configuration files, recipes by name and suggestions."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser

from .errors import UserError, suggestion, user_errors


if TYPE_CHECKING:  # they import torch, which takes seconds
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

REQUIRED = (("model_name_or_path",), ("dataset_name", "datasets"), ("reward_funcs",))  # one field of each group

HELP = """\
usage: {program} --config FILE [FILE …] [--option value …]

{description}

Options are set in YAML files or on the command line, which takes precedence; of several files the last one does.

  --config FILE …         YAML files, or names of recipes: arithmetic/batch.yaml (recommended), arithmetic/seq-balance.yaml
                          (the paper), math/batch.yaml, …
  --help-all              list all options, with those of TRL and transformers, and their defaults
  --debug                 show the traceback of an error

Required, unless a file sets them:
  --model_name_or_path    directory, or name on the hub
  --dataset_name          file (JSON, JSON Lines, Parquet, CSV), directory, or name on the hub, with a column `prompt`
  --reward_funcs          dotted paths of functions, such as trl.rewards.accuracy_reward, or names of reward models
  --output_dir

Adaptive sampling:
  --baseline              batch (recommended): mean reward of all other rollouts of the batch; pool: that of the prompt's rollouts
  --adaptive_sampling     uniform, seq-balance, seq-pos or est; by default uniform with --baseline batch, else seq-balance
  --retries               with --baseline batch (3 is recommended): later steps in which an unsolved prompt is sampled again
  --num_generations       rollouts per prompt that are trained on; by default 1 with --baseline batch, else 4
  --success_reward, --positive_threshold
                          the reward function that defines a success, and the value that it must exceed
  --max_rounds, --samples_per_round, --min_positives, --min_negatives
                          rounds of seq-balance and seq-pos
  --prompt_weighting, --zero_variance_groups
                          weight of a prompt; treatment of groups in which all rewards are equal

Often set:
  --max_steps, --num_train_epochs, --learning_rate, --per_device_train_batch_size, --gradient_accumulation_steps,
  --max_completion_length, --use_vllm, --vllm_mode, --use_peft, --eval_strategy, --save_steps, --logging_steps, --report_to,
  --resume_from_checkpoint (a directory, or true for the last checkpoint of output_dir)

example:
  {program} --config arithmetic/batch.yaml --max_steps 20
"""
DESCRIPTIONS = {
    "train": "Train a causal language model with TRL's GRPOTrainer and adaptive sampling. With several processes:\n"
    "accelerate launch -m ada_trl.commands.train …",
    "check": "Validate a configuration in about a minute, and report the cost of a step: sample and score some prompts, send the\n"
    "weights to the server, make one optimizer step on rows of maximum length. Takes the options of train, leaves no files.",
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


def parse_args(
    args: list[str] | None = None, command: str = "train", required: tuple[tuple[str, ...], ...] = REQUIRED
) -> tuple[AdaScriptArguments, "AdaGRPOConfig", "ModelConfig"]:
    """
    Parse a command line (default: `sys.argv`) into script, trainer and model arguments.

    Args:
        args (`list[str]`, *optional*):
            Words of the command line.
        command (`str`, *optional*, defaults to `"train"`):
            Command in help and messages.
        required (`tuple[tuple[str, ...], ...]`, *optional*):
            Groups of fields; one field of each group must be set.

    Raises:
        `UserError`: for a file that is missing or not a mapping, and for a field that is unknown, missing, or has an
            invalid value.
    """
    args = sys.argv[1:] if args is None else list(args)
    if {"--help", "-h"} & set(args):
        print(HELP.format(program=program(command), description=DESCRIPTIONS[command]), end="")
        raise SystemExit(0)
    return build_parser(command).parse_files_and_args(args, required)


def program(command: str) -> str:
    """Return how a command was started, for its messages."""
    started_as_script = Path(sys.argv[0]).stem == "ada-trl"
    return f"ada-trl {command}" if started_as_script else f"python -m {__package__}.{command}"


def build_parser(command: str) -> "CommandParser":
    """Return the parser of `train` and `check`, with every field of the three configuration classes."""
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

    return CommandParser(
        (AdaScriptArguments, AdaGRPOConfig, ModelConfig),
        prog=program(command),
        usage="%(prog)s --config FILE [FILE …] [--option value …]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


class CommandParser(TrlParser):
    """[`~trl.TrlParser`] with several configuration files, recipes by name, and mistakes that raise a [`UserError`]."""

    def __init__(self, dataclass_types: tuple[type, ...], **options: Any):
        super().__init__(dataclass_types, **options)
        self.add_argument(
            "--config", nargs="+", action="extend", default=[], metavar="FILE", help="YAML files, or names of recipes."
        )
        self.add_argument("--help-all", action="help", help="List all options.")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.rstrip('.')}. --help lists the options.")

    def parse_files_and_args(self, args: list[str], required: tuple[tuple[str, ...], ...]) -> tuple:
        """Parse a command line, with the values of the files after `--config` as defaults; see [`parse_args`]."""
        given, unknown = self.parse_known_args(args)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            kind = "unknown option" if word.startswith("-") else "unexpected argument"
            self.error(f"{kind} {word}{suggestion(word, self._option_string_actions)}")
        fields = {action.dest for action in self._actions}
        for path in map(find_config, given.config):
            config = read_yaml(path)
            os.environ.update({str(name): str(value) for name, value in (config.pop("env", None) or {}).items()})
            for name in config:
                if name not in fields:
                    guess = suggestion(str(name), fields)
                    raise UserError(
                        f"{path} has the unknown field {name}: {config[name]}{guess}. --help lists the fields."
                    )
            self.set_defaults_with_config(**config)
        given, _ = self.parse_known_args(args)  # again, with the files' values as defaults
        for names in required:
            if not any(getattr(given, name) for name in names):
                raise UserError(f"{names[0]} is not set. Give it in the configuration file or as --{names[0]}.")
        with user_errors(ValueError, TypeError, OSError, ImportError):
            *configs, _ = self.parse_args_into_dataclasses(args)  # the last one holds `config`, which is not a field
        return tuple(configs)


def read_yaml(path: Path) -> dict[str, Any]:
    """
    Read a configuration file.

    Raises:
        `UserError`: if it is not a YAML mapping, or has a field twice.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}. Correct it.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a YAML mapping of fields to values, not {config!r}.")
    names = [key.value for key, _ in yaml.compose(text).value]  # YAML itself would take the last value
    for name in config:
        if names.count(str(name)) > 1:
            raise UserError(f"{path} has {name} {names.count(str(name))} times. Remove all but one.")
    return config


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with the package."""
    from .. import recipes

    return next(path for path in map(Path, recipes.__path__) if (path / "arithmetic").is_dir())


def find_config(name: str) -> Path:
    """
    Return a configuration file: a path, or the name of a recipe that comes with the package (`arithmetic/seq-balance.yaml`).

    Raises:
        `UserError`: if there is neither; the message contains the folder of the recipes.
    """
    if Path(name).is_file():
        return Path(name)
    folder = recipes_folder()
    shipped = {str(recipe.relative_to(folder)): recipe for recipe in sorted(folder.rglob("*.yaml"))}
    wanted = name.removeprefix("recipes/")
    if wanted in shipped:
        return shipped[wanted]
    raise UserError(
        f"--config {name}: there is no such file, nor a recipe of that name{suggestion(wanted, shipped)}. "
        f"The recipes are in {folder}."
    )
