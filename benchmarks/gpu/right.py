"""Whether every mode trains with a vLLM server and with a colocated engine, from the weights of the trainer."""

import contextlib
import functools
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.trainer.trl_private import override_attributes
from ada_trl.vllm.errors import VLLMServerError
from ada_trl.vllm.weight_sync import WeightSync
from recipes.arithmetic.task import build_tokenizer, problems
from recipes.arithmetic.vllm_server import running_server

from .. import names
from ..common import QUIET, markdown
from .fast import free_port
from .training import random_model, run_trainer
from .units import Unit, run, succeeded


STEPS = 3
UNIT_SECONDS = 150
WORKERS = 6  # units at a time, each with its own server
AHEAD = "one step ahead"
MODES = {
    names.BATCH: {"baseline": "batch"},
    f"{names.BATCH}, retries": {"baseline": "batch", "retries": 3},
    names.SEQ_BALANCE: {},
    "dynamic sampling": {"adaptive_sampling": "uniform", "zero_variance_groups": "resample"},
    names.EST: {"adaptive_sampling": "est"},
    AHEAD: {"baseline": "batch", "max_staleness": 1},
}
DISK, LORA, COLOCATE = "disk", "lora", "colocate"
CONTROL = f"{DISK}, weights are not sent"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # vLLM's CPU attention needs heads of 32
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that completions have very different lengths
}


def reward(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """1 if the first character is in a set that depends on the prompt, so that prompts have different pass rates."""
    numbers = [zlib.crc32(prompt.encode()) for prompt in prompts]
    first = [ord(completion[0]) if completion else 0 for completion in completions]
    return [float((character * 7 + n) % 12 < n // 12 % 12) for n, character in zip(numbers, first, strict=True)]


def train(engine: str, options: dict, tokens: int, sends_weights: bool = True) -> dict:
    """
    Train with a server of this unit, or with an engine in this process. The trainer verifies the weights of a server
    before and after each generation, and those of an engine by its rollouts, and raises an error if they differ.

    Raises:
        `ValueError`: if a loss or a weight is not finite, or a process or directory is left at the end.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = Path(directory) / "model"
        tokenizer = build_tokenizer()
        for written in (random_model(tokenizer, **SIZES), tokenizer):
            written.save_pretrained(model)
        if engine == COLOCATE:
            stack.enter_context(_small_engine())
            options = options | {"vllm_mode": COLOCATE, "vllm_gpu_memory_utilization": 0.1}
        else:
            rank = {"max_lora_rank": 8 if engine == LORA else None}
            log = Path(directory) / "log"
            stack.enter_context(_log_on_failure(log))
            url = stack.enter_context(running_server(model, free_port(), log, max_model_len=512, **rank))
            options = options | {
                "vllm_mode": "server",
                "vllm_server_base_url": url,
                "vllm_weight_sync": engine,
            }
        if not sends_weights:
            stack.enter_context(patch.object(WeightSync, "sync_disk", lambda self: None))
        args = AdaGRPOConfig(
            directory,
            use_vllm=True,
            per_device_train_batch_size=32,
            max_completion_length=tokens,
            max_steps=STEPS,
            learning_rate=1e-2,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            **QUIET,
            **options,
        )
        adapter = LoraConfig(r=8, target_modules="all-linear") if engine == LORA else None
        trainer = AdaGRPOTrainer(str(model), reward, args, problems(1024, seed=0), peft_config=adapter)
        logs, _ = run_trainer(trainer)
        if left := [str(path) for path in Path(directory).rglob("vllm_weight_sync")]:
            raise ValueError(f"Weights that were written for the server are left: {left}.")
        servers = psutil.Process().children(recursive=True) if engine != COLOCATE else []
        stack.close()
        if left := [process.cmdline() for process in psutil.wait_procs(servers, timeout=5)[1]]:
            raise ValueError(f"{len(left)} processes of the server are left, the first one is {left[0]}.")
    return {"logs": logs}


@contextlib.contextmanager
def _log_on_failure(log: Path) -> Iterator[None]:
    """Add the end of the server's log to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The server's log ends with: {log.read_text(encoding='utf-8')[-3000:]}")
        raise


def _small_engine() -> contextlib.AbstractContextManager:
    """A colocated engine that starts quickly, beside other processes on the GPU."""
    from trl.generation import vllm_generation

    small = functools.partial(vllm_generation.LLM, enforce_eager=True, kv_cache_memory_bytes=64 * 2**20)
    return override_attributes(vllm_generation, LLM=small)


def control(tokens: int) -> dict:
    """The check detects weights that were not sent: otherwise its success would mean nothing."""
    try:
        train(DISK, MODES[names.BATCH], tokens, sends_weights=False)
    except VLLMServerError as error:
        return {"error_of_trainer": str(error)}
    raise ValueError("The trainer has not noticed that the server has other weights.")


def report(results: dict[str, dict]) -> str:
    """Table of the units that have a result."""
    rows = [row | {"name": name} for name, row in results.items() if "logs" in row]

    def largest(row: dict, key: str) -> str:
        return f"{max(step[key] for step in row['logs']):.4f}" if key in row["logs"][0] else ""

    columns = {
        "Engine, mode": lambda row: row["name"],
        "Losses": lambda row: ", ".join(f"{step['loss']:.3f}" for step in row["logs"]),
        "Largest difference of log-probabilities: fixed prompt": lambda row: largest(
            row, "ada/vllm/weight_check_logprob_diff"
        ),
        "rollouts": lambda row: largest(row, "sampling/sampling_logp_difference/mean"),
    }
    return markdown(rows, columns)


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    tokens = 16 if smoke else 64
    units = [
        Unit(f"{engine}, {mode}", train, {"engine": engine, "options": options, "tokens": tokens}, UNIT_SECONDS)
        for mode, options in MODES.items()
        for engine in (DISK, LORA, COLOCATE)
        # vLLM for CPUs cannot load weights into a colocated engine; rollouts are requested ahead from a server only.
        if engine != COLOCATE or (torch.cuda.is_available() and mode != AHEAD)
    ]
    units.insert(2, Unit(CONTROL, control, {"tokens": tokens}, UNIT_SECONDS))
    if smoke:
        units = [unit for unit in units if unit.name in (f"{DISK}, {AHEAD}", f"{LORA}, {names.SEQ_BALANCE}", CONTROL)]
    workers = 1 if smoke else WORKERS
    results = run(units, output_dir / "right.json", limit, workers, reuse_processes=False)

    print(report(results))
    if message := results.get(CONTROL, {}).get("error_of_trainer"):
        print(f"{CONTROL}: {message}")
    return succeeded(units, results)
