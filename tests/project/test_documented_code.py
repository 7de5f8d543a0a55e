"""
Every code block of README.md and docs/ that can run here is run, in a folder that is not the repository.

Python blocks are run whole, shell blocks command by command (YAML and diffs: test_documentation.py). What needs a GPU,
a download or hours is recognised by `NEEDS`; any other block is left out by `<!-- not run: why -->` on the line before
it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ada_trl.commands import start
from ada_trl.recipes.arithmetic.task import prepare
from ada_trl.recipes.math.evaluate import main as evaluate

from ..documentation import command_lines


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "recipes" / "arithmetic" / "README.md",
]
# What is not here, and how a command or a program that needs it is recognised.
NEEDS = {
    "an installation": r"^(make|pip|uv|git|cd|python3? -m venv|source) ",
    "a GPU or a vLLM server": (
        r"vllm[ _]serve|CUDA_VISIBLE|use_vllm=True|--use_vllm|arithmetic/vllm-|vllm_server|--num_processes|FSDP"
    ),
    "a download": (
        r"\b(Qwen|meta-llama|openai|RLHFlow|HuggingFaceH4|trl-lib|open-r1|weqweasdas)/|(?:recipes/)?\bmath/[\w{]"
    ),
    "a trainer": r"\Atrainer\.",
    "what a user has": r"\b(train|my_script|script)\.py\b|my_|your-|…|<\w+>|\.\.\.",
    "minutes to hours": r"benchmarks\.|arithmetic\.demo|notebooks/run",
}
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Code(NamedTuple):
    """A command or a block of a page."""

    page: str
    line: int
    language: str
    text: str
    reason: str  # why it is not run; empty if it is

    def __str__(self):
        return f"{self.page}:{self.line} {self.text.splitlines()[0][:60]}"


def code_of(page: str, text: str) -> list[Code]:
    """The commands and programs of a page, each with the reason for which it is left out."""
    found = []
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        marked = re.search(r"<!-- not run: (.+) -->\n$", text[: block.start()])
        line = text.count("\n", 0, block.start()) + 2
        for part in command_lines(content) if language == "bash" else [content]:
            found.append(Code(page, line, language, part, marked[1] if marked else needed(part)))
    return found


def needed(text: str) -> str:
    """Return the missing requirement of a command or program, or an empty string."""
    return next((what for what, pattern in NEEDS.items() if re.search(pattern, text, flags=re.MULTILINE)), "")


CODE = [code for path in PAGES for code in code_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """
    Folder of a reader after the first steps, with the arithmetic task, a short run with pass rates, and an evaluation.
    """
    directory = tmp_path_factory.mktemp("reader")
    task = directory / "outputs" / "arithmetic"
    prepare(task, steps=3, num_train=512, num_test=16)
    options = [f"--model_name_or_path={task / 'base'}", f"--dataset_name={task / 'data'}", "--max_steps=2"]
    options += [f"--output_dir={directory / 'outputs' / 'seed'}", "--use_cpu", "--pass_rate_estimator=ema"]
    options += [
        "--save_strategy=steps",
        "--save_steps=2",
        "--eval_strategy=no",
        "--eval_on_start=false",
        "--logging_steps=1",
    ]
    start("train", ["--config", "arithmetic/seq-balance.yaml", *options])
    sampling = ["--backend=transformers", "--prompt_format=plain", "--num_samples=4", "--max_new_tokens=6"]
    tests = ["--datasets", str(task / "data" / "test.jsonl"), f"--output_dir={directory / 'outputs' / 'samples'}"]
    evaluate(["--models", str(task / "base"), *tests, *sampling])
    programs = directory / ".venv" / "bin"  # where `make` installs them
    programs.mkdir(parents=True)
    for name, module in {"ada-trl": None, "accelerate": "accelerate.commands.accelerate_cli", "python": ""}.items():
        code = f"-m {module}" if module else "" if module == "" else '-c "from ada_trl.commands import main; main()"'
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
        (programs / name).chmod(0o755)
    return directory


def provide(folder: Path, code: str) -> None:
    """The runs, records and samples that a command or program reads, from the short run."""
    inputs = re.sub(r"--output_dir( +[^-\s]\S*)+", "", code)
    if re.search(r"ada[_-]trl[. ](train|data|evaluate)", code):
        return  # what they name in outputs/ is there, or theirs to write
    for name in re.findall(r"\boutputs/[\w./-]+", inputs):
        target = folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            seed = folder / "outputs" / ("samples" if "--samples" in code else "seed")
            source = seed / "checkpoint-2" / target.name if target.suffix else seed
            (shutil.copy if target.suffix else shutil.copytree)(source, target)


def execute(command: list[str], folder: Path) -> None:
    environment = os.environ | {"PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=850)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("code", [code for code in CODE if not code.reason], ids=str)
def test_it_runs(code, folder):
    provide(folder, code.text)
    if code.language == "bash":
        execute(["bash", "-euo", "pipefail", "-c", code.text], folder)
    else:
        execute([sys.executable, "-c", code.text], folder)
