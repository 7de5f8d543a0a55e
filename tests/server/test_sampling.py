"""Sampling for `ada_trl.data` and `ada_trl.evaluate` from a vLLM server, scripted."""

import asyncio
import time

import pytest
from aiohttp import web

from ada_trl.measurement.arguments import EvaluationArguments, SamplingArguments
from ada_trl.measurement.evaluation import run
from ada_trl.measurement.samplers import Request, ServerSampler, same_model
from ada_trl.vllm.client import VLLMServerUnavailable

from ..helpers import tiny_model
from .fake import RIGHT, TOKENIZER, FakeServer, answer
from .helpers import fails, our_threads


SUMS = [f"{a}+{b}=" for a in range(3) for b in range(4)]


def sampler(server, model="base", **options):
    options = {"num_samples": 4, "vllm_server_base_url": server.url, "vllm_server_timeout": 5.0} | options
    return ServerSampler(model, TOKENIZER, SamplingArguments(**options))


def requests():
    return (Request(i, TOKENIZER(text)["input_ids"], seed=i) for i, text in enumerate(SUMS))


async def uneven(call):
    """The first prompts are the slowest."""
    await asyncio.sleep(0.02 * (len(SUMS) - call.number))
    return answer(call, [call.prompt] * call.n)


def test_every_prompt_is_completed_once_and_none_waits_for_another():
    with FakeServer(uneven) as server:
        ours = sampler(server, vllm_max_concurrent_requests=5)
        finished = list(ours.sample(requests()))
        ours.close()
    assert sorted(index for index, _ in finished) == list(range(len(SUMS)))
    for index, completions in finished:
        assert TOKENIZER.batch_decode(completions, skip_special_tokens=True) == [SUMS[index]] * 4
    assert finished[0][0] != 0
    assert server.most_in_flight == 5 and len(server.completions) == len(SUMS)
    assert our_threads() == []


def test_the_request_says_everything():
    payloads = []

    async def remember(call):
        payloads.append(await call.request.json())
        return answer(call, [RIGHT] * call.n)

    with FakeServer(remember) as server:
        ours = sampler(server, temperature=0.7, top_p=0.9, max_new_tokens=17)
        list(ours.sample([Request(0, TOKENIZER("1+2=")["input_ids"], seed=5)]))
        ours.close()
    expected = {"model": "base", "n": 4, "temperature": 0.7, "top_p": 0.9, "max_tokens": 17, "seed": 5}
    expected |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": None}
    expected |= {"prompt": [TOKENIZER("1+2=")["input_ids"]], "stop_token_ids": [TOKENIZER.eos_token_id]}
    assert payloads[0].items() >= expected.items()


def test_what_is_answered_before_a_failure_is_not_lost():
    async def refuse(call):
        if call.prompt == SUMS[3]:
            await asyncio.sleep(0.1)
            return web.json_response({"error": {"message": "too long"}}, status=400)
        await asyncio.sleep(0.0 if call.number < 4 else 60)
        return answer(call, [RIGHT] * call.n)

    with FakeServer(refuse) as server:
        ours, finished = sampler(server, vllm_max_concurrent_requests=4), []
        with fails("400: .*too long"):
            for index, _ in ours.sample(requests()):
                finished.append(index)
                time.sleep(0.3 if len(finished) == 1 else 0)  # answers and the refusal come in while this is stored
        ours.close()
    assert sorted(finished) == [0, 1, 2]
    assert our_threads() == []


def test_a_server_that_does_not_answer_is_given_up():
    async def stall(call):
        await asyncio.sleep(60)

    with FakeServer(stall) as server:
        ours = sampler(server, vllm_request_timeout=0.3)
        with pytest.raises(VLLMServerUnavailable, match="0.3 s"):
            list(ours.sample(requests()))
        ours.close()


def test_the_wrong_server_is_refused_with_both_names():
    with FakeServer() as server:
        with pytest.raises(ValueError, match="serves 'base', not 'org/other'.*--served-model-name org/other"):
            sampler(server, model="org/other")
    assert our_threads() == []


def test_a_model_is_known_by_its_name_or_its_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert same_model("org/model", "org/model")
    assert same_model("model", str(tmp_path / "model")) and same_model("./model/", "model")
    assert not same_model("model", "org/model") and not same_model("org/model", "model")
    assert not same_model("model", "")


def test_evaluation_survives_the_servers_death(tmp_path, monkeypatch):
    """The server dies in the middle of the second data set; the same command with a new server asks for the rest."""
    monkeypatch.chdir(tmp_path)
    TOKENIZER.save_pretrained("base")
    tiny_model().save_pretrained("base")
    for name, sums in (("first", SUMS[:5]), ("second", SUMS[5:])):
        lines = [f"{text},{sum(map(int, text[:-1].split('+')))}" for text in sums]
        (tmp_path / f"{name}.csv").write_text("\n".join(["problem,answer", *lines]) + "\n")

    async def one_in_four(call):
        if dying and call.number == 8:
            call.request.transport.abort()
        a, b = map(int, call.prompt[:-1].split("+"))
        return answer(call, [str(a + b), *["99"] * (call.n - 1)])

    def evaluate(server):
        options = {"models": ["base"], "datasets": ["first.csv", "second.csv"], "output_dir": str(tmp_path / "out")}
        options |= {"backend": "server", "vllm_server_base_url": server.url, "num_samples": 4, "max_new_tokens": 3}
        return run(
            EvaluationArguments(
                **options,
                prompt_format="plain",
                vllm_max_concurrent_requests=1,
                vllm_request_timeout=2.0,
            )
        )

    dying = True
    with FakeServer(one_in_four) as server:
        monkeypatch.setattr("ada_trl.vllm.transport.MAX_RETRIES", 0)
        with pytest.raises(VLLMServerUnavailable):
            evaluate(server)
        answered = {call.prompt for call in server.completions[:8]}
    dying = False
    with FakeServer(one_in_four) as server:
        results = evaluate(server)
        assert {call.prompt for call in server.completions} == set(SUMS) - answered
    assert results["models"]["base"]["weighted average"]["average"] == 0.25
    assert our_threads() == []
