"""Math problems with reference answers, from the hub or a file, with the column names of common datasets."""

import logging
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ada_trl.commands.dataset_loading import load_split
from ada_trl.pass_rates.prompt_id import prompt_key

from .prompts import to_prompt


if TYPE_CHECKING:
    from datasets import Dataset

    from .sampling import SamplingArguments

logger = logging.getLogger(__name__)

# In order of preference. The paper's datasets call the answer `gt`; a whole solution is the last resort.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "gt", "ground_truth", "final_answer", "solution")
EXTRA_COLUMNS = (
    "solution",
    "correctness_math_verify",
    "pass_rate",
)  # kept if present: `clean` and `evaluate` use them


@dataclass(frozen=True)
class Problem:
    """
    Problem to sample completions for.

    `columns` are the other arguments of the reward function. For math: `answer` (`str`, or `list[str]` of
    which any may match) and `EXTRA_COLUMNS`; for a custom reward function: the whole row.
    """

    text: str
    columns: dict[str, Any]
    messages: list[dict[str, str]] | None = None  # if the dataset has conversations

    @property
    def id(self) -> str:
        """Hash of the normalized text, which identifies the problem across files and versions."""
        return prompt_key(normalize(self.text))

    @property
    def solution(self) -> str:
        """The worked solution, or several joined; empty without one."""
        solution = self.columns.get("solution") or ""
        return solution if isinstance(solution, str) else "\n".join(_to_text(solution))

    @property
    def answers(self) -> list[str]:
        answer = self.columns["answer"]
        return [answer] if isinstance(answer, str) else answer

    def to_prompt(self, prompt_format: str) -> str | list[dict[str, str]]:
        """Prompt in TRL's sense: the paper's conversation (`"chat"`), or the text itself (`"plain"`)."""
        if self.messages is not None:
            return self.messages
        return to_prompt(self.text) if prompt_format == "chat" else self.text


def normalize(text: str) -> str:
    """Remove differences between spellings of the same problem: Unicode compatibility forms and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def load_problems(name: str, args: "SamplingArguments", config: str | None = None) -> list[Problem]:
    """
    Load the problems of a dataset in its order. A missing problem or answer becomes an empty text.

    A custom reward function may need any column, so all columns are kept in this case,
    and the column `prompt` is preferred.

    Raises:
        `ValueError`: if the dataset, the split or a column does not exist, or contains neither text nor conversations.
    """
    rows = load_split(name, args.dataset_split, config)
    custom = args.reward_func is not None
    candidates = PROBLEM_COLUMNS[::-1] if custom else PROBLEM_COLUMNS
    problem_column = find_column(rows, args.problem_column, candidates, "problem", name)
    if not custom:
        answer_column = find_column(rows, args.answer_column, ANSWER_COLUMNS, "answer", name)
        extra = [column for column in EXTRA_COLUMNS if column in rows.column_names]
        rows = rows.select_columns(list({problem_column, answer_column, *extra}))  # the others may be gigabytes
    problems = []
    for row in rows:
        text, messages = row[problem_column] or "", None
        if not isinstance(text, str):
            messages = text
            try:
                text = "\n".join([message["content"] for message in messages])
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"Column {problem_column!r} of {name!r} contains neither text nor conversations. "
                    "Set --problem_column."
                ) from error
        columns = row if custom else {column: row[column] for column in extra}
        if not custom:
            columns["answer"] = _to_text(row[answer_column])
        problems.append(Problem(text, columns, messages))
    return problems


def find_column(rows: "Dataset", chosen: str | None, candidates: tuple[str, ...], what: str, data: str) -> str:
    """Return the column `chosen` by the user, or the first existing column of `candidates`."""
    names = rows.column_names
    found = [name for name in ([chosen] if chosen else candidates) if name in names]
    if not found:
        wanted = repr(chosen) if chosen else f"any of {', '.join(map(repr, candidates))}"
        raise ValueError(
            f"{data!r} has the columns {', '.join(map(repr, names))}, but not {wanted} for the {what}. Set "
            f"--{what}_column."
        )
    if chosen is None:
        others = f" (also present: {', '.join(found[1:])})" if found[1:] else ""
        logger.info("%s: the %s is column %r%s.", data, what, found[0], others)
    return found[0]


def _to_text(answer: Any) -> str | list[str]:
    if isinstance(answer, list | tuple):
        return [str(item) for item in answer if item is not None]
    if isinstance(answer, float) and answer.is_integer():  # an integer of a CSV or JSON column with gaps
        return str(int(answer))
    return "" if answer is None else str(answer)
