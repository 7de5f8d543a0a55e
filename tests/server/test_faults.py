"""Requests that fail: retried if they may succeed, else an error on time that says why and leaves nothing behind."""

import asyncio
import shutil
import socket
import threading
import time
from contextlib import closing

import pytest
import torch
from aiohttp import web
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl.vllm import transport
from ada_trl.vllm.client import TimeoutVLLMClient
from ada_trl.vllm.response_validation import InvalidResponseError, check_completions

from ..helpers import PROMPTS, logs_of, prompt_dataset, tiny_config, tiny_tokenizer
from .fake import RIGHT, TOKENIZER, WRONG, Call, FakeServer, answer, choices_of, half_right
from .helpers import IN_TIME, LORA, UNIFORM, build, error_response, fail, fails, page, reject, stall, train


MODES = pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])


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
        (stall, "no response within vllm_request_timeout"),
        (drip, "no response within vllm_request_timeout"),
        (busy, "within vllm_request_timeout.*come back"),
        (fail, "500.*engine dead|no response within"),
        (reject, "400: too long.*will do so again"),
        (reset, "failed|no response within"),
        (truncate, "failed|no response within"),
        (engine_error, "the engine is asleep"),
        (abort, "returned an invalid response: .*'abort'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_failed_first_round_stops_the_run(behaviour, message, tmp_path):
    async def behave(call):
        return await (behaviour if call.prompt == "7+8=" else half_right)(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server)
        before = [p.clone() for p in trainer.model.parameters()]
        started = time.monotonic()
        with fails(message) as error:
            trainer.train()
        assert time.monotonic() - started < IN_TIME
    fix = "will do so again" if behaviour is reject else "Check its log"
    for part in (server.url, "rollouts of this step are missing", fix):
        assert part in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@MODES
@pytest.mark.parametrize("behaviour", [fail, reset, truncate, abort])
def test_a_temporary_failure_is_retried(behaviour, mode, tmp_path):
    failed = set()

    async def behave(call):
        if call.prompt in failed:
            return await half_right(call)
        failed.add(call.prompt)
        return await behaviour(call)

    trainer, server = train(tmp_path, FakeServer(behave), vllm_request_timeout=20, **mode)
    requests = 1 if mode else 4  # with one round, the prompts of a batch share a request and fail together
    assert logs_of(trainer)[0]["ada/vllm/retries"] == requests
    assert logs_of(trainer)[0]["ada/samples_per_prompt/mean"] == 4


@pytest.mark.parametrize("behaviour", [fail, reset, truncate, stall])
def test_an_unavailable_server_costs_a_later_round_only(behaviour, tmp_path):
    async def behave(call):
        if call.prompt == "7+8=":
            return await (behaviour if call.round else wrong)(call)
        return await half_right(call)

    trainer, server = train(tmp_path, FakeServer(behave))
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/incomplete_pools"] == 1
    assert logs["ada/samples_per_prompt/max"] == 4
    assert logs["ada/frac_all_wrong"] == 0.25


@pytest.mark.parametrize("max_rounds", [3, 5])
def test_a_failed_round_that_is_not_needed_has_no_effect(max_rounds, tmp_path):
    """The first round of one prompt is slow, and its next rounds are requested speculatively."""

    async def behave(call):
        if call.prompt == "7+8=" and call.round:
            return await fail(call)
        if call.prompt == "7+8=":
            await asyncio.sleep(4)  # longer than the retries of the others
        return await half_right(call)

    dataset = Dataset.from_dict({"prompt": [*PROMPTS, *(f"{i}+1=" for i in range(4))]})
    options = {"per_device_train_batch_size": 32, "vllm_request_timeout": 20, "max_rounds": max_rounds}
    trainer, server = train(tmp_path, FakeServer(behave), dataset=dataset, **options)
    assert max(call.round for call in server.completions) >= 2, "Rounds were requested before they were needed."
    (logs,) = logs_of(trainer)
    assert logs["ada/frac_exit_condition_met"] == 1 and logs["ada/samples_per_prompt/max"] == 4
    assert logs["ada/vllm/incomplete_pools"] == 0 and logs["ada/vllm/wasted_rounds"] == 0


def test_a_failed_round_is_not_a_wasted_one(tmp_path):
    async def behave(call):
        if call.prompt == "7+8=":
            return await (fail if call.round else wrong)(call)
        return await half_right(call)

    trainer, _ = train(tmp_path, FakeServer(behave))
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/incomplete_pools"] == 1 and logs["ada/vllm/wasted_rounds"] == 0


@MODES
def test_repeated_requests_of_a_weight_sync_are_counted(mode, tmp_path):
    failures = iter([True, True])

    async def busy_at_first(request, payload):
        if request.path == "/collective_rpc" and next(failures, False):
            return error_response("busy", 503)

    trainer, _ = train(tmp_path, FakeServer(half_right, control=busy_at_first), vllm_request_timeout=20, **mode)
    assert logs_of(trainer)[0]["ada/vllm/retries"] == 2


def test_a_shorter_limit_is_not_called_by_the_name_of_the_option():
    async def slow(request):
        if request.path == "/server_info":
            await asyncio.sleep(20)

    with FakeServer(read=slow) as server:
        client = TimeoutVLLMClient(server.url, request_timeout=10)
        with client.limited_to(0.3), fails("received no response within 0.3 s"):
            client.read_server_info()
        client.transport.close()


@pytest.mark.parametrize(("behaviour", "message"), [(reject, "400.*too long"), (abort, "'abort'")])
def test_a_later_round_that_is_rejected_or_invalid_stops_the_run(behaviour, message, tmp_path):
    async def behave(call):
        return await (behaviour if call.round else wrong)(call)

    with FakeServer(behave) as server, fails(message):
        build(tmp_path, server, vllm_request_timeout=20).train()


@pytest.mark.parametrize("status", [408, 429, 503])
def test_every_request_to_a_busy_server_is_retried(status, tmp_path):
    left = {"/collective_rpc": 6, "/v1/completions": 6, "/server_info": 6}

    def response(path):
        left[path] -= 1
        return error_response("busy", status) if left[path] >= 0 else None

    async def completions(call):
        return (call.round and response("/v1/completions")) or await wrong(call)

    async def others(request, payload=None):
        return response(request.path) if request.path in left else None

    trainer, server = train(tmp_path, FakeServer(completions, control=others, read=others), vllm_request_timeout=60)
    assert max(left.values()) < 0
    assert logs_of(trainer)[0]["ada/vllm/incomplete_pools"] == 0


def test_busy_responses_use_up_no_retries(tmp_path, monkeypatch):
    """More of them than a request has retries, and then another failure."""
    monkeypatch.setattr(transport, "BACKOFF_SECONDS", 1e-6)
    monkeypatch.setattr(transport, "MAX_BACKOFF_SECONDS", 1e-6)
    statuses = iter([503] * 100 + [500])

    async def busy_and_broken(call):
        status = next(statuses, None)
        return await half_right(call) if status is None else error_response("not now", status)

    trainer, _ = train(tmp_path, FakeServer(busy_and_broken), vllm_request_timeout=60, **UNIFORM)
    assert next(statuses, None) is None and trainer.state.global_step == 1


# A server that stalls or dies is waited for once


def test_all_prompts_together_wait_for_one_deadline(tmp_path, caplog):
    """64 prompts, each of which would wait for the deadline by itself."""

    async def stalls_later(call):
        is_second_step = len(server.controls) > 2
        return await (stall if call.round or is_second_step else wrong)(call)

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.monotonic())

    with FakeServer(stalls_later) as server:
        dataset = prompt_dataset(1).from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]})
        options = {"per_device_train_batch_size": 256, "vllm_request_timeout": 2.0}
        trainer = build(tmp_path, server, dataset=dataset, max_steps=2, **options)
        trainer.add_callback(Clock())
        started = time.monotonic()
        with fails("no response within"):
            trainer.train()
    assert len(ends) == 1 and ends[0] - started < 2 * 2.0 + 10
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/incomplete_pools"] == 64 and logs["ada/samples_per_prompt/max"] == 4
    assert logs["ada/vllm/timeouts"] <= 4, "Those that were requested at the same time are counted once."
    assert (
        sum("3 requests to the vLLM server have failed in a row" in record.message for record in caplog.records) == 1
    )


def test_a_stalled_server_is_waited_for_once_at_the_end_of_a_step(tmp_path):
    """A later round, the weight check, the next step's request and unloading the adapter would each wait for a deadline."""

    async def stalls(call):
        if call.round:
            server.read = server.check_weights = server.control = stall
            await stall()
        return await wrong(call)

    with FakeServer(stalls, truthful=True) as server:
        trainer = build(tmp_path, server, vllm_request_timeout=6.0, max_steps=2, **LORA)
        started = time.monotonic()
        with fails("still has the weights|could not be sent"):
            trainer.train()
    assert trainer.state.global_step == 1
    assert time.monotonic() - started < 6.0 + 4 * 1.0 + 5
    shutil.rmtree(tmp_path / "vllm_weight_sync")  # it stays with the adapter that could not be unloaded


def test_death_in_the_second_round_finishes_the_step_and_stops_at_the_next(tmp_path, caplog):
    """The weight check is not possible any more: the rollouts' log-probabilities are compared instead."""

    async def behave(call):
        if call.round:
            threading.Thread(target=server.stop).start()
            await stall()
        return await (wrong if call.prompt == "7+8=" else half_right)(call)

    with FakeServer(behave, truthful=True) as server:
        trainer = build(tmp_path, server, max_steps=2)
        with fails("the weights could not be sent") as error:
            trainer.train()
    assert trainer.state.global_step == 1
    assert "rollouts that are trained on match the current policy" in caplog.text
    assert logs_of(trainer)[0]["ada/vllm/incomplete_pools"] == 1
    assert server.url in str(error.value)


# Responses with status 200 that are not vLLM's


def alter(*path, value):
    """A function that sets an entry of a choice."""

    def change(choices):
        entry = choices[-1]
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value

    return change


IDS = TOKENIZER("1+2=")["input_ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choices: choices.clear(), "no choices"),
        (lambda choices: choices.pop(), "2 completions were requested, the server returned 1"),
        (lambda choices: choices[-1]["logprobs"]["token_logprobs"].pop(), "2 tokens has 1 log-prob"),
        (alter("token_ids", value=[3] * 120), "120 tokens, at most 5"),
        (alter("token_ids", value=[]), "is empty"),
        (alter("token_ids", 0, value=14), "token 14.*vocabulary has 14"),
        (alter("token_ids", 0, value=10**30), "vocabulary has 14"),
        (alter("token_ids", 0, value=-1), "response is invalid"),
        (alter("finish_reason", value="abort"), "not finished .*'abort'"),
        (alter("prompt_token_ids", value=[3, 4]), r"a completion of the tokens .* completed \[3, 4\]"),
        (alter("logprobs", value=None), "log-probabilities of a completion are null"),
        (alter("logprobs", "token_logprobs", 0, value=float("nan")), "not finite"),
        (alter("logprobs", "tokens", 0, value="token_id:13"), "of other tokens"),
    ],
)
def test_invalid_completions_are_described(change, message):
    request = {"prompt": [IDS], "n": 2, "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
    choices = choices_of(Call("1+2=", 2, 0, 0, 0, "base", None, prompt_ids=IDS), [RIGHT, WRONG])
    check_completions(request, {"choices": choices}, vocab_size=14)
    change(choices)
    with pytest.raises(InvalidResponseError, match=message):
        check_completions(request, {"choices": choices}, vocab_size=14)


def test_completions_of_a_text_are_not_validated():
    """A script may send its own requests through the client; one prompt may be a string."""
    check_completions({"prompt": "1+2="}, {"choices": [{"text": "3"}]}, vocab_size=14)


def test_weights_that_are_rejected_while_trl_waits_in_the_broadcast_are_logged_at_once(caplog):
    async def rejects(request, payload):
        return error_response("shapes differ", 400) if request.path == "/update_weights" else None

    with FakeServer(control=rejects) as server:
        client = TimeoutVLLMClient(server.url, request_timeout=30.0)
        with closing(client.transport), fails("shapes differ"):  # in a thread of TRL's
            client._post(f"{client.base_url}/update_weights", json={"update_info": {}})
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "shapes differ" in record.message and "NCCL broadcast" in record.message


# At the start


def test_the_start_without_a_server(tmp_path):
    with FakeServer() as server:
        pass
    with fails("no vLLM server responded within .* vllm_server_base_url") as error:
        build(tmp_path, server)
    assert "checkpoint" not in str(error.value)


async def empty_object():
    return web.json_response({})


async def absent():
    return web.json_response({"detail": "Not Found"}, status=404)


async def misshapen():
    return web.json_response({"vllm_config": "VllmConfig(model=…)"})


@pytest.mark.parametrize(
    ("path", "response", "message"),
    [
        ("/health", page, "no vLLM server responded.*web page"),
        ("/health", absent, "no vLLM server responded.*404"),
        ("/v1/models", empty_object, "lists no model"),
        ("/v1/models", page, "web page"),
        ("/server_info", misshapen, "does not describe a vLLM server"),
        ("/server_info", page, "web page"),
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
    assert server.url in str(error.value) and "correct vllm_server_base_url" in str(error.value)


@pytest.mark.parametrize("differs", ["sizes", "tokens"])
def test_another_model_is_rejected_at_the_start(differs, tmp_path):
    with FakeServer() as server:
        if differs == "sizes":
            tiny_config(tiny_tokenizer(), vocab_size=200).save_pretrained(tmp_path / "other")
            server.info["vllm_config"]["model_config"]["model"] = str(tmp_path / "other")
        else:
            server.tokenizer = lambda text, **_: {"input_ids": list(range(20))}
        message = "vocab_size 200, not 14" if differs == "sizes" else "other tokens for"
        with fails(f"serves another model.*{message}.*Start it from the model"):
            build(tmp_path, server)
    assert server.weight_checks == 0, "Token ids beyond its vocabulary end vLLM."


def test_a_name_lookup_that_hangs_has_the_same_deadline(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(30))
    started = time.monotonic()
    with fails("nowhere.test"):
        TimeoutVLLMClient("http://nowhere.test:8000", request_timeout=1.0)
    assert time.monotonic() - started < 10


def test_server_info_is_read_on_all_ranks_or_on_none(tmp_path):
    """TRL's own second request, on the main process alone, would leave the others waiting if it failed."""
    paths = []

    async def count(request):
        paths.append(request.path)

    with FakeServer(read=count) as server:
        build(tmp_path, server).vllm_generation.close()
    assert paths.count("/server_info") == 1
