"""
Mistakes that people make on the command line: each ends in one sentence that names the value and the remedy, with exit
code 2, and nothing on disk is changed.
"""

import json
from pathlib import Path

import pytest
import yaml

from ada_trl.commands import main

from ..helpers import tiny_model, tiny_tokenizer


SUMS = [{"prompt": f"{a}+1=", "problem": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
DATA = [
    "data",
    "--model_name_or_path=model",
    "--dataset_name=sums.jsonl",
    "--output_dir=out",
    "--backend=transformers",
]
DATA += ["--prompt_format=plain", "--num_samples=2", "--max_new_tokens=2"]
EVALUATE = ["evaluate", "--models", "model", "--datasets", "sums.jsonl", "--output_dir=out", "--backend=transformers"]
EVALUATE += ["--prompt_format=plain", "--num_samples=2", "--max_new_tokens=2"]

# What is typed, and what the sentence must say: the value, and what to do about it.
MISTAKES = {
    # data
    "data: what is required": (["data", "--output_dir=out"], ["required", "--model_name_or_path"]),
    "data: no vLLM": ([*DATA, "--backend=vllm"], ["vLLM is not installed", "--backend transformers"]),
    "data: no such backend": ([*DATA, "--backend=cuda"], ["'cuda'", "'transformers'"]),
    "data: percent": ([*DATA, "--max_pass_rate=31.3"], ["max_pass_rate (31.3)", "at most 1"]),
    "data: empty range": ([*DATA, "--min_pass_rate=0.5"], ["min_pass_rate (0.5)", "less than max_pass_rate (0.375)"]),
    "data: NaN": ([*DATA, "--max_pass_rate=nan"], ["max_pass_rate (nan)", "less than"]),
    "data: temperature NaN": ([*DATA, "--temperature=nan"], ["temperature (nan)", "at least 0"]),
    "data: broken JSON": ([*DATA, "--chat_template_kwargs={a: 1}"], ["({a: 1})", "no valid JSON", "Write it as"]),
    "data: no such model": ([*DATA, "--model_name_or_path=./modl"], ["'./modl'", "no such directory"]),
    "data: data for a model": ([*DATA, "--model_name_or_path=data"], ["'data' is not a model", "--dataset_name"]),
    "data: no such column": ([*DATA, "--answer_column=gold"], ["'gold'", "'problem'", "--answer_column"]),
    "data: no answers": ([*DATA, "--dataset_name=words.csv"], ["'word'", "--problem_column"]),
    "data: no such split": (
        [*DATA, "--dataset_split=test"],
        ["'test' is not a split of 'sums.jsonl'", "--dataset_split"],
    ),
    "data: no chat template": (
        [*DATA, "--prompt_format=chat"],
        ["'model' has no chat template", "--prompt_format plain"],
    ),
    "data: no server": (
        [*DATA, "--backend=server", "--vllm_server_base_url=http://127.0.0.1:9", "--vllm_server_timeout=0"],
        ["vLLM"],
    ),
    "data: other settings": ([*DATA, "--output_dir=sampled", "--seed=7"], ["seed 42", "has 7", "delete the file"]),
    # evaluate
    "evaluate: too few labels": ([*EVALUATE, "--labels", "a", "b"], ["['a', 'b']", "1 models"]),
    "evaluate: k": ([*EVALUATE, "--pass_at", "4"], ["pass_at ([4])", "num_samples (2)"]),
    "evaluate: a file has no split": ([*EVALUATE, "--dataset_split=test"], ["'test' is not a split", "directory"]),
    "evaluate: data for a model": ([*EVALUATE, "--models", "model", "data"], ["--models 'data' is not a model"]),
    "evaluate: edges": (
        [*EVALUATE, "--difficulty_edges", "0", "nan", "1"],
        ["difficulty_edges ([0.0, nan, 1.0])", "must increase"],
    ),
    "evaluate: no problems": ([*EVALUATE, "--max_problems=0"], ["'sums.jsonl' has no problems", "max_problems is 0"]),
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
            "rates.csv": "pass_rate\n0.5\nnan\n",
            "few.csv": "pass_rate\n0.5\n",
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


@pytest.fixture(scope="module")
def folder(files):
    """With samples of an earlier `ada-trl data`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        main([*DATA, "--output_dir=sampled", "--min_pass_rate=-1", "--max_pass_rate=1"])
    return files


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, folder, monkeypatch, capsys):
    args, said = MISTAKES[mistake]
    monkeypatch.chdir(folder)
    before = content(folder)
    with pytest.raises(SystemExit) as ended:
        main(args)
    printed = capsys.readouterr().err
    sentence = next((line for line in printed.splitlines() if "error: " in line), "")
    assert ended.value.code == 2
    assert "Traceback" not in printed and printed.rstrip().endswith(sentence)
    assert all(words in sentence for words in said), sentence
    assert len(sentence) < 600
    assert content(folder) == before
