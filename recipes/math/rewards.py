r"""
Reward functions for mathematics. In a recipe: `reward_funcs: [ada_trl.recipes.math.rewards.math_accuracy_reward]`.

DAPO's overlong penalty (eq. 13 of https://huggingface.co/papers/2503.14476) is part of TRL:
`trl.rewards.get_soft_overlong_punishment(max_completion_len=2048, soft_punish_cache=512)`.
"""

from collections.abc import Callable
from typing import Any

from .verification import References, boxed, verify_answers


Completion = str | list[dict[str, str]]


class _MathAccuracy:
    """Verification with given limits; a class instead of a closure, so that the reward function can be pickled."""

    __name__ = "math_accuracy_reward"

    def __init__(self, timeout: float, num_workers: int | None):
        self.timeout = timeout
        self.num_workers = num_workers

    def __call__(
        self,
        completions: list[Completion],
        answer: list[References] | None = None,
        solution: list[References] | None = None,
        gt: list[References] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Return 1 for a correct answer, 0 for a wrong or missing one, `None` if the reference cannot be parsed.

        The references, one or several per row, are the dataset's column `answer`, or without it `gt`, as in the
        authors' data sets, or `solution`, the name that [`~trl.rewards.accuracy_reward`] expects.
        """
        references = next((column for column in (answer, gt, solution) if column is not None), None)
        if references is None:
            raise ValueError(
                "math_accuracy_reward needs the reference answers in a column `answer`, `gt` or `solution` of the "
                f"dataset; it has {', '.join(sorted(kwargs)) or 'no other columns'}. Rename the column."
            )
        texts = [_text_of(completion) for completion in completions]
        return verify_answers(texts, references, timeout=self.timeout, num_workers=self.num_workers)


math_accuracy_reward = _MathAccuracy(timeout=5.0, num_workers=None)


def get_math_accuracy_reward(timeout: float = 5.0, num_workers: int | None = None) -> Callable:
    """
    Create a `math_accuracy_reward` with other limits, see [`verify_answers`].

    In a recipe: `reward_funcs: ["ada_trl.recipes.math.rewards.get_math_accuracy_reward(timeout=10)"]`.
    """
    return _MathAccuracy(timeout, num_workers)


def boxed_format_reward(completions: list[Completion], **kwargs: Any) -> list[float]:
    r"""Return 1 for a completion with exactly one closed, non-empty `\boxed{}`, else 0."""
    contents = [[content for _, _, content in boxed(_text_of(completion))] for completion in completions]
    return [float(len(found) == 1 and bool(found[0])) for found in contents]


def _text_of(completion: Completion) -> str:
    return completion if isinstance(completion, str) else (completion[-1]["content"] or "" if completion else "")
