"""Processes that compare answers. A process whose comparison takes too long exits and is replaced."""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path


Task = tuple[str, Sequence[str]]  # a reference and the answers to compare with it
Verdict = list[bool] | None  # whether each answer is equal to the reference; `None` if that cannot be parsed

START_TIMEOUT = 120.0  # seconds for an interpreter to start and import math-verify, on a busy machine
POLL = 0.02  # seconds between two attempts to end the processes after an interrupt


class VerifierPool:
    """
    Processes that run [math-verify](https://github.com/huggingface/Math-Verify), started when first needed.

    A symbolic parser can loop in C code, where no signal handler or thread of the same interpreter can stop it, use up
    the memory or overflow the stack. Therefore it runs in other processes, with a deadline for each comparison; if a
    process ends, only that comparison is lost. The processes are started from a fresh interpreter (no fork, so CUDA
    contexts and locks are not inherited; no import of the main module, so notebooks and unguarded scripts work). They
    end when their input ends, so they never outlive this process.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, tasks: Sequence[Task], *, timeout: float, num_workers: int) -> list[Verdict]:
        """
        Compare answers with references in at most `num_workers` processes; each task is handled by one process.

        A comparison that takes longer than `timeout` seconds or ends its process counts as unequal. A `RuntimeError`
        is raised if a process cannot be started.
        """
        verdicts: dict[int, Verdict] = {}
        waiting = deque(range(len(tasks)))
        with self._lock:
            number = min(num_workers, len(tasks))
            self._workers += [_Worker() for _ in range(number - len(self._workers))]
            with ThreadPoolExecutor(max(number, 1), thread_name_prefix="verifier") as threads:
                futures = [threads.submit(w.work, tasks, waiting, verdicts, timeout) for w in self._workers[:number]]
                try:
                    wait(futures)
                finally:  # after an interrupt, the threads must end, which they do when their processes have ended
                    waiting.clear()
                    while wait(futures, timeout=POLL).not_done:
                        self.close()
            for future in futures:
                future.result()
        return [verdicts[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        for worker in self._workers:
            process = worker.process  # once: the worker's thread may discard it meanwhile
            if process is not None:
                process.kill()


class _Worker:
    """One process, driven by one thread at a time."""

    process: subprocess.Popen | None = None

    def work(self, tasks: Sequence[Task], waiting: deque[int], verdicts: dict[int, Verdict], timeout: float) -> None:
        """Take tasks from `waiting` until there are none."""
        while waiting:
            try:
                index = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            reference, answers = tasks[index]
            parsable = self._ask(timeout, "parse", reference)
            verdicts[index] = [self._ask(timeout, "compare", reference, a) for a in answers] if parsable else None

    def _ask(self, seconds: float, verb: str, *texts: str) -> bool:
        if self.process is None or self.process.poll() is not None:
            self._start()
        return self._exchange(seconds, verb, *texts) == "true\n"

    def _exchange(self, seconds: float, verb: str, *texts: str) -> str:
        """Send a task and return the reply, which is empty if the process has ended."""
        try:
            self.process.stdin.write(
                json.dumps([seconds, verb, *texts]) + "\n"
            )  # ASCII: half a surrogate pair passes too
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except OSError:  # a broken pipe, which is no BrokenPipeError on Windows
            reply = ""
        if not reply:
            self._discard()
        return reply

    def _start(self) -> None:
        self._discard()
        command = [sys.executable, str(Path(__file__).with_name("verifier_worker.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, encoding="utf-8", **pipes)
        # A process that hangs before it reads its first task is ended from here.
        timer = threading.Timer(START_TIMEOUT, self.process.kill)
        timer.start()
        ready = self._exchange(START_TIMEOUT, "parse", "1/2") == "true\n"
        timer.cancel()
        if not ready:
            raise RuntimeError(
                f"A verifier process did not start within {START_TIMEOUT:.0f} s ({' '.join(command)}). Its error is "
                "printed above; is math-verify installed (`pip install math-verify`)?"
            )

    def _discard(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        process.stdout.close()
        try:
            process.stdin.close()
        except OSError:  # unread input is lost
            pass


def available_cores() -> int:
    """Return the number of cores for this process; the processes of a distributed run share the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


_pool = VerifierPool()
atexit.register(lambda: _pool.close())


def shared_pool() -> VerifierPool:
    """
    Return the pool of this process; a forked child has a separate one, because two processes cannot share a pipe.
    """
    return _pool


def _replace_pool() -> None:
    global _pool
    _pool = VerifierPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_pool)
