"""
A vLLM server for the arithmetic task, on any Linux machine, with or without a GPU.

`python -m ada_trl.recipes.arithmetic.vllm_server` serves `outputs/arithmetic/base` on port 8000 until Ctrl-C, with the
flags that every weight sync without NCCL needs. For another model, copy the command that it prints.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


EAGER = {"--enforce-eager": None}  # starts without compilation
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for weight synchronization
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # for vllm_weight_sync="lora"
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def command(
    model: Path, port: int, max_model_len: int = 64, max_lora_rank: int | None = 8, flags: Mapping[str, Any] = EAGER
) -> list[str]:
    """
    Build the server's command line.

    Args:
        max_lora_rank (`int`, *optional*, defaults to `8`):
            Rank of the adapters, if there are any.
        flags (`Mapping[str, Any]`, *optional*):
            Further options; `None` is the value of a switch.
    """
    on_gpu = torch.cuda.is_available()
    options = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": port,
        # In float32 its log-probabilities agree with the trainer's, to 1e-6 on a CPU.
        # vLLM's kernels for adapters on a GPU do not support it.
        "--dtype": "bfloat16" if on_gpu and max_lora_rank else "float32",
        "--max-model-len": max_model_len,
        "--kv-cache-memory-bytes": 64 * 2**20,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
    }
    if max_lora_rank:
        options |= {"--enable-lora": None, "--max-lora-rank": max_lora_rank}
    if on_gpu:  # vLLM reserves this share, although the memory of its cache is given
        options["--gpu-memory-utilization"] = 0.1
    words = [str(word) for option in (options | flags).items() for word in option if word is not None]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


@contextmanager
def running_server(model: Path, port: int, log: Path | None = None, seconds: float = 300, **options) -> Iterator[str]:
    """
    Run a server while the block runs.

    Args:
        log (`Path`, *optional*):
            File for its output; by default it goes to the terminal.
        seconds (`float`, *optional*, defaults to `300`):
            Maximum time until it responds.

    Yields:
        `str`: URL of the server.

    Raises:
        `RuntimeError`: if it does not respond in time.
    """
    output = open(log, "w", encoding="utf-8") if log else None
    # A separate process group, because ending only the API server would leave the engine process running.
    process = subprocess.Popen(
        command(model, port, **options),
        env=os.environ | ENVIRONMENT,
        stdout=output,
        stderr=subprocess.STDOUT if log else None,
        start_new_session=True,
    )
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}", seconds, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)
        if output:
            output.close()


def _wait_until_up(process: subprocess.Popen, url: str, seconds: float, log: Path | None) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    tail = "; see its output above"
    if log:
        tail = f": …{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
    if process.poll() is not None:
        raise RuntimeError(f"The vLLM server has ended with exit code {process.returncode}{tail}")
    raise RuntimeError(f"The vLLM server did not respond at {url} within {seconds:g} seconds{tail}")


def _end(process: subprocess.Popen) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(timeout=30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("outputs/arithmetic/base"))
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    words = [f"{name}={value}" for name, value in ENVIRONMENT.items()] + command(args.model, args.port)
    print(shlex.join(words), flush=True)
    with running_server(args.model, args.port) as url:
        print(f"Serving {args.model} at {url}. Ctrl-C ends it.", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
