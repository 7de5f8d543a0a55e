"""These tests need vLLM in the environment (`make test-vllm`): TRL's client does not work without it."""

import asyncio
import importlib.util
import os
import threading

import pytest
from filelock import FileLock

from ada_trl.sampling.asynchronous import AsyncVLLMSampler
from recipes.arithmetic.task import prepare
from recipes.arithmetic.vllm_server import running_server

from ..helpers import free_port


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr("ada_trl.vllm.transport.BACKOFF_SECONDS", 0.02)


@pytest.fixture
def no_speculation(monkeypatch):
    """Only rounds that are needed are requested, so that the requests do not depend on the order of the responses."""
    monkeypatch.setattr(AsyncVLLMSampler, "rollouts_in_flight", 0)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No test leaves a thread of the client, an open event loop, or weights that were written for a server."""
    loops, new_event_loop = [], asyncio.events.new_event_loop

    def record():
        loops.append(new_event_loop())
        return loops[-1]

    monkeypatch.setattr(asyncio.events, "new_event_loop", record)  # as `asyncio.run` finds it
    yield
    assert "vLLM requests" not in [thread.name for thread in threading.enumerate()]
    assert all(loop.is_closed() for loop in loops)
    assert not list(tmp_path.rglob("vllm_weight_sync"))


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory):
    """The base model and its data, one for the processes of xdist, because its training takes a minute."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "arithmetic"
    with FileLock(f"{directory}.lock"):
        prepare(directory, num_train=32, num_test=8)  # the second process finds the model
    return directory


@pytest.fixture(scope="session")
def real_server(task_dir, tmp_path_factory):
    """URL of a vLLM server on the CPU, one for all tests of a process."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with running_server(task_dir / "base", free_port(), log, max_lora_rank=8) as url:
        yield url


@pytest.fixture
def server(real_server, task_dir):
    """The server with the base model, whatever the test before has left."""
    import requests  # comes with vLLM

    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(task_dir / "base")}}
    requests.post(f"{real_server}/collective_rpc", json=reload, timeout=60).raise_for_status()
    requests.post(f"{real_server}/reset_prefix_cache", timeout=60).raise_for_status()
    return real_server
