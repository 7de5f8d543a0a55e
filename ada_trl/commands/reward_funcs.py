"""Loading of reward functions from the names in a command line or a YAML file."""

import ast
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import UserError, user_errors


def load_reward_funcs(names: Sequence[str] | None) -> list[Callable | str]:
    """
    Import reward functions by dotted path or call; any other name is that of a reward model and returned as it is.

    Raises:
        `UserError`: for a path or a call that does not lead to a function.
    """
    if not names:
        raise UserError(
            "No reward function was given. Set `reward_funcs` to one or more import paths, for example "
            "`--reward_funcs trl.rewards.accuracy_reward`."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return [_load_reward_func(name) for name in ([names] if isinstance(names, str) else names)]


def _load_reward_func(name: str) -> Callable | str:
    import trl.rewards

    if name.endswith(")"):
        function, arguments = read_call(name)
        with user_errors(TypeError):
            return function(**arguments)
    if name in dir(trl.rewards):
        raise UserError(f"reward_funcs {name!r} has no dot, so it names a reward model. Write trl.rewards.{name}.")
    return name if "." not in name or "/" in name else _import_function(name)


def _import_function(path: str) -> Callable:
    module_name, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise UserError(
            f"Function {path!r} could not be imported: {error}. Give the dotted path of a function that is importable from "
            f"{os.getcwd()!r}, or `organization/name` for a reward model."
        ) from error


def read_call(text: str) -> tuple[Callable, dict[str, Any]]:
    """Parse a call with literal keyword arguments, such as `package.get_reward(limit=5)`, into function and arguments."""
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
