"""
Verification of weights of a scripted server or engine: rollouts of other weights are never trained on without an
error.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from aiohttp import web
from transformers import TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import QUICK, logs_of, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import RIGHT, TOKENIZER, WRONG, FakeServer, fingerprint, half_right, reward
from .helpers import LORA, ONE_ROUND, UNIFORM, build, error_response, fails, page, train


MODES = pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
MODES_AND_LORA = pytest.mark.parametrize("mode", [UNIFORM, {}, LORA | UNIFORM], ids=["uniform", "seq", "lora"])


def compare_weights(trainer, server):
    """By request: whether the server had the weights that were trained then."""
    seen, original = [], trainer._generate_and_score_completions

    def compare(inputs):
        start = len(server.completions)
        output = original(inputs)
        ours = fingerprint(trainer.model.parameters())
        seen.extend(abs(call.weights - ours) < 1e-9 * ours for call in server.completions[start:])
        return output

    trainer._generate_and_score_completions = compare
    return seen


# Restarts


class Restart(TrainerCallback):
    """Restarts the server at a moment of the second step."""

    def __init__(self, server, moment):
        self.server, self.moment = server, moment

    def _restart_at(self, moment, state):
        if moment == self.moment and state.global_step == 1:
            self.server.restart("second")

    def on_step_end(self, args, state, control, **kwargs):
        self._restart_at("step", state)

    def on_substep_end(self, args, state, control, **kwargs):
        self._restart_at("micro-step", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._restart_at("evaluation", state)


@MODES
def test_a_server_that_is_restarted_between_steps_gets_the_weights_again(mode, tmp_path):
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1, **mode}
    with FakeServer() as server:
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), **options)
        trainer.add_callback(Restart(server, "step"))
        seen = compare_weights(trainer, server)
        trainer.train()
    assert server.info["vllm_config"]["instance_id"] == "second"
    assert len(seen) > 3 * 2 and all(seen)


@MODES
@pytest.mark.parametrize("moment", ["micro-step", "evaluation"])
def test_a_server_that_is_restarted_within_a_step_stops_the_run(moment, mode, tmp_path):
    """
    An evaluation, or the micro-step before, has pushed the weights of this step already, but to the instance before.
    """
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1, **mode}
    if moment == "evaluation":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    with FakeServer() as server:
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), eval_dataset=prompt_dataset(1), **options)
        trainer.add_callback(Restart(server, moment))
        with fails("restarted during the step .*first became second"):
            trainer.train()
    assert trainer.state.global_step == 1


def restarting(server):
    async def behave(call):
        server.restart("second")
        return await half_right(call)

    return behave


@MODES_AND_LORA
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_server_restarted_during_a_generation_stops_the_run(mode, evaluating, tmp_path):
    with FakeServer() as server:
        trainer = build(tmp_path, server, **mode)
        server.behave = restarting(server)
        with fails("restarted during the step .*first became second|no model ada-") as error:
            trainer.evaluate(prompt_dataset(1)) if evaluating else trainer.train()
    assert server.url in str(error.value)


def test_rollouts_of_a_rollout_function_are_verified(tmp_path):
    def rollout(prompts, trainer):
        ids = tiny_tokenizer()(prompts)["input_ids"]
        _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(ids, None, 4)
        return {"prompt_ids": ids, "completion_ids": completion_ids, "logprobs": [[t[0] for t in s] for s in logprobs]}

    with FakeServer() as server:
        trainer = build(tmp_path, server, rollout_func=rollout, **UNIFORM)
        seen = compare_weights(trainer, server)
        trainer.train()
        assert seen and all(seen)
        server.behave = restarting(server)
        trainer = build(tmp_path, server, rollout_func=rollout, **UNIFORM)
        with fails("restarted during the step"):
            trainer.train()


# Synchronizations that had no effect


async def no_confirmation(request, payload):
    return web.json_response({}) if request.path == "/collective_rpc" else None


async def confirmation_only(request, payload):
    """As if it had loaded the weights."""
    if request.path == "/collective_rpc":
        return web.json_response({"results": [None]})
    if request.path == "/v1/load_lora_adapter":
        return web.Response(body=b"Success: LoRA adapter added successfully.")


async def no_file(request, payload):
    return error_response("no such file") if request.path == "/collective_rpc" else None


async def no_reset(request, payload):
    return web.json_response({"success": False}) if request.path == "/reset_prefix_cache" else None


async def web_page(request, payload):
    return await page() if request.path in ("/collective_rpc", "/v1/load_lora_adapter") else None


OTHER_WEIGHTS = "does not have this step's weights.*"


@pytest.mark.parametrize(
    ("control", "mode", "message"),
    [
        (web_page, UNIFORM, "weights could not be sent.*web page.*Sign in"),
        (web_page, LORA, "weights could not be sent.*web page"),
        (no_file, {}, "weights could not be sent.*500.*no such file"),
        (no_reset, UNIFORM, "prefix cache"),
        (no_confirmation, {}, "weights could not be sent.*no worker has confirmed"),
        (confirmation_only, UNIFORM, OTHER_WEIGHTS + "differ from the trainer's by [0-9.]+ nats per token"),
        (confirmation_only, {}, OTHER_WEIGHTS + "differ from the trainer's by [0-9.]+ nats per token"),
        (confirmation_only, LORA | UNIFORM, OTHER_WEIGHTS + "no model ada-"),
    ],
)
def test_a_synchronization_without_effect_stops_the_run(control, mode, message, tmp_path):
    with FakeServer(control=control) as server:
        trainer = build(tmp_path, server, max_steps=2, **mode)
        seen = compare_weights(trainer, server)
        with fails(message) as error:
            trainer.train()
    assert trainer.state.global_step <= 1 and all(seen), "The server was started from the weights of the first step."
    assert control is confirmation_only or server.completions == []
    assert server.url in str(error.value)
    assert "resume from the last checkpoint" in str(error.value) or "dedicated server" in str(error.value)


@MODES
def test_weights_of_another_run_on_the_same_server_are_detected(mode, tmp_path):
    async def overwrite(call):
        for parameter in server.served["base"].parameters():
            parameter.data += 0.1
        return await half_right(call)

    with FakeServer(overwrite) as server:
        trainer = build(tmp_path, server, **mode)
        with fails("other weights than those.*dedicated server"):
            trainer.train()
    assert trainer.state.global_step == 0


@MODES
def test_the_weight_check_is_one_request_before_and_after_a_step(mode, tmp_path):
    trainer, server = train(tmp_path, FakeServer(), max_steps=3, **mode)
    assert server.weight_checks == 2 * 3
    assert max(logs["ada/vllm/weight_check_logprob_diff"] for logs in logs_of(trainer)) < 1e-5


@MODES
def test_a_server_that_does_not_respond_to_the_check_after_a_generation_stops_the_run(mode, tmp_path):
    async def no_info(request):
        return error_response("engine dead") if request.path == "/server_info" else None

    async def behave(call):
        server.read = no_info
        return await half_right(call)

    with FakeServer(behave) as server:
        trainer = build(tmp_path, server, **mode)
        before = [p.clone() for p in trainer.model.parameters()]
        with fails("may come from other weights.*engine dead"):
            trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class EvaluateAtEnd(TrainerCallback):
    """Makes the first checkpoint the best one, and evaluates it at the end of the training."""

    def __init__(self, trainer):
        self.trainer, self.ended = trainer, False

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_reward"] = -float(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if not self.ended:
            self.ended = True
            self.trainer.evaluate()


def test_the_best_model_is_evaluated_with_its_own_weights(tmp_path):
    options = {"max_steps": 3, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"save_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "reward"}
    with FakeServer() as server:
        trainer = build(tmp_path, server, eval_dataset=prompt_dataset(1), **UNIFORM | ONE_ROUND | options)
        trainer.add_callback(EvaluateAtEnd(trainer))
        trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        assert len({call.weights for call in server.completions}) > 1
        assert server.completions[-1].weights == pytest.approx(fingerprint(trainer.model.parameters()), rel=1e-9)


# A colocated engine


class ScriptedEngine:
    """
    Logs its calls. Rounds 0 and 1 of a step are all wrong, later ones half right. Log-probabilities are those of its
    weights.
    """

    loads_weights = True
    model_config = SimpleNamespace(dtype=torch.float32, quantization=None)

    def __init__(self, **kwargs):
        self.calls = []
        self.awake = {"weights", "kv_cache"}
        self.model = tiny_model()
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load)))
        executor = SimpleNamespace(driver_worker=runner)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=self.model_config)

    def log(self, call):
        if self.calls[-1:] != [call]:  # one entry for all tensors of a push
            self.calls.append(call)

    def load(self, weights):
        assert "weights" in self.awake, "weights written to memory that is not mapped"
        if self.loads_weights:
            self.model.load_state_dict(dict(weights), strict=False)
        self.log("load")

    def sleep(self, level):
        self.awake.clear()
        for parameter in self.model.parameters():  # sleep level 2 discards the weights
            parameter.data.zero_()
        self.log("sleep")

    def wake_up(self, tags):
        self.awake.update(tags)
        self.log(f"wake {tags[0]}")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append("generate")
        texts = [RIGHT, WRONG] if self.calls[-3:] == ["generate"] * 3 else [WRONG, WRONG]
        return [self.output(prompt["prompt_token_ids"], texts[i % 2]) for i, prompt in enumerate(prompts)]

    @torch.no_grad()
    def output(self, prompt_ids, text):
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        logits = self.model(torch.tensor([prompt_ids + ids])).logits[0, -len(ids) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        logprobs = [{i: SimpleNamespace(rank=1, logprob=logprob)} for i, logprob in zip(ids, logprobs, strict=True)]
        return SimpleNamespace(
            prompt_token_ids=prompt_ids, outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]
        )


@pytest.fixture(autouse=True)
def environment():
    """
    TRL sets RANK, WORLD_SIZE and the like for the engine; processes that later tests start must not inherit them.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def build_colocated(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", ScriptedEngine)

    def build_with_engine(sleep=True, **options):
        rounds = {"per_device_train_batch_size": 16, "max_rounds": 4, "samples_per_round": 4}
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleep}
        args = AdaGRPOConfig(str(tmp_path), **QUICK | rounds | engine | options)
        return AdaGRPOTrainer(tiny_model(), reward, args, prompt_dataset(1), processing_class=tiny_tokenizer())

    return build_with_engine


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_stays_awake_over_the_rounds_of_a_step(sleep, build_colocated):
    trainer = build_colocated(sleep, learning_rate=0.05)
    trainer.train()
    engine = trainer.vllm_generation.llm
    if sleep:
        step = ["wake weights", "load", "wake kv_cache", "generate", "generate", "generate", "sleep"]
        assert engine.calls == ["sleep", *step, *step]
        assert trainer.vllm_generation.enable_sleep_mode
    else:
        assert engine.calls == ["load", "generate", "generate", "generate"] * 2
    logs = logs_of(trainer)
    assert [step["ada/rounds/mean"] for step in logs] == [3, 3]
    assert [step["ada/frac_exit_condition_met"] for step in logs] == [1, 1]
    assert max(step["sampling/sampling_logp_difference/mean"] for step in logs) < 1e-4


WEIGHTS_OF_ENGINE = (
    "colocated vLLM engine: its rollouts may come from other weights.*differ from the trainer's by .*Set vllm_enable"
)


@pytest.mark.parametrize(
    ("sleep", "mode"), [(True, UNIFORM), (True, {}), (False, {})], ids=["uniform", "seq", "without sleep"]
)
def test_rollouts_of_weights_that_never_arrived_are_not_trained_on(sleep, mode, build_colocated, monkeypatch):
    """
    An engine that has slept has no weights at all; another one has those it was started from, until they are trained.
    """
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    trainer = build_colocated(sleep, learning_rate=0.05, max_steps=4, **mode)
    with fails(WEIGHTS_OF_ENGINE):
        trainer.train()
    assert trainer.state.global_step < 4 and (trainer.state.global_step == 0) == sleep


@pytest.mark.parametrize("sleep", [True, False])
def test_another_training_starts_with_the_current_weights(sleep, build_colocated):
    trainer = build_colocated(sleep, learning_rate=0.05, max_steps=1)
    for _ in range(3):  # each begins at step 0, at which the one before has pushed its weights
        trainer.train()
    assert trainer.state.global_step == 1


def test_weights_of_an_evaluation_are_verified(build_colocated, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    with fails(WEIGHTS_OF_ENGINE):
        build_colocated().evaluate(prompt_dataset(1))


RESTRICTED = [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
RESTRICTED += [{"generation_kwargs": {"allowed_token_ids": [1, 2]}}, {"vllm_structured_outputs_regex": "[0-9]+"}]


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_importance_sampling_correction": False},
        *({"vllm_importance_sampling_mode": "token_truncate"} | options for options in RESTRICTED),
    ],
    ids=str,
)
def test_weights_are_not_verified_without_comparable_log_probabilities(options, build_colocated, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    trainer = build_colocated(**options)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("mask", "logprob", "is_accepted"), [(1, -1.0, True), (1, -2.0, False), (1, float("nan"), False), (0, -2.0, True)]
)
def test_masked_tokens_are_ignored_and_unscored_ones_are_not(mask, logprob, is_accepted, build_colocated):
    output = {"old_per_token_logps": torch.full((2, 3), -1.0), "sampling_per_token_logps": torch.full((2, 3), logprob)}
    with nullcontext() if is_accepted else fails("other weights"):
        build_colocated().vllm.check_logprobs(output | {"completion_mask": torch.full((2, 3), mask)})


def test_the_tolerance_is_larger_for_quantized_engines(build_colocated, monkeypatch):
    def verify(difference):
        ours = torch.full((2, 3), -1.0)
        output = {"old_per_token_logps": ours, "sampling_per_token_logps": ours - difference}
        check.verify_rollouts(output | {"completion_mask": torch.ones(2, 3)})

    check = build_colocated().vllm_generation.weight_check
    verify(0.09)
    with fails("other weights"):
        verify(0.11)
    monkeypatch.setattr(ScriptedEngine.model_config, "quantization", "fp8")
    verify(0.4)
    with fails("other weights"):
        verify(0.6)
