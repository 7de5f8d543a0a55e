"""Trainings against a server, in this process and in several, and what may go wrong with it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.engine.client import VLLMServerError
from ada_trl.engine.vllm import LONGEST_ERROR

from ..helpers import QUICK, free_port, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import reward


UNIFORM = {
    "adaptive_sampling": "uniform",
    "samples_per_round": None,
    "max_rounds": 4,
}  # rounds: those of `build` undone
ROOT = Path(__file__).parent.parent.parent


IN_TIME = 30.0  # seconds; far below what a stalled server would take, far above what a busy machine adds


def build(
    tmp_path,
    server,
    reward_funcs=reward,
    dataset=None,
    peft_config=None,
    trainer_class=AdaGRPOTrainer,
    eval_dataset=None,
    rollout_func=None,
    **overrides,
):
    options = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_weight_sync": "disk",
        "vllm_request_timeout": 3.0,
        "vllm_server_timeout": 0,
        "per_device_train_batch_size": 16,
        "max_steps": 1,
        "samples_per_round": 4,
        "max_rounds": 3,
    }
    return trainer_class(
        tiny_model(),
        reward_funcs,
        AdaGRPOConfig(str(tmp_path), **QUICK | options | overrides),
        prompt_dataset(1) if dataset is None else dataset,
        eval_dataset,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
        rollout_func=rollout_func,
    )


def launch(processes, url, output_dir, module="tests.server.worker", seconds=300, **options):
    output_dir.mkdir()
    command = [sys.executable, "-W", "ignore", "-m"]
    if processes > 1:
        command += ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        command += ["--main_process_port", str(free_port()), "--module"]
    command += [module, url, str(output_dir)]
    options = {"vllm_request_timeout": 5.0, "max_steps": 1, "samples_per_round": 4, "max_rounds": 3} | options
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command += [json.dumps(options)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    ranks = [output_dir / f"rank{i}.json" for i in range(processes)]
    assert all(rank.exists() for rank in ranks), result.stderr[-3000:]
    return [json.loads(rank.read_text()) for rank in ranks]


@contextmanager
def started(url, output_dir, **options):
    """A training in a process of its own, which is ended at the latest when the block ends."""
    output_dir.mkdir()
    options = {"vllm_request_timeout": 30.0, "max_steps": 1, "samples_per_round": 4, "max_rounds": 3} | options
    command = [sys.executable, "-W", "ignore", "-m", "tests.server.worker", url, str(output_dir), json.dumps(options)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition, process, seconds=200):
    """For something that a process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "It ended before, or it takes too long."
        time.sleep(0.1)


@contextmanager
def fails(match):
    """An error of the server, told in a sentence; what does not fit into it is in those that it was raised from."""
    with pytest.raises(VLLMServerError) as caught:
        yield caught
    error, texts = caught.value, []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    assert len(texts[0]) <= LONGEST_ERROR, texts[0]
    assert re.search(match, " | ".join(texts), re.DOTALL), texts


def our_threads():
    return [t.name for t in threading.enumerate() if "vLLM" in t.name or "asyncio" in t.name]


async def page(*_):
    return web.Response(text="<html><body>Sign in</body></html>", content_type="text/html")


async def stall(call):
    await asyncio.sleep(60)


async def fail(call):
    return web.json_response({"error": {"message": "engine dead"}}, status=500)


def becomes_idle(server, seconds=10):
    """Whether all requests end; those that are cancelled end once the server notices."""
    deadline = time.monotonic() + seconds
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.in_flight == 0


async def refuse(call):
    return web.json_response({"error": {"message": "too long"}}, status=400)
