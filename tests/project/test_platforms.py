"""
What differs on Windows, as far as it can be tried elsewhere: modules that only POSIX has, encodings of files, paths.
"""

import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest

from ada_trl.commands import options
from ada_trl.trainer import ada_grpo_trainer

from ..helpers import ON_CPU, QUICK, ROOT, even_reward, prompt_dataset, save_tiny_model, tiny_model, tiny_tokenizer


POSIX = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "curses", "_curses")
MODULES = [*ROOT.glob("ada_trl/**/*.py"), *ROOT.glob("recipes/arithmetic/*.py"), *ROOT.glob("recipes/math/*.py")]
IMPORT_AND_TRAIN = """
import importlib, sys, warnings
import datasets
from trl import GRPOTrainer

# An ImportError from now on. Libraries import some of them where they exist.
sys.modules.update(dict.fromkeys({posix}))
for name in {modules}:
    importlib.import_module(name)

from ada_trl.commands import check, train

warnings.filterwarnings("error", category=EncodingWarning, module="ada_trl|recipes")
train.main([*{words}, "--save_steps=1"])
train.main([*{words}, "--max_steps=2", "--resume_from_checkpoint=true"])
check.main({words})
"""


def test_without_modules_that_only_posix_has_and_with_any_default_encoding(tmp_path):
    """
    Every module is imported, and a run is trained, resumed and checked. A file opened without an encoding is an error.
    """
    save_tiny_model(tmp_path / "a model")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(16)]
    (tmp_path / "some data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES]
    modules = [name.removesuffix(".__init__") for name in modules if not name.endswith("verifier_worker")]
    given = QUICK | {"max_steps": 1, "model_name_or_path": tmp_path / "a model", "output_dir": tmp_path / "out put"}
    given |= {"dataset_name": tmp_path / "some data.jsonl", "reward_funcs": "recipes.arithmetic.task.exact_match"}
    given |= {"save_strategy": "steps", "baseline": "batch", "retries": 1, "pass_rate_estimator": "ema"}
    words = [f"--{name}={value}" for name, value in given.items()]
    code = IMPORT_AND_TRAIN.format(posix=POSIX, modules=modules, words=words)
    python = [sys.executable, "-X", "warn_default_encoding", "-W", "ignore"]
    result = subprocess.run([*python, "-c", code], cwd=ROOT, env=os.environ | ON_CPU, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "not measured" in result.stdout


@pytest.mark.parametrize("name", [r"arithmetic\batch.yaml", r"recipes\arithmetic\batch.yaml"])
def test_recipes_with_backslashes(name, monkeypatch, tmp_path):
    def as_on_windows(*parts):
        return Path(PureWindowsPath(*parts).as_posix())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "Path", as_on_windows)
    assert options.find_config(name) == ROOT / "recipes/arithmetic/batch.yaml"


@pytest.mark.parametrize("name", ["org/tiny", r"C:\my models\tiny", "models/tiny/"])
def test_the_default_output_directory_is_named_after_the_model(name, monkeypatch):
    monkeypatch.setattr(ada_grpo_trainer, "Path", PureWindowsPath)

    class OnCPU(ada_grpo_trainer.AdaGRPOConfig):
        def __init__(self, output_dir):
            super().__init__(output_dir, **QUICK)

    monkeypatch.setattr(ada_grpo_trainer, "AdaGRPOConfig", OnCPU)
    model = tiny_model()
    model.config._name_or_path = name
    data, tokenizer = prompt_dataset(), tiny_tokenizer()
    trainer = ada_grpo_trainer.AdaGRPOTrainer(model, even_reward, None, data, processing_class=tokenizer)
    assert trainer.args.output_dir == "tiny-AdaGRPO"
