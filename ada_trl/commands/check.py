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
from .run_setup import build_trainer, check_hub, find_checkpoint


if TYPE_CHECKING:  # it imports torch, which takes seconds
    from ..trainer.ada_grpo_config import AdaGRPOConfig


@contextmanager
def temporary_output_dir(args: "AdaGRPOConfig") -> Iterator[None]:
    """While the block runs, a run writes its files to a temporary folder in its output directory, and sends none to the hub."""
    given = Path(args.output_dir)
    missing = [path for path in (given, *given.parents) if not path.exists()]
    directory = given / f".check-{os.environ.get('MASTER_PORT', os.getpid())}"  # the same on every process
    if Path(args.vllm_weight_sync_dir) == given / "vllm_weight_sync":
        args.vllm_weight_sync_dir = str(directory / "vllm_weight_sync")  # where the server sees it too
    args.output_dir = str(directory)
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
    find_checkpoint(training_args)  # `train` would fail if it does not exist
    check_hub(training_args)
    # After parsing: they import torch, which --help must not wait for.
    from transformers import PrinterCallback
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    from .preflight import Preflight

    evaluates = "no evaluation" if training_args.eval_strategy == "no" else "an evaluation set"
    training_args.push_to_hub = training_args.log_completions = False  # the trainer would create a repository
    training_args.disable_tqdm = True
    with temporary_output_dir(training_args):
        trainer = build_trainer(script_args, training_args, model_args)
        # Only now, so that an option with which `train` fails to build the trainer fails here too.
        for callback in (PrinterCallback, *get_reporting_integration_callbacks(training_args.report_to)):
            trainer.remove_callback(callback)
        training_args.report_to, training_args.eval_on_start = [], False
        training_args.eval_strategy, training_args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
        training_args.load_best_model_at_end = False
        training_args.max_steps, training_args.logging_steps = 1, 1
        training_args.logging_strategy = IntervalStrategy.STEPS
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
