"""Arguments of the trainer that a mode does not support, and the reward function that defines a success."""

import functools

import pytest
from trl import GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..conversations import Counting
from ..helpers import (
    QUEUE_MODES,
    QUICK,
    build,
    chat_tokenizer,
    config,
    even_reward,
    length_reward,
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


@pytest.mark.parametrize("mode", QUEUE_MODES)
@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "logging_strategy"])
def test_the_end_of_an_epoch_is_not_seen_in_a_stream_that_the_queue_reads(name, mode, tmp_path):
    """Checkpoints, evaluations or logs of each epoch would be missing."""
    stream = prompt_dataset().to_iterable_dataset()
    with pytest.raises(ValueError, match=rf"{name} \('epoch'\) is not supported with a stream .*Set {name}='steps'"):
        build(tmp_path, dataset=stream, eval_dataset=prompt_dataset(), **QUEUE_MODES[mode] | {name: "epoch"})


def test_an_unsupported_processor_is_rejected_after_it_was_loaded(tmp_path, monkeypatch):
    model, processor = tiny_vision_language_model(chat_tokenizer())
    monkeypatch.setattr("trl.trainer.grpo_trainer.AutoProcessor.from_pretrained", lambda *args, **kwargs: processor)
    args = config(tmp_path, **QUICK | {"adaptive_sampling": "est-value"})
    with pytest.raises(ValueError, match="not supported with a vision-language model"):
        AdaGRPOTrainer(model, even_reward, args, prompt_dataset())


# The reward that defines a success


def anonymous():
    return lambda completions, **kwargs: even_reward(completions)


UNIFORM, EST = ({"adaptive_sampling": mode, "num_generations": 4} for mode in ("uniform", "est"))
BATCH = {"baseline": "batch"}
TWO = [even_reward, length_reward]
EITHER = "must be 'even_reward' or 'length_reward' or 'sum'"
SUCCESS = [
    ({}, TWO, rf"\(None\) {EITHER}.*'seq-balance'.*exceed positive_threshold.* use baseline='batch'\.$"),
    (BATCH | {"retries": 3}, TWO, rf"\(None\) {EITHER}, because retries depend.* use retries=0\.$"),
    (EST | BATCH, TWO, rf"\(None\) {EITHER}, because .*'est'.* use adaptive_sampling='uniform'\.$"),
    ({"success_reward": "accuracy"}, TWO, rf"\('accuracy'\) {EITHER}.* Use one of these\.$"),
    (
        {"success_reward": "even_reward"},
        [even_reward] * 2,
        r"\('even_reward'\) must be 'sum'.*\(even_reward\) need different",
    ),
    ({}, [anonymous(), anonymous()], r"\(None\) must be 'sum', because.*\(<lambda>\) need different names"),
]


@pytest.mark.parametrize(("options", "functions", "message"), SUCCESS)
def test_success_reward_must_be_the_name_of_one_reward_function(options, functions, message, tmp_path):
    with pytest.raises(ValueError, match=f"success_reward {message}"):
        build(tmp_path, functions, **options)


@pytest.mark.parametrize("options", [UNIFORM, BATCH, {"reward_weights": [0.0, 1.0]}], ids=str)
def test_success_reward_may_be_unset_where_successes_do_not_matter_or_only_one_function_has_a_weight(
    options, tmp_path
):
    assert build(tmp_path, TWO, **options).args.success_reward is None
