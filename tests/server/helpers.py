"""Trainings against a server, in this process and in several, and what may go wrong with it."""

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

from ada_trl import AdaGRPOTrainer
from ada_trl.vllm.client import VLLMServerError
from ada_trl.vllm.generation import LONGEST_ERROR

from ..helpers import (
    ON_CPU,
    QUICK,
    ROOT,
    command,
    config,
    prompt_dataset,
    read_rank_outputs,
    run_module,
    tiny_model,
    tiny_tokenizer,
)
from .fake import reward


_NOT_THOSE_OF_BUILD = {"samples_per_round": None, "max_rounds": 4}
UNIFORM = {"adaptive_sampling": "uniform"} | _NOT_THOSE_OF_BUILD
ONE_ROUND = _NOT_THOSE_OF_BUILD | {"vllm_request_timeout": 30}
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
        config(tmp_path, **QUICK | options | overrides),
        prompt_dataset(1) if dataset is None else dataset,
        eval_dataset,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
        rollout_func=rollout_func,
    )


def launch(processes, output_dir, script, module="tests.server.worker", seconds=300):
    """What each of several processes has to say of what `script` tells them to do."""
    output_dir.mkdir()
    result = run_module(module, output_dir, json.dumps(script), processes=processes, seconds=seconds)
    return read_rank_outputs(output_dir, processes, result)


@contextmanager
def started(output_dir, **run):
    """A training in a process of its own, which is ended at the latest when the block ends."""
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
