"""User errors end a command with one sentence and exit code 2; any other exception keeps its traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Mistake in a command line or in a file that it names. The message contains the value and the fix."""


def run(main: Callable[[list[str]], None], args: list[str], program: str) -> None:
    """
    Run a command with its command line. A [`UserError`] is printed in one sentence, after the name `program`, and
    exits with code 2; Ctrl-C exits with 130, as a shell reports it. With `--traceback` they are raised.
    """
    try:
        main([word for word in args if word != "--traceback"])
    except (UserError, KeyboardInterrupt) as error:
        if "--traceback" in args:
            raise
        is_user_error = isinstance(error, UserError)
        print(f"{program}: {f'error: {error}' if is_user_error else 'interrupted'}", file=sys.stderr)
        raise SystemExit(2 if is_user_error else 130) from None


@contextmanager
def user_errors(*classes: type[Exception]) -> Iterator[None]:
    """Raise errors of these classes as [`UserError`], with the same message on one line."""
    try:
        yield
    except classes as error:
        raise UserError(" ".join(str(error).split())) from error
