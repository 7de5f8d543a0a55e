"""
Train with Reinforce-Ada from a configuration file.

`ada-trl train --config arithmetic/seq-balance.yaml [--any_field value]`, or with several processes
`accelerate launch -m ada_trl.commands.train …`. Later configuration files override earlier ones.
"""

from pathlib import Path

from . import start
from .errors import UserError, user_errors
from .options import parse_args
from .run_setup import build_trainer


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), train and save to `output_dir`."""
    script_args, training_args, model_args = parse_args(args)
    given = training_args.resume_from_checkpoint
    checkpoint = {"true": True, "false": False}.get(str(given).lower(), given)  # a command line has only text
    if checkpoint is True and not any(Path(training_args.output_dir).glob("checkpoint-*")):
        raise UserError(
            f"resume_from_checkpoint is true, but output_dir ({training_args.output_dir}) has no checkpoint. Correct output_dir, or "
            "leave resume_from_checkpoint out."
        )
    trainer = build_trainer(script_args, training_args, model_args)
    from ..utils.threads import bounded_threads
    from ..vllm.errors import VLLMServerError

    with user_errors(VLLMServerError), bounded_threads(trainer.model):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()  # threads of a process group that is left may abort a finished process


if __name__ == "__main__":
    start("train")
