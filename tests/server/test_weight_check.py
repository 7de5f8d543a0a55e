"""Verification of a scripted server's weights: rollouts of other weights are never trained on without an error."""

import math

import pytest
import torch
from aiohttp import web
from transformers import TrainerCallback

from ada_trl import AdaGRPOConfig
from ada_trl.trainer.vllm_session import sampling_restrictions

from ..helpers import logs_of, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import RIGHT, WRONG, FakeServer, choices_of, fingerprint, half_right
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
@pytest.mark.parametrize("moment", ["step", "micro-step", "evaluation"])
def test_a_server_restarted_between_generations_gets_the_weights_again(moment, mode, tmp_path):
    """An evaluation, or the micro-step before, has pushed the weights of this step already, but to the instance before."""
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1, **mode}
    if moment == "evaluation":
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    with FakeServer() as server:
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), eval_dataset=prompt_dataset(1), **options)
        trainer.add_callback(Restart(server, moment))
        seen = compare_weights(trainer, server)
        trainer.train()
    assert server.info["vllm_config"]["instance_id"] == "second"
    assert len(seen) > 3 * 2 and all(seen)


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


# A server that does not respond to the check after the generation


async def no_info(request):
    return error_response("engine dead") if request.path == "/server_info" else None


def other_model():
    """The same model with other weights, as another run or an older step has them."""
    other = tiny_model()
    for parameter in other.parameters():
        parameter.data += 0.05
    return other


@MODES
@pytest.mark.parametrize("options", [{}, {"vllm_importance_sampling_correction": False}], ids=["", "no correction"])
def test_rollouts_of_other_weights_are_not_trained_on_without_the_check(options, mode, tmp_path):
    """The server is restarted with other weights during a step, and does not return its instance afterwards."""

    async def restart(call):
        server.served["base"] = call.scored_by = other
        server.restart("second") if not options else None
        server.served["base"], server.read = other, no_info
        return await half_right(call)

    with FakeServer(truthful=True) as server:
        trainer = build(tmp_path, server, **mode, **options)
        other, before = other_model(), [p.clone() for p in trainer.model.parameters()]
        server.behave = restart
        with fails("may come from other weights.*(log-probabilities differ|did not respond to the weight check)"):
            trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def die(server, behave):
    async def behave_and_die(call):
        server.read = no_info
        return await behave(call)

    return behave_and_die


@MODES_AND_LORA
def test_rollouts_that_match_the_policy_are_trained_on_without_the_check(mode, tmp_path, caplog):
    with FakeServer(truthful=True) as server:
        trainer = build(tmp_path, server, max_steps=2, **mode)
        server.behave = die(server, half_right)
        with fails("still has the weights|could not be sent"):
            trainer.train()
    assert trainer.state.global_step == 1 and "match the current policy" in caplog.text


# Log-probabilities of the rollouts


@MODES
def test_log_probabilities_of_other_weights_cause_a_warning(mode, tmp_path, caplog):
    with FakeServer() as server:  # its log-probabilities are all −1
        build(tmp_path, server, max_steps=2, **mode).train()
    assert sum("differ from the trainer's" in record.message for record in caplog.records) == 1


def test_an_evaluation_is_checked_by_its_own_log_probabilities(tmp_path, caplog):
    with FakeServer() as server:
        trainer = build(tmp_path, server, **UNIFORM)
        name = "sampling/sampling_logp_difference/mean"
        trainer._metrics["train"][name] = [1.0]  # of weights that were an update older
        trainer.model.eval()
        for difference in ([0.01], [1.0]):
            assert "differ from the trainer's" not in caplog.text
            trainer._metrics["eval"][name] = difference
            trainer.vllm.check_logprobs({}, same_weights=True)
        trainer.vllm_generation.close()
    assert "differ from the trainer's" in caplog.text


def test_another_data_type_causes_a_warning(tmp_path, caplog):
    with FakeServer() as server:
        server.info["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
        build(tmp_path, server).train()
    assert sum("computes in bfloat16, the trainer in float32" in record.message for record in caplog.records) == 1


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


# `top_p`, `top_k`, `min_p`: the server's log-probabilities are those of the kept tokens, renormalised


KEPT = 0.5  # probability mass, of every token


async def restricted(call):
    """Completions of two tokens; with less kept mass, a token's reported probability is larger."""
    choices = choices_of(call, [RIGHT, WRONG] * (call.n // 2))
    for choice in choices:
        logprobs = choice["logprobs"]
        logprobs["token_logprobs"] = [value - math.log(KEPT) for value in logprobs["token_logprobs"]]
    return web.json_response({"choices": choices})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"top_k": -1, "min_p": 0.0}, []),
        ({"top_p": 0.8, "top_k": 20}, ["top_p=0.8", "top_k=20"]),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, ["min_p=0.1", "repetition_penalty=1.1"]),
        ({"top_p": 0.8, "generation_kwargs": {"top_p": 1.0, "stop": ["."], "temperature": 1.0}}, []),
        ({"generation_kwargs": {"top_p": 0.9, "temperature": 0.7}}, ["top_p=0.9", "temperature=0.7"]),
        ({"generation_kwargs": {"allowed_token_ids": [1, 2], "bad_words": None}}, ["allowed_token_ids=[1, 2]"]),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, ["vllm_structured_outputs_regex='[0-9]+'"]),
    ],
)
def test_sampling_restrictions_are_named_with_their_values(options, expected):
    args = AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=4, **options)
    assert sampling_restrictions(args) == expected


@pytest.mark.parametrize(
    ("mode", "ratio", "warns"),
    [
        ("sequence_mask", KEPT**2, True),
        ("sequence_truncate", KEPT**2, True),
        ("token_truncate", KEPT, False),
        ("token_mask", KEPT, False),
    ],
)
def test_sequence_ratios_of_restricted_sampling_cause_a_warning(mode, ratio, warns, tmp_path, caplog):
    with FakeServer(restricted, truthful=True) as server:
        trainer = build(tmp_path, server, top_p=0.8, vllm_importance_sampling_mode=mode, **UNIFORM)
        assert ("Set vllm_importance_sampling_mode='token_truncate'" in caplog.text) == warns
        trainer.train()
    (logs,) = logs_of(trainer)
    assert logs["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio, rel=1e-4)
    assert logs["sampling/sampling_logp_difference/mean"] == pytest.approx(-math.log(KEPT), rel=1e-4)
    assert "weights" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "vllm_importance_sampling_correction": False}])
def test_unrestricted_sampling_or_no_correction_causes_no_warning(options, tmp_path, caplog):
    with FakeServer() as server:
        build(tmp_path, server, **UNIFORM | options).vllm_generation.close()
    assert "vllm_importance_sampling_mode" not in caplog.text


def test_log_probabilities_of_restricted_sampling_cannot_replace_the_check(tmp_path):
    with FakeServer(truthful=True) as server:
        trainer = build(tmp_path, server, top_p=0.8, **UNIFORM)
        server.behave = die(server, restricted)
        with fails("with top_p=0.8 the rollouts' log-probabilities cannot be compared"):
            trainer.train()
