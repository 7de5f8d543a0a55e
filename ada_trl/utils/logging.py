"""Warnings during training: from the main process only, and without breaking the progress bar."""

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
    Logger of the main process that does not write into the middle of a progress bar.

    [`~accelerate.logging.get_logger`] also logs on the main process only, but it prefixes messages with `[RANK 0]` and
    writes into the progress bar.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if PartialState().is_main_process:
            with logging_redirect_tqdm() if _writes_to_terminal() else nullcontext():
                super().log(level, msg, *args, **kwargs)

    @functools.lru_cache(None)  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, msg: str) -> None:
        self.warning(msg)


@contextmanager
def deduplicate_warnings(logger: logging.Logger, text: str) -> Iterator[None]:
    """While the block runs, log only the first record that contains `text`."""
    matches = 0

    def is_first(record: logging.LogRecord) -> bool:
        nonlocal matches
        if text not in str(record.msg):
            return True
        matches += 1
        return matches == 1

    logger.addFilter(is_first)
    try:
        yield
    finally:
        logger.removeFilter(is_first)


def _writes_to_terminal() -> bool:
    """Return whether messages are printed as plain text: without handlers, or by a stream handler, which tqdm can replace."""
    handlers = logging.getLogger().handlers
    return not handlers or any(getattr(handler, "stream", None) in (sys.stdout, sys.stderr) for handler in handlers)


def get_logger(name: str) -> MainProcessLogger:
    """Return the logger of a module."""
    return MainProcessLogger(logging.getLogger(name), {})
