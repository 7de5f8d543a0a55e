"""HTTP requests to a vLLM server on an event loop in a background thread: deadlines, retries and cancellation."""

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from .errors import VLLMServerError, VLLMServerUnavailable
from .responses import InvalidResponseError, parse, quote


MAX_RETRIES = 4
BACKOFF_SECONDS = 0.25  # doubles with every retry
MAX_BACKOFF_SECONDS = 4
SHORT_SECONDS = 10  # deadline of requests that a healthy server answers at once, and of each attempt to connect
CHECKS_PER_TIMEOUT = 4  # of the server's progress
BUSY = (408, 429, 503)  # the request was not processed: any request may be sent again, until its deadline
INVALID = (400, 413, 422)  # of the request itself, whatever the state of the server
# Requests that are safe to send again, besides GET: prompts of text, images, prompts with images.
REPEATABLE = ("/v1/completions", "/v1/chat/completions/render", "/inference/v1/generate")
MIN_CONNECTIONS, MAX_CONNECTIONS = 64, 8192  # of queued requests; the limit on open files decides between them
TOKEN_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")

REJECTED = (
    "The server rejects this request, and will do so again: correct the cause, such as a prompt longer than "
    "--max-model-len."
)
TOO_SLOW = "Check its log; if it is only slow, raise vllm_request_timeout."
MISSING = {  # endpoints that have to be enabled
    "/server_info": "Restart it with VLLM_SERVER_DEV_MODE=1 in its environment.",
    "/v1/load_lora_adapter": "Restart it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment.",
    "/v1/chat/completions/render": "Restart it with --enable-scale-out (from vLLM 0.30.0).",
}


class HTTPTransport:
    """
    Sends requests from an event loop in a background thread, which starts with the first request and ends with
    [`close`], or at the latest with this object or Python.

    Every request has one deadline for connecting, its response and its retries. There are two kinds of deadlines:

    - *fixed*, counted from the start of the request;
    - *queued*, for rollouts: any number of them may be in flight, most of them waiting in the server's queue. They
      fail together if *no* queued request was answered, and the server processed no token, for the length of the
      timeout.

    Args:
        base_url (`str`):
            Address of the server.
        timeout (`float`):
            Seconds until a deadline.

    Attributes:
        retries (`int`), timeouts (`int`):
            Requests that were repeated, and deadlines that were missed: the requests that failed together count once.
    """

    def __init__(self, base_url: str, timeout: float):
        self.base_url, self.timeout = base_url, timeout
        self.retries = self.timeouts = 0
        self._lock = threading.Lock()
        self._running: _EventLoop | None = None
        self._queued: set[asyncio.Timeout] = set()  # deadlines of the queued requests in flight
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
                self._running = None

    def _started(self) -> "_EventLoop":
        with self._lock:
            if self._running is None:
                self._running = _EventLoop()
                self._finalizer = weakref.finalize(self, self._running.close)
            return self._running

    # Coroutines of the event loop

    async def request(
        self,
        method: str,
        path: str,
        read: Callable[[dict], Any] = dict,
        *,
        timeout: float | None = None,
        queued: bool = False,
        **kwargs: Any,
    ) -> Any:
        """
        Send a request. GET and [`REPEATABLE`] ones are sent again after a broken connection, an invalid response or a
        5xx; after 408, 429 or 503 every request is.

        Args:
            read (`Callable[[dict], Any]`):
                Function from the JSON object of the response to the result. An error of it is an invalid response.
            timeout (`float`, *optional*), queued (`bool`):
                Seconds until a fixed deadline, if that is shorter than all others; whether the deadline is a queued
                one.
            kwargs:
                Of `aiohttp.ClientSession.request`.

        Raises:
            [`VLLMServerUnavailable`]: after the deadline, or after the last retry.
            [`VLLMServerError`]: if the server rejects the request, or keeps sending invalid responses.
        """
        timeout = min(timeout or self.timeout, self.timeout)
        failures: list[str] = []
        try:
            async with self._waiting_in_queue() if queued else asyncio.timeout(timeout):
                return await self._send(method, path, read, failures, kwargs)
        except TimeoutError as error:
            self.timeouts += not queued  # the watchdog counts those of queued requests
            before = f"; the last attempt {failures[-1]}" if failures else ""
            raise VLLMServerUnavailable(
                f"{method} {path} received no response within {timeout:g} s{before}", TOO_SLOW
            ) from error

    async def _send(self, method: str, path: str, read: Callable, failures: list[str], kwargs: dict) -> Any:
        """Repeat the request until it succeeds; `failures` receives the reasons of the other attempts."""
        # A busy server uses up none of them.
        retries_left = MAX_RETRIES if method == "GET" or path in REPEATABLE else 0
        pause = BACKOFF_SECONDS
        while True:
            try:
                return await self._attempt(method, path, read, kwargs)
            except _AttemptFailed as failed:
                if failed.status not in BUSY:
                    retries_left -= 1
                    if failed.is_rejection or retries_left < 0:
                        times = f" (sent {len(failures) + 1} times)" if failures else ""
                        cause = f"{method} {path} {failed}{times}"
                        raise failed.error_class(cause, failed.fix(path), status=failed.status) from failed
                failures.append(str(failed))
            self.retries += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    async def _attempt(self, method: str, path: str, read: Callable, kwargs: dict) -> Any:
        import aiohttp

        assert self._running is not None
        try:
            async with self._running.session.request(method, self.base_url + path, **kwargs) as response:
                body = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _AttemptFailed(f"failed: {type(error).__name__}: {error}", VLLMServerUnavailable) from error
        if response.status != 200:
            kind = VLLMServerUnavailable if response.status >= 500 else VLLMServerError
            raise _AttemptFailed(f"returned status {response.status}: {_reason(body)}", kind, response.status)
        try:
            return read(parse(response.content_type, body))
        except InvalidResponseError as error:
            raise _AttemptFailed(f"returned an invalid response: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            content, name = body.decode(errors="replace"), type(error).__name__
            raise _AttemptFailed(f"returned an invalid response ({name}: {error}): {quote(content)}") from error

    # Deadlines of queued requests: one task for all of them

    @asynccontextmanager
    async def _waiting_in_queue(self) -> AsyncIterator[None]:
        assert self._running is not None
        if self._watchdog is None:
            self._watchdog = asyncio.create_task(self._watch_progress())
        async with asyncio.timeout(None) as deadline:
            self._queued.add(deadline)
            try:
                async with self._running.connections:
                    yield
                self._last_progress = asyncio.get_running_loop().time()
            finally:
                self._queued.remove(deadline)
                if not self._queued and self._watchdog is not None:
                    self._watchdog.cancel()
                    self._watchdog = None

    async def _watch_progress(self) -> None:
        """End all queued requests whenever the server has made no progress for the length of the timeout."""
        now = asyncio.get_running_loop().time
        self._last_progress, tokens = now(), None
        interval = self.timeout / CHECKS_PER_TIMEOUT
        while True:
            deadline = self._last_progress + self.timeout
            await asyncio.sleep(max(min(interval, deadline - now()), 0.01))
            if now() - self._last_progress >= interval:
                # No response, but completions may be long, or the server may process requests of other ranks.
                before, tokens = tokens, await self._count_tokens()
                if before is not None and tokens is not None and tokens > before:
                    self._last_progress = now()
            if now() - self._last_progress >= self.timeout:
                self.timeouts += 1
                for queued in self._queued:
                    queued.reschedule(now())
                self._last_progress = now()  # for requests that are sent from here on

    async def _count_tokens(self) -> float | None:
        """Number of tokens that the server has processed since its start; `None` if it does not serve its metrics."""
        try:
            async with asyncio.timeout(min(SHORT_SECONDS, self.timeout / CHECKS_PER_TIMEOUT)):
                text = await self._attempt("GET", "/metrics", lambda response: response["text"], {})
            lines = [line for line in text.splitlines() if line.startswith(TOKEN_COUNTERS)]
            return sum(float(line.split()[-1]) for line in lines) if lines else None
        except (TimeoutError, _AttemptFailed, ValueError):
            return None


class _EventLoop:
    """
    A background thread with an event loop, an HTTP session of aiohttp and the connections that queued requests may
    open.
    """

    loop: asyncio.AbstractEventLoop
    session: Any  # of aiohttp, which the extra `[vllm]` installs
    connections: asyncio.Semaphore

    def __init__(self) -> None:
        import aiohttp  # noqa: F401 # an error of the thread would not be seen

        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="vLLM requests", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    async def _serve(self) -> None:
        import aiohttp

        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        # Queued requests are limited before they get to aiohttp, so that a check of a busy server does not wait for
        # them.
        self.connections = asyncio.Semaphore(max_connections())
        # vLLM closes idle connections after 5 s; closing them earlier avoids sending into a closed one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SHORT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            self._is_ready.set()
            await self._stop.wait()
            await _cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

    def close(self) -> None:
        """Cancel all requests, end the thread, and close its sockets and the event loop."""
        self.loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # in which the garbage collector may run
            self._thread.join(SHORT_SECONDS)  # a name lookup cannot be cancelled


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
        if not self._loop.is_closed():
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
    """One attempt of a request failed; `error_class` is that of the error if there is no other attempt."""

    def __init__(self, text: str, error_class: type[VLLMServerError] = VLLMServerError, status: int | None = None):
        super().__init__(text)
        self.error_class, self.status = error_class, status

    @property
    def is_rejection(self) -> bool:
        return self.status is not None and self.status < 500

    def fix(self, path: str) -> str:
        if self.status == 404:
            return MISSING.get(path, "")
        return REJECTED if self.status in INVALID else ""


def _reason(body: bytes) -> str:
    """The message of vLLM's error response, or the beginning of any other body."""
    text = body.decode(errors="replace").strip()
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        pass
    return quote(str(text))


def max_connections() -> int:
    """
    Half of the files that this process may open. Requests beyond it wait here instead of on the server, where this is
    hardly noticed, as a request holds several rollouts.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(soft // 2, MIN_CONNECTIONS), MAX_CONNECTIONS)
