"""Features of GRPOTrainer, one by one: each has its effect in adaptive sampling."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForSequenceClassification

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Pool, Rollout
from ada_trl.trainer.rollout_batch import pool_advantages

from ..helpers import (
    QUICK,
    build,
    config,
    even_reward,
    length_reward,
    logs_of,
    moved,
    prompt_dataset,
    remember_pools,
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
    pools, model = remember_pools(trainer), tiny_reward_model()
    trainer.train()
    name, _ = trainer.reward_func_names
    assert all(f"rewards/{name}/mean" in logs for logs in logs_of(trainer))
    rows = [rollout for pool in pools[0] for rollout in pool.rollouts]
    assert len({rollout.rewards[0] for rollout in rows}) > len(rows) / 4
    text = trainer._logs["prompt"][0] + trainer._logs["completion"][0]
    expected = model(**tokenizer([text], return_tensors="pt")).logits.item()
    assert trainer._logs["rewards"][name][0] == pytest.approx(expected, rel=1e-4)


def _random_pool(rng, size):
    rewards = torch.randn(size, 2, generator=rng).tolist()
    return Pool(0.0, [Rollout(i, 2 * a + b, a, (a, b)) for i, (a, b) in enumerate(rewards)])


def test_normalize_then_sum_is_grpo_for_pools_that_are_groups(tmp_path):
    rng = torch.Generator().manual_seed(0)
    pools = [_random_pool(rng, 4) for _ in range(3)]
    options = {"multi_objective_aggregation": "normalize_then_sum", "prompt_weighting": "none"}
    args = config(tmp_path, **QUICK | options)
    found = pool_advantages(pools, [pool.rollouts for pool in pools], args, [2.0, 1.0])
    rewards = torch.tensor([[rollout.rewards for rollout in pool.rollouts] for pool in pools])  # (3, 4, 2)
    normalized = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    total = (normalized * torch.tensor([2.0, 1.0])).sum(-1).flatten()
    torch.testing.assert_close(torch.tensor(found).flatten(), (total - total.mean()) / (total.std() + 1e-4))


def test_normalize_then_sum_uses_the_whole_pool_and_survives_missing_rewards(tmp_path):
    nan = float("nan")
    rows = [(0.0, 1.0), (1.0, nan), (1.0, 3.0), (0.0, 2.0), (nan, nan)]
    totals = [1.0, 1.0, 4.0, 2.0, nan]
    pool = Pool(0.5, [Rollout(i, t, a, (a, b)) for i, (t, (a, b)) in enumerate(zip(totals, rows, strict=True))])
    args = AdaGRPOConfig(str(tmp_path), **QUICK | {"multi_objective_aggregation": "normalize_then_sum"})
    group = [pool.rollouts[i] for i in (2, 1, 4)]
    a_std, b_std = (1 / 3) ** 0.5 + 1e-4, 1.0 + 1e-4  # of 0, 1, 1, 0 and of 1, 3, 2
    sums = [-0.5 / a_std - 1 / b_std, 0.5 / a_std, 0.5 / a_std + 1 / b_std, -0.5 / a_std]
    scale = 0.5**-0.5 / (torch.tensor(sums).std().item() + 1e-4)
    (found,) = pool_advantages([pool], [group], args, [1.0, 1.0])
    assert found == pytest.approx([scale * sums[2], scale * sums[1], 0.0])
