"""A server with vLLM's interface and a script instead of a model, for faults and delays on demand."""

import asyncio
import base64
import copy
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO

import torch
from aiohttp import web
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..helpers import PROMPTS, tiny_chat_model, tiny_model, tiny_tokenizer


TOKENIZER = tiny_tokenizer()
RIGHT, WRONG = "1", "0"
RATES = dict(zip(PROMPTS, (0.95, 0.5, 0.1, 0.0), strict=True))


@dataclass
class Call:
    """A request for completions."""

    prompt: str
    n: int
    round: int  # 0 for the prompt's first request
    draw: int  # number of rollouts of the prompt in earlier requests
    number: int  # over all prompts
    model: str
    request: web.Request
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    features: dict | None = None  # of the prompt's images
    prompt_ids: list[int] = field(default_factory=list)
    weights: float = 0.0  # fingerprint of the server's weights at the request
    scored_by: PreTrainedModel | None = None  # model of the completions' log-probabilities; by default they are -1

    def logprobs(self, ids: list[int]) -> list[float]:
        if self.scored_by is None:
            return [-1.0] * len(ids)
        with torch.no_grad():
            logprobs = self.scored_by(torch.tensor([self.prompt_ids + ids])).logits[0, :-1].log_softmax(-1)
        return logprobs[-len(ids) :].gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def color_of(call: Call) -> tuple[int, int, int]:
    """The color of the first pixel of the prompt's image."""
    (url,) = call.features["kwargs_data"]["image"]
    return Image.open(BytesIO(base64.b64decode(url.split(",")[1]))).getpixel((0, 0))


def choices_of(call: Call, texts: list[str]) -> list[dict]:
    """The completions `texts`, in the layout of the requested endpoint."""
    choices = []
    for index, text in enumerate(texts):
        ids = [*call.tokenizer(text)["input_ids"], call.tokenizer.eos_token_id]
        tokens = [f"token_id:{i}" for i in ids]
        values = call.logprobs(ids)
        tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        if call.features is not None:
            logprobs = {"content": [{"token": t, "logprob": -1.0, "top_logprobs": []} for t in tokens]}
        choice = {"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        choices.append(choice | {"prompt_token_ids": call.prompt_ids})
    return choices


def answer(call: Call, texts: list[str]) -> web.Response:
    return web.json_response({"choices": choices_of(call, texts)})


async def half_right(call: Call) -> web.Response:
    return answer(call, [RIGHT, WRONG] * (call.n // 2))


def reward(completions: list[str], **kwargs) -> list[float]:
    return [float(completion.startswith(RIGHT)) for completion in completions]


Respond = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class FakeServer:
    """
    Serves on a free port of this machine while the context is open.

    It is started from `model` (by default the tiny one that these tests train), loads the weights that it is sent, and
    computes the log-probabilities of prompts from them. Functions of the tests may respond instead: `behave` to
    requests for completions, and before the default response, if they return one, `control` to other POST requests,
    `render` to images, `check_weights` to the weight check, and `read` to GET requests.
    """

    behave: Callable[[Call], Awaitable[web.StreamResponse]] = half_right
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    model: PreTrainedModel | None = None
    truthful: bool = False  # whether the log-probabilities of completions are those of the model
    control: Callable[[web.Request, dict], Awaitable[web.StreamResponse | None]] | None = None
    render: Respond | None = None
    check_weights: Respond | None = None
    read: Respond | None = None
    weight_checks: int = 0
    completions: list[Call] = field(default_factory=list)
    controls: list[tuple[str, dict]] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight_at_checks: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.rounds, self.draws = Counter(), Counter()  # requests and rollouts by prompt
        self.numbers = itertools.count()
        self.in_flight = 0
        if self.model is None:
            self.model = tiny_model() if self.tokenizer is TOKENIZER else tiny_chat_model(self.tokenizer)
        # The trainer's may be this object, and has its padding set while it tokenizes a batch, in another thread.
        self.tokenizer = copy.deepcopy(self.tokenizer)
        self.info = {
            "vllm_config": {
                "model_config": {
                    "logprobs_mode": "processed_logprobs",
                    "dtype": "torch.float32",
                    "quantization": None,
                },
                "weight_transfer_config": None,
                "lora_config": {"max_lora_rank": 16},
            },
        }
        self.restart("first")

    def restart(self, instance: str) -> None:
        """Become a new process, with the first weights and without adapters."""
        self.served = {"base": copy.deepcopy(self.model).eval()}
        self.info["vllm_config"]["instance_id"] = instance

    def load(self, path: str) -> None:
        state = load_file(f"{path}/model.safetensors")
        self.served["base"] = copy.deepcopy(self.model).eval()
        assert not self.served["base"].load_state_dict(state, strict=False).unexpected_keys

    def load_adapter(self, name: str, path: str) -> None:
        self.served[name] = PeftModel.from_pretrained(copy.deepcopy(self.served["base"]), path).eval()

    @torch.no_grad()
    def _prompt_logprobs(self, model: str, ids: list[int]) -> list[dict | None]:
        logprobs = self.served[model](torch.tensor([ids])).logits[0].log_softmax(-1)
        return [None] + [{str(b): {"logprob": logprobs[i, b].item()}} for i, b in enumerate(ids[1:])]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        if payload["model"] not in self.served:
            return web.json_response({"error": {"message": f"no model {payload['model']}"}}, status=404)
        if "prompt_logprobs" in payload:
            return await self._weight_check(request, payload)
        features, sampling = payload.get("features"), payload.get("sampling_params", payload)
        if features:
            return await self._complete(request, payload["model"], sampling["n"], payload["token_ids"], features)
        answers = [self._complete(request, payload["model"], sampling["n"], ids) for ids in payload["prompt"]]
        return _merge(await asyncio.gather(*answers))

    async def _complete(
        self, request: web.Request, model: str, n: int, prompt_ids: list[int], features: dict | None = None
    ) -> web.StreamResponse:
        if model not in self.served:  # another prompt of this request has restarted the server
            return web.json_response({"error": {"message": f"no model {model}"}}, status=404)
        prompt = self.tokenizer.decode(prompt_ids)
        position = (self.rounds[prompt], self.draws[prompt], next(self.numbers))
        call = Call(prompt, n, *position, model, request, self.tokenizer, features, prompt_ids)
        call.weights = fingerprint(self.served[call.model].parameters())
        call.scored_by = self.served[call.model] if self.truthful else None
        self.rounds[prompt] += 1
        self.draws[prompt] += n
        self.completions.append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.behave(call)
        finally:
            self.in_flight -= 1

    async def _weight_check(self, request: web.Request, payload: dict) -> web.StreamResponse:
        self.weight_checks += 1
        self.in_flight_at_checks.append(self.in_flight)
        if self.check_weights is not None and (response := await self.check_weights(request)) is not None:
            return response
        (ids,) = payload["prompt"]
        choice = {"token_ids": [0], "finish_reason": "length", "prompt_token_ids": ids, "logprobs": None}
        return await _json({"choices": [choice | {"prompt_logprobs": self._prompt_logprobs(payload["model"], ids)}]})

    async def _render(self, request: web.Request) -> web.StreamResponse:
        """Process the images of a message; as in vLLM, their slots do not refer to the prompt."""
        self.in_flight += 1
        try:
            if self.render is not None and (response := await self.render(request)) is not None:
                return response
        finally:
            self.in_flight -= 1
        (message,) = (await request.json())["messages"]
        urls = [part["image_url"]["url"] for part in message["content"]]
        slots = [{"offset": 0, "length": 1} for _ in urls]
        return await _json({"features": {"mm_placeholders": {"image": slots}, "kwargs_data": {"image": urls}}})

    async def _control(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json() if request.can_read_body else {}
        self.controls.append((request.path, payload))
        if self.control is not None and (response := await self.control(request, payload)) is not None:
            return response
        return await self.obey(request.path, payload)

    async def obey(self, path: str, payload: dict) -> web.Response:
        if path == "/collective_rpc":
            self.load(payload["kwargs"]["weights_path"])
            return await _json({"results": [None]})
        if path == "/reset_prefix_cache":
            return await _json({"success": True})
        name = payload["lora_name"]
        if path == "/v1/load_lora_adapter":
            self.load_adapter(name, payload["lora_path"])
        elif self.served.pop(name, None) is None:
            return web.json_response({"error": {"message": f"{name} cannot be found"}}, status=404)
        return web.Response(body=f"Success: LoRA adapter '{name}' is done with.".encode())

    async def _read(self, request: web.Request) -> web.StreamResponse:
        if self.read is not None and (response := await self.read(request)) is not None:
            return response
        if request.path == "/metrics":
            return web.Response(status=404)
        models = {"data": [{"id": name} for name in self.served]}
        return await _json({"/health": {}, "/v1/models": models, "/server_info": self.info}[request.path])

    async def _serve(self):
        app = web.Application()
        for path in ("/health", "/v1/models", "/server_info"):
            app.router.add_get(path, self._read)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_get("/metrics", self._read)
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
        """Die: connections are reset and rejected from now on."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()

    def __exit__(self, *exception) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _merge(answers: list[web.StreamResponse]) -> web.StreamResponse:
    """All choices of the prompts of a request, or the first response that is not a list of choices."""
    if len(answers) == 1:
        return answers[0]
    choices = []
    for answer in answers:
        try:
            choices += json.loads(answer.text)["choices"]
        except (AttributeError, LookupError, TypeError, ValueError):
            return answer
    return web.json_response({"choices": choices})


def fingerprint(parameters: Iterable[torch.Tensor]) -> float:
    """A number that identifies weights, whatever their names and order."""
    return sum(sorted(parameter.detach().double().abs().sum().item() for parameter in parameters))


async def _json(content: dict) -> web.Response:
    return web.Response(text=json.dumps(content), content_type="application/json")


def random_texts(call: Call, pass_rate: float, seed: int = 0) -> list[str]:
    rng = random.Random(f"{seed} {call.prompt} {call.round}")
    return [RIGHT if rng.random() < pass_rate else WRONG for _ in range(call.n)]


async def by_prompt(call: Call) -> web.Response:
    """Different completions for prompts of very different difficulty."""
    return answer(call, [f"{text}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])
