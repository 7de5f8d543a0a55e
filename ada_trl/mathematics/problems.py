"""Problems with reference answers, from the hub or from a file, whatever their columns are called."""

import json
import logging
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import prompt_key


if TYPE_CHECKING:
    from datasets import Dataset

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
            What the row has of `EXTRA_COLUMNS`; for a reward of one's own all of it.
        messages (`list[dict[str, str]]`, *optional*):
            The problem as a conversation, if it is one.
    """

    text: str
    answer: str | list[str]
    extra: dict[str, Any]
    messages: list[dict[str, str]] | None = None

    @property
    def id(self) -> str:
        """Identity across files and versions: a hash of the normalised text."""
        return prompt_key(normalise(self.text))


def normalise(text: str) -> str:
    """Text up to what does not make another problem: Unicode compatibility forms and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


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
    """What the data set is called and what is wrong with it, in place of what loading it ran into."""
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
    """Where a file is not what its name says, as far as that can be told by looking."""
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
    One split, with at least one row.

    Raises:
        `ValueError`: if the data set has no such split, naming those it has, or no row in it.
    """
    if split not in splits:
        what = f"{option} ({split!r})" if option else repr(split)
        remedy = (
            "Put the splits into a directory, as train.jsonl and test.jsonl, or take"
            if Path(name).is_file()
            else "Take"
        )
        raise ValueError(
            f"{what} is not a split of {name!r}, which has {', '.join(map(repr, splits))}. {remedy} another with "
            f"--{option or 'dataset_split'}."
        )
    rows = splits[split]
    if hasattr(rows, "__len__") and not len(rows):
        raise ValueError(f"{name!r} has no rows in {split!r}. Take another data set or split.")
    return rows


def load_rows(name: str, config: str | None = None, split: str = "train") -> "Dataset":
    """
    Load one split of a data set, see [`load_splits`].

    Raises:
        `ValueError`: if the data set has no such split, naming those it has.
    """
    return take_split(load_splits(name, config), name, split)


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
    own_reward: bool = False,
) -> tuple[list[Problem], str, str | None]:
    """
    Load problems in the data set's order.

    Args:
        name (`str`), config (`str`, *optional*), split (`str`, *optional*, defaults to `"train"`):
            See [`load_rows`].
        problem_column, answer_column (`str`, *optional*):
            By default the first of `PROBLEM_COLUMNS` and `ANSWER_COLUMNS` that there is, which is logged.
        own_reward (`bool`, *optional*, defaults to `False`):
            Whether a reward function takes the place of the answers: they are not needed, it sees all columns, and a
            column `prompt` comes first, which may hold conversations.

    Returns:
        `tuple[list[Problem], str, str | None]`: the problems, and the columns of problem and answer. A row without one has an
        empty text or answer.
    """
    rows = load_rows(name, config, split)
    if own_reward:
        return _with_all_columns(rows, name, problem_column)
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


def _with_all_columns(rows: "Dataset", name: str, problem_column: str | None) -> tuple[list[Problem], str, str | None]:
    column = find_column(rows.column_names, problem_column, PROBLEM_COLUMNS[::-1], "problem", name)
    problems = []
    for row in rows:
        prompt = row[column] or ""
        try:
            text = prompt if isinstance(prompt, str) else "\n".join([message["content"] for message in prompt])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"Column {column!r} of {name!r} holds neither text nor conversations of text. Set --problem_column."
            ) from error
        problems.append(Problem(text, "", row, None if isinstance(prompt, str) else prompt))
    return problems, column, None


def _references(value: Any) -> str | list[str]:
    """Numbers, as CSV and JSON files have them, become text; an integer that a column with gaps made a float too."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value if item is not None]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
