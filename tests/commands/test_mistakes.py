"""Mistakes on the command line: each prints a sentence with value and fix, exits with code 2, and changes no file."""

import gzip
import json
import shlex
from pathlib import Path

import pytest
import yaml

from ada_trl.commands import main
from ada_trl.commands.reward_funcs import load_reward_funcs

from ..helpers import save_tiny_model


SUMS = [{"prompt": f"{a}+1=", "problem": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
# Command line after `train --config good.yaml` (all of it, if it does not begin with `--`), and parts of the message.
MISTAKES = [
    # the command
    ("trian", "'trian'", "choose from 'train', 'check'"),
    # configuration files
    ("train --config twice.yaml", "twice.yaml has seed more than once", "Remove all but one"),
    ("train --config twice_inside.yaml", "twice_inside.yaml has min_lr more than once", "Remove all but one"),
    ("train --config latin.yaml", "latin.yaml is not valid YAML", "Correct it"),
    ("train --config on.yaml", "on.yaml must contain a YAML mapping", "{True: 2}"),
    ("train --config environment.yaml", "environment.yaml: env ('A=1') must be a mapping"),
    ("train --config nested.yaml", "nested.yaml: config is for the command line"),
    ("train --config half.yaml", "--max_steps", "invalid int value: '1.5'"),
    ("train --config several.yaml", "several.yaml: dataset_name (['a', 'b']) must be one value"),
    ("train --config several_steps.yaml", "several_steps.yaml: max_steps ([1]) must be one value"),
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
    ("--advantage_func my_rewards.ranks", "--advantage_func", "argument of AdaGRPOTrainer, for Python only"),
    ("train --config function.yaml", "function.yaml: unknown option --rollout_func", "for Python only"),
    # values that YAML reads as others
    ("train --config no.yaml", "save_strategy: no as False", "in quotes: save_strategy: 'no'"),
    ("train --config off.yaml", "eval_strategy: off as False", "quotes"),
    ("train --config yes.yaml", "baseline: yes as True", "quotes"),
    ("train --config exponent.yaml", "1e-7 in lr_scheduler_kwargs as text", "1.0e-7"),
    ("train --config exponents.yaml", "2E5 in reward_weights as text", "1.0e-7"),
    ("train --config good.yaml empty_value.yaml", "retries"),
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
    ("--dataset_name=outputs/x/y", "'outputs/x/y' cannot be read: there is no such file", "Correct the name"),
    ("--dataset_name=openai/gsm9k", "'openai/gsm9k'", "Correct the name"),
    ("--dataset_name=nothing", "'nothing'", "cannot be read"),
    ("--dataset_name=broken.jsonl", "broken.jsonl", "JSON parse error", "Correct"),
    (
        "--dataset_name=notes.txt",
        "'notes.txt'",
        "format is .txt",
        "Files are .csv, .tsv, .json, .jsonl, .parquet, .arrow",
    ),
    ("--dataset_name=README", "'README'", "format is unknown", "Files are"),
    ("--dataset_name='mixed/*'", "format is .csv and .jsonl", "Files are"),
    ("--dataset_name=empty.jsonl", "'empty.jsonl'", "it is empty"),
    ("--dataset_name=empty.json", "'empty.json'", "no data"),
    ("--dataset_name=empty.csv", "'empty.csv'", "No columns to parse"),
    ("--dataset_name=truncated.jsonl.gz", "'truncated.jsonl.gz'", "Compressed file ended before"),
    ("--dataset_name=corrupt.jsonl.xz --dataset_streaming", "'corrupt.jsonl.xz'", "Corrupt input data"),
    ("--dataset_name=header.csv --dataset_streaming", "'header.csv'", "it is empty"),
    ("--dataset_name=data.py", "scripts are no longer supported"),
    *(
        (f"--dataset_name='{name}'", f"dataset '{name}' cannot be read: there is no such file", "Correct the name")
        for name in ("none.jsonl", "a/none.json.GZ", "./none", "../none", "none/*.csv", "file:///none.csv", "/none")
    ),
    ("--dataset_train_split=training", "'training'", "['train', 'test']"),
    ("--dataset_name=sums.jsonl --eval_strategy=steps", "'test'", "'sums.jsonl'"),
    ("--dataset_name=words.csv", "columns 'word'", "'prompt' or 'problem'", "rename"),
    ("train --config good.yaml mixture.yaml", "'pth'"),
    # reward functions
    ("train --use_cpu --model_name_or_path=model --dataset_name=data", "No reward function", "--reward_funcs"),
    ("--reward_funcs rewardz.accuracy", "'rewardz.accuracy'", "No module", "dotted path"),
    ("--reward_funcs trl.rewards.accuracy_rewrd", "'trl.rewards.accuracy_rewrd'", "has no attribute"),
    ("--reward_funcs ..my_rewards.even", "could not be imported", "Give the dotted path"),
    *(
        (f"--reward_funcs broken_{name}.even", cause, f"The error is in broken_{name}, or in a module", "--traceback")
        for name, cause in (("syntax", "syntax"), ("value", "'a'"), ("package", "'no_such_package'"))
    ),
    ("--reward_funcs accuracy_reward", "'accuracy_reward'", "trl.rewards.accuracy_reward"),
    ("--reward_funcs organization/accuracy", "huggingface.co"),
    ("--reward_funcs accuracy", "'accuracy' has no dot", "MODULE.accuracy for a function", "organization/accuracy"),
    ("--reward_funcs my_rewards", "'my_rewards' has no dot", "Write my_rewards.FUNCTION"),
    ("--reward_funcs my_rewards.py", "not a dotted path", "Write my_rewards.FUNCTION"),
    ("--reward_funcs ./my_rewards.py", "not a dotted path", "Write my_rewards.FUNCTION"),
    ("--reward_funcs src/my_rewards.py", "not a dotted path", "Write src.my_rewards.FUNCTION"),
    ("--reward_funcs my_rewards:even", "not a dotted path", "Write my_rewards.even."),
    ("--reward_funcs my_rewards.py:even", "not a dotted path", "Write my_rewards.even."),
    ("--reward_funcs my_rewards.Even", "is a class", "my_rewards.Even(...)"),
    ("--reward_funcs my_rewards.LIMIT", "is 5, and not a function"),
    ("--reward_funcs 'my_rewards.make_number()'", "is 5, and not a function"),
    ("--reward_funcs trl.rewards", "module", "not a function"),
    ("train --config number.yaml", "reward_funcs 5 is not text", "dotted path"),
    ("--reward_funcs 'trl.rewards.get_repetition_penalty_reward(n=1)'", "unexpected keyword argument 'n'"),
    # vLLM
    ("train --config arithmetic/vllm-disk.yaml --use_cpu", "pip install 'ada_trl[vllm]'", "server"),
]

# After `--config good.yaml`: mistakes with which `check` must fail as well, because `train` does.
OF_THE_RUN = [
    ("--resume_from_checkpoint=true --output_dir=data", "output_dir (data) has no checkpoint", "Correct it"),
    ("--resume_from_checkpoint=nowhere", "resume_from_checkpoint is nowhere, but that is no checkpoint", "Correct it"),
    ("--resume_from_checkpoint=data", "resume_from_checkpoint is data, but", "trainer_state.json"),
    ("--report_to=mlflow", "report_to (mlflow) is not available", "Install the package"),
    ("--report_to=my_tracker", "report_to (my_tracker) is not available", "none"),
    ("--push_to_hub", "hf auth login"),
    ("--log_completions --log_completions_hub_repo=mine/table", "hf auth login"),
    ("--eval_on_start --eval_strategy=no --dataset_name=sums.jsonl", "'test'", "'sums.jsonl'"),
    ("--optim=adamw_bnb_8bit", "bitsandbytes"),
    ("--lr_scheduler_type=cosine_with_min_lr", "min_lr"),
    ("--prepare 'my_rewards.prepare()'", "needs output_dir="),
    ("--prepare 'my_rewards.prepare(output_dir=1)'", "needs output_dir="),
    ("--prepare 'my_rewards.prepare(output_dir=\"out\", size=1)' --model_name_or_path=out/base", "argument 'size'"),
    ("--dataset_streaming --max_steps=-1", "max_steps has to be specified"),
    ("--output_dir=sums.jsonl", "sums.jsonl"),
]
MY_REWARDS = """
LIMIT = 5
even = lambda completions, **kwargs: [float(len(completion) % 2) for completion in completions]
def make_number(): return LIMIT
def prepare(output_dir=None): pass
class Even:
    def __call__(self, completions, **kwargs): return even(completions)
"""


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
    texts |= {
        "twice_inside.yaml": "lr_scheduler_kwargs: {min_lr: 1.0, min_lr: 2.0}\n",
        "on.yaml": "on: 2\n",
        "environment.yaml": "env: A=1\n",
        "nested.yaml": "config: good.yaml\n",
        "half.yaml": "max_steps: 1.5\n",
        "several.yaml": "dataset_name: [a, b]\n",
        "several_steps.yaml": "max_steps: [1]\n",
    }
    texts |= {"function.yaml": "rollout_func: a.b\n", "number.yaml": yaml.safe_dump(good | {"reward_funcs": [5]})}
    texts |= {"no.yaml": "save_strategy: no\n", "off.yaml": "eval_strategy: off\n", "yes.yaml": "baseline: yes\n"}
    texts |= {
        "exponent.yaml": "lr_scheduler_kwargs: {a: {min_lr: 1e-7}}\n",
        "exponents.yaml": "reward_weights: [2E5]\n",
    }
    texts |= {"broken_syntax.py": "def even(:", "broken_value.py": "int('a')"}
    texts |= {"broken_package.py": "import no_such_package"}
    texts |= {"empty_value.yaml": "retries:\n", "my_rewards.py": MY_REWARDS, "README": "", "header.csv": "prompt\n"}
    texts |= {
        "empty.jsonl": "",
        "empty.csv": "",
        "empty.json": "[]",
        "mixed/a.csv": "prompt\n1\n",
        "mixed/b.jsonl": rows,
    }
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "truncated.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-20])
    (directory / "corrupt.jsonl.xz").write_bytes(b"\xfd7zXZ\x00" + bytes(32))
    (directory / "latin.yaml").write_bytes("run_name: é\n".encode("latin-1"))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".lock"
    }


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network, in which a missing model is looked up for half a minute, and no token of the developer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def assert_fails(words, parts, files, capsys):
    before = content(files)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    printed = capsys.readouterr().err
    sentence = next((line for line in printed.splitlines() if "error: " in line), "")
    assert ended.value.code == 2
    assert "Traceback" not in printed and printed.rstrip().endswith(sentence)
    assert all(part in sentence for part in parts), sentence
    assert len(sentence) < 600
    assert content(files) == before


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_is_reported_in_one_sentence(mistake, files, monkeypatch, capsys):
    command, *parts = mistake
    monkeypatch.chdir(files)
    words = f"train --config good.yaml {command}" if command.startswith("--") else command
    assert_fails(words, parts, files, capsys)


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize("mistake", OF_THE_RUN, ids=lambda mistake: mistake[0])
def test_check_fails_wherever_train_does(mistake, command, files, monkeypatch, capsys):
    words, *parts = mistake
    monkeypatch.chdir(files)
    assert_fails(f"{command} --config good.yaml {words}", parts, files, capsys)


@pytest.mark.parametrize("name", ["even", "Even()"], ids=["lambda", "call of a class"])
def test_any_function_of_a_file_is_a_reward_function(name, files, monkeypatch):
    monkeypatch.chdir(files)
    (reward,) = load_reward_funcs([f"my_rewards.{name}"])
    assert reward(["a", "bb"]) == [1.0, 0.0]
