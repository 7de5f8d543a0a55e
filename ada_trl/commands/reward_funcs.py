"""Loading of reward functions from the names in a command line or a YAML file."""

import ast
import importlib
import importlib.util
import os
import reprlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError, user_errors


def load_reward_funcs(names: Sequence[str] | None) -> list[Callable | str]:
    """
    Import reward functions by dotted path or call. The name (`organization/name`) or directory of a reward model is
    returned as it is.

    Raises:
        `UserError`: for a name that leads to neither.
    """
    if not names:
        raise UserError(
            "No reward function was given. Set `reward_funcs` to one or more import paths, for example "
            "`--reward_funcs trl.rewards.accuracy_reward`."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return [_load_reward_func(name) for name in (names if isinstance(names, list | tuple) else [names])]


def _load_reward_func(name: Any) -> Callable | str:
    if not isinstance(name, str):
        raise UserError(f"reward_funcs {name!r} is not text. Write the dotted path of a function.")
    if name.endswith(")"):
        function, arguments = read_call(name)
        with user_errors(TypeError):
            found = function(**arguments)
    elif (Path(name) / "config.json").is_file():
        return name
    elif name.endswith(".py") or ":" in name:
        raise UserError(f"reward_funcs {name!r} is not a dotted path. Write {_dotted_path(name)}.")
    elif "/" in name:
        return name
    elif "." not in name:
        raise UserError(f"reward_funcs {name!r} has no dot, so it names no function. Write {_full_name(name)}.")
    else:
        found = _import_function(name)
    if isinstance(found, type):
        raise UserError(f"reward_funcs {name!r} is a class. Write the call that creates a function: {name}(...).")
    if not callable(found):
        raise UserError(f"reward_funcs {name!r} is {reprlib.repr(found)}, and not a function.")
    return found


def _dotted_path(name: str) -> str:
    """The dotted path that is meant by a file (`./my_rewards.py`) or `my_rewards:accuracy`."""
    module, _, function = name.rpartition(":") if ":" in name else (name, "", "FUNCTION")
    return ".".join([*Path(module.removesuffix(".py")).parts, function])


def _full_name(name: str) -> str:
    import trl.rewards

    if name in dir(trl.rewards):
        return f"trl.rewards.{name}"
    if importlib.util.find_spec(name):
        return f"{name}.FUNCTION, a function of this module"
    return f"MODULE.{name} for a function in a file MODULE.py, or organization/{name} for a reward model on the hub"


def _import_function(path: str) -> Callable:
    module_name, _, attribute = path.rpartition(".")
    advice = f"Give the dotted path of a function that is importable from {os.getcwd()!r}, or `organization/name` for"
    advice += " a reward model."
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if all(module_name.split(".")) and module_name not in sys.modules and not is_missing:
            advice = f"The error is in {module_name}, or in a module that it imports; --traceback shows where."
        raise UserError(f"Function {path!r} could not be imported: {error}. {advice}") from error


def read_call(text: str) -> tuple[Callable, dict[str, Any]]:
    """Parse a call with literal keyword arguments, `package.get_reward(limit=5)`, into function and arguments."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(item.arg is None for item in call.keywords):
            raise ValueError("it is not a call with keyword arguments only")
        path = ast.unparse(call.func)
        arguments = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg}
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"Function {text!r} could not be read ({error}). Write a call as `package.get_reward(name=value, ...)` "
            "with plain values."
        ) from error
    return _import_function(path), arguments
