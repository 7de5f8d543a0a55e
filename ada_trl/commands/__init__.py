"""The console script `ada-trl`. Each command is a module as well: `python -m ada_trl.commands.train`."""

import argparse
import logging
import sys
import warnings
from importlib import import_module

from .. import __version__
from ..utils.console import replace_unknown_characters
from .errors import run


COMMANDS = {
    "train": "train a causal language model from a configuration file",
    "check": "make one step of a run to validate its configuration, and report rewards and cost",
}

EPILOG = """\
commands:
{commands}

`ada-trl COMMAND --help` describes a command. With any command, --traceback shows where an error was raised.

example:
  ada-trl train --config arithmetic/batch.yaml
"""


def main(args: list[str] | None = None) -> None:
    """Run `ada-trl COMMAND …`."""
    replace_unknown_characters()
    args = sys.argv[1:] if args is None else args
    parser = argparse.ArgumentParser(
        "ada-trl",
        usage="ada-trl COMMAND …",
        description="GRPO with Reinforce-Ada's adaptive sampling, on top of TRL.",
        epilog=EPILOG.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ada_trl {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    start(parser.parse_args(args[:1] or ["--help"]).command, args[1:])


def start(command: str, args: list[str] | None = None) -> None:
    """Run a command with the error handling of [`~errors.run`]."""
    replace_unknown_characters()  # also with `python -m`
    # Of libraries, about settings that a user of the command cannot change.
    warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated")
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    # The command is imported when it runs: importing torch takes seconds, which would make --help slow.
    run(
        lambda rest: import_module(f"{__name__}.{command}").main(rest),
        sys.argv[1:] if args is None else args,
        f"ada-trl {command}",
    )
