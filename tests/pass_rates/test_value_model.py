"""The value model: its inputs, its training, work divided over ranks, and exact state."""

import multiprocessing
import os

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)

from ada_trl.core import brier_metrics
from ada_trl.pass_rates.store import PASS_RATES_FILE
from ada_trl.pass_rates.value_model import VALUE_MODEL_FILE, ValueModel

from ..helpers import PROMPTS, free_port, logs_of, prompt_dataset, tiny_tokenizer, train_with_and_without_resume
from .estimated import RESUME, assert_same_state, build, by_prompt, identified


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def save_model(
    directory, model_class=Qwen2ForCausalLM, config_class=Qwen2Config, chat_template=None, eos_token="<eos>", **options
):
    """Save a model and its tokenizer as on the hub: the policy's tokenizer without its padding token."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.eos_token = None, eos_token
    tokenizer.chat_template = chat_template
    set_seed(1)
    model = model_class(config_class(vocab_size=len(tokenizer), **SIZES | options))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("value_model"), initializer_range=0.2)


def value_model(name, gradient_steps=1, **options):
    settings = {"learning_rate": 1e-2, "gradient_steps": gradient_steps}
    return type("Model", (ValueModel,), settings)(name, Accelerator(cpu=True), **options)


def ids(*prompts):
    return tiny_tokenizer()(list(prompts))["input_ids"]


COUNTS = ([1, 0, 3, 2], [4, 2, 3, 9])


# Inputs and first predictions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_prediction_is_the_prior_mean_and_uses_no_random_numbers(dtype, name, request):
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(dtype)
    state = torch.get_rng_state()
    network = value_model(name, prior_mean=0.3)
    assert network.predict(network.encode(PROMPTS)) == pytest.approx([0.3] * 4)
    network.observe(network.encode(PROMPTS), *COUNTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.dtype is torch.float32 for tensor in network.state_dict().values())


def test_a_trained_classification_layer_is_used_as_it_is(tmp_path):
    name = save_model(tmp_path, Qwen2ForSequenceClassification, num_labels=1, initializer_range=0.5)
    network = value_model(name, prior_mean=0.3)
    model = Qwen2ForSequenceClassification.from_pretrained(name).eval()
    expected = [model(torch.tensor([row])).logits.sigmoid().item() for row in ids(*PROMPTS)]
    assert max(expected) - min(expected) > 0.1
    assert network.predict(ids(*PROMPTS)) == pytest.approx(expected, abs=1e-6)


def test_an_encoder_with_several_new_layers_learns_in_all_of_them(tmp_path):
    name = save_model(tmp_path, BertForMaskedLM, BertConfig, max_position_embeddings=32)  # no pooler, no classifier
    network = value_model(name)
    assert network.predict(ids(*PROMPTS)) == pytest.approx([1 / 17] * 4)
    before = network.state_dict()
    for _ in range(3):
        network.observe(ids(*PROMPTS), *COUNTS)
    after = network.state_dict()
    unmoved = [key for key in before if key.startswith("model.") and torch.equal(before[key], after[key])]
    assert unmoved == []


def test_prompts_are_encoded_with_the_tokenizer_and_template_of_the_model(name, tmp_path):
    conversation = [{"role": "user", "content": "1+2"}]
    base, chat = value_model(name), value_model(save_model(tmp_path, chat_template=TEMPLATE))
    assert base.encode(["1+2="]) == chat.encode(["1+2="]) == chat.encode([conversation]) == ids("1+2=")
    assert base.encode([conversation]) == base.encode(['[{"content":"1+2","role":"user"}]']) != ids("1+2=")


def test_predictions_depend_neither_on_batches_nor_on_padding(name):
    one, all_at_once = value_model(name, batch_size=1), value_model(name, batch_size=8)
    for network in (one, all_at_once):
        for _ in range(3):
            network.observe(ids(*PROMPTS), *COUNTS)
    assert one.predict(ids(*PROMPTS)) == pytest.approx(all_at_once.predict(ids(*PROMPTS)), abs=1e-4)
    single = [all_at_once.predict([row])[0] for row in ids(*PROMPTS)]
    assert single == pytest.approx(all_at_once.predict(ids(*PROMPTS)), abs=1e-5)


def test_a_tokenizer_without_a_padding_token_is_rejected(tmp_path):
    name = save_model(tmp_path, eos_token=None)
    with pytest.raises(
        ValueError, match=f"tokenizer of value_model \\('{name}'\\) has neither pad_token nor eos_token"
    ):
        value_model(name)


# Training


def test_one_step_is_a_step_of_adamw_on_the_cross_entropy_of_the_counts(name):
    network, expected = value_model(name, gradient_steps=2, batch_size=3), value_model(name)
    parameters = [*expected.model.parameters(), expected.bias]
    optimizer = torch.optim.AdamW(parameters, 1e-2, weight_decay=0)
    k, n = map(torch.tensor, COUNTS)
    for _ in range(2):
        optimizer.zero_grad()
        logits = torch.cat([expected.model(torch.tensor([row])).logits[0] for row in ids(*PROMPTS)])
        p = (logits + expected.bias).sigmoid()
        (-(k * p.log() + (n - k) * (1 - p).log()).sum() / n.sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    with torch.inference_mode():
        network.observe(ids(*PROMPTS), *COUNTS)
    for (key, actual), target in zip(network._trained.items(), parameters, strict=True):
        torch.testing.assert_close(actual, target, rtol=1e-3, atol=1e-4, msg=key)


def test_unscored_prompts_are_left_out(name):
    with_unscored, without = value_model(name), value_model(name)
    without.observe(ids(*PROMPTS[:2]), [1, 0], [4, 2])
    with_unscored.observe(ids(*PROMPTS), [1, 0, 0, 0], [4, 2, 0, 0])
    with_unscored.observe(ids(*PROMPTS), [0] * 4, [0] * 4)
    assert_same_state(with_unscored, without)


def test_it_learns_a_difficulty_and_has_30_percent_less_error_than_the_batch_mean(name):
    """Pass rates 0.95, 0.5 and 0.02 by the second summand; fresh prompts and fresh rollouts."""
    generator = torch.Generator().manual_seed(1)

    def step(number):
        a, b = torch.randint(1, 100, (2, number), generator=generator)
        prompts = [f"{x}+{y}=" for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        rates = torch.tensor([0.95, 0.5, 0.02])[b % 10 % 3]
        return ids(*prompts), torch.binomial(torch.full((number,), 4.0), rates, generator=generator).int().tolist()

    network = value_model(name, gradient_steps=4, batch_size=32)
    for _ in range(60):
        inputs, positives = step(32)
        network.observe(inputs, positives, [4] * 32)
    inputs, positives = step(500)
    metrics = brier_metrics(network.predict(inputs), positives, [4] * 500)
    assert metrics["brier"] < 0.7 * metrics["brier_constant"]


# State


def test_resumed_equals_uninterrupted(name, tmp_path):
    whole, half, resumed = value_model(name), value_model(name), value_model(name, prior_mean=0.5)
    for network, steps in ((whole, 4), (half, 2)):
        for _ in range(steps):
            network.observe(ids(*PROMPTS), *COUNTS)
    half.save(tmp_path / "state.safetensors")
    resumed.load(tmp_path / "state.safetensors")
    assert_same_state(resumed, half)
    for _ in range(2):
        resumed.observe(ids(*PROMPTS), *COUNTS)
    assert_same_state(resumed, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


# In the trainer


OPTIONS = {"adaptive_sampling": "est-value"}


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


@pytest.mark.parametrize(
    ("has_model", "overrides"),
    [
        pytest.param(False, {}, id="head"),
        pytest.param(False, LORA, id="head-lora"),
        pytest.param(False, {"bf16": True}, id="head-bf16"),
        pytest.param(True, {}, id="model"),
        pytest.param(True, LORA, id="model-lora", marks=pytest.mark.slow),
        pytest.param(True, {"bf16": True}, id="model-bf16", marks=pytest.mark.slow),
    ],
)
def test_value_networks_are_trained_by_the_trainer_and_compared_with_the_ema(has_model, overrides, name, tmp_path):
    options = OPTIONS | {"per_device_train_batch_size": 16, "max_steps": 20, "learning_rate": 1e-4} | overrides
    trainer = build(
        tmp_path,
        lambda prompts, **kwargs: [float(prompt in PROMPTS[:2]) for prompt in prompts],
        prompt_dataset(20),
        value_model=name if has_model else None,
        **options,
    )
    network = trainer.pass_rates.network
    network.gradient_steps = 4 if has_model else 30
    if has_model:
        network.optimizer.param_groups[0]["lr"] = 1e-2
    trainer.train()
    first, *_, last = (
        {key: logs[f"ada/estimator/{key}"] for key in ("brier", "brier_ema", "brier_constant")}
        for logs in logs_of(trainer)
    )
    assert first["brier"] == pytest.approx(first["brier_ema"])  # both start at the prior mean
    assert last["brier"] < 0.7 * last["brier_constant"]
    assert last["brier"] != last["brier_ema"]
    assert all(logs["ada/time/pass_rate_estimation"] > 0 for logs in logs_of(trainer))
    assert {parameter.dtype for parameter in network._trained.values()} == {torch.float32}


def test_resume_continues_as_if_never_stopped(name, tmp_path):
    options = RESUME | OPTIONS | {"dataset": identified(8), "per_device_train_batch_size": 16, "value_model": name}
    whole, resumed = train_with_and_without_resume(build, tmp_path, by_prompt, at=3, **options)
    assert_same_state(whole.pass_rates.network, resumed.pass_rates.network)
    assert {path.name for path in (tmp_path / "whole" / "checkpoint-6").glob("ada_*")} == {
        PASS_RATES_FILE,
        VALUE_MODEL_FILE,
    }


# Several ranks


def observe_and_predict(name):
    network = value_model(name, batch_size=2)
    predictions = []
    for number in (4, 3, 1):  # one of two ranks has 2, 1 and 0 of these
        predictions.append(network.predict(ids(*PROMPTS[:number])))
        network.observe(ids(*PROMPTS[:number]), *(counts[:number] for counts in COUNTS))
    return predictions, {key: tensor.tolist() for key, tensor in network.state_dict().items()}


def worker(rank, name, port, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(rank)  # new layers would be different on each rank
    outcome = observe_and_predict(name)
    results.put((rank, PartialState().num_processes, outcome))
    PartialState().destroy_process_group()


def test_two_ranks_have_the_same_state_and_the_results_of_one(tmp_path):
    name = save_model(tmp_path, BertForMaskedLM, BertConfig, max_position_embeddings=32)
    context, port = multiprocessing.get_context("fork"), free_port()
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, name, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    outcomes = {rank: (number, outcome) for rank, number, outcome in (results.get(timeout=120) for _ in processes)}
    for process in processes:
        process.join()
    assert outcomes[0] == outcomes[1] and outcomes[0][0] == 2
    torch.manual_seed(0)
    predictions, state = observe_and_predict(name)
    for expected, found in zip(predictions, outcomes[0][1][0], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    for key, values in state.items():
        torch.testing.assert_close(torch.tensor(outcomes[0][1][1][key]), torch.tensor(values), rtol=1e-3, atol=1e-5)
