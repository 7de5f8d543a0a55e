"""Several ranks against scripted servers: the same rollouts and updates, the same errors, groups that span ranks."""

import asyncio
import json
import random
from contextlib import ExitStack
from functools import cache

import pytest

from ada_trl.pass_rates.store import PASS_RATES_FILE, load_pass_rates

from ..helpers import PROMPTS, chat_tokenizer, tiny_vision_language_model
from .fake import RATES, RIGHT, WRONG, FakeServer, answer, color_of, half_right, random_texts
from .helpers import becomes_idle, fail, launch, stall
from .worker import run


pytestmark = pytest.mark.usefixtures("no_speculation")  # requests are compared between numbers of ranks
IN_TIME = 40.0  # seconds: less than a stalled server would take, more than a busy machine adds


async def uneven(call):
    """Different completions for every prompt and round, at different speed."""
    await asyncio.sleep(0.02 * (PROMPTS.index(call.prompt) + call.round))
    return answer(call, [f"{text}{call.round}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])


async def even(call):
    return answer(call, random_texts(call, 0.5))


async def by_draw(call):
    """Completions by their number within the prompt: with Est, the rows of one prompt may belong to two ranks."""
    await asyncio.sleep(0.02 * PROMPTS.index(call.prompt))
    texts = []
    for draw in range(call.draw, call.draw + call.n):
        is_right = random.Random(f"{call.prompt} {draw}").random() < RATES[call.prompt]
        texts.append(f"{RIGHT if is_right else WRONG}{draw}")
    return answer(call, texts)


async def by_color(call):
    """The pass rate of the pictures is 0.5, 0, 0.5 and 0."""
    rng = random.Random(f"{color_of(call)} {call.round}")
    rate = 0.5 if color_of(call) in ((255, 0, 0), (0, 0, 255)) else 0
    return answer(call, [f"{RIGHT if rng.random() < rate else WRONG}{i}" for i in range(call.n)])


def last_prompt(behaviour):
    async def behave(call):
        return await (behaviour if call.prompt == "7+8=" else half_right)(call)

    return behave


async def stall_again(call):
    return await (stall if call.round else even)(call)


async def slow_prompt(call):
    await asyncio.sleep(0.7 * (call.prompt == "7+8="))
    return await even(call)


async def no_weights(request, payload):
    if request.path == "/collective_rpc":
        await asyncio.sleep(60)


ROUNDS = {"samples_per_round": 4, "max_rounds": 3}
EST = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
BATCH = {"baseline": "batch", "num_generations": 1, "max_steps": 4}
ONE_COMPLETION = BATCH | {"adaptive_sampling": "uniform"}
EST_EMA = {"adaptive_sampling": "est", "pass_rate_estimator": "ema"}
EST_VALUE = {"adaptive_sampling": "est", "pass_rate_estimator": "value"}
SHORT = ROUNDS | {"vllm_request_timeout": 5.0}
# Behaviour of the server, rows of all ranks together, options. With 4 rollouts per prompt: complete groups on 2 ranks,
# groups that span ranks, a rank without a prompt; with 12 rows, prompts do not divide evenly for the value head's
# forward passes.
SAME = {
    "whole": (uneven, 16, ROUNDS),
    "spanning": (uneven, 12, ROUNDS),
    "a rank without a prompt": (uneven, 4, ROUNDS),
    "dynamic sampling in rounds": (
        uneven,
        8,
        {"zero_variance_groups": "resample", "samples_per_round": 4, "max_rounds": 2, "max_steps": 3},
    ),
    "retries": (uneven, 8, BATCH | {"retries": 3, "num_generations": 2, "max_steps": 3}),
    "est-ema": (by_draw, 16, EST | EST_EMA),
    "est-ema, spanning": (by_draw, 12, EST | EST_EMA),
    "est-value": (by_draw, 16, EST | EST_VALUE),
    "est-value, spanning": (by_draw, 12, EST | EST_VALUE),
    "images": (by_color, 16, ROUNDS | {"feature": "images", "num_generations": 4, "max_completion_length": 8}),
    "one completion": (uneven, 4, ONE_COMPLETION),
    "one completion, ahead": (even, 4, ONE_COMPLETION | {"max_staleness": 1}),
    "GRPO, ahead": (
        even,
        16,
        {"adaptive_sampling": "uniform", "scale_rewards": "group", "max_staleness": 1, "max_steps": 4},
    ),
}
OTHERS = {
    "stall": (last_prompt(stall), 16, SHORT),
    "fail": (last_prompt(fail), 16, SHORT),
    "stall, ahead": (stall_again, 4, ONE_COMPLETION | {"max_staleness": 1, "vllm_request_timeout": 5.0}),
    "slow prompt, ahead": (slow_prompt, 4, ONE_COMPLETION | {"max_staleness": 1, "shuffle_dataset": False}),
    "no weights": (half_right, 16, SHORT),
    "failing reward": (half_right, 16, ROUNDS | {"failing_rank": 1}),
    "failing reward, ahead": (even, 4, ONE_COMPLETION | {"max_staleness": 1, "failing_rank": 1}),
    "adapter": (half_right, 16, ROUNDS | {"vllm_weight_sync": "lora", "max_steps": 2}),
}
RUNS = SAME | OTHERS


def options_of(name, processes, server):
    _, rows, options = RUNS[name]
    return options | {"url": server.url, "per_device_train_batch_size": rows // processes}


def server_of(name):
    behave, _, options = RUNS[name]
    if options.get("feature") != "images":
        return FakeServer(behave)
    tokenizer = chat_tokenizer()
    return FakeServer(behave, tokenizer, tiny_vision_language_model(tokenizer)[0])


def train_on(processes, names, directory):
    """By name of the run: the outcome on each rank, its server, its output directory."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server_of(name)) for name in names}
        if "no weights" in servers:
            servers["no weights"].control = no_weights
        runs = [options_of(name, processes, server) for name, server in servers.items()]
        ranks = launch(processes, directory, runs, seconds=600)
        assert all(map(becomes_idle, servers.values()))
    return {
        name: (outcomes, servers[name], directory / str(i))
        for i, (name, outcomes) in enumerate(zip(names, zip(*ranks, strict=True), strict=True))
    }


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return train_on(2, RUNS, tmp_path_factory.mktemp("together") / "runs")


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    return train_on(3, ["spanning"], tmp_path_factory.mktemp("on_three") / "runs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same runs on one rank, this process."""

    @cache
    def train(name):
        directory = tmp_path_factory.mktemp("alone")
        with server_of(name) as server:
            return json.loads(json.dumps(run(str(directory), options_of(name, 1, server)))), server, directory

    return train


def figures(logs):
    return {name: value for name, value in logs.items() if "ada/" in name and "time" not in name}


def close(name, value):
    """Equal up to rounding in float32, which every fit of the value head multiplies."""
    tolerance = 1e-4 if name.startswith("ada/estimator/brier") else 1e-5
    return None if value is None else pytest.approx(value, rel=tolerance)  # undefined in this step


@pytest.mark.parametrize(("name", "processes"), [*((name, "together") for name in SAME), ("spanning", "on_three")])
def test_the_updates_do_not_depend_on_the_number_of_ranks(name, processes, alone, request):
    (one, server, directory), (ranks, shared, shared_directory) = alone(name), request.getfixturevalue(processes)[name]
    assert all(rank["error"] is None and rank["threads"] == [] for rank in (one, *ranks))
    requests = [sorted((call.prompt, call.round, call.n) for call in which.completions) for which in (server, shared)]
    if "est" in name:  # two ranks may request rollouts of one prompt, in any order
        assert server.draws == shared.draws
    else:
        assert requests[0] == requests[1]
    for step, batch in enumerate(one["batches"]):
        rows = [row for rank in ranks for row in rank["batches"][step]]
        assert [len(rank["batches"][step]) for rank in ranks] == [len(batch) // len(ranks)] * len(ranks)
        assert [prompt for prompt, *_ in rows] == [prompt for prompt, *_ in batch]
        assert (sorted(rows) == sorted(batch) if "est" in name else rows == batch) and len(rows) == RUNS[name][1]
    assert len({rank["weights"] for rank in ranks}) == 1
    assert ranks[0]["weights"] == pytest.approx(one["weights"], rel=1e-5)  # the gradients are sums in another order
    is_computed = "est" in name or "ahead" in name  # by the model, in float32
    for expected, found in zip(one["logs"], ranks[0]["logs"], strict=True):
        figure = {key: close(key, value) if is_computed else value for key, value in figures(expected).items()}
        assert figures(found) == figure
        for key in ("reward", "reward_std", "completions/mean_length", "num_tokens"):
            assert found[key] == pytest.approx(expected[key])
    if "ahead" in name:
        assert [logs["ada/staleness"] for logs in ranks[0]["logs"]] == [0, 1, 1, 1]
    if "est" in name:
        assert len({n for *_, n in requests[0]}) > 1
    if "save_steps" in RUNS[name][2]:
        files = [next(d.glob("checkpoint-*")) / PASS_RATES_FILE for d in (directory, shared_directory)]
        assert load_pass_rates(files[0]) == load_pass_rates(files[1])


@pytest.mark.parametrize("name", ["stall", "fail", "stall, ahead", "no weights"])
def test_all_ranks_raise_the_same_error_in_time(name, together):
    ranks, server, _ = together[name]
    errors = [rank["error"] for rank in ranks]
    assert errors[0] == errors[1]
    assert errors[0][0] == "VLLMServerError" and server.url in errors[0][1]
    assert all(rank["seconds"] < IN_TIME and rank["threads"] == [] for rank in ranks)
    if name == "no weights":
        assert "weights could not be sent" in errors[0][1] and server.completions == []


def test_weights_are_checked_when_the_rollouts_of_all_ranks_have_arrived(together):
    """Otherwise another run's weights could replace them in between, and the check would wait behind the rollouts."""
    ranks, server, _ = together["slow prompt, ahead"]
    assert all(rank["error"] is None for rank in ranks)
    assert server.weight_checks >= 4 and set(server.in_flight_at_checks) == {0}


@pytest.mark.parametrize("name", ["failing reward", "failing reward, ahead"])
def test_an_error_of_a_reward_function_on_one_rank_stops_all(name, together):
    ranks, *_ = together[name]
    assert ranks[1]["error"] == ["ZeroDivisionError", "my bug"]
    assert ranks[0]["error"] == ["RuntimeError", "Process 1 failed: ZeroDivisionError: my bug"]
    assert all(rank["threads"] == [] for rank in ranks)


def test_every_rank_generates_with_the_new_adapter(together):
    ranks, server, _ = together["adapter"]
    assert all(rank["error"] is None for rank in ranks)
    loaded = [payload["lora_name"] for path, payload in server.controls if "/load" in path]
    assert len(loaded) == 2
    assert [call.model for call in server.completions] == [loaded[0]] * 4 + [loaded[1]] * 4
