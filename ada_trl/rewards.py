r"""
Rewards for mathematics, to be named in a recipe: `reward_funcs: [ada_trl.rewards.math_accuracy_reward]`.

The overlong penalty of DAPO (eq. 13 of https://huggingface.co/papers/2503.14476) is TRL's own:
`trl.rewards.get_soft_overlong_punishment(max_completion_len=2048, soft_punish_cache=512)`.
"""

from collections.abc import Callable
from typing import Any

from .mathematics.verification import References, boxed, verify_answers


Completion = str | list[dict[str, str]]


def text_of(completion: Completion) -> str:
    """The text of a plain or a conversational completion."""
    return completion if isinstance(completion, str) else (completion[-1]["content"] or "" if completion else "")


def get_math_accuracy_reward(timeout: float = 5.0, num_workers: int | None = None) -> Callable:
    """
    [`math_accuracy_reward`] with other limits than the default ones, see [`verify_answers`].

    In a recipe: `reward_funcs: ["ada_trl.rewards.get_math_accuracy_reward(timeout=10)"]`.
    """
    return _MathAccuracy(timeout, num_workers)


class _MathAccuracy:
    """A class and not a closure, so that the reward function can be pickled."""

    __name__ = "math_accuracy_reward"

    def __init__(self, timeout: float, num_workers: int | None):
        self.timeout = timeout
        self.num_workers = num_workers

    def __call__(
        self,
        completions: list[Completion],
        answer: list[References] | None = None,
        solution: list[References] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        references = solution if answer is None else answer
        if references is None:
            raise ValueError(
                "math_accuracy_reward needs the reference answers in a column `answer` or `solution` of the data set; "
                f"it has {', '.join(sorted(kwargs)) or 'no other columns'}. Rename the column."
            )
        texts = [text_of(completion) for completion in completions]
        return verify_answers(texts, references, timeout=self.timeout, num_workers=self.num_workers)


def math_accuracy_reward(
    completions: list[Completion],
    answer: list[References] | None = None,
    solution: list[References] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """
    1 for a correct answer, 0 for a wrong one or none, `None` where the reference cannot be parsed.

    Args:
        completions (`list[str]` or `list[list[dict[str, str]]]`):
            Plain or conversational completions.
        answer (`list[str]` or `list[list[str]]`, *optional*):
            The data set's column of reference answers, one or several per row.
        solution (`list[str]` or `list[list[str]]`, *optional*):
            Used if there is no column `answer`; the name that [`~trl.rewards.accuracy_reward`] expects.
        **kwargs:
            The other columns; not used.

    Raises:
        `ValueError`: if the data set has neither column.
    """
    return get_math_accuracy_reward()(completions, answer, solution, **kwargs)


def boxed_format_reward(completions: list[Completion], **kwargs: Any) -> list[float]:
    r"""1 for a completion with exactly one closed, non-empty `\boxed{}`, else 0."""
    contents = [[content for _, _, content in boxed(text_of(completion))] for completion in completions]
    return [float(len(found) == 1 and bool(found[0])) for found in contents]
