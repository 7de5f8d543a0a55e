"""Features of GRPOTrainer, one by one: each has its effect in adaptive sampling."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..core.simulation import rollouts_of
from ..helpers import (
    MODES,
    QUICK,
    build,
    even_reward,
    length_reward,
    logs_of,
    moved,
    prompt_dataset,
    remember_rollouts,
    saved_tiny_model,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)


def weights_of(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)


REUSED = {"num_iterations": 2}
KL = {"beta": 0.5}
# Options that change the loss, and the options that they are compared with.
IN_THE_LOSS = {
    "importance_sampling_level": ({"importance_sampling_level": "sequence"}, REUSED),
    "num_iterations": (REUSED, {}),
    "steps_per_generation": ({"steps_per_generation": 2}, {}),
    "generation_batch_size": ({"generation_batch_size": 16}, {}),
    "epsilon": ({"epsilon": 1e-3, "epsilon_high": 1e-3}, REUSED),
    "delta": ({"delta": 1.0001}, REUSED),
    "beta": (KL, {}),
    "sync_ref_model": ({"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.9}, KL),
    "mask_truncated_completions": ({"mask_truncated_completions": True}, {}),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.5}, {}),
    "entropy_coef": ({"entropy_coef": 0.5}, {}),
    "scale_rewards": ({"scale_rewards": "group"}, {}),
    "reward_weights": ({"reward_weights": [0.1, 3.0]}, {}),
    "multi_objective_aggregation": ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "shuffle_dataset": ({"shuffle_dataset": False}, {}),
    "temperature": ({"temperature": 0.3}, {}),
    "max_completion_length": ({"max_completion_length": 2}, {}),
    "top_k": ({"top_k": 3}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.5}, {}),
    "generation_kwargs": ({"generation_kwargs": {"top_p": 0.3}}, {}),
    "adam_beta1": ({"adam_beta1": 0.1}, {}),
}


@pytest.fixture(scope="module")
def weights_after(tmp_path_factory):
    known = {}

    def train(options):
        key = repr(sorted(options.items()))
        if key not in known:
            directory = tmp_path_factory.mktemp("run")
            rewards = [even_reward, length_reward]
            options = options | {"success_reward": "even_reward"}
            trainer = build(directory, rewards, model=saved_tiny_model(directory / "model"), **options)
            trainer.train()
            assert trainer.state.global_step == options.get("max_steps", QUICK["max_steps"])
            known[key] = weights_of(trainer)
        return known[key]

    return train


@pytest.mark.parametrize("name", IN_THE_LOSS)
def test_options_have_an_effect(name, weights_after):
    option, others = IN_THE_LOSS[name]
    assert not torch.equal(weights_after(others | option), weights_after(others)), f"{name} changed nothing."


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"torch_empty_cache_steps": 1}])
def test_options_that_only_save_memory_change_nothing(options, weights_after):
    torch.testing.assert_close(weights_after(options), weights_after({}))


def test_the_head_can_be_cast_to_float32(tmp_path):
    trainer = build(tmp_path, model=tiny_model().bfloat16(), cast_lm_head_to_fp32=True)
    trainer.train()
    assert trainer.model.lm_head.weight.dtype == torch.float32 and len(logs_of(trainer)) == 2


def test_a_new_adapter_is_trained_alone_and_compared_with_the_base_model(tmp_path):
    trainer = build(tmp_path, peft_config=lora(), beta=0.1, max_steps=3)
    assert all(has_moved == ("lora_" in name) for name, has_moved in moved(trainer).items())
    assert trainer.ref_model is None
    assert [logs["kl"] > 0 for logs in logs_of(trainer)] == [False, True, True]


def test_an_adapter_that_is_already_there_is_trained_on(tmp_path):
    model = get_peft_model(tiny_model(), lora(init_lora_weights=False))
    before = copy.deepcopy(model.state_dict())
    trainer = build(tmp_path, model=model)
    trainer.train()
    moved = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if "lora" in name}


def tiny_reward_model():
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(tiny_config(tiny_tokenizer(), num_labels=1))


def test_reward_models_ignore_columns_with_names_of_arguments(tmp_path):
    rows = prompt_dataset().add_column("completions", ["2"] * 16)
    tokenizers = {"processing_class": tiny_tokenizer(), "reward_processing_classes": tiny_tokenizer()}
    args = AdaGRPOConfig(str(tmp_path), **QUICK)
    AdaGRPOTrainer(tiny_model(), tiny_reward_model(), args, rows, **tokenizers).train()


def test_reward_models(tmp_path):
    tokenizer = tiny_tokenizer()
    trainer = AdaGRPOTrainer(
        tiny_model(),
        [tiny_reward_model(), even_reward],
        AdaGRPOConfig(str(tmp_path), **QUICK | {"success_reward": "even_reward"}),
        prompt_dataset(),
        processing_class=tokenizer,
        reward_processing_classes=[tokenizer, None],
    )
    steps, model = remember_rollouts(trainer), tiny_reward_model()
    trainer.train()
    name, _ = trainer.reward_func_names
    assert all(f"rewards/{name}/mean" in logs for logs in logs_of(trainer))
    scores = steps[0].rewards_NF[:, 0]
    assert len(set(scores.tolist())) > len(scores) / 4
    text = trainer._logs["prompt"][0] + trainer._logs["completion"][0]
    expected = model(**tokenizer([text], return_tensors="pt")).logits.item()
    assert trainer._logs["rewards"][name][0] == pytest.approx(expected, rel=1e-4)


def test_normalize_then_sum_is_grpo_for_pools_that_are_groups(tmp_path):
    options = {"multi_objective_aggregation": "normalize_then_sum", "prompt_weighting": "none"}
    options |= {"success_reward": "even_reward", "reward_weights": [2.0, 1.0]}
    trainer = build(tmp_path, [even_reward, length_reward], **options)
    rewards = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    totals = (rewards @ torch.tensor([2.0, 1.0], dtype=torch.float64)).tolist()
    found = trainer.compute_advantages(rollouts_of(*totals, rewards=rewards.view(12, 2)))
    normalized = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    total = (normalized @ torch.tensor([2.0, 1.0], dtype=torch.float64)).flatten()
    torch.testing.assert_close(torch.tensor(found), (total - total.mean()) / (total.std() + 1e-4))


@pytest.mark.parametrize("options", [{}, {"adaptive_sampling": "est"}, MODES["dynamic sampling"]], ids=str)
def test_a_callback_may_set_the_scale_of_rewards(options, tmp_path):
    class SetsScale(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            trainer.scale_rewards = "group"

    options = options | {"prompt_weighting": "none"}
    expected = build(tmp_path, length_reward, scale_rewards="group", **options)
    expected.train()
    trainer = build(tmp_path, length_reward, callbacks=[SetsScale()], **options)
    trainer.train()
    for a, b in zip(expected.batches, trainer.batches, strict=True):
        assert a["advantages"].any() and torch.equal(a["advantages"], b["advantages"])


def test_groups_of_equal_sums_with_advantages_are_not_replaced(tmp_path):
    """With GDPO a group has zero variance if all its advantages are 0."""
    table = [(3.0, 0.0, 0.0), (0.0, 2.0, 1.0), (0.0, 1.0, 2.0), (0.0, 0.0, 3.0)]
    functions = [lambda completions, i=i, **_: [table[j % 4][i] for j in range(len(completions))] for i in range(3)]
    common = {"multi_objective_aggregation": "normalize_then_sum", "num_generations": 4, "max_steps": 1}
    args = GRPOConfig(str(tmp_path), **QUICK | common)
    grpo = GRPOTrainer(tiny_model(), functions, args, prompt_dataset(), processing_class=tiny_tokenizer())
    own = build(tmp_path, functions, **MODES["dynamic sampling"] | common)
    for trainer in (grpo, own):
        trainer.train()
    (logs,), (batch,) = logs_of(own), own.batches
    assert logs["ada/prompts/resampled"] == 0 and batch["advantages"].all()
    assert logs["frac_reward_zero_std"] == logs_of(grpo)[0]["frac_reward_zero_std"] == 0
