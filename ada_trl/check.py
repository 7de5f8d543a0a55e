"""
Will this run work, and what will it cost? Looks in about a minute, before a long run, on your machine.

`ada-trl check --config my_run.yaml` takes the arguments of `ada-trl train`. It builds the trainer, samples a handful of
prompts, scores them with your reward functions, sends the weights to a vLLM server and compares log-probabilities, and makes
one optimizer step on rows of the greatest length. Nothing of it is kept. Under `accelerate launch`: `-m ada_trl.check …`.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .checking.findings import CheckResult
from .checking.preflight import Preflight
from .cli import start
from .cli.errors import explained
from .utils.tables import markdown_table


if TYPE_CHECKING:  # they import torch, which takes seconds
    from .trainer.ada_grpo_config import AdaGRPOConfig
    from .trainer.ada_grpo_trainer import AdaGRPOTrainer


@contextmanager
def temporary_run(args: "AdaGRPOConfig") -> Iterator[None]:
    """Let a configuration be for one step that leaves nothing: a directory of its own, no reports, no checkpoints."""
    given = Path(args.output_dir)
    missing = [path for path in (given, *given.parents) if not path.exists()]
    directory = given / f".check-{os.environ.get('MASTER_PORT', os.getpid())}"  # the same on every process
    if Path(args.vllm_weight_sync_dir) == given / "vllm_weight_sync":
        args.vllm_weight_sync_dir = str(directory / "vllm_weight_sync")  # where the server sees it too
    args.output_dir, args.max_steps, args.logging_steps = str(directory), 1, 1
    args.report_to, args.push_to_hub, args.log_completions, args.disable_tqdm = [], False, False, True
    args.load_best_model_at_end = False
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # every process, since the last one may have made it anew
        with suppress(OSError):  # not empty: another process's, or a recipe has made its data there meanwhile
            for path in missing:
                path.rmdir()


def report(findings: list[CheckResult]) -> str:
    """The findings as a table."""
    rows = [[cell.replace("|", "/") for cell in finding[:3]] for finding in findings]
    return markdown_table(["Checked", "Found", "Recommended"], rows)


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), check, print what was found."""
    from .train import build_trainer, parse_args, silence_library_warnings

    silence_library_warnings()
    script_args, training_args, model_args = parse_args(args, command="check")
    evaluates = "no evaluation" if training_args.eval_strategy == "no" else "an evaluation set"
    with temporary_run(training_args):
        with explained():
            trainer = build_trainer(script_args, training_args, model_args)
        _disable_side_effects(trainer)
        check = Preflight(trainer)
        sizes = f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.3g} M parameters"
        data = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream"
        check.findings.append(CheckResult("model and data", f"{sizes}, {data}, {evaluates}"))
        try:
            check.run()
        except BaseException:
            check.findings.append(CheckResult(f"**failed** in {check.doing}", "see the error below"))
            raise
        finally:
            if trainer.accelerator.is_main_process:
                print(report(check.findings), flush=True)
    if any(finding.is_fatal for finding in check.findings):
        raise SystemExit(1)


def _disable_side_effects(trainer: "AdaGRPOTrainer") -> None:
    """No evaluation and no checkpoint within the one step, and no log of it."""
    from transformers import PrinterCallback
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    args = trainer.args
    args.eval_strategy, args.save_strategy, args.eval_on_start = IntervalStrategy.NO, SaveStrategy.NO, False
    trainer.remove_callback(PrinterCallback)


if __name__ == "__main__":
    start("check")
