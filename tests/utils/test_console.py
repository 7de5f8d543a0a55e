"""Consoles whose encoding has not every character, as on Windows: a question mark, never an error."""

import io
import os
import subprocess
import sys

import pytest

from ada_trl.utils.console import show

from ..helpers import ON_CPU, QUICK, ROOT, save_tiny_model, write_jsonl


TRAINING = f"""
from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from tests.helpers import even_reward, prompt_dataset, tiny_model, tiny_tokenizer
args = AdaGRPOConfig("unused", **{QUICK | {"max_steps": 1}})
ρ = lambda rollouts: rollouts.reward_N
ρ.__name__ = "ρ"
data = prompt_dataset()
AdaGRPOTrainer(tiny_model(), even_reward, args, data, processing_class=tiny_tokenizer(), advantage_func=ρ).train()
"""


def run(encoding, *words, directory=ROOT, **environment):
    """The output of a Python process with such a console."""
    environment = ON_CPU | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment
    result = subprocess.run([sys.executable, *words], cwd=directory, env=os.environ | environment, capture_output=True)
    text = result.stdout.decode(encoding)  # raises an error if it is in another one
    assert result.returncode == 0, result.stderr[-3000:].decode(errors="replace")
    return text


def test_the_line_at_the_start_of_a_training():
    assert "advantages are those of ?" in run("cp1252", "-c", TRAINING).lower()


@pytest.mark.parametrize("words", [[], ["train", "--help"], ["train", "--help-all"], ["check", "--help"]])
def test_the_help_of_the_commands(words):
    code = "import sys; sys.argv[0] = 'ada-trl'; from ada_trl.commands import main; main()"
    assert "usage: ada-trl" in run("ascii", "-c", code, *words)


def test_what_a_command_prints(tmp_path):
    """Its own text and that of reward functions and TRL; started as a module, as with `accelerate launch`."""
    save_tiny_model(tmp_path / "model")
    write_jsonl(tmp_path / "données.jsonl", [{"prompt": f"{i}+1="} for i in range(16)])
    (tmp_path / "my_rewards.py").write_text(
        "def even(completions, **_):\n    print('é√')\n    return [float(len(c) % 2) for c in completions]\n",
        encoding="utf-8",
    )
    words = [f"--{name}={value}" for name, value in (QUICK | {"max_steps": 1}).items()]
    words += [
        "--log_completions",
        "--model_name_or_path=model",
        "--dataset_name=données.jsonl",
        "--reward_funcs=my_rewards.even",
    ]
    text = run("ascii", "-m", "ada_trl.commands.train", *words, "--output_dir=sortie é", directory=tmp_path)
    assert "\n??\n" in text or text.startswith("??\n")


def test_the_demo(tmp_path):
    """Its table and the names of its files."""
    options = ["--logging_steps=1", "--eval_steps=1", "--per_device_eval_batch_size=8", "--methods", "seq-balance"]
    code = "import sys; from recipes.arithmetic import demo, task; demo.STEPS = 1; "
    code += "demo.prepare = lambda directory: task.prepare(directory, steps=1, num_train=64, num_test=8); demo.main()"
    text = run("ascii", "-c", code, *options, "--task_dir=tâche", "--output_dir=démo", directory=tmp_path)
    assert "Wrote d?mo" in text and (tmp_path / "démo" / "report.md").exists()


@pytest.mark.parametrize("stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_streams_without_an_encoding_and_with_a_narrow_one(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    show("√ and a")
    stream.seek(0)
    assert stream.read() == ("√ and a\n" if isinstance(stream, io.StringIO) else "? and a\n")
    assert not isinstance(stream, io.TextIOWrapper) or stream.errors == "strict", "A library changes no stream."
