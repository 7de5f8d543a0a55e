"""The value head: correct hidden states for every architecture, a difficulty that is learnt, and exact state."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from ada_trl.pass_rates.hidden_states import last_hidden_states
from ada_trl.pass_rates.success_counts import brier_metrics
from ada_trl.pass_rates.value_head import ValueHead

from .estimated import assert_same_state


SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def qwen2(scale=0.3):
    set_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, initializer_range=scale))


def llama(scale=0.3):
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=scale, tie_word_embeddings=True))


def lora():
    set_seed(0)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.5, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(qwen2(), config)


@pytest.fixture(params=[qwen2, llama, lora])
def model(request):
    return request.param()


def pad(prompts, left, right=0):
    """Each prompt on a separate row, with `left` (more for shorter ones) and `right` tokens of padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[7] * (left + width - len(p)) + p + [7] * right for p in prompts])
    mask = torch.tensor([[0] * (left + width - len(p)) + [1] * len(p) + [0] * right for p in prompts])
    return ids, mask


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


# Hidden states


def test_features_are_the_last_hidden_state_at_the_last_prompt_token(model):
    model.eval()
    expected = torch.cat(
        [model(torch.tensor([p]), output_hidden_states=True).hidden_states[-1][:, -1] for p in PROMPTS]
    )
    for left, right in [(0, 0), (3, 0), (0, 2), (1, 4)]:
        features = last_hidden_states(model, *pad(PROMPTS, left, right), batch_size=3)
        assert features.shape == (3, 64) and features.dtype == torch.float32 and not features.requires_grad
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    whole = last_hidden_states(model, *pad(PROMPTS, 1), batch_size=3)
    for batch_size in (1, 2, 5):
        torch.testing.assert_close(last_hidden_states(model, *pad(PROMPTS, 1), batch_size=batch_size), whole)
    wrapped = torch.nn.DataParallel(model)
    assert torch.equal(last_hidden_states(wrapped, *pad(PROMPTS, 1), batch_size=3), whole)


def test_the_model_is_left_as_it_was_and_logits_are_computed_for_one_position(model):
    model.train()
    model.get_output_embeddings().eval()
    modes = [module.training for module in model.modules()]
    state, logit_shapes = torch.get_rng_state(), []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _, __, output: logit_shapes.append(output.shape[:2])
    )
    first, again = (last_hidden_states(model, *pad(PROMPTS, 0), batch_size=3) for _ in range(2))
    hook.remove()
    assert torch.equal(first, again)  # no dropout
    assert logit_shapes == [(3, 1)] * 2
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        last_hidden_states(model, *(tensor + 1000 for tensor in pad(PROMPTS, 0)), batch_size=3)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


TINY = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES = {
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "encoder_ffn_dim": 32,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gemma2": {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32},
    "bloom": {},
    "gpt_neox": {"intermediate_size": 32},
    "falcon": {},
    "mixtral": {"num_key_value_heads": 1, "intermediate_size": 32, "num_local_experts": 2},
}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_lm_head_of_any_architecture_predicts_from_these_states(architecture):
    """OPT and BART call the decoder inside of their base model, never the base model."""
    set_seed(0)
    config = AutoConfig.for_model(architecture, **TINY | ARCHITECTURES[architecture], pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = pad(PROMPTS, left=0)
    states = last_hidden_states(model, ids, mask, batch_size=3)
    assert states.shape == (3, model.get_output_embeddings().in_features)
    if architecture == "bart":  # its positions count padding, in generation as well
        expected = model(input_ids=ids, attention_mask=mask).logits[:, -1]
    else:
        expected = torch.cat([model(input_ids=torch.tensor([prompt])).logits[:, -1] for prompt in PROMPTS])
    logits = model.get_output_embeddings()(states)
    if getattr(config, "final_logit_softcapping", None):
        logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


# Predictions and training


def batches(number, size=16, hidden_size=8, seed=0):
    """Features with a common part, and outcomes that depend on the first of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        features = torch.randn(size, hidden_size, generator=generator)
        num_rollouts = torch.randint(1, 9, (size,), generator=generator)
        positives = torch.binomial(num_rollouts.float(), (2 * features[:, 0]).sigmoid(), generator=generator).int()
        features[:, 1] = 50 + 1e-2 * features[:, 1]
        yield features, positives.tolist(), num_rollouts.tolist()


def head_with(**attributes):
    """A head with other settings of training."""
    return type("Head", (ValueHead,), attributes)(8)


def test_the_first_prediction_is_the_prior_mean():
    features = torch.randn(5, 8) * 100
    assert ValueHead(8).predict(features) == pytest.approx([1 / 17] * 5)


def test_one_step_is_a_step_of_adamw_on_the_cross_entropy_of_the_counts():
    features, positives, num_rollouts = next(batches(1))
    head = head_with(gradient_steps=3, learning_rate=0.1, weight_decay=0.2)
    head.observe(features, positives, num_rollouts)

    standardised = (features.double() - features.double().mean(0)) / features.double().std(0, correction=0)
    stored = (features.half().double() - features.double().mean(0)) / features.double().std(0, correction=0)
    assert (stored - standardised).abs().max() > 1e-4, "It is trained on float16."
    inputs = (stored.clamp(-5, 5) / math.sqrt(8)).float()
    weight = torch.zeros(8, requires_grad=True)
    bias = torch.tensor([math.log(1 / 16)], requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], 0.1, weight_decay=0.2)
    k, n = torch.tensor(positives), torch.tensor(num_rollouts)
    for _ in range(3):
        optimizer.zero_grad()
        p = (inputs @ weight + bias).sigmoid()
        loss = -(k * p.log() + (n - k) * (1 - p).log()).sum() / n.sum()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(head.weight, torch.cat([weight, bias]))
    # AdamW hides a wrong scale of the gradient until batches differ in size.
    torch.testing.assert_close(head.weight.grad, torch.cat([weight.grad, bias.grad]))
    assert not head.weight.grad.requires_grad


def test_inference_mode_makes_no_difference():
    inside, outside = ValueHead(8), ValueHead(8)
    for i, batch in enumerate(batches(4)):
        with torch.inference_mode(i % 2 == 0):
            inside.observe(*batch)
        outside.observe(*batch)
    assert_same_state(inside, outside)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_and_autocasting_make_no_difference(dtype):
    data, expected = list(batches(4)), ValueHead(8)
    try:
        torch.set_default_dtype(dtype)
        head = ValueHead(8)
        for features, *counts in data:
            expected.observe(features, *counts)
            with torch.autocast("cpu", torch.bfloat16):
                head.observe(features, *counts)
                assert head.predict(features) == expected.predict(features)
    finally:
        torch.set_default_dtype(torch.float32)
    assert head.weight.dtype is torch.float32
    assert_same_state(expected, head)


def test_unscored_prompts_are_left_out():
    with_unscored, without = ValueHead(8), ValueHead(8)
    features, positives, num_rollouts = next(batches(1))
    without.observe(features, positives, num_rollouts)
    with_unscored.observe(torch.cat([features, features + 9]), positives + [0] * 16, num_rollouts + [0] * 16)
    with_unscored.observe(features + 9, [0] * 16, [0] * 16)
    assert_same_state(with_unscored, without)


def test_it_is_trained_on_the_last_prompts():
    seen = list(batches(3))
    head, without_replay = head_with(replay_size=20), head_with(replay_size=0)
    for batch in seen:
        head.observe(*batch)
        without_replay.observe(*batch)
    state = head.state_dict()
    assert torch.equal(state["replay.features"], torch.cat([seen[1][0][-4:], seen[2][0]]).half())
    assert state["replay.counts"][-16:].tolist() == [list(pair) for pair in zip(*seen[2][1:], strict=True)]
    assert torch.equal(without_replay.state_dict()["replay.features"], seen[2][0].half())


def difficulty(ids):
    """Pass rate of a prompt: hard, medium or easy by its last token."""
    return torch.tensor([0.02, 0.15, 0.98])[ids[:, -1] % 3]


@pytest.mark.parametrize(("build", "num_prompts"), [(qwen2, 8), (llama, 64)])
def test_it_learns_a_difficulty_and_has_30_percent_less_error_than_the_batch_mean(build, num_prompts):
    """
    Online with 4 rollouts for each of 1600 prompts, then on fresh prompts and fresh rollouts. At the usual scale of
    initial weights the last hidden state still contains the last token, and 76 % of the constant's error can be
    avoided.
    """
    model = build(scale=0.02)
    generator = torch.Generator().manual_seed(1)

    def step(number):
        ids = torch.randint(0, 40, (number, 6), generator=generator)
        positives = torch.binomial(torch.full((number,), 4.0), difficulty(ids), generator=generator).int().tolist()
        return last_hidden_states(model, ids, torch.ones_like(ids), batch_size=number), positives, [4] * number

    head = ValueHead(64)
    for _ in range(1600 // num_prompts):
        head.observe(*step(num_prompts))
    features, positives, num_rollouts = step(2000)
    metrics = brier_metrics(head.predict(features), positives, num_rollouts)
    assert metrics["brier"] < 0.7 * metrics["brier_constant"]


def test_common_part_and_scale_of_the_features_do_not_matter():
    """After a layer norm, the second dimension, 50 ± 0.01, would hide the first."""
    head = ValueHead(8)
    for batch in batches(60):
        head.observe(*batch)
    features, positives, num_rollouts = next(batches(1, size=2000, seed=5))
    metrics = brier_metrics(head.predict(features), positives, num_rollouts)
    p = (2 * features[:, 0]).sigmoid()
    # Within 5 % of the noise that no prediction avoids.
    assert metrics["brier"] < 1.05 * (p * (1 - p)).mean() < 0.7 * metrics["brier_constant"]


# State


@pytest.mark.parametrize("steps", [0, 3])
def test_resumed_equals_uninterrupted(steps, tmp_path):
    seen = list(batches(6))
    whole, resumed = head_with(replay_size=40), ValueHead(8)
    resumed.replay_size = 40
    for batch in seen[:steps]:
        whole.observe(*batch)
    state = whole.state_dict()
    before = copy.deepcopy(state)
    whole.save(tmp_path / "head.safetensors")
    resumed.load(tmp_path / "head.safetensors")
    assert_same_state(resumed, whole)
    for batch in seen[steps:]:
        whole.observe(*batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items()), "The state is a copy."
    for batch in seen[steps:]:
        resumed.observe(*batch)
    assert_same_state(resumed, whole)
    assert resumed.predict(seen[0][0]) == whole.predict(seen[0][0])
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]
