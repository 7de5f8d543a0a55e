"""Loading of a split of a dataset from files, a directory or the hub."""

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import url2pathname


if TYPE_CHECKING:  # it takes a second to import
    from datasets import Dataset

# Builder of `datasets` by suffix. `datasets` itself finds out how a file is compressed.
BUILDERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")


def load_split(name: str, split: str, config: str | None = None, streaming: bool = False) -> "Dataset":
    """
    Load a split of a dataset: files (see [`local_source`]), whose only split is `train`, or anything that
    `datasets.load_dataset` accepts (a directory, a name on the hub).

    Raises:
        `ValueError`: if there is no such dataset or split, or it has no rows or cannot be read.
    """
    from datasets import load_dataset

    try:
        source = local_source(name) or {"path": name}
        rows = load_dataset(**source, name=config, split=split, streaming=streaming)
        next(iter(rows))
    except Exception as error:  # each format and compression has its own, such as `lzma.LZMAError`
        cause = str(error.__cause__ or error).rstrip(".") or "it is empty"
        raise ValueError(
            f"Split {split!r} of dataset {name!r} cannot be read: {cause}. Correct the name of the file, directory or "
            "dataset on the hub (for a private one run `hf auth login`), or the split. Files are "
            f"{', '.join(BUILDERS)}, or compressed, such as .jsonl.gz."
        ) from error
    return rows


def local_source(name: str) -> dict[str, Any] | None:
    """
    Return the arguments of `datasets.load_dataset` for data of this machine: a file (a path, or `file://`), files by a
    pattern (`data/*.jsonl`), or a directory, also one of `save_to_disk`; or for the URL of a file. `None` for a name
    on the hub.

    Raises:
        `ValueError`: for a file that is missing or has none of the formats.
    """
    path = Path(url2pathname(name.removeprefix("file:")) if name.startswith("file:") else name).expanduser()
    if (path / "state.json").is_file():  # of `Dataset.save_to_disk`; `load_dataset` reads the folder of a DatasetDict
        return {"path": "arrow", "data_files": f"{glob.escape(str(path))}/data-*.arrow"}
    if path.is_dir():
        return {"path": str(path)}
    files = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    suffixes = {_suffix(file) for file in files or [name]}
    is_url = re.match(r"(?!file:)\w+://", name)
    if not files and not (is_url and suffixes <= {*BUILDERS}):
        if is_url or (re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and not suffixes & {*BUILDERS}):
            return None
        raise ValueError(f"there is no such file in {str(Path.cwd())!r}")
    if len(suffixes) > 1 or not suffixes <= {*BUILDERS}:
        raise ValueError(f"its format is {' and '.join(sorted(suffixes)) or 'unknown'}")
    (suffix,) = suffixes
    source: dict[str, Any] = {"path": BUILDERS[suffix], "data_files": [*map(glob.escape, files)] or [name]}
    return source | ({"sep": "\t"} if suffix == ".tsv" else {})


def _suffix(file: str) -> str:
    path = Path(file)
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()
