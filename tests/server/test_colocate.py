"""Rounds on a colocated engine, with a scripted engine in place of vLLM's: when it sleeps, wakes and gets weights."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import trl.generation.vllm_generation as vllm_generation

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import QUICK, logs_of, prompt_dataset, tiny_model, tiny_tokenizer
from .fake import RIGHT, TOKENIZER, WRONG, reward


class ScriptedEngine:
    """Keeps a diary. Rounds 0 and 1 of a step are all wrong, later ones half right."""

    def __init__(self, **kwargs):
        self.diary = []
        self.enable_sleep_mode = kwargs["enable_sleep_mode"]
        self.awake = {"weights", "kv_cache"}
        model = SimpleNamespace(load_weights=lambda weights: self.note("load"))
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def note(self, word):
        if word == "load":
            assert "weights" in self.awake, "weights written to memory that is not mapped"
        if self.diary[-1:] != [word]:  # one entry for all tensors of a push
            self.diary.append(word)

    def sleep(self, level):
        self.awake.clear()
        self.note("sleep")

    def wake_up(self, tags):
        self.awake.update(tags)
        self.note(f"wake {tags[0]}")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        self.diary.append("generate")
        texts = [RIGHT, WRONG] if self.diary[-3:] == ["generate"] * 3 else [WRONG, WRONG]
        return [self.output(prompt["prompt_token_ids"], texts[i % 2]) for i, prompt in enumerate(prompts)]

    def output(self, prompt_ids, text):
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        logprobs = [{i: SimpleNamespace(rank=1, logprob=-1.0)} for i in ids]
        return SimpleNamespace(
            prompt_token_ids=prompt_ids, outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]
        )


@pytest.fixture(autouse=True)
def environment():
    """TRL sets RANK, WORLD_SIZE and the like for the engine; processes that later tests start must not inherit them."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_stays_awake_over_the_rounds_of_a_step(sleep, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", ScriptedEngine)
    args = AdaGRPOConfig(
        str(tmp_path),
        **QUICK
        | {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": sleep,
            "per_device_train_batch_size": 16,
            "max_rounds": 4,
            "samples_per_round": 4,
        },
    )
    trainer = AdaGRPOTrainer(tiny_model(), reward, args, prompt_dataset(1), processing_class=tiny_tokenizer())
    trainer.train()
    engine = trainer.vllm_generation.llm
    if sleep:
        step = ["wake weights", "load", "wake kv_cache", "generate", "generate", "generate", "sleep"]
        assert engine.diary == ["sleep", *step, *step]
        assert trainer.vllm_generation.enable_sleep_mode
    else:
        assert engine.diary == ["load", "generate", "generate", "generate"] * 2
    logs = logs_of(trainer)
    assert [step["ada/rounds/mean"] for step in logs] == [3, 3]
    assert [step["ada/frac_exit_condition_met"] for step in logs] == [1, 1]
