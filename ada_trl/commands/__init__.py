"""The console script `ada-trl`. Each command is a module as well: `python -m ada_trl.commands.train`."""

import sys
from importlib import import_module

from .. import __version__
from .errors import run, suggestion


COMMANDS = {
    "train": "train a causal language model from a configuration file",
    "check": "validate a configuration in about a minute, and report the cost of a step",
}

HELP = """\
usage: ada-trl COMMAND …

GRPO with Reinforce-Ada's adaptive sampling, on top of TRL.

commands:
{commands}

`ada-trl COMMAND --help` describes a command. `python -m {package}.COMMAND` runs the same.

options:
  --version  print the version
  --debug    with any command: show the traceback of an error

example:
  ada-trl train --config arithmetic/batch.yaml
"""


def main(args: list[str] | None = None) -> None:
    """Run `ada-trl COMMAND …`."""
    args = sys.argv[1:] if args is None else list(args)
    command = args[0] if args else "--help"
    if command in COMMANDS:
        start(command, args[1:])
    elif command == "--version":
        print(f"ada_trl {__version__}")
    elif command in ("--help", "-h"):
        lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        run(lambda _: print(HELP.format(commands=lines, package=__name__), end=""), [], "ada-trl")
    else:
        hint = suggestion(command, COMMANDS)
        print(f"ada-trl: error: unknown command {command!r}{hint}. --help lists the commands.", file=sys.stderr)
        raise SystemExit(2)


def start(command: str, args: list[str] | None = None) -> None:
    """Run a command with the error handling of [`~errors.run`]."""
    from .options import program

    # The command is imported when it runs: importing torch takes seconds, which would make --help slow.
    run(
        lambda rest: import_module(f"{__name__}.{command}").main(rest),
        sys.argv[1:] if args is None else args,
        program(command),
    )
