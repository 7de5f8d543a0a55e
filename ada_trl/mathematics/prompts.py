r"""The prompt of the paper's runs: a problem as a conversation that asks for a `\boxed{}` answer."""

from datasets import Dataset, IterableDataset


SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def to_prompt(problem: str) -> list[dict[str, str]]:
    """
    The conversation that the authors of [Reinforce-Ada](https://huggingface.co/papers/2510.04996) train every model on.

    Args:
        problem (`str`):
            Text of the problem.

    Returns:
        `list[dict[str, str]]`:
            The system prompt, and the problem followed by a space and the instruction, to be rendered by the model's
            own chat template.
    """
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{problem} {INSTRUCTION}"},
    ]


def with_prompts(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """
    A training set from a data set of problems; one that has a column `prompt` is left as it is.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            With the column `problem`, and `answer`, `solution` or, as in the authors' sets on the hub, `gt`.

    Returns:
        `Dataset` or `IterableDataset`: with the further column `prompt`, and `gt` renamed to `answer`.

    Raises:
        `ValueError`: if there is neither `prompt` nor `problem`.
    """
    columns = dataset.column_names or list(next(iter(dataset)))
    if "prompt" in columns:
        return dataset
    if "problem" not in columns:
        raise ValueError(
            f"The data set has the columns {', '.join(map(repr, columns))}. It needs 'prompt' or 'problem'; rename the "
            "column that has the questions."
        )
    if "gt" in columns and "answer" not in columns:
        dataset = dataset.rename_column("gt", "answer")
    return dataset.map(_add_prompt)


def _add_prompt(row: dict) -> dict:
    return {"prompt": to_prompt(row["problem"])}
