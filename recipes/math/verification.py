r"""Verification of answers: the last `\boxed{}` of a completion, compared with references by math-verify."""

import re
from collections.abc import Sequence

from .verifier import available_cores, shared_pool


TAIL = 2000  # characters at the end of a completion without a box that are searched for an answer
CHUNK = 8  # answers that one process compares with a reference, which it parses once for all of them
BRACES = re.compile(r"\\(?:f?boxed|fbox)\s*{|\\.|[{}]", re.DOTALL)
BETWEEN_BOXES = re.compile(r"[\s$,;.()\[\]\\]*(?:and|or)?[\s$,;()\[\]\\]*")

References = str | Sequence[str]


def verify_answers(
    completions: Sequence[str],
    references: Sequence[References],
    *,
    timeout: float = 5.0,
    num_workers: int | None = None,
) -> list[float | None]:
    r"""
    Compare the answer of each completion with its reference by math-verify, in parallel processes.

    The answer is the last `\boxed{}` (or several, joined by commas or "and"); without one, the first expression that
    math-verify finds at the end. Equal pairs of answer and reference are compared once. Safe to call from any thread
    and any process, with any text: a comparison that takes longer than `timeout`, or crashes its process, counts as
    wrong and does not affect other rows.

    Args:
        completions (`Sequence[str]`), references (`Sequence[str | Sequence[str]]`):
            Texts, and for each its reference answer, or several of which any may match: bare (`\frac12`), in dollars,
            or a solution with a `\boxed{}` answer.
        timeout (`float`, *optional*, defaults to `5.0`), num_workers (`int`, *optional*):
            Seconds for one comparison, and maximum number of processes, by default one per available core.

    Returns:
        `list[float | None]`: 1.0 for a match, 0.0 for none, `None` if none of the row's references can be parsed.

    Raises:
        `ValueError`: if the two lists differ in length, or a limit is not positive.
        `RuntimeError`: if math-verify cannot be started.
    """
    if len(completions) != len(references):
        raise ValueError(
            f"There are {len(completions)} completions but {len(references)} references. Give one reference, or one "
            "list of references, for each completion."
        )
    num_workers = available_cores() if num_workers is None else num_workers
    if num_workers < 1 or not timeout > 0:
        raise ValueError(f"num_workers ({num_workers}) must be at least 1 and timeout ({timeout}) positive.")
    alternatives = [list_references(row) for row in references]
    answers = [extract_answer(completion) for completion in completions]

    tasks = comparisons(alternatives, answers)
    verdicts = shared_pool().run(tasks, timeout=timeout, num_workers=num_workers)
    equal: dict[str, dict[str, bool]] = {}
    for (reference, distinct), verdict in zip(tasks, verdicts, strict=True):
        if verdict is not None:
            equal.setdefault(reference, {}).update(zip(distinct, verdict, strict=True))
    usable = [[equal[reference] for reference in row if reference in equal] for row in alternatives]
    return [
        float(any(matches.get(answer) for matches in row)) if row else None
        for row, answer in zip(usable, answers, strict=True)
    ]


def list_references(row: References | float | None) -> list[str]:
    """Return the references of a row as texts; a column may hold numbers and `None`."""
    several = [row] if isinstance(row, (str, int, float)) else row or ()
    return [str(reference) for reference in several if reference is not None]


def comparisons(alternatives: Sequence[Sequence[str]], answers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Pair each reference with the distinct, non-empty answers to it, at most `CHUNK` per pair; at least one pair."""
    wanted: dict[str, dict[str, None]] = {}  # the inner dictionaries are ordered sets
    for row, answer in zip(alternatives, answers, strict=True):
        for reference in row:
            wanted.setdefault(reference, {}).update({answer: None} if answer else {})
    return [
        (reference, list(distinct)[start : start + CHUNK])
        for reference, distinct in wanted.items()
        for start in range(0, max(len(distinct), 1), CHUNK)
    ]


def extract_answer(completion: str) -> str:
    r"""Return the last `\boxed{}` with its neighbors, as `\boxed{a, b}`; without one, the end of the completion."""
    boxes = boxed(completion)
    if not boxes:
        return completion[-TAIL:].strip()
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        if start - end > 20 or not BETWEEN_BOXES.fullmatch(completion, end, start):
            break
        if content not in contents:  # an answer that is stated twice
            contents.insert(0, content)
    return f"\\boxed{{{', '.join(contents)}}}"


def boxed(text: str) -> list[tuple[int, int, str]]:
    r"""Find start, end and content of every closed, outermost `\boxed{}` of `text`, in one pass."""
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match] = []
    for token in BRACES.finditer(text):
        if token.group().endswith("{") and len(token.group()) != 2:  # not an escaped brace
            opened.append(token)
        elif token.group() == "}" and opened:
            opening = opened.pop()
            if opening.group() != "{":
                while boxes and boxes[-1][0] > opening.start():
                    boxes.pop()
                boxes.append((opening.start(), token.end(), text[opening.end() : token.start()].strip()))
    return boxes
