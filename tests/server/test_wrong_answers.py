"""Answers that are not vLLM's, or not to what was asked: said by name, and never trained on."""

import time

import pytest
from aiohttp import web

from ..helpers import logs_of, tiny_config, tiny_tokenizer
from .fake import RIGHT, WRONG, FakeServer, answer, choices_of, half_right
from .helpers import IN_TIME, UNIFORM, build, fails, our_threads, page


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("ada_trl.vllm.transport.BACKOFF_SECONDS", 0.02)


def altered(change):
    async def behave(call):
        choices = choices_of(call, [RIGHT, WRONG] * (call.n // 2))
        change(choices[-1])
        return web.json_response({"choices": choices})

    return behave


def shorten(choice):
    choice["logprobs"]["token_logprobs"].pop()


def lengthen(choice):
    choice["token_ids"] = [3] * 120


def abort(choice):
    choice["finish_reason"] = "abort"


def other_prompt(choice):
    choice["prompt_token_ids"] = [3, 4]


def beyond_the_vocabulary(choice):
    choice["token_ids"][0] = 14


def far_beyond(choice):
    choice["token_ids"][0] = 10**30


def negative(choice):
    choice["token_ids"][0] = -1


def no_logprobs(choice):
    choice["logprobs"] = None


def nan(choice):
    choice["logprobs"]["token_logprobs"][0] = float("nan")


def empty(choice):
    choice["token_ids"] = []


def of_other_tokens(choice):
    choice["logprobs"]["tokens"][0] = "token_id:13"


BROKEN = [
    (shorten, "2 tokens has 1 log-prob"),
    (lengthen, "120 tokens, at most 5"),
    (abort, "not finished .*'abort'"),
    (other_prompt, r"asked to complete the tokens .* completed \[3, 4\]"),
    (beyond_the_vocabulary, "token 14.*vocabulary has 14"),
    (far_beyond, "vocabulary has 14|not understood"),
    (negative, "not understood"),
    (no_logprobs, "log-probabilities of a completion are null"),
    (nan, "not finite"),
    (empty, "is empty"),
    (of_other_tokens, "of other tokens"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_broken_answers_are_asked_for_again_and_then_say_what_was_wrong(change, message, tmp_path):
    first = []

    async def once(call):
        first.append(call)
        return await (altered(change) if len(first) == 1 else half_right)(call)

    with FakeServer(once) as server:
        trainer = build(tmp_path / "once", server, vllm_request_timeout=20)
        trainer.train()
        assert logs_of(trainer)[0]["ada/vllm/retries"] == 1
        server.behave = altered(change)
        for mode in (UNIFORM, {}):
            trainer = build(tmp_path / str(len(mode)), server, vllm_request_timeout=20, **mode)
            with fails(f"answered wrongly: .*{message}") as error:
                trainer.train()
            assert server.url in str(error.value)


def test_broken_answers_of_a_later_round_stop_the_run_too(tmp_path):
    async def behave(call):
        return await altered(abort)(call) if call.round else answer(call, [WRONG] * call.n)

    with FakeServer(behave) as server, fails("'abort'"):
        build(tmp_path, server, vllm_request_timeout=20).train()


def test_the_servers_own_error_is_quoted(tmp_path):
    async def behave(call):
        return web.json_response({"error": {"message": "the engine is asleep"}})

    with FakeServer(behave) as server, fails("the engine is asleep"):
        build(tmp_path, server, vllm_request_timeout=20).train()


# What is not the right server


def reading(path, response):
    async def read(request):
        return await response() if request.path == path else None

    return read


async def empty_object():
    return web.json_response({})


async def absent():
    return web.json_response({"detail": "Not Found"}, status=404)


async def misshapen():
    return web.json_response({"vllm_config": "VllmConfig(model=…)"})


@pytest.mark.parametrize(
    ("path", "response", "message"),
    [
        ("/health", page, "no vLLM server has answered.*web page"),
        ("/health", absent, "no vLLM server has answered.*404"),
        ("/v1/models", empty_object, "lists no model"),
        ("/v1/models", page, "web page"),
        ("/server_info", misshapen, "does not describe a vLLM server"),
        ("/server_info", page, "web page"),
    ],
)
def test_what_is_no_vllm_server_is_said_at_once(path, response, message, tmp_path):
    with FakeServer(read=reading(path, response)) as server:
        started = time.monotonic()
        with fails(message) as error:
            build(tmp_path, server, vllm_server_timeout=240.0, vllm_request_timeout=60.0)
    assert time.monotonic() - started < IN_TIME
    assert server.url in str(error.value) and "correct vllm_server_base_url" in str(error.value)
    assert our_threads() == []


@pytest.mark.parametrize("what", ["sizes", "tokens"])
def test_another_model_is_refused_at_the_start(what, tmp_path):
    with FakeServer() as server:
        if what == "sizes":
            tiny_config(tiny_tokenizer(), vocab_size=200).save_pretrained(tmp_path / "other")
            server.info["vllm_config"]["model_config"]["model"] = str(tmp_path / "other")
        else:
            server.tokenizer = lambda text, **_: {"input_ids": list(range(20))}
        message = "vocab_size 200, not 14" if what == "sizes" else "other tokens for"
        with fails(f"serves another model.*{message}.*Start it from the model"):
            build(tmp_path, server)
    assert server.proofs == 0, "Token ids beyond its vocabulary end vLLM."


def test_another_dtype_is_warned_of(tmp_path, caplog):
    with FakeServer() as server:
        server.info["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
        build(tmp_path, server).train()
    assert sum("computes in bfloat16, the trainer in float32" in record.message for record in caplog.records) == 1
