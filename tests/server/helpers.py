"""Trainings against a server, in this process and in several, and faults of it."""

import asyncio
import json
import os
import re
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
from aiohttp import web
from peft import LoraConfig

from ada_trl.vllm.errors import VLLMServerError

from ..helpers import ON_CPU, ROOT, command, prompt_dataset, read_rank_outputs, run_module
from ..helpers import build as build_trainer
from .fake import reward


_DEFAULT_ROUNDS = {"samples_per_round": None, "max_rounds": None}  # instead of those of `build`
UNIFORM = {"adaptive_sampling": "uniform"} | _DEFAULT_ROUNDS
ONE_ROUND = _DEFAULT_ROUNDS | {"vllm_request_timeout": 30}
LORA = {"vllm_weight_sync": "lora"}
IN_TIME = 30.0  # seconds; far below what a stalled server would take, far above what a busy machine adds


def served_by(url):
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_weight_sync": "disk"}


def build(tmp_path, server, reward_funcs=reward, dataset=None, peft_config=None, **overrides):
    """As [`tests.helpers.build`], with a server; adapters are sent if `peft_config` is not `False`."""
    options = {
        "vllm_request_timeout": 3.0,
        "vllm_server_timeout": 0,
        "per_device_train_batch_size": 16,
        "max_steps": 1,
        "samples_per_round": 4,
        "max_rounds": 3,
        "log_completions": True,  # all metrics
    }
    options = served_by(server.url) | options | overrides
    if options["vllm_weight_sync"] == "lora" and peft_config is None:
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    dataset = prompt_dataset(1) if dataset is None else dataset
    return build_trainer(tmp_path, reward_funcs, dataset, peft_config=peft_config or None, **options)


def train(tmp_path, server, *args, **options):
    """A training against a server that runs as long as this; returns both."""
    with server:
        trainer = build(tmp_path, server, *args, **options)
        trainer.train()
    return trainer, server


def launch(processes, output_dir, script, module="tests.server.worker", seconds=300):
    """Run a module that follows `script` on several processes; returns the output of each rank."""
    output_dir.mkdir()
    result = run_module(module, output_dir, json.dumps(script), processes=processes, seconds=seconds)
    return read_rank_outputs(output_dir, processes, result)


@contextmanager
def started(output_dir, **run):
    """A training in a separate process, which is killed at the end of the block."""
    output_dir.mkdir()
    words = command("tests.server.worker", output_dir, json.dumps([run]))
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | ON_CPU, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition, process, seconds=200):
    """Wait for an effect of a process that is running."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "It ended before, or it takes too long."
        time.sleep(0.1)


@contextmanager
def fails(match):
    """Expect a `VLLMServerError` that matches, together with the errors that it was raised from."""
    with pytest.raises(VLLMServerError) as caught:
        yield caught
    error, texts = caught.value, []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    assert re.search(match, " | ".join(texts), re.DOTALL), texts


def our_threads():
    return [t.name for t in threading.enumerate() if "vLLM" in t.name or "asyncio" in t.name]


def error_response(message, status=500):
    return web.json_response({"error": {"message": message}}, status=status)


async def page(*_):
    return web.Response(text="<html><body>Sign in</body></html>", content_type="text/html")


async def stall(*_):
    await asyncio.sleep(60)


async def fail(*_):
    return error_response("engine dead")


async def reject(*_):
    return error_response("too long", 400)


async def no_adapters(request, *_):
    """As without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
    return error_response("Not Found", 404) if request.path == "/v1/load_lora_adapter" else None


def becomes_idle(server, seconds=10):
    """Whether all requests end; cancelled ones do once the server notices."""
    deadline = time.monotonic() + seconds
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.in_flight == 0
