"""Arguments that a mode does not support are rejected before a model is loaded, or after a processor was."""

import functools

import pytest
from trl import GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..conversations import Counting
from ..helpers import (
    QUICK,
    chat_tokenizer,
    config,
    even_reward,
    prompt_dataset,
    tiny_vision_language_model,
)


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
