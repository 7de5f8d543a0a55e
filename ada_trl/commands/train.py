"""
Train with Reinforce-Ada from a configuration file.

`ada-trl train --config arithmetic/seq-balance.yaml [--any_field value]`, or with several processes
`accelerate launch -m ada_trl.commands.train …`. Later configuration files override earlier ones.
"""

import logging
import warnings

from ..utils.files import last_checkpoint
from . import start
from .errors import user_errors
from .options import parse_args
from .run_setup import build_trainer, checkpoint_to_resume


def silence_library_warnings() -> None:
    """Hide warnings of libraries about settings that a user of the command cannot change."""
    warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated")
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), train and save to `output_dir`."""
    silence_library_warnings()
    script_args, training_args, model_args = parse_args(args)
    checkpoint = checkpoint_to_resume(training_args)
    trainer = build_trainer(script_args, training_args, model_args)
    from ..utils.threads import bounded_threads
    from ..vllm.errors import VLLMServerError

    try:
        with user_errors(VLLMServerError), bounded_threads(trainer.model):
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt as error:
        saved = last_checkpoint(training_args.output_dir)
        fix = f"the same command with --resume_from_checkpoint true continues from {saved}"
        raise KeyboardInterrupt(
            f"{trainer.state.global_step} of {trainer.state.max_steps} steps done; "
            f"{fix if saved else 'no checkpoint was saved (--save_steps)'}."
        ) from error
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    start("train")
