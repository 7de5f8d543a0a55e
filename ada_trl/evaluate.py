r"""
Compare models: average@k and unbiased pass@k with intervals, on mathematics as in the paper's evaluation or by a reward of
one's own.

`ada-trl evaluate --models Qwen/Qwen2.5-Math-1.5B outputs/grpo outputs/seq-balance --output_dir outputs/evaluation`

What is finished stays on disk: after an interruption the same command continues, and models that were evaluated before are
added to a table without sampling again.
"""

import logging

from .commands import start
from .commands.checks import check_backend, check_installed, check_model, check_scorer
from .commands.errors import user_errors
from .commands.parser import CommandParser
from .measurement.arguments import EvaluationArguments


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
    from .measurement.evaluation import run  # imports torch, which takes seconds
    from .measurement.summary import markdown

    with user_errors():
        results = run(evaluation)
    print(markdown(results))


if __name__ == "__main__":
    start("evaluate")
