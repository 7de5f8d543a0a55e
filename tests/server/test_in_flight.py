"""Many requests at once: all of a batch are in flight, waiting in the queue is not a failure, memory and threads stay flat."""

import asyncio
import json
import sys
import threading
import time

import pytest
from aiohttp import web

from ada_trl.vllm import transport
from ada_trl.vllm.client import TokenLogprobs
from ada_trl.vllm.requested_batch import ROLLOUTS_PER_REQUEST, _requests
from ada_trl.vllm.response_validation import parse
from ada_trl.vllm.transport import max_connections

from ..helpers import prompt_dataset
from .fake import TOKENIZER, WRONG, FakeServer, answer, half_right
from .helpers import UNIFORM, build, fails, stall


SUMS = [f"{a}+{b}=" for a in range(16) for b in range(16)]
ROWS = [TOKENIZER(text)["input_ids"] for text in SUMS]


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def generation(server, tmp_path):
    vllm = build(tmp_path, server, vllm_request_timeout=1.5).vllm_generation
    yield vllm
    vllm.close()


def all_at_once(server, number, threads):
    """Respond once `number` prompts are in flight, and record the number of threads."""

    async def behave(call):
        while server.most_in_flight < number:
            await asyncio.sleep(0.01)
        threads.append(threading.active_count())
        return answer(call, [WRONG] * call.n)

    return behave


@pytest.mark.parametrize("mode", [UNIFORM, {"max_rounds": 1}], ids=["uniform", "seq"])
def test_all_prompts_of_a_step_are_in_flight_without_a_thread_each(mode, tmp_path, server):
    threads, before = [], threading.active_count()
    server.behave = all_at_once(server, len(SUMS), threads)
    dataset = prompt_dataset(1).from_dict({"prompt": SUMS})
    options = {"per_device_train_batch_size": 4 * len(SUMS), "vllm_request_timeout": 60, "num_generations": 4}
    build(tmp_path, server, dataset=dataset, **options | mode).train()
    assert server.most_in_flight == len(SUMS)
    assert max(threads) <= before + 4


def test_a_request_that_waits_behind_others_does_not_fail(server, generation):
    """Responses one after the other, which together take several times as long as the timeout."""
    turn = asyncio.Semaphore(1)

    async def behave(call):
        async with turn:
            await asyncio.sleep(0.05)
            return await half_right(call)

    server.behave, started = behave, time.monotonic()
    generation.generate([ids for ids in ROWS[:96] for _ in range(2)], None, 2)
    assert time.monotonic() - started > 2 * generation.request_timeout
    assert generation.vllm_client.transport.timeouts == 0


def test_requests_that_wait_for_a_stalled_server_fail_together(server, generation):
    async def behave(call):
        return await (half_right if call.number < 32 else stall)(call)

    server.behave, started = behave, time.monotonic()
    with fails(r"no response within vllm_request_timeout \(1.5 s\)"):
        generation.generate([ids for ids in ROWS for _ in range(2)], None, 2)
    assert 1.5 < time.monotonic() - started < 1.5 + 6
    assert generation.vllm_client.transport.timeouts == 1


def counting(server, numbers):
    async def read(request):
        if request.path == "/metrics":
            lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
            lines += [f'vllm:generation_tokens_total{{engine="{engine}"}} {next(numbers)}' for engine in (0, 1)]
            return web.Response(text="\n".join(lines), content_type="text/plain")

    return read


def test_a_server_that_processes_requests_of_other_ranks_is_not_stalled(server, generation):
    """No response arrives here for longer than the timeout."""

    async def behave(call):
        await asyncio.sleep(4.0)
        return await half_right(call)

    server.behave = behave
    server.read = counting(server, iter(range(100_000)))
    generation.generate([ROWS[0]] * 2 + [ROWS[1]] * 2, None, 2)
    assert generation.vllm_client.transport.timeouts == 0
    server.read = counting(server, iter(lambda: 7, None))
    with fails("no response within vllm_request_timeout"):
        generation.generate([ROWS[0]] * 2 + [ROWS[1]] * 2, None, 2)


def test_a_probe_without_response_is_no_missed_deadline(server, generation):
    async def read(request):
        if request.path == "/metrics":
            await asyncio.sleep(60)

    async def behave(call):
        await asyncio.sleep(2.6)
        return await half_right(call)

    server.behave, server.read = behave, read
    generation.vllm_client.request_timeout = 4.0
    generation.generate([ROWS[0]] * 2, None, 2)
    assert generation.vllm_client.transport.timeouts == 0 and not generation.vllm_client.transport.stalled


def test_prompts_share_requests_up_to_a_number_of_rollouts():
    def requests(*runs, images=None):
        rows = [([prompt], images) for prompt, number in enumerate(runs) for _ in range(number)]
        return [(prompts, number) for prompts, number, _ in _requests(rows)]

    assert ROLLOUTS_PER_REQUEST == 16
    assert requests(*[1] * 20) == [([[i] for i in range(16)], 1), ([[i] for i in range(16, 20)], 1)]
    assert requests(*[4] * 5) == [([[0], [1], [2], [3]], 4), ([[4]], 4)]
    assert requests(3, 3, 64, 1, 1, 3) == [([[0], [1]], 3), ([[2]], 64), ([[3], [4]], 1), ([[5]], 3)]
    assert requests(2, 2, images=["an image"]) == [([[0]], 2), ([[1]], 2)]
    assert requests() == []


def test_connections_stay_below_the_limit_on_open_files(monkeypatch):
    import resource

    for soft, expected in ((1024, 512), (100, 64), (10**6, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_connections() == expected


def test_more_requests_than_connections_are_all_answered(monkeypatch, server, generation):
    monkeypatch.setattr(transport, "MAX_CONNECTIONS", 2)
    generation.vllm_client.transport.close()  # the next request opens new connections

    async def behave(call):
        await asyncio.sleep(0.02)
        return await half_right(call)

    server.behave = behave
    _, completion_ids, _, _ = generation.generate([ids for ids in ROWS for _ in range(2)], None, 2)
    assert len(completion_ids) == 2 * len(ROWS)
    assert server.most_in_flight <= 2 * ROLLOUTS_PER_REQUEST / 2


def test_log_probabilities_are_read_as_lists_of_lists():
    values = [-0.1 * i for i in range(1, 2001)]
    sequence = TokenLogprobs(values)
    assert len(sequence) == 2000 and sequence[0] == (values[0],)
    assert list(sequence[1:3]) == [(values[1],), (values[2],)]
    for _ in range(2):
        assert [top[0] for top in sequence] == values
    assert sys.getsizeof(sequence._values) < 10 * len(values)  # bytes


def test_responses_are_parsed_with_nan_and_rejected_if_they_are_cut_off():
    content = {"choices": [{"logprob": -0.1234567890123456, "text": "ü", "id": 2**62}]}
    assert parse("application/json", json.dumps(content).encode()) == content
    assert str(parse("application/json", b'{"a": NaN}')["a"]) == "nan"
    with pytest.raises(json.JSONDecodeError):
        parse("application/json", b'{"choices": [{')
