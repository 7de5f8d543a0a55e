"""Finished work on disk, one line each, so that an interrupted command continues where it was."""

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from ..utils.files import atomic_write


logger = logging.getLogger(__name__)

_FORMAT = 1


class SampleStore:
    """
    A JSON Lines file: a header with the settings, then one row per finished prompt, in the order they finished.

    A row is written in one piece and handed to the operating system before the next one, so a process that is killed
    loses at most the row it was writing. Such a torn last line is dropped, with a warning, when the file is opened
    next; anything else that is not as written is refused. Rows stay on disk: the samples of a large data set are
    gigabytes. The header is written with the first row, so that a command that fails before leaves nothing.

    Args:
        path (`str` or `Path`):
            The file. Created if it does not exist.
        settings (`dict[str, Any]`):
            Everything that decides what a row contains; JSON values. A file with rows of other settings is refused.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.settings = settings
        self.id = uuid.uuid4().hex  # of the file's content, which a file derived from it can refer to
        self.done: set[int] = set()  # prompt positions
        self._file: TextIO | None = None  # while it is open and has a header

    @contextmanager
    def open(self) -> Iterator["SampleStore"]:
        """
        Read what there is; [`append`] works while the context is open.

        Raises:
            `ValueError`: if the file was written with other settings, naming both values, or is corrupt.
            `RuntimeError`: if another process has it open.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise RuntimeError(
                f"Another process is writing {self.path}. Wait until it has ended, or choose another output directory."
            ) from error
        try:
            if self.path.exists():
                self._recover()
            yield self
            self._begin()  # a finished file has a header, if nothing else
        finally:
            if self._file:
                self._file.close()
                self._file = None
            lock.release()

    def append(self, index: int, **values: Any) -> None:
        """Store what is finished of the prompt at position `index`."""
        if index in self.done:
            raise ValueError(f"Prompt {index} is already in {self.path}.")
        file = self._begin()
        file.write(_line({"index": index, **values}))
        file.flush()
        self.done.add(index)

    def _begin(self) -> TextIO:
        """Open the file for rows, with a header before the first one."""
        if self._file:
            return self._file
        if not self.done:
            header = {"format": _FORMAT, "id": self.id, "settings": self.settings}
            with atomic_write(self.path) as temporary:
                temporary.write_text(_line(header), encoding="utf-8")
        self._file = open(self.path, "a", encoding="utf-8")
        return self._file

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, in the order they finished, one at a time from the disk."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def _recover(self) -> None:
        complete, other_settings = 0, None  # bytes; an error
        with open(self.path, "rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    logger.warning(
                        "%s ends in an incomplete line, as after a kill. It is dropped and its prompt done again.",
                        self.path,
                    )
                    file.truncate(complete)
                    break
                row = self._parse(line, number)
                if number == 1:
                    other_settings = self._check_header(row)
                elif other_settings:  # and rows; a header alone, of a command that failed, is written anew
                    raise other_settings
                elif not isinstance(row.get("index"), int) or row["index"] in self.done:
                    raise self._corrupt(f"line {number} has index {row.get('index')!r}, which is missing or repeated")
                else:
                    self.done.add(row["index"])
                complete += len(line)
        if not complete:
            raise self._corrupt("it has no header")

    def _check_header(self, header: dict[str, Any]) -> ValueError | None:
        """What is wrong with its settings."""
        if header.get("format") != _FORMAT:
            raise self._corrupt(f"its format is {header.get('format')!r}; this version of ada_trl reads {_FORMAT}")
        stored = header["settings"]
        for name in sorted(stored.keys() | self.settings.keys()):
            if stored.get(name) != self.settings.get(name):
                return ValueError(
                    f"{self.path} was written with {name} {stored.get(name)!r}, but this run has "
                    f"{self.settings.get(name)!r}. Continue with the former, or start anew: choose another output "
                    "directory, or delete the file."
                )
        self.id = header["id"]
        return None

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise self._corrupt(f"line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise self._corrupt(f"line {number} is not an object")
        return row

    def _corrupt(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is corrupt: {what}. Repair or delete it.")


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"  # all ASCII: no character of a completion can end a line
