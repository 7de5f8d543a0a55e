"""Failures, order and concurrency, against a scripted server."""

import asyncio
import json
import threading
import time

import pytest
import torch
from aiohttp import web
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from ada_trl import AdaGRPOTrainer
from ada_trl.sampling.async_vllm_sampler import AsyncVLLMSampler
from benchmarks.speed.server import SynchronousTrainer

from ..documentation import documented_metrics, generic
from ..helpers import PROMPTS, logs_of, prompt_dataset, tiny_tokenizer
from .fake import RIGHT, WRONG, FakeServer, answer, fingerprint, half_right, random_texts, reward
from .helpers import IN_TIME, ONE_ROUND, UNIFORM, becomes_idle, build, fail, fails, our_threads, refuse, stall


def scripted(**texts):
    """Deals out each prompt's texts, round by round."""

    async def behave(call):
        start = call.round * call.n
        return answer(call, texts[call.prompt][start : start + call.n])

    return behave


def test_a_step_line_by_line(tmp_path):
    """The same script as the local sampler's test: who is asked again, and what reaches the loss."""
    texts = {
        "1+2=": [RIGHT, WRONG, RIGHT, WRONG],
        "31+4=": [WRONG] * 4 + [RIGHT, RIGHT, WRONG, WRONG],
        "5+55=": [RIGHT] * 12,
        "7+8=": [WRONG] * 12,
    }
    with FakeServer(scripted(**texts)) as server:
        trainer = build(tmp_path, server)
        batches = []
        original = trainer._replace_advantages_and_metrics
        trainer._replace_advantages_and_metrics = lambda replay, output: (
            original(replay, output),
            batches.append(output),
        )
        trainer.train()
    asked = [call.prompt for call in server.completions]
    assert {prompt: asked.count(prompt) for prompt in PROMPTS} == {"1+2=": 1, "31+4=": 2, "5+55=": 3, "7+8=": 3}
    assert all(call.n == 4 for call in server.completions)
    (batch,) = batches
    advantages = {prompt: [] for prompt in PROMPTS}
    prompts = tiny_tokenizer().batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    for prompt, advantage in zip(prompts, batch["advantages"].tolist(), strict=True):
        advantages[prompt].append(round(advantage, 4))
    assert sorted(advantages["1+2="]) == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2, abs=1e-3)
    # Mean 1/4, pass rate 1/4: ×2; the correction is ×1/2 for the 2 positives of 4, ×3/2 for the negatives.
    assert sorted(advantages["31+4="]) == [-0.75, -0.75, 0.75, 0.75]
    assert advantages["5+55="] == advantages["7+8="] == [0, 0, 0, 0]
    assert (batch["sampling_per_token_logps"][batch["completion_mask"].bool()] == -1.0).all()

    (logs,) = logs_of(trainer)
    assert logs["reward"] == pytest.approx((2 + 0 + 4 + 0) / 16)
    assert logs["ada/samples_per_prompt/mean"] == (4 + 8 + 12 + 12) / 4
    assert logs["ada/tokens/generated"] == 2 * (4 + 8 + 12 + 12)
    prompt_tokens = sum(len(prompt) * texts for prompt, texts in zip(PROMPTS, (4, 8, 12, 12), strict=True))
    assert logs["num_tokens"] == trainer.state.num_input_tokens_seen == logs["ada/tokens/generated"] + prompt_tokens
    assert logs["completions/mean_length"] == 2 and logs["completions/clipped_ratio"] == 0
    assert logs["ada/vllm/retries"] == logs["ada/vllm/timeouts"] == logs["ada/vllm/truncated_prompts"] == 0
    assert our_threads() == []


def test_every_metric_of_a_server_is_on_the_metrics_page_and_no_other(tmp_path):
    logged = set()
    for options in ({}, UNIFORM | {"max_staleness": 1, "scale_rewards": "group", "num_generations": 4}):
        with FakeServer(half_right) as server:
            trainer = build(tmp_path, server, **options)
            trainer.train()
        logged |= generic(logs_of(trainer)[0])
    sections = documented_metrics()
    of_server = set(sections.pop("vLLM server"))
    elsewhere = {name for names in sections.values() for name in names}
    assert logged - elsewhere == of_server


def test_prompts_are_prepared_once_a_step_whatever_the_number_of_answers(tmp_path, monkeypatch):
    batches, original = [], GRPOTrainer._generate_and_score_completions

    def count(trainer, inputs):
        batches.append(len(inputs))
        return original(trainer, inputs)

    async def one_by_one(call):
        await asyncio.sleep(0.05 * call.number)
        return answer(call, [WRONG] * call.n)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", count)
    with FakeServer(one_by_one) as server:
        build(tmp_path, server, vllm_request_timeout=20, max_steps=2).train()
    assert len(server.completions) == 2 * 4 * 3
    assert batches == [4, 16] * 2, "To prepare the prompts, and to replay what was selected."


async def reset(call):
    call.request.transport.abort()
    await asyncio.sleep(0)


async def truncate(call):
    whole = answer(call, [RIGHT] * call.n).text
    return web.Response(text=whole[: len(whole) // 2], content_type="application/json")


async def fewer(call):
    return answer(call, [RIGHT] * (call.n - 1))


async def none_at_all(call):
    return answer(call, [])


async def empty(call):
    return web.json_response({})


async def drip(call):
    """Never silent for long, never done."""
    response = web.StreamResponse()
    await response.prepare(call.request)
    for _ in range(600):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (stall, "not answered within vllm_request_timeout"),
        (drip, "not answered within vllm_request_timeout"),
        (fail, "500.*engine dead|not answered within"),
        (refuse, "400.*too long"),
        (reset, "failed|not answered within"),
        (truncate, "failed|not answered within"),
        (fewer, r"asked for \d+ completions, the server answered with"),
        (none_at_all, "not understood"),
        (empty, "not understood"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_first_round_that_fails_stops_the_run_in_time(behaviour, message, tmp_path):
    async def behave(call):
        return await (behaviour if call.prompt == "7+8=" else half_right)(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server)
        before = [p.clone() for p in trainer.model.parameters()]
        started = time.monotonic()
        with fails(message) as error:
            trainer.train()
        assert time.monotonic() - started < IN_TIME
    for words in (server.url, "rollouts of this step are missing", "Check its log"):
        assert words in str(error.value)
    assert our_threads() == []
    assert not (tmp_path / "vllm_weight_sync").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
@pytest.mark.parametrize("behaviour", [fail, reset, truncate])
def test_a_passing_failure_is_retried(behaviour, mode, tmp_path):
    failed = set()

    async def behave(call):
        if call.prompt in failed:
            return await half_right(call)
        failed.add(call.prompt)
        return await behaviour(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server, vllm_request_timeout=20, **mode)
        trainer.train()
    requests = 1 if mode else 4  # the prompts of a batch share one, and fail together
    assert logs_of(trainer)[0]["ada/vllm/retries"] == requests
    assert logs_of(trainer)[0]["ada/samples_per_prompt/mean"] == 4


@pytest.mark.parametrize("behaviour", [fail, reset, truncate, stall])
def test_a_later_round_that_fails_costs_only_itself(behaviour, tmp_path):
    async def behave(call):
        if call.prompt == "7+8=":
            return await behaviour(call) if call.round else answer(call, [WRONG] * call.n)
        return await half_right(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server)
        trainer.train()
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/truncated_prompts"] == 1
    assert logs["ada/samples_per_prompt/max"] == 4
    assert logs["ada/frac_all_wrong"] == 0.25
    assert our_threads() == []


def test_a_later_round_that_is_refused_stops_the_run(tmp_path):
    async def behave(call):
        return await (refuse(call) if call.round else answer_wrong(call))

    async def answer_wrong(call):
        return answer(call, [WRONG] * call.n)

    with FakeServer(behave) as server, fails("400.*too long"):
        build(tmp_path, server).train()


def test_death_in_round_two_finishes_the_step_and_stops_at_the_next(tmp_path, caplog):
    """Nobody can be asked any more whose weights the rollouts came from: they say it themselves."""
    with FakeServer(truthful=True) as server:

        async def behave(call):
            if call.round:
                threading.Thread(target=server.stop).start()
                await asyncio.sleep(60)
            return answer(call, [WRONG] * call.n if call.prompt == "7+8=" else [RIGHT, WRONG, RIGHT, WRONG])

        server.behave = behave
        trainer = build(tmp_path, server, max_steps=2)
        with fails("the weights could not be sent") as error:
            trainer.train()
    assert trainer.state.global_step == 1
    assert "log-probabilities say that they were the right ones" in caplog.text
    assert logs_of(trainer)[0]["ada/vllm/truncated_prompts"] == 1
    assert server.url in str(error.value)
    assert our_threads() == []


def test_a_server_that_is_not_there(tmp_path):
    with FakeServer() as server:
        pass
    with fails("no vLLM server has answered within .* vllm_server_base_url") as error:
        build(tmp_path, server)
    assert "checkpoint" not in str(error.value)


def test_restart_between_steps_with_other_flags_is_refused(tmp_path):
    with FakeServer() as server:

        async def control(request, payload):
            if "reload" in str(payload):  # after the first sync
                server.info = server.info | {}
            return None

        trainer = build(
            tmp_path, server, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), vllm_weight_sync="lora"
        )
        server.info["vllm_config"] |= {"instance_id": "second", "lora_config": None}
        with fails("--enable-lora --max-lora-rank 4"):
            trainer.train()


def test_versions_on_disk_follow_each_other_and_are_removed(tmp_path):
    seen = []

    async def control(request, payload):
        if request.path == "/collective_rpc":
            directory = payload["kwargs"]["weights_path"]
            seen.append(sorted(p.name for p in (tmp_path / "vllm_weight_sync").iterdir()))
            assert directory.endswith(seen[-1][-1])

    with FakeServer(control=control) as server:
        build(tmp_path, server, max_steps=3).train()
    assert [len(names) for names in seen] == [1, 2, 2]
    assert len({name for names in seen for name in names}) == 3
    assert not (tmp_path / "vllm_weight_sync").exists()


def test_adapters_are_loaded_used_and_unloaded(tmp_path):
    with FakeServer() as server:
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        build(tmp_path, server, peft_config=peft_config, vllm_weight_sync="lora", max_steps=2).train()
    actions = [(path.split("/")[-1].split("_")[0], payload["lora_name"]) for path, payload in server.controls]
    first, second = actions[0][1], actions[1][1]
    assert actions == [("load", first), ("load", second), ("unload", first), ("unload", second)]
    assert [call.model for call in server.completions] == [first] * 4 + [second] * 4
    assert not (tmp_path / "vllm_weight_sync").exists()


@pytest.mark.parametrize(
    ("info", "peft_config", "sync", "message"),
    [
        ({"lora_config": None}, LoraConfig(r=4), "lora", "--enable-lora --max-lora-rank 4"),
        ({"lora_config": {"max_lora_rank": 4}}, LoraConfig(r=8), "lora", "--max-lora-rank 8, it is 4"),
        ({"parallel_config": {"_api_process_count": 2}}, LoraConfig(r=4), "lora", "--api-server-count 1"),
        (
            {"model_config": {"max_model_len": 5, "logprobs_mode": "processed_logprobs"}},
            None,
            "disk",
            r"\(5\), it is 5",
        ),
    ],
)
def test_missing_server_flags_are_named(info, peft_config, sync, message, tmp_path):
    if peft_config is not None:
        peft_config.target_modules = {"q_proj"}
    with FakeServer() as server:
        server.info["vllm_config"] |= info
        with fails(message):
            build(tmp_path, server, peft_config=peft_config, vllm_weight_sync=sync)
    assert our_threads() == []


def test_runtime_lora_loading_must_be_allowed(tmp_path):
    with FakeServer(info={"vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": False}}) as server:
        peft_config = LoraConfig(r=4, target_modules=["q_proj"])
        with fails("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            build(tmp_path, server, peft_config=peft_config, vllm_weight_sync="lora")


@pytest.mark.parametrize(
    ("sync", "peft_config", "message"),
    [
        ("nccl", None, "needs a CUDA device"),
        ("lora", None, "the model has none"),
        ("lora", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), "use_dora"),
        ("lora", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), "modules_to_save"),
        ("lora", LoraConfig(r=4, target_modules=["q_proj"], bias="all"), "bias"),
    ],
)
def test_impossible_weight_syncs_are_refused(sync, peft_config, message, tmp_path):
    with FakeServer() as server, pytest.raises(ValueError, match=message):
        build(tmp_path, server, peft_config=peft_config, vllm_weight_sync=sync)


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
def test_other_weights_on_the_server_are_warned_of(mode, tmp_path, caplog):
    with FakeServer() as server:  # its log-probabilities are all −1
        build(tmp_path, server, max_steps=2, **mode).train()
    assert sum("differ from the trainer's" in record.message for record in caplog.records) == 1


def test_an_evaluation_is_judged_by_its_own_log_probabilities(tmp_path, caplog):
    with FakeServer() as server:
        trainer = build(tmp_path, server, **UNIFORM)
        name = "sampling/sampling_logp_difference/mean"
        trainer._metrics["train"][name] = [1.0]  # of weights that were an update older
        trainer.model.eval()
        for own in ([0.01], [1.0]):
            assert "differ from the trainer's" not in caplog.text
            trainer._metrics["eval"][name] = own
            trainer.vllm.check_logprobs({}, same_weights=True)
        trainer.vllm_generation.close()
    assert "differ from the trainer's" in caplog.text


class EvaluateTheBest(TrainerCallback):
    """The first checkpoint is the best one; it is evaluated at the end of the training."""

    def __init__(self):
        self.ended = False

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_reward"] = -float(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if not self.ended:
            self.ended = True
            self.trainer.evaluate()


def test_the_best_model_is_evaluated_by_its_own_weights(tmp_path):
    options = {"max_steps": 3, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 1}
    options |= {
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
    }
    with FakeServer() as server:
        trainer = build(tmp_path, server, eval_dataset=prompt_dataset(1), **UNIFORM | ONE_ROUND | options)
        callback = EvaluateTheBest()
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        assert len({call.weights for call in server.completions}) > 1
        assert server.completions[-1].weights == pytest.approx(fingerprint(trainer.model.parameters()), rel=1e-9)


def test_selection_does_not_depend_on_the_order_of_arrival(tmp_path):
    def run(name, delays):
        async def behave(call):
            await asyncio.sleep(delays[PROMPTS.index(call.prompt)])
            return answer(call, [f"{text}{call.round}{i}" for i, text in enumerate(random_texts(call, 0.4))])

        with FakeServer(behave) as server:
            trainer = build(tmp_path / name, server, vllm_request_timeout=20)
            batches = []
            original = trainer._replace_advantages_and_metrics
            trainer._replace_advantages_and_metrics = lambda replay, output: (
                original(replay, output),
                batches.append(output),
            )
            trainer.train()
        return batches[0], [call.prompt for call in server.completions]

    (one, order), (other, other_order) = run("a", (0, 0.1, 0.2, 0.3)), run("b", (0.3, 0.2, 0.1, 0))
    assert order != other_order
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(one[name], other[name])


def test_slow_completions_are_not_under_represented(tmp_path):
    """Positives take ten times as long: whoever took the first finished would see fewer of them."""
    pass_rate = 0.3

    async def behave(call):
        texts = random_texts(call, pass_rate)
        await asyncio.sleep(0.2 if RIGHT in texts else 0.02)
        return answer(call, texts)

    with FakeServer(behave) as server:
        dataset = prompt_dataset(1)
        prompts = [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]
        dataset = dataset.from_dict({"prompt": prompts})
        trainer = build(tmp_path, server, dataset=dataset, per_device_train_batch_size=256, vllm_request_timeout=20)
        trainer.train()
    drawn = [random_texts(call, pass_rate).count(RIGHT) for call in server.completions if call.round == 0]
    assert logs_of(trainer)[0]["reward"] == pytest.approx(sum(drawn) / 256)
    assert abs(sum(drawn) / 256 - pass_rate) < 5 * (pass_rate * (1 - pass_rate) / 256) ** 0.5


def test_requests_under_way_are_bounded(tmp_path, monkeypatch):
    async def behave(call):
        await asyncio.sleep(0.05)
        return await half_right(call)

    for limit in (1, 3):
        monkeypatch.setattr(AsyncVLLMSampler, "max_in_flight", limit)
        with FakeServer(behave) as server:
            build(tmp_path / str(limit), server).train()
        assert server.most_in_flight == limit


def test_no_prompt_waits_for_another_unless_there_is_a_barrier(tmp_path):
    """One prompt's first round is slow; the others' second rounds start before it is done, or not."""

    async def behave(call):
        if call.prompt == "1+2=" and call.round == 0:
            await asyncio.sleep(2.0)
        return answer(call, [WRONG] * call.n)

    for trainer_class in (AdaGRPOTrainer, SynchronousTrainer):
        barrier, finished = trainer_class is SynchronousTrainer, []

        async def recorded(call, finished=finished):
            response = await behave(call)
            finished.append((call.prompt, call.round))
            return response

        with FakeServer(recorded) as server:
            directory = tmp_path / str(barrier)
            build(directory, server, trainer_class=trainer_class, vllm_request_timeout=20).train()
        before = finished[: finished.index(("1+2=", 0))]
        assert any(round_ > 0 for _, round_ in before) != barrier
        assert len(finished) == 12


def test_rounds_ahead_of_time_change_neither_pools_nor_groups(tmp_path, monkeypatch):
    """They shorten the tail, and what is not needed is cancelled on the server and not counted."""

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

    def run(share):
        monkeypatch.setattr(AsyncVLLMSampler, "speculate_below", share)
        with FakeServer(behave) as server:
            trainer = build(tmp_path / str(share), server, vllm_request_timeout=20)
            batches = []
            original = trainer._replace_advantages_and_metrics
            trainer._replace_advantages_and_metrics = lambda replay, output: (
                original(replay, output),
                batches.append(output),
            )
            trainer.train()
            assert becomes_idle(server)
        return batches[0], logs_of(trainer)[0], len(server.completions)

    (patient, patient_logs, asked), (eager, eager_logs, asked_eagerly) = run(0), run(1)
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert torch.equal(patient[name], eager[name])
    assert patient_logs["ada/samples_per_prompt/mean"] == eager_logs["ada/samples_per_prompt/mean"]
    assert patient_logs["ada/vllm/wasted_rounds"] == 0
    # 2, and of the slow prompt more where this machine is slower yet.
    assert eager_logs["ada/vllm/wasted_rounds"] == asked_eagerly - asked >= 2
    assert our_threads() == []


def test_rewards_run_on_the_main_thread_beside_generation(tmp_path):
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


def test_a_reward_function_that_raises_cancels_what_is_under_way(tmp_path):
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
    assert our_threads() == []


def test_reward_functions_get_their_columns_and_log_of_the_first_round_only(tmp_path):
    dataset = prompt_dataset(1).add_column("answer", [f"answer to {prompt}" for prompt in PROMPTS])

    def logging_reward(prompts, completions, answer, log_metric, log_extra, **kwargs):
        assert answer == [f"answer to {prompt}" for prompt in prompts]
        log_metric("rows", len(prompts))
        log_extra("reversed", [completion[::-1] for completion in completions])
        return [0.0] * len(prompts)

    with FakeServer() as server:
        trainer = build(tmp_path, server, logging_reward, dataset, log_completions=True, num_completions_to_print=1)
        trainer.train()
    assert 4 <= logs_of(trainer)[0]["rows"] <= 16


def test_uniform_mode_and_evaluation_go_through_the_same_client(tmp_path):
    with FakeServer() as server:
        trainer = build(tmp_path, server, **UNIFORM)
        trainer.train()
        assert [call.n for call in server.completions] == [4] * 4
        server.completions.clear()
        trainer.evaluate(prompt_dataset(1))
        assert [call.n for call in server.completions] == [4] * 4
        trainer.vllm_generation.close()
        assert our_threads() == []
    assert logs_of(trainer)[0]["reward"] == 0.5


def test_progress_is_shown_for_long_steps_only_and_can_be_switched_off(tmp_path, capfd):
    async def slow(call):
        await asyncio.sleep(3.5 if call.prompt == "7+8=" else 0)
        return await half_right(call)

    for disable in (False, True):
        with FakeServer(slow) as server:
            build(tmp_path / str(disable), server, vllm_request_timeout=20, disable_tqdm=disable).train()
        shown = capfd.readouterr().err
        assert ("Sampling for step 1" in shown and "active=1" in shown and "rollouts=12" in shown) != disable
    with FakeServer() as server:
        build(tmp_path / "quick", server, disable_tqdm=False).train()
    assert "Sampling for step" not in capfd.readouterr().err


def test_completions_table_of_a_server_run(tmp_path):
    import pandas as pd

    with FakeServer() as server:
        build(tmp_path, server, log_completions=True, num_completions_to_print=1).train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 16
    assert (table["reward"] == [float(c.startswith(RIGHT)) for c in table["completion"]]).all()
    assert (
        json.loads(table["advantage"].map(lambda a: a > 0).to_json(orient="values")) == (table["reward"] > 0).tolist()
    )
