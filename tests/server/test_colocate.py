"""Rounds on a colocated engine, with a scripted engine in place of vLLM's: when it sleeps, wakes and gets weights."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import QUICK, logs_of, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import RIGHT, TOKENIZER, WRONG, reward
from .helpers import UNIFORM, fails


class ScriptedEngine:
    """Logs its calls. Rounds 0 and 1 of a step are all wrong, later ones half right. Log-probabilities are those of its weights."""

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
    """TRL sets RANK, WORLD_SIZE and the like for the engine; processes that later tests start must not inherit them."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", ScriptedEngine)

    def build(sleep=True, **options):
        rounds = {"per_device_train_batch_size": 16, "max_rounds": 4, "samples_per_round": 4}
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleep}
        args = AdaGRPOConfig(str(tmp_path), **QUICK | rounds | engine | options)
        return AdaGRPOTrainer(tiny_model(), reward, args, prompt_dataset(1), processing_class=tiny_tokenizer())

    return build


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_stays_awake_over_the_rounds_of_a_step(sleep, build):
    trainer = build(sleep, learning_rate=0.05)
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


OTHER_WEIGHTS = (
    "colocated vLLM engine: its rollouts may come from other weights.*differ from the trainer's by .*Set vllm_enable"
)


@pytest.mark.parametrize(
    ("sleep", "mode"), [(True, UNIFORM), (True, {}), (False, {})], ids=["uniform", "seq", "without sleep"]
)
def test_rollouts_of_weights_that_never_arrived_are_not_trained_on(sleep, mode, build, monkeypatch):
    """An engine that has slept has no weights at all; another one has those it was started from, until they are trained."""
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    trainer = build(sleep, learning_rate=0.05, max_steps=4, **mode)
    with fails(OTHER_WEIGHTS):
        trainer.train()
    assert trainer.state.global_step < 4 and (trainer.state.global_step == 0) == sleep


@pytest.mark.parametrize("sleep", [True, False])
def test_another_training_starts_with_the_current_weights(sleep, build):
    trainer = build(sleep, learning_rate=0.05, max_steps=1)
    for _ in range(3):  # each begins at step 0, at which the one before has pushed its weights
        trainer.train()
    assert trainer.state.global_step == 1


def test_weights_of_an_evaluation_are_verified(build, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    with fails(OTHER_WEIGHTS):
        build().evaluate(prompt_dataset(1))


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.8, "vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_importance_sampling_correction": False},
        {"generation_kwargs": {"bad_words": ["7"]}, "vllm_importance_sampling_mode": "token_truncate"},
    ],
)
def test_weights_are_not_verified_without_comparable_log_probabilities(options, build, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "loads_weights", False)
    trainer = build(**options)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("mask", "logprob", "is_accepted"), [(1, -1.0, True), (1, -2.0, False), (1, float("nan"), False), (0, -2.0, True)]
)
def test_masked_tokens_are_ignored_and_unscored_ones_are_not(mask, logprob, is_accepted, build):
    output = {"old_per_token_logps": torch.full((2, 3), -1.0), "sampling_per_token_logps": torch.full((2, 3), logprob)}
    with nullcontext() if is_accepted else fails("other weights"):
        build().vllm.check_logprobs(output | {"completion_mask": torch.full((2, 3), mask)}, same_weights=True)


def test_the_tolerance_is_larger_for_quantized_engines(build, monkeypatch):
    generation = build().vllm_generation
    generation.verify_colocated(0.09)
    with fails("other weights"):
        generation.verify_colocated(0.11)
    monkeypatch.setattr(ScriptedEngine.model_config, "quantization", "fp8")
    generation.verify_colocated(0.4)
    with fails("other weights"):
        generation.verify_colocated(0.6)
