"""HTTP requests to a vLLM server on an event loop in a background thread: deadlines, retries and cancellation."""

import asyncio
import functools
import json
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple

from .errors import VLLMServerError, VLLMServerUnavailable
from .response_validation import InvalidResponseError, parse


MAX_RETRIES = 4
BACKOFF_SECONDS = 0.25  # doubles with every retry
MAX_BACKOFF_SECONDS = 4
CONNECT_SECONDS = 10
STALLED_SECONDS = 5  # longest timeout of short requests to a server that let a deadline pass
PROBES_PER_TIMEOUT = 4  # while no response arrives, requests for the token count per timeout
BUSY = (408, 429, 503)  # the request was not processed: any request may be sent again, until its deadline
INVALID = (400, 413, 422)  # of the request itself, whatever the state of the server
MIN_CONNECTIONS, MAX_CONNECTIONS = 64, 8192  # of queued requests; the limit on open files decides between them
REJECTED = "The server rejects this request, and will do so again: correct the cause, such as a prompt longer than --max-model-len."
TOO_SLOW = "Check its log; if it is only slow, raise vllm_request_timeout."


class _EventLoop:
    """A background thread with an event loop, an HTTP session of aiohttp and the connections that queued requests may open."""

    loop: asyncio.AbstractEventLoop
    session: Any
    connections: asyncio.Semaphore

    def __init__(self) -> None:
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="vLLM requests", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.connections = asyncio.Semaphore(max_connections())
        async with _open_session() as self.session:
            self._is_ready.set()
            await self._stop.wait()
            await _cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

    def close(self) -> None:
        """Cancel all requests, end the thread, and close its sockets and the event loop."""
        self.loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # in which the garbage collector may run
            self._thread.join()


class _Queued(NamedTuple):
    """Start and timeout of a request that may wait behind others on the server."""

    started: float
    timeout: float


class HTTPTransport:
    """
    Sends requests from an event loop in a background thread, which starts with the first request and ends with [`close`], or at the
    latest with this object or Python.

    Every request has one deadline for connecting, its response and its retries. There are two kinds of deadlines:

    - *fixed*, counted from the start of the request;
    - *queued*, for rollouts: any number of them may be in flight, most of them waiting in the server's queue. A request
      fails if *no* queued request was answered, and the server generated no token, for the length of the timeout. All
      requests that wait for a stalled server therefore fail together, once.

    Args:
        count_tokens (`Callable[[], Awaitable[float | None]]`):
            Returns the number of tokens that the server has processed since its start, or `None` if that is unknown. A
            server that processes requests of other clients is not stalled.

    Attributes:
        retries (`int`), timeouts (`int`):
            Requests that were repeated, and deadlines that were missed: the requests that failed together count once.
        stalled (`bool`):
            Whether the last request missed its deadline.
    """

    def __init__(self, count_tokens: Callable[[], Awaitable[float | None]]):
        self.retries = self.timeouts = 0
        self.stalled = False
        self._count_tokens = count_tokens
        self._lock = threading.Lock()
        self._running: _EventLoop | None = None
        self._queued: dict[asyncio.Timeout, _Queued] = {}
        self._watchdog: asyncio.Task | None = None
        self._last_progress = 0.0  # time of the event loop

    # Called from other threads

    def run(self, work: Coroutine) -> Any:
        """Run a coroutine on the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._started().loop).result()

    def take_counts(self) -> tuple[int, int]:
        """Return `retries` and `timeouts` since the last call."""
        counts = self.retries, self.timeouts
        self.retries = self.timeouts = 0
        return counts

    def group(self) -> "RequestGroup":
        """Requests that are cancelled together."""
        return RequestGroup(self._started().loop)

    def close(self) -> None:
        """Cancel all requests and end the thread. A later request starts it again."""
        with self._lock:
            if self._running is not None:
                self._finalizer()
                self._running = self._watchdog = None

    def _started(self) -> _EventLoop:
        with self._lock:
            if self._running is None:
                self._running = _EventLoop()
                self._finalizer = weakref.finalize(self, self._running.close)
            return self._running

    # Coroutines of the event loop

    async def request(
        self,
        method: str,
        url: str,
        *,
        timeout: float,
        queued: bool = False,
        retry: bool = False,
        probe: bool = False,
        limit_name: str = "",
        check: Callable[[dict], Any] | None = None,
        **kwargs: Any,
    ) -> dict:
        """
        Send a request and return the JSON object of its response.

        Args:
            timeout (`float`), queued (`bool`):
                Seconds until the deadline, and its kind.
            retry (`bool`):
                Whether it is safe to send the request again after a broken connection, a broken response or a 5xx.
                After 408, 429 or 503 every request is.
            probe (`bool`):
                Whether the request only observes the server, so that a missed deadline is not counted.
            limit_name (`str`):
                The option in which the user sets the timeout.
            check (`Callable`, *optional*):
                Raises [`~vllm.response_validation.InvalidResponseError`] for a broken response.
            kwargs:
                Of `aiohttp.ClientSession.request`.

        Raises:
            [`VLLMServerUnavailable`]: after the deadline, or after the last retry.
            [`VLLMServerError`]: if the server rejects the request, or keeps sending broken responses.
        """
        running = self._started()
        failures: list[str] = []
        deadline = asyncio.timeout(None if queued else timeout)  # the watchdog ends queued requests
        if queued:
            self._watch(deadline, _Queued(running.loop.time(), timeout))
        try:
            async with deadline, running.connections if queued else nullcontext():
                attempt = functools.partial(_attempt, running.session, method, url, check, kwargs)
                response = await self._send(attempt, f"{method} {url}", MAX_RETRIES if retry else 0, failures)
        except TimeoutError as error:
            if not probe:
                self.timeouts += not queued  # the watchdog counts those of queued requests
                self.stalled = True
            limit = f"{limit_name} ({timeout:g} s)" if limit_name else f"{timeout:g} s"
            before = f"; the last attempt {failures[-1]}" if failures else ""
            raise VLLMServerUnavailable(
                f"{method} {url} received no response within {limit}{before}", TOO_SLOW
            ) from error
        finally:
            self._queued.pop(deadline, None)
            if not self._queued and self._watchdog is not None:  # which would keep this object alive while it sleeps
                self._watchdog.cancel()
                self._watchdog = None
        if queued:
            self._last_progress = running.loop.time()
        self.stalled = False
        return response

    async def _send(self, attempt: Callable, name: str, max_retries: int, failures: list[str]) -> dict:
        """Repeat the attempt until it succeeds; `failures` receives the reasons of the others."""
        retries_left, backoff = max_retries, BACKOFF_SECONDS  # a busy server uses up no retries
        while True:
            try:
                return await attempt()
            except _AttemptFailed as failed:
                if failed.is_final:
                    fix = REJECTED if failed.status in INVALID else ""
                    raise VLLMServerError(f"{name} {failed}", fix, status=failed.status) from failed
                if failed.status not in BUSY and not retries_left:
                    kind = VLLMServerError if failed.is_broken else VLLMServerUnavailable
                    times = f" (sent {len(failures) + 1} times)" if failures else ""
                    raise kind(f"{name} {failed}{times}") from failed
                retries_left -= failed.status not in BUSY
                failures.append(str(failed))
            self.retries += 1
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    # Deadlines of queued requests: one task for all, so that a request costs no timer

    def _watch(self, deadline: asyncio.Timeout, queued: _Queued) -> None:
        self._queued[deadline] = queued
        if self._watchdog is None:
            self._watchdog = asyncio.get_running_loop().create_task(self._expire_deadlines())

    async def _expire_deadlines(self) -> None:
        now = asyncio.get_running_loop().time
        tokens: float | None = None
        while self._queued:
            interval = min(queued.timeout for queued in self._queued.values()) / PROBES_PER_TIMEOUT
            first = min(map(self._deadline, self._queued.values()))
            await asyncio.sleep(min(max(first - now(), 0.01), interval))
            if self._queued and now() - self._last_progress >= interval:
                before, tokens = tokens, await self._count_tokens()
                if before is not None and tokens is not None and tokens > before:
                    self._last_progress = now()
            overdue = [
                deadline
                for deadline, queued in self._queued.items()
                if deadline.when() is None and self._deadline(queued) <= now()
            ]
            self.timeouts += bool(overdue)
            for deadline in overdue:
                deadline.reschedule(now())

    def _deadline(self, queued: _Queued) -> float:
        return max(queued.started, self._last_progress) + queued.timeout


class RequestGroup:
    """Coroutines on the event loop. Those in flight at the end of its `with` block are cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._tasks: set[asyncio.Task] = set()

    def __enter__(self) -> "RequestGroup":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.cancel()

    def start(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    async def _run(self, work: Coroutine) -> Any:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def cancel(self) -> None:
        """Cancel what is in flight, and wait until it has ended: its connections are closed then."""
        if not self._loop.is_closed() and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()

    async def _cancel(self) -> None:
        # A task that was started just before runs first: the loop takes both in their order.
        await _cancel_all(self._tasks)


async def _cancel_all(tasks: Iterable[asyncio.Task]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _AttemptFailed(Exception):
    """One attempt of a request failed."""

    def __init__(self, text: str, status: int | None = None, is_broken: bool = False):
        super().__init__(text)
        self.status, self.is_broken = status, is_broken
        self.is_final = status is not None and status < 500 and status not in BUSY


async def _attempt(session: Any, method: str, url: str, check: Callable[[dict], Any] | None, kwargs: dict) -> dict:
    import aiohttp

    try:
        async with session.request(method, url, **kwargs) as response:
            body = await response.read()
            if response.status != 200:
                raise _AttemptFailed(f"returned status {response.status}: {_reason(body)}", response.status)
            content = parse(response.content_type, body)
            if check is not None:
                check(content)
            return content
    except InvalidResponseError as broken:
        raise _AttemptFailed(f"returned an invalid response: {broken}", is_broken=True) from broken
    except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _AttemptFailed(f"failed: {type(error).__name__}: {error}") from error


def _reason(body: bytes) -> str:
    """The message of vLLM's error response, or the beginning of any other body."""
    text = body.decode(errors="replace").strip()
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        pass
    return str(text)[:500]


def max_connections() -> int:
    """
    Half of the files that this process may open. Requests beyond it wait here instead of on the server, where this is
    hardly noticed, as a request holds several rollouts.
    """
    try:
        import resource
    except ImportError:  # Windows
        return MIN_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(max(soft // 2, MIN_CONNECTIONS), MAX_CONNECTIONS)


def _open_session() -> Any:
    import aiohttp

    class DaemonResolver(aiohttp.abc.AbstractResolver):
        """Resolves names in daemon threads: those of aiohttp's resolver are joined when the loop or Python ends."""

        async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict]:
            found = await _in_daemon_thread(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
            numeric = {"hostname": host, "port": port, "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV}
            return [numeric | {"host": at[0], "family": kind, "proto": proto} for kind, _, proto, _, at in found]

        async def close(self) -> None:
            pass

    # Queued requests are limited before they get here, so that a probe of a busy server does not wait for them.
    # vLLM closes idle connections after 5 s; closing them earlier avoids sending into a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3, resolver=DaemonResolver())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def _in_daemon_thread(work: Callable, *args: Any) -> Any:
    future: Future = Future()
    future.set_running_or_notify_cancel()  # so that a result after the deadline is ignored, not an error

    def run() -> None:
        try:
            future.set_result(work(*args))
        except Exception as error:  # of any class: it is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="name lookup", daemon=True).start()
    return await asyncio.wrap_future(future)
