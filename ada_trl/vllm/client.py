"""TRL's vLLM client with a deadline on every request, and with any number of rollouts in flight."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from trl.generation.vllm_client import VLLMClient, to_openai_messages

from ..utils.logging import get_logger
from .errors import VLLMServerError, VLLMServerUnavailable
from .responses import quote, read_completions
from .transport import SHORT_SECONDS, HTTPTransport


logger = get_logger(__name__)


class TimeoutVLLMClient(VLLMClient):
    """
    [`~trl.generation.vllm_client.VLLMClient`] with deadlines and retries, see [`~vllm.transport.HTTPTransport`],
    through which all requests are sent: those of TRL's methods by [`send`], rollouts by coroutines of the event loop.

    Args:
        base_url (`str`), group_port (`int`):
            As in TRL.
        connection_timeout (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for the server to come up.
        request_timeout (`float`, *optional*, defaults to `300.0`):
            Deadline of a request in seconds.

    Raises:
        [`VLLMServerError`]: if no vLLM server responds within `connection_timeout`.
    """

    def __init__(
        self,
        base_url: str,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        request_timeout: float = 300.0,
    ):
        self.transport = HTTPTransport(base_url, request_timeout)
        try:
            super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)
        except BaseException as error:
            self.transport.close()
            # TRL reads the name of the model from the response.
            if isinstance(error, KeyError | IndexError | TypeError):
                raise VLLMServerError(
                    f"{base_url} has responded to /v1/models without the name of a model ({error!r})",
                    "Correct vllm_server_base_url, or start a vLLM server at this address.",
                ) from error
            raise

    def send(self, method: str, path: str, read: Callable[[dict], Any] = dict, **options: Any) -> Any:
        """Send a request and wait for its result. Arguments of [`~vllm.transport.HTTPTransport.request`]."""
        return self.transport.run(self.transport.request(method, path, read, **options))

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        self.session = _Session(self)  # TRL calls this after it has set its own session, and before it uses it
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                return self.send("GET", "/health", timeout=SHORT_SECONDS)
            except VLLMServerUnavailable as error:
                if time.monotonic() + retry_interval > deadline:
                    raise VLLMServerError(
                        f"no vLLM server responded within vllm_server_timeout ({total_timeout:g} s): {error.cause}",
                        "Start one, or correct vllm_server_base_url.",
                    ) from error
            time.sleep(retry_interval)

    def read_config(self) -> dict:
        """Request the server's configuration, `vllm_config` of its `/server_info`."""
        query = {"config_format": "json"}
        self._config: dict = self.send("GET", "/server_info", lambda info: dict(info["vllm_config"]), params=query)
        return self._config

    def get_server_info(self) -> dict:
        """Return what [`read_config`] has read: TRL calls this on one rank, where a failure would hang the others."""
        return self._config

    def reset_prefix_cache(self) -> None:
        response = self.send("POST", "/reset_prefix_cache")
        if response and response.get("success") is not True:  # before vLLM 0.26 the response was empty
            raise VLLMServerError(
                f"it could not reset its prefix cache, which holds keys and values of old weights: {quote(response)}",
                "Another client is probably using it: use a dedicated server for this run.",
            )

    # Rollouts: coroutines of the event loop, whose requests may wait in the server's queue

    async def sample_completions(
        self, prompts: list[list[int]], features: dict | None = None, **sampling_params: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """
        Sample completions.

        Args:
            features (`dict`, *optional*):
                Features of the images of the only prompt, see [`render`].
            sampling_params:
                As in [`~trl.generation.vllm_client.VLLMClient.generate`], with `n` completions per prompt.

        Returns:
            `tuple`: ids and log-probabilities of `len(prompts) * n` completions, prompt by prompt.
        """
        path, request = completion_request(self.model, prompts, features, sampling_params)
        read = functools.partial(read_completions, request)
        return await self.transport.request("POST", path, read, queued=True, json=request)

    async def render(self, images: list) -> dict:
        """Let the server turn the images of one prompt into features."""
        content = [{"type": "image", "image": image} for image in images]
        # In a thread, because encoding images would block the event loop.
        messages = await asyncio.to_thread(to_openai_messages, [{"role": "user", "content": content}])
        request = {"model": self.model, "messages": messages, "max_tokens": 1}
        path = "/v1/chat/completions/render"
        return await self.transport.request("POST", path, itemgetter("features"), queued=True, json=request)


class _Session:
    """
    Replaces the HTTP session of TRL's client, whose requests have no deadline. Failures are raised, not returned.
    """

    def __init__(self, client: TimeoutVLLMClient):
        self._client = client

    def get(self, url: str, **kwargs: Any) -> SimpleNamespace:
        return self._respond("GET", url, kwargs)

    def post(self, url: str, **kwargs: Any) -> SimpleNamespace:
        try:
            return self._respond("POST", url, kwargs)
        except VLLMServerError as error:
            if url.endswith("/update_weights"):
                # TRL raises the error after its NCCL broadcast, which has no timeout and does not return without the
                # server.
                logger.error(
                    f"The vLLM server does not receive the weights: {error.cause}. If the run does not end by itself, "
                    "it waits in the NCCL broadcast: end it, restart the server, and resume from the last checkpoint."
                )
            raise

    def _respond(self, method: str, url: str, kwargs: dict) -> SimpleNamespace:
        content = self._client.send(method, url.removeprefix(self._client.transport.base_url), **kwargs)
        return SimpleNamespace(status_code=200, json=lambda: content)


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
