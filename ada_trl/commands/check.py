"""
Validate a configuration in about a minute, before a long run, and report the cost of a step on this machine.

`ada-trl check --config my_run.yaml` takes the arguments of `ada-trl train`. It builds the trainer, samples a few prompts,
scores them with the reward functions, sends the weights to a vLLM server and compares log-probabilities, and makes one
optimizer step on rows of maximum length. It leaves no files behind. With several processes:
`accelerate launch -m ada_trl.commands.check …`.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.tables import markdown_table
from . import start
from .findings import CheckResult
from .options import parse_args
from .run_setup import build_trainer


if TYPE_CHECKING:  # it imports torch, which takes seconds
    from ..trainer.ada_grpo_config import AdaGRPOConfig


@contextmanager
def temporary_run(args: "AdaGRPOConfig") -> Iterator[None]:
    """While the block runs, a configuration makes one step in a temporary output directory, without reports and checkpoints."""
    from transformers.trainer_utils import IntervalStrategy

    given = Path(args.output_dir)
    missing = [path for path in (given, *given.parents) if not path.exists()]
    directory = given / f".check-{os.environ.get('MASTER_PORT', os.getpid())}"  # the same on every process
    if Path(args.vllm_weight_sync_dir) == given / "vllm_weight_sync":
        args.vllm_weight_sync_dir = str(directory / "vllm_weight_sync")  # where the server sees it too
    args.output_dir, args.max_steps, args.logging_steps = str(directory), 1, 1
    args.report_to, args.push_to_hub, args.log_completions, args.disable_tqdm = [], False, False, True
    args.load_best_model_at_end = False
    args.logging_strategy = IntervalStrategy.STEPS  # the step is reported when it is logged
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # on every process: another one may have created it again
        with suppress(OSError):  # not empty: another process is not done, or a recipe has created its data there
            for path in missing:
                path.rmdir()


def report(findings: list[CheckResult]) -> str:
    """Format the findings as a table."""
    rows = [[cell.replace("|", "/") for cell in finding[:3]] for finding in findings]
    return markdown_table(["Checked", "Found", "Recommended"], rows)


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), check the run and print the findings."""
    script_args, training_args, model_args = parse_args(args, command="check")
    # After parsing: they import torch, which --help must not wait for.
    from transformers import PrinterCallback
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    from .preflight import Preflight

    evaluates = "no evaluation" if training_args.eval_strategy == "no" else "an evaluation set"
    with temporary_run(training_args):
        trainer = build_trainer(script_args, training_args, model_args)
        # No evaluation, checkpoint and printed log. Only now, because the trainer is built with the evaluation set.
        trainer.args.eval_strategy, trainer.args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
        trainer.args.eval_on_start = False
        trainer.remove_callback(PrinterCallback)
        check = Preflight(trainer)
        sizes = f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.3g} M parameters"
        data = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream"
        check.findings.append(CheckResult("model and data", f"{sizes}, {data}, {evaluates}"))
        try:
            check.run()
        finally:  # also if it fails, in the part of the step after the last finding
            if trainer.accelerator.is_main_process:
                print(report(check.findings), flush=True)
    trainer.accelerator.end_training()  # as in `train`
    if any(finding.is_fatal for finding in check.findings):
        raise SystemExit(1)


if __name__ == "__main__":
    start("check")
