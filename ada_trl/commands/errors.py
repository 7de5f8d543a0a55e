"""User errors end a command with one sentence and exit code 2; any other exception keeps its traceback."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


SETUP_ERRORS = (ValueError, OSError, ImportError)  # raised for bad input while a run is set up
INTERRUPTED, CLOSED_PIPE = 130, 141  # exit codes with which a shell reports SIGINT and SIGPIPE


class UserError(ValueError):
    """Mistake in a command line or in a file that it names. The message contains the value and the fix."""


def run(main: Callable[[list[str]], None], args: list[str], program: str) -> None:
    """
    Run a command and report user errors without a traceback.

    A [`UserError`] is printed in one sentence and exits with code 2, Ctrl-C with 130, a closed pipe (`| head`) with 141.
    `--debug` without a value keeps the traceback; with a value it is the field of [`~transformers.TrainingArguments`].

    Args:
        main (`Callable[[list[str]], None]`):
            Function that runs the command.
        args (`list[str]`):
            Its command line.
        program (`str`):
            Its name in messages.
    """
    args, debug = _split_debug(args)
    try:
        try:
            main(args)
        finally:
            sys.stdout.flush()  # here and not at exit, where a closed pipe could not be caught
    except BrokenPipeError:
        # Python flushes stdout again at exit; what is still buffered must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED_PIPE) from None
    except KeyboardInterrupt as error:
        if debug:
            raise
        print(f"\n{program}: {one_line(error) if error.args else 'interrupted'}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except UserError as error:
        if debug:
            raise
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _split_debug(args: list[str]) -> tuple[list[str], bool]:
    """Return the command line without a `--debug` that has no value, and whether there was one."""
    rest, debug = [], False
    for word, following in zip(args, [*args[1:], "-"], strict=False):
        if word == "--debug" and following.startswith("-"):
            debug = True
        else:
            rest.append(word)
    return rest, debug


@contextmanager
def user_errors(*classes: type[Exception]) -> Iterator[None]:
    """Raise errors of these classes (default: `SETUP_ERRORS`) as [`UserError`], with the same message."""
    reported = classes or SETUP_ERRORS
    try:
        yield
    except UserError:
        raise
    except reported as error:
        raise UserError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Return the message on one line, or the type of an error without a message."""
    return " ".join(str(error).split()) or type(error).__name__


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for a misspelt word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
