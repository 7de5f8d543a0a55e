"""A user's own function in place of the baseline (`advantage_func`)."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Features, Value

from ada_trl.core import batch_advantages, pool_advantages
from ada_trl.trainer.own_advantages import check_advantages

from ..helpers import Recorder, assert_same_run, build, logs_of, prompt_dataset, prompts_of, weights_of


MODES = {
    "uniform": {"adaptive_sampling": "uniform", "num_generations": 4},
    "uniform, skip": {"adaptive_sampling": "uniform", "num_generations": 4, "zero_variance_groups": "skip"},
    "uniform, mask": {"adaptive_sampling": "uniform", "num_generations": 4, "zero_variance_groups": "mask"},
    "seq-balance": {},
    "seq-pos": {"adaptive_sampling": "seq-pos"},
    "est-ema": {"adaptive_sampling": "est-ema"},
    "est-value": {"adaptive_sampling": "est-value"},
    "batch": {"baseline": "batch"},
    "retries": {"baseline": "batch", "retries": 3},
}


def train(tmp_path, advantage_func=None, **options):
    trainer = build(tmp_path, advantage_func=advantage_func, **options)  # which sets the seed
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_trained_with_the_advantages_of_the_function(mode, tmp_path):
    """Each rollout gets a different number, so that a row with the advantage of another rollout would be noticed."""
    seen, before = [], {}

    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def number(number, **kwargs):
        return [float(i) for i in number]

    def numbered(rollouts):
        seen.append(rollouts)
        return 1.0 + np.arange(len(rollouts)) / 64  # exact in float32

    options = {"success_reward": "length", "positive_threshold": 4.5, "max_steps": 4} | MODES[mode]
    dataset = prompt_dataset().add_column("number", list(range(16))).add_column("tags", [["a", "b"]] * 16)
    trainer = train(tmp_path, numbered, reward_funcs=[length, number], dataset=dataset, **options)
    assert len(seen) == len(trainer.batches) == 4
    for rollouts, batch in zip(seen, trainer.batches, strict=True):
        # Both rewards repeat what the record says.
        assert np.array_equal(rollouts.rewards_NF[:, 0], rollouts.length_N)
        assert np.array_equal(rollouts.rewards_NF[:, 1], rollouts.columns["number"])
        assert rollouts.columns["tags"].tolist() == [["a", "b"]] * len(rollouts)
        index = ((batch["advantages"] - 1) * 64).round().long().tolist()
        assert rollouts.length_N[index].tolist() == batch["completion_mask"].sum(dim=1).tolist()
        assert [dataset[int(i)]["prompt"] for i in rollouts.columns["number"][index]] == prompts_of(batch)
        assert len(set(index)) == len(index), "No rollout is trained on twice."
        assert mode.startswith("seq") or index == list(range(len(rollouts))), "All rollouts are trained on."
        attempts = dict(zip(rollouts.columns["number"].tolist(), rollouts.attempt_N.tolist(), strict=True))
        assert all(attempt == before[i] + 1 for i, attempt in attempts.items() if attempt)
        before = attempts
    assert (mode == "retries") == any(rollouts.attempt_N.any() for rollouts in seen)


def test_a_second_training_without_retries_has_the_columns_of_its_own_prompts(tmp_path):
    """And no longer those of the prompt queue, which the first training needed."""
    scored, columns = [], []

    def solves_few(number, **kwargs):
        scored.append(list(number))
        return [float(i % 4 == 0) for i in number]

    def recorded(rollouts):
        columns.append(rollouts.columns["number"].tolist())
        return rollouts.reward_N - rollouts.reward_N.mean()

    dataset = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(32)], "number": list(range(32))})
    trainer = train(tmp_path, recorded, reward_funcs=solves_few, dataset=dataset, **MODES["retries"])
    trainer.args.retries = 0
    trainer.train()
    assert len(columns) == 4 and columns[2:] == scored[2:]


@pytest.mark.parametrize(
    ("options", "func"),
    [
        ({"baseline": "batch"}, batch_advantages),
        ({}, pool_advantages),
        ({"adaptive_sampling": "est-ema"}, pool_advantages),
    ],
)
def test_own_functions_go_through_the_same_door(options, func, tmp_path):
    assert_same_run(train(tmp_path / "a", **options), train(tmp_path / "b", func, **options))


def by_source(rollouts):
    return pd.Series(rollouts.reward_N).groupby(["web", "book"] * (len(rollouts) // 2))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda rollouts: np.zeros((len(rollouts), 1)), r"shape \(8, 1\), but it must have the shape \(8,\)"),
        (lambda rollouts: np.zeros(rollouts.num_prompts), r"shape \(2,\), but it must have the shape \(8,\)"),
        (lambda rollouts: np.full(len(rollouts), np.nan), "returned nan for rollout 0, but advantages must be finite"),
        (lambda rollouts: np.where(np.arange(len(rollouts)) == 3, np.inf, 0), "returned inf for rollout 3"),
        (lambda rollouts: ["a"] * len(rollouts), "returned list, which is no array of numbers"),
        (lambda rollouts: None, r"shape \(\), but it must have|no array of numbers"),
        (lambda rollouts: np.full(len(rollouts), 1e39), r"returned 1e\+39 for rollout 0, .* at most 1e\+12"),
        (
            lambda rollouts: by_source(rollouts).mean(),
            r"Series whose index is not 0, 1, …, 1, .* matched .* by position",
        ),
        (lambda rollouts: by_source(rollouts).head(9).iloc[::-1], r"Series whose index is not 0, 1, …, 7"),
        (lambda rollouts: torch.ones(len(rollouts), requires_grad=True), r"tensor with a gradient.*\.detach\(\)"),
    ],
)
def test_return_values_are_checked(returned, message, tmp_path):
    trainer = build(tmp_path, advantage_func=returned, adaptive_sampling="uniform", num_generations=4)
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    "returned",
    [
        lambda rewards: np.ma.masked_array(rewards - 0.5, mask=np.arange(len(rewards)) % 2),
        lambda rewards: pd.Series(rewards - 0.5).where(np.arange(len(rewards)) % 2 == 0, 0.0),
        lambda rewards: torch.tensor(np.where(np.arange(len(rewards)) % 2, 0.0, rewards - 0.5)),
    ],
    ids=["masked array", "series", "tensor"],
)
def test_masked_advantages_are_0(returned):
    rewards = np.array([0.0, np.nan, 1.0, 1.0])
    assert check_advantages(returned(rewards), "half", 4).tolist() == [-0.5, 0.0, 0.5, 0.0]


class ArrayOfJAX:
    """A scalar as formatted datasets with JAX have it, which is not installed here."""

    ndim = 0

    def __init__(self, value):
        self.item = lambda: value


def jax_like(batch):
    return {name: values if name == "prompt" else [*map(ArrayOfJAX, values)] for name, values in batch.items()}


@pytest.mark.parametrize("options", [{"retries": 2}, {"num_generations": 2}], ids=str)
@pytest.mark.parametrize(
    ("form", "streams"),
    # GRPOTrainer cannot read rows in arrow format, nor a stream's in pandas format, which are tables.
    [("numpy", False), ("torch", False), ("pandas", False), ("jax", False), ("numpy", True), ("torch", True)],
)
def test_columns_do_not_depend_on_the_format_of_the_dataset(form, streams, options, tmp_path):
    columns = {"number": list(range(16)), "level": [i / 4 for i in range(16)], "is_hard": [True, False] * 8}
    plain = Dataset.from_dict({"prompt": prompt_dataset()["prompt"], **columns})
    dataset = plain.with_transform(jax_like) if form == "jax" else plain.with_format(form)
    if streams:
        dataset = plain.to_iterable_dataset().with_format(form)
    seen = []

    def recorded(rollouts):
        seen.append({name: rollouts.columns[name].tolist() for name in columns})
        assert [rollouts.columns[name].dtype.kind for name in columns] == ["i", "f", "b"]
        assert {type(value) for values in seen[-1].values() for value in values} == {int, float, bool}
        return rollouts.reward_N - 0.5

    train(tmp_path, recorded, dataset=dataset, baseline="batch", max_steps=2, **options)
    for batch in seen:
        assert [batch[name] for name in columns] == [[columns[name][i] for i in batch["number"]] for name in columns]


@pytest.mark.parametrize("streams", [False, True])
def test_a_missing_number_is_nan_also_if_a_batch_has_no_other(streams, tmp_path):
    """And a missing string `None`, of which the trainer knows from the features of the dataset."""
    columns = {"level": [0.5, *[None] * 15], "count": [None] * 15 + [3], "source": ["a", *[None] * 15]}
    kinds = {"prompt": "string", "level": "float32", "count": "int64", "source": "string"}
    features = Features({name: Value(kind) for name, kind in kinds.items()})
    dataset = Dataset.from_dict({"prompt": prompt_dataset()["prompt"], **columns}, features=features)
    dataset = dataset.to_iterable_dataset() if streams else dataset
    seen = []

    def recorded(rollouts):
        seen.extend(zip(*(rollouts.columns[name].tolist() for name in columns), strict=True))
        return rollouts.reward_N - 0.5

    train(tmp_path, recorded, dataset=dataset, num_generations=4, adaptive_sampling="uniform", shuffle_dataset=False)
    assert {type(level) for level, _, _ in seen} == {type(count) for _, count, _ in seen} == {float}
    assert [source for _, _, source in seen] == ["a"] * 4 + [None] * (len(seen) - 4)


def test_an_unknown_column_is_an_error_that_lists_the_others(tmp_path):
    dataset = prompt_dataset().add_column("source", ["a", "b"] * 8).add_column("level", [0, 1] * 8)
    with pytest.raises(KeyError, match="no column 'sources': the columns are 'source', 'level'"):
        train(tmp_path, lambda rollouts: rollouts.columns["sources"], dataset=dataset, baseline="batch")


@pytest.mark.parametrize("mode", ["uniform", "uniform, skip", "uniform, mask", "seq-balance", "batch"])
def test_a_function_that_is_set_later_or_overridden_has_the_same_effect(mode, tmp_path):
    """Its zeros are those of which \"skip\" and \"mask\" leave out the rows."""

    class Overridden(Recorder):
        def compute_advantages(self, rollouts):
            return first_prompt_only(rollouts)

    def first_prompt_only(rollouts):
        return np.where(rollouts.prompt_N == 0, 1.0 - 2 * (rollouts.draw_N % 2), 0.0)

    given = train(tmp_path, first_prompt_only, **MODES[mode])
    for is_overridden in (False, True):
        trainer = build(tmp_path, trainer_class=Overridden if is_overridden else Recorder, **MODES[mode])
        if not is_overridden:
            trainer.advantage_func = first_prompt_only
        trainer.train()
        assert torch.equal(weights_of(given), weights_of(trainer))
        assert logs_of(trainer)[0]["ada/frac_zero_advantage_groups"] > 0 and logs_of(trainer)[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        *(("eval", mode) for mode in ("uniform, skip", "seq-balance", "batch")),
        ("no gradients", "seq-balance"),
        ("inference mode", "batch"),
    ],
)
def test_the_training_state_is_restored_after_the_function(change, mode, tmp_path):
    def centered(rollouts):
        return rollouts.reward_N - rollouts.reward_N.mean()

    def changing(rollouts):
        if change == "eval":
            trainer.model.eval()
        elif change == "no gradients":
            torch.set_grad_enabled(False)
        else:
            torch.inference_mode().__enter__()
        return centered(rollouts)

    options = MODES[mode] | {"gradient_accumulation_steps": 2, "loss_type": "grpo"}
    expected = train(tmp_path / "a", centered, **options)
    trainer = build(tmp_path / "b", advantage_func=changing, **options)
    trainer.train()
    assert torch.equal(weights_of(expected), weights_of(trainer))


def test_arrays_are_read_only(tmp_path):
    def in_place(rollouts):
        with pytest.raises(dataclasses.FrozenInstanceError):
            rollouts.reward_N = rollouts.reward_N - 1
        for array in (rollouts.reward_N, rollouts.mean_P, rollouts.columns["source"]):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        return np.zeros(len(rollouts))

    dataset = prompt_dataset().add_column("source", ["a", "b"] * 8)
    assert logs_of(train(tmp_path, in_place, dataset=dataset, baseline="batch"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_variance_groups": "resample"}, r"\('resample'\) is not supported with zeros.*'skip' or 'mask'"),
        ({"scale_rewards": "group"}, r"scale_rewards \('group'\) has no effect with an advantage_func.*unset"),
        ({"prompt_weighting": "inverse"}, r"prompt_weighting \('inverse'\) has no effect"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation .* has no effect"),
    ],
)
def test_options_that_the_function_replaces_are_rejected(options, message, tmp_path):
    def zeros(rollouts):
        return np.zeros(len(rollouts))

    with pytest.raises(ValueError, match=message):
        build(tmp_path, advantage_func=zeros, **options)
    trainer = build(tmp_path, **options)
    trainer.advantage_func = zeros
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_what_is_no_function_is_rejected_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"advantage_func \('batch_advantages'\) must be a function"):
        build(tmp_path, advantage_func="batch_advantages")
