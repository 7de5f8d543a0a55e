"""Warnings during training: on one process, on a line of their own."""

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import PartialState
from tqdm.contrib.logging import logging_redirect_tqdm


class MainProcessLogger(logging.LoggerAdapter):
    """
    A logger of the main process, which does not write into the middle of a progress bar.

    [`~accelerate.logging.get_logger`] does the former, puts `[RANK 0]` before every message, and writes into the bar.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if PartialState().is_main_process:
            with logging_redirect_tqdm() if _prints() else nullcontext():
                super().log(level, msg, *args, **kwargs)

    @functools.lru_cache(None)  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, msg: str) -> None:
        self.warning(msg)


@contextmanager
def deduplicate_warnings(logger: logging.Logger, text: str) -> Iterator[None]:
    """While the block runs, let a record that contains `text` pass once."""
    said = False

    def first(record: logging.LogRecord) -> bool:
        nonlocal said
        again, said = said and text in str(record.msg), said or text in str(record.msg)
        return not again

    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)


def _prints() -> bool:
    """Whether messages end on the terminal as plain text: by default, or by a handler that tqdm can stand in for."""
    handlers = logging.getLogger().handlers
    return not handlers or any(getattr(handler, "stream", None) in (sys.stdout, sys.stderr) for handler in handlers)


def get_logger(name: str) -> MainProcessLogger:
    """The logger of a module."""
    return MainProcessLogger(logging.getLogger(name), {})
