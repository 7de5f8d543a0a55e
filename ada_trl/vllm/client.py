"""TRL's vLLM client with a deadline on everything it asks of the server."""

import asyncio
import atexit
import functools
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trl.generation.vllm_client import VLLMClient
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..utils.distributed import DistributedError
from .response_validation import InvalidResponseError, check_completions, check_server_info, parse, quote, served_model


MAX_RETRIES = 4
BACKOFF_SECONDS = 0.25  # doubles with every retry
MAX_BACKOFF_SECONDS = 4
CONNECT_SECONDS = 10
STALLED_SECONDS = 5  # at most, for signs of life of a server that has let a deadline pass
BUSY = (408, 429, 503)  # the request was not worked on: any may be sent again, until its deadline
# Endpoints that are safe to ask again: prompts of text, images, prompts with images, token ids.
REPEATABLE = ("/v1/completions", "/v1/chat/completions/render", "/inference/v1/generate", "/tokenize")
COMPLETIONS = ("/v1/completions", "/inference/v1/generate")
NOT_VLLM = "Is a vLLM server running there? Start one, or correct vllm_server_base_url."
TOO_SLOW = "Check its log; if it is only slow, raise vllm_request_timeout."


class VLLMServerError(DistributedError):
    """
    The vLLM server did not do what was asked of it, and asking again would not help.

    Args:
        cause (`str`), remedy (`str`, *optional*):
            As in [`~processes.DistributedError`].
        status (`int`, *optional*):
            Of the HTTP answer with which the server refused.
    """

    def __init__(self, cause: str, remedy: str = "", *, status: int | None = None):
        super().__init__(cause, remedy)
        self.status = status


class VLLMServerUnavailable(VLLMServerError):
    """A request ran into its deadline, or failed more often than it is retried: dead, stalled or overloaded server."""


class VLLMServerNotFound(VLLMServerUnavailable, ConnectionError):
    """No server has answered at the start."""


class _Response(NamedTuple):
    """As much of a `requests.Response` as TRL's client reads."""

    status_code: int
    content: dict
    text: str

    def json(self) -> dict:
        return self.content


class _HTTPLoop(NamedTuple):
    """What requests go through: a thread, its event loop and an HTTP session of aiohttp."""

    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    session: Any


class _Session:
    """Takes the place of TRL's HTTP session, so that what its client sends by itself has a deadline and an end too."""

    def __init__(self, client: "TimeoutVLLMClient"):
        self._client = client

    def get(self, url: str, **kwargs: Any) -> _Response:
        return self._answer(self._client._get, url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> _Response:
        return self._answer(self._client._post, url, **kwargs)

    def _answer(self, send: Callable[..., dict], url: str, **kwargs: Any) -> _Response:
        try:
            return _Response(200, send(url, **kwargs), "")
        except VLLMServerError as error:
            if error.status != 404:  # of which TRL knows the cause
                raise
            return _Response(404, {}, str(error))


class TimeoutVLLMClient(VLLMClient):
    """
    [`~trl.generation.vllm_client.VLLMClient`] whose requests end in time.

    What is sent and how answers are parsed is TRL's. Only the transport differs: every request has a deadline for
    connecting, answering and retrying together; requests that are safe to repeat (sampling and reading) are repeated
    after a broken connection, a broken answer or a 5xx, all requests after a 408, 429 or 503; every completion is
    checked ([`~answers.check_completions`]); and [`cancel`] ends all requests under way, so that the server stops
    working on them and no thread is left waiting. A server that has let a deadline pass is asked for signs of life (whatever
    is no sampling) with a short one until it has answered something: it is waited for once.

    Args:
        base_url (`str`), group_port (`int`):
            As in TRL.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for the server to come up.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Deadline of a request in seconds.

    Raises:
        [`VLLMServerNotFound`]: if the server is not up after `connection_timeout`.
        [`VLLMServerError`]: if what answers there is no vLLM server.
    """

    vocab_size: int | None = None  # where it is known, completions are checked against it
    session: Any  # TRL's until the server was met, then a `_Session`

    def __init__(
        self,
        base_url: str,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        request_timeout: float = 300.0,
    ):
        self.request_timeout = request_timeout
        self.retries = self.timeouts = 0
        self._lock = threading.Lock()
        self._network: _HTTPLoop | None = None  # from first use until `close`
        self._tasks: set[asyncio.Task] = set()
        self._cancelled = self._stalled = False
        self._server_info: dict | None = None
        atexit.register(self.close)
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except BaseException:
            self.close()
            raise
        self.session.close()
        self.session = _Session(self)

    # The four ways in which TRL's client talks to the server: these, and its session.

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self._request("GET", f"{self.base_url}/health", timeout=min(CONNECT_SECONDS, self.request_timeout))
                return
            except VLLMServerError as error:
                answered = not isinstance(error, VLLMServerUnavailable)  # by something that is up
                if answered or time.monotonic() + retry_interval > deadline:
                    waited = "" if answered else f" within vllm_server_timeout ({total_timeout:g} s)"
                    raise VLLMServerNotFound(
                        f"no vLLM server has answered{waited}: {error.cause}", NOT_VLLM
                    ) from error
            time.sleep(retry_interval)

    def _get(self, url: str, **kwargs: Any) -> dict:
        check = next((check for end, check in READ.items() if url.endswith(end)), None)
        try:
            return self._request("GET", url, retry=True, check=check, **kwargs)
        except VLLMServerUnavailable:
            raise
        except VLLMServerError as error:
            raise VLLMServerError(error.cause, NOT_VLLM, status=error.status) from error

    def _post(self, url: str, **kwargs: Any) -> dict:
        check = None
        if url.endswith(COMPLETIONS):
            check = functools.partial(check_completions, kwargs["json"], vocab_size=self.vocab_size)
        return self._request("POST", url, retry=url.endswith(REPEATABLE), check=check, **kwargs)

    def read_server_info(self) -> dict:
        """The server's `/server_info` now: `vllm_config` and, from vLLM 0.12, `vllm_env`."""
        try:
            self._server_info = info = self._get(f"{self.base_url}/server_info", params={"config_format": "json"})
            return info
        except VLLMServerError as error:
            if error.status != 404:
                raise
            raise VLLMServerError(
                "it does not expose its development endpoints, which weight synchronization needs",
                "Restart it with VLLM_SERVER_DEV_MODE=1 in its environment.",
            ) from error

    def get_server_info(self) -> dict:
        """As it was read last: TRL asks for it on one process alone, where a failure would leave the others waiting."""
        info = self.read_server_info() if self._server_info is None else self._server_info
        return info["vllm_config"]

    def image_features(self, images: list[list | None], **kwargs: Any) -> list[dict | None]:
        try:
            return super().image_features(images, **kwargs)
        except VLLMServerError:
            raise
        except RuntimeError as error:  # the endpoint is missing
            raise VLLMServerError(str(error)) from error

    def reset_prefix_cache(self) -> None:
        answer = self._post(f"{self.base_url}/reset_prefix_cache")
        if answer and answer.get("success") is not True:  # before vLLM 0.26 it answered with nothing
            raise VLLMServerError(
                f"it could not reset its prefix cache, which holds keys and values of old weights: {quote(answer)}",
                "Somebody else is using the server: give this run a server of its own.",
            )

    # The transport

    def cancel(self) -> None:
        """End all requests under way; those who wait for them get a `CancelledError`. Further ones fail at once."""
        self._cancelled = True
        if self._network is not None:
            self._network.loop.call_soon_threadsafe(lambda: [task.cancel() for task in list(self._tasks)])

    def resume(self) -> None:
        """Accept requests again after [`cancel`]."""
        self._cancelled = False

    def close(self) -> None:
        """End all requests and the network thread. A later request starts it anew."""
        with self._lock:
            if self._network is None:
                return
            thread, loop, session = self._network
            self._network = None
        asyncio.run_coroutine_threadsafe(self._shut_down(session), loop).result()
        shutdown_event_loop_in_daemon(thread, loop)

    async def _shut_down(self, session: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await session.close()

    def _started(self) -> _HTTPLoop:
        with self._lock:
            if self._network is None:
                thread, loop, ready = start_event_loop_in_daemon(name="vLLM requests")
                ready.wait()
                session = asyncio.run_coroutine_threadsafe(_open_session(), loop).result()
                self._network = _HTTPLoop(thread, loop, session)
            return self._network

    def _request(
        self,
        method: str,
        url: str,
        *,
        retry: bool = False,
        check: Callable[[dict], Any] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> dict:
        _, loop, session = self._started()
        attempt = functools.partial(_attempt, session, method, url, check, kwargs)
        timeout = self.request_timeout if timeout is None else timeout
        if self._stalled and not url.endswith(COMPLETIONS):
            timeout = min(timeout, STALLED_SECONDS, self.request_timeout / 6)
        request = self._send(attempt, f"{method} {url}", MAX_RETRIES if retry else 0, timeout)
        return asyncio.run_coroutine_threadsafe(request, loop).result()

    async def _send(self, attempt: Callable, name: str, max_retries: int, timeout: float) -> dict:
        failures: list[str] = []
        task = asyncio.current_task()
        self._tasks.add(task)  # type: ignore[arg-type] # a coroutine of the loop runs in a task
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            answer = await asyncio.wait_for(self._attempts(attempt, name, max_retries, failures), timeout)
            self._stalled = False
            return answer
        except asyncio.TimeoutError as error:
            self.timeouts += 1
            self._stalled = True
            limit = f"vllm_request_timeout ({timeout:g} s)" if timeout == self.request_timeout else f"{timeout:g} s"
            before = f"; the last attempt {failures[-1]}" if failures else ""
            raise VLLMServerUnavailable(f"{name} was not answered within {limit}{before}", TOO_SLOW) from error
        finally:
            self._tasks.discard(task)

    async def _attempts(self, attempt: Callable, name: str, max_retries: int, failures: list[str]) -> dict:
        number = 0
        while True:
            try:
                return await attempt()
            except _Failed as failed:
                if failed.is_final:
                    raise VLLMServerError(f"{name} {failed}", status=failed.status) from failed
                if number >= max_retries and failed.status not in BUSY:
                    kind = VLLMServerError if failed.is_broken else VLLMServerUnavailable
                    times = f" (asked {number + 1} times)" if number else ""
                    raise kind(f"{name} {failed}{times}") from failed
                failures.append(str(failed))
            self.retries += 1
            await asyncio.sleep(min(BACKOFF_SECONDS * 2**number, MAX_BACKOFF_SECONDS))
            number += 1


READ = {"/v1/models": served_model, "/server_info": check_server_info}  # what is looked at in answers to GET


class _Failed(Exception):
    """One attempt has."""

    def __init__(self, text: str, status: int | None = None, is_broken: bool = False):
        super().__init__(text)
        self.status, self.is_broken = status, is_broken
        self.is_final = status is not None and status < 500 and status not in BUSY


async def _attempt(session: Any, method: str, url: str, check: Callable[[dict], Any] | None, kwargs: dict) -> dict:
    import aiohttp

    try:
        async with session.request(method, url, **kwargs) as response:
            body = await response.text()
            if response.status != 200:
                raise _Failed(f"was answered with {response.status}: {body.strip()[:500]}", response.status)
            answer = parse(response.content_type, body)
            if check is not None:
                check(answer)
            return answer
    except InvalidResponseError as broken:
        raise _Failed(f"was answered wrongly: {broken}", is_broken=True) from broken
    except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Failed(f"failed: {type(error).__name__}: {error}") from error


async def _open_session() -> Any:
    import aiohttp

    class Lookup(aiohttp.abc.AbstractResolver):
        """Keeps nobody but its request waiting. The threads of aiohttp's own are joined when the loop or Python ends."""

        async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict]:
            found = await _in_daemon_thread(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
            numeric = {"hostname": host, "port": port, "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV}
            return [numeric | {"host": at[0], "family": kind, "proto": proto} for kind, _, proto, _, at in found]

        async def close(self) -> None:
            pass

    # vLLM closes idle connections after 5 s; letting go of them earlier avoids sending into a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3, resolver=Lookup())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def _in_daemon_thread(work: Callable, *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def tell(result: Any, error: OSError | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result = error = None
        try:
            result = work(*args)
        except OSError as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            pass  # the loop has ended: nobody waits any more

    threading.Thread(target=run, name="name lookup", daemon=True).start()
    return await future
