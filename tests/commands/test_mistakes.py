"""
Mistakes that people make on the command line: each ends in one sentence that names the value and the fix, with exit
code 2, and nothing on disk is changed.
"""

import json
from pathlib import Path

import pytest
import yaml

from ada_trl.commands import main

from ..helpers import tiny_model, tiny_tokenizer


SUMS = [{"prompt": f"{a}+1=", "problem": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
TRAIN = ["train", "--config", "good.yaml"]

# What is typed, and what the sentence must say: the value, and what to do about it.
MISTAKES = {
    # the command
    "unknown command": (["trian"], ["'trian'", "did you mean 'train'?"]),
    # configuration files
    "no such file": (["train", "--config", "nowhere.yaml"], ["nowhere.yaml", "no such file", "The recipes are in"]),
    "misspelt recipe": (
        ["train", "--config", "arithmetic/seq-balanc.yaml"],
        ["arithmetic/seq-balanc.yaml", "did you mean 'arithmetic/seq-balance.yaml'?"],
    ),
    "config without a file": (
        ["train", "--config", "--max_steps", "3"],
        ["--config", "expected at least one argument"],
    ),
    "a directory as config": (["train", "--config", "data"], ["--config data is a directory", "name a YAML file"]),
    "broken YAML": (["train", "--config", "broken.yaml"], ["broken.yaml is not valid YAML (line 2", "Correct it"]),
    "a list as config": (["train", "--config", "list.yaml"], ["list.yaml must contain a YAML mapping", "[1]"]),
    "a model as config": (["train", "--config", "model/model.safetensors"], ["model.safetensors is not valid YAML"]),
    "unknown key": (["train", "--config", "unknown.yaml"], ["max_stepz: 5", "did you mean 'max_steps'?"]),
    "text for a number": (
        ["train", "--config", "good.yaml", "text.yaml"],
        ["text.yaml has max_steps: many", "it takes int"],
    ),
    "a list for a number": (["train", "--config", "good.yaml", "numbers.yaml"], ["seed: [1, 2]", "takes one value"]),
    "no such mode": (
        ["train", "--config", "good.yaml", "mode.yaml"],
        ["adaptive_sampling: seq", "one of 'seq-balance'"],
    ),
    # options
    "misspelt option": ([*TRAIN, "--max_stepz", "5"], ["--max_stepz", "did you mean '--max_steps'?"]),
    "misspelt option with =": ([*TRAIN, "--learning_rat=1"], ["--learning_rat ", "did you mean '--learning_rate'?"]),
    "the beginning of an option": ([*TRAIN, "--max_step", "5"], ["--max_step ", "did you mean '--max_steps'?"]),
    "a word too many": ([*TRAIN, "--seed", "1", "2"], ["unexpected word 2"]),
    "text for a number as option": ([*TRAIN, "--max_steps", "many"], ["--max_steps", "'many'", "int"]),
    "no such mode as option": ([*TRAIN, "--adaptive_sampling", "seq"], ["'seq'", "choose from 'seq-balance'"]),
    "too few per round": (
        [*TRAIN, "--samples_per_round", "2"],
        ["samples_per_round (2)", "at least num_generations (4)"],
    ),
    "unknown exit reward": (
        [*TRAIN, "--success_reward", "accuracy"],
        ["success_reward ('accuracy')", "'even_reward'"],
    ),
    "no GPU": ([*TRAIN, "--use_cpu=false", "--bf16=true"], ["bf16/gpu", "use_cpu"]),
    "nothing at all": (["train"], ["model_name_or_path is not set", "--model_name_or_path"]),
    # models
    "no model": (["train", "--use_cpu"], ["model_name_or_path is not set", "--model_name_or_path"]),
    "no such model": (
        [*TRAIN, "--model_name_or_path=outputs/a/base"],
        ["'outputs/a/base'", "neither a directory here", "Correct the name"],
    ),
    "no such model on the hub": ([*TRAIN, "--model_name_or_path=Quen/Qwen9"], ["'Quen/Qwen9'", "Correct the name"]),
    "data for a model": (
        [*TRAIN, "--model_name_or_path=data"],
        ["'data' is not a model", "config.json", "--dataset_name"],
    ),
    "a file for a model": (
        [*TRAIN, "--model_name_or_path=good.yaml"],
        ["'good.yaml' is not a model", "config.json"],
    ),
    "a run for a model": ([*TRAIN, "--model_name_or_path=run"], ["'run' is not a model", "give run/checkpoint-10"]),
    "no such modules": ([*TRAIN, "--use_peft", "--lora_target_modules", "qq"], ["qq", "not found"]),
    # data sets
    "no data set": (
        ["train", "--use_cpu", "--model_name_or_path=model"],
        ["dataset_name is not set", "--dataset_name"],
    ),
    "no such data set": ([*TRAIN, "--dataset_name=outputs/x/y"], ["'outputs/x/y'", "Correct the name"]),
    "no such data set on the hub": ([*TRAIN, "--dataset_name=openai/gsm9k"], ["'openai/gsm9k'", "Correct the name"]),
    "a model for data": ([*TRAIN, "--dataset_name=model"], ["'model'", "is a model", "--model_name_or_path"]),
    "an empty directory": ([*TRAIN, "--dataset_name=nothing"], ["'nothing'", "without data files", "train.jsonl"]),
    "an empty file": ([*TRAIN, "--dataset_name=empty.jsonl"], ["empty.jsonl", "it is empty", "Replace it"]),
    "broken JSON": ([*TRAIN, "--dataset_name=broken.jsonl"], ["broken.jsonl", "JSON parse error", "Correct"]),
    "a text file": ([*TRAIN, "--dataset_name=notes.txt"], ["notes.txt is a .txt file", ".jsonl"]),
    "no such split": ([*TRAIN, "--dataset_train_split=training"], ["('training') is not a split", "'train', 'test'"]),
    "no test split": (
        [*TRAIN, "--dataset_name=sums.jsonl", "--eval_strategy=steps"],
        ["('test') is not a split of 'sums.jsonl'", "train.jsonl and test.jsonl"],
    ),
    "no prompts": ([*TRAIN, "--dataset_name=words.csv"], ["columns 'word'", "'prompt' or 'problem'", "rename"]),
    "a mixture without a path": (
        ["train", "--config", "good.yaml", "mixture.yaml"],
        ["'pth'", "a mapping with a `path`"],
    ),
    # reward functions
    "no reward": (
        ["train", "--use_cpu", "--model_name_or_path=model", "--dataset_name=data"],
        ["reward_funcs is not set", "--reward_funcs"],
    ),
    "no such module": (
        [*TRAIN, "--reward_funcs", "rewardz.accuracy"],
        ["'rewardz.accuracy'", "No module", "dotted path"],
    ),
    "no such function": (
        [*TRAIN, "--reward_funcs", "trl.rewards.accuracy_rewrd"],
        ["'trl.rewards.accuracy_rewrd'", "did you mean 'accuracy_reward'?"],
    ),
    "TRL's short name": (
        [*TRAIN, "--reward_funcs", "accuracy_reward"],
        ["'accuracy_reward'", "trl.rewards.accuracy_reward"],
    ),
    "no such reward model": ([*TRAIN, "--reward_funcs", "accuracy"], ["'accuracy'", "A function needs its module"]),
    "a number for a function": ([*TRAIN, "--reward_funcs", "math.pi"], ["'math.pi'", "math has no function pi"]),
    "a wrong argument": (
        [*TRAIN, "--reward_funcs", "trl.rewards.get_repetition_penalty_reward(n=1)"],
        ["(n=1)", "Correct its arguments"],
    ),
    # checkpoints
    "nothing to resume": (
        [*TRAIN, "--resume_from_checkpoint=true", "--output_dir=data"],
        ["data has no checkpoint", "Leave it out"],
    ),
    "no such checkpoint": (
        [*TRAIN, "--resume_from_checkpoint=run/checkpoint-9", "--output_dir=run"],
        ["'run/checkpoint-9' is not a checkpoint", "the last one in run is checkpoint-10"],
    ),
    # vLLM
    "no server": (
        [*TRAIN, "--use_vllm", "--vllm_mode=server", "--vllm_server_timeout=0", "--vllm_weight_sync=disk"],
        ["vLLM"],
    ),
    # plots
    "plots: no run": (["plots"], ["nothing to plot", "give RUN"]),
    "plots: no such run": (["plots", "runn"], ["'runn'", "output directory"]),
    "plots: no state": (["plots", "data"], ["'data' has no trainer_state.json", "trainer.save_state()"]),
    "plots: a torn state": (["plots", "torn"], ["torn/trainer_state.json is not the state", "another run"]),
    "plots: no matplotlib": (["plots", "run"], ["matplotlib", "pip install"]),
    "plots: the same run twice": (["plots", "run", "run"], ["2 runs", "set --labels"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder as people have it: a model, data, recipes, runs, and what went wrong in each."""
    directory = tmp_path_factory.mktemp("mistakes")
    tiny_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    rows = "".join(json.dumps(row) + "\n" for row in SUMS)
    good = {"model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "tests.helpers.even_reward"}
    good |= {"output_dir": "out", "use_cpu": True, "bf16": False, "max_steps": 1, "per_device_train_batch_size": 8}
    texts = {
        **dict.fromkeys(("sums.jsonl", "data/train.jsonl", "data/test.jsonl"), rows),
        **{"empty.jsonl": "", "broken.jsonl": '{"prompt": "1+1="}\n{"prompt": \n', "notes.txt": "1+1=2\n"},
        **{
            "words.csv": "word\none\n",
            "good.yaml": yaml.safe_dump(good),
        },
        **{"broken.yaml": "max_steps: 1\n  seed: 2: 3\n", "list.yaml": "[1]", "unknown.yaml": "max_stepz: 5\n"},
        **{
            "text.yaml": "max_steps: many\n",
            "numbers.yaml": "seed: [1, 2]\n",
            "mode.yaml": "adaptive_sampling: seq\n",
        },
        **{"mixture.yaml": "datasets:\n- pth: data\n", "torn/trainer_state.json": '{"log_hist', "nothing/.keep": ""},
        **{"run/checkpoint-2/trainer_state.json": "{}", "run/checkpoint-10/trainer_state.json": "{}"},
    }
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".lock"
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, files, monkeypatch, capsys):
    args, said = MISTAKES[mistake]
    if mistake == "plots: no matplotlib":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(files)
    before = content(files)
    with pytest.raises(SystemExit) as ended:
        main(args)
    printed = capsys.readouterr().err
    sentence = next((line for line in printed.splitlines() if "error: " in line), "")
    assert ended.value.code == 2
    assert "Traceback" not in printed and printed.rstrip().endswith(sentence)
    assert all(words in sentence for words in said), sentence
    assert len(sentence) < 600
    assert content(files) == before
