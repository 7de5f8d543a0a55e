"""
Train with Reinforce-Ada from a configuration file.

`ada-trl train --config arithmetic/seq-balance.yaml [--any_field value]`, or with several processes
`accelerate launch -m ada_trl.commands.train …`. Later configuration files override earlier ones.
"""

from . import start
from .dataset_loading import local_source
from .options import parse_args
from .run_setup import build_trainer, check_requirements, find_checkpoint, run


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), train and save to `output_dir`."""
    script_args, training_args, model_args = parse_args(args)
    checkpoint = find_checkpoint(training_args)
    check_requirements(training_args)
    trainer = build_trainer(script_args, training_args, model_args)
    run(trainer, checkpoint)
    trainer.save_state()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        name = script_args.dataset_name
        trainer.push_to_hub(dataset_name=name if name and local_source(name) is None else None)
    trainer.accelerator.end_training()  # threads of a process group that is left may abort a finished process


if __name__ == "__main__":
    start("train")
