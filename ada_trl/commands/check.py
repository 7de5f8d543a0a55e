"""
Make one step of a run before the run, and report what it would fail at, its rewards, and the cost of a step.

`ada-trl check --config my_run.yaml` takes the arguments of `ada-trl train`. It builds the trainer, evaluates it on a
few prompts with several rollouts of each, and makes the first training step, whose update has rows of maximum length.
With a vLLM server it compares log-probabilities. It leaves no files behind. With several processes:
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
from .findings import Finding
from .options import parse_args
from .run_setup import build_trainer, check_requirements, find_checkpoint, run


if TYPE_CHECKING:  # it imports torch, which takes seconds
    from ..trainer.ada_grpo_config import AdaGRPOConfig


@contextmanager
def temporary_output_dir(args: "AdaGRPOConfig") -> Iterator[None]:
    """While the block runs, a run writes its files to a temporary folder in its output directory."""
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


def report(findings: list[Finding]) -> str:
    """Format the findings as a table."""
    rows = [[cell.replace("|", "/") for cell in finding[:3]] for finding in findings]
    return markdown_table(["Checked", "Found", "Recommended"], rows)


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), check the run and print the findings."""
    script_args, training_args, model_args = parse_args(args, command="check")
    find_checkpoint(training_args)  # `train` would fail if it does not exist
    check_requirements(training_args)
    # After parsing: they import torch, which --help must not wait for.
    from transformers import PrinterCallback

    from .short_run import ShortRun

    # Nothing is sent anywhere, and the table is all that is printed.
    training_args.report_to, training_args.push_to_hub, training_args.log_completions = [], False, False
    training_args.disable_tqdm = True
    with temporary_output_dir(training_args):
        trainer = build_trainer(script_args, training_args, model_args)
        trainer.remove_callback(PrinterCallback)
        evaluates = "no evaluation" if trainer.eval_dataset is None else "an evaluation set"
        short_run = ShortRun(trainer)
        sizes = f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.3g} M parameters"
        data = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream"
        short_run.findings.append(Finding("model and data", f"{sizes}, {data}, {evaluates}"))
        try:
            run(trainer)
        finally:  # also if it fails, in the part of the step after the last finding
            if trainer.accelerator.is_main_process:
                print(report(short_run.findings), flush=True)
    trainer.accelerator.end_training()  # as in `train`
    if any(finding.is_fatal for finding in short_run.findings):
        raise SystemExit(1)


if __name__ == "__main__":
    start("check")
