"""
One call on the GPU machine: unpack the part that it has brought, run its stages, and print the next call.

`python3 -m benchmarks.gpu.target --results DIR` runs the call that is due. Standard library only, because the first part brings
the packages.
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
    """Run a stage, `NAME` or `NAME:SECONDS` for another limit; in the background if it ends with `&`."""
    name, _, seconds = stage.removesuffix("&").partition(":")
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--output_dir", str(work / "results")]
    command += ["--limit", seconds] if seconds else []
    if name == "learn":
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment | MPS)
        environment = environment | MPS
        command += ["--carried", str(work / "model")]
    if not stage.endswith("&"):
        subprocess.run(command, env=environment)
        return
    with open(work / "results" / f"{name}.log", "w") as log:
        # In a session of its own, so that it outlives this call.
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    (work / f"{name}.pid").write_text(str(process.pid))


def is_running(pid: str) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        )  # ended, if nobody collects it
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_background(work: Path) -> None:
    """Stages that measure times have the GPU for themselves."""
    for file in work.glob("*.pid"):
        while is_running(file.read_text()):
            time.sleep(1)
        file.unlink()
        subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, env=os.environ | MPS)


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
    parser.add_argument(
        "--stages", nargs="*", help="Run these instead: NAME, NAME:SECONDS, or either with & behind it."
    )
    args = parser.parse_args()
    started = time.monotonic()
    (args.work / "results").mkdir(parents=True, exist_ok=True)
    calls = args.work / "calls"
    number = int(calls.read_text()) if calls.exists() else 0
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
        if not stage.endswith("&") and not stage.startswith("right"):
            wait_for_background(args.work)
        run_stage(stage, args.work, environment)
        return_results(args.work, args.results)
    return_results(args.work, args.results)
    print(f"[{time.monotonic() - started:.0f} s] {next_call(manifest, number + 1, args.parts)}")


if __name__ == "__main__":
    main()
