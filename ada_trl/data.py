r"""
Select training problems by how often a model solves them, as in the paper (v3, section 4.1).

`ada-trl data --model_name_or_path Qwen/Qwen2.5-Math-1.5B --output_dir outputs/easy --max_pass_rate 0.313`

Problems are loaded, filtered, sampled and kept by pass rate; `output_dir` is then a data set for `ada-trl train`. What is
finished stays on disk: after an interruption the same command continues, and with another range of pass rates nothing is
sampled again.
"""

import json
import logging
from pathlib import Path

from .commands import start
from .commands.checks import check_backend, check_installed, check_model, check_scorer
from .commands.errors import user_errors
from .commands.parser import CommandParser
from .measurement.arguments import SelectionArguments


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
    from .measurement.training_set import run  # imports torch, which takes seconds

    with user_errors():
        run(selection)
    counts = json.loads((Path(selection.output_dir) / "selection.json").read_text())
    print("\n".join(f"{count:>10,}  {name}" for name, count in counts.items()))
    print(f"Wrote {selection.output_dir}; train on it with --dataset_name {selection.output_dir}.")


if __name__ == "__main__":
    start("data")
