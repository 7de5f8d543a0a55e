"""Three steps with a vLLM server on the same GPU and with a colocated engine, and the benchmark of the server."""

import contextlib
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import problems
from recipes.arithmetic.vllm_server import running_server

from ..common import markdown
from ..speed.server import MAX_TOKENS, heavy_tailed_model, reward
from .units import Unit, run, succeeded


STEPS, COLOCATE = 3, "colocate"
ENGINES = {  # options, and whether an adapter is trained
    "server, disk": ({"vllm_mode": "server", "vllm_weight_sync": "disk"}, False),
    "server, lora": ({"vllm_mode": "server", "vllm_weight_sync": "lora"}, True),
    COLOCATE: ({"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}, False),
}


def train(options: dict, lora: bool, tokens: int) -> dict:
    """The trainer verifies the server's weights before the first step and after every update, and raises an error if they differ."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = Path(directory) / "model"
        heavy_tailed_model(model)
        if options["vllm_mode"] == "server":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            url = stack.enter_context(running_server(model, port, Path(directory) / "log", max_model_len=512))
            options = options | {"vllm_server_base_url": url}
        args = AdaGRPOConfig(
            directory,
            use_vllm=True,
            per_device_train_batch_size=32,
            max_completion_length=tokens,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            log_level="error",
            **options,
        )
        adapter = LoraConfig(r=8, target_modules="all-linear") if lora else None
        trainer = AdaGRPOTrainer(str(model), reward, args, problems(1024, seed=0), peft_config=adapter)
        trainer.train()
    return {"logs": [row for row in trainer.state.log_history if "loss" in row]}


def benchmark() -> dict:
    command = [sys.executable, "-m", "benchmarks.speed.server", "--steps", "3", "--repeats", "1"]
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode:
        raise RuntimeError(output.stderr[-3000:])
    return {"output": output.stdout}


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    tokens = 32 if smoke else MAX_TOKENS
    units = [
        Unit(name, train, {"options": options, "lora": lora, "tokens": tokens})
        for name, (options, lora) in ENGINES.items()
        if torch.cuda.is_available() or name != COLOCATE  # vLLM for CPUs cannot load weights a second time
    ]
    if not smoke:  # it takes minutes on a CPU
        units.append(Unit("benchmark of the server", benchmark, {}))
    results = run(units, output_dir / "vllm.json", limit)

    rows = [results[unit.name] | {"engine": unit.name} for unit in units if "logs" in results.get(unit.name, {})]
    columns = {
        "Engine": lambda row: row["engine"],
        "Step, s": lambda row: ", ".join(f"{step['step_time']:.2f}" for step in row["logs"]),
        "Difference of log-probabilities": lambda row: ", ".join(
            f"{step['sampling/sampling_logp_difference/mean']:.1e}" for step in row["logs"]
        ),
    }
    print(markdown(rows, columns))
    print(results.get("benchmark of the server", {}).get("output", ""))
    return succeeded(units, results)
