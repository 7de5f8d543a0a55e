r"""Problems to a training set: what cannot be learnt from is dropped, what is too hard or too easy is not kept."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset
from huggingface_hub import DatasetCardData
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..mathematics.cleaning import clean
from ..mathematics.problems import Problem, load_problems
from ..utils.files import atomic_write
from ..utils.tables import markdown_table
from .arguments import SamplingArguments, SelectionArguments
from .measure import EvalResult, measure, to_model_prompt
from .samplers import Sampler, make_sampler, once


DATA_FILE = Path("data", "train-00000-of-00001.parquet")  # load_dataset finds it by its name, beside other files


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


def build_dataset(
    problems: list[Problem], measured: EvalResult, kept: np.ndarray, prompt_format: str, own_reward: bool = False
) -> Dataset:
    """
    The selected problems with columns `id`, `prompt`, `problem`, `answer`, `pass_rate` and `draws`; for a reward of one's own
    with the source's columns in place of `problem` and `answer`.
    """
    return Dataset.from_list(
        [
            {
                **(problems[i].extra if own_reward else {}),
                "id": problems[i].id,
                "prompt": to_model_prompt(problems[i], prompt_format),
                **({} if own_reward else {"problem": problems[i].text, "answer": problems[i].answer}),
                "pass_rate": float(measured.pass_rates[i]),
                "draws": measured.rewards.shape[1],  # behind the pass rate
            }
            for i in kept
        ]
    )


def run(
    args: SelectionArguments,
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
        own_reward=args.reward_func is not None,
    )
    counts = {"loaded": len(problems)}
    problems, dropped = clean(
        problems, tokenizer, args.max_problem_tokens, args.strict, own_reward=args.reward_func is not None
    )
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
    dataset = build_dataset(problems, measured, kept, args.prompt_format, args.reward_func is not None)
    write(Path(args.output_dir), dataset, measured, counts, columns, args)
    return dataset


def write(
    output_dir: Path,
    dataset: Dataset,
    measured: EvalResult,
    counts: dict[str, int],
    columns: list[str | None],
    args: SelectionArguments,
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

Selected from `{data}` ({columns}) with `python -m ada_trl.data` by the pass rate
of `{model}`: {num_samples} completions per problem, temperature {temperature:g}, top_p {top_p:g}, at most {max_new_tokens}
tokens, prompt format "{prompt_format}", seed {seed}; {scored_by}. Kept: {min_pass_rate:g} < pass rate ≤
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
| `pass_rate`, `draws` | measured, with so many completions |
| the others | as in the source |
"""


def card(
    dataset: Dataset,
    measured: EvalResult,
    counts: dict[str, int],
    columns: list[str | None],
    args: SelectionArguments,
) -> str:
    """The data set's README."""
    # No `configs`: with them, load_dataset takes what it cached of any directory of the same name for this one.
    metadata = DatasetCardData(
        task_categories=["text-generation"],
        tags=[*([] if args.reward_func else ["math"]), "reinforcement-learning"],
    )
    totals = ("loaded", "sampled", "kept")
    rows = [[n if n in totals else f"dropped: {n}", f"{count:,}"] for n, count in counts.items()]
    return CARD.format(
        **vars(args),
        metadata=metadata.to_yaml(),
        number=len(dataset),
        model=args.model_name_or_path,
        data=args.dataset_name,
        columns=", ".join(
            f"{what}: `{name}`" for what, name in zip(("problem", "answer"), columns, strict=True) if name
        ),
        scored_by=args.scored_by,
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
    axis.locator_params(axis="x", integer=True)
    axis.legend(frameon=False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.savefig(path, dpi=150)
