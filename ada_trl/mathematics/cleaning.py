"""Which problems are sound enough to be learnt from."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from .problems import Problem, normalise
from .verification import boxed, verify_answers


# What NuminaMath 1.5, the source of OpenR1, has for want of an answer.
PLACEHOLDERS = {"proof", "notfound", "not found"}


def clean(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    max_problem_tokens: int,
    strict: bool = False,
    own_reward: bool = False,
) -> tuple[list[Problem], dict[str, int]]:
    """
    Drop problems that cannot be learnt from, in the data set's order.

    A problem is dropped when it or its answer is empty, or the answer a placeholder; when it has more than
    `max_problem_tokens` tokens; when a problem before it has the same normalised text; and when neither its references nor
    its annotated solution can be verified ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), v1):

    - the references hold if math-verify recognises the answer, and unless the data set says that none of its recorded
      solutions could be verified (`correctness_math_verify`);
    - the annotated solution holds if math-verify recognises what it ends in, in a `\\boxed{}`, and finds it equal to the
      answer. Where the answer itself is not recognised, the boxed one takes its place.

    With `strict`, a problem is dropped when any of these fails: the answer, the recorded solutions, or the annotated one
    (one without a box cannot be compared and counts as agreeing). With `own_reward`, there are no answers to verify.

    Returns:
        `tuple[list[Problem], dict[str, int]]`: what is left, and the number dropped by each filter, in order.
    """
    if not strict and not own_reward:
        problems = _with_boxed_answers(problems)
    filters: dict[str, Callable[[list[Problem]], list[bool]]] = {
        "no problem or no answer": lambda rows: [bool(p.text.strip()) if own_reward else _complete(p) for p in rows],
        f"more than {max_problem_tokens} tokens": lambda rows: [
            len(ids) <= max_problem_tokens for ids in tokenizer([p.text for p in rows])["input_ids"]
        ],
    }
    if own_reward:
        filters = {"no problem": filters.pop("no problem or no answer"), **filters}
    elif strict:
        filters |= {
            "no recorded solution verified": lambda rows: [_some_verified(p) for p in rows],
            "answer not verifiable": _verifiable,
            "solution disagrees with the answer": _agrees_with_solution,
        }
    else:
        filters["neither references nor solution verified"] = _confirmed
    filters["duplicate"] = _first_of_its_text
    dropped = {}
    for name, keep in filters.items():
        kept = [problem for problem, good in zip(problems, keep(problems), strict=True) if good] if problems else []
        dropped[name] = len(problems) - len(kept)
        problems = kept
    return problems, dropped


def _complete(problem: Problem) -> bool:
    answers = [problem.answer] if isinstance(problem.answer, str) else problem.answer
    named = {answer.strip().lower() for answer in answers} - PLACEHOLDERS - {""}
    return bool(problem.text.strip() and named)


def _some_verified(problem: Problem) -> bool:
    verified = problem.extra.get("correctness_math_verify")
    return not verified or any(verified)


def _verifiable(problems: list[Problem]) -> list[bool]:
    """Whether math-verify finds the reference, or one of several, equal to itself."""
    alternatives = [[p.answer] if isinstance(p.answer, str) else p.answer for p in problems]
    references = [reference for row in alternatives for reference in row]
    matches = iter(verify_answers([_in_box(reference) for reference in references], references))
    return [1.0 in list(islice(matches, len(row))) for row in alternatives]


def _with_boxed_answers(problems: list[Problem]) -> list[Problem]:
    """The problems with the last boxed answer of their solution in place of one that math-verify does not recognise."""
    boxes = [boxed(problem.extra.get("solution") or "") for problem in problems]
    candidates = [i for i, problem in enumerate(problems) if boxes[i] and _complete(problem)]
    verifiable = _verifiable([problems[i] for i in candidates])
    replaced = {
        i: replace(problems[i], answer=boxes[i][-1][2])
        for i, good in zip(candidates, verifiable, strict=True)
        if not good and boxes[i][-1][2]
    }
    return [replaced.get(i, problem) for i, problem in enumerate(problems)]


def _confirmed(problems: list[Problem]) -> list[bool]:
    """Whether the references or the annotated solution of each problem can be verified."""
    unsure = [problem for problem in problems if not _some_verified(problem)]
    boxes = [bool(boxed(problem.extra.get("solution") or "")) for problem in unsure]
    agreeing = iter([box and agrees for box, agrees in zip(boxes, _agrees_with_solution(unsure), strict=True)])
    sound = [_some_verified(problem) or next(agreeing) for problem in problems]
    return [good and verifiable for good, verifiable in zip(sound, _verifiable(problems), strict=True)]


def _in_box(answer: str) -> str:
    return answer if boxed(answer) else f"\\boxed{{{answer}}}"


def _agrees_with_solution(problems: list[Problem]) -> list[bool]:
    solutions = [problem.extra.get("solution") or "" for problem in problems]
    rewards = verify_answers(solutions, [problem.answer for problem in problems])
    return [reward == 1 or not boxed(solution) for reward, solution in zip(rewards, solutions, strict=True)]


def _first_of_its_text(problems: list[Problem]) -> list[bool]:
    first: dict[str, int] = {}  # position by text
    return [first.setdefault(normalise(problem.text), i) == i for i, problem in enumerate(problems)]
