"""Zero-variance groups with `zero_variance_groups="mask"`: excluded from the loss and its denominator."""

import pytest
import torch

from ..helpers import (
    ScriptedRewards,
    build,
    logs_of,
    moved,
    prompt_dataset,
    prompts_of,
)
from .test_trainer import LOSS_TYPES


def test_mask_excludes_a_zero_variance_group_from_the_loss_and_its_token_count(tmp_path):
    def train(zero_variance_groups):
        scripts = {"1+2=": [1, 0] * 4, "31+4=": [0] * 32}
        rows, options = prompt_dataset(1).select([0, 1]), {"zero_variance_groups": zero_variance_groups}
        trainer = build(tmp_path, ScriptedRewards(**scripts), rows, max_steps=1, **options)
        trainer.train()
        return trainer.batches[0]

    keep, mask = train("keep"), train("mask")
    lengths = keep["completion_mask"].sum(dim=1)
    has_variance = torch.tensor([prompt == "1+2=" for prompt in prompts_of(keep)])
    # "keep" is GRPO's treatment: in the batch, with all tokens and advantages of 0.
    assert (lengths > 0).all() and keep["num_items_in_batch"] == lengths.sum()
    assert ((keep["advantages"] == 0) == ~has_variance).all() and has_variance.sum() == 4
    assert torch.equal(mask["completion_mask"].sum(dim=1), lengths * has_variance)
    assert mask["num_items_in_batch"] == lengths[has_variance].sum()
    assert torch.equal(keep["advantages"], mask["advantages"])


@pytest.mark.parametrize("mode", ["seq-balance", "seq-pos", "est-ema", "uniform"])
def test_mask_excludes_every_zero_variance_group(mode, tmp_path):
    """Including one with only successes that has met its exit condition, as in Seq-pos."""
    scripts = {"1+2=": [1, 0] * 4, "31+4=": [0.1] * 32, "5+55=": [1] * 32}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1).select([0, 1, 2]),
        per_device_train_batch_size=12,
        max_steps=1,
        zero_variance_groups="mask",
        adaptive_sampling=mode,
    )
    trainer.train()
    (batch,) = trainer.batches
    kept = torch.tensor([prompt == "1+2=" for prompt in prompts_of(batch)])
    assert (batch["completion_mask"].sum(dim=1) > 0).tolist() == kept.tolist()
    assert 0 < batch["num_items_in_batch"] == batch["completion_mask"].sum()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_masked_group_has_the_loss_and_gradient_of_an_absent_one(loss_type, tmp_path):
    def loss_and_gradient(trainer, batch):
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    scripts = {"1+2=": [1, 0, 0, 0] * 2, "31+4=": [0] * 32, "5+55=": [0] * 32}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1).select([0, 1, 2]),
        per_device_train_batch_size=12,
        max_steps=1,
        zero_variance_groups="mask",
        loss_type=loss_type,
        importance_sampling_level="sequence" if loss_type == "luspo" else "token",
        learning_rate=0.0,
    )
    trainer.train()
    (masked,) = trainer.batches
    trainer.model.train()
    kept = torch.tensor([prompt == "1+2=" for prompt in prompts_of(masked)])
    absent = {name: value[kept] for name, value in masked.items() if value.ndim and len(value) == len(kept)}
    absent["num_items_in_batch"] = absent["completion_mask"].sum()
    absent["advantages"] = torch.tensor(list(trainer._logs["advantages"]))[kept]
    for found, expected in zip(loss_and_gradient(trainer, masked), loss_and_gradient(trainer, absent), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_of_masked_groups_leaves_the_weights_unchanged(tmp_path):
    trainer = build(tmp_path, lambda completions, **kwargs: [0.0] * len(completions), zero_variance_groups="mask")
    assert not any(moved(trainer).values())


def test_a_zero_variance_group_with_an_unscored_rollout_is_masked_in_grpos_mode(tmp_path):
    """TRL's mean of the rewards 0.9 differs from 0.9 by rounding."""

    def reward(completions, **kwargs):
        return [None if i % 4 == 0 else 0.9 for i in range(len(completions))]

    options = {"adaptive_sampling": "uniform", "num_generations": 4, "zero_variance_groups": "mask", "max_steps": 1}
    trainer = build(tmp_path, reward, **options)
    trainer.train()
    (batch,), (logs,) = trainer.batches, logs_of(trainer)
    assert batch["num_items_in_batch"] == 0
    assert logs["ada/tokens/discarded"] == logs["ada/tokens/generated"] > 0
