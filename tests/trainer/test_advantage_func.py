"""A user's own function in place of the baseline (`advantage_func`)."""

import functools

import numpy as np
import pytest
import torch

from ada_trl.core import batch_advantages, pool_advantages

from ..helpers import QUICK, Recorder, config, even_reward, logs_of, prompt_dataset, tiny_model, tiny_tokenizer


MODES = {
    "uniform": {"adaptive_sampling": "uniform", "num_generations": 4},
    "uniform, queue": {"adaptive_sampling": "uniform", "num_generations": 4, "zero_variance_groups": "resample"},
    "seq-balance": {},
    "seq-pos": {"adaptive_sampling": "seq-pos"},
    "est-ema": {"adaptive_sampling": "est-ema"},
    "est-value": {"adaptive_sampling": "est-value"},
    "batch": {"baseline": "batch"},
    "retries": {"baseline": "batch", "retries": 3},
}


def build(tmp_path, advantage_func=None, **options):
    arguments = (
        tiny_model(),
        even_reward,
        config(tmp_path, **QUICK | options),
        prompt_dataset(),
        None,
        tiny_tokenizer(),
    )
    return Recorder(*arguments, advantage_func=advantage_func)


def train(tmp_path, advantage_func=None, **options):
    trainer = build(tmp_path, advantage_func, **options)  # which sets the seed
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_trained_with_the_advantages_of_the_function(mode, tmp_path):
    """Each rollout gets a different number, so that a row with the advantage of another rollout would be noticed."""
    seen = []

    def numbered(rollouts):
        seen.append(rollouts)
        return 1.0 + np.arange(len(rollouts)) / 64  # exact in float32

    trainer = build(tmp_path, numbered, **MODES[mode])
    trainer.train()
    assert len(seen) == len(trainer.batches) == 2
    for rollouts, batch in zip(seen, trainer.batches, strict=True):
        index = ((batch["advantages"] - 1) * 64).round().long()
        texts = tiny_tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
        assert rollouts.reward_N[index].tolist() == even_reward(texts), "The row's reward is that of the rollout."
        assert len(set(index.tolist())) == len(index), "No rollout is trained on twice."
        if mode in ("uniform", "est-ema", "est-value", "batch", "retries"):
            assert index.tolist() == list(range(len(rollouts))), "All rollouts are trained on."


@pytest.mark.parametrize(
    ("options", "func"),
    [
        ({"baseline": "batch"}, batch_advantages),
        ({"baseline": "batch", "scale_rewards": "batch"}, functools.partial(batch_advantages, scale="batch")),
        ({}, pool_advantages),
        ({"adaptive_sampling": "est-ema"}, pool_advantages),
    ],
)
def test_own_functions_go_through_the_same_door(options, func, tmp_path):
    ours = train(tmp_path / "a", **options)
    theirs = train(tmp_path / "b", func, **options)
    for expected, actual in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(expected, actual)
    expected, actual = (
        [{name: value for name, value in logs.items() if "time" not in name} for logs in logs_of(trainer)]
        for trainer in (ours, theirs)
    )
    assert expected == actual


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda rollouts: np.zeros((len(rollouts), 1)), r"shape \(8, 1\), but it must have the shape \(8,\)"),
        (lambda rollouts: np.zeros(rollouts.num_prompts), r"shape \(2,\), but it must have the shape \(8,\)"),
        (lambda rollouts: np.full(len(rollouts), np.nan), "returned nan for rollout 0, but advantages must be finite"),
        (lambda rollouts: np.where(np.arange(len(rollouts)) == 3, np.inf, 0), "returned inf for rollout 3"),
        (lambda rollouts: ["a"] * len(rollouts), "returned list, which is no array of numbers"),
        (lambda rollouts: None, r"shape \(\), but it must have|no array of numbers"),
    ],
)
def test_return_values_are_checked(returned, message, tmp_path):
    trainer = build(tmp_path, returned, adaptive_sampling="uniform", num_generations=4)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_plain_grpo_with_a_function_is_not_plain(tmp_path):
    """Its rollouts are GRPO's, its advantages are not."""
    plain, own = (
        train(tmp_path / name, func, adaptive_sampling="uniform", num_generations=8)
        for name, func in (("plain", None), ("own", lambda rollouts: -pool_advantages(rollouts, weighting="none")))
    )
    assert torch.equal(plain.batches[0]["completion_ids"], own.batches[0]["completion_ids"])
    assert torch.allclose(plain.batches[0]["advantages"], -own.batches[0]["advantages"])
    assert plain.batches[0]["advantages"].any()
