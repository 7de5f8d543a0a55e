"""Loading of a split of a dataset from a file, a directory or the hub."""

import glob
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # it takes a second to import
    from datasets import Dataset


def load_split(name: str, split: str, config: str | None = None, streaming: bool = False) -> "Dataset":
    """
    Load a split of a dataset: a file (`.json`, `.jsonl`, `.parquet`, `.csv`), whose only split is `train`, or anything that
    `datasets.load_dataset` accepts (a directory, a name on the hub).

    Raises:
        `ValueError`: if there is no such dataset or split, or it cannot be read.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    source: dict = {"path": name, "name": config}
    if Path(name).is_file():
        source = {"path": Path(name).suffix[1:].replace("jsonl", "json"), "data_files": glob.escape(name)}
    try:
        return load_dataset(**source, split=split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        cause = str(error.__cause__ or error).rstrip(".")
        raise ValueError(
            f"Split {split!r} of dataset {name!r} cannot be read: {cause}. Correct the name of the file, directory or dataset on the "
            "hub (for a private one run `hf auth login`), or the split."
        ) from error
