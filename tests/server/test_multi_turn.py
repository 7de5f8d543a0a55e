"""Tools, environments and images, sampled from a scripted server."""

import json
import re
import time
from collections import Counter

import pytest
from aiohttp import web

from ..conversations import add, image_dataset, says_the_sum
from ..conversations import build as build_trainer
from ..helpers import Recorder, chat_tokenizer, tiny_vision_language_model
from .fake import FakeServer, answer, color_of
from .helpers import IN_TIME, UNIFORM, becomes_idle, fail, fails, launch, reject, served_by, stall


CHAT = chat_tokenizer()
VISION, PROCESSOR = tiny_vision_language_model(CHAT)


def build(tmp_path, server, reward, dataset=None, **options):
    quick = {"vllm_request_timeout": 30.0, "vllm_server_timeout": 0, "samples_per_round": 4, "max_rounds": 3}
    options = {"tokenizer": CHAT} | options
    return build_trainer(Recorder, tmp_path, reward, dataset, **served_by(server.url) | quick | options)


async def uses_the_tool(call):
    """From the second request for a question on, half of the completions call `add`, and repeat its result."""
    if "<tool_response>" in call.prompt:
        value = call.prompt.split("<tool_response>\n")[-1].split("\n")[0]
        return answer(call, [f"It is {value}."] * call.n)
    use = tool_call(call.prompt) if call.round else "Pass."
    return answer(call, [use, "Pass."] * (call.n // 2))


async def uses_the_tool_for_one_question(call):
    if "<tool_response>" in call.prompt:
        return await uses_the_tool(call)
    return answer(call, [tool_call(call.prompt) if "31+4" in call.prompt else "Pass."] * call.n)


def tool_call(prompt):
    a, b = re.findall(r"(\d+)\+(\d+)", prompt)[-1]
    request = json.dumps({"name": "add", "arguments": {"a": int(a), "b": int(b)}})
    return f"<tool_call>\n{request}\n</tool_call>"


@pytest.mark.parametrize(
    "mode", [{"baseline": "batch"}, {"num_generations": 4, "samples_per_round": 4}], ids=["batch", "seq"]
)
def test_ranks_may_request_different_numbers_of_turns(mode, tmp_path):
    options = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_generations_eval": 4}
    options |= {"vllm_request_timeout": 30.0, "feature": "tools"} | mode
    if "baseline" in mode:
        options["per_device_train_batch_size"] = 2
    with FakeServer(uses_the_tool_for_one_question, CHAT) as server:
        ranks = launch(2, tmp_path / "runs", [options | {"url": server.url}])
        assert becomes_idle(server)
    (first,), (second,) = ranks
    assert first["error"] is second["error"] is None
    assert first["weights"] == second["weights"] and first["evaluations"] == [0.25]
    assert first["logs"][0]["reward"] == 0.25


def test_every_turn_of_a_conversation_with_tools_is_requested(tmp_path):
    scored = []

    def reward(prompts, completions, **kwargs):
        scored.append(says_the_sum(prompts, completions))
        return scored[-1]

    with FakeServer(uses_the_tool, CHAT) as server:
        trainer = build(tmp_path, server, reward, tools=[add])
        trainer.train()
    first = [call for call in server.completions if "<tool_response>" not in call.prompt]
    later = [call for call in server.completions if "<tool_response>" in call.prompt]
    assert Counter(call.n for call in first) == {4: 8}, "Four prompts, two rounds, a request for each."
    assert Counter(call.n for call in later) == {2: 4}, "Equal histories share a request."
    assert scored == [[0.0] * 16, [1.0, 0.0] * 8]
    logs, output = trainer.state.log_history[0], trainer.batches[-1]
    assert (
        logs["ada/samples_per_prompt/mean"] == 8 and logs["ada/frac_exit_condition_met"] == 1 and logs["reward"] == 0
    )
    assert logs["tools/call_frequency"] == 0  # of the first round
    assert logs["ada/vllm/retries"] == 0 and logs["ada/vllm/weight_check_logprob_diff"] < 1e-3
    for ids, mask, advantage in zip(output["completion_ids"], output["tool_mask"], output["advantages"], strict=True):
        text = CHAT.decode(ids[mask.bool()])
        assert "tool_response" not in text and ("It is" in text) == (advantage > 0)
    sampled = output["completion_mask"].bool() & output["tool_mask"].bool()
    assert (output["sampling_per_token_logps"][sampled] == -1.0).all()


def test_a_failure_between_tool_calls_stops_the_run(tmp_path):
    async def breaks(call):
        return await (fail if "<tool_response>" in call.prompt else uses_the_tool)(call)

    with FakeServer(breaks, CHAT) as server:
        trainer = build(tmp_path, server, says_the_sum, tools=[add])
        with pytest.raises(Exception, match="engine dead"):
            trainer.train()


def build_with_images(tmp_path, server, reward=None, **options):
    model, processor = tiny_vision_language_model(CHAT)
    options = {"model": model, "tokenizer": processor, "max_completion_length": 8} | options
    return build(
        tmp_path, server, reward or (lambda completions, **_: [0.0] * len(completions)), image_dataset(), **options
    )


def test_images_are_sent_once_per_request_and_placed_in_the_prompt(tmp_path, no_speculation):
    requested, failed = Counter(), []

    async def describes(call):
        if not failed:
            failed.append(call)
            return await fail(call)
        requested[color_of(call)] += 1
        (place,) = call.features["mm_placeholders"]["image"]
        assert call.tokenizer(call.prompt)["input_ids"].index(PROCESSOR.image_token_id) == place["offset"]
        assert place["length"] == 4
        first_of_red = requested[255, 0, 0] == 1 and color_of(call)[0] == 255
        return answer(call, ["Red."] * call.n if first_of_red else ["Red.", "No."] * (call.n // 2))

    def reward(prompts, completions, image, **kwargs):
        assert all(p[-1]["content"][0]["image"] == pixels for p, pixels in zip(prompts, image, strict=True))
        return [float(completion[0]["content"] == "Red.") for completion in completions]

    with FakeServer(describes, CHAT, VISION) as server:
        trainer = build_with_images(tmp_path, server, reward)
        trainer.train()
    # One request each, and a second round of the red picture; the retry was not counted.
    assert requested == {(255, 0, 0): 2, (0, 128, 0): 1, (0, 0, 255): 1, (0, 0, 0): 1}
    assert trainer.state.log_history[0]["ada/frac_exit_condition_met"] == 1
    assert trainer.state.log_history[0]["ada/vllm/retries"] == 1
    assert len(trainer.batches[-1]["pixel_values"]) == 16


def test_images_of_the_next_step_are_sent_while_this_one_is_trained_on(tmp_path):
    requested = []

    async def half_red(call):
        requested.append(color_of(call))
        return answer(call, ["Red.", "No."] * (call.n // 2))

    with FakeServer(half_red, CHAT, VISION) as server:
        options = {
            "baseline": "batch",
            "num_generations": 4,
            "max_staleness": 1,
            "max_steps": 3,
            "log_completions": True,
        }
        trainer = build_with_images(tmp_path, server, **UNIFORM | options)
        trainer.train()
    assert Counter(requested) == dict.fromkeys(
        requested[:4], 3
    )  # four pictures in each of three steps, each sent once
    logs = [step for step in trainer.state.log_history if "ada/staleness" in step]
    assert [step["ada/staleness"] for step in logs] == [0, 1, 1]


async def says_red(call):
    return answer(call, ["Red."] * call.n)


async def not_found(request):
    return web.json_response({"detail": "Not Found"}, status=404)


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (stall, r"render received no response within 2 s"),
        (fail, "render .*500.*engine dead"),
        (not_found, "render.*--enable-scale-out"),
    ],
    ids=["stalls", "fails", "is missing"],
)
def test_processing_images_may_fail_like_other_requests(render, message, tmp_path):
    with FakeServer(says_red, CHAT, VISION, render=render) as server:
        timeout = 2.0 if render is stall else 30.0
        trainer, started = build_with_images(tmp_path, server, vllm_request_timeout=timeout), time.monotonic()
        with fails(message):
            trainer.train()
        assert time.monotonic() - started < IN_TIME


def test_processing_images_is_cancelled_when_the_run_stops(tmp_path):
    rendered = []

    async def first_only(request):
        rendered.append(request)
        return await stall(request) if len(rendered) > 1 else None

    with FakeServer(reject, CHAT, VISION, render=first_only) as server:
        trainer, started = build_with_images(tmp_path, server, vllm_request_timeout=300.0), time.monotonic()
        with fails("400.*too long"):
            trainer.train()
        assert time.monotonic() - started < IN_TIME
        assert becomes_idle(server)
