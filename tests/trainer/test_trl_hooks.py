"""Calls of TRL within a step: state after them, threads, environments, unsupported arguments."""

import functools
import threading
import traceback
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ada_trl import AdaGRPOTrainer
from ada_trl.sampling.sampler import Completion, _portable
from ada_trl.trainer.trl_private import vllm_generation_class
from ada_trl.utils.distributed import collectives_disabled, gather_unless_disabled, no_collectives
from ada_trl.vllm.generation import AdaVLLMGeneration

from ..conversations import Counting, ToolUser
from ..conversations import build as build_multi_turn
from ..helpers import (
    QUICK,
    build,
    chat_tokenizer,
    config,
    even_reward,
    prompt_dataset,
    tiny_vision_language_model,
)


@pytest.mark.parametrize("mode", ["seq-balance", "est-ema", "uniform"])
def test_a_trainer_is_idle_again_after_a_step_and_after_a_failure(mode, tmp_path):
    broken = []

    def reward(completions, **kwargs):
        if broken:
            raise ZeroDivisionError("my bug")
        return even_reward(completions)

    def state():
        return trainer._interception, id(trainer._metrics), collectives_disabled(), grpo_trainer.gather

    trainer = build(tmp_path, reward, adaptive_sampling=mode)
    idle = state()
    trainer.train()
    assert state() == idle
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert state() == idle


def test_a_failing_reward_function_is_not_called_from_inside_of_trls_batch(tmp_path):
    def reward(completions, **kwargs):
        raise ZeroDivisionError("my bug")

    with pytest.raises(ZeroDivisionError) as caught:
        build(tmp_path, reward).train()
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (grpo_trainer.__file__, "_calculate_rewards") in frames
    assert (grpo_trainer.__file__, "_generate_and_score_completions") not in frames
    assert caught.value.__context__ is None and caught.value.__cause__ is None


# Threads


def test_collectives_are_disabled_for_one_thread_only():
    def collective(tensor):
        return "everyone's"

    gather, inside, outside = gather_unless_disabled(collective), threading.Event(), threading.Event()
    seen = []

    def other():
        inside.wait(10)
        seen.append(gather("mine"))
        with no_collectives():
            seen.append(gather("mine"))
            outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with no_collectives():
        inside.set()
        assert outside.wait(10)
        with no_collectives():
            assert gather("mine") == "mine"
        assert gather("mine") == "mine"
    thread.join()
    assert seen == ["everyone's", "mine"] and gather("mine") == "everyone's" and not collectives_disabled()


def test_our_vllm_generation_is_built_while_a_trainer_with_vllm_is_constructed(monkeypatch):
    built = []

    class Plain:
        def __init__(self, **options):
            built.append(("plain", options))

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Plain)
    monkeypatch.setattr(AdaVLLMGeneration, "__init__", lambda self, **options: built.append(("ours", options)))
    for use_vllm in (True, False):
        with vllm_generation_class(SimpleNamespace(use_vllm=use_vllm), weight_sync="disk"):
            grpo_trainer.VLLMGeneration(mode="server")
        assert grpo_trainer.VLLMGeneration is Plain
    assert built == [("ours", {"mode": "server", "weight_sync": "disk"}), ("plain", {"mode": "server"})]


# Environments


class Late(Counting):
    """No rollout of a prompt's first round is right, so that there is a second round."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def get_reward(self):
        return float(self.resets[self.target] > 32 and super().get_reward())


def test_environments_after_a_step_are_those_of_its_rows(tmp_path):
    Counting.resets.clear()
    Late.made, seen = 0, []
    rows = {"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": [1, 2, 3, 4]}

    class Reader(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append([(environment.target, environment.given) for environment in trainer.environments])

    options = {"samples_per_round": 32, "max_rounds": 2, "max_steps": 2}
    outputs = []

    class Observed(ToolUser):
        def _generate_and_score_completions(self, inputs):
            outputs.append(super()._generate_and_score_completions(inputs))
            return outputs[-1]

    trainer = build_multi_turn(Observed, tmp_path, [], Dataset.from_dict(rows), factory=Late, **options)
    trainer.add_callback(Reader())
    trainer.train()
    for environments, output in zip(seen, outputs, strict=True):
        prompts = trainer._tokenizer.batch_decode(output["prompt_ids"])
        completions = trainer._tokenizer.batch_decode(output["completion_ids"])
        for (target, given), prompt, completion in zip(environments, prompts, completions, strict=True):
            assert f"Please give {target}+0" in prompt
            assert (f"It is {given}." in completion) == (given is not None)
    assert len({id(environment) for environment in trainer.environments}) == 16
    assert sorted({given is None for _, given in seen[0]}) == [False, True]
    logs = trainer.state.log_history
    assert [logs[i]["ada/rounds/mean"] for i in (0, 1)] == [2, 1]
    # As many as rollouts of the first step, which has two rounds; the second step makes no new ones.
    assert Late.made == len(trainer._environment_pool[None]) == 4 * 2 * 32


def test_a_failed_step_loses_no_environment(tmp_path):
    def reward(completions, **kwargs):
        raise ZeroDivisionError

    rows = {"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": [1, 2, 3, 4]}
    trainer = build_multi_turn(
        ToolUser, tmp_path, reward, Dataset.from_dict(rows), factory=Counting, success_reward="Counting"
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert len(trainer._environment_pool[None]) == 16


def test_an_environment_that_cannot_be_pickled_is_not_sent():
    completion = Completion(([1], [2]), {"prompt": "1+2="}, {}, 1, False, threading.Lock())
    assert _portable(completion) == completion._replace(environment=None)
    counting = completion._replace(environment=Counting())
    assert _portable(counting) is counting


# Rejected arguments


def rollout(prompts, trainer):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"rollout_func": rollout}, "rollout_func is not supported"),
        (
            {"adaptive_sampling": "est-value"},
            {"environment_factory": Counting},
            "not supported with environment_factory",
        ),
        (
            {"adaptive_sampling": "est-value"},
            {"processing_class": "a processor"},
            "not supported with a vision-language model",
        ),
        ({"success_reward": "accuracy"}, {}, r"success_reward \('accuracy'\) must be 'even_reward' or 'sum'"),
    ],
    ids=["rollout_func", "environment", "vision", "success_reward"],
)
def test_unsupported_arguments_are_rejected_before_a_model_is_loaded(options, given, message, tmp_path, monkeypatch):
    @functools.wraps(GRPOTrainer.__init__)
    def init(self, *args, **kwargs):
        raise AssertionError("GRPOTrainer was built first.")

    if "processing_class" in given:
        given = {"processing_class": tiny_vision_language_model(chat_tokenizer())[1]}
    monkeypatch.setattr(GRPOTrainer, "__init__", init)
    args = config(tmp_path, **QUICK | options)
    with pytest.raises(ValueError, match=message):
        AdaGRPOTrainer("org/never-loaded", even_reward, args, prompt_dataset(), **given)


def test_an_unsupported_processor_is_rejected_after_it_was_loaded(tmp_path, monkeypatch):
    model, processor = tiny_vision_language_model(chat_tokenizer())
    monkeypatch.setattr("trl.trainer.grpo_trainer.AutoProcessor.from_pretrained", lambda *args, **kwargs: processor)
    args = config(tmp_path, **QUICK | {"adaptive_sampling": "est-value"})
    with pytest.raises(ValueError, match="not supported with a vision-language model"):
        AdaGRPOTrainer(model, even_reward, args, prompt_dataset())


def test_a_second_call_of_train_generates_again(tmp_path):
    trainer = build(tmp_path, num_iterations=2, max_steps=3)
    steps, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        steps.append(trainer.state.global_step),
        generate(inputs),
    )[1]
    trainer.train()
    trainer.train()
    assert steps == [0, 2, 0, 2]
