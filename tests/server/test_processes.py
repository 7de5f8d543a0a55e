"""Several processes against one scripted server: shared work, shared failures, groups that straddle processes."""

import asyncio

import pytest

from ..helpers import PROMPTS
from .fake import FakeServer, answer, half_right, random_texts
from .helpers import fail, launch, stall


IN_TIME = 40.0  # seconds; far below what a stalled server would take, far above what a busy machine adds


async def uneven(call):
    """Different for every prompt and round, and at different speed."""
    await asyncio.sleep(0.02 * (PROMPTS.index(call.prompt) + call.round))
    return answer(call, [f"{text}{call.round}{i}" for i, text in enumerate(random_texts(call, 0.3))])


# Of 4 rollouts per prompt: groups whole on 2 and on 3 processes, groups that straddle two, a process without a prompt.
@pytest.mark.parametrize(("processes", "per_device"), [(2, 8), (3, 4), (2, 6), (2, 2)])
def test_same_update_on_one_process_and_on_several(processes, per_device, tmp_path):
    def run(count, name):
        with FakeServer(uneven) as server:
            rows = per_device * processes // count
            ranks = launch(
                count, server.url, tmp_path / name, per_device_train_batch_size=rows, vllm_request_timeout=30
            )
        assert all(rank["error"] is None and rank["threads"] == [] for rank in ranks)
        return ranks, sorted((call.prompt, call.round) for call in server.completions)

    (alone,), asked_alone = run(1, "alone")
    ranks, asked = run(processes, "together")
    rows = [row for rank in ranks for row in rank["batches"][0]]
    assert rows == alone["batches"][0]
    assert asked == asked_alone
    untimed = [{k: v for k, v in run["logs"][0].items() if "ada/" in k and "time" not in k} for run in (alone, *ranks)]
    assert untimed[0] == untimed[1]
    for name in ("reward", "reward_std", "completions/mean_length", "num_tokens"):
        assert alone["logs"][0][name] == pytest.approx(ranks[0]["logs"][0][name])


@pytest.mark.parametrize("behaviour", [stall, fail])
def test_all_processes_raise_the_same_error_in_time(behaviour, tmp_path):
    async def behave(call):
        return await (behaviour if call.prompt == "7+8=" else half_right)(call)

    with FakeServer(behave) as server:
        ranks = launch(2, server.url, tmp_path / "run")
    errors = [rank["error"] for rank in ranks]
    assert errors[0] == errors[1]
    assert errors[0][0] == "VLLMServerError" and server.url in errors[0][1]
    for rank in ranks:
        assert rank["seconds"] < IN_TIME
        assert rank["threads"] == []


def test_a_failed_weight_sync_stops_all_processes(tmp_path):
    with FakeServer() as server:
        server.info["vllm_config"]["instance_id"] = "first"

        async def control(request, payload):
            if request.path == "/collective_rpc":
                await asyncio.sleep(60)

        server.control = control
        ranks = launch(2, server.url, tmp_path / "run")
    assert ranks[0]["error"] == ranks[1]["error"]
    assert "weights could not be sent" in ranks[0]["error"][1]
    assert all(rank["seconds"] < IN_TIME for rank in ranks)
    assert server.completions == []


def test_a_reward_function_that_raises_on_one_process_stops_all(tmp_path):
    with FakeServer() as server:
        ranks = launch(2, server.url, tmp_path / "run", failing_rank=1)
    assert ranks[1]["error"] == ["ZeroDivisionError", "my bug"]
    assert ranks[0]["error"] == ["RuntimeError", "Process 1 failed: ZeroDivisionError: my bug"]


def test_every_process_generates_with_the_new_adapter(tmp_path):
    with FakeServer() as server:
        ranks = launch(2, server.url, tmp_path / "run", lora=True, vllm_weight_sync="lora", max_steps=2)
    assert all(rank["error"] is None for rank in ranks)
    loaded = [payload["lora_name"] for path, payload in server.controls if "/load" in path]
    assert len(loaded) == 2
    assert [call.model for call in server.completions] == [loaded[0]] * 4 + [loaded[1]] * 4
