r"""Problems to a training set: what cannot be learnt from is dropped, what is too hard or too easy is not kept."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from datasets import Dataset
from huggingface_hub import DatasetCardData
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..files import atomic_write
from ..mathematics.problems import Problem, load_problems, normalise
from ..rewards import boxed, verify_answers
from .measure import Measurement, measure, to_model_prompt
from .samplers import Sampler, SamplingArguments, make_sampler, once
from .tables import markdown_table


if TYPE_CHECKING:
    from ..data import SelectionArguments

DATA_FILE = Path("data", "train-00000-of-00001.parquet")  # load_dataset finds it by its name, beside other files
PLACEHOLDERS = {
    "proof",
    "notfound",
    "not found",
}  # what NuminaMath 1.5, the source of OpenR1, has for want of an answer


def clean(
    problems: list[Problem], tokenizer: PreTrainedTokenizerBase, max_problem_tokens: int
) -> tuple[list[Problem], dict[str, int]]:
    """
    Drop problems that cannot be learnt from, in the data set's order.

    A problem is dropped when it or its answer is empty, or the answer a placeholder; when it has more than `max_problem_tokens` tokens; when the data
    set says that none of its recorded solutions could be verified (`correctness_math_verify`); when math-verify cannot
    parse its answer or does not recognise it; when its `solution` ends in another `\\boxed{}` answer (one without a box
    cannot be compared and counts as agreeing); when a problem before it has the same normalised text.

    Returns:
        `tuple[list[Problem], dict[str, int]]`: what is left, and the number dropped by each filter, in order.
    """
    filters: dict[str, Callable[[list[Problem]], list[bool]]] = {
        "no problem or no answer": lambda rows: [_complete(p) for p in rows],
        f"more than {max_problem_tokens} tokens": lambda rows: [
            len(ids) <= max_problem_tokens for ids in tokenizer([p.text for p in rows])["input_ids"]
        ],
        "no recorded solution verified": lambda rows: [_some_verified(p) for p in rows],
        "answer not verifiable": _verifiable,
        "solution disagrees with the answer": _agrees_with_solution,
        "duplicate": _first_of_its_text,
    }
    dropped = {}
    for name, keep in filters.items():
        kept = [problem for problem, good in zip(problems, keep(problems), strict=True) if good] if problems else []
        dropped[name] = len(problems) - len(kept)
        problems = kept
    return problems, dropped


def _complete(problem: Problem) -> bool:
    answers = [problem.answer] if isinstance(problem.answer, str) else problem.answer
    answers = {answer.strip().lower() for answer in answers}
    return bool(problem.text.strip() and answers - PLACEHOLDERS - {""})


def _some_verified(problem: Problem) -> bool:
    verified = problem.extra.get("correctness_math_verify")
    return not verified or any(verified)


def _verifiable(problems: list[Problem]) -> list[bool]:
    """Whether math-verify finds the reference, or one of several, equal to itself."""
    alternatives = [[p.answer] if isinstance(p.answer, str) else p.answer for p in problems]
    references = [reference for row in alternatives for reference in row]
    matches = iter(verify_answers([_in_box(reference) for reference in references], references))
    return [1.0 in list(islice(matches, len(row))) for row in alternatives]


def _in_box(answer: str) -> str:
    return answer if boxed(answer) else f"\\boxed{{{answer}}}"


def _agrees_with_solution(problems: list[Problem]) -> list[bool]:
    solutions = [problem.extra.get("solution") or "" for problem in problems]
    rewards = verify_answers(solutions, [problem.answer for problem in problems])
    return [reward == 1 or not boxed(solution) for reward, solution in zip(rewards, solutions, strict=True)]


def _first_of_its_text(problems: list[Problem]) -> list[bool]:
    seen: set[str] = set()
    texts = [normalise(problem.text) for problem in problems]
    return [not (text in seen or seen.add(text)) for text in texts]


def select(pass_rates: np.ndarray, min_pass_rate: float, max_pass_rate: float) -> np.ndarray:
    """
    Positions of the problems with min < pass rate ≤ max, in order.

    Raises:
        `ValueError`: if there are none.
    """
    kept = np.flatnonzero((pass_rates > min_pass_rate) & (pass_rates <= max_pass_rate))
    if not len(kept):
        raise ValueError(
            f"None of {len(pass_rates)} problems has {min_pass_rate} < pass rate <= {max_pass_rate}: "
            f"{(pass_rates <= min_pass_rate).sum()} are below, {(pass_rates > max_pass_rate).sum()} above. Widen "
            "--min_pass_rate and --max_pass_rate (nothing is sampled again), or take another model or data set."
        )
    return kept


def build_dataset(problems: list[Problem], measured: Measurement, kept: np.ndarray, prompt_format: str) -> Dataset:
    """The selected problems with columns `id`, `prompt`, `problem`, `answer`, `pass_rate` and `draws`."""
    return Dataset.from_list(
        [
            {
                "id": problems[i].id,
                "prompt": to_model_prompt(problems[i].text, prompt_format),
                "problem": problems[i].text,
                "answer": problems[i].answer,
                "pass_rate": float(measured.pass_rates[i]),
                "draws": measured.rewards.shape[1],  # behind the pass rate
            }
            for i in kept
        ]
    )


def run(
    args: "SelectionArguments",
    make: Callable[[str, PreTrainedTokenizerBase, SamplingArguments], Sampler] = make_sampler,
) -> Dataset:
    """
    Load, filter, sample, keep, write.

    Args:
        args ([`SelectionArguments`]):
            What to do.
        make (`Callable`, *optional*):
            Makes the model's sampler, if anything is to be sampled.

    Returns:
        `Dataset`: what was written.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    problems, *columns = load_problems(
        args.dataset_name,
        config=args.dataset_config,
        split=args.dataset_split,
        problem_column=args.problem_column,
        answer_column=args.answer_column,
    )
    counts = {"loaded": len(problems)}
    problems, dropped = clean(problems, tokenizer, args.max_problem_tokens)
    problems = problems[: args.max_problems]
    with once(lambda: make(args.model_name_or_path, tokenizer, args)) as sampler:
        measured = measure(
            Path(args.samples_dir or args.output_dir) / "samples.jsonl",
            problems,
            model=args.model_name_or_path,
            tokenizer=tokenizer,
            data=args.dataset_name,
            args=args,
            make_sampler=sampler,
        )
    kept = select(measured.pass_rates, args.min_pass_rate, args.max_pass_rate)
    counts |= {
        **dropped,
        "sampled": len(problems),
        f"pass rate at most {args.min_pass_rate:g}": int((measured.pass_rates <= args.min_pass_rate).sum()),
        f"pass rate above {args.max_pass_rate:g}": int((measured.pass_rates > args.max_pass_rate).sum()),
        "kept": len(kept),
    }
    dataset = build_dataset(problems, measured, kept, args.prompt_format)
    write(Path(args.output_dir), dataset, measured, counts, columns, args)
    return dataset


def write(
    output_dir: Path,
    dataset: Dataset,
    measured: Measurement,
    counts: dict[str, int],
    columns: list[str],
    args: "SelectionArguments",
) -> None:
    """Write the data file, `README.md` (the card), `selection.json` and `pass_rates.png`."""
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    with atomic_write(output_dir / DATA_FILE) as temporary:
        dataset.to_parquet(temporary)
    (output_dir / "selection.json").write_text(json.dumps(counts, indent=2) + "\n")
    (output_dir / "README.md").write_text(card(dataset, measured, counts, columns, args), encoding="utf-8")
    plot(measured.correct, args.num_samples, args.min_pass_rate, args.max_pass_rate, output_dir / "pass_rates.png")


CARD = """\
---
{metadata}
---

# {number:,} problems that {model} solves sometimes

Selected from `{data}` (problem: `{problem_column}`, answer: `{answer_column}`) with `python -m ada_trl.data` by the pass rate
of `{model}`: {num_samples} completions per problem, temperature {temperature:g}, top_p {top_p:g}, at most {max_new_tokens}
tokens, prompt format "{prompt_format}", seed {seed}; answers compared by math-verify. Kept: {min_pass_rate:g} < pass rate ≤
{max_pass_rate:g}.

{table}

![Histogram of the pass rates](pass_rates.png)

The {sampled:,} sampled problems have a mean pass rate of {mean:.3f}; {truncated:.1%} of their completions reached the token
limit. The pass rate of a problem is an estimate from {num_samples} completions: those of a narrow range regress to the mean
when they are sampled again.

| column | |
| --- | --- |
| `id` | hash of the problem's normalised text |
| `prompt` | what the model is given |
| `problem`, `answer` | as in the source |
| `pass_rate`, `draws` | measured, with so many completions |
"""


def card(
    dataset: Dataset, measured: Measurement, counts: dict[str, int], columns: list[str], args: "SelectionArguments"
) -> str:
    """The data set's README."""
    # No `configs`: with them, load_dataset takes what it cached of any directory of the same name for this one.
    metadata = DatasetCardData(
        task_categories=["text-generation"],
        tags=["math", "reinforcement-learning"],
    )
    totals = ("loaded", "sampled", "kept")
    rows = [[n if n in totals else f"dropped: {n}", f"{count:,}"] for n, count in counts.items()]
    return CARD.format(
        **{name: value for name, value in vars(args).items() if name not in ("problem_column", "answer_column")},
        metadata=metadata.to_yaml(),
        number=len(dataset),
        model=args.model_name_or_path,
        data=args.dataset_name,
        problem_column=columns[0],
        answer_column=columns[1],
        table=markdown_table(["", "problems"], rows, align_right=True),
        sampled=len(measured.rewards),
        mean=measured.pass_rates.mean(),
        truncated=(measured.lengths >= args.max_new_tokens).mean(),
    )


def plot(correct: np.ndarray, num_samples: int, min_pass_rate: float, max_pass_rate: float, path: Path) -> None:
    """Problems by the number of correct completions; what is kept is in colour."""
    from matplotlib.figure import Figure

    numbers = np.bincount(correct, minlength=num_samples + 1)
    rates = np.arange(num_samples + 1) / num_samples
    kept = (rates > min_pass_rate) & (rates <= max_pass_rate)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    for mask, colour, label in ((kept, "C0", "kept"), (~kept, "0.75", "dropped")):
        axis.bar(np.flatnonzero(mask), numbers[mask], color=colour, label=f"{label} ({numbers[mask].sum():,})")
    axis.set_xlabel(f"Correct completions of {num_samples}")
    axis.set_ylabel("Problems")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.savefig(path, dpi=150)
