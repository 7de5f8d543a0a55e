"""A server that lies, dies or returns, scripted: no row of other weights is trained on in silence, and nobody waits."""

import asyncio
import resource
import signal
import socket
import time

import pytest
import torch
from aiohttp import web
from filelock import FileLock
from peft import LoraConfig
from transformers import TrainerCallback

from ada_trl.sampling.async_vllm_sampler import AsyncVLLMSampler
from ada_trl.vllm.client import TimeoutVLLMClient
from ada_trl.vllm.weight_sync import IN_USE

from ..helpers import logs_of, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import WRONG, FakeServer, answer, fingerprint, half_right
from .helpers import UNIFORM, build, fails, our_threads, page, stall, started, wait_until


LORA = {"vllm_weight_sync": "lora"}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("ada_trl.vllm.transport.BACKOFF_SECONDS", 0.02)


def witness(trainer, server):
    """Compare what the server held at each request with what was trained then; returns the number of comparisons."""
    seen, original = [], trainer._generate_and_score_completions

    def compare(inputs):
        start = len(server.completions)
        output = original(inputs)
        ours = fingerprint(trainer.model.parameters())
        seen.extend(abs(call.weights - ours) < 1e-9 * ours for call in server.completions[start:])
        return output

    trainer._generate_and_score_completions = compare
    return seen


class Restart(TrainerCallback):
    """Restarts the server at a moment of the second step."""

    def __init__(self, server, moment):
        self.server, self.moment = server, moment

    def _maybe(self, moment, state):
        if moment == self.moment and state.global_step == 1:
            self.server.restart("second")

    def on_step_end(self, args, state, control, **kwargs):
        self._maybe("step", state)

    def on_substep_end(self, args, state, control, **kwargs):
        self._maybe("micro-step", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._maybe("evaluation", state)


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
@pytest.mark.parametrize("moment", ["step", "micro-step", "evaluation"])
def test_a_server_restarted_between_generations_gets_the_weights_again(moment, mode, tmp_path):
    """An evaluation, or the micro-step before, has pushed the weights of this step already: to another server."""
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1, **mode}
    if moment == "evaluation":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    with FakeServer() as server:
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), eval_dataset=prompt_dataset(1), **options)
        trainer.add_callback(Restart(server, moment))
        seen = witness(trainer, server)
        trainer.train()
    assert server.info["vllm_config"]["instance_id"] == "second"
    assert len(seen) > 3 * 2 and all(seen)


@pytest.mark.parametrize("mode", [UNIFORM, {}, LORA | UNIFORM], ids=["uniform", "seq", "lora"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_server_restarted_during_a_generation_stops_the_run(mode, evaluating, tmp_path):
    async def restarts(call):
        server.restart("second")
        return await half_right(call)

    with FakeServer() as server:
        trainer = build(tmp_path, server, peft_config=lora() if "vllm_weight_sync" in mode else None, **mode)
        server.behave = restarts
        with fails("restarted during the step .*first became second|no model ada-") as error:
            trainer.evaluate(prompt_dataset(1)) if evaluating else trainer.train()
    assert server.url in str(error.value)
    assert our_threads() == [] and not (tmp_path / "vllm_weight_sync").exists()


def test_a_rollout_function_is_watched_too(tmp_path):
    async def restarts(call):
        server.restart("second")
        return await half_right(call)

    def rollout(prompts, trainer):
        ids = tiny_tokenizer()(prompts)["input_ids"]
        _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(ids, None, 4)
        return {"prompt_ids": ids, "completion_ids": completion_ids, "logprobs": [[t[0] for t in s] for s in logprobs]}

    with FakeServer() as server:
        trainer = build(tmp_path, server, rollout_func=rollout, **UNIFORM)
        seen = witness(trainer, server)
        trainer.train()
        assert seen and all(seen)
        server.behave = restarts
        trainer = build(tmp_path, server, rollout_func=rollout, **UNIFORM)
        with fails("restarted during the step"):
            trainer.train()


# Weight syncs that did not happen


async def nothing_said(request, payload):
    if request.path == "/collective_rpc":
        return web.json_response({})


async def only_said(request, payload):
    """As if it had loaded the weights."""
    if request.path == "/collective_rpc":
        return web.json_response({"results": [None]})
    if "load_lora" in request.path and "unload" not in request.path:
        return web.Response(body=b"Success: LoRA adapter added successfully.")


async def failing(request, payload):
    if request.path == "/collective_rpc":
        return web.json_response({"error": {"message": "no such file"}}, status=500)


async def unsuccessful(request, payload):
    if request.path == "/reset_prefix_cache":
        return web.json_response({"success": False})


async def html_instead(request, payload):
    return await page() if request.path in ("/collective_rpc", "/v1/load_lora_adapter") else None


OTHER_WEIGHTS = "does not have this step's weights.*"


@pytest.mark.parametrize(
    ("control", "mode", "message"),
    [
        (html_instead, UNIFORM, "weights could not be sent.*web page.*Sign in"),
        (html_instead, LORA, "weights could not be sent.*web page"),
        (failing, {}, "weights could not be sent.*500.*no such file"),
        (unsuccessful, UNIFORM, "prefix cache"),
        (nothing_said, {}, "weights could not be sent.*no worker says"),
        (only_said, UNIFORM, OTHER_WEIGHTS + "differ from the trainer's by [0-9.]+ per token"),
        (only_said, {}, OTHER_WEIGHTS + "differ from the trainer's by [0-9.]+ per token"),
        (only_said, LORA | UNIFORM, OTHER_WEIGHTS + "no model ada-"),
    ],
)
def test_a_weight_sync_that_did_not_happen_stops_the_run(control, mode, message, tmp_path):
    with FakeServer(control=control) as server:
        peft_config = lora() if "vllm_weight_sync" in mode else None
        trainer = build(tmp_path, server, peft_config=peft_config, max_steps=2, **mode)
        seen = witness(trainer, server)
        with fails(message) as error:
            trainer.train()
    assert trainer.state.global_step <= 1 and all(seen), "The first step's weights are those the server started from."
    assert control is only_said or server.completions == []
    assert server.url in str(error.value)
    assert "resume from the last checkpoint" in str(error.value) or "a server of its own" in str(error.value)
    assert our_threads() == [] and not (tmp_path / "vllm_weight_sync").exists()


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
def test_another_run_that_sends_its_weights_to_the_same_server_is_noticed(mode, tmp_path):
    async def overwritten(call):
        for parameter in server.served["base"].parameters():
            parameter.data += 0.1
        return await half_right(call)

    with FakeServer(overwritten) as server:
        trainer = build(tmp_path, server, **mode)
        with fails("other weights than those.*a server of its own") as error:
            trainer.train()
    assert trainer.state.global_step == 0
    assert "--no-enable-prefix-caching" not in str(error.value)


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
def test_the_proof_is_one_short_request_before_and_after_and_is_no_sampling(mode, tmp_path):
    with FakeServer() as server:
        trainer = build(tmp_path, server, max_steps=3, **mode)
        trainer.train()
    assert server.proofs == 2 * 3
    assert max(logs["ada/vllm/weight_check_logprob_diff"] for logs in logs_of(trainer)) < 1e-5


# Time


def test_a_server_that_stalls_is_waited_for_once(tmp_path, caplog, monkeypatch):
    """64 prompts, two requests at a time, each of which would wait for the deadline."""

    async def behave(call):
        return await stall(call) if call.round else answer(call, [WRONG] * call.n)

    with FakeServer(behave) as server:
        dataset = prompt_dataset(1).from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]})
        monkeypatch.setattr(AsyncVLLMSampler, "max_in_flight", 4)
        options = {"per_device_train_batch_size": 256, "vllm_request_timeout": 2.0}
        trainer = build(tmp_path, server, dataset=dataset, max_steps=2, **options)
        ends, started = [], time.monotonic()
        trainer.add_callback(
            type("", (TrainerCallback,), {"on_step_end": lambda *_, **__: ends.append(time.monotonic())})()
        )
        server_stalls_for_good = fails("not answered within")

        async def later(call):
            return await (stall if len(server.controls) > 2 else behave)(call)

        server.behave = later
        with server_stalls_for_good:
            trainer.train()
    assert len(ends) == 1 and ends[0] - started < 2 * 2.0 + 10
    (logs,) = logs_of(trainer)
    assert logs["ada/vllm/truncated_prompts"] == 64 and logs["ada/samples_per_prompt/max"] == 4
    assert logs["ada/vllm/timeouts"] <= 4, "Requests of one wave."
    assert sum("3 requests in a row" in record.message for record in caplog.records) == 1
    assert our_threads() == []


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_busy_server_is_asked_again_whatever_the_request(status, tmp_path):
    busy = {"/collective_rpc": 6, "/v1/completions": 6, "/server_info": 6}

    def response(path):
        busy[path] -= 1
        return web.json_response({"error": {"message": "busy"}}, status=status) if busy[path] >= 0 else None

    async def completions(call):
        return (call.round and response("/v1/completions")) or answer(call, [WRONG] * call.n)

    async def others(request, payload=None):
        return response(request.path) if request.path in busy else None

    with FakeServer(completions, control=others, read=others) as server:
        trainer = build(tmp_path, server, vllm_request_timeout=60)
        trainer.train()
    assert max(busy.values()) < 0
    assert logs_of(trainer)[0]["ada/vllm/truncated_prompts"] == 0


def test_a_server_that_stays_busy_is_unavailable_and_quoted(tmp_path):
    async def busy(call):
        return web.json_response({"error": {"message": "come back"}}, status=429)

    with FakeServer(busy) as server, fails("within vllm_request_timeout.*come back"):
        build(tmp_path, server).train()


def test_a_name_lookup_that_hangs_has_the_same_deadline(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(30))
    started = time.monotonic()
    with fails("nowhere.test"):
        TimeoutVLLMClient("http://nowhere.test:8000", request_timeout=1.0)
    assert time.monotonic() - started < 10
    assert our_threads() == []


# On all processes or on none


def test_server_info_is_asked_for_on_all_processes_or_on_none(tmp_path):
    """TRL's own second question, on the main process alone, would leave the others waiting if it failed."""
    asked = []

    async def count(request):
        asked.append(request.path)

    with FakeServer(read=count) as server:
        build(tmp_path, server).vllm_generation.close()
    assert asked.count("/server_info") == 1


def test_a_full_disk_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeServer() as server:
        trainer = build(tmp_path, server)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with fails("vllm_weight_sync.* cannot be written, .*GiB are free") as error:
                trainer.train()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "set vllm_weight_sync_dir to another directory" in str(error.value)
    assert not (tmp_path / "vllm_weight_sync").exists()


# Leftovers


def test_evaluation_without_training_leaves_nothing(tmp_path):
    with FakeServer() as server:
        trainer = build(tmp_path, server, peft_config=lora(), **LORA)
        trainer.evaluate(prompt_dataset(1))
        assert len(server.completions) == 4 and list(server.served) == ["base"]
    assert our_threads() == [] and not (tmp_path / "vllm_weight_sync").exists()


def test_an_adapter_that_cannot_be_unloaded_does_not_stop_the_run(tmp_path):
    refused = []

    async def control(request, payload):
        if "unload" in request.path and len(refused) < 2:
            refused.append(payload["lora_name"])
            return web.json_response({"error": {"message": "not now"}}, status=500)

    with FakeServer(control=control) as server:
        trainer = build(tmp_path, server, peft_config=lora(), max_steps=4, **LORA)
        trainer.train()
        assert list(server.served) == ["base"], "It was tried again."
    assert len(refused) == 2 and not (tmp_path / "vllm_weight_sync").exists()


def test_an_adapter_whose_load_was_reported_failed_does_not_stay(tmp_path):
    async def control(request, payload):
        if request.path == "/v1/load_lora_adapter":
            await server.obey(request.path, payload)
            return web.json_response({"error": {"message": "lost"}}, status=500)

    with FakeServer(control=control) as server:
        trainer = build(tmp_path, server, peft_config=lora(), **LORA)
        with fails("lost"):
            trainer.train()
        assert list(server.served) == ["base"]
    assert not (tmp_path / "vllm_weight_sync").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_run_that_is_ended_by_a_signal_leaves_nothing(number, tmp_path):
    with FakeServer(stall) as server:
        options = {"url": server.url, "lora": True, "vllm_request_timeout": 300.0, "max_rounds": 3} | LORA
        with started(tmp_path / "run", **options) as process:
            wait_until(lambda: server.completions, process)
            assert len(server.served) == 2
            process.send_signal(number)
            # Of Ctrl-C Python tells 1 instead of the signal if code is compiled while it exits, as torch and tabulate do.
            assert process.wait(60) in ({128 + number} if number == signal.SIGTERM else {-number, 1})
        assert list(server.served) == ["base"]
    assert not list((tmp_path / "run").rglob("vllm_weight_sync"))


def test_what_dead_runs_have_left_is_removed_and_nothing_of_living_ones(tmp_path):
    directory, locks = tmp_path / "vllm_weight_sync", {}
    for name in ("ada-00000000-3", "ada-11111111-7", "notes"):
        (directory / name).mkdir(parents=True)
        (directory / name / "adapter_model.safetensors").write_bytes(b"weights")
        locks[name] = FileLock(directory / name / IN_USE)
        locks[name].acquire()
    locks["ada-00000000-3"].release()  # as the death of its process does
    locks["notes"].release()
    with FakeServer() as server:
        server.served |= dict.fromkeys(("ada-00000000-3", "ada-11111111-7", "a user's"), server.served["base"])
        build(tmp_path, server, peft_config=lora(), **LORA).vllm_generation.close()
        assert sorted(server.served) == ["a user's", "ada-11111111-7", "base"]
    assert sorted(path.name for path in directory.iterdir()) == ["ada-11111111-7", "notes"]
    locks["ada-11111111-7"].release()


# Nobody answers afterwards


async def dead(request):
    if request.path == "/server_info":
        return web.json_response({"error": {"message": "engine dead"}}, status=500)


def other_model():
    """The same model with other weights, as another run or an older step has them."""
    other = tiny_model()
    for parameter in other.parameters():
        parameter.data += 0.05
    return other


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
@pytest.mark.parametrize("options", [{}, {"vllm_importance_sampling_correction": False}], ids=["", "no correction"])
def test_no_confirmation_no_training(options, mode, tmp_path):
    """The server comes back with other weights in the middle of a step, and then does not say who it is."""

    async def restarts(call):
        server.served["base"] = call.asked_of = other
        server.restart("second") if not options else None
        server.served["base"], server.read = other, dead
        return await half_right(call)

    with FakeServer(truthful=True) as server:
        trainer = build(tmp_path, server, **mode, **options)
        other, before = other_model(), [p.clone() for p in trainer.model.parameters()]
        server.behave = restarts
        with fails("rollouts may come from other weights.*(log-probabilities differ|was asked afterwards)"):
            trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("mode", [UNIFORM, {}, LORA | UNIFORM], ids=["uniform", "seq", "lora"])
def test_rollouts_that_prove_themselves_are_trained_on(mode, tmp_path, caplog):
    async def dies(call):
        server.read = dead
        return await half_right(call)

    with FakeServer(truthful=True) as server:
        peft_config = lora() if "vllm_weight_sync" in mode else None
        trainer = build(tmp_path, server, peft_config=peft_config, max_steps=2, **mode)
        server.behave = dies
        with fails("still has the weights|could not be sent"):
            trainer.train()
    assert trainer.state.global_step == 1 and "they were the right ones" in caplog.text


def test_a_server_that_hangs_at_the_end_of_a_step_is_waited_for_once(tmp_path):
    """A later round, the proof, the next step's question and the adapter's end would each take a deadline."""

    async def hangs(call):
        if call.round:
            server.read = server.prove = server.control = stall
            await stall(call)
        return answer(call, [WRONG] * call.n)

    async def stall(*_):
        await asyncio.sleep(60)

    with FakeServer(hangs, truthful=True) as server:
        options = {"vllm_request_timeout": 6.0, "max_steps": 2} | LORA
        trainer, started = build(tmp_path, server, peft_config=lora(), **options), time.monotonic()
        with fails("still has the weights|could not be sent"):
            trainer.train()
    assert trainer.state.global_step == 1
    assert time.monotonic() - started < 6.0 + 4 * 1.0 + 5


def test_an_adapter_that_stays_on_the_server_is_known_by_name_and_removed_by_the_next_run(tmp_path, caplog):
    async def never(request, payload):
        if "unload" in request.path:
            return web.json_response({"error": {"message": "not now"}}, status=500)

    with FakeServer(control=never) as server:
        build(tmp_path, server, peft_config=lora(), **LORA).train()
        (left,) = set(server.served) - {"base"}
        assert f"The adapter {left} is still on the vLLM server" in caplog.text
        assert [path.name for path in (tmp_path / "vllm_weight_sync").iterdir()] == [left]
        server.control = None
        build(tmp_path, server, peft_config=lora(), **LORA).train()
        assert list(server.served) == ["base"]
    assert not (tmp_path / "vllm_weight_sync").exists()
