"""
Which sampling settings fit your prompts and your budget?

`ada-trl plan --pass_rates FILE` reads how hard your prompts are for your model, computes for every setting what share of
prompts would have a gradient, what that costs and how noisy the update is, and recommends the one with the least noise.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from .cli import start
from .cli.checks import check_installed
from .cli.errors import UserError
from .cli.parser import CommandParser
from .planning.observed import read_prompts
from .planning.report import report, write
from .planning.settings import settings


@dataclass(kw_only=True)
class PlanArguments:
    """
    Arguments of `ada-trl plan`.

    Args:
        pass_rates (`str`):
            What [`~planning.observed.read_prompts`] reads.
        column (`str`, *optional*, defaults to `"pass_rate"`):
            Column of the pass rates in a file without counts.
        draws (`int`, *optional*):
            Draws behind each pass rate, where the file does not say. If `None`, pass rates are exact then.
        budget (`float`, *optional*, defaults to `16`):
            Mean rollouts per prompt.
        num_generations (`int`, *optional*, defaults to `4`):
            n, rollouts per prompt that are trained on.
        max_samples (`int`, *optional*, defaults to `32`):
            Most rollouts of a prompt.
        write (`list[str]`, *optional*):
            Files to write; `.md`, `.json` (all settings) or `.png`.
    """

    pass_rates: str = field(
        metadata={
            "help": "A run or checkpoint with a difficulty record, a selection by recipes.math.select, or a Parquet, CSV "
            "or JSON Lines file."
        }
    )
    column: str = field(default="pass_rate", metadata={"help": "Column of pass rates in a file without counts."})
    draws: int | None = field(
        default=None,
        metadata={"help": "Draws behind each pass rate, where the file does not say; without, pass rates are exact."},
    )
    budget: float = field(default=16.0, metadata={"help": "Mean rollouts per prompt."})
    num_generations: int = field(default=4, metadata={"help": "n, rollouts per prompt that are trained on."})
    max_samples: int = field(default=32, metadata={"help": "Most rollouts of a prompt."})
    write: list[str] = field(
        default_factory=list, metadata={"help": "Files to write: .md, .json (all settings) or .png."}
    )

    def __post_init__(self) -> None:
        for name in self.write:
            if Path(name).suffix not in (".md", ".json", ".png"):
                raise UserError(f"--write {name}: expected a name that ends in .md, .json or .png.")
            if Path(name).suffix == ".png":
                check_installed("matplotlib", "plots", f"draws {name}")
        if not 2 <= self.num_generations <= self.max_samples:
            raise UserError(
                f"--num_generations ({self.num_generations}) must be between 2 and --max_samples ({self.max_samples})."
            )
        if not (math.isfinite(self.budget) and self.budget > 0):
            raise UserError(f"--budget ({self.budget}) must be a positive number of rollouts per prompt.")
        if self.draws is not None and self.draws < 1:
            raise UserError(f"--draws ({self.draws}) must be at least 1.")


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), print the plan, write what was asked for."""
    parser = CommandParser(
        PlanArguments,
        command="plan",
        description="Which sampling settings fit your prompts and your budget? Reads how hard the prompts are for the "
        "model, "
        "finds for every setting the share of prompts with a gradient, its cost and its noise, and recommends one.",
        example="--pass_rates outputs/run --budget 16 --write plan.md plan.png",
    )
    (options,) = parser.parse_args_and_config(args)
    prompts = read_prompts(options.pass_rates, column=options.column, draws=options.draws)
    found = settings(
        prompts, num_generations=options.num_generations, budget=options.budget, max_samples=options.max_samples
    )
    print(report(prompts, found, options.budget))
    for name in options.write:
        write(Path(name), prompts, found, options.budget)


if __name__ == "__main__":
    start("plan")
