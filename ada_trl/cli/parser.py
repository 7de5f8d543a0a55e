"""TRL's parser with several configuration files, suggestions for misspelt options, and a help that is short to read."""

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl.scripts.utils import TrlParser

from .errors import UserError, suggestion


def program(command: str) -> str:
    """How a command was started, for its messages."""
    started_as_script = Path(sys.argv[0]).stem == "ada-trl"
    return f"ada-trl {command}" if started_as_script else f"python -m ada_trl.{command}"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, its type in place of its name once more, its default where it has one."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=116)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = "" if action.nargs == 0 else " " + self._format_args(action, self._type_of(action))
        return action.option_strings[0] + values

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # seq-balance stays in one piece

    def _type_of(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "__name__", "str").replace("string_to_bool", "bool").upper()
        return str(action.metavar or kind)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, argparse.SUPPRESS) and "%(default)" not in text and action.nargs != 0
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
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

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
            `UserError`: for a file that is missing or no mapping of fields to values, and for an unknown or a missing field.
        """
        args, paths = _split_config(sys.argv[1:] if args is None else list(args))
        for path in paths:
            self._apply_file(path)
        if required:
            given, _ = self.parse_known_args(args)
            for names in required:
                if not any(getattr(given, name) for name in names):
                    raise UserError(f"{names[0]} is not set. Give it in the configuration file or as --{names[0]}.")
        *parsed, unknown = self.parse_args_into_dataclasses(args, return_remaining_strings=True)
        if unknown:
            raise UserError(f"{self._unknown(unknown)}. --help lists the options.")
        return tuple(parsed)

    def _unknown(self, words: list[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0])
        name = word.partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        kind = "unknown option" if name.startswith("-") else "unexpected word"
        return f"{kind} {name}{suggestion(name, known)}"

    def _apply_file(self, name: str) -> None:
        """Make the values of a file the defaults."""
        path = find_config(name)
        config = _read_yaml(path)
        for variable, value in (config.pop("env", None) or {}).items():
            os.environ[str(variable)] = str(value)
        actions = {action.dest: action for action in self._actions}
        for field, value in config.items():
            self._check_file_value(path, actions.get(field), value)
        if unknown := self.set_defaults_with_config(**config):
            guess = suggestion(unknown[0].removeprefix("--"), actions)
            raise UserError(f"{path} has unknown fields: {' '.join(unknown)}{guess}. --help lists the fields.")

    def _check_file_value(self, path: Path, action: argparse.Action | None, value: Any) -> None:
        """A list where one value belongs would otherwise fail much later; a bare value where a list does is meant as one."""
        if action is None:
            return
        if isinstance(value, list) and action.nargs not in ("+", "*") and action.type in (int, float, bool):
            raise UserError(f"{path} has {action.dest}: {value}, but it takes one value.")
        if action.choices and isinstance(value, str) and value not in action.choices:
            choices = ", ".join(map(repr, action.choices))
            raise UserError(f"{path} has {action.dest}: {value!r}; choose from {choices}.")


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
        raise UserError(f"{path} is no valid YAML{line}. Correct it.") from error
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
