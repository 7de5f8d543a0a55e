"""`adaptive_sampling="uniform"` is GRPOTrainer, bit for bit."""

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import QUICK, even_reward, length_reward, prompt_dataset, saved_tiny_model, tiny_model, tiny_tokenizer


TIMINGS = ("runtime", "per_second", "step_time")


def train(trainer_class, config_class, tmp_path, peft_config=None, dataset=None, **overrides):
    args = config_class(
        str(tmp_path), **QUICK | {"num_generations": 4, "scale_rewards": "group", "epsilon_high": 0.25} | overrides
    )
    trainer = trainer_class(
        saved_tiny_model(tmp_path / "model"),
        [even_reward, length_reward],
        args,
        dataset or prompt_dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def random_prompts(rows):
    return {"prompt": [prompt if torch.rand(()) < 0.5 else "9+9=" for prompt in rows["prompt"]]}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 4},
        {"num_iterations": 2, "max_steps": 4},
        {"beta": 0.1},
        {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
        {"dataset": prompt_dataset().with_transform(random_prompts)},
    ],
    ids=["plain", "accumulation", "steps_per_generation", "num_iterations", "beta", "lora", "random transform"],
)
def test_uniform_is_grpo_bit_for_bit(overrides, tmp_path):
    grpo = train(GRPOTrainer, GRPOConfig, tmp_path / "grpo", **overrides)
    ada = train(AdaGRPOTrainer, AdaGRPOConfig, tmp_path / "ada", adaptive_sampling="uniform", **overrides)

    initial = dict(tiny_model().named_parameters())
    moved = 0
    for (name, expected), (_, actual) in zip(grpo.model.named_parameters(), ada.model.named_parameters(), strict=True):
        assert torch.equal(expected, actual), name
        moved += name not in initial or not torch.equal(expected, initial[name])
    assert moved > 0

    assert len(grpo.state.log_history) == len(ada.state.log_history)
    for expected, actual in zip(grpo.state.log_history, ada.state.log_history, strict=True):
        for name, value in expected.items():
            if not any(timing in name for timing in TIMINGS):
                assert actual[name] == value or (value != value and actual[name] != actual[name]), name
        assert all(name.startswith("ada/") for name in actual.keys() - expected.keys())
    assert "ada/frac_zero_advantage_groups" in ada.state.log_history[0]
