"""Data sets by name: on the hub, in a file, or in a directory; with errors that name the data set and the fix."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def load_splits(name: str, config: str | None = None, streaming: bool = False) -> "dict[str, Dataset]":
    """
    Load all splits of a data set: a file (`.json`, `.jsonl`, `.parquet`, `.csv`), which is `train`; a directory that
    `save_to_disk` wrote; or whatever `load_dataset` takes (a directory, a name on the hub).

    Raises:
        `ValueError`: if there is no such data set, or it cannot be read.
    """
    from datasets import load_dataset

    path = Path(name)
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise ValueError(
                f"{name} is a {path.suffix or 'nameless'} file; readable are {', '.join(FILE_TYPES)} and directories."
            )
        if not path.stat().st_size:
            raise ValueError(f"{name} cannot be read: it is empty. Replace it.")
        with _read_errors(name):
            kind = FILE_TYPES[path.suffix]
            return {"train": load_dataset(kind, data_files=str(path), split="train", streaming=streaming)}
    if (path / "config.json").exists():
        raise ValueError(
            f"Data set {name!r} is a model, as it has a config.json. A model belongs to --model_name_or_path."
        )
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return _load_saved(path, streaming)
    with _read_errors(name):
        return load_dataset(name, name=config, streaming=streaming)


def _load_saved(path: Path, streaming: bool) -> "dict[str, Dataset]":
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(path)
    splits = {"train": dataset} if isinstance(dataset, Dataset) else dataset
    return {name: rows.to_iterable_dataset() for name, rows in splits.items()} if streaming else splits


@contextmanager
def _read_errors(name: str) -> Iterator[None]:
    """Replace errors of the loading by one that names the data set, the cause and the fix."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    path = Path(name)
    try:
        yield
    except (DatasetNotFoundError, HFValidationError, FileNotFoundError) as error:
        if path.is_dir():
            raise ValueError(
                f"Data set {name!r} is a directory without data files; it needs {', '.join(FILE_TYPES)}, such as "
                "train.jsonl."
            ) from error
        raise ValueError(
            f"Data set {name!r} is neither a file nor a directory here, nor a data set on the hub that you can read. "
            "Correct the name; for a private one run `hf auth login`."
        ) from error
    except ConnectionError as error:
        raise ValueError(
            f"Data set {name!r} is neither a file nor a directory here, and the hub cannot be reached. Correct the name, "
            "or download it where there is a connection."
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        reason = error.__cause__ or error
        if path.is_file():
            raise ValueError(
                f"{name} cannot be read: {_first_flaw(path) or reason}. Correct or replace it."
            ) from error
        raise ValueError(f"Data set {name!r} cannot be read: {reason}") from error


def _first_flaw(path: Path) -> str | None:
    """Describe the first line of a JSON file that cannot be parsed, if there is one."""
    if path.suffix not in (".jsonl", ".json"):
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        json.loads(text)
    except ValueError as whole:
        for number, line in enumerate(text.splitlines() if path.suffix == ".jsonl" else (), start=1):
            try:
                json.loads(line or "{}")
            except ValueError as error:
                return f"line {number} is no valid JSON ({error})"
        return None if path.suffix == ".jsonl" else f"it is no valid JSON ({whole})"
    return None


def take_split(splits: "dict[str, Dataset]", name: str, split: str, option: str | None = None) -> "Dataset":
    """
    Return one split, which has at least one row.

    Raises:
        `ValueError`: if the data set has no such split, naming those it has, or no row in it.
    """
    if split not in splits:
        what = f"{option} ({split!r})" if option else repr(split)
        fix = (
            "Put the splits into a directory, as train.jsonl and test.jsonl, or take"
            if Path(name).is_file()
            else "Take"
        )
        raise ValueError(
            f"{what} is not a split of {name!r}, which has {', '.join(map(repr, splits))}. {fix} another with "
            f"--{option or 'dataset_split'}."
        )
    rows = splits[split]
    if hasattr(rows, "__len__") and not len(rows):
        raise ValueError(f"{name!r} has no rows in {split!r}. Take another data set or split.")
    return rows
