"""Mistakes on the command line: each prints one sentence with the value and the fix, exits with code 2, and changes no file."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from ada_trl.commands import main

from ..helpers import save_tiny_model


SUMS = [{"prompt": f"{a}+1=", "problem": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
# Command line after `train --config good.yaml` (or all of it, if it does not begin with `--`), and parts of the message.
MISTAKES = [
    # the command
    ("trian", "'trian'", "choose from 'train', 'check'"),
    # configuration files
    ("train --config twice.yaml", "twice.yaml has seed more than once", "Remove all but one"),
    ("train --config nowhere.yaml", "nowhere.yaml", "no such file, nor a recipe of that name in"),
    ("train --config --max_steps 3", "--config", "expected at least one argument"),
    ("train --config data", "--config data: there is no such file"),
    ("train --config broken.yaml", "broken.yaml is not valid YAML", "line 2", "Correct it"),
    ("train --config list.yaml", "list.yaml must contain a YAML mapping", "[1]"),
    ("train --config unknown.yaml", "unknown.yaml: unknown option --max_stepz", "did you mean '--max_steps'?"),
    # options
    ("--max_stepz 5", "--max_stepz", "did you mean '--max_steps'?"),
    ("--learning_rat=1", "--learning_rat ", "did you mean '--learning_rate'?"),
    ("--max_step 5", "--max_step ", "did you mean '--max_steps'?"),
    ("--seed 1 2", "unknown option 2"),
    ("--max_steps many", "--max_steps", "'many'", "int"),
    ("train --config text.yaml", "--seed", "'many'", "int"),
    ("--adaptive_sampling seq", "'seq'", "choose from 'seq-balance'"),
    ("--samples_per_round 2", "samples_per_round (2)", "at least num_generations (4)"),
    ("--success_reward accuracy", "success_reward ('accuracy')", "'even_reward'"),
    ("--use_cpu=false --bf16=true", "bf16/gpu", "use_cpu"),
    # models
    ("train --use_cpu", "model_name_or_path is not set", "--model_name_or_path"),
    ("--model_name_or_path=outputs/a/base", "outputs/a/base"),
    ("--model_name_or_path=Quen/Qwen9", "huggingface.co"),
    ("--model_name_or_path=data", "data", "config.json"),
    ("--use_peft --lora_target_modules qq", "qq", "not found"),
    ("--model_init_kwargs '{\"dtpye\": 1}'", "unexpected keyword argument 'dtpye'"),
    # datasets
    ("train --use_cpu --model_name_or_path=model", "dataset_name is not set", "--dataset_name"),
    ("--dataset_name=outputs/x/y", "'outputs/x/y'", "Correct the name"),
    ("--dataset_name=openai/gsm9k", "'openai/gsm9k'", "Correct the name"),
    ("--dataset_name=nothing", "'nothing'", "cannot be read"),
    ("--dataset_name=broken.jsonl", "broken.jsonl", "JSON parse error", "Correct"),
    ("--dataset_name=notes.txt", "'notes.txt'", "Correct the name"),
    ("--dataset_train_split=training", "'training'", "['train', 'test']"),
    ("--dataset_name=sums.jsonl --eval_strategy=steps", "'test'", "'sums.jsonl'"),
    ("--dataset_name=words.csv", "columns 'word'", "'prompt' or 'problem'", "rename"),
    ("train --config good.yaml mixture.yaml", "'pth'"),
    # reward functions
    ("train --use_cpu --model_name_or_path=model --dataset_name=data", "No reward function", "--reward_funcs"),
    ("--reward_funcs rewardz.accuracy", "'rewardz.accuracy'", "No module", "dotted path"),
    ("--reward_funcs trl.rewards.accuracy_rewrd", "'trl.rewards.accuracy_rewrd'", "has no attribute"),
    ("--reward_funcs accuracy_reward", "'accuracy_reward'", "trl.rewards.accuracy_reward"),
    ("--reward_funcs accuracy", "huggingface.co"),
    ("--reward_funcs 'trl.rewards.get_repetition_penalty_reward(n=1)'", "unexpected keyword argument 'n'"),
    # checkpoints
    ("--resume_from_checkpoint=true --output_dir=data", "output_dir (data) has no checkpoint", "Correct output_dir"),
    # vLLM
    ("train --config arithmetic/vllm-disk.yaml --use_cpu", "pip install 'ada_trl[vllm]'", "server"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, data, recipes and runs, and an invalid version of each."""
    directory = tmp_path_factory.mktemp("mistakes")
    save_tiny_model(directory / "model")
    rows = "".join(json.dumps(row) + "\n" for row in SUMS)
    good = {"model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "tests.helpers.even_reward"}
    good |= {"output_dir": "out", "use_cpu": True, "bf16": False, "max_steps": 1, "per_device_train_batch_size": 8}
    texts = dict.fromkeys(("sums.jsonl", "data/train.jsonl", "data/test.jsonl"), rows)
    texts |= {"broken.jsonl": '{"prompt": "1+1="}\n{"prompt": \n', "notes.txt": "1+1=2\n"}
    texts |= {
        "words.csv": "word\none\n",
        "twice.yaml": "seed: 1\nbeta: 0\nseed: 2\n",
        "good.yaml": yaml.safe_dump(good),
        "nothing/.keep": "",
    }
    texts |= {"broken.yaml": "max_steps: 1\n  seed: 2: 3\n", "list.yaml": "[1]", "unknown.yaml": "max_stepz: 5\n"}
    texts |= {"text.yaml": "seed: many\n", "mixture.yaml": "datasets:\n- pth: data\n"}
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


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_is_reported_in_one_sentence(mistake, files, monkeypatch, capsys):
    command, *parts = mistake
    monkeypatch.chdir(files)
    before = content(files)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(f"train --config good.yaml {command}" if command.startswith("--") else command))
    printed = capsys.readouterr().err
    sentence = next((line for line in printed.splitlines() if "error: " in line), "")
    assert ended.value.code == 2
    assert "Traceback" not in printed and printed.rstrip().endswith(sentence)
    assert all(part in sentence for part in parts), sentence
    assert len(sentence) < 600
    assert content(files) == before
