"""Asynchronous sampling from a scripted server: order, concurrency, rewards and logs."""

import asyncio
import threading
import time

import pandas as pd
import pytest
import torch
from trl import GRPOTrainer

from ada_trl import AdaGRPOTrainer
from ada_trl.sampling.asynchronous import AsyncVLLMSampler
from benchmarks.speed.server import SynchronousTrainer

from ..documentation import documented_metrics, generic, server_metrics
from ..helpers import PROMPTS, logs_of, prompt_dataset, tiny_tokenizer
from .fake import RIGHT, WRONG, FakeServer, answer, half_right, random_texts, reward
from .helpers import IN_TIME, UNIFORM, becomes_idle, build, train


def scripted(**texts):
    """Returns each prompt's texts, round by round."""

    async def behave(call):
        start = call.round * call.n
        return answer(call, texts[call.prompt][start : start + call.n])

    return behave


def test_a_step_line_by_line(tmp_path, no_speculation):
    """
    The same script as the synchronous sampler's test: which prompts are sampled again, and the advantages of the
    batch.
    """
    texts = {
        "1+2=": [RIGHT, WRONG, RIGHT, WRONG],
        "31+4=": [WRONG] * 4 + [RIGHT, RIGHT, WRONG, WRONG],
        "5+55=": [RIGHT] * 12,
        "7+8=": [WRONG] * 12,
    }
    with FakeServer(scripted(**texts)) as server:
        trainer = build(tmp_path, server)
        trainer.train()
    requested = [call.prompt for call in server.completions]
    assert {prompt: requested.count(prompt) for prompt in PROMPTS} == {"1+2=": 1, "31+4=": 2, "5+55=": 3, "7+8=": 3}
    assert all(call.n == 4 for call in server.completions)
    (batch,) = trainer.batches
    advantages = {prompt: [] for prompt in PROMPTS}
    prompts = tiny_tokenizer().batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    for prompt, advantage in zip(prompts, batch["advantages"].tolist(), strict=True):
        advantages[prompt].append(round(advantage, 4))
    assert sorted(advantages["1+2="]) == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2, abs=1e-3)
    assert sorted(advantages["31+4="]) == [-0.5, -0.5, 1.5, 1.5], "Mean 1/4, pass rate 1/4: ×2."
    assert advantages["5+55="] == advantages["7+8="] == [0, 0, 0, 0]
    assert (batch["sampling_per_token_logps"][batch["completion_mask"].bool()] == -1.0).all()

    (logs,) = logs_of(trainer)
    assert logs["reward"] == pytest.approx((2 + 0 + 4 + 0) / 16)
    assert logs["ada/samples_per_prompt/mean"] == (4 + 8 + 12 + 12) / 4
    assert logs["ada/tokens/generated"] == 2 * (4 + 8 + 12 + 12)
    prompt_tokens = sum(len(prompt) * texts for prompt, texts in zip(PROMPTS, (4, 8, 12, 12), strict=True))
    assert logs["num_tokens"] == trainer.state.num_input_tokens_seen == logs["ada/tokens/generated"] + prompt_tokens
    assert logs["completions/mean_length"] == 2 and logs["completions/clipped_ratio"] == 0
    assert logs["ada/vllm/retries"] == logs["ada/vllm/timeouts"] == 0


def test_the_metrics_page_lists_exactly_the_metrics_of_a_server(tmp_path):
    logged = set()
    for options in ({}, UNIFORM | {"max_staleness": 1, "scale_rewards": "group", "num_generations": 4}):
        trainer, server = train(tmp_path, FakeServer(half_right), **options)
        logged |= generic(logs_of(trainer)[0])
    documented = set(documented_metrics())
    assert logged <= documented and logged & server_metrics() == server_metrics()


def test_prompts_are_prepared_once_per_step(tmp_path, monkeypatch):
    """Whatever the number of responses."""
    batches, original = [], GRPOTrainer._generate_and_score_completions

    def count(trainer, inputs):
        batches.append(len(inputs))
        return original(trainer, inputs)

    async def one_by_one(call):
        await asyncio.sleep(0.05 * call.number)
        return answer(call, [WRONG] * call.n)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", count)
    trainer, server = train(tmp_path, FakeServer(one_by_one), vllm_request_timeout=20, max_steps=2)
    assert len(server.completions) == 2 * 4 * 3
    assert batches == [4, 16] * 2, "To prepare the prompts, and to assemble the selected rollouts."


# Order of arrival


@pytest.mark.usefixtures("no_speculation")
def test_selection_does_not_depend_on_the_order_of_arrival(tmp_path):
    def run(name, delays):
        arrived = []

        async def behave(call):
            await asyncio.sleep(delays[PROMPTS.index(call.prompt)])
            arrived.append(call.prompt)
            return answer(call, [f"{text}{call.round}{i}" for i, text in enumerate(random_texts(call, 0.15))])

        with FakeServer(behave) as server:
            trainer = build(tmp_path / name, server, vllm_request_timeout=20)
            trainer.train()
        return trainer.batches[0], arrived

    (one, arrived), (other, arrived_otherwise) = run("a", (0, 0.1, 0.2, 0.3)), run("b", (0.3, 0.2, 0.1, 0))
    assert arrived[0] != arrived_otherwise[0]
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(one[name], other[name])


def test_slow_completions_are_not_under_represented(tmp_path):
    """Positives take ten times as long: taking the first completions that arrive would count fewer of them."""
    pass_rate = 0.3

    async def behave(call):
        texts = random_texts(call, pass_rate)
        await asyncio.sleep(0.2 if RIGHT in texts else 0.02)
        return answer(call, texts)

    prompts = [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]
    with FakeServer(behave) as server:
        dataset = prompt_dataset(1).from_dict({"prompt": prompts})
        trainer = build(tmp_path, server, dataset=dataset, per_device_train_batch_size=256, vllm_request_timeout=20)
        trainer.train()
    positives = [random_texts(call, pass_rate).count(RIGHT) for call in server.completions if call.round == 0]
    assert logs_of(trainer)[0]["reward"] == pytest.approx(sum(positives) / 256)
    assert abs(sum(positives) / 256 - pass_rate) < 5 * (pass_rate * (1 - pass_rate) / 256) ** 0.5


@pytest.mark.parametrize("trainer_class", [AdaGRPOTrainer, SynchronousTrainer])
def test_no_prompt_waits_for_another_unless_there_is_a_barrier(trainer_class, tmp_path):
    """One prompt's first round is slow; second rounds of the others complete before it, or not."""
    finished = []

    async def behave(call):
        if call.prompt == "1+2=" and call.round == 0:
            await asyncio.sleep(2.0)
        finished.append((call.prompt, call.round))
        return answer(call, [WRONG] * call.n)

    trainer, server = train(tmp_path, FakeServer(behave), trainer_class=trainer_class, vllm_request_timeout=20)
    before = finished[: finished.index(("1+2=", 0))]
    assert any(round_ > 0 for _, round_ in before) != (trainer_class is SynchronousTrainer)
    assert len(finished) == 12


def test_speculative_rounds_change_neither_pools_nor_groups(tmp_path, monkeypatch):
    """Those that are not needed are cancelled on the server and not counted."""
    texts = {
        "1+2=": [RIGHT, WRONG, RIGHT, WRONG] * 3,
        "31+4=": [WRONG] * 4 + [RIGHT, RIGHT, WRONG, WRONG] * 2,
        "5+55=": [RIGHT] * 12,
        "7+8=": [RIGHT, WRONG, RIGHT, WRONG] * 3,  # done after its first round, which is slow
    }

    async def behave(call):
        await asyncio.sleep(2.0 if call.prompt == "7+8=" else 0.05)
        start = call.round * call.n
        return answer(call, [f"{t}{call.round}{i}" for i, t in enumerate(texts[call.prompt][start : start + call.n])])

    def run(rollouts):
        monkeypatch.setattr(AsyncVLLMSampler, "rollouts_in_flight", rollouts)
        with FakeServer(behave) as server:
            trainer = build(tmp_path / str(rollouts), server, vllm_request_timeout=20)
            trainer.train()
            assert becomes_idle(server)
        return trainer.batches[0], logs_of(trainer)[0], len(server.completions)

    (batch, logs, requests), (other, other_logs, more_requests) = run(0), run(4)
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(batch[name], other[name])
    assert logs["ada/samples_per_prompt/mean"] == other_logs["ada/samples_per_prompt/mean"]
    assert logs["ada/vllm/wasted_rounds"] == 0
    # 2, and more of the slow prompt if this machine is even slower.
    assert other_logs["ada/vllm/wasted_rounds"] == more_requests - requests >= 2


def test_a_round_is_cancelled_as_soon_as_its_prompt_is_done(tmp_path):
    """Not at the end of the step: the server has room for the prompts that are left."""
    arrived, cancelled = [], []

    async def behave(call):
        arrived.append(call.prompt)
        # Two rounds of each prompt, in any order: a request that has not arrived leaves no trace.
        while len(arrived) < 8:
            await asyncio.sleep(0.01)
        if call.round > 0:
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:
                cancelled.append(call.prompt)
                raise
        while call.prompt == "7+8=" and not cancelled:
            await asyncio.sleep(0.01)
        return answer(call, [RIGHT, WRONG, RIGHT, WRONG])

    trainer, _ = train(tmp_path, FakeServer(behave), vllm_request_timeout=20)
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/wasted_rounds"] >= 4 and logs["ada/samples_per_prompt/mean"] == 4


# Rewards


def test_rewards_run_on_the_main_thread_during_generation(tmp_path, no_speculation):
    threads, in_flight = [], []

    async def behave(call):
        await asyncio.sleep(0.05 * (1 + call.number))
        return await half_right(call)

    with FakeServer(behave) as server:

        def slow_reward(completions, **kwargs):
            threads.append(threading.current_thread())
            in_flight.append(server.in_flight)
            time.sleep(0.02)
            return reward(completions)

        trainer = build(tmp_path, server, slow_reward, vllm_request_timeout=20)
        trainer.train()
    assert set(threads) == {threading.main_thread()}
    assert max(in_flight) > 0
    (logs,) = logs_of(trainer)
    assert 0 < logs["ada/time/reward_overlapped"] < logs["ada/time/reward"]


def test_the_server_is_idle_while_the_last_completions_are_scored(tmp_path, no_speculation):
    def slow(completions, **kwargs):
        time.sleep(0.5)
        return reward(completions)

    trainer, _ = train(tmp_path, FakeServer(half_right), reward_funcs=slow)
    (logs,) = logs_of(trainer)
    alone = logs["ada/time/reward"] - logs["ada/time/reward_overlapped"]
    assert logs["ada/time/idle"] >= 0.9 * alone >= 0.4


def test_an_error_of_a_reward_function_cancels_the_requests_in_flight(tmp_path):
    async def behave(call):
        if call.prompt != "1+2=":
            await asyncio.sleep(60)
        return await half_right(call)

    def broken(completions, **kwargs):
        raise ZeroDivisionError("my bug")

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server, broken, vllm_request_timeout=60)
        started = time.monotonic()
        with pytest.raises(ZeroDivisionError, match="my bug"):
            trainer.train()
        assert time.monotonic() - started < IN_TIME
        assert becomes_idle(server)


def test_reward_functions_get_their_columns_and_log_the_first_round(tmp_path):
    dataset = prompt_dataset(1).add_column("answer", [f"answer to {prompt}" for prompt in PROMPTS])

    def logging_reward(prompts, completions, answer, log_metric, log_extra, **kwargs):
        assert answer == [f"answer to {prompt}" for prompt in prompts]
        rewards = reward(completions)
        log_metric("accuracy", sum(rewards) / len(rewards))
        for value in rewards:
            log_metric("accuracy, one by one", value)
        log_extra("reversed", [completion[::-1] for completion in completions])
        return rewards

    async def one_is_slow_and_wrong(call):
        if call.prompt == PROMPTS[0]:
            await asyncio.sleep(0.5)
            return answer(call, [WRONG] * call.n)
        return await half_right(call)

    server = FakeServer(one_is_slow_and_wrong)
    trainer, server = train(
        tmp_path, server, logging_reward, dataset, log_completions=True, num_completions_to_print=1
    )
    logs = logs_of(trainer)[0]
    assert logs["reward"] == pytest.approx(3 / 8), "Of calls of different sizes."
    assert logs["accuracy"] == logs["accuracy, one by one"] == pytest.approx(logs["reward"])
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 16
    assert (table["logging_reward"] == [float(text.startswith(RIGHT)) for text in table["completion"]]).all()
    assert ((table["advantage"] > 0) == (table["logging_reward"] > 0)).all()
    assert (table["reversed"] == [text[::-1] for text in table["completion"]]).all()


def test_progress_is_shown_for_long_steps_only_and_can_be_disabled(tmp_path, capfd):
    async def slow(call):
        await asyncio.sleep(3.5 if call.prompt == "7+8=" else 0)
        return await half_right(call)

    for disable in (False, True):
        trainer, server = train(
            tmp_path / str(disable), FakeServer(slow), vllm_request_timeout=20, disable_tqdm=disable
        )
        shown = capfd.readouterr().err
        assert ("Sampling for step 1" in shown and "active=1" in shown and "rollouts=12" in shown) != disable
    trainer, server = train(tmp_path / "quick", FakeServer(), disable_tqdm=False)
    assert "Sampling for step" not in capfd.readouterr().err
