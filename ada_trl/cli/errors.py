"""A user's mistake ends a command in one sentence and exit code 2; a bug keeps its traceback."""

import difflib
import dis
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


OURS = ("ada_trl",)
LIBRARIES = (*OURS, "trl", "transformers", "peft", "accelerate", "datasets", "huggingface_hub")
ENDED_BY_CTRL_C, ENDED_BY_CLOSED_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


class UserError(ValueError):
    """A mistake in a command line, or in a file that it names. The message has the value and the remedy."""


def run(main: Callable[[list[str]], None], args: list[str], program: str) -> None:
    """
    Run a command as a user sees it.

    A user's mistake is printed in one sentence and ends with code 2, Ctrl-C with 130, a closed pipe (`| head`) with 141.
    `--debug` without a value keeps the traceback; with one it is [`~transformers.TrainingArguments`]' own field.

    Args:
        main (`Callable[[list[str]], None]`):
            The command.
        args (`list[str]`):
            Its command line.
        program (`str`):
            Its name in messages.
    """
    args, debug = _without_debug(args)
    try:
        try:
            main(args)
        finally:
            sys.stdout.flush()  # here and not at exit, where a closed pipe could not be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no reader
        raise SystemExit(ENDED_BY_CLOSED_PIPE) from None
    except KeyboardInterrupt as error:
        if debug:
            raise
        print(f"\n{program}: {one_line(error) if error.args else 'interrupted'}", file=sys.stderr)
        raise SystemExit(ENDED_BY_CTRL_C) from None
    except Exception as error:
        if debug or not is_users_mistake(error):
            raise
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _without_debug(args: list[str]) -> tuple[list[str], bool]:
    ours = [
        i for i, word in enumerate(args) if word == "--debug" and (i + 1 == len(args) or args[i + 1].startswith("-"))
    ]
    return [word for i, word in enumerate(args) if i not in ours], bool(ours)


def is_users_mistake(error: BaseException, packages: tuple[str, ...] = OURS) -> bool:
    """
    Whether somebody wrote this error for a user: a [`UserError`], or what a `raise` statement of `packages` raised on
    purpose. An error that an operation inside of them ran into (a wrong index, a failing `int()`) is a bug.
    """
    if isinstance(error, UserError):
        return True
    if not isinstance(error, ValueError | TypeError | RuntimeError | OSError | ImportError) or not error.__traceback__:
        return False
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    on_purpose = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return on_purpose and last.tb_frame.f_globals.get("__name__", "").partition(".")[0] in packages


@contextmanager
def explained() -> Iterator[None]:
    """What TRL and its libraries refuse while a run is set up is a [`UserError`] with their words."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if is_users_mistake(error, OURS) or not is_users_mistake(error, LIBRARIES):
            raise
        raise UserError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Its message on one line, and its type where there is none."""
    return " ".join(str(error).split()) or type(error).__name__


def suggestion(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
