"""
One call on the GPU machine: unpack the part that it has brought, run its stages, and print the next call.

`python3 -m benchmarks.gpu.target --results DIR` runs the call that is due.
Standard library only, because the first part brings the packages.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from .unpack import Manifest, unpack


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the new runner is the default for some models only
}
# The processes of `learn` share the GPU through NVIDIA's Multi-Process Service; without it, they take turns.
MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps_log"}


def next_call(manifest: Manifest, number: int, parts: Path) -> str:
    """Describe call `number`, counted from 1; parts are in the folder `parts`."""
    if number > len(manifest.calls):
        return "This was the last call."
    carry = f"carry {parts}/{number}, " if number <= len(manifest.parts) else ""
    stages = f" ({', '.join(manifest.calls[number - 1])})" if manifest.calls[number - 1] else ""
    return f"Call {number} of {len(manifest.calls)}{stages}: {carry}python3 -m benchmarks.gpu.target --results $OUT"


def run_stage(stage: str, work: Path, environment: dict[str, str]) -> None:
    """Run a stage, `NAME` or `NAME:SECONDS` for another limit."""
    name, _, seconds = stage.partition(":")
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--output_dir", str(work / "results")]
    command += ["--limit", seconds] if seconds else []
    if name != "learn":
        subprocess.run(command, env=environment)
        return
    environment = environment | MPS
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment)
    subprocess.run([*command, "--carried", str(work / "model")], env=environment)
    subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, env=environment)


def return_results(work: Path, results: Path) -> None:
    for file in [*(work / "results").glob("*.json"), *(work / "results").glob("*.log")]:
        shutil.copy(file, results)
    if (work / "results" / "runs").exists():
        with tarfile.open(results / "learn.tgz", "w:gz") as archive:
            archive.add(work / "results" / "runs", "runs")
            for bases in (work / "results" / "tasks").glob("*.json"):
                archive.add(bases, f"tasks/{bases.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="Folder whose files are sent back.")
    parser.add_argument("--parts", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu"))
    parser.add_argument("--stages", nargs="*", help="Run these instead: NAME or NAME:SECONDS.")
    args = parser.parse_args()
    started = time.monotonic()
    (args.work / "results").mkdir(parents=True, exist_ok=True)
    calls = args.work / "calls"
    number = int(calls.read_text(encoding="utf-8")) if calls.exists() else 0
    number += args.stages is None  # other stages are no call of the plan
    if (part := args.parts / str(number)).exists() and args.stages is None:
        extracted = unpack(part, args.work)
        print(f"[{time.monotonic() - started:.0f} s] part {number}, complete: {', '.join(extracted) or 'nothing'}")
    manifest = Manifest.load(args.work / "manifest.json")
    calls.write_text(str(number))
    environment = (
        os.environ
        | ENVIRONMENT
        | {"PYTHONPATH": str(args.work / "site"), "COMMIT": os.environ.get("COMMIT", manifest.commit)}
    )
    for stage in manifest.calls[number - 1] if args.stages is None else args.stages:
        run_stage(stage, args.work, environment)
        return_results(args.work, args.results)
    return_results(args.work, args.results)
    print(f"[{time.monotonic() - started:.0f} s] {next_call(manifest, number + 1, args.parts)}")


if __name__ == "__main__":
    main()
