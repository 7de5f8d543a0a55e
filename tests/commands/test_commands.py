"""The console script: help without slow imports, user errors in one sentence, other errors with their traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from trl import ModelConfig

from ada_trl.commands import COMMANDS, main, start
from ada_trl.commands.errors import UserError, run, user_errors
from ada_trl.commands.options import build_parser, find_config


ROOT = Path(__file__).parents[2]
SLOW_IMPORTS = "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & {*sys.modules}), file=sys.stderr)"


def command(*words, at_exit="None", **options) -> subprocess.Popen:
    """The console script in a process of its own."""
    code = f"import atexit, sys; atexit.register(lambda: {at_exit}); sys.argv[0] = 'ada-trl'; "
    code += "from ada_trl.commands import main; main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes | options)


# Help


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_fast(name):
    """It takes less than a second of CPU and imports nothing slow."""
    resource = pytest.importorskip("resource")  # not on Windows
    words, seconds = [name, "--help"] if name else ["--help"], []
    while not seconds or (seconds[-1] > 1 and len(seconds) < 3):  # others share the machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out, err = command(*words, at_exit=SLOW_IMPORTS).communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert err == "[]\n" and out.startswith(f"usage: ada-trl {name or 'COMMAND'}")
    assert min(seconds) < 1, seconds
    assert "example:\n  ada-trl " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_starts_with_the_recommended_recipe_and_baseline_and_its_options_exist(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    recipe, *_ = re.findall(r"\w+/[\w-]+\.yaml", text)
    assert find_config(recipe) and recipe == "arithmetic/batch.yaml"
    _, options = text.split("Adaptive sampling:")
    assert re.findall(r"--\w+", options)[0] == "--baseline"
    known = {option for action in build_parser(name)._actions for option in action.option_strings}
    assert set(re.findall(r"--[\w-]+", text)) - {"--option", "--traceback"} <= known
    with pytest.raises(SystemExit):
        main([name, "--help-all"])
    assert known <= {"-h", *re.findall(r"--[\w-]+", capsys.readouterr().out)}


def test_without_a_command_and_version(capsys):
    with pytest.raises(SystemExit):
        main([])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"ada_trl \d+\.\d+\.\d+\n", capsys.readouterr().out)


# Errors


def fail(error):
    raise error


@pytest.mark.parametrize("error", [ZeroDivisionError(), ValueError("x"), TypeError("x"), FileNotFoundError("x")])
def test_only_a_user_error_loses_its_traceback(error, capsys):
    with pytest.raises(type(error)):
        run(lambda args: fail(error), [], "ada-trl train")
    with pytest.raises(SystemExit) as ended:
        run(lambda args: fail(UserError("wrong value")), [], "ada-trl train")
    assert ended.value.code == 2 and capsys.readouterr().err == "ada-trl train: error: wrong value\n"


def test_ctrl_c_ends_a_command_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        run(lambda args: fail(KeyboardInterrupt()), [], "ada-trl train")
    assert ended.value.code == 130 and capsys.readouterr().err == "ada-trl train: interrupted\n"


def test_errors_of_the_setup_become_user_errors():
    with pytest.raises(UserError, match="8 bit and 4 bit"), user_errors(ValueError):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)
    with pytest.raises(ValueError, match="not one of these") as kept, user_errors(KeyError):
        raise ValueError("not one of these")
    assert not isinstance(kept.value, UserError)


def test_a_traceback_is_shown_on_request():
    with pytest.raises(UserError):
        start("train", ["--config=nothing", "--traceback"])
    with pytest.raises(SystemExit):
        start("train", ["--config=nothing"])
