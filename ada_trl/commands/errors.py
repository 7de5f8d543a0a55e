"""User errors end a command with one sentence and exit code 2; any other exception keeps its traceback."""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


SETUP_ERRORS = (ValueError, TypeError, OSError, ImportError)  # raised for bad input while a run is set up
INTERRUPTED = 130  # exit code with which a shell reports SIGINT


class UserError(ValueError):
    """Mistake in a command line or in a file that it names. The message contains the value and the fix."""


def run(main: Callable[[list[str]], None], args: list[str], program: str) -> None:
    """
    Run a command. A [`UserError`] is printed in one sentence and exits with code 2, Ctrl-C with 130.

    Args:
        main (`Callable[[list[str]], None]`):
            Function that runs the command.
        args (`list[str]`):
            Its command line. `--debug` without a value keeps tracebacks; with a value it is the field of
            [`~transformers.TrainingArguments`].
        program (`str`):
            Its name in messages.
    """
    followed_by = [*args[1:], "-"]
    flags = [word == "--debug" and after.startswith("-") for word, after in zip(args, followed_by, strict=False)]
    try:
        main([word for word, is_flag in zip(args, flags, strict=True) if not is_flag])
    except (KeyboardInterrupt, UserError) as error:
        if any(flags):
            raise
        is_error = isinstance(error, UserError)
        message = f"error: {one_line(error)}" if is_error else one_line(error) if error.args else "interrupted"
        print(f"{program}: {message}", file=sys.stderr)
        raise SystemExit(2 if is_error else INTERRUPTED) from None


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
