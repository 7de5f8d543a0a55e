"""Features of GRPOTrainer, one by one: each has its effect in adaptive sampling."""

import pytest
import torch
from transformers import Qwen2ForSequenceClassification, TrainerCallback

from ..core.simulation import rollouts_of
from ..helpers import (
    MODES,
    QUICK,
    build,
    even_reward,
    length_reward,
    logs_of,
    prompt_dataset,
    saved_tiny_model,
    tiny_config,
    tiny_tokenizer,
    weights_of,
)


REUSED = {"num_iterations": 2}
KL = {"beta": 0.5}
UNIFORM = {"adaptive_sampling": "uniform", "num_generations": 4}
UNWEIGHTED = {"prompt_weighting": "none"}  # as by default with scale_rewards="group"
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
    "scale_rewards of a group": ({"scale_rewards": "group"}, UNWEIGHTED),
    "scale_rewards of a batch": ({"scale_rewards": "batch"}, UNWEIGHTED),
    "prompt_weighting": ({"prompt_weighting": "inverse"}, {}),
    "prompt_weighting of GRPO": (UNIFORM | {"prompt_weighting": "inverse"}, UNIFORM),
    "reward_weights": ({"reward_weights": [0.1, 3.0]}, {}),
    "multi_objective_aggregation": ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "shuffle_dataset": ({"shuffle_dataset": False}, {}),
    "temperature": ({"temperature": 0.3}, {}),
    "max_completion_length": ({"max_completion_length": 2}, {}),
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


def test_gradient_checkpointing_changes_nothing(weights_after):
    torch.testing.assert_close(weights_after({"gradient_checkpointing": True}), weights_after({}))


def tiny_reward_model():
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(tiny_config(tiny_tokenizer(), num_labels=1))


def test_reward_models_ignore_columns_with_names_of_arguments(tmp_path):
    rows = prompt_dataset().add_column("completions", ["2"] * 16)
    build(tmp_path, tiny_reward_model(), rows, reward_processing_classes=tiny_tokenizer()).train()


def test_reward_models(tmp_path):
    tokenizer, functions = tiny_tokenizer(), [tiny_reward_model(), even_reward]
    options = {"reward_processing_classes": [tokenizer, None], "success_reward": "even_reward"}
    trainer = build(tmp_path, functions, **options)
    trainer.train()
    name, _ = trainer.reward_func_names
    assert all(f"rewards/{name}/mean" in logs for logs in logs_of(trainer))
    scores, model = trainer.rollouts[0].rewards_NF[:, 0], tiny_reward_model()
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
    trainer = build(tmp_path, functions, **MODES["dynamic sampling"] | common)
    trainer.train()
    (logs,), (batch,) = logs_of(trainer), trainer.batches
    assert logs["ada/prompts/sampled"] == 2 and batch["advantages"].all()
    assert logs["frac_reward_zero_std"] == 0, "As in GRPO."
