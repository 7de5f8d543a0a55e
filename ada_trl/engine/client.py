"""TRL's vLLM client with a deadline on everything it asks of the server."""

import asyncio
import atexit
import itertools
import json
import threading
import time
from typing import Any, NamedTuple

from trl.generation.vllm_client import VLLMClient
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..processes import CommonError


MAX_RETRIES = 4
BACKOFF_SECONDS = 0.25  # doubles with every retry
CONNECT_SECONDS = 10
# Endpoints that are safe to ask again: prompts of text, images, prompts with images.
REPEATABLE = ("/v1/completions", "/v1/chat/completions/render", "/inference/v1/generate")


class VLLMServerError(CommonError):
    """
    The vLLM server did not do what was asked of it, and asking again would not help.

    Args:
        message (`str`):
            What happened.
        status (`int`, *optional*):
            Of the HTTP answer with which the server refused.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class VLLMServerUnavailable(VLLMServerError):
    """A request ran into its deadline, or failed more often than it is retried: dead, stalled or overloaded server."""


class VLLMServerNotFound(VLLMServerUnavailable, ConnectionError):
    """No server has answered at the start."""


class _Answer(NamedTuple):
    """As much of a `requests.Response` as TRL's client reads."""

    status_code: int
    content: dict
    text: str

    def json(self) -> dict:
        return self.content


class _Session:
    """Takes the place of TRL's HTTP session, so that what its client sends by itself has a deadline and an end too."""

    def __init__(self, client: "DeadlineClient"):
        self._client = client

    def get(self, url: str, **kwargs) -> _Answer:
        return self._answer(self._client._get, url, **kwargs)

    def post(self, url: str, **kwargs) -> _Answer:
        return self._answer(self._client._post, url, **kwargs)

    def _answer(self, send, url: str, **kwargs) -> _Answer:
        try:
            return _Answer(200, send(url, **kwargs), "")
        except VLLMServerError as error:
            if error.status != 404:  # of which TRL knows the cause
                raise
            return _Answer(404, {}, str(error))


class DeadlineClient(VLLMClient):
    """
    [`~trl.generation.vllm_client.VLLMClient`] whose requests end in time.

    What is sent and how answers are parsed is TRL's. Only the transport differs: every request has a deadline for
    connecting, answering and retrying together; requests that are safe to repeat (sampling and reading) are repeated
    after a broken connection, a broken answer or a 5xx; and [`cancel`] ends all requests under way, so that the server
    stops working on them and no thread is left waiting.

    Args:
        base_url (`str`), group_port (`int`):
            As in TRL.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for the server to come up.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Deadline of a request in seconds.

    Raises:
        [`VLLMServerNotFound`]: if the server is not up after `connection_timeout`.
    """

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
        self._daemon = None  # thread, event loop, ready event and HTTP session, from first use until `close`
        self._tasks: set[asyncio.Task] = set()
        self._cancelled = False
        atexit.register(self.close)
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except BaseException:
            self.close()
            raise
        self.session.close()
        self.session = _Session(self)

    # The four ways in which TRL's client talks to the server: these, and its session.

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0):
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self._request("GET", f"{self.base_url}/health", timeout=min(CONNECT_SECONDS, self.request_timeout))
                return
            except VLLMServerError as error:
                if time.monotonic() + retry_interval > deadline:
                    raise VLLMServerNotFound(
                        f"The vLLM server can't be reached at {self.base_url} after {total_timeout} seconds "
                        f"(vllm_server_timeout): {error} Start it, or correct vllm_server_base_url."
                    ) from error
            time.sleep(retry_interval)

    def _get(self, url: str, **kwargs) -> dict:
        return self._request("GET", url, retry=True, **kwargs)

    def _post(self, url: str, **kwargs) -> dict:
        return self._request("POST", url, retry=url.endswith(REPEATABLE), **kwargs)

    def get_server_info(self) -> dict:
        return self.full_server_info()["vllm_config"]

    def full_server_info(self) -> dict:
        """The server's `/server_info`: `vllm_config` and, from vLLM 0.12, `vllm_env`."""
        try:
            return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})
        except VLLMServerError as error:
            if error.status != 404:
                raise
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} does not expose its development endpoints, which weight "
                "synchronization needs. Restart it with VLLM_SERVER_DEV_MODE=1 in its environment."
            ) from error

    def image_features(self, images: list[list | None], **kwargs) -> list[dict | None]:
        try:
            return super().image_features(images, **kwargs)
        except VLLMServerError:
            raise
        except RuntimeError as error:  # the endpoint is missing
            raise VLLMServerError(str(error)) from error

    def reset_prefix_cache(self):
        if self._post(f"{self.base_url}/reset_prefix_cache").get("success") is False:
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} could not reset its prefix cache, which holds keys and values of "
                "old weights. Make sure that nobody else uses the server during training, or start it with "
                "--no-enable-prefix-caching."
            )

    # The transport

    def cancel(self) -> None:
        """End all requests under way; those who wait for them get a `CancelledError`. Further ones fail at once."""
        self._cancelled = True
        if self._daemon is not None:
            _, loop, *_ = self._daemon
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in list(self._tasks)])

    def resume(self) -> None:
        """Accept requests again after [`cancel`]."""
        self._cancelled = False

    def close(self) -> None:
        """End all requests and the network thread. A later request starts it anew."""
        with self._lock:
            if self._daemon is None:
                return
            thread, loop, _, session = self._daemon
            self._daemon = None
        asyncio.run_coroutine_threadsafe(self._shut_down(session), loop).result()
        shutdown_event_loop_in_daemon(thread, loop)

    async def _shut_down(self, session) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await session.close()
        await asyncio.get_running_loop().shutdown_default_executor()  # threads that looked up host names

    def _started(self):
        with self._lock:
            if self._daemon is None:
                thread, loop, ready = start_event_loop_in_daemon(name="vLLM requests")
                ready.wait()
                session = asyncio.run_coroutine_threadsafe(_open_session(), loop).result()
                self._daemon = (thread, loop, ready, session)
            return self._daemon

    def _request(self, method: str, url: str, *, retry: bool = False, timeout: float | None = None, **kwargs) -> dict:
        _, loop, _, session = self._started()
        request = self._send(session, method, url, retry, self.request_timeout if timeout is None else timeout, kwargs)
        return asyncio.run_coroutine_threadsafe(request, loop).result()

    async def _send(self, session, method: str, url: str, retry: bool, timeout: float, kwargs: dict) -> dict:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            attempts = self._attempts(session, method, url, MAX_RETRIES if retry else 0, kwargs)
            return await asyncio.wait_for(attempts, timeout)
        except asyncio.TimeoutError as error:
            self.timeouts += 1
            raise VLLMServerUnavailable(
                f"{method} {url} was not answered within vllm_request_timeout ({timeout:g} s)."
            ) from error
        finally:
            self._tasks.discard(task)

    async def _attempts(self, session, method: str, url: str, max_retries: int, kwargs: dict) -> dict:
        import aiohttp

        for attempt in itertools.count():
            try:
                async with session.request(method, url, **kwargs) as response:
                    body = await response.text()
                    if response.status == 200:  # some endpoints answer with a sentence, or with nothing
                        return json.loads(body) if response.content_type == "application/json" and body else {}
                    failure = f"{method} {url} was answered with {response.status}: {body.strip()[:500]}"
                    if response.status < 500:
                        raise VLLMServerError(failure, response.status)
            except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError, UnicodeDecodeError) as error:
                failure = f"{method} {url} failed: {type(error).__name__}: {error}"
            if attempt == max_retries:
                raise VLLMServerUnavailable(f"{failure} (after {attempt} retries)")
            self.retries += 1
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)


async def _open_session() -> Any:
    import aiohttp

    # vLLM closes idle connections after 5 s; letting go of them earlier avoids sending into a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)
