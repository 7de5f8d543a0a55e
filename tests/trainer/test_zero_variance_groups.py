"""
Zero-variance groups: excluded from the loss and its denominator ("mask"), or not computed, with the same update
("skip").
"""

import re

import pytest
import torch
from trl import GRPOConfig

from ada_trl import AdaGRPOTrainer

from ..helpers import ScriptedRewards, build, even_reward, logs_of, moved, prompt_dataset, prompts_of, weights_of


LISTED = GRPOConfig.__doc__.split("loss_type (`str`")[1].split("mask_truncated_completions")[0]
LOSS_TYPES = re.findall(r"^ *- `\"(\w+)\"`", LISTED, re.MULTILINE)
assert len(LOSS_TYPES) >= 8, "TRL's documentation lists them in another way."


# "mask"


@pytest.mark.parametrize("mode", ["seq-balance", "seq-pos", "est-ema", "uniform"])
def test_masked_zero_variance_groups_are_excluded_from_the_loss_and_its_token_count(mode, tmp_path):
    """Including one with only successes that has met its exit condition, as in Seq-pos."""

    def train(zero_variance_groups):
        scripts = {"1+2=": [1, 0] * 4, "31+4=": [0.1] * 32, "5+55=": [1] * 32}
        rows, options = prompt_dataset(1).select([0, 1, 2]), {"zero_variance_groups": zero_variance_groups}
        options |= {"per_device_train_batch_size": 12, "max_steps": 1, "adaptive_sampling": mode}
        trainer = build(tmp_path, ScriptedRewards(**scripts), rows, **options)
        trainer.train()
        return trainer.batches[0]

    keep, mask = train("keep"), train("mask")
    lengths = keep["completion_mask"].sum(dim=1)
    has_variance = torch.tensor([prompt == "1+2=" for prompt in prompts_of(keep)])
    # "keep" is GRPO's treatment: in the batch, with all tokens and advantages of 0.
    assert (lengths > 0).all() and keep["num_items_in_batch"] == lengths.sum()
    assert ((keep["advantages"] == 0) == ~has_variance).all() and has_variance.any()
    assert torch.equal(mask["completion_mask"].sum(dim=1), lengths * has_variance)
    assert mask["num_items_in_batch"] == lengths[has_variance].sum()
    assert torch.equal(keep["advantages"], mask["advantages"])


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


# "skip"


def cases():
    for i, loss_type in enumerate(LOSS_TYPES):
        for j, mode in enumerate(("uniform", "seq-balance")):
            yield pytest.param(loss_type, mode, marks=[pytest.mark.slow] * (i % 2 == j))


@pytest.mark.parametrize(("loss_type", "mode"), cases())
def test_the_update_is_that_of_all_rows(loss_type, mode, tmp_path):
    def run(zero_variance_groups):
        options = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        options |= {"num_iterations": 2, "max_steps": 4, "adaptive_sampling": mode, "loss_type": loss_type}
        options |= {"samples_per_round": 2, "max_rounds": 2} if mode == "seq-balance" else {}
        if loss_type == "luspo":
            options["importance_sampling_level"] = "sequence"
        trainer = build(tmp_path, even_reward, zero_variance_groups=zero_variance_groups, **options)
        rows, forward = [], trainer.model.forward
        trainer.model.forward = lambda *args, **kwargs: (
            rows.append(len(kwargs["input_ids"])) if torch.is_grad_enabled() else None,
            forward(*args, **kwargs),
        )[1]
        assert all(moved(trainer).values())
        return weights_of(trainer), rows

    kept, all_rows = run("keep")
    skipped, some_rows = run("skip")
    torch.testing.assert_close(skipped, kept, rtol=0, atol=1e-5)
    assert len(some_rows) == len(all_rows) and 0 < sum(some_rows) < sum(all_rows)


def test_advantages_may_differ_by_token(tmp_path):
    """TRL accepts advantages of shape (B, T) from an override."""

    class OfTokens(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"].unsqueeze(1) * output["completion_mask"]
            return output

    weights = []
    for zero_variance_groups in ("keep", "skip"):
        trainer = build(tmp_path, trainer_class=OfTokens, zero_variance_groups=zero_variance_groups, max_steps=3)
        trainer.train()
        weights.append(weights_of(trainer))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_a_list_of_an_override_keeps_the_trained_rows(tmp_path):
    """TRL shuffles and splits lists of the batch as it does tensors."""
    numbers = []

    class WithTexts(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return output | {"texts": self.processing_class.batch_decode(output["completion_ids"])}

        def compute_loss(self, model, inputs, *args, **kwargs):
            assert inputs["texts"] == self.processing_class.batch_decode(inputs["completion_ids"])
            numbers.append(len(inputs["texts"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"adaptive_sampling": "uniform", "num_generations": 2, "zero_variance_groups": "skip"}
    build(tmp_path, trainer_class=WithTexts, **options).train()
    assert min(numbers) < 8


@pytest.mark.parametrize("option", [{"beta": 0.1}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}])
def test_options_that_act_on_rows_with_advantage_0_are_rejected(option, tmp_path):
    with pytest.raises(ValueError, match=f"zero_variance_groups='skip' requires {next(iter(option))}"):
        build(tmp_path, zero_variance_groups="skip", **option)
