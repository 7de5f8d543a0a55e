"""The console script `ada-trl`: one subcommand for each command, each of which is a module as well."""

import sys
from importlib import import_module

from .. import __version__
from .errors import run, suggestion
from .parser import program


COMMANDS = {
    "train": "train a causal language model with Reinforce-Ada, from a configuration file",
    "check": "see in about a minute whether a training run will work, and what it will cost",
    "plan": "find the sampling settings that fit your prompts and your budget",
    "plots": "draw what training runs have logged",
}


HELP = """\
usage: ada-trl COMMAND …

GRPO with Reinforce-Ada's adaptive sampling, on top of TRL.

commands:
{commands}

`ada-trl COMMAND --help` describes each one. `python -m ada_trl.COMMAND` is the same.

options:
  --version  print the version
  --debug    of every command: show the traceback of an error

example:
  ada-trl train --config arithmetic/seq-balance.yaml
"""


def main(args: list[str] | None = None) -> None:
    """`ada-trl COMMAND …`."""
    args = sys.argv[1:] if args is None else list(args)
    command = args[0] if args else "--help"
    if command in COMMANDS:
        return start(command, args[1:])
    if command == "--version":
        print(f"ada_trl {__version__}")
    elif command in ("--help", "-h"):
        run(lambda _: print(help_text(), end=""), [], "ada-trl")
    else:
        print(
            f"ada-trl: error: unknown command {command!r}{suggestion(command, COMMANDS)}. --help lists them.",
            file=sys.stderr,
        )
        raise SystemExit(2)


def help_text() -> str:
    """The commands, a line each."""
    return HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()))


def start(command: str, args: list[str] | None = None) -> None:
    """Run a command as a user sees it, see [`~errors.run`]."""
    # The module is looked up when it runs: importing torch takes seconds that --help need not wait for.
    run(
        lambda rest: import_module(f"ada_trl.{command}").main(rest),
        sys.argv[1:] if args is None else args,
        program(command),
    )
