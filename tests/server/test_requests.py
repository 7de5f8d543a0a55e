"""
Requests: any number in flight, retried if they may succeed, else one error on time that says why and leaves nothing
behind.
"""

import asyncio
import itertools
import json
import random
import re
import resource
import socket
import threading
import time

import pytest
import torch
from aiohttp import web

from ada_trl.vllm import transport
from ada_trl.vllm.client import TimeoutVLLMClient
from ada_trl.vllm.requested_batch import ROLLOUTS_PER_REQUEST, split_rows
from ada_trl.vllm.responses import InvalidResponseError, parse, read_completions
from ada_trl.vllm.transport import max_connections

from ..helpers import logs_of, prompt_dataset
from .fake import RIGHT, TOKENIZER, WRONG, Call, FakeServer, answer, choices_of, half_right
from .faults import Fault, FaultyServer
from .helpers import IN_TIME, UNIFORM, build, error_response, fail, fails, launch, page, reject, stall, train


ROWS = [TOKENIZER(f"{a}+{b}=")["input_ids"] for a in range(16) for b in range(16)]
MODES = pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def generation(server, tmp_path):
    vllm = build(tmp_path, server, vllm_request_timeout=1.5).vllm_generation
    yield vllm
    vllm.close()


def generate(generation, rows, copies=2):
    return generation.generate([ids for ids in rows for _ in range(copies)], None, copies)[1]


# Failures


async def wrong(call):
    return answer(call, [WRONG] * call.n)


async def reset(call):
    call.request.transport.abort()
    await asyncio.sleep(0)


async def truncate(call):
    whole = answer(call, [RIGHT] * call.n).text
    return web.Response(text=whole[: len(whole) // 2], content_type="application/json")


async def drip(call):
    """Send bytes at short intervals, without an end."""
    response = web.StreamResponse()
    await response.prepare(call.request)
    for _ in range(600):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


async def busy(call):
    return error_response("come back", 429)


async def engine_error(call):
    return web.json_response({"error": {"message": "the engine is asleep"}})


async def abort(call):
    choices = choices_of(call, [RIGHT, WRONG] * (call.n // 2))
    choices[-1]["finish_reason"] = "abort"
    return web.json_response({"choices": choices})


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (stall, r"no response within 1.5 s.*raise vllm_request_timeout"),
        (drip, "no response within 1.5 s"),
        (busy, "no response within 1.5 s; the last attempt .*come back"),
        (fail, r"500.*engine dead \(sent 5 times\).*Check its log"),
        (reject, "400: too long.*will do so again"),
        (reset, "failed: .*Check its log"),
        (truncate, "returned an invalid response"),
        (engine_error, "the engine is asleep"),
        (abort, "returned an invalid response: .*'abort'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_request_that_fails_raises_on_time(behaviour, message, server, generation):
    server.behave, started = behaviour, time.monotonic()
    with fails(f"{server.url}: rollouts are missing: .*{message}"):
        generate(generation, ROWS[:1])
    assert time.monotonic() - started < IN_TIME


@pytest.mark.parametrize("behaviour", [fail, reset, truncate, abort])
def test_a_temporary_failure_is_retried(behaviour, server, generation):
    async def behave(call):
        return await (half_right if call.round else behaviour)(call)

    server.behave = behave
    assert len(generate(generation, ROWS[:1])) == 2
    assert generation.vllm_client.transport.retries == 1


@pytest.mark.parametrize("failing_round", [0, 1])
def test_a_failed_round_of_one_prompt_stops_the_run(failing_round, tmp_path):
    async def behave(call):
        if call.prompt == "7+8=":
            return await (fail if call.round >= failing_round else wrong)(call)
        return await half_right(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server)
        before = [p.clone() for p in trainer.model.parameters()]
        with fails("rollouts of this step are missing.*engine dead"):
            trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_every_request_to_a_busy_server_is_retried(tmp_path):
    """More often than after other failures, of which one follows."""
    left = {"/collective_rpc": 6, "/v1/completions": 6, "/server_info": 6}
    statuses = itertools.cycle((408, 429, 503))

    def response(path):
        left[path] -= 1
        return error_response("busy", next(statuses)) if left[path] >= 0 else None

    async def completions(call):
        busy = response("/v1/completions")
        return busy or await (fail if left["/v1/completions"] == -1 else half_right)(call)

    async def others(request, payload=None):
        return response(request.path) if request.path in left else None

    train(tmp_path, FakeServer(completions, control=others, read=others), vllm_request_timeout=60, **UNIFORM)
    assert max(left.values()) < -1 + (left["/collective_rpc"] == -1)


@MODES
def test_repeated_requests_of_a_weight_sync_are_counted(mode, tmp_path):
    failures = iter([True, True])

    async def busy_at_first(request, payload):
        if request.path == "/collective_rpc" and next(failures, False):
            return error_response("busy", 503)

    trainer, _ = train(tmp_path, FakeServer(half_right, control=busy_at_first), vllm_request_timeout=20, **mode)
    assert logs_of(trainer)[0]["ada/vllm/retries"] == 2


def test_weights_that_are_rejected_while_trl_waits_in_the_broadcast_are_logged_at_once(caplog):
    async def rejects(request, payload):
        return error_response("shapes differ", 400) if request.path == "/update_weights" else None

    with FakeServer(control=rejects) as server:
        client = TimeoutVLLMClient(server.url, request_timeout=30.0)
        with fails("shapes differ"):  # in a thread of TRL's
            client._post(f"{client.base_url}/update_weights", json={"update_info": {}})
        client.transport.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "shapes differ" in record.message and "NCCL broadcast" in record.message


# Responses with status 200


def alter(*path, value):
    """A function that sets an entry of a choice."""

    def change(choices):
        entry = choices[-1]
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choices: choices.pop(), "2 completions were requested, the server returned 1"),
        (lambda choices: choices[-1]["logprobs"]["token_logprobs"].pop(), "2 tokens has log-probabilities that are m"),
        (alter("logprobs", "token_logprobs", 0, value=float("nan")), "not finite"),
        (alter("token_ids", value=[]), "a completion has no tokens"),
        (alter("finish_reason", value="abort"), "not finished .*'abort'"),
        (alter("prompt_token_ids", value=[3, 4]), r"a completion of the tokens .* completed \[3, 4\]"),
    ],
)
def test_completions_that_would_be_trained_on_wrongly_are_rejected(change, message):
    request = {"prompt": [ROWS[0]], "n": 2, "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
    choices = choices_of(Call("0+0=", 2, 0, 0, 0, "base", None, prompt_ids=ROWS[0]), [RIGHT, WRONG])
    ids, logprobs = read_completions(request, {"choices": choices})
    assert ids == [choice["token_ids"] for choice in choices] and logprobs == [[-1.0, -1.0]] * 2
    change(choices)
    with pytest.raises(InvalidResponseError, match=message):
        read_completions(request, {"choices": choices})


@pytest.mark.parametrize(
    "mode",
    [{"max_rounds": 1}, {"baseline": "batch", "num_generations": 4, "samples_per_round": None, "max_rounds": None}],
)
def test_a_log_probability_of_none_is_neutral(mode, tmp_path):
    """As in GRPOTrainer: the token has the ratio 1. vLLM sends `null` for NaN."""

    async def behave(call):
        choices = choices_of(call, [RIGHT if i % 2 else WRONG for i in range(call.n)])
        for choice in choices:
            choice["logprobs"]["token_logprobs"][0] = None
        return web.json_response({"choices": choices})

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server, **mode)
        trainer.train()
    (batch,) = trainer.batches
    assert batch["sampling_per_token_logps"].isnan().any() and batch["importance_sampling_ratio"].isfinite().all()
    assert any(logs.get("grad_norm") for logs in trainer.state.log_history)


def test_responses_are_parsed_with_nan_and_rejected_if_they_are_cut_off():
    content = {"choices": [{"logprob": -0.1234567890123456, "text": "ü", "id": 2**62}]}
    assert parse("application/json", json.dumps(content).encode()) == content
    assert str(parse("application/json", b'{"a": NaN}')["a"]) == "nan"
    with pytest.raises(json.JSONDecodeError):
        parse("application/json", b'{"choices": [{')


# At the start


def test_the_start_without_a_server(tmp_path):
    with FakeServer() as server:
        pass
    with fails("no vLLM server responded within .* vllm_server_base_url") as error:
        build(tmp_path, server)
    assert "checkpoint" not in str(error.value)


async def absent():
    return web.json_response({"detail": "Not Found"}, status=404)


async def misshapen():
    return web.json_response({"vllm_config": "VllmConfig(model=…)"})


@pytest.mark.parametrize(
    ("path", "response", "message"),
    [
        ("/health", page, "web page.*correct|web page.*vllm_server_base_url"),
        ("/health", absent, "404.*vllm_server_base_url"),
        ("/server_info", misshapen, "invalid response.*vllm_server_base_url"),
        ("/server_info", absent, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_another_kind_of_server_is_rejected_at_once(path, response, message, tmp_path):
    async def read(request):
        return await response() if request.path == path else None

    with FakeServer(read=read) as server:
        started = time.monotonic()
        with fails(message) as error:
            build(tmp_path, server, vllm_server_timeout=240.0, vllm_request_timeout=60.0)
    assert time.monotonic() - started < IN_TIME
    assert server.url in str(error.value)


def test_a_name_lookup_that_takes_long_has_the_same_deadline(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(2))
    with fails("/health received no response within 0.5 s"):
        TimeoutVLLMClient("http://nowhere.test:8000", request_timeout=0.5)


# Many requests at once


@pytest.mark.parametrize("mode", [UNIFORM, {"max_rounds": 1}], ids=["uniform", "seq"])
def test_all_prompts_of_a_step_are_in_flight_without_a_thread_each(mode, tmp_path, server):
    threads, before = [], threading.active_count()

    async def all_at_once(call):
        while server.most_in_flight < len(ROWS):
            await asyncio.sleep(0.01)
        threads.append(threading.active_count())
        return answer(call, [WRONG] * call.n)

    server.behave = all_at_once
    dataset = prompt_dataset(1).from_dict({"prompt": TOKENIZER.batch_decode(ROWS)})
    options = {"per_device_train_batch_size": 4 * len(ROWS), "vllm_request_timeout": 60, "num_generations": 4}
    build(tmp_path, server, dataset=dataset, **options | mode).train()
    assert server.most_in_flight == len(ROWS)
    assert max(threads) <= before + 4


def test_a_request_that_waits_behind_others_does_not_fail(server, generation):
    """Responses one after the other, which together take several times as long as the timeout."""
    turn = asyncio.Semaphore(1)

    async def behave(call):
        async with turn:
            await asyncio.sleep(0.05)
            return await half_right(call)

    server.behave, started = behave, time.monotonic()
    generate(generation, ROWS[:96])
    assert time.monotonic() - started > 2 * generation.request_timeout
    assert generation.vllm_client.transport.timeouts == 0


def test_requests_that_wait_for_a_stalled_server_fail_together(server, generation):
    async def behave(call):
        return await (half_right if call.number < 32 else stall)(call)

    server.behave, started = behave, time.monotonic()
    with fails(r"no response within 1.5 s"):
        generate(generation, ROWS)
    assert 1.5 < time.monotonic() - started < 1.5 + 6
    assert generation.vllm_client.transport.timeouts == 1
    server.behave = half_right
    assert len(generate(generation, ROWS)) == 2 * len(ROWS), "The next requests have a deadline of their own."


def counting(numbers):
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
    server.read = counting(iter(range(100_000)))
    generate(generation, ROWS[:2])
    assert generation.vllm_client.transport.timeouts == 0
    server.read = counting(iter(lambda: 7, None))
    with fails("no response within 1.5 s"):
        generate(generation, ROWS[:2])


def test_metrics_without_response_are_no_missed_deadline(server, generation):
    async def read(request):
        if request.path == "/metrics":
            await asyncio.sleep(60)

    async def behave(call):
        await asyncio.sleep(1.1)
        return await half_right(call)

    server.behave, server.read = behave, read
    generate(generation, ROWS[:1])
    assert generation.vllm_client.transport.timeouts == 0


def test_prompts_share_requests_up_to_a_number_of_rollouts():
    def requests(*runs, images=None):
        rows = [([prompt], images) for prompt, number in enumerate(runs) for _ in range(number)]
        return [(prompts, number) for prompts, number, _ in split_rows(rows)]

    assert ROLLOUTS_PER_REQUEST == 16
    assert requests(*[1] * 20) == [([[i] for i in range(16)], 1), ([[i] for i in range(16, 20)], 1)]
    assert requests(*[4] * 5) == [([[0], [1], [2], [3]], 4), ([[4]], 4)]
    assert requests(3, 3, 64, 1, 1, 3) == [([[0], [1]], 3), ([[2]], 64), ([[3], [4]], 1), ([[5]], 3)]
    assert requests(2, 2, images=["an image"]) == [([[0]], 2), ([[1]], 2)]
    assert requests() == []


def test_connections_stay_below_the_limit_on_open_files(monkeypatch, server, generation):
    for soft, expected in ((1024, 512), (100, 64), (10**6, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_connections() == expected
    monkeypatch.setattr(transport, "MAX_CONNECTIONS", 2)
    generation.vllm_client.transport.close()  # the next request opens new connections

    async def behave(call):
        await asyncio.sleep(0.02)
        return await half_right(call)

    server.behave = behave
    assert len(generate(generation, ROWS)) == 2 * len(ROWS)
    assert server.most_in_flight <= 2 * ROLLOUTS_PER_REQUEST / 2


# A hundred trainings, each against a server with a random fault, on one process and on two

DEADLINE = 1.5
BUSY_MACHINE = 5  # times as long as the run without a fault
FIX = "(?i)check its log|correct vllm_server_base_url|use a dedicated server|restart it with|cannot be|resume the run"
AHEAD = 0.35  # share of the runs that generate one step ahead


def script(seed: int, runs: int, processes: int) -> tuple[list[Fault | None], list[dict]]:
    rng, faults, options = random.Random(seed), [None], []
    for number in range(runs + 1):
        sync = "lora" if rng.random() < 0.25 and number else "disk"
        mode = UNIFORM if rng.random() < 0.4 else {}
        if number and rng.random() < AHEAD:
            mode = UNIFORM | {"num_generations": 4}
            mode |= {"baseline": rng.choice(("batch", "pool")), "max_staleness": 1, "max_steps": 3}
        common = {"vllm_weight_sync": sync, "per_device_train_batch_size": 16 // processes, "samples_per_round": 4}
        options.append(common | {"max_rounds": 3, "max_steps": 2, "vllm_request_timeout": DEADLINE} | mode)
        if number:
            faults.append(Fault.draw(rng, sync))
    return faults, options


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "runs"), [(1, 65), (2, 40)])
def test_every_row_comes_from_the_right_weights_or_all_ranks_raise_the_same_error(processes, runs, tmp_path):
    faults, options = script(processes, runs, processes)
    with FaultyServer(faults) as server:
        instructions = {"url": server.url, "runs": options, "limit": 240}
        ranks = launch(processes, tmp_path / "runs", instructions, "tests.server.fault_worker", seconds=850)
    assert all(len(outcomes) == runs + 1 for outcomes in ranks)
    normal = max(outcomes[0]["seconds"] for outcomes in ranks)
    assert all(outcomes[0]["error"] is None and outcomes[0]["rows"] for outcomes in ranks)
    wrong, errors = [], 0
    for fault, met, *outcomes in zip(faults, server.met, *ranks, strict=True):
        problems = list(check(fault, outcomes, server, met, normal))
        wrong += [(fault, problem) for problem in problems]
        errors += outcomes[0]["error"] is not None
    assert not wrong, "\n".join(map(str, wrong))
    assert server.left == []
    assert 0.2 * runs < errors < 0.9 * runs and sum(met is not None for met in server.met) > 0.6 * runs


def check(fault: Fault | None, outcomes: list[dict], server: FaultyServer, met: float | None, normal: float):
    errors = [outcome["error"] for outcome in outcomes]
    if any(errors) and not all(errors):
        yield f"one-sided: {errors}"
    for error in filter(None, errors):
        if server.url not in error or not re.search(FIX, error):
            yield f"no address or fix: {error}"
    for outcome in outcomes:
        rows = [(server.completions[number].weights, ours) for number, ours in outcome["rows"]]
        if any(abs(theirs - ours) > 1e-9 * ours for theirs, ours in rows):
            yield f"trained on other weights, error {outcome['error']}"
        # The files of an adapter that cannot be unloaded stay.
        stuck = fault is not None and fault.path == "/v1/unload_lora_adapter" and fault.number > 2
        if outcome["left"] and not stuck:
            yield f"left behind: {outcome['left']}"
        # The fault may stall two requests in a row: a rollout, and unloading the adapter.
        if met is not None and outcome["ended"] - met > 2 * DEADLINE + 5 + BUSY_MACHINE * normal:
            yield f"{outcome['ended'] - met:.1f} seconds, {normal:.1f} without a fault"
