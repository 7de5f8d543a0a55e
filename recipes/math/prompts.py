r"""The paper's prompt format: a problem as a conversation that asks for a `\boxed{}` answer."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def to_prompt(problem: str) -> list[dict[str, str]]:
    """
    Build the conversation that the authors of [Reinforce-Ada](https://huggingface.co/papers/2510.04996) train every
    model on: the system prompt, and the problem followed by a space and the instruction. The model's own chat template
    renders it.
    """
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{problem} {INSTRUCTION}"},
    ]


def with_prompts(dataset: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """
    Add the column `prompt` to a dataset with the column `problem`, and rename `gt`, as in the authors' sets on the
    hub, to `answer`. A dataset with prompts is returned as it is; without either column a `ValueError` is raised.
    """
    columns = dataset.column_names or list(next(iter(dataset)))
    if "prompt" in columns:
        return dataset
    if "problem" not in columns:
        raise ValueError(
            f"The dataset has the columns {', '.join(map(repr, columns))}. It needs 'prompt' or 'problem'; rename the "
            "column that has the questions."
        )
    if "gt" in columns and "answer" not in columns:
        dataset = dataset.rename_column("gt", "answer")
    return dataset.map(_add_prompt)


def _add_prompt(row: dict) -> dict:
    if not isinstance(row["problem"], str):
        raise ValueError(
            f"The column 'problem' has the value {row['problem']!r}, but it must be text. Remove such rows."
        )
    return {"prompt": to_prompt(row["problem"])}
