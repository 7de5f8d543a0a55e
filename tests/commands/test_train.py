"""`ada-trl train`: configuration files, data, checkpoints, interruptions and preparation."""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from trl import ModelConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.commands import start
from ada_trl.commands.errors import UserError
from ada_trl.commands.options import AdaScriptArguments, find_config, parse_args
from ada_trl.commands.run_setup import load_data
from ada_trl.commands.run_setup import prepare as prepare_task
from ada_trl.commands.train import main as train

from ..helpers import QUICK, ROOT, save_tiny_model, write_jsonl


def test_recipes_are_found_by_name_and_files_take_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("arithmetic/seq-balance.yaml", "recipes/arithmetic/seq-balance.yaml"):
        assert find_config(name) == ROOT / "recipes/arithmetic/seq-balance.yaml"
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "seq-balance.yaml").write_text("{}")
    assert find_config("arithmetic/seq-balance.yaml") == Path("arithmetic/seq-balance.yaml")


def test_later_files_and_the_command_line_override(tmp_path, monkeypatch):
    monkeypatch.delenv("ADA_TEST", raising=False)
    first = {"seed": 1, "max_steps": 1, "beta": 0.5, "use_cpu": True, "bf16": False, "env": {"ADA_TEST": 1}}
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    Path(a).write_text(yaml.safe_dump(first))
    Path(b).write_text(yaml.safe_dump({"seed": 2, "max_steps": 2}))
    for words in ([f"--config={a}", "--config", b, "--seed", "3"], ["--seed=3", "--config", a, b]):
        _, args, _ = parse_args(words)
        assert (args.max_steps, args.seed, args.beta) == (2, 3, 0.5) and os.environ["ADA_TEST"] == "1"
    _, args, _ = parse_args(["--config", b, a])
    assert (args.max_steps, args.seed, args.beta) == (1, 1, 0.5)
    monkeypatch.delenv("ADA_TEST")


@dataclasses.dataclass
class Files:
    path: Path
    options: list[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, a file of sums, and options of a run that takes a second."""
    directory = tmp_path_factory.mktemp("cli")
    save_tiny_model(directory / "model")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    write_jsonl(directory / "sums.jsonl", rows)
    quick = {name: str(value).lower() for name, value in QUICK.items()} | {"max_steps": "1"}
    options = [f"--{name}={value}" for name, value in quick.items()]
    options += [f"--model_name_or_path={directory / 'model'}", f"--dataset_name={directory / 'sums.jsonl'}"]
    options += [f"--output_dir={directory / 'out'}", "--reward_funcs=tests.helpers.even_reward"]
    return Files(directory, options)


def test_a_small_model_is_trained_with_one_thread(files, monkeypatch):
    seen = []

    def counting(completions, **kwargs):
        seen.append(torch.get_num_threads())
        return [0.0] * len(completions)

    monkeypatch.setattr("tests.helpers.even_reward", counting)
    given = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train([*files.options, "--max_rounds=1"])
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(given)


def failing_reward(completions, **kwargs):
    raise ValueError("the user's own bug")


def test_an_error_of_a_reward_function_keeps_its_traceback(files):
    with pytest.raises(ValueError, match="the user's own bug") as kept:
        start("train", [*files.options, "--reward_funcs=tests.commands.test_train.failing_reward"])
    assert not isinstance(kept.value, UserError)


LOCAL = {
    "sums.jsonl": lambda data, path: write_jsonl(path, data),
    "sums.csv": lambda data, path: data.to_csv(path),
    "sums.tsv": lambda data, path: data.to_csv(path, sep="\t"),
    "sums.parquet": lambda data, path: data.to_parquet(path),
    "SUMS.JSONL": lambda data, path: write_jsonl(path, data),
    "sums.v1.jsonl.gz": lambda data, path: data.to_json(path, compression="gzip"),
    "sums.CSV.GZ": lambda data, path: gzip.open(path, "wb").write(data.to_pandas().to_csv(index=False).encode()),
    "sums[1].jsonl": lambda data, path: write_jsonl(path, data),
    "folder": lambda data, path: write_jsonl(made(path) / "train.jsonl", data),
    "saved": lambda data, path: data.save_to_disk(path),
    "saved splits": lambda data, path: DatasetDict(train=data, test=data.select([0])).save_to_disk(path),
    "files/*.jsonl": lambda data, path: [write_jsonl(made(path.parent) / f"{i}.jsonl", [data[i]]) for i in range(8)],
}


def made(folder):
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_train_takes_local_data(name, streaming, files, tmp_path):
    rows = [json.loads(line) for line in (files.path / "sums.jsonl").read_text().splitlines()]
    LOCAL[name](Dataset.from_list(rows), tmp_path / name)
    for given in (tmp_path / name, (tmp_path / "x").as_uri().removesuffix("x") + name):  # a path, and file://
        arguments = AdaScriptArguments(dataset_name=str(given), dataset_streaming=streaming)
        train_set, test_set = load_data(arguments, evaluate=False)
        assert [row["prompt"] for row in train_set] == [f"{a}+1=" for a in range(8)] and test_set is None


@pytest.mark.parametrize(("is_local", "written"), [(True, None), (False, "organization/sums")])
def test_a_local_path_is_not_written_into_the_model_card(is_local, written, files, tmp_path, monkeypatch):
    """Where it would be the name of a dataset on the hub."""
    sums, pushed = Dataset.from_list([{"prompt": f"{a}+1="} for a in range(8)]), []
    monkeypatch.setattr("ada_trl.commands.run_setup.load_split", lambda *args, **kwargs: sums)
    monkeypatch.setattr("huggingface_hub.whoami", lambda token: None)
    monkeypatch.setattr(AdaGRPOTrainer, "init_hf_repo", lambda self: None)
    monkeypatch.setattr(AdaGRPOTrainer, "push_to_hub", lambda self, **given: pushed.append(given))
    name = files.path / "sums.jsonl" if is_local else "organization/sums"
    train([*files.options, f"--output_dir={tmp_path}", f"--dataset_name={name}", "--push_to_hub"])
    assert pushed[-1] == {"dataset_name": written}


def test_a_mixture_of_data_sets(files, tmp_path):
    source = {"path": "json", "data_files": str(files.path / "sums.jsonl")}
    config = {"datasets": [source, source | {"columns": ["prompt", "answer"]}], "test_split_size": 0.25}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(config))
    script, _, _ = parse_args(["--config", str(tmp_path / "mixture.yaml"), "--use_cpu", "--bf16=false"])
    train_set, test_set = load_data(script, evaluate=True)
    assert (len(train_set), len(test_set)) == (12, 4)
    script.dataset_name = "other.jsonl"
    with pytest.raises(ValueError, match=r"dataset_name \('other.jsonl'\) has no effect if datasets"):
        load_data(script, evaluate=True)


def test_a_run_is_resumed_from_its_last_checkpoint(files, tmp_path):
    options = [*files.options, f"--output_dir={tmp_path}", "--save_strategy=steps", "--save_steps=1", "--max_steps=2"]
    train(options)
    train([*options, "--max_steps=3", "--resume_from_checkpoint", "true"])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "reward" in row] == [1, 2, 3]  # the first two are the first run's


def test_prepare_is_called_once_and_only_if_necessary(tmp_path, monkeypatch):
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


def test_a_task_with_absolute_paths_is_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tasks.py").write_text("def make(output_dir):\n    open(f'{output_dir}.made', 'w').close()\n")
    model = ModelConfig(model_name_or_path=str(tmp_path / "task" / "base"))
    script = AdaScriptArguments(dataset_name="elsewhere", reward_funcs=[], prepare="tasks.make(output_dir='task')")
    monkeypatch.syspath_prepend(tmp_path)
    prepare_task(script, AdaGRPOConfig("out", use_cpu=True, bf16=False), model)
    assert Path("task.made").exists()
