"""Command line of the benchmarks on a GPU, see README.md."""

import argparse
import importlib
import os
import sys
from pathlib import Path


LIMITS = {"modes": 120, "learn": 540, "right": 240, "fast": 360, "rounds": 180}  # seconds


def main() -> bool:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Benchmarks on a GPU: see README.md."
    )
    parser.add_argument("--stage", choices=LIMITS, required=True)
    parser.add_argument("--output_dir", type=Path, required=True, help="Results, which a repeated command completes.")
    parser.add_argument("--limit", type=float, help="Seconds; the default depends on the stage.")
    parser.add_argument("--smoke", action="store_true", help="Tiny settings, on the CPU too.")
    learn = parser.add_argument_group("only for learn")
    learn.add_argument("--workers", type=int, default=16, help="Runs at a time.")
    learn.add_argument("--carried", type=Path, default=Path("/tmp/gpu/model"), help="Folder of the model's package.")
    args = parser.parse_args()
    settings = {"output_dir": args.output_dir, "limit": args.limit or LIMITS[args.stage], "smoke": args.smoke}

    needed = {"learn": "reasoning_gym", "right": "vllm", "fast": "vllm", "rounds": "vllm"}.get(args.stage)
    if needed and not importlib.util.find_spec(needed):
        print(f"{args.stage} skipped: {needed} is not installed.")
        return True
    # Before importing torch, for this process and those of the units, of which several share the machine.
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    stage = importlib.import_module(f".{args.stage}", __package__)
    more = {"workers": args.workers, "carried": args.carried} if args.stage == "learn" else {}
    return stage.main(**settings, **more)


if __name__ == "__main__":
    sys.exit(not main())
