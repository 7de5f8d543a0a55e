"""
Select training problems by the pass rate of a model, as in the paper (v3, section 4.1).

`python -m ada_trl.recipes.math.select --model_name_or_path Qwen/Qwen2.5-Math-1.5B --max_pass_rate 0.313
--output_dir outputs/easy`

Unusable problems are removed, completions of the others are sampled and scored, and those with a pass rate in the
given range are written to `output_dir`, a dataset for `ada-trl train`. After an interruption the same command
continues.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from filelock import FileLock
from transformers.hf_argparser import HfArg

from ada_trl.utils.console import replace_unknown_characters
from ada_trl.utils.files import atomic_write

from .cleaning import clean
from .problems import load_problems
from .samplers import make_sampler
from .sampling import Model, SamplingArguments, parse_arguments


DATA_FILE = Path("data", "train-00000-of-00001.parquet")  # a name that `load_dataset` recognizes among other files


@dataclass(kw_only=True)
class SelectArguments(SamplingArguments):
    """Options of `select.py`, in addition to [`~sampling.SamplingArguments`]."""

    model_name_or_path: str = HfArg(help="Model that samples the completions.")
    dataset_name: str = HfArg(
        default="open-r1/OpenR1-Math-220k",
        help="Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory. The authors' problems: "
        "weqweasdas/from_default_filtered_openr1.",
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of the dataset.")
    max_problem_tokens: int = HfArg(default=700, help="Longer problems are removed.")
    min_pass_rate: float | None = HfArg(
        default=None,
        help="Problems with min <= pass rate <= max are selected. Default: at least one correct completion.",
    )
    max_pass_rate: float = HfArg(
        default=0.375, help="See min_pass_rate. The paper: 0.375; the authors' script: 0.313 (easy), 0.125 (hard)."
    )
    num_samples: int = HfArg(default=16, help="Completions per problem.")
    samples_dir: str | None = HfArg(
        default=None,
        help="Directory of the samples; default: output_dir. With that of an earlier selection, nothing is "
        "sampled again.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_pass_rate is None:
            self.min_pass_rate = 1 / self.num_samples
        if not 0 <= self.min_pass_rate <= self.max_pass_rate <= 1:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) and max_pass_rate ({self.max_pass_rate}) must satisfy "
                "0 <= min <= max <= 1: problems with min <= pass rate <= max are selected."
            )


def in_range(pass_rates: np.ndarray, min_pass_rate: float, max_pass_rate: float) -> np.ndarray:
    """
    Return the positions of the problems with min ≤ pass rate ≤ max, in order.

    Raises:
        `ValueError`: if there are none.
    """
    selected = np.flatnonzero((pass_rates >= min_pass_rate) & (pass_rates <= max_pass_rate))
    if not len(selected):
        raise ValueError(
            f"None of {len(pass_rates)} problems has {min_pass_rate} <= pass rate <= {max_pass_rate}: "
            f"{(pass_rates < min_pass_rate).sum()} are below, {(pass_rates > max_pass_rate).sum()} above. Widen "
            "--min_pass_rate and --max_pass_rate (nothing is sampled again), or choose another model or dataset."
        )
    return selected


def run(args: SelectArguments, make: Callable = make_sampler) -> Dataset:
    """
    Load, clean, sample and select; write the dataset and `selection.json`, the number of problems at each stage.

    `make` replaces [`~samplers.make_sampler`].
    """
    custom = args.reward_func is not None
    model = Model(args.model_name_or_path, args, make)  # first, to fail early if its name is wrong
    loaded = load_problems(args.dataset_name, args, args.dataset_config)
    problems, removed = clean(loaded, model.tokenizer, args.max_problem_tokens, verify=not custom)
    problems = problems[: args.max_problems]
    try:
        samples = Path(args.samples_dir or args.output_dir) / "samples"
        measured = model.measure(problems, samples, args.dataset_name)
    finally:
        model.close()
    # Problems without any reward have no pass rate: NaN is neither below nor above.
    pass_rates = np.where(measured.unscored, np.nan, measured.pass_rates)
    selected = in_range(pass_rates, args.min_pass_rate, args.max_pass_rate)
    rows = []
    has_lists = not custom and any(isinstance(problems[i].columns["answer"], list) for i in selected)
    for i in selected:
        problem = problems[i]
        if custom:  # the reward function may need any column of the source
            row = problem.columns
        else:  # a column of a table has one type
            row = {"problem": problem.text, "answer": problem.answers if has_lists else problem.columns["answer"]}
        added = {"id": problem.id, "prompt": problem.to_prompt(args.prompt_format)}
        rows.append(row | added | {"pass_rate": float(pass_rates[i]), "rollouts": args.num_samples})
    dataset = Dataset.from_list(rows)
    counts = {
        "loaded": len(loaded),
        **{f"removed: {reason}": number for reason, number in removed.items()},
        "sampled": len(problems),
        "without any reward": int(measured.unscored.sum()),
        f"pass rate below {args.min_pass_rate:g}": int((pass_rates < args.min_pass_rate).sum()),
        f"pass rate above {args.max_pass_rate:g}": int((pass_rates > args.max_pass_rate).sum()),
        "selected": len(selected),
    }
    by_correct = np.bincount(measured.correct, minlength=args.num_samples + 1).tolist()
    report = {"problems": counts, "problems_by_correct_completions": by_correct, "settings": asdict(args)}
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(output_dir / ".lock"):  # several processes may share the work; one writes at a time
        with atomic_write(output_dir / DATA_FILE) as temporary:
            dataset.to_parquet(temporary)
        (output_dir / "selection.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return dataset


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), select, and print the number of problems at each stage."""
    replace_unknown_characters()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments(SelectArguments, args, "Select training problems by the pass rate of a model.")
    run(arguments)
    report = json.loads((Path(arguments.output_dir) / "selection.json").read_text(encoding="utf-8"))
    for stage, number in report["problems"].items():
        print(f"{number:>10,}  {stage}")
    print(
        f"Problems with 0 to {arguments.num_samples} correct completions: {report['problems_by_correct_completions']}"
    )
    print(f"Written to {arguments.output_dir}; train with --dataset_name {arguments.output_dir}.")


if __name__ == "__main__":
    main()
