"""TRL's vLLM client with a deadline on every request, and with any number of rollouts in flight."""

import asyncio
import functools
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trl.generation.vllm_client import VLLMClient, to_openai_messages

from ..utils.logging import get_logger
from .errors import VLLMServerError, VLLMServerUnavailable
from .response_validation import check_completions, check_server_info, quote, sampled_logprobs, served_model
from .transport import (
    CONNECT_SECONDS,
    PROBES_PER_TIMEOUT,
    STALLED_SECONDS,
    HTTPTransport,
)


logger = get_logger(__name__)

TIMEOUT_OPTION = "vllm_request_timeout"
# Endpoints that are safe to request again: prompts of text, images, prompts with images, token ids.
REPEATABLE = ("/v1/completions", "/v1/chat/completions/render", "/inference/v1/generate", "/tokenize")
COMPLETIONS = ("/v1/completions", "/inference/v1/generate")
TOKEN_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
NOT_VLLM = "Is a vLLM server running there? Start one, or correct vllm_server_base_url."
CHECKS = {"/v1/models": served_model, "/server_info": check_server_info}  # validation of responses to GET


class VLLMServerNotFound(VLLMServerUnavailable, ConnectionError):
    """No vLLM server has responded at the start."""


class _Response(NamedTuple):
    """The part of `requests.Response` that TRL's client reads."""

    status_code: int
    content: dict
    text: str

    def json(self) -> dict:
        return self.content


class _Session:
    """Replaces the HTTP session of TRL's client, so that requests that bypass `_get` and `_post` have a deadline, too."""

    def __init__(self, client: "TimeoutVLLMClient"):
        self._client = client

    def get(self, url: str, **kwargs: Any) -> _Response:
        return self._respond(self._client._get, url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> _Response:
        return self._respond(self._client._post, url, **kwargs)

    def _respond(self, send: Callable[..., dict], url: str, **kwargs: Any) -> _Response:
        try:
            return _Response(200, send(url, **kwargs), "")
        except VLLMServerError as error:
            if error.status != 404:  # TRL explains a missing endpoint
                raise
            return _Response(404, {}, str(error))


class TimeoutVLLMClient(VLLMClient):
    """
    [`~trl.generation.vllm_client.VLLMClient`] with a deadline on every request.

    Requests are those of TRL's client. Those that are safe to repeat (sampling and reading) are repeated after a broken
    connection, a broken response or a 5xx, all requests after a 408, 429 or 503; the deadline includes the retries. Every
    completion is validated ([`~vllm.response_validation.check_completions`]). After a missed deadline, the timeout of all
    requests but those for completions is short until the server responds, so that a stalled server is waited for once.

    Rollouts are coroutines ([`sample_completions`]), started in a group of the `transport`: any number of them may be in
    flight, and a request that waits in the server's queue while others are answered does not fail.

    Args:
        base_url (`str`), group_port (`int`):
            As in TRL.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for the server to come up.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Deadline of a request in seconds.

    Raises:
        [`VLLMServerNotFound`]: if the server is not up after `connection_timeout`.
        [`VLLMServerError`]: if the server that answers is not a vLLM server.
    """

    limit: float | None = None  # of `limited_to`
    vocab_size: int | None = None  # upper bound of the token ids in completions, once it is known
    session: Any  # TRL's until the server has responded, then a `_Session`

    def __init__(
        self,
        base_url: str,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        request_timeout: float = 300.0,
    ):
        self.request_timeout = request_timeout
        self.transport = HTTPTransport(self._count_tokens)
        self._server_info: dict | None = None
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except BaseException:
            self.transport.close()
            raise
        self.session.close()
        self.session = _Session(self)

    # Methods through which TRL's client sends requests, besides its session

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self._request("GET", f"{self.base_url}/health", timeout=min(CONNECT_SECONDS, self.request_timeout))
                return
            except VLLMServerError as error:
                # Whatever responds is up. If it is not a healthy vLLM server, waiting does not help.
                has_response = not isinstance(error, VLLMServerUnavailable)
                if has_response or time.monotonic() + retry_interval > deadline:
                    waited = "" if has_response else f" within vllm_server_timeout ({total_timeout:g} s)"
                    raise VLLMServerNotFound(f"no vLLM server responded{waited}: {error.cause}", NOT_VLLM) from error
            time.sleep(retry_interval)

    def _get(self, url: str, **kwargs: Any) -> dict:
        check = next((check for end, check in CHECKS.items() if url.endswith(end)), None)
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
        try:
            return self._request("POST", url, retry=url.endswith(REPEATABLE), check=check, **kwargs)
        except VLLMServerError as error:
            if url.endswith("/update_weights"):
                # TRL raises the error after its NCCL broadcast, which has no timeout and does not return without the server.
                logger.error(
                    f"The vLLM server does not receive the weights: {error.cause}. If the run does not end by itself, it waits "
                    "in the NCCL broadcast: end it, restart the server, and resume from the last checkpoint."
                )
            raise

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """While the block runs, requests have a deadline of at most `seconds`."""
        self.limit = seconds
        try:
            yield
        finally:
            self.limit = None

    def read_server_info(self) -> dict:
        """Request the server's `/server_info`: `vllm_config` and, from vLLM 0.12, `vllm_env`."""
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
        """Return the `vllm_config` that was read last: TRL calls this on one rank, where a failure would hang the others."""
        info = self.read_server_info() if self._server_info is None else self._server_info
        return info["vllm_config"]

    def reset_prefix_cache(self) -> None:
        response = self._post(f"{self.base_url}/reset_prefix_cache")
        if response and response.get("success") is not True:  # before vLLM 0.26 the response was empty
            raise VLLMServerError(
                f"it could not reset its prefix cache, which holds keys and values of old weights: {quote(response)}",
                "Another client is probably using it: use a dedicated server for this run.",
            )

    # Rollouts

    async def sample_completions(
        self, prompts: list[list[int]], features: dict | None = None, **sampling_params: Any
    ) -> tuple[list[list[int]], list["TokenLogprobs"]]:
        """
        Sample completions on the event loop. The request may wait in the server's queue, see [`~vllm.transport.HTTPTransport`].

        Args:
            features (`dict`, *optional*):
                Features of the images of the only prompt, see [`render`].
            sampling_params:
                As in [`~trl.generation.vllm_client.VLLMClient.generate`], with `n` completions per prompt.

        Returns:
            `tuple`: ids and log-probabilities of `len(prompts) * n` completions, prompt by prompt.
        """
        path, request = completion_request(self.model, prompts, features, sampling_params)
        check = functools.partial(check_completions, request, vocab_size=self.vocab_size)
        choices = (await self._queued_post(path, request, check))["choices"]
        logprobs = [TokenLogprobs(sampled_logprobs(choice["logprobs"])) for choice in choices]
        return [choice["token_ids"] for choice in choices], logprobs

    async def render(self, images: list) -> dict:
        """Let the server turn the images of one prompt into features, on the event loop."""
        content = [{"type": "image", "image": image} for image in images]
        # In a thread, because encoding images would block the event loop.
        messages = await asyncio.to_thread(to_openai_messages, [{"role": "user", "content": content}])
        request = {"model": self.model, "messages": messages, "max_tokens": 1}
        try:
            return (await self._queued_post("/v1/chat/completions/render", request, None))["features"]
        except VLLMServerError as error:
            if error.status != 404:
                raise
            raise VLLMServerError(
                "it does not serve /v1/chat/completions/render, which prompts with images need",
                "Restart it with --enable-scale-out (from vLLM 0.30.0).",
            ) from error

    async def _queued_post(self, path: str, request: dict, check: Callable[[dict], Any] | None) -> dict:
        return await self.transport.request(
            "POST",
            self.base_url + path,
            timeout=self.request_timeout,
            queued=True,
            retry=True,
            limit_name=TIMEOUT_OPTION,
            check=check,
            json=request,
        )

    async def _count_tokens(self) -> float | None:
        """Number of tokens that the server has processed since its start; `None` if it does not serve its metrics."""
        timeout = min(STALLED_SECONDS, self.request_timeout / PROBES_PER_TIMEOUT)
        try:
            text = (await self.transport.request("GET", f"{self.base_url}/metrics", timeout=timeout, probe=True))[
                "text"
            ]
            lines = [line for line in text.splitlines() if line.startswith(TOKEN_COUNTERS)]
            return sum(float(line.split()[-1]) for line in lines) if lines else None
        except (VLLMServerError, LookupError, ValueError):
            return None

    def _request(self, method: str, url: str, *, timeout: float | None = None, **options: Any) -> dict:
        limit_name = TIMEOUT_OPTION if timeout is None else ""
        timeout = self.request_timeout if timeout is None else timeout
        if self.limit is not None and self.limit < timeout:
            limit_name, timeout = "", self.limit
        if self.transport.stalled and not url.endswith(COMPLETIONS):
            # The full timeout has just been waited for; a server that is alive responds to short requests at once.
            limit_name = ""
            timeout = min(timeout, STALLED_SECONDS, self.request_timeout / 6)
        return self.transport.run(
            self.transport.request(method, url, timeout=timeout, limit_name=limit_name, **options)
        )


class TokenLogprobs(Sequence):
    """
    Log-probabilities of a completion's tokens, of shape `(length, 1)` as TRL reads them.

    Lists of lists would take ten times the memory, which counts for thousands of long completions.
    """

    def __init__(self, values: Iterable[float]):
        self._values = array("d", values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return TokenLogprobs(self._values[index])
        return (self._values[index],)

    def __iter__(self) -> Iterator[tuple[float]]:
        return zip(self._values)


def completion_request(
    model: str, prompts: list[list[int]], features: dict | None, sampling_params: dict
) -> tuple[str, dict]:
    """Path and body of a request for completions, as TRL's client sends it."""
    params = dict(sampling_params)
    regex, overrides = params.pop("structured_outputs_regex", None), params.pop("generation_kwargs", None)
    if regex is not None:
        params["structured_outputs"] = {"regex": regex}
    params |= {name: value for name, value in (overrides or {}).items() if name != "n"}  # 1, of a single rollout
    if features is None:
        as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return "/v1/completions", {"model": model, "prompt": prompts} | as_ids | params
    (token_ids,) = prompts
    # Without output_kind (FINAL_ONLY) the server returns only the completions that finished last (vLLM PR 52399).
    body = {"request_id": f"trl-{uuid.uuid4().hex}", "model": model, "token_ids": token_ids, "features": features}
    return "/inference/v1/generate", body | {"sampling_params": params | {"output_kind": 2}}
