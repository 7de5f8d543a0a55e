"""Atomic writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """
    Yield a temporary path in the directory of `path`, which is created if necessary. At the end of the block, the file
    written there replaces `path`.

    A reader sees either the old file or the complete new one. If the block raises, the old file stays and the
    temporary one is removed. Only one process at a time may write a path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
