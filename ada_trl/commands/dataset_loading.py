"""Loading of datasets from the hub, a file or a directory, with error messages that state the dataset and the fix."""

import glob
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
    from datasets import Dataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    path = Path(name)
    if path.is_file() and path.suffix not in FILE_TYPES:
        raise ValueError(f"{name} is a {path.suffix} file; readable are {', '.join(FILE_TYPES)} and directories.")
    if (path / "config.json").exists():  # its JSON files would be read as rows
        raise ValueError(
            f"Dataset {name!r} is a model, as it has a config.json. A model belongs to --model_name_or_path."
        )
    try:
        if path.is_file():
            files = {"data_files": glob.escape(name), "split": "train"}
            return {"train": load_dataset(FILE_TYPES[path.suffix], streaming=streaming, **files)}
        if not ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            return load_dataset(name, name=config, streaming=streaming)
        saved = load_from_disk(path)
        splits = {"train": saved} if isinstance(saved, Dataset) else saved
        return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streaming else splits
    except (DatasetsError, OSError, ValueError, StopIteration) as error:
        cause = "it has no rows" if isinstance(error, StopIteration) else str(error.__cause__ or error).rstrip(".")
        raise ValueError(
            f"Dataset {name!r} cannot be read: {cause}. Correct the name (a file, a directory with {', '.join(FILE_TYPES)} files, or "
            "a dataset on the hub; for a private one run `hf auth login`), or the file."
        ) from error


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
