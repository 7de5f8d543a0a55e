"""Loading of datasets from the hub, a file or a directory, with error messages that state the dataset and the fix."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def load_splits(name: str, config: str | None = None, streaming: bool = False) -> "dict[str, Dataset]":
    """
    Load all splits of a dataset: a file (`.json`, `.jsonl`, `.parquet`, `.csv`), whose split is `train`; a directory
    written by `save_to_disk`; or anything that `load_dataset` accepts (a directory, a name on the hub).

    Raises:
        `ValueError`: if there is no such dataset, or it cannot be read.
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
            return {"train": load_dataset(kind, data_files=glob.escape(str(path)), split="train", streaming=streaming)}
    if (path / "config.json").exists():
        raise ValueError(
            f"Dataset {name!r} is a model, as it has a config.json. A model belongs to --model_name_or_path."
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
    """Replace errors of `datasets` by one with the dataset, the cause and the fix."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (DatasetNotFoundError, HFValidationError, FileNotFoundError, ConnectionError) as error:
        if Path(name).is_dir():
            raise ValueError(
                f"Dataset {name!r} is a directory without data files; it needs {', '.join(FILE_TYPES)}, such as "
                "train.jsonl."
            ) from error
        raise ValueError(
            f"Dataset {name!r} is neither a file nor a directory here, nor a dataset that the hub or its cache provides "
            f"({type(error).__name__}). Correct the name; for a private one run `hf auth login`."
        ) from error
    except (DatasetGenerationError, ValueError, StopIteration) as error:
        cause = "it has no rows" if isinstance(error, StopIteration) else error.__cause__ or error
        raise ValueError(f"{name} cannot be read: {cause}. Correct or replace it.") from error


def take_split(splits: "dict[str, Dataset]", name: str, split: str, option: str | None = None) -> "Dataset":
    """
    Return one split, which has at least one row.

    Raises:
        `ValueError`: if the dataset has no such split (the message lists its splits), or the split has no rows.
    """
    if split not in splits:
        given = f"{option} ({split!r})" if option else repr(split)
        fix = "put train.jsonl and test.jsonl into a directory, or " if Path(name).is_file() else ""
        raise ValueError(
            f"{given} is not a split of {name!r}, which has {', '.join(map(repr, splits))}. To fix it, {fix}set "
            f"--{option or 'dataset_split'}."
        )
    rows = splits[split]
    if hasattr(rows, "__len__") and not len(rows):
        raise ValueError(f"{name!r} has no rows in {split!r}. Use another dataset or split.")
    return rows
