"""
Reasoning tasks whose completions contain intermediate steps, 7 to 57 tokens,
of which the verifier sees the final answer.

`python -m ada_trl.recipes.reasoning.written_steps --output_dir outputs/written-steps` writes `steps/` (train and test
problems of `reasoning-gym`) and `base/` (the model of [`task`](task.py) after supervised training on solutions with
their steps).
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset, concatenate_datasets

from ada_trl.utils.files import atomic_write

from ..arithmetic.task import save
from .task import Family, entries_of, imitate, load_pretrained, prepare_command
from .task import problems as problems_of


MAX_COMPLETION_TOKENS = 64
START_STEPS = 140  # supervised steps of 16 problems
NUM_TEST, NUM_START, NUM_TRAIN = 24, 250, 1400  # maximum number of problems of each family


class SolvedFamily(NamedTuple):
    """Family of tasks, and how the solution of one of its entries is written."""

    family: Family
    to_solution: Callable[[dict], str]


def _running_totals(entry: dict) -> str:
    """`7 + 7 - 3` becomes `14, 11`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, totals = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(sign + term)
        totals.append(str(total))
    return ", ".join(totals)


def _columns(entry: dict) -> str:
    """`658 + 792` becomes `8+2=10, 5+9+1=15, 6+7+1=14, 1450`."""
    columns, carry = [], 0
    for digits in zip(*map(reversed, entry["metadata"]["expression"].split(" + ")), strict=True):
        column = sum(map(int, digits)) + carry
        columns.append(f"{'+'.join(digits)}{'+1' * carry}={column}")
        carry = column // 10
    return ", ".join([*columns, entry["answer"]])


def _counts(entry: dict) -> str:
    """`1 0 1 1` becomes `1, 1, 2, 3`: the number of ones until then."""
    return ", ".join(map(str, itertools.accumulate(map(int, entry["metadata"]["binary"]))))


def _multiples(entry: dict) -> str:
    """The multiples of the larger number until the first one of both: `lcm of 5, 12` becomes `12, 24, 36, 48, 60`."""
    largest = max(entry["metadata"]["numbers"])
    return ", ".join(map(str, range(largest, int(entry["answer"]) + 1, largest)))


def _expression(entry: dict) -> str:
    return f"{entry['metadata']['expression']} ="


def _is_sum(entry: dict) -> bool:
    return "-" not in entry["metadata"]["expression"]


def _has_some_multiples(entry: dict) -> bool:
    return 3 <= int(entry["answer"]) // max(entry["metadata"]["numbers"]) <= 12


FAMILIES = {
    "running totals": SolvedFamily(
        Family("chain_sum", {"min_terms": 4, "max_terms": 7, "min_digits": 1, "max_digits": 1}, _expression),
        _running_totals,
    ),
    "columns": SolvedFamily(
        Family("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}, _expression, _is_sum),
        _columns,
    ),
    "ones": SolvedFamily(
        Family(
            "count_bits", {"min_n": 2**9, "max_n": 2**15}, lambda e: f"ones in {' '.join(e['metadata']['binary'])} ="
        ),
        _counts,
    ),
    "multiples": SolvedFamily(
        Family(
            "lcm",
            {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
            lambda entry: f"lcm of {', '.join(map(str, entry['metadata']['numbers']))} =",
            _has_some_multiples,
        ),
        _multiples,
    ),
}


def problems(name: str, number: int, seed: int) -> Dataset:
    """
    Generate at most `number` distinct problems of a family, in random order.

    Columns: `prompt`, `answer` (reference answer), `solution` (the answer after its steps), `family`, and `entry`
    (input of the family's verifier, as JSON).
    """
    family, to_solution = FAMILIES[name]
    rows = problems_of(name, number, seed, family)
    return rows.map(lambda row: {"solution": to_solution(json.loads(row["entry"]))})


@functools.cache
def _verifier(name: str) -> Callable[[str, dict], float]:
    return entries_of(FAMILIES[name].family, 1, 0).score_answer


def solved(completions: list[str], family: list[str], entry: list[str], **kwargs) -> list[float]:
    """Reward 1 if the verifier accepts what follows the last comma, else 0. The steps are not verified."""
    return [
        float(_verifier(name)(completion.rpartition(",")[2].strip(), json.loads(known)) == 1.0)
        for completion, name, known in zip(completions, family, entry, strict=True)
    ]


def prepare(output_dir: str | Path, model: str | None = None, steps: int = START_STEPS, seed: int = 0) -> None:
    """
    Write `steps/{train,test}.jsonl` with distinct problems, and `base/`, the model after supervised training on
    solutions of further problems. Nothing is done if `base/` exists.

    Args:
        model (`str`, *optional*):
            See [`load_pretrained`].
        steps (`int`, *optional*, defaults to `140`):
            Steps of the supervised training, with 16 problems each.
    """
    output_dir = Path(output_dir)
    if (output_dir / "base").exists():  # written last
        return
    parts: dict[str, list[Dataset]] = {"test": [], "start": [], "train": []}
    for name in FAMILIES:
        rows = problems(name, NUM_TEST + NUM_START + NUM_TRAIN, seed)
        ends = (0, NUM_TEST, NUM_TEST + NUM_START, len(rows))
        for part, first, last in zip(parts.values(), ends, ends[1:], strict=False):
            part.append(rows.select(range(first, last)))
    for split in ("train", "test"):
        with atomic_write(output_dir / "steps" / f"{split}.jsonl") as temporary:
            concatenate_datasets(parts[split]).shuffle(seed).to_json(temporary)
    learner, tokenizer = load_pretrained(model)
    learner.to("cuda" if torch.cuda.is_available() else "cpu")
    imitate(
        learner,
        tokenizer,
        concatenate_datasets(parts["start"]),
        steps,
        seed=seed,
        learning_rate=2e-4,
        column="solution",
    )
    save(learner, tokenizer, output_dir / "base")


if __name__ == "__main__":
    prepare_command(prepare, __doc__, "outputs/written-steps", START_STEPS)
