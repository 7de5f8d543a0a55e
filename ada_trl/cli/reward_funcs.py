"""Reward functions by name, as a command line and a YAML file give them."""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import suggestion


def load_reward_funcs(names: list[str] | None) -> list[Callable | str]:
    """
    Dotted import paths to functions; anything that is no importable path is kept as the name of a reward model.

    Raises:
        `ValueError`: for a path or a call that leads to no function.
    """
    if not names:
        raise ValueError(
            "No reward function was given. Set `reward_funcs` to one or more import paths, for example "
            "`--reward_funcs trl.rewards.accuracy_reward`."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return [_load_reward_func(name) for name in names]


def _load_reward_func(name: str) -> Callable | str:
    if name.endswith(")"):
        return _make_reward_func(name)
    return name if "." not in name or "/" in name else _import_function(name)


def _import_function(path: str) -> Callable:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        raise ValueError(_not_imported(path, error)) from error
    try:
        found = getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(_not_imported(path, error, suggestion(attribute, dir(module)))) from error
    if not callable(found):
        raise ValueError(_not_imported(path, f"it is {type(found).__name__}, not a function"))
    return found


def _not_imported(path: str, reason: Exception | str, guess: str = "") -> str:
    return (
        f"Function {path!r} could not be imported ({reason}){guess}. Give the dotted path of a function that is "
        f"importable from {os.getcwd()!r}, or `organisation/name` for a reward model."
    )


def read_call(text: str) -> tuple[Callable, dict[str, Any]]:
    """Function and arguments of a call with literal keyword arguments, such as `package.get_reward(limit=5)`."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(item.arg is None for item in call.keywords):
            raise ValueError("it is no call with keyword arguments only")
        path = ast.unparse(call.func)
        arguments = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"Function {text!r} could not be read ({error}). Write a call as `package.get_reward(name=value, ...)` "
            "with plain values."
        ) from error
    return _import_function(path), arguments


def _make_reward_func(text: str) -> Callable:
    function, arguments = read_call(text)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"Reward function {text!r} cannot be called: {error}. Correct its arguments.") from error
    return function(**arguments)
