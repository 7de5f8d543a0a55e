"""Models compared: every one on every data set."""

import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..mathematics.problems import Problem, load_problems
from .arguments import EvaluationArguments, SamplingArguments, short_names
from .measure import measure
from .samplers import Sampler, make_sampler, once
from .summary import markdown, plot, summarise


def file_name(name: str) -> str:
    """A name or path as one part of a path, distinct for distinct names."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-60:]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def load_all(args: EvaluationArguments) -> dict[str, list[Problem]]:
    """The problems of each data set by its short name."""
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
    make: Callable[[str, PreTrainedTokenizerBase, SamplingArguments], Sampler] = make_sampler,
) -> dict:
    """
    Evaluate every model on every data set and write `results.json`, `benchmarks.md` and `results.png`.

    Args:
        args ([`EvaluationArguments`]):
            What to do.
        make (`Callable`, *optional*):
            Makes a model's sampler, if anything is to be sampled. By default that of `args.backend`.

    Returns:
        `dict`: what `results.json` holds, see [`~summary.summarise`].
    """
    output_dir = Path(args.output_dir)
    data = load_all(args)
    tokenizers = [AutoTokenizer.from_pretrained(model) for model in args.models]  # a wrong name is noticed at once
    measured = {}
    for model, label, tokenizer in zip(args.models, args.labels, tokenizers, strict=True):
        with once(partial(make, model, tokenizer, args)) as sampler:
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
    given: list[Any] = [problem.extra.get("pass_rate") for problems in data.values() for problem in problems]
    results = summarise(
        measured,
        pass_at=args.pass_at,
        max_new_tokens=args.max_new_tokens,
        difficulty_edges=args.difficulty_edges,
        pass_rates=None if None in given else given,
    )
    results["settings"] = vars(args) | {"scored_by": args.scored_by}
    (output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (output_dir / "benchmarks.md").write_text(markdown(results), encoding="utf-8")
    plot(results, output_dir / "results.png")
    return results
