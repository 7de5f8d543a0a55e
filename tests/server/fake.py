"""A server with vLLM's interface and a script instead of a model, for what a real one cannot show on demand."""

import asyncio
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from ..helpers import tiny_tokenizer


TOKENIZER = tiny_tokenizer()
RIGHT, WRONG = "1", "0"


@dataclass
class Call:
    """A request for completions."""

    prompt: str
    n: int
    round: int  # 0 for the prompt's first request
    number: int  # over all prompts
    model: str
    request: web.Request
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    features: dict | None = None  # of the prompt's images


def answer(call: Call, texts: list[str]) -> web.Response:
    """The completions `texts`, in the layout of the endpoint that was asked."""
    choices = []
    for index, text in enumerate(texts):
        ids = [*call.tokenizer(text)["input_ids"], call.tokenizer.eos_token_id]
        tokens = [f"token_id:{i}" for i in ids]
        logprobs = {"tokens": tokens, "token_logprobs": [-1.0] * len(ids), "top_logprobs": [{t: -1.0} for t in tokens]}
        if call.features is not None:
            logprobs = {"content": [{"token": t, "logprob": -1.0, "top_logprobs": []} for t in tokens]}
        prompt_ids = call.tokenizer(call.prompt)["input_ids"]
        choices.append({"index": index, "token_ids": ids, "logprobs": logprobs, "prompt_token_ids": prompt_ids})
    return web.json_response({"choices": choices})


async def half_right(call: Call) -> web.Response:
    return answer(call, [RIGHT, WRONG] * (call.n // 2))


def reward(completions: list[str], **kwargs) -> list[float]:
    return [float(completion.startswith(RIGHT)) for completion in completions]


@dataclass
class FakeServer:
    """
    Serves on a free port of this machine while the context is open.

    Args:
        behave (`Callable[[Call], Awaitable[web.StreamResponse]]`):
            Answers a request for completions.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the served model; by default the arithmetic task's.
    """

    behave: Callable[[Call], Awaitable[web.StreamResponse]] = half_right
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    info: dict = field(default_factory=dict)
    control: Callable[[web.Request, dict], Awaitable[web.StreamResponse | None]] | None = None
    render: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None  # before images are processed
    completions: list[Call] = field(default_factory=list)
    controls: list[tuple[str, dict]] = field(default_factory=list)
    most_in_flight: int = 0

    def __post_init__(self):
        self.rounds = Counter()
        self.numbers = itertools.count()
        self.in_flight = 0
        self.info = {
            "vllm_config": {
                "model_config": {"max_model_len": 8192, "logprobs_mode": "processed_logprobs"},
                "weight_transfer_config": None,
                "lora_config": {"max_lora_rank": 16},
                "parallel_config": {},
                "instance_id": "first",
            },
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
        } | self.info

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        features, sampling = payload.get("features"), payload.get("sampling_params", payload)
        prompt = self.tokenizer.decode(payload["token_ids"] if features else payload["prompt"][0])
        position = (self.rounds[prompt], next(self.numbers))
        call = Call(prompt, sampling["n"], *position, payload["model"], request, self.tokenizer, features)
        self.rounds[prompt] += 1
        self.completions.append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.behave(call)
        finally:
            self.in_flight -= 1

    async def _render(self, request: web.Request) -> web.StreamResponse:
        """Takes the pictures out of a message; as in vLLM, their places in it say nothing of the prompt."""
        self.in_flight += 1
        try:
            if self.render is not None and (response := await self.render(request)) is not None:
                return response
        finally:
            self.in_flight -= 1
        (message,) = (await request.json())["messages"]
        urls = [part["image_url"]["url"] for part in message["content"]]
        places = [{"offset": 0, "length": 1} for _ in urls]
        return await _json({"features": {"mm_placeholders": {"image": places}, "kwargs_data": {"image": urls}}})

    async def _control(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json() if request.can_read_body else {}
        self.controls.append((request.path, payload))
        if self.control is not None and (response := await self.control(request, payload)) is not None:
            return response
        return web.json_response({"success": True})

    async def _serve(self):
        app = web.Application()
        app.router.add_get("/health", lambda request: _json({}))
        app.router.add_get("/v1/models", lambda request: _json({"data": [{"id": "base"}]}))
        app.router.add_get("/server_info", lambda request: _json(self.info))
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/{path:.*}", self._control)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def __enter__(self) -> "FakeServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        return self

    def stop(self) -> None:
        """The server dies: connections are reset and refused from now on."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()

    def __exit__(self, *exception) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def _json(content: dict) -> web.Response:
    return web.Response(text=json.dumps(content), content_type="application/json")


def random_texts(call: Call, pass_rate: float, seed: int = 0) -> list[str]:
    rng = random.Random(f"{seed} {call.prompt} {call.round}")
    return [RIGHT if rng.random() < pass_rate else WRONG for _ in range(call.n)]
