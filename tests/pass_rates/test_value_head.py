"""The value head: the right features, a difficulty that is learnt, and state that continues exactly."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, set_seed

from ada_trl.core import brier_metrics
from ada_trl.pass_rates.hidden_states import last_hidden_states
from ada_trl.pass_rates.value_head import PassRateHead


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
    """Each prompt on its own row, with `left` (more for shorter ones) and `right` tokens of padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[7] * (left + width - len(p)) + p + [7] * right for p in prompts])
    mask = torch.tensor([[0] * (left + width - len(p)) + [1] * len(p) + [0] * right for p in prompts])
    return ids, mask


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def test_features_are_the_last_hidden_state_at_the_last_prompt_token(model):
    model.eval()
    expected = torch.cat(
        [model(torch.tensor([p]), output_hidden_states=True).hidden_states[-1][:, -1] for p in PROMPTS]
    )
    for left, right in [(0, 0), (3, 0), (0, 2), (1, 4)]:
        features = last_hidden_states(model, *pad(PROMPTS, left, right))
        assert features.shape == (3, 64) and features.dtype == torch.float32 and not features.requires_grad
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_chunks_give_the_same_features(model):
    whole = last_hidden_states(model, *pad(PROMPTS, 1))
    for batch_size in (1, 2, 3, 5):
        torch.testing.assert_close(last_hidden_states(model, *pad(PROMPTS, 1), batch_size=batch_size), whole)


def test_a_wrapped_model_gives_the_same_features(model):
    features = last_hidden_states(model, *pad(PROMPTS, 1))
    assert torch.equal(last_hidden_states(torch.nn.DataParallel(model), *pad(PROMPTS, 1)), features)


def test_logits_are_computed_for_one_position_only(model):
    rows = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: rows.append(output.shape[:2]))
    last_hidden_states(model, *pad(PROMPTS, 1))
    hook.remove()
    assert rows == [(3, 1)]


def test_the_model_is_left_as_it_was(model):
    model.train()
    model.get_output_embeddings().eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = last_hidden_states(model, *pad(PROMPTS, 0))
    assert torch.equal(first, last_hidden_states(model, *pad(PROMPTS, 0)))  # no dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not model.get_output_embeddings()._forward_pre_hooks
    with pytest.raises(IndexError):
        last_hidden_states(model, *(tensor + 1000 for tensor in pad(PROMPTS, 0)))
    assert [module.training for module in model.modules()] == modes
    assert not model.get_output_embeddings()._forward_pre_hooks


# The head


def test_first_prediction_is_the_prior_mean():
    features = torch.randn(5, 8) * 100
    assert PassRateHead(8).predict(features) == pytest.approx([1 / 17] * 5)
    assert PassRateHead(8, prior_mean=0.3).predict(features) == pytest.approx([0.3] * 5)
    with pytest.raises(ValueError, match=r"prior_mean \(0\) must be between 0 and 1"):
        PassRateHead(8, prior_mean=0)


def batches(number, size=16, hidden_size=8, seed=0):
    """Features with a common part, and counts that depend on the first of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        features = torch.randn(size, hidden_size, generator=generator)
        draws = torch.randint(1, 9, (size,), generator=generator)
        positives = torch.binomial(draws.float(), (2 * features[:, 0]).sigmoid(), generator=generator).int()
        features[:, 1] = 50 + 1e-2 * features[:, 1]
        yield features, positives.tolist(), draws.tolist()


def test_one_step_is_a_step_of_adamw_on_the_cross_entropy_of_the_counts():
    features, positives, draws = next(batches(1))
    head = PassRateHead(8, gradient_steps=3, learning_rate=0.1, weight_decay=0.2)
    head.observe(features, positives, draws)

    standardised = (features.double() - features.double().mean(0)) / features.double().std(0, correction=0)
    kept = (features.half().double() - features.double().mean(0)) / features.double().std(0, correction=0)
    assert (kept - standardised).abs().max() > 1e-4, "float16 is what is learnt from"
    inputs = (kept.clamp(-5, 5) / math.sqrt(8)).float()
    weight = torch.zeros(8, requires_grad=True)
    bias = torch.tensor([math.log(1 / 16)], requires_grad=True)
    optimizer = torch.optim.AdamW([weight, bias], 0.1, weight_decay=0.2)
    k, n = torch.tensor(positives), torch.tensor(draws)
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
    inside, outside = PassRateHead(8), PassRateHead(8)
    for i, batch in enumerate(batches(4)):
        with torch.inference_mode(i % 2 == 0):
            inside.observe(*batch)
        outside.observe(*batch)
    assert_same_state(inside, outside)


def test_unscored_prompts_are_left_out():
    with_unscored, without = PassRateHead(8), PassRateHead(8)
    features, positives, draws = next(batches(1))
    without.observe(features, positives, draws)
    with_unscored.observe(torch.cat([features, features + 9]), positives + [0] * 16, draws + [0] * 16)
    with_unscored.observe(features + 9, [0] * 16, [0] * 16)
    assert_same_state(with_unscored, without)


def test_replay_holds_the_last_prompts():
    head = PassRateHead(8, replay_size=20)
    seen = list(batches(3))
    for batch in seen:
        head.observe(*batch)
    assert torch.equal(head.state_dict()["replay.features"], torch.cat([seen[1][0][-4:], seen[2][0]]).half())
    assert head.state_dict()["replay.counts"][-16:].tolist() == [list(pair) for pair in zip(*seen[2][1:], strict=True)]
    alone = PassRateHead(8, replay_size=0)
    for batch in seen:
        alone.observe(*batch)
    assert torch.equal(alone.state_dict()["replay.features"], seen[2][0].half())


def difficulty(ids):
    """Pass rate of a prompt: hard, medium or easy by its last token."""
    return torch.tensor([0.02, 0.15, 0.98])[ids[:, -1] % 3]


@pytest.mark.parametrize(("build", "num_prompts"), [(qwen2, 8), (llama, 64)])
def test_head_learns_a_difficulty_and_beats_the_batch_mean_by_30_percent(build, num_prompts):
    """
    Online with 4 rollouts for each of 1600 prompts, then on fresh prompts and fresh rollouts. At the usual scale of
    initial weights the last hidden state still shows the last token, and 76 % of the baseline can be avoided.
    """
    model = build(scale=0.02)
    generator = torch.Generator().manual_seed(1)

    def step(number):
        ids = torch.randint(0, 40, (number, 6), generator=generator)
        positives = torch.binomial(torch.full((number,), 4.0), difficulty(ids), generator=generator).int().tolist()
        return last_hidden_states(model, ids, torch.ones_like(ids)), positives, [4] * number

    head = PassRateHead(64)
    for _ in range(1600 // num_prompts):
        features, positives, draws = step(num_prompts)
        head.observe(features, positives, draws)
    features, positives, draws = step(2000)
    metrics = brier_metrics(head.predict(features), positives, draws)
    assert metrics["brier"] < 0.7 * metrics["brier_constant"]


def test_common_part_and_scale_of_the_features_do_not_matter():
    """A layer norm would leave the second dimension, 50 ± 0.01, to drown the first."""
    head = PassRateHead(8)
    for batch in batches(60):
        head.observe(*batch)
    features, positives, draws = next(batches(1, size=2000, seed=5))
    metrics = brier_metrics(head.predict(features), positives, draws)
    floor = (2 * features[:, 0]).sigmoid()
    # Within 5 % of the noise that no prediction avoids.
    assert metrics["brier"] < 1.05 * (floor * (1 - floor)).mean() < 0.7 * metrics["brier_constant"]


@pytest.mark.parametrize("shape", [(8,), (3, 7), (2, 3, 8)])
def test_features_of_another_model_are_refused(shape):
    with pytest.raises(ValueError, match=r"do not fit a head of hidden_size \(8\)"):
        PassRateHead(8).predict(torch.zeros(shape))


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="Prompt 1 has 3 positives in 2 rollouts"):
        PassRateHead(8).observe(torch.zeros(2, 8), [0, 3], [2, 2])


# State


def assert_same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def test_resumed_equals_uninterrupted(tmp_path):
    seen = list(batches(6))
    whole, half = PassRateHead(8, replay_size=40), PassRateHead(8, replay_size=40)
    for batch in seen:
        whole.observe(*batch)
    for batch in seen[:3]:
        half.observe(*batch)
    half.save(tmp_path / "head.safetensors")
    resumed = PassRateHead(8, replay_size=40)
    resumed.load(tmp_path / "head.safetensors")
    assert_same_state(resumed, half)
    for batch in seen[3:]:
        resumed.observe(*batch)
    assert_same_state(resumed, whole)
    assert resumed.predict(seen[0][0]) == whole.predict(seen[0][0])
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]


def test_a_new_head_can_be_saved(tmp_path):
    PassRateHead(8).save(tmp_path / "head.safetensors")
    resumed, new = PassRateHead(8, prior_mean=0.5), PassRateHead(8)
    resumed.load(tmp_path / "head.safetensors")
    for batch in batches(2):
        resumed.observe(*batch)
        new.observe(*batch)
    assert_same_state(resumed, new)


def test_state_is_a_copy():
    head, other = PassRateHead(8), PassRateHead(8)
    first, second = batches(2)
    head.observe(*first)
    state = head.state_dict()
    before = copy.deepcopy(state)
    other.load_state_dict(state)
    head.observe(*second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    assert torch.equal(other.weight, before["weight"])


@pytest.fixture
def saved(tmp_path):
    head = PassRateHead(8)
    for batch in batches(2):
        head.observe(*batch)
    head.save(tmp_path / "head.safetensors")
    return tmp_path / "head.safetensors"


def test_a_missing_file_is_told_apart_from_a_corrupt_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        PassRateHead(8).load(tmp_path / "head.safetensors")


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=f"{saved} is not a usable value head: .* delete it to start from the prior"):
        PassRateHead(8).load(saved)


def test_a_flipped_bit_in_the_header_is_refused(saved):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")  # its length, then JSON
    for i in range(0, header, 7):
        saved.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(ValueError, match=f"{saved} is not a usable value head: .* delete it to start"):
            PassRateHead(8).load(saved)


def test_a_file_of_something_else_is_refused(saved):
    save_file({"something": torch.zeros(8)}, saved)
    with pytest.raises(ValueError, match=f"{saved} .* not that of this value head: they differ in the tensors"):
        PassRateHead(8).load(saved)
    saved.write_bytes(b"\x80\x04N.")  # a pickle
    with pytest.raises(ValueError, match=f"{saved} is not a usable value head"):
        PassRateHead(8).load(saved)


def test_a_head_of_another_model_is_refused(saved):
    with pytest.raises(
        ValueError, match=rf"{saved} .* \(8,\), but this value head has \(16,\)\. Resume with the model"
    ):
        PassRateHead(16).load(saved)
    with pytest.raises(
        ValueError, match="not that of this value head: they differ in the tensors features.mean, features.mean_square"
    ):
        PassRateHead(8).load_state_dict({"weight": torch.zeros(8)})
