"""Faults of a scripted server: which requests, and their effect."""

import asyncio
import random
import time
from dataclasses import dataclass

from aiohttp import web

from .fake import FakeServer, choices_of, fingerprint, random_texts


READING = ("/health", "/v1/models", "/server_info")
SYNCING = {
    "disk": ("/collective_rpc", "/reset_prefix_cache"),
    "lora": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
SAMPLING = ("/v1/completions", "weight check")
# Status codes, responses that are not vLLM's, connections that end or never do, and wrong weights.
KINDS = "500 503 429 404 page object nonsense stall reset half lie restart foreign".split()
FOREVER = 10**6


@dataclass
class Fault:
    path: str  # endpoint, or "weight check"
    kind: str  # see `FaultyServer.break_down`
    first: int  # the first request to the endpoint that it affects
    number: int  # of affected requests

    @classmethod
    def draw(cls, rng: random.Random, sync: str) -> "Fault":
        path = rng.choice((*READING, *SYNCING[sync], *SAMPLING, *SAMPLING))
        few = 3 if path != "/v1/completions" else 12
        return cls(path, rng.choice(KINDS), rng.randrange(few), rng.choice((1, 2, FOREVER)))


class FaultyServer(FakeServer):
    """A server with one fault per run. A completion's log-probabilities identify its request."""

    def __init__(self, faults: list[Fault]):
        super().__init__(
            behave=self._sample,
            control=self._control_or_fail,
            read=self._read_or_fail,
            check_weights=self._check_weights,
        )
        self.faults = faults
        self.met: list[float | None] = []  # by run, time of the first affected request
        self.left: list[str] = []  # adapters, at the end of a run
        self.fault: Fault | None = None
        self._begin(None)

    def _begin(self, fault: Fault | None) -> None:
        if self.fault is not None and not self.fault.path.endswith("lora_adapter"):
            self.left += [name for name in self.served if name != "base"]
        self.restart(f"instance {time.monotonic_ns()}")
        self.rounds.clear()
        self.fault, self.seen = fault, 0

    async def _fail(self, path: str, request: web.Request) -> web.StreamResponse | None:
        if self.fault is None or path != self.fault.path:
            return None
        self.seen += 1
        if not self.fault.first < self.seen <= self.fault.first + self.fault.number:
            return None
        self.met[-1] = self.met[-1] or time.time()
        return await self.break_down(self.fault.kind, request)

    async def break_down(self, kind: str, request: web.Request) -> web.StreamResponse | None:
        if kind.isdigit():
            return web.json_response({"error": {"message": "a fault"}}, status=int(kind))
        if kind == "stall":
            await asyncio.sleep(60)
        if kind == "reset":
            request.transport.abort()
            await asyncio.sleep(0)
        if kind in ("restart", "foreign"):  # and the request succeeds
            self.restart(f"instance {time.monotonic_ns()}") if kind == "restart" else self._overwrite()
            return None
        if kind == "lie" and request.path == "/collective_rpc":
            return web.json_response({"results": [None]})
        if kind == "lie" and request.path == "/v1/load_lora_adapter":
            return web.Response(body=b"Success: LoRA adapter added successfully.")
        if kind == "page":
            return web.Response(text="<html>Sign in</html>", content_type="text/html")
        texts = {"half": '{"choices": [{', "object": "{}", "nonsense": '{"choices": [{"token_ids": [99]}]}'}
        text = texts.get(kind, '{"error": {"message": "a lie"}}')
        return web.Response(text=text, content_type="application/json")

    def _overwrite(self) -> None:
        """Change the weights, as another run on the same server does."""
        for model in self.served.values():
            for parameter in model.parameters():
                parameter.data += 0.05

    async def _sample(self, call) -> web.StreamResponse:
        response = await self._fail("/v1/completions", call.request)
        if response is not None:
            return response
        held = self.served.get(call.model)
        parameters = [] if held is None else held.named_parameters()
        call.weights = fingerprint(p for name, p in parameters if call.model == "base" or "lora_" in name)
        choices = choices_of(call, random_texts(call, 0.4))
        for choice in choices:
            logprobs = choice["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = [logprob_of(call.number)] * len(logprobs)
            choice["logprobs"].pop("top_logprobs")
            choice["logprobs"]["top_logprobs"] = [None] * len(logprobs)
        return web.json_response({"choices": choices})

    async def _read_or_fail(self, request: web.Request) -> web.StreamResponse | None:
        return await self._fail(request.path, request)

    async def _control_or_fail(self, request: web.Request, payload: dict) -> web.StreamResponse | None:
        if request.path == "/next":
            self._begin(self.faults[payload["run"]])
            self.met.append(None)
            return web.json_response({})
        return await self._fail(request.path, request)

    async def _check_weights(self, request: web.Request) -> web.StreamResponse | None:
        return await self._fail("weight check", request)


def logprob_of(number: int) -> float:
    return -1.0 - number / 10_000


def call_number(logprob: float) -> int:
    return round((-1.0 - logprob) * 10_000)
