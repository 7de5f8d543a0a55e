"""TRL's parser with several configuration files, checked values, suggestions for misspelt options and a short help."""

import argparse
import os
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trl.scripts.utils import TrlParser

from .errors import UserError, suggestion, user_errors


# Fields of transformers that take a mapping or the path of a file with one.
MAPPING_OR_PATH = ("accelerator_config", "deepspeed", "fsdp_config")


def program(command: str) -> str:
    """How a command was started, for its messages."""
    started_as_script = Path(sys.argv[0]).stem == "ada-trl"
    return f"ada-trl {command}" if started_as_script else f"python -m {__package__}.{command}"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Show each option once, with its type and its default."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=116)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        kind = action.metavar or getattr(action.type, "__name__", "str").replace("string_to_bool", "bool").upper()
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
    """
    [`~trl.TrlParser`] for the commands of this package.

    Args:
        dataclass_types:
            As in [`~trl.TrlParser`]; none for a command that adds its options itself.
        command (`str`):
            Name of the command.
        description (`str`):
            What it does, in a sentence.
        example (`str`):
            A command line without the program's name.
    """

    def __init__(
        self, dataclass_types: type | Iterable[type] | None = None, *, command: str, description: str, example: str
    ):
        super().__init__(
            dataclass_types,
            prog=program(command),
            description=textwrap.fill(description, 114),
            epilog=f"example:\n  {program(command)} {example}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        # transformers' parser reduces `str | dict | None` to one type; what a file may hold is decided by the hints.
        self._hints = {
            name: hint for config in self.dataclass_types for name, hint in typing.get_type_hints(config).items()
        }

    def format_help(self) -> str:
        """Required options first, and a usage line of those only."""
        self._optionals._group_actions.sort(key=lambda action: not action.required)
        words = [
            a.option_strings[0] + " …" if a.option_strings else f"{a.metavar} [{a.metavar} …]"
            for a in self._actions
            if a.required
        ]
        self.usage = " ".join(["%(prog)s", *words, "[options]"])
        return super().format_help()

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. --help lists the options.\n")

    def parse_args(self, args: list[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed

    def parse_args_and_config(self, args: list[str] | None = None, required: Sequence[Sequence[str]] = ()) -> tuple:
        """
        Parse a command line with any number of files after `--config`, of which the later ones win.

        Args:
            args (`list[str]`, *optional*):
                By default `sys.argv`.
            required (`Sequence[Sequence[str]]`, *optional*):
                Fields of which one must be set, looked at before any field is checked.

        Raises:
            `UserError`: for a file that is missing or not a mapping of fields to values, and for a field that is unknown,
                missing, or has a value that it does not take.
        """
        args, paths = _split_config(sys.argv[1:] if args is None else list(args))
        for path in paths:
            self._apply_file(find_config(path))
        given, unknown = self.parse_known_args(args)
        if unknown:
            raise UserError(f"{self._unknown(unknown)}. --help lists the options.")
        for names in required:
            if not any(getattr(given, name) for name in names):
                raise UserError(f"{names[0]} is not set. Give it in the configuration file or as --{names[0]}.")
        with user_errors(ValueError, TypeError, OSError, ImportError):
            parsed = self.parse_args_into_dataclasses(args)
        for config in parsed:
            self._check_mappings(config)
        return tuple(parsed)

    def _unknown(self, words: list[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0])
        name = word.partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        kind = "unknown option" if name.startswith("-") else "unexpected word"
        return f"{kind} {name}{suggestion(name, known)}"

    def _apply_file(self, path: Path) -> None:
        """Make the values of a file the defaults."""
        config = _read_yaml(path)
        environment = config.pop("env", None) or {}
        if not isinstance(environment, dict):
            raise UserError(f"{path} has env: {environment}, but it takes a mapping of variables to values.")
        for variable, value in environment.items():
            os.environ[str(variable)] = str(value)
        # A field that is true by default has a second action, --no_<field>, after its own.
        actions = {action.dest: action for action in reversed(self._actions)}
        for name, value in config.items():
            if name not in actions:
                guess = suggestion(str(name), actions)
                raise UserError(f"{path} has the unknown field {name}: {value}{guess}. --help lists the fields.")
            config[name] = self._file_value(path, actions[name], value)
        self.set_defaults_with_config(**config)

    def _file_value(self, path: Path, action: argparse.Action, value: Any) -> Any:
        """
        The value of a field in a file, as the field's type has it. A number or a text is read as on the command line, and
        makes a list where the field takes one.
        """
        kinds = _kinds(self._hints.get(action.dest, str))

        def reject(takes: str) -> UserError:
            return UserError(f"{path} has {action.dest}: {value}, but it takes {takes}.")

        if value is None:
            if type(None) in kinds or action.default is None:
                return None
            raise reject("a value, not null; leave the field out for its default")
        if isinstance(value, dict):
            if dict in kinds:
                return value
            raise reject("one value" if list not in kinds else "a list")
        if isinstance(value, list):
            if list not in kinds:
                raise reject("a mapping" if dict in kinds else "one value")
            return [item if _is_config(action) else self._converted(item, action, reject) for item in value]
        if dict in kinds and (not isinstance(value, str) or str not in kinds):
            raise reject("a mapping")
        if list in kinds and str not in kinds:
            return [value if _is_config(action) else self._converted(value, action, reject)]
        return self._converted(value, action, reject)

    def _converted(self, value: Any, action: argparse.Action, reject: Callable[[str], UserError]) -> Any:
        if isinstance(value, dict | list) or value is None:
            raise reject("a list of values")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            converted = self._get_value(action, text)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}. Correct it in the configuration file.") from error
        if action.choices and converted not in action.choices:
            raise reject(f"one of {', '.join(map(repr, action.choices))}")
        return converted

    def _check_mappings(self, config: Any) -> None:
        """Reject text where a field takes a mapping, which would fail much later."""
        for name, value in vars(config).items():
            if isinstance(value, str) and dict in _kinds(self._hints.get(name, str)) and name not in MAPPING_OR_PATH:
                raise UserError(f"{name} is {value!r}, but it takes a mapping, on the command line as JSON.")


def _kinds(hint: Any) -> set[Any]:
    """The plain types of a type hint: `list[str] | None` is `{list, NoneType}`."""
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return {kind for member in typing.get_args(hint) for kind in _kinds(member)}
    return {origin}


def _is_config(action: argparse.Action) -> bool:
    """Whether the items of a list are mappings, which their dataclass checks: `datasets`."""
    return hasattr(action.type, "__dataclass_fields__")


def _split_config(args: list[str]) -> tuple[list[str], list[str]]:
    """The command line without `--config`, and the files after it."""
    rest, paths = [], []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if word.startswith("--config="):
            paths.append(word.partition("=")[2])
        elif word == "--config":
            start = position
            while position < len(args) and not args[position].startswith("--"):
                position += 1
            if start == position:
                raise UserError("--config needs the path of a YAML file.")
            paths += args[start:position]
        else:
            rest.append(word)
    return rest, paths


def _read_yaml(path: Path) -> dict:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = ""
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            line = f" (line {error.problem_mark.line + 1}: {error.problem})"
        raise UserError(f"{path} is not valid YAML{line}. Correct it.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain a YAML mapping of fields to values, not {config!r}.")
    return config


def recipes_folder() -> Path:
    """The recipes that come with the package."""
    from .. import recipes

    return next(path for path in map(Path, recipes.__path__) if (path / "arithmetic").is_dir())


def find_config(name: str) -> Path:
    """
    A configuration file: a path, or the name of a recipe that comes with the package (`arithmetic/seq-balance.yaml`).

    Raises:
        `UserError`: if there is neither, naming the recipes.
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
