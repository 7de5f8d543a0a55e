"""What goes wrong on one process is raised on all of them, before any waits for it in a collective."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager

from accelerate.utils import gather_object


@contextmanager
def settled(settle: Callable[[Exception | None], None]):
    """
    Hand what the body raised, or `None`, to `settle`, which raises what is to be raised. `settle` is collective, so the
    body must make no unequal collective calls.
    """
    error = None
    try:
        yield
    except Exception as caught:  # whatever it is, the other processes must hear of it before it goes on
        error = caught
    settle(error)


def shared(what: str):
    """
    Raise on every process if the body raised on any.

    Args:
        what (`str`):
            What has failed, for the processes where it has not.
    """
    return settled(lambda error: raise_first(gather_object([report(error)]), error, what))


def report(error: Exception | None) -> str | None:
    """What the other processes are told."""
    return error and f"{type(error).__name__}: {error}"


def raise_first(reports: Sequence[str | None], error: Exception | None, what: str) -> None:
    """
    Raise if any process has failed.

    Args:
        reports (`Sequence[str | None]`):
            [`report`] of every process.
        error (`Exception`, *optional*):
            This process's own, which is raised as it is.

    Raises:
        `RuntimeError`: on a process without an error of its own, with the first other one's.
    """
    if error is not None:
        raise error
    for process, text in enumerate(reports):
        if text:
            raise RuntimeError(f"Process {process} failed ({what}): {text}")
