"""Warnings during training, from the main process only."""

import functools
import logging
from typing import Any

from accelerate import PartialState


class MainProcessLogger(logging.LoggerAdapter):
    """
    Logger of the main process. That of [`~accelerate.logging.get_logger`] also prefixes messages with `[RANK 0]`.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if PartialState().is_main_process:
            super().log(level, msg, *args, **kwargs)

    @functools.lru_cache(None)  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, msg: str) -> None:
        self.warning(msg)


def get_logger(name: str) -> MainProcessLogger:
    """Return the logger of a module."""
    return MainProcessLogger(logging.getLogger(name), {})
