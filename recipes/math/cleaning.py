"""Removal of unusable problems: incomplete, too long, not verifiable, or duplicates."""

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from .problems import Problem, normalize
from .verification import boxed, verify_answers


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDERS = {"proof", "notfound", "not found"}  # "answers" of NuminaMath 1.5, the source of OpenR1-Math


def clean(
    problems: list[Problem], tokenizer: "PreTrainedTokenizerBase", max_tokens: int, *, verify: bool = True
) -> tuple[list[Problem], dict[str, int]]:
    """
    Remove unusable problems, keeping the dataset's order.

    A problem is unusable if its text or answer is missing or a placeholder, if it has more than `max_tokens` tokens,
    if neither its references nor its annotated solution can be verified
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), v1),
    or if an earlier problem has the same normalized text.

    - The references are verified if math-verify recognizes the answer, unless the dataset marks all recorded solutions
      as incorrect (`correctness_math_verify`).
    - The annotated solution is verified if math-verify recognizes its last `\\boxed{}` and finds it equal to the
      answer. If the answer itself is not recognized, the boxed one replaces it.

    With a custom reward function there are no answers to verify (`verify=False`). Returns the remaining problems, and
    the number removed by each filter, in order.
    """
    if verify:
        problems = _replace_unrecognized_answers(problems)
    filters = {
        "no text or no answer": lambda rows: [row.text.strip() and (not verify or _has_answer(row)) for row in rows],
        f"more than {max_tokens} tokens": lambda rows: [
            len(ids) <= max_tokens for ids in tokenizer([row.text for row in rows])["input_ids"]
        ],
    }
    if verify:
        filters["neither references nor solution verified"] = _are_verified
    filters["duplicate"] = _are_first_occurrences
    removed = {}
    for name, usable in filters.items():
        kept = [problem for problem, keep in zip(problems, usable(problems), strict=True) if keep] if problems else []
        removed[name] = len(problems) - len(kept)
        problems = kept
    return problems, removed


def _has_answer(problem: Problem) -> bool:
    return bool({answer.strip().lower() for answer in problem.answers} - PLACEHOLDERS - {""})


def _are_recognized(problems: list[Problem]) -> list[bool]:
    """Check whether math-verify finds an answer, or one of several, equal to itself."""
    references = [reference for problem in problems for reference in problem.answers]
    in_boxes = [text if boxed(text) else f"\\boxed{{{text}}}" for text in references]
    matches = iter(verify_answers(in_boxes, references))
    return [1.0 in list(islice(matches, len(problem.answers))) for problem in problems]


def _replace_unrecognized_answers(problems: list[Problem]) -> list[Problem]:
    """Replace answers that math-verify does not recognize by the last boxed answer of the solution."""
    boxes = [boxed(problem.solution) for problem in problems]
    candidates = [i for i, problem in enumerate(problems) if boxes[i] and _has_answer(problem)]
    recognized = _are_recognized([problems[i] for i in candidates])
    problems = list(problems)
    for i, good in zip(candidates, recognized, strict=True):
        content = boxes[i][-1][2]
        if not good and content:
            is_list = isinstance(problems[i].columns["answer"], list)  # the column keeps its type
            answer = [content] if is_list else content
            problems[i] = replace(problems[i], columns=problems[i].columns | {"answer": answer})
    return problems


def _are_verified(problems: list[Problem]) -> list[bool]:
    """Check whether the references or the annotated solution of each problem can be verified."""
    verified = _are_recognized(problems)
    # Comparing solutions is slow, so it is done only for problems without a correct recorded completion.
    records = [problem.columns.get("correctness_math_verify") for problem in problems]
    doubtful = [i for i, correct in enumerate(records) if correct and not any(correct)]
    solutions = [problems[i].solution for i in doubtful]
    rewards = verify_answers(solutions, [problems[i].answers for i in doubtful])
    for i, solution, reward in zip(doubtful, solutions, rewards, strict=True):
        verified[i] = verified[i] and reward == 1 and bool(boxed(solution))
    return verified


def _are_first_occurrences(problems: list[Problem]) -> list[bool]:
    first: dict[str, int] = {}
    return [first.setdefault(normalize(problem.text), i) == i for i, problem in enumerate(problems)]
