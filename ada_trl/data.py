r"""
Select training problems by how often a model solves them, as in the paper (v3, section 4.1).

`ada-trl data --model_name_or_path Qwen/Qwen2.5-Math-1.5B --output_dir outputs/easy --max_pass_rate 0.313`

Problems are loaded, filtered, sampled and kept by pass rate; `output_dir` is then a data set for `ada-trl train`. What is
finished stays on disk: after an interruption the same command continues, and with another range of pass rates nothing is
sampled again.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from .cli import start
from .cli.checks import check_backend, check_installed, check_model, check_scorer
from .cli.errors import explained
from .cli.parser import CommandParser
from .measurement.samplers import SamplingArguments


@dataclass(kw_only=True)
class SelectionArguments(SamplingArguments):
    """
    Arguments of `ada_trl.data`, on top of [`~measurement.samplers.SamplingArguments`].

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
        if not self.min_pass_rate < self.max_pass_rate <= 1:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) must be less than max_pass_rate ({self.max_pass_rate}), which is at "
                "most 1: problems with min < pass rate <= max are kept."
            )


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), select, say what was kept."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = CommandParser(
        SelectionArguments,
        command="data",
        description="Select training problems by how often a model solves them, as in the paper. After an "
        "interruption the same command continues.",
        example="--model_name_or_path Qwen/Qwen2.5-Math-1.5B --output_dir outputs/easy --max_pass_rate 0.313",
    )
    (selection,) = parser.parse_args_and_config(args)
    # What would otherwise be missed after hours of sampling.
    check_scorer(selection.reward_func)
    check_installed("matplotlib", "plots", "draws the histogram")
    check_backend(selection.backend)
    check_model(selection.model_name_or_path)
    from .measurement.selection import run  # imports torch, which takes seconds

    with explained():
        run(selection)
    counts = json.loads((Path(selection.output_dir) / "selection.json").read_text())
    print("\n".join(f"{count:>10,}  {name}" for name, count in counts.items()))
    print(f"Wrote {selection.output_dir}; train on it with --dataset_name {selection.output_dir}.")


if __name__ == "__main__":
    start("data")
