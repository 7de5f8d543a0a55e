"""
Architectures and adapters of any kind are trained. (The value head's hidden states:
tests/pass_rates/test_value_head.py.)
"""

import copy

import peft
import pytest
import torch
import transformers
from transformers import set_seed

from ..helpers import build, logs_of, moved, tiny_config, tiny_model, tiny_tokenizer


EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES = {
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, **EXPERTS},
    "Mistral": {"sliding_window": 4},
    "Llama": {"tie_word_embeddings": True},
}
COMMON = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "bos_token_id")
COMMON += ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id", "initializer_range")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, tmp_path):
    common = {key: value for key, value in tiny_config(tiny_tokenizer()).to_dict().items() if key in COMMON}
    set_seed(0)
    config = getattr(transformers, f"{name}Config")(**common | ARCHITECTURES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    trainer = build(tmp_path, model=model, max_steps=1)
    assert any(moved(trainer).values())
    assert ("aux_loss" in logs_of(trainer)[0]) == hasattr(config, "router_aux_loss_coef")


def lora(**options):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)


ADAPTERS = {
    "DoRA": lora(use_dora=True),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "all linear": lora(target_modules="all-linear"),
    "trainable tokens": lora(trainable_token_indices=[1, 2]),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("mode", ["seq-balance", pytest.param("est-value", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, mode, tmp_path):
    options = {"adaptive_sampling": mode, "peft_config": copy.deepcopy(ADAPTERS[name])}
    # The cache of prefix tuning does not go with checkpointing, in GRPOTrainer either.
    trainer = build(tmp_path, gradient_checkpointing=name != "prefix tuning", **options)
    assert any(moved(trainer).values())


def test_a_new_adapter_is_trained_alone_and_compared_with_the_base_model(tmp_path):
    trainer = build(tmp_path, peft_config=lora(), beta=0.1, max_steps=3)
    assert all(has_moved == ("lora_" in name) for name, has_moved in moved(trainer).items())
    assert trainer.ref_model is None
    assert [logs["kl"] > 0 for logs in logs_of(trainer)] == [False, True, True]


def test_an_adapter_that_is_already_there_is_trained_on(tmp_path):
    model = peft.get_peft_model(tiny_model(), lora(init_lora_weights=False))
    assert all(has_moved == ("lora_" in name) for name, has_moved in moved(build(tmp_path, model=model)).items())


def test_the_head_can_be_cast_to_float32(tmp_path):
    trainer = build(tmp_path, model=tiny_model().bfloat16(), cast_lm_head_to_fp32=True)
    trainer.train()
    assert trainer.model.lm_head.weight.dtype == torch.float32 and len(logs_of(trainer)) == 2


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    trainer = build(tmp_path, torch_compile=True, torch_compile_backend="eager", max_steps=1)
    assert any(moved(trainer).values())
