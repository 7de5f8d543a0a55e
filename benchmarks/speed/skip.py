"""
CPU time of a step with `zero_variance_groups="skip"`, relative to `"keep"`.

`python -m benchmarks.speed.skip` trains alternately with both, in one process and one thread: GRPO n=4 and Seq-balance on sums of
the arithmetic task. `--language_model outputs/reasoning` uses the language model of `recipes/reasoning` instead (4 GiB of memory).
Both options make the same updates up to rounding, so the steps of a pair of runs have almost the same rollouts. The first step of
a run is not counted.
"""

import argparse
from pathlib import Path
from statistics import mean

from recipes.arithmetic.task import prepare, problems
from recipes.reasoning.task import prepare as prepare_language_model

from .. import names
from ..common import BALANCE, ratio_of_repeats
from ..learning.language_model import PAPER_PROMPTS
from ..learning.language_model import task as language_model_task
from ..learning.small_models import ADDITION
from ..learning.training import Run, Task, train_once


METHODS = {
    names.GRPO_4: {"adaptive_sampling": "uniform", "scale_rewards": "group"},
    names.HYBRID: BALANCE,
}
NUM_GENERATIONS = 4
MICRO_BATCH = 32  # rows of the language model per forward pass
PROMPTS_PER_STEP = 32
SUMS = ADDITION._replace(read=lambda *_: (problems(4096, seed=0), None))


def compare(task: Task, task_dir: Path, prompt_set: str, prompts_per_step: int, steps: int, repeats: int) -> None:
    """Print the table of a task, whose base model is in `task_dir`."""
    task = task._replace(evaluate=lambda *_: {})  # not measured
    print("| | Zero-variance groups | CPU s per step: keep | skip | skip / keep (single repeats) |")
    print("|---|---|---|---|---|")
    for method, options in METHODS.items():
        seconds: dict[str, list[float]] = {"keep": [], "skip": []}
        fractions = []
        for seed in range(repeats):
            for choice, means in seconds.items():
                run = Run(method, prompt_set, seed, 2e-4)
                all_options = {"num_generations": NUM_GENERATIONS, "zero_variance_groups": choice} | options
                record = train_once(run, all_options, prompts_per_step, task_dir, steps, steps, task)
                counted = record["steps"][1:]
                means.append(mean(step["cpu_seconds"] for step in counted))
                fractions.append(mean(step["frac_zero_advantage_groups"] for step in counted))
        keep, skip = mean(seconds["keep"]), mean(seconds["skip"])
        print(
            f"| {method} | {mean(fractions):.0%} | {keep:.2f} | {skip:.2f} "
            f"| {ratio_of_repeats(seconds['skip'], seconds['keep'])} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model of the sums.")
    parser.add_argument("--language_model", type=Path, help="Base model and data of the language model.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.language_model is not None:
        prepare_language_model(args.language_model)
        task, micro_batches = language_model_task("mixture"), PAPER_PROMPTS * NUM_GENERATIONS // MICRO_BATCH
        task.options.update(per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=micro_batches)
        compare(task, args.language_model, "mixture", PAPER_PROMPTS, args.steps, args.repeats)
        return
    if not (args.task_dir / "base").exists():
        prepare(args.task_dir)
    compare(SUMS, args.task_dir, "sums", PROMPTS_PER_STEP, args.steps, args.repeats)


if __name__ == "__main__":
    main()
