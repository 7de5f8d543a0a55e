r"""
Compare models: average@k and unbiased pass@k with intervals, on mathematics as in the paper's evaluation or by a reward of
one's own.

`ada-trl evaluate --models Qwen/Qwen2.5-Math-1.5B outputs/grpo outputs/seq-balance --output_dir outputs/evaluation`

What is finished stays on disk: after an interruption the same command continues, and models that were evaluated before are
added to a table without sampling again.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import start
from .cli.checks import check_backend, check_installed, check_model, check_scorer
from .cli.errors import explained
from .cli.parser import CommandParser
from .measurement.accuracy import difficulty_bins
from .measurement.samplers import SamplingArguments


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .mathematics.problems import Problem
    from .measurement.samplers import Sampler

# The paper's: MATH-500, Minerva Math, OlympiadBench, and 230 problems of AIME, HMMT, BRUMO, CMIMC and AMC.
DATASETS = (
    "weqweasdas/math500",
    "weqweasdas/minerva_math",
    "weqweasdas/olympiadbench",
    "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
)


@dataclass(kw_only=True)
class EvaluationArguments(SamplingArguments):
    """
    Arguments of `ada-trl evaluate`, on top of [`~measurement.samplers.SamplingArguments`].

    Args:
        models (`list[str]`):
            Names on the hub or paths of models and LoRA adapters. The others are compared with the first.
        labels (`list[str]`, *optional*):
            What to call them; by default the last part of their names, or all of it where that is not distinct.
        output_dir (`str`):
            Where samples and reports go.
        datasets (`list[str]`, *optional*):
            Names on the hub, files (JSON, JSON Lines, Parquet, CSV) or directories. By default the paper's four.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of each.
        problem_column, answer_column (`str`, *optional*):
            By default found by name, see [`~problems.load_problems`].
        max_problems (`int`, *optional*):
            Only the first problems of each data set, for a trial.
        num_samples (`int`, *optional*, defaults to `32`):
            Completions per problem: the k of average@k and the largest k of pass@k.
        pass_at (`list[int]`, *optional*):
            The k of pass@k; by default the powers of two up to `num_samples`.
        difficulty_edges (`list[float]`, *optional*, defaults to `[0, 0.2, 0.5, 1]`):
            Edges of the difficulty bins, see [`~measurement.accuracy.difficulty_bins`]. By default those of the paper's table 5:
            {0}, (0, 0.2], (0.2, 0.5], (0.5, 1].
    """

    models: list[str] = field(
        metadata={"help": "Names or paths of models and LoRA adapters. The others are compared with the first."}
    )
    labels: list[str] | None = field(default=None, metadata={"help": "What to call the models in the report."})
    output_dir: str = field(metadata={"help": "Where samples and reports go."})
    datasets: list[str] = field(
        default_factory=lambda: list(DATASETS),
        metadata={"help": "Names on the hub, files (JSON, JSON Lines, Parquet, CSV) or directories."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of each data set."})
    problem_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    answer_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    max_problems: int | None = field(default=None, metadata={"help": "Only the first of each data set, for a trial."})
    num_samples: int = field(default=32, metadata={"help": "Completions per problem."})
    pass_at: list[int] | None = field(
        default=None, metadata={"help": "The k of pass@k; default: powers of two up to num_samples."}
    )
    difficulty_edges: list[float] = field(
        default_factory=lambda: [0.0, 0.2, 0.5, 1.0], metadata={"help": "Edges of the difficulty bins."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.labels is None:
            self.labels = short_names(self.models)
        if len(self.labels) != len(self.models) or len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"labels ({self.labels}) must be distinct, one for each of the {len(self.models)} models ({self.models})."
            )
        if self.pass_at is None:
            self.pass_at = [2**i for i in range(self.num_samples.bit_length())]
        if not all(1 <= k <= self.num_samples for k in self.pass_at):
            raise ValueError(f"pass_at ({self.pass_at}) must lie between 1 and num_samples ({self.num_samples}).")
        difficulty_bins([], self.difficulty_edges)  # refuses bad edges before anything is sampled


def short_names(names: list[str]) -> list[str]:
    """The last part of each name or path without a data file's ending, or the whole where that is not distinct."""
    short = [re.sub(r"\.(jsonl?|parquet|csv)$", "", Path(name).name) or name for name in names]
    return [last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)]


def file_name(name: str) -> str:
    """A name or path as one part of a path, distinct for distinct names."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-60:]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def load_all(args: EvaluationArguments) -> dict[str, list["Problem"]]:
    """The problems of each data set by its short name."""
    from .mathematics.problems import load_problems

    loaded = {}
    for name, short in zip(args.datasets, short_names(args.datasets), strict=True):
        problems, *_ = load_problems(
            name,
            split=args.dataset_split,
            problem_column=args.problem_column,
            answer_column=args.answer_column,
            own_reward=args.reward_func is not None,
        )
        problems = problems[: args.max_problems]
        if not problems:
            raise ValueError(f"{name!r} has no problems (max_problems is {args.max_problems}).")
        loaded[short] = problems
    return loaded


def run(
    args: EvaluationArguments,
    make: Callable[[str, "PreTrainedTokenizerBase", SamplingArguments], "Sampler"] | None = None,
) -> dict:
    """
    Evaluate every model on every data set and write `results.json`, `report.md` and `results.png`.

    Args:
        args ([`EvaluationArguments`]):
            What to do.
        make (`Callable`, *optional*):
            Makes a model's sampler, if anything is to be sampled. By default that of `args.backend`.

    Returns:
        `dict`: what `results.json` holds, see [`~summary.summarise`].
    """
    from transformers import AutoTokenizer  # here, as they import torch, which takes seconds

    from .measurement.measure import measure
    from .measurement.samplers import make_sampler, once
    from .measurement.summary import markdown, plot, summarise

    make = make or make_sampler
    output_dir = Path(args.output_dir)
    data = load_all(args)
    tokenizers = [AutoTokenizer.from_pretrained(model) for model in args.models]  # a wrong name is noticed at once
    measured = {}
    for model, label, tokenizer in zip(args.models, args.labels, tokenizers, strict=True):
        with once(lambda model=model, tokenizer=tokenizer: make(model, tokenizer, args)) as sampler:
            measured[label] = {
                short: measure(
                    output_dir / "samples" / file_name(model) / f"{file_name(name)}.jsonl",
                    data[short],
                    model=model,
                    tokenizer=tokenizer,
                    data=name,
                    args=args,
                    make_sampler=sampler,
                )
                for name, short in zip(args.datasets, data, strict=True)
            }
    given = [problem.extra.get("pass_rate") for problems in data.values() for problem in problems]
    results = summarise(
        measured,
        pass_at=args.pass_at,
        max_new_tokens=args.max_new_tokens,
        difficulty_edges=args.difficulty_edges,
        pass_rates=None if None in given else given,
    )
    results["settings"] = vars(args) | {"scored_by": args.scored_by}
    (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (output_dir / "report.md").write_text(markdown(results), encoding="utf-8")
    plot(results, output_dir / "results.png")
    return results


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), evaluate, print the report."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = CommandParser(
        EvaluationArguments,
        command="evaluate",
        description="Compare models: average@k and unbiased pass@k with intervals, on mathematics as in the paper's "
        "evaluation or by a reward of one's own. After an interruption the same command continues.",
        example="--models Qwen/Qwen2.5-Math-1.5B outputs/seq-balance --output_dir outputs/evaluation",
    )
    (evaluation,) = parser.parse_args_and_config(args)
    # What would otherwise be missed after hours of sampling.
    check_scorer(evaluation.reward_func)
    check_installed("matplotlib", "plots", "draws the results")
    check_backend(evaluation.backend)
    for model in evaluation.models:
        check_model(model, "--models")
    from .measurement.summary import markdown

    with explained():
        results = run(evaluation)
    print(markdown(results))


if __name__ == "__main__":
    start("evaluate")
