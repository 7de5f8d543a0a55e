"""Problems with reference answers, from the hub or from a file, whatever their columns are called."""

import logging
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from ..core import prompt_key


logger = logging.getLogger(__name__)

# In order of preference. `gt` and `ground_truth` are what the paper's data sets call it; a solution is the last resort.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "gt", "ground_truth", "final_answer", "solution")
EXTRA_COLUMNS = ("solution", "correctness_math_verify", "pass_rate")  # used where there are any
FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Problem:
    """
    A problem with what a completion is checked against.

    Args:
        text (`str`):
            The problem, without instructions.
        answer (`str` or `list[str]`):
            Reference answer, or several of which any will do.
        extra (`dict[str, Any]`):
            What the row has of `EXTRA_COLUMNS`.
    """

    text: str
    answer: str | list[str]
    extra: dict[str, Any]

    @property
    def id(self) -> str:
        """Identity across files and versions: a hash of the normalised text."""
        return prompt_key(normalise(self.text))


def normalise(text: str) -> str:
    """Text up to what does not make another problem: Unicode compatibility forms and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def load_rows(name: str, config: str | None = None, split: str = "train") -> Dataset:
    """
    Load a data set: a file (`.json`, `.jsonl`, `.parquet`, `.csv`), a directory that `save_to_disk` wrote, or whatever
    `load_dataset` takes (a directory, a name on the hub).

    Raises:
        `ValueError`: if the data set has no such split, naming those it has.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise ValueError(
                f"{name} is a {path.suffix or 'nameless'} file; readable are {', '.join(FILE_TYPES)} and directories."
            )
        return load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split="train")
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        dataset = load_from_disk(path)
    else:
        dataset = load_dataset(name, name=config)
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(f"{split!r} is not a split of {name!r}, which has {', '.join(map(repr, dataset))}.")
    return dataset[split]


def find_column(names: list[str], chosen: str | None, candidates: tuple[str, ...], what: str, data: str) -> str:
    """
    The column `chosen` by the user, else the first of `candidates` that there is.

    Raises:
        `ValueError`: if there is none, naming the columns there are and the option that sets it.
    """
    found = [name for name in candidates if name in names] if chosen is None else [chosen]
    if not found or found[0] not in names:
        wanted = repr(chosen) if chosen else f"any of {', '.join(map(repr, candidates))}"
        raise ValueError(
            f"{data!r} has the columns {', '.join(map(repr, names))}, but not {wanted} for the {what}. Set "
            f"--{what}_column."
        )
    if chosen is None:
        others = f" (also there: {', '.join(found[1:])})" if found[1:] else ""
        logger.info("%s: the %s is column %r%s.", data, what, found[0], others)
    return found[0]


def load_problems(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> tuple[list[Problem], str, str]:
    """
    Load problems in the data set's order.

    Args:
        name (`str`), config (`str`, *optional*), split (`str`, *optional*, defaults to `"train"`):
            See [`load_rows`].
        problem_column, answer_column (`str`, *optional*):
            By default the first of `PROBLEM_COLUMNS` and `ANSWER_COLUMNS` that there is, which is logged.

    Returns:
        `tuple[list[Problem], str, str]`: the problems, and the columns of problem and answer. A row without one has an
        empty text or answer.
    """
    rows = load_rows(name, config, split)
    problem_column = find_column(rows.column_names, problem_column, PROBLEM_COLUMNS, "problem", name)
    answer_column = find_column(rows.column_names, answer_column, ANSWER_COLUMNS, "answer", name)
    extra = [column for column in EXTRA_COLUMNS if column in rows.column_names]
    problems = []
    for row in rows.select_columns(list({problem_column, answer_column, *extra})):  # others may be gigabytes
        text = row[problem_column]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"Column {problem_column!r} of {name!r} holds {type(text).__name__}, not text. Set --problem_column."
            )
        kept = {column: row[column] for column in extra}
        problems.append(Problem(text or "", _references(row[answer_column]), kept))
    return problems, problem_column, answer_column


def _references(value: Any) -> str | list[str]:
    """Numbers, as CSV and JSON files have them, become text; an integer that a column with gaps made a float too."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value if item is not None]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
