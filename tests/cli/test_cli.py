"""The console script and what its commands share: help at once, errors in a sentence, bugs with their traceback."""

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from ada_trl import AdaGRPOConfig
from ada_trl.cli import COMMANDS, main, start
from ada_trl.cli.errors import UserError, explained, is_users_mistake, run, suggestion
from ada_trl.cli.options import MOST_USED, NEEDED_FIELDS, train_help
from ada_trl.cli.parser import find_config, recipes_folder
from ada_trl.train import AdaScriptArguments, checkpoint_to_resume, load_data, parse_args
from ada_trl.train import main as train
from ada_trl.train import prepare as prepare_task

from ..helpers import QUICK, tiny_model, tiny_tokenizer


ROOT = Path(__file__).parents[2]
REQUIRED = {"plan": "pass_rates", "train": "config"}


SLOW_IMPORTS = "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & {*sys.modules}), file=sys.stderr)"


def command(*words, at_exit="None", **options) -> subprocess.Popen:
    """The console script in a process of its own."""
    code = f"import atexit, sys; atexit.register(lambda: {at_exit}); sys.argv[0] = 'ada-trl'; "
    code += "from ada_trl.cli import main; main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes | options)


# Help


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_comes_at_once(name):
    """In less than a second of CPU, and without what takes seconds to import."""
    words, seconds = [name, "--help"] if name else ["--help"], []
    while not seconds or (seconds[-1] > 1 and len(seconds) < 3):  # others share the machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out, err = command(*words, at_exit=SLOW_IMPORTS).communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert err == "[]\n" and out.startswith(f"usage: ada-trl {name or 'COMMAND'}")
    assert min(seconds) < 1, seconds
    assert "example:\n  ada-trl " in out


@pytest.mark.parametrize("name", REQUIRED)
def test_required_options_come_first(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    options = re.findall(r"^  (-\S+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert options[0] == f"--{REQUIRED[name]}" and "-h" in options[1:4]


def test_help_of_train_is_ours_and_then_theirs():
    text = train_help()
    order = [
        "--model_name_or_path",
        "--adaptive_sampling",
        "--zero_variance_groups",
        "--vllm_weight_sync",
        "--learning_rate",
    ]
    positions = [text.index(f"\n  {name} ") for name in order]
    assert positions == sorted(positions)
    assert "Reinforce-Ada: sampling:" in text and "Reinforce-Ada: advantages:" in text
    assert (
        "(default: pool)" in " ".join(text.split())
        and " …\n" not in text[text.index("max_rounds") : text.index("The data:")]
    )


def test_the_whole_help_is_read_from_the_sources_as_they_are():
    """Every field of the real classes, and no other: what is read without importing is what is imported."""
    fields = {
        f.name: f for config in (AdaScriptArguments, AdaGRPOConfig, ModelConfig) for f in dataclasses.fields(config)
    }
    text = train_help(everything=True)
    listed = re.findall(r"^  --(\w+)", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted({*fields, "config", "help"})  # --debug, of transformers too
    assert {name for names in MOST_USED.values() for name in names} | set(NEEDED_FIELDS) <= fields.keys()
    for name in ("learning_rate", "max_rounds", "max_completion_length", "lora_r", "logging_steps"):
        for shown in (text, train_help()):
            default = re.search(rf"^  --{name} .*?\(default:\s+(\S+)\)", shown, flags=re.MULTILINE | re.DOTALL)
            assert float(default[1]) == fields[name].default


def test_a_closed_pipe_is_no_error():
    """`ada-trl train --help | head -1`: the reader goes before all is written."""
    read, write = os.pipe()
    process = command("train", "--help", stdout=write)
    os.close(write)
    os.close(read)
    assert process.communicate()[1] == ""
    assert process.returncode == 141


def test_without_a_command_and_version(capsys):
    main([])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    main(["--version"])
    assert re.fullmatch(r"ada_trl \d+\.\d+\.\d+\n", capsys.readouterr().out)


# Errors


def test_a_users_mistake_is_what_somebody_wrote_for_a_user():
    def caught(function):
        try:
            function()
        except Exception as error:
            return error

    def user():
        raise UserError("x")

    def ours():
        find_config("nowhere.yaml")

    def bug():  # inside of the package, but not on purpose: a TypeError of the loop itself
        suggestion("x", 5)

    def callers_bug():
        raise ValueError("x")

    def library():
        ModelConfig(load_in_8bit=True, load_in_4bit=True)

    assert is_users_mistake(caught(user)) and is_users_mistake(caught(ours))
    for function in (bug, callers_bug, library, lambda: int("x"), lambda: json.loads("{")):
        assert not is_users_mistake(caught(function))
    with pytest.raises(UserError, match="8 bit and 4 bit"), explained():
        library()
    with pytest.raises(ValueError) as kept, explained():
        callers_bug()
    assert not isinstance(kept.value, UserError)


def test_debug_keeps_the_traceback_and_its_value_is_transformers_own(monkeypatch):
    with pytest.raises(FileNotFoundError):
        start("plan", ["--pass_rates", "nowhere.csv", "--debug"])
    with pytest.raises(SystemExit):
        start("plan", ["--pass_rates", "nowhere.csv"])
    seen = []
    run(seen.append, ["--debug", "underflow_overflow", "--seed", "1"], "train")
    run(seen.append, ["--seed", "1", "--debug"], "train")
    assert seen == [["--debug", "underflow_overflow", "--seed", "1"], ["--seed", "1"]]


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda args: 1 / 0, [], "train")


def failing_reward(completions, **kwargs):
    raise ValueError("the user's own bug")


def test_an_error_of_a_reward_function_keeps_its_traceback(files):
    with pytest.raises(ValueError, match="the user's own bug"):
        start("train", [*files.options, "--reward_funcs=tests.cli.test_cli.failing_reward"])


# Configuration files


def test_recipes_are_found_by_name_and_files_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_config("arithmetic/seq-balance.yaml")
    assert (
        shipped
        == find_config("recipes/arithmetic/seq-balance.yaml")
        == recipes_folder() / "arithmetic/seq-balance.yaml"
    )
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "seq-balance.yaml").write_text("{}")
    assert find_config("arithmetic/seq-balance.yaml") == Path("arithmetic/seq-balance.yaml")


def test_several_files_environment_and_equals_sign(tmp_path, monkeypatch):
    monkeypatch.delenv("ADA_TEST", raising=False)
    for name, config in {"a": {"seed": 1, "env": {"ADA_TEST": 1}}, "b": {"seed": 2, "use_cpu": True}}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    script, args, _ = parse_args(
        [f"--config={tmp_path / 'a.yaml'}", "--config", str(tmp_path / "b.yaml"), "--bf16=false"], required=()
    )
    assert args.seed == 2 and os.environ["ADA_TEST"] == "1"
    monkeypatch.delenv("ADA_TEST")


# train


@dataclasses.dataclass
class Files:
    path: Path
    options: list[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, a file of sums in each format, and options of a run that takes a second."""
    directory = tmp_path_factory.mktemp("cli")
    tiny_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "sums.csv").write_text("prompt,answer\n" + "".join(f"{a}+1=,{a + 1}\n" for a in range(8)))
    quick = {name: str(value).lower() for name, value in QUICK.items()} | {"max_steps": "1"}
    options = [f"--{name}={value}" for name, value in quick.items()]
    options += [f"--model_name_or_path={directory / 'model'}", f"--dataset_name={directory / 'sums.jsonl'}"]
    options += [f"--output_dir={directory / 'out'}", "--reward_funcs=tests.helpers.even_reward"]
    return Files(directory, options)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["sums.jsonl", "sums.csv"])
def test_train_takes_local_files(name, streaming, files):
    arguments = AdaScriptArguments(dataset_name=str(files.path / name), dataset_streaming=streaming)
    train_set, test_set = load_data(arguments, evaluate=False)
    assert [row["prompt"] for row in train_set] == [f"{a}+1=" for a in range(8)] and test_set is None


def test_a_mixture_as_in_trls_own_script(files, tmp_path):
    source = {"path": "json", "data_files": str(files.path / "sums.jsonl")}
    config = {"datasets": [source, source | {"columns": ["prompt", "answer"]}], "test_split_size": 0.25}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(config))
    script, _, _ = parse_args(["--config", str(tmp_path / "mixture.yaml"), "--use_cpu", "--bf16=false"], required=())
    train_set, test_set = load_data(script, evaluate=True)
    assert (len(train_set), len(test_set)) == (12, 4)


def test_a_run_is_resumed_from_its_last_checkpoint(files, tmp_path):
    options = [*files.options, f"--output_dir={tmp_path}", "--save_strategy=steps", "--save_steps=1", "--max_steps=2"]
    train(options)
    train([*options, "--max_steps=3", "--resume_from_checkpoint", "true"])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "reward" in row] == [1, 2, 3]  # the first two are the first run's
    for given, expected in {None: None, "false": None, "True": "checkpoint-3"}.items():
        found = checkpoint_to_resume(AdaGRPOConfig(str(tmp_path), use_cpu=True, resume_from_checkpoint=given))
        assert found == (expected and str(tmp_path / expected))


def test_ctrl_c_says_how_to_go_on(files, tmp_path, monkeypatch, capsys):
    calls = []

    def interrupting(completions, **kwargs):
        calls.append(completions)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [0.0] * len(completions)

    monkeypatch.setattr("tests.helpers.even_reward", interrupting)
    saving = [f"--output_dir={tmp_path}", "--save_strategy=steps", "--save_steps=1", "--max_steps=5", "--max_rounds=1"]
    with pytest.raises(SystemExit) as ended:
        start("train", [*files.options, *saving])
    error = capsys.readouterr().err
    assert ended.value.code == 130
    remedy = f"the same command with --resume_from_checkpoint true continues from {tmp_path}"
    assert f"2 of 5 steps done; {remedy}" in error, error[-500:]


def test_recipes_make_what_they_need_once(tmp_path, monkeypatch):
    made = []

    def make(output_dir):
        made.append(output_dir)
        (tmp_path / output_dir / "base").mkdir(parents=True)
        (tmp_path / output_dir / "data").mkdir()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.helpers.make_task", make, raising=False)
    call = "tests.helpers.make_task(output_dir='outputs/task')"
    args = AdaGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)

    def prepare(model, data):
        prepare_task(AdaScriptArguments(dataset_name=data, prepare=call), args, ModelConfig(model_name_or_path=model))

    prepare("Qwen/Qwen3-0.6B", "other/data")  # neither is the recipe's
    assert made == []
    prepare("outputs/task/base", "other/data")
    prepare("outputs/task/base", "outputs/task/data")
    assert made == ["outputs/task"]
    with pytest.raises(ValueError, match="needs the keyword output_dir"):
        script = AdaScriptArguments(dataset_name="x", prepare="tests.helpers.make_task()")
        prepare_task(script, args, ModelConfig(model_name_or_path="y"))
