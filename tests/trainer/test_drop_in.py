"""Scripts written for GRPOTrainer, with two names swapped. What a feature does is tested elsewhere; here it runs."""

import datetime
from pathlib import Path

import peft
import pytest
import transformers
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import (
    PROMPTS,
    QUICK,
    build,
    chat_tokenizer,
    even_reward,
    moved,
    prompt_dataset,
    tiny_chat_model,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)


ROOT = Path(__file__).parents[2]
ALL_MODES = ["seq-balance", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("est-ema", "est-value"))]


def train(*args, **options):
    """A run that changes weights and logs the metrics of adaptive sampling."""
    trainer = build(*args, **options)
    assert any(moved(trainer).values())
    assert any("ada/pass_rate/mean" in logs for logs in trainer.state.log_history)
    return trainer


SHAPES = {
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "min_p and top_p": {"min_p": 0.01, "top_p": 0.9},
    "static cache": {"cache_implementation": "static"},
    "beams": {"generation_kwargs": {"num_beams": 2}},
    "length limit in generation_kwargs": {"max_completion_length": None, "generation_kwargs": {"max_new_tokens": 4}},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "max_steps": 4},
    "bf16": {"bf16": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "columns removed": {"remove_unused_columns": True},
    "input tokens counted": {"include_num_input_tokens_seen": True},
    "odd steps per generation": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 3},
    "odd iterations": {"num_iterations": 3, "gradient_accumulation_steps": 2, "max_steps": 4},
    "groups over micro-batches": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "groups of three": {"per_device_train_batch_size": 6, "num_generations": 3},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
    "half an epoch": {"max_steps": -1, "num_train_epochs": 0.5},
    "bool for scale_rewards": {"scale_rewards": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1},
    "dropout": {"disable_dropout": True},
}


SLOW = ("compiled", "workers")  # PyTorch waits five seconds for a persistent worker to end


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SHAPES])
def test_options(name, tmp_path):
    trainer = train(tmp_path, **SHAPES[name])
    assert trainer.state.global_step == trainer.state.max_steps > 0


def test_logging_every_few_steps(tmp_path):
    trainer = train(tmp_path, logging_steps=3, max_steps=6, log_completions=True, num_completions_to_print=1)
    assert [logs["step"] for logs in trainer.state.log_history if "reward" in logs] == [3, 6]
    assert len(list((tmp_path / "completions").glob("*.parquet"))) >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"auto_find_batch_size": True},
        {"router_aux_loss_coef": 0.1},
        {"use_vllm": True, "vllm_mode": "nonsense"},
        {"sync_ref_model": True},
        {"reward_weights": [1.0, 2.0]},
        {"per_device_train_batch_size": 6},
    ],
    ids=lambda options: ", ".join(options),
)
def test_what_grpo_rejects_is_rejected_with_the_same_error(options, tmp_path):
    errors = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (AdaGRPOTrainer, AdaGRPOConfig)):
        with pytest.raises((ValueError, ImportError)) as caught:
            args = config_class(str(tmp_path), **QUICK | {"num_generations": 4} | options)
            trainer_class(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("mode", ["seq-balance", "est-ema"])
def test_columns_of_any_kind(mode, tmp_path):
    extras = {
        "when": datetime.datetime(2026, 1, 1),
        "none": None,
        "blob": b"x",
        "nested": {"a": [{"b": None}]},
        "id": None,
    }
    seen = []

    def reward(completions, when, none, blob, nested, **kwargs):
        seen.extend(zip(when, none, blob, map(str, nested), strict=True))
        return even_reward(completions)

    train(
        tmp_path,
        reward,
        Dataset.from_list([{"prompt": prompt} | extras for prompt in PROMPTS * 2]),
        adaptive_sampling=mode,
    )
    assert set(seen) == {(extras["when"], None, b"x", "{'a': [{'b': None}]}")}


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_formatted_data_sets(format, tmp_path):
    train(tmp_path, dataset=Dataset.from_dict({"prompt": PROMPTS * 2, "numbers": [[1, 2]] * 8}).with_format(format))


def test_a_single_prompt(tmp_path):
    train(tmp_path, dataset=prompt_dataset(1).select([0]), per_device_train_batch_size=4, max_steps=3)


def of_some(prompts, completions, **kwargs):
    return [reward if prompt < "4" else None for prompt, reward in zip(prompts, even_reward(completions), strict=True)]


def of_others(prompts, completions, **kwargs):
    return [None if prompt < "4" else reward for prompt, reward in zip(prompts, even_reward(completions), strict=True)]


def test_a_reward_function_per_data_set(tmp_path):
    trainer = build(tmp_path, [of_some, of_others], baseline="batch", log_completions=True)
    assert any(moved(trainer).values())
    assert trainer.state.log_history[0]["ada/frac_unscored"] == 0


EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES = {
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, **EXPERTS},
    "Mistral": {"sliding_window": 4},
    "Llama": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, mode, tmp_path):
    common = {key: value for key, value in tiny_config(tiny_tokenizer()).to_dict().items() if key in COMMON}
    set_seed(0)
    config = getattr(transformers, f"{name}Config")(**common | ARCHITECTURES[name])
    trainer = train(
        tmp_path, model=getattr(transformers, f"{name}ForCausalLM")(config), adaptive_sampling=mode, max_steps=1
    )
    assert ("aux_loss" in trainer.state.log_history[0]) == hasattr(config, "router_aux_loss_coef")


COMMON = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "bos_token_id")
COMMON += ("num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id", "initializer_range")
TARGETS = ["q_proj", "v_proj"]
PEFT = {
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "modules_to_save": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "all linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "trainable tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[1, 2]),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=TARGETS, feedforward_modules=[]),
}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", PEFT)
def test_adapters(name, mode, tmp_path):
    checkpointing = name != "prefix tuning"  # its cache does not go with it, in GRPOTrainer either
    trainer = train(tmp_path, peft_config=PEFT[name](), adaptive_sampling=mode, gradient_checkpointing=checkpointing)
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("template", ["qwen3", "gptoss", "gemma3", "deepseekv3", "phi3"])
def test_chat_templates(template, tmp_path):
    tokenizer = chat_tokenizer(template)

    def reward(completions, **kwargs):
        return [float(len(completion[0].get("content") or "") % 2) for completion in completions]

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})
    train(
        tmp_path,
        reward,
        dataset,
        tiny_chat_model(tokenizer),
        tokenizer=tokenizer,
        max_completion_length=8,
        max_steps=1,
    )
