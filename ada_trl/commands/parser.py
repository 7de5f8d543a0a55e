"""TRL's parser with several configuration files, checked values, suggestions for misspelt options and a short help."""

import argparse
import json
import os
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl.scripts.utils import TrlParser

from .errors import UserError, suggestion, user_errors


# Fields of transformers that take a mapping or the path of a file with one.
MAPPING_OR_PATH = ("accelerator_config", "deepspeed", "fsdp_config")


def program(command: str) -> str:
    """Return how a command was started, for its messages."""
    started_as_script = Path(sys.argv[0]).stem == "ada-trl"
    return f"ada-trl {command}" if started_as_script else f"python -m {__package__}.{command}"


def type_name(action: argparse.Action) -> str:
    """Return the type of an option's value for help and messages."""
    return getattr(action.type, "__name__", "str").replace("string_to_bool", "bool")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that shows each option once, with its type and its default."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=116)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        kind = action.metavar or type_name(action).upper()
        values = "" if action.nargs == 0 else " " + self._format_args(action, str(kind))
        # Fields have a second spelling with hyphens, which is left out.
        spellings = action.option_strings if action.dest == "help" else action.option_strings[:1]
        return ", ".join(spellings) + values

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, argparse.SUPPRESS, []) and "%(default)" not in text and action.nargs != 0
        return text + (" (default: %(default)s)" if shown else "")


class CommandParser(TrlParser):
    """[`~trl.TrlParser`] for `train` and `check`; mistakes raise a [`UserError`]. See [`~options.build_parser`]."""

    def __init__(self, dataclass_types: Iterable[type], *, command: str, description: str, example: str):
        super().__init__(
            dataclass_types,
            prog=program(command),
            usage="%(prog)s [options]",
            description=textwrap.fill(description, 114),
            epilog=f"example:\n  {program(command)} {example}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        # transformers' parser reduces `str | dict | None` to one type; the hints say which values a file may contain.
        self._hints = {
            name: hint for config in self.dataclass_types for name, hint in typing.get_type_hints(config).items()
        }
        self.add_argument(
            "--config",
            nargs="+",
            action="extend",
            default=[],
            metavar="FILE",
            help="YAML files, or names of recipes.",
        )
        self.add_argument(
            "--help-all", "--help_all", action="help", help="List every field, those of TRL and transformers too."
        )

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message.rstrip('.')}. --help lists the options.")

    def parse_args_and_config(self, args: list[str] | None = None, required: Sequence[Sequence[str]] = ()) -> tuple:
        """
        Parse a command line with any number of files after `--config`; later files override earlier ones.

        Args:
            args (`list[str]`, *optional*):
                By default `sys.argv`.
            required (`Sequence[Sequence[str]]`, *optional*):
                Fields of which one must be set. This is checked before any value.

        Raises:
            `UserError`: for a file that is missing or not a mapping of fields to values, and for a field that is unknown,
                missing, or has an invalid value.
        """
        args = sys.argv[1:] if args is None else list(args)
        given, unknown = self.parse_known_args(args)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(
                f"{'unknown option' if word.startswith('-') else 'unexpected argument'} {word}{suggestion(word, known)}"
            )
        for name in given.config:
            self._apply_file(find_config(name))
        given, _ = self.parse_known_args(args)  # again, with the files' values as defaults
        for names in required:
            if not any(getattr(given, name) for name in names):
                raise UserError(f"{names[0]} is not set. Give it in the configuration file or as --{names[0]}.")
        self._check_mappings(given)
        with user_errors(ValueError, TypeError, OSError, ImportError):
            *configs, _ = self.parse_args_into_dataclasses(args)  # the last one holds `config`, which is not a field
        return tuple(configs)

    def _apply_file(self, path: Path) -> None:
        """Make the values of a file the defaults."""
        config = _read_yaml(path)
        environment = config.pop("env", None) or {}
        if not isinstance(environment, dict):
            raise UserError(f"{path} has env: {environment}, but it takes a mapping of variables to values.")
        for variable, value in environment.items():
            try:
                os.environ[str(variable)] = str(value)
            except (ValueError, OSError) as error:
                raise UserError(f"{path} has env: {environment}, but {variable!r} cannot be set: {error}.") from error
        # A field that is true by default has a second action, --no_<field>, after its own.
        actions = {action.dest: action for action in reversed(self._actions)}
        for name, value in config.items():
            if name not in self._hints:
                guess = suggestion(str(name), self._hints)
                raise UserError(f"{path} has the unknown field {name}: {value}{guess}. --help lists the fields.")
            try:
                self.set_defaults(**{name: self._file_value(actions[name], value)})
            except UserError as error:
                raise UserError(f"{path} has {name}: {value}, but {error}") from error

    def _file_value(self, action: argparse.Action, value: Any) -> Any:
        """
        Convert a value from a file to the type of its field. Numbers and text are read as on the command line; one of them
        also makes a list where the field takes a list.
        """
        kinds = _kinds(self._hints[action.dest])
        if value is None:
            if type(None) in kinds or action.default is None:
                return None
            raise UserError("it takes a value, not null; leave the field out for its default.")
        if isinstance(value, dict) and dict in kinds:
            return value
        if isinstance(value, bool) and (action.dest == "fsdp" or {bool, typing.Literal} & kinds):
            return value  # these fields take text too, in which "true" and "false" mean something else
        items = value if isinstance(value, list) else [value]
        if hasattr(action.type, "__dataclass_fields__"):  # `datasets`, which AdaScriptArguments checks
            return items
        fits = list in kinds if isinstance(value, list) else isinstance(value, str) or dict not in kinds
        if not fits or any(isinstance(item, dict | list | None) for item in items):
            takes = "a mapping" if dict in kinds else "a list of values" if list in kinds else "one value"
            raise UserError(f"it takes {takes}.")
        converted = [_convert(action, item) for item in items]
        as_list = isinstance(value, list) or (list in kinds and str not in kinds)
        return converted if as_list else converted[0]

    def _check_mappings(self, given: argparse.Namespace) -> None:
        """Reject text that is not JSON where a field takes a mapping. It would fail much later, or without the field's name."""
        for name, value in vars(given).items():
            if not isinstance(value, str) or dict not in _kinds(self._hints.get(name, str)):
                continue
            if name in MAPPING_OR_PATH and not value.startswith("{"):
                continue
            try:
                is_mapping = isinstance(json.loads(value), dict)
            except ValueError:
                is_mapping = False
            if not is_mapping:
                raise UserError(f"{name} is {value!r}, but it takes a mapping, on the command line as JSON.")


def _kinds(hint: Any) -> set[Any]:
    """Return the plain types of a type hint: `list[str] | None` is `{list, NoneType}`."""
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return {kind for member in typing.get_args(hint) for kind in _kinds(member)}
    return {origin}


def _convert(action: argparse.Action, value: Any) -> Any:
    """Convert a number or text as argparse does. YAML's `true` is Python's `True`, which fields of text take as "true"."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if value is False and "no" in (action.choices or ()):
        text = "no"  # YAML reads `eval_strategy: no` as false
    try:
        converted = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise UserError(f"it takes {type_name(action)}, not {text!r}.") from error
    if action.choices and converted not in action.choices:
        raise UserError(f"it takes one of {', '.join(map(repr, action.choices))}.")
    return converted


def _read_yaml(path: Path) -> dict:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = ""
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            line = f" (line {error.problem_mark.line + 1}: {error.problem})"
        raise UserError(f"{path} is not valid YAML{line}. Correct it.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a YAML mapping of fields to values, not {config!r}.")
    names = [key.value for key, _ in yaml.compose(text).value]
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
    path = Path(name)
    if path.is_file():
        return path
    folder = recipes_folder()
    shipped = {str(recipe.relative_to(folder)): recipe for recipe in sorted(folder.rglob("*.yaml"))}
    wanted = name.removeprefix("recipes/")
    if wanted in shipped:
        return shipped[wanted]
    if path.is_dir():
        raise UserError(f"--config {name} is a directory; name a YAML file in it.")
    raise UserError(
        f"--config {name}: there is no such file, nor a recipe of that name{suggestion(wanted, shipped)}. "
        f"The recipes are in {folder}."
    )
