"""User errors end a command with one sentence and exit code 2; any other exception keeps its traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Mistake in a command line or in a file that it names. The message contains the value and the fix."""


def run(main: Callable[[list[str]], None], args: list[str], program: str) -> None:
    """
    Run a command with its command line. A [`UserError`] is printed in one sentence, after the name `program`, and exits with
    code 2. With `--traceback` it is raised.
    """
    try:
        main([word for word in args if word != "--traceback"])
    except UserError as error:
        if "--traceback" in args:
            raise
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def user_errors(*classes: type[Exception]) -> Iterator[None]:
    """Raise errors of these classes as [`UserError`], with the same message on one line."""
    try:
        yield
    except classes as error:
        raise UserError(" ".join(str(error).split())) from error
