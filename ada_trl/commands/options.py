"""Options of `ada-trl train` and `check`: TRL's parser with several configuration files and recipes by name."""

import difflib
import inspect
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser

from . import COMMANDS
from .errors import UserError, user_errors


if TYPE_CHECKING:  # they import torch, which takes seconds
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

ONE_NAME = ("model_name_or_path", "dataset_name")  # text; other fields of text may also be mappings

HELP = """\
usage: ada-trl {command} --config FILE [FILE …] [--option value …]

{text}.
With several processes: accelerate launch -m ada_trl.commands.{command} …

Options are set in YAML files or on the command line, which takes precedence; of several files the last one does.

  --config FILE …         YAML files, or names of recipes: arithmetic/batch.yaml (recommended),
                          arithmetic/seq-balance.yaml (the paper), math/batch.yaml, …
  --help-all              list all options, with those of TRL and transformers, and their defaults
  --traceback             show where an error was raised

Required, unless a file sets them:
  --model_name_or_path    directory, or name on the hub
  --dataset_name          file (JSON, JSON Lines, Parquet, CSV), pattern (data/*.jsonl), directory, or name on the hub,
                          with a column `prompt`
  --reward_funcs          dotted paths of functions, such as trl.rewards.accuracy_reward, or names of reward models
  --output_dir

Adaptive sampling:
  --baseline              batch (recommended): mean reward of all other rollouts of the batch; pool: that of the prompt
  --adaptive_sampling     uniform, seq-balance, seq-pos or est; by default uniform with --baseline batch, else
                          seq-balance
  --retries               with --baseline batch (2 is recommended): later steps in which an unsolved prompt is sampled
                          again
  --num_generations       rollouts per prompt that are trained on; by default 1 with --baseline batch, else 4
  --success_reward, --positive_threshold
                          the reward function that defines a success, and the value that it must exceed
  --max_rounds, --samples_per_round, --min_positives, --min_negatives
                          rounds of seq-balance and seq-pos
  --prompt_weighting, --zero_variance_groups
                          weight of a prompt; treatment of groups in which all rewards are equal

Often set:
  --max_steps, --num_train_epochs, --learning_rate, --per_device_train_batch_size, --gradient_accumulation_steps,
  --max_completion_length, --use_vllm, --vllm_mode, --use_peft, --eval_strategy, --save_steps, --logging_steps,
  --report_to, --resume_from_checkpoint (a directory, or true for the last checkpoint of output_dir)

example:
  ada-trl {command} --config arithmetic/batch.yaml --max_steps 20
"""


@dataclass
class AdaScriptArguments(ScriptArguments, DatasetMixtureConfig):
    """Script arguments of `ada-trl train`: TRL's, a mixture of datasets, reward functions and a preparation."""

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: dotted import paths (`my_package.rewards.accuracy`, looked up in the current "
            "directory too; `trl.rewards.accuracy_reward`), calls with keyword arguments of functions that create "
            "one, or reward models by name or local path."
        },
    )
    prepare: str | None = field(
        default=None,
        metadata={
            "help": "Call of a function that creates the model or the dataset, if one of them is missing in its "
            "output_dir: `my_package.prepare(output_dir='outputs/task')`."
        },
    )


def parse_args(
    args: list[str] | None = None, command: str = "train"
) -> tuple[AdaScriptArguments, "AdaGRPOConfig", "ModelConfig"]:
    """
    Parse a command line (default: `sys.argv`) and the files after `--config` into script, trainer and model arguments.

    An unknown option or field, or an invalid value, exits with code 2.

    Raises:
        `UserError`: for a file that is missing or not a mapping, and for values that the configuration classes reject.
    """
    args = sys.argv[1:] if args is None else args
    if {"--help", "-h"} & set(args):
        print(HELP.format(command=command, text=COMMANDS[command].capitalize()), end="")
        raise SystemExit(0)
    parser = build_parser(command)
    given, words = parser.parse_known_args(args)
    import torch  # after --help, because it takes seconds

    is_device_known = given.use_cpu or torch.accelerator.is_available()
    if not is_device_known:  # GRPOConfig's default is bf16, which is slower on most CPUs
        parser.set_defaults(use_cpu=True, bf16=False)
    unknown = {"": words}  # by the file that they are in
    for path in map(find_config, given.config):
        config = read_yaml(path, parser)
        is_device_known |= "use_cpu" in config
        os.environ.update({str(name): str(value) for name, value in (config.pop("env", None) or {}).items()})
        unknown[f"{path}: "] = parser.set_defaults_with_config(**config)  # a field as words: --name value
    for source, words in unknown.items():
        if words:
            word = words[0].partition("=")[0]
            close = difflib.get_close_matches(word, parser._option_string_actions, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            from ..trainer.ada_grpo_trainer import AdaGRPOTrainer  # takes seconds

            if word[2:] in inspect.signature(AdaGRPOTrainer).parameters:
                hint = ": it is an argument of AdaGRPOTrainer, for Python only"
            parser.error(f"{source}unknown option {word}{hint}. --help lists the options.")
    if not is_device_known and os.environ.get("RANK", "0") == "0":
        print(f"ada-trl {command}: no GPU was found, so it runs on the CPU (--use_cpu --bf16=false).", file=sys.stderr)
    with user_errors(ValueError, TypeError, OSError, ImportError):
        *configs, _ = parser.parse_args_into_dataclasses(args)  # the last one holds `config`, which is not a field
    return tuple(configs)


def build_parser(command: str) -> TrlParser:
    """Return the parser of `train` and `check`, with every field of the three configuration classes."""
    from trl import ModelConfig

    from ..trainer.ada_grpo_config import AdaGRPOConfig

    parser = TrlParser(
        (AdaScriptArguments, AdaGRPOConfig, ModelConfig),
        prog=f"ada-trl {command}",
        usage="%(prog)s --config FILE [FILE …] [--option value …]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", nargs="+", action="extend", default=[], metavar="FILE", help="YAML files, or names of recipes."
    )
    parser.add_argument("--help-all", action="help", help="List all options.")
    return parser


def find_config(name: str) -> Path:
    """
    Return a configuration file: a path, or the name of a recipe of the package (`arithmetic/seq-balance.yaml`).

    Raises:
        `UserError`: if there is neither; the message contains the folder of the recipes.
    """
    from .. import recipes

    folder = Path(recipes.__path__[-1])
    for path in (Path(name), folder / Path(name).as_posix().removeprefix("recipes/")):
        if path.is_file():
            return path
    raise UserError(f"--config {name}: there is no such file, nor a recipe of that name in {folder}.")


def read_yaml(path: Path, parser: TrlParser) -> dict[str, Any]:
    """
    Read a configuration file.

    Raises:
        `UserError`: if it is not a YAML mapping, has a field twice, or has a value that YAML reads as another one.
    """
    import yaml

    text = path.read_bytes()  # YAML may be UTF-8 or UTF-16; another encoding is a YAMLError
    try:
        config, document = yaml.safe_load(text), yaml.compose(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Correct it.") from error
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise UserError(f"{path} must contain a YAML mapping of fields to values, not {config!r}.")
    if repeated := _repeated_fields(document):  # YAML itself would take the last value
        raise UserError(f"{path} has {', '.join(sorted(repeated))} more than once. Remove all but one.")
    if not isinstance(config.get("env") or {}, dict):
        raise UserError(f"{path}: env ({config['env']!r}) must be a mapping, such as env: {{NAME: value}}.")
    if "config" in config:
        raise UserError(f"{path}: config is for the command line, which takes several files: --config FILE FILE.")
    actions = {action.dest: action for action in parser._actions}
    with_choices = {name for name, action in actions.items() if action.choices}
    for key, node in document.value:
        if key.value in with_choices and isinstance(config[key.value], bool):
            raise UserError(
                f"{path}: YAML reads {key.value}: {node.value} as {config[key.value]}. Write it in quotes: "
                f"{key.value}: {node.value!r}."
            )
        if not isinstance(node, yaml.ScalarNode) and (numbers := _numbers_read_as_text(node)):
            raise UserError(
                f"{path}: YAML reads {numbers[0]} in {key.value} as text. Write a number with a decimal point and a "
                "signed exponent, for example 1.0e-7, and text in quotes."
            )
        action, value = actions.get(key.value), config.get(key.value)
        if not action or action.nargs:
            continue
        if isinstance(value, list | dict) and (action.type in (int, float) or key.value in ONE_NAME):
            raise UserError(f"{path}: {key.value} ({value!r}) must be one value, not several.")
        if action.type is str and not isinstance(value, str | bool | list | dict | None):
            config[key.value] = node.value  # a number or a date that is meant as text
        elif action.type is int and isinstance(value, float):
            config[key.value] = node.value.removesuffix(".0")
    return config


def _repeated_fields(node: Any) -> set[str]:
    """Fields that a mapping, or one inside of it, has more than once."""
    if isinstance(node.value, str):
        return set()
    pairs = [item if isinstance(item, tuple) else (None, item) for item in node.value]
    names = [key.value for key, _ in pairs if key]
    return {name for name in names if names.count(name) > 1}.union(*(_repeated_fields(item) for _, item in pairs))


def _numbers_read_as_text(node: Any) -> list[str]:
    """Numbers such as `1e-7` in a list or mapping. A field itself may be one, because it is read as a word is."""
    if isinstance(node.value, str):
        is_text = node.tag == "tag:yaml.org,2002:str" and node.style is None
        return [node.value] if is_text and re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d+", node.value) else []
    values = [item[1] if isinstance(item, tuple) else item for item in node.value]
    return [number for value in values for number in _numbers_read_as_text(value)]
