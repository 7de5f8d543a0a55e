"""Worker processes that check answers, and are killed and replaced when one takes too long."""

import atexit
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, NamedTuple


Task = tuple[str, Sequence[str]]  # a reference and the answers to compare with it

START_TIMEOUT = 120.0  # seconds for an interpreter to start and import math-verify, on a busy machine
POLL = 0.02  # seconds between two looks at the deadlines


class Verdict(NamedTuple):
    """Of a task: whether its reference can be parsed, and if so whether each answer is equal to it."""

    parsable: bool
    equal: list[bool]


class VerifierPool:
    """
    Processes that run [math-verify](https://github.com/huggingface/Math-Verify), started when first needed.

    A symbolic parser can loop in C code, where no signal handler or thread of the same process can stop it, use up the
    memory or overflow the stack. So it runs in other processes, with a deadline for each comparison; a process that is
    late or dies takes only that comparison with it. The processes are started from a fresh interpreter (no fork: CUDA contexts and
    locks are not inherited; no import of the main module: notebooks and unguarded scripts work) and end when this
    process does, however it ends, because their input ends.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, tasks: Sequence[Task], *, timeout: float, num_workers: int) -> list[Verdict]:
        """
        Compare answers with references. What takes too long, or kills its process, is `False`.

        Args:
            tasks (`Sequence[tuple[str, Sequence[str]]]`):
                References and answers. The answers of one task are compared one after the other, by one process.
            timeout (`float`):
                Seconds for one comparison, and for reading a reference.
            num_workers (`int`):
                Most processes to use.

        Returns:
            `list[Verdict]`: one per task.

        Raises:
            `RuntimeError`: if a process cannot be started.
        """
        verdicts: dict[int, Verdict] = {}
        waiting = deque(range(len(tasks)))
        with self._lock:
            number = min(num_workers, len(tasks))
            self._workers += [_Worker() for _ in range(number - len(self._workers))]
            workers = self._workers[:number]
            with ThreadPoolExecutor(max(number, 1), thread_name_prefix="verifier") as threads:
                futures = [threads.submit(w.work, tasks, waiting, verdicts, timeout) for w in workers]
                try:
                    while wait(futures, timeout=POLL).not_done:
                        for worker in workers:
                            worker.kill_if_late()
                finally:  # after an interrupt, there are threads left, which end when their processes do
                    waiting.clear()
                    while wait(futures, timeout=POLL).not_done:
                        self.close()
            for future in futures:
                future.result()
        return [verdicts[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        for worker in self._workers:
            worker.kill()


class _Process(subprocess.Popen[str]):
    """With pipes for lines of text."""

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, command: list[str]) -> None:
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")


class _Worker:
    """One process, driven by one thread at a time."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._deadline = math.inf
        self._lock = threading.Lock()  # so that a process is not killed for a task that it has just finished

    def work(self, tasks: Sequence[Task], waiting: deque[int], verdicts: dict[int, Verdict], timeout: float) -> None:
        """Take tasks from `waiting` until there are none."""
        while waiting:
            try:
                index = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            reference, answers = tasks[index]
            parsable = self._ask(timeout, "parse", reference)
            equal = [self._ask(timeout, "compare", reference, answer) for answer in answers] if parsable else []
            verdicts[index] = Verdict(parsable, equal)

    def kill_if_late(self) -> None:
        with self._lock:
            if time.monotonic() > self._deadline and self._process is not None:
                self._process.kill()

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _ask(self, seconds: float, verb: str, *texts: str) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        reply = self._exchange(process, seconds, verb, *texts)
        if not reply:
            self._discard()
        return reply == "true\n"

    def _exchange(self, process: _Process, seconds: float, verb: str, *texts: str) -> str:
        """Send a task and return the reply, or the empty string if the process has ended or was late."""
        line = json.dumps([seconds, verb, *texts])  # ASCII: half a surrogate pair passes too
        with self._lock:
            self._deadline = time.monotonic() + seconds
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        with self._lock:
            late = time.monotonic() > self._deadline
            self._deadline = math.inf
        return "" if late else reply

    def _start(self) -> _Process:
        self._discard()
        command = [sys.executable, str(Path(__file__).with_name("verifier_worker.py"))]
        self._process = process = _Process(command)
        if self._exchange(process, START_TIMEOUT, "parse", "1/2") != "true\n":
            self._discard()
            raise RuntimeError(
                f"A verifier process did not start within {START_TIMEOUT:.0f} s ({' '.join(command)}). Its error is "
                "printed above; is math-verify installed (`pip install math-verify`)?"
            )
        return process

    def _discard(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:  # what was not read is lost, as it should be
            pass


def available_cores() -> int:
    """Cores for this process: those it may run on, shared with the other processes of a distributed run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


_pool = VerifierPool()
atexit.register(lambda: _pool.close())


def shared_pool() -> VerifierPool:
    """The pool of this process; a forked child gets one of its own, since two cannot share a pipe."""
    return _pool


def _forget() -> None:
    global _pool
    _pool = VerifierPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
