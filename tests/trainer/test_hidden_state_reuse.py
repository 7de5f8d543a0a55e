"""The policy's hidden states of the prompts come from forward passes that are made anyway."""

import pytest
import torch
from peft import LoraConfig

from ada_trl.pass_rates.hidden_states import backbone_of, capture_hidden_states, last_hidden_states

from ..helpers import PROMPTS, Watch, build, even_reward, prompt_dataset, tiny_model, tiny_tokenizer


POSTERIOR = {"adaptive_sampling": "uniform", "baseline": "posterior", "learning_rate": 0.05}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


CASES = {
    "one rollout": {"num_generations": 1},
    "groups": {"num_generations": 4},
    "micro-batches": {"num_generations": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    "two iterations": {"num_generations": 1, "num_iterations": 2, "max_steps": 4},
    "adapter": {"num_generations": 1, "peft_config": LORA},
    "adapter and reference": {"num_generations": 1, "peft_config": LORA, "beta": 0.1},
    "gradient checkpointing": {"num_generations": 1, "gradient_checkpointing": True},
    "head in float32": {"num_generations": 1, "cast_lm_head_to_fp32": True},
    "rounds across steps": {"num_generations": 1, "adaptive_sampling": "seq-pos"},
    "static cache": {"num_generations": 1, "cache_implementation": "static"},
    "prefill in chunks": {"num_generations": 1, "generation_kwargs": {"prefill_chunk_size": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_the_prefill_equal_those_of_a_separate_pass(case, tmp_path):
    """With prompts of different lengths, after the weights have changed."""
    trainer = build(tmp_path, dataset=prompt_dataset(2), **{"max_steps": 3} | POSTERIOR | CASES[case])
    watch = Watch(trainer)
    trainer.train()
    assert watch.own_passes == 0 and len(watch.compared) >= 2
    for found, expected in watch.compared:
        assert found.shape == expected.shape and len(found) == 8 // CASES[case]["num_generations"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (first, _), *_, (last, _) = watch.compared
    assert not torch.allclose(first[:2], last[:2]), "The weights have changed."


def test_a_step_makes_as_many_forward_passes_as_grpo(tmp_path):
    passes = {}
    for name, options in {
        "grpo": {"adaptive_sampling": "uniform", "num_generations": 4},
        "posterior": POSTERIOR | {"num_generations": 1},
        "batch": {"adaptive_sampling": "uniform", "baseline": "batch", "num_generations": 1},
        "est": {"adaptive_sampling": "est", "num_generations": 4},
    }.items():
        trainer = build(tmp_path / name, generation_kwargs={"min_new_tokens": 5}, **options)
        watch = Watch(trainer)
        trainer.train()
        passes[name] = watch.passes
    assert passes["grpo"] == passes["posterior"] == passes["batch"] == 2 * (5 + 1)
    assert passes["est"] > passes["grpo"], "Budgets must be known before sampling."


def test_a_separate_pass_is_made_where_no_hidden_state_was_captured(tmp_path):
    trainer = build(tmp_path, num_generations=1, **POSTERIOR)
    watch = Watch(trainer)
    trainer.pass_rates.reader.all_gather_states = lambda own: None
    trainer.train()
    assert watch.own_passes == 2 and not watch.compared


def test_beam_search_takes_a_separate_pass(tmp_path):
    """Its prefill has `num_beams` rows per prompt: 7 of 8 captured rows belonged to another prompt."""
    trainer = build(tmp_path, num_generations=1, generation_kwargs={"num_beams": 2}, **POSTERIOR)
    watch = Watch(trainer)
    trainer.train()
    assert watch.own_passes == 2 and not watch.compared


def test_a_selected_prompt_is_estimated_once(tmp_path):
    options = {"prompt_oversampling": 3, "num_generations": 4, "max_steps": 4, "per_device_train_batch_size": 16}
    rows = prompt_dataset(6).map(lambda row, i: {"id": str(i)}, with_indices=True)
    trainer = build(tmp_path, even_reward, rows, adaptive_sampling="uniform", **options)
    reader = trainer.pass_rates.reader
    seen, original = [], reader.read
    reader.read = lambda prompts: (seen.append(len(prompts)), original(prompts))[1]
    trainer.train()
    assert seen == [12] * 4  # three candidates for each of four slots


@torch.no_grad()
def test_captured_states_are_the_input_of_the_lm_head():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    expected = last_hidden_states(model, inputs["input_ids"], inputs["attention_mask"])
    with capture_hidden_states(model, -1, prefill=tuple(inputs["input_ids"].shape)) as caught:
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert len(caught) == 1 and not backbone_of(model)._forward_hooks
    torch.testing.assert_close(caught[0], expected)
    first = model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1]
    assert torch.equal(model.lm_head(expected).argmax(1), first)
