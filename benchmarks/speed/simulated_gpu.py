"""
Server with vLLM's interface and the timing of a GPU with continuous batching, in a separate process.

A decoding step over B sequences takes `a + c * B`; at most `max_sequences` are decoded at once, the others wait, first
come, first served. The number of tokens of a completion is lognormal. It depends on the prompt, the position among the
prompt's completions and how often the prompt was requested, so that all clients receive the same completions. The first
token of a completion is 1 with the prompt's pass rate, else 0.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from aiohttp import web


MEDIAN_TOKENS, TAIL = 60, 0.8  # of the lognormal distribution
VOCABULARY = 32_000
ROOT = Path(__file__).parents[2]


class SimulatedGPU:
    """
    Args:
        a (`float`), c (`float`):
            Seconds of a decoding step, and of each sequence in it.
        max_sequences (`int`):
            Decoded at once.
        length (`int`):
            Tokens of every completion; `0` for heavy-tailed lengths.
        power (`float`):
            Pass rates are uniformly distributed numbers to this power.
    """

    def __init__(self, a: float, c: float, max_sequences: int, length: int, power: float):
        self.a, self.c, self.max_sequences, self.length, self.power = a, c, max_sequences, length, power
        self.waiting: deque[tuple[int, list]] = deque()  # tokens to generate, and the request's [pending, future]
        self.arrived = asyncio.Event()
        self.rounds: Counter = Counter()
        self.tokens = 0
        rng = np.random.default_rng(0)
        ids = rng.integers(2, VOCABULARY, size=2000)
        self.ids = [str(i) for i in ids]
        self.names = [f'"token_id:{i}"' for i in ids]
        self.values = [repr(float(v)) for v in -rng.exponential(size=2000)]
        self.tops = [f"{{{name}:{value}}}" for name, value in zip(self.names, self.values, strict=True)]

    async def decode(self) -> None:
        running, remaining, now = [], np.zeros(0, dtype=np.int64), time.monotonic()
        while True:
            if not running and not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
                now = time.monotonic()
            admitted = [
                self.waiting.popleft() for _ in range(min(self.max_sequences - len(running), len(self.waiting)))
            ]
            running += [request for _, request in admitted]
            remaining = np.concatenate([remaining, np.array([tokens for tokens, _ in admitted], dtype=np.int64)])
            now += self.a + self.c * len(running)  # of the modelled GPU, which this process does not hold up
            await asyncio.sleep(max(now - time.monotonic(), 0))
            remaining -= 1
            self.tokens += len(running)
            for i in np.flatnonzero(remaining == 0):
                running[i][0] -= 1
                if running[i][0] == 0 and not running[i][1].done():
                    running[i][1].set_result(None)
            # As in vLLM, a request ends when its client closes the connection.
            keep = [i for i in np.flatnonzero(remaining) if not running[i][1].cancelled()]
            running, remaining = [running[i] for i in keep], remaining[keep]

    async def complete(self, request: web.Request) -> web.Response:
        payload = await request.json()
        choices = []
        for ids in payload["prompt"]:
            key = tuple(ids)
            rng = np.random.default_rng([*ids, self.rounds[key]])
            self.rounds[key] += 1
            lengths = np.minimum(
                MEDIAN_TOKENS * np.exp(TAIL * rng.standard_normal(payload["n"])), payload["max_tokens"]
            )
            passed = rng.random(payload["n"]) < np.random.default_rng(ids).random() ** self.power  # the pass rate
            choices += [(ids, max(int(length), 1), int(p)) for length, p in zip(lengths, passed, strict=True)]
        if self.length:
            choices = [(ids, self.length, first) for ids, _, first in choices]
        state = [len(choices), asyncio.get_running_loop().create_future()]
        self.waiting.extend((length, state) for _, length, _ in choices)
        self.arrived.set()
        await state[1]
        body = ",".join(self.choice(i, *choice) for i, choice in enumerate(choices))
        return web.Response(text=f'{{"id":"cmpl","choices":[{body}]}}', content_type="application/json")

    def choice(self, index: int, prompt_ids: list[int], length: int, first: int) -> str:
        """As vLLM's, the completion's text apart."""
        name, value = f'"token_id:{first}"', self.values[0]
        tokens = ",".join([name, *self.names[1:length]])
        values, tops = ",".join(self.values[:length]), ",".join([f"{{{name}:{value}}}", *self.tops[1:length]])
        offsets = ",".join(map(str, range(0, 12 * length, 12)))
        logprobs = f'"tokens":[{tokens}],"token_logprobs":[{values}],"top_logprobs":[{tops}],"text_offset":[{offsets}]'
        return (
            f'{{"index":{index},"text":"{"token " * length}","logprobs":{{{logprobs}}},"finish_reason":"stop",'
            f'"stop_reason":null,"token_ids":[{",".join([str(first), *self.ids[1:length]])}],"prompt_logprobs":null,'
            f'"prompt_token_ids":[{",".join(map(str, prompt_ids))}]}}'
        )

    async def read(self, request: web.Request) -> web.Response:
        model = {"max_model_len": 8192, "logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}
        config = {"model_config": model, "weight_transfer_config": None, "lora_config": None, "parallel_config": {}}
        if request.path == "/metrics":
            return web.Response(text=f"vllm:generation_tokens_total {self.tokens}")
        return web.json_response(
            {
                "/health": {},
                "/v1/models": {"data": [{"id": "simulated"}]},
                "/server_info": {"vllm_config": config | {"instance_id": "1"}, "vllm_env": {}},
            }[request.path]
        )

    async def reset(self, request: web.Request) -> web.Response:
        self.rounds.clear()
        return web.json_response({})


async def serve(arguments: argparse.Namespace) -> None:
    gpu = SimulatedGPU(arguments.a, arguments.c, arguments.max_sequences, arguments.length, arguments.power)
    app = web.Application(client_max_size=2**30)
    for path in ("/health", "/v1/models", "/server_info", "/metrics"):
        app.router.add_get(path, gpu.read)
    app.router.add_post("/v1/completions", gpu.complete)
    app.router.add_post("/reset", gpu.reset)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await gpu.decode()


@contextlib.contextmanager
def running(**options: float) -> Iterator[str]:
    """Run a server in a separate process and yield its address."""
    words = [sys.executable, "-m", "benchmarks.speed.simulated_gpu"]
    words += [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", type=float, default=0.020)
    parser.add_argument("--c", type=float, default=0.00005)
    parser.add_argument("--max_sequences", type=int, default=1024)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--power", type=float, default=1.0)
    asyncio.run(serve(parser.parse_args()))
