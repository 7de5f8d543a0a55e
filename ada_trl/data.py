r"""
Select training problems by how often a model solves them, as in the paper (v3, section 4.1).

`python -m ada_trl.data --model_name_or_path Qwen/Qwen2.5-Math-1.5B --output_dir outputs/easy --max_pass_rate 0.313`

Problems are loaded, filtered, sampled and kept by pass rate; `output_dir` is then a data set for `ada_trl.train`. What is
finished stays on disk: after an interruption the same command continues, and with another range of pass rates nothing is
sampled again.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from huggingface_hub import DatasetCardData
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import TrlParser

from .files import atomic_write
from .mathematics.cleaning import clean
from .mathematics.problems import Problem, load_problems
from .measurement.measure import Measurement, measure, to_model_prompt
from .measurement.samplers import Sampler, SamplingArguments, make_sampler, once
from .measurement.tables import markdown_table


logger = logging.getLogger(__name__)

DATA_FILE = Path("data", "train-00000-of-00001.parquet")  # load_dataset finds it by its name, beside other files


@dataclass(kw_only=True)
class SelectionArguments(SamplingArguments):
    """
    Arguments of `ada_trl.data`, on top of [`~sampling.SamplingArguments`].

    Args:
        model_name_or_path (`str`):
            Model whose pass rates decide; also whose tokenizer counts a problem's tokens.
        output_dir (`str`):
            Where the data set, its card and a histogram go.
        samples_dir (`str`, *optional*):
            Where the samples are kept, `output_dir` by default. Give the one of an earlier selection to make another
            from the same samples.
        dataset_name (`str`, *optional*, defaults to `"open-r1/OpenR1-Math-220k"`):
            Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"train"`):
            Part of it.
        problem_column, answer_column (`str`, *optional*):
            By default found by name, see [`~problems.load_problems`].
        max_problem_tokens (`int`, *optional*, defaults to `700`):
            Longer problems are dropped.
        strict (`bool`, *optional*, defaults to `False`):
            Drop a problem when its references *or* its annotated solution cannot be verified, and not only when both
            cannot, see [`~cleaning.clean`].
        max_problems (`int`, *optional*):
            Only the first problems that pass the filters, for a trial.
        min_pass_rate (`float`, *optional*, defaults to `0.0`), max_pass_rate (`float`, *optional*, defaults to `0.375`):
            Problems with min < pass rate ≤ max are kept. The paper, of 16 samples: 0.375 in section 4.1, 1 or 2 of 16
            (0.125) for the hard sets in appendix C.1; the authors' script has 0.313 for the easy ones.
        num_samples (`int`, *optional*, defaults to `16`):
            Completions per problem.
    """

    model_name_or_path: str = field(metadata={"help": "Model whose pass rates decide."})
    output_dir: str = field(metadata={"help": "Where the data set, its card and a histogram go."})
    samples_dir: str | None = field(
        default=None,
        metadata={
            "help": "Where the samples are kept; default: output_dir. Give the one of an earlier selection to make "
            "another from the same samples."
        },
    )
    dataset_name: str = field(
        default="open-r1/OpenR1-Math-220k",
        metadata={"help": "Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the data set."})
    problem_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    answer_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    max_problem_tokens: int = field(default=700, metadata={"help": "Longer problems are dropped."})
    strict: bool = field(
        default=False,
        metadata={"help": "Drop a problem when its references or its annotated solution fail, not only when both do."},
    )
    max_problems: int | None = field(
        default=None, metadata={"help": "Only the first problems that pass the filters, for a trial."}
    )
    min_pass_rate: float = field(default=0.0, metadata={"help": "Kept: min < pass rate <= max."})
    max_pass_rate: float = field(
        default=0.375,
        metadata={"help": "Kept: min < pass rate <= max. The paper: 0.125 (hard), 0.313 (easy), 0.375 (text), of 16."},
    )
    num_samples: int = field(default=16, metadata={"help": "Completions per problem."})

    def __post_init__(self):
        super().__post_init__()
        if not self.min_pass_rate < self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) must be less than max_pass_rate ({self.max_pass_rate}): problems "
                "with min < pass rate <= max are kept."
            )


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
    """The selected problems with columns `id`, `prompt`, `problem`, `answer` and `pass_rate`."""
    return Dataset.from_list(
        [
            {
                "id": problems[i].id,
                "prompt": to_model_prompt(problems[i].text, prompt_format),
                "problem": problems[i].text,
                "answer": problems[i].answer,
                "pass_rate": float(measured.pass_rates[i]),
            }
            for i in kept
        ]
    )


def run(
    args: SelectionArguments, make: Callable[[str, PreTrainedTokenizerBase, SamplingArguments], Sampler] = make_sampler
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
    problems, dropped = clean(problems, tokenizer, args.max_problem_tokens, args.strict)
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
| `pass_rate` | measured |
"""


def card(
    dataset: Dataset, measured: Measurement, counts: dict[str, int], columns: list[str], args: SelectionArguments
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


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), select, say what was kept."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = TrlParser(SelectionArguments, prog="python -m ada_trl.data")
    (selection,) = parser.parse_args_and_config(args)
    run(selection)
    counts = json.loads((Path(selection.output_dir) / "selection.json").read_text())
    print("\n".join(f"{count:>10,}  {name}" for name, count in counts.items()))
    print(f"Wrote {selection.output_dir}; train on it with --dataset_name {selection.output_dir}.")


if __name__ == "__main__":
    main()
