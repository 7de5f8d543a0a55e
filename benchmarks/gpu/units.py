"""
Units of work in processes with a common time limit.
Their results are in one file, so that a repeated command continues.
"""

import contextlib
import functools
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ada_trl.utils.files import atomic_write


PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm")


class Unit(NamedTuple):
    """
    One measurement.

    Args:
        name (`str`):
            Key of its result.
        work (`Callable[..., dict[str, Any]]`):
            Function of a module, called in another process. Its result can be written as JSON.
        options (`dict[str, Any]`):
            Arguments of `work`.
        seconds (`float`, *optional*):
            Time limit of this unit, which has failed when it is reached.
    """

    name: str
    work: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    seconds: float = math.inf


def load(path: Path) -> dict[str, dict]:
    """Results of the units, by name."""
    return json.loads(path.read_text(encoding="utf-8"))["units"] if path.exists() else {}


def run(
    units: Sequence[Unit],
    path: Path,
    seconds: float,
    workers: int = 1,
    equally_long: bool = False,
    reuse_processes: bool = True,
) -> dict[str, dict]:
    """
    Run the units that have no result in the file `path`, or an error. At the limit, the running processes are ended,
    with all that they have started.

    Args:
        units (`Sequence[Unit]`):
            In the order in which they are started.
        path (`Path`):
            File of the results; it is written after every unit.
        seconds (`float`):
            Time limit of all units together.
        workers (`int`, *optional*, defaults to `1`):
            Number of processes. Each runs one unit after another. It is replaced after an error, because errors of
            CUDA make the later calls of a process fail, too.
        equally_long (`bool`, *optional*, defaults to `False`):
            Whether no unit is started when less time is left than the fastest one has taken.
        reuse_processes (`bool`, *optional*, defaults to `True`):
            Whether a process runs several units, which saves the imports.

    Returns:
        `dict[str, dict]`: results of all units in the file, with `seconds`, or with `error` if the unit has failed.
    """
    started = time.monotonic()
    results = load(path)
    waiting = deque(unit for unit in units if "seconds" not in results.get(unit.name, {}))
    busy: dict[Connection, tuple[BaseProcess, Unit, float]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    fastest = 0.0
    default = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes are ended then, too
    try:
        while (left := started + seconds - time.monotonic()) > 0:
            if equally_long and left < fastest:
                waiting.clear()
            while waiting and len(busy) < workers:
                connection, process = idle.pop() if idle else _start_process()
                unit = waiting.popleft()
                connection.send(unit)
                busy[connection] = process, unit, time.monotonic()
            if not busy:
                break
            own = min(unit.seconds - (time.monotonic() - begun) for _, unit, begun in busy.values())
            for connection in wait(list(busy), max(0.0, min(left, own))) or _overdue(busy):
                process, unit, begun = busy.pop(connection)
                duration = time.monotonic() - begun
                try:
                    result = (
                        connection.recv() if connection.poll() else {"error": f"No result after {duration:.0f} s."}
                    )
                except EOFError:
                    process.join()
                    result = {"error": f"The process ended with exit code {process.exitcode}."}
                if "error" not in result:
                    result["seconds"] = duration
                    fastest = min(fastest or duration, duration)
                if "error" in result or not reuse_processes:
                    _end([process])
                else:
                    idle.append((connection, process))
                results[unit.name] = result
                with atomic_write(path) as temporary:
                    temporary.write_text(json.dumps({"environment": environment(), "units": results}))
                summary = result.get("error", f"{duration:.1f} s").strip().splitlines()[-1]
                print(f"[{time.monotonic() - started:4.0f} s] {unit.name}: {summary}", flush=True)
    finally:
        _end([process for process, *_ in busy.values()] + [process for _, process in idle])
        signal.signal(signal.SIGTERM, default)
    if unfinished := [unit.name for unit in units if unit.name not in results]:
        print(f"Not finished within {seconds:.0f} s: {'; '.join(unfinished)}", flush=True)
    return results


def succeeded(units: Sequence[Unit], results: dict[str, dict]) -> bool:
    return all("seconds" in results.get(unit.name, {}) for unit in units)


def _overdue(busy: dict[Connection, tuple[BaseProcess, Unit, float]]) -> list[Connection]:
    """Connections of the units that have reached their own limit."""
    now = time.monotonic()
    return [connection for connection, (_, unit, begun) in busy.items() if now - begun >= unit.seconds]


def _start_process() -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # CUDA does not work in forked processes
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,))
    process.start()
    theirs.close()  # so that reading from a process that has ended raises EOFError
    return ours, process


def _work(connection: Connection) -> None:
    """Run the units that the parent sends, until it closes the connection."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is not deterministic
    while True:
        try:
            unit = connection.recv()
        except EOFError:
            return
        try:
            result = unit.work(**unit.options)
        except Exception:
            result = {"error": traceback.format_exc()}
        connection.send(result)


def _end(processes: list[BaseProcess]) -> None:
    """End the processes and their descendants, such as servers in sessions of their own."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            family += [parent, *parent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    for member in psutil.wait_procs(family, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


@functools.cache
def environment() -> dict[str, Any]:
    """Device, versions and commit."""
    import torch  # only here, because the processes load faster without it

    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    commit = os.environ.get("COMMIT")  # of the packed tree: the history beside a copied tree may be older
    if commit is None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "rev-parse", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
    }
