"""
`pip wheel .` gives a wheel that works in an environment of its own, in a folder without the repository.

What it depends on is not downloaded: the environment sees the packages of the one that runs the tests. It does not see
this package through them, because an editable install works by a `.pth` file, which is not followed twice.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("ada_trl", "recipes", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@dataclass
class Environment:
    """A fresh environment with the wheel in it, and an empty folder to work in."""

    wheel: Path
    bin: Path
    folder: Path

    def run(self, *command: str, fails: bool = False) -> str:
        """Output of a command of this environment; of a failing one, what it says."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        result = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert (result.returncode != 0) == fails, result.stderr[-3000:]
        return result.stderr if fails else result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"  # a copy, because building leaves files behind
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = directory.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "env")], check=True)
    scripts = directory / "env" / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run(
        [*pip, "--python", str(scripts / "python"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    site = subprocess.check_output(
        [str(scripts / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "folder").mkdir()
    shutil.rmtree(source)
    return Environment(wheel, scripts, directory / "folder")


def test_the_package_is_that_of_the_wheel_and_typed(environment):
    code = "import ada_trl, ada_trl.recipes.arithmetic.task as task; from ada_trl import AdaGRPOTrainer; "
    lines = environment.run("python", "-c", code + "print(ada_trl.__file__, task.__file__, sep='\\n')").splitlines()
    assert all(str(environment.bin.parent) in line for line in lines) and len(lines) == 2
    with zipfile.ZipFile(environment.wheel) as wheel:
        names = wheel.namelist()
    assert "ada_trl/py.typed" in names
    assert not [name for name in names if "test_" in name or "/tests/" in name]


def test_recipes_train_and_evaluate(environment):
    """From the name of a recipe to tables, in an empty folder."""
    task = "from ada_trl.recipes.arithmetic.task import prepare; "
    environment.run("python", "-c", task + "prepare('outputs/arithmetic', steps=3, num_train=64, num_test=8)")
    quick = ["--max_steps=2", "--eval_steps=2", "--logging_steps=1", "--use_cpu", "--pass_rate_estimator=ema"]
    quick += ["--per_device_train_batch_size=16", "--save_strategy=steps", "--save_steps=2"]
    environment.run("ada-trl", "train", "--config", "arithmetic/seq-balance.yaml", *quick)
    run = "outputs/arithmetic/seq-balance"
    assert (environment.folder / run / "model.safetensors").exists()
    sums = ["--backend=transformers", "--prompt_format=plain", "--num_samples=4", "--max_new_tokens=6"]
    tests = ["--dataset_name=outputs/arithmetic/data/test.jsonl", "--output_dir=outputs/easy"]
    keep = ["--min_pass_rate=0", "--max_pass_rate=1"]
    environment.run("python", "-m", "ada_trl.recipes.math.select", "--model_name_or_path", run, *tests, *sums, *keep)
    compared = ["--models", "outputs/arithmetic/base", run, "--datasets", "outputs/arithmetic/data/test.jsonl"]
    evaluate = ["python", "-m", "ada_trl.recipes.math.evaluate", "--output_dir=outputs/evaluation"]
    assert "difference from base" in environment.run(*evaluate, *compared, *sums)


def test_recipes_have_an_address(environment):
    said = environment.run("ada-trl", "train", "--config", "math/nothing.yaml", fails=True)
    folder = Path(re.search(r"nor a recipe of that name in (\S+)\.$", said.strip())[1])
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert (folder / path.relative_to(ROOT / "recipes")).read_text() == path.read_text()
    four = [f"math/{name}.yaml" for name in ("paper", "qwen2.5-math-1.5b", "seq-balance", "8-gpus")]
    parsed = "from ada_trl.commands.options import parse_args; print(parse_args()[1].adaptive_sampling)"
    assert (
        environment.run("python", "-c", parsed, "--config", *four, "--use_cpu", "--use_vllm=false") == "seq-balance\n"
    )


def test_the_long_description_has_no_dead_link(environment):
    """Relative links lead nowhere on a package index; those within the page need a heading."""
    with zipfile.ZipFile(environment.wheel) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        text = Parser().parsestr(wheel.read(name).decode()).get_payload()
    links = re.findall(r"""(?:\]\(|\b(?:src|href|srcset)=["'])([^)"'\s]+)""", text)
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in text.splitlines() if line[:1] == "#"
    }
    assert len(links) > 3
    for link in links:
        assert link.startswith("https://") or link.removeprefix("#") in headings, link
    for path in re.findall(r"https://github.com/OWNER/ada_trl/(?:blob|raw)/main/([^)#\s\"']+)", text):
        assert (ROOT / path).exists(), path
