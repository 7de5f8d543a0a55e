"""Reinforce-Ada-Est end to end on a tiny model: budgets, unequal groups, metrics, the file of pass rates, resume."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import Trainer

from ada_trl.pass_rates.prompt_id import prompt_key
from ada_trl.pass_rates.store import PASS_RATES_FILE
from ada_trl.pass_rates.value_head import VALUE_HEAD_FILE
from ada_trl.trainer.checkpointing import STATE_FILE

from ..helpers import (
    PROMPTS,
    ScriptedRewards,
    even_reward,
    logs_of,
    moved,
    prompt_dataset,
    prompts_of,
    tiny_tokenizer,
    weights_of,
)
from .estimated import RESUME, build, by_prompt


def give_history(trainer, **counts):
    """Let the estimator observe `(positives, rollouts)` of each prompt before the first step."""
    positives, num_rollouts = zip(*counts.values(), strict=True)
    trainer.pass_rates.counts.observe([prompt_key(prompt) for prompt in counts], positives, num_rollouts, step=0)


def train_one_step(tmp_path, reward=even_reward, **options):
    """One step of all four prompts, 16 rollouts, after the outcomes of `HARD_AND_EASY`; the trainer and its batch."""
    trainer = build(tmp_path, reward, prompt_dataset(1), per_device_train_batch_size=16, max_steps=1, **options)
    give_history(trainer, **HARD_AND_EASY)
    trainer.train()
    (batch,) = trainer.batches
    return trainer, batch


HARD_AND_EASY = {"1+2=": (90, 100), "31+4=": (50, 100), "5+55=": (1, 100), "7+8=": (20, 100)}


# Budgets


@pytest.mark.parametrize(
    ("mode", "overrides"), [("est-ema", {"gradient_accumulation_steps": 2, "num_iterations": 2}), ("est-value", {})]
)
def test_the_budget_is_exactly_that_of_grpo(mode, overrides, tmp_path):
    rows = []

    def reward(prompts, completions, **kwargs):
        rows.append(len(prompts))
        return by_prompt(prompts, completions)

    options = {"per_device_train_batch_size": 16, "max_steps": 8} | overrides
    trainer = build(tmp_path, reward, adaptive_sampling=mode, **options)
    assert all(moved(trainer).values())
    generation_batch = trainer.args.generation_batch_size
    assert rows == [generation_batch] * len(trainer.rollouts) and len(rows) >= 4
    sizes = [rollouts.size_P.tolist() for rollouts in trainer.rollouts]
    assert all(sum(step) == generation_batch and min(step) >= 2 and max(step) <= 32 for step in sizes)
    assert any(len(set(step)) > 1 for step in sizes)
    for logs in logs_of(trainer):
        assert logs["ada/samples_per_prompt/mean"] == 4
        assert all(math.isfinite(value) for value in logs.values() if isinstance(value, float)), logs


def test_a_step_line_by_line(tmp_path):
    """Earlier outcomes decide the budgets; all rollouts are trained on, with the advantages of their pool."""
    scripts = {"1+2=": [1, -1], "31+4=": [1, 1], "5+55=": [-1] * 8 + [1], "7+8=": [-1] * 3}
    trainer, batch = train_one_step(tmp_path, ScriptedRewards(**scripts), log_completions=True)
    estimates = {prompt: (k + 1) / (n + 17) for prompt, (k, n) in HARD_AND_EASY.items()}
    prompts, advantages = prompts_of(batch), batch["advantages"].tolist()
    assert {prompt: prompts.count(prompt) for prompt in PROMPTS} == {p: len(r) for p, r in scripts.items()}
    assert sum(a != b for a, b in zip(prompts, prompts[1:], strict=False)) == 3  # each prompt's rows together
    for prompt, rewards in scripts.items():
        rate, mean = rewards.count(1) / len(rewards), sum(rewards) / len(rewards)
        weight = max(rate, 1 / len(rewards)) ** -0.5
        found = [a for p, a in zip(prompts, advantages, strict=True) if p == prompt]
        assert found == pytest.approx([weight * (reward - mean) for reward in rewards])
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()

    (logs,) = logs_of(trainer)
    means = [0, 1, -7 / 9, -1]
    assert logs["reward"] == logs["rewards/scripted/mean"] == pytest.approx(sum(means) / 4)
    assert logs["reward"] == pytest.approx(logs["ada/reward/macro_mean"])
    assert logs["ada/reward/micro_mean"] == logs["ada/reward/trained"] == pytest.approx((0 + 2 - 7 - 3) / 16)
    rates = {p: (r.count(1), len(r)) for p, r in scripts.items()}
    squares = [k * (1 - estimates[p]) ** 2 + (n - k) * estimates[p] ** 2 for p, (k, n) in rates.items()]
    assert logs["ada/estimator/brier"] == pytest.approx(sum(squares) / 16)
    assert logs["ada/estimator/brier_constant"] == pytest.approx(4 / 16 * 12 / 16)
    # GRPO would have sampled more rollouts of three prompts, which might have differed.
    assert not any("frac_reward_zero_std" in name for name, value in logs.items() if value is not None)
    assert logs["ada/frac_zero_advantage_groups"] == 0.5


def test_allocation_rules_and_bounds(tmp_path):
    def sizes(**options):
        prompts = prompts_of(train_one_step(tmp_path, **options)[1])
        return [prompts.count(prompt) for prompt in PROMPTS]

    assert sizes() == [2, 2, 9, 3]
    assert sizes(allocation_rule="variance") == [2, 2, 9, 3]
    assert sizes(allocation_rule=0.0) == [4, 4, 4, 4]
    assert sizes(max_samples=6) == [2, 3, 6, 5]


def test_duplicates_share_an_estimate_and_have_separate_pools(tmp_path):
    trainer = build(tmp_path, by_prompt, prompt_dataset(1).select([0, 0]), max_steps=1)
    trainer.train()
    (rollouts,) = trainer.rollouts
    assert rollouts.size_P.tolist() == [4, 4]
    (counts,) = trainer.pass_rates.counts.counts.values()
    assert counts.rollouts == 8 and counts.positives == rollouts.positives_P.sum()


@pytest.mark.parametrize("ids", ["abcd", "aaaa"])
def test_prompts_are_identified_by_id_and_content(ids, tmp_path):
    """With one id for all rows, all prompts shared one estimate."""
    dataset = prompt_dataset(1).add_column("id", list(ids))
    trainer = build(tmp_path, by_prompt, dataset, per_device_train_batch_size=16, max_steps=1)
    trainer.train()
    rows = [{"id": id_, "prompt": prompt} for id_, prompt in zip(ids, dataset["prompt"], strict=True)]
    assert set(trainer.pass_rates.counts.counts) == {prompt_key(row["prompt"], row) for row in rows}
    assert len(trainer.pass_rates.counts.counts) == 4


@pytest.mark.parametrize(
    "overrides",
    [{}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}, {"bf16": True}],
    ids=["head", "lora", "bf16"],
)
def test_a_value_head_is_trained_by_the_trainer_and_compared_with_the_ema(overrides, tmp_path):
    trainer = build(
        tmp_path,
        lambda prompts, **kwargs: [float(prompt in PROMPTS[:2]) for prompt in prompts],
        prompt_dataset(20),
        adaptive_sampling="est-value",
        **{"per_device_train_batch_size": 16, "max_steps": 16, "learning_rate": 1e-4} | overrides,
        log_completions=True,
    )
    trainer.pass_rates.head.gradient_steps = 30
    trainer.train()
    first, *_, last = (
        {key: logs[f"ada/estimator/{key}"] for key in ("brier", "brier_ema", "brier_constant")}
        for logs in logs_of(trainer)
    )
    assert first["brier"] == pytest.approx(first["brier_ema"])  # both start at the prior mean
    assert last["brier"] < 0.7 * last["brier_constant"]
    assert last["brier"] != last["brier_ema"]
    assert all(logs["ada/time/pass_rate_estimation"] > 0 for logs in logs_of(trainer))


# Unequal groups in TRL's logs and in the loss mask


def test_completions_table_and_extras_match_their_prompts(tmp_path):
    def reward(prompts, completions, log_extra, **kwargs):
        log_extra("sampled", prompts)
        return even_reward(completions)

    _, batch = train_one_step(tmp_path, reward, log_completions=True, num_completions_to_print=1)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    decoded = tiny_tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
    assert len(set(table["prompt"].value_counts())) > 1
    assert table["prompt"].tolist() == table["sampled"].tolist() == prompts_of(batch)
    assert table["completion"].tolist() == decoded
    assert table["reward"].tolist() == even_reward(decoded)
    assert table["advantage"].tolist() == pytest.approx(batch["advantages"].tolist())


def test_only_rows_of_zero_variance_groups_are_masked(tmp_path):
    scripts = {"1+2=": [1, 0], "31+4=": [0, 0], "5+55=": [0] * 8 + [1], "7+8=": [1, 0, 0]}
    _, batch = train_one_step(tmp_path, ScriptedRewards(**scripts), zero_variance_groups="mask")
    for prompt, mask in zip(prompts_of(batch), batch["completion_mask"], strict=True):
        assert bool(mask.any()) == (prompt != "31+4=")
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_unscored_rollouts_are_not_counted(tmp_path):
    scripts = {"1+2=": [None, None], "31+4=": [1, None], "5+55=": [0] * 8 + [1], "7+8=": [None, 1, 1]}
    trainer, _ = train_one_step(tmp_path, ScriptedRewards(**scripts))
    counts = {p: trainer.pass_rates.counts.counts[prompt_key(p)] for p in PROMPTS}
    assert [counts[p].rollouts for p in PROMPTS] == [100, 101, 109, 102]
    assert [counts[p].positives for p in PROMPTS] == [90, 51, 2, 22]
    (logs,) = logs_of(trainer)
    assert logs["reward"] == pytest.approx((1 + 1 / 9 + 1) / 3)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_the_value_head_uses_no_random_numbers(tmp_path):
    """With equal budgets both estimators lead to the same completions and weights."""

    def weights(mode):
        trainer = build(
            tmp_path,
            adaptive_sampling=mode,
            per_device_train_batch_size=8,
            max_steps=3,
            min_samples=4,
            max_samples=4,
        )
        trainer.train()
        return weights_of(trainer)

    assert torch.equal(weights("est-ema"), weights("est-value"))


# Checkpoints


@pytest.mark.parametrize("mode", ["seq-balance", "uniform"])
def test_recording_pass_rates_changes_nothing_else(mode, tmp_path):
    def run(name, **options):
        trainer = build(
            tmp_path / name, by_prompt, adaptive_sampling=mode, save_strategy="steps", save_steps=1, **options
        )
        trainer.train()
        return trainer

    plain, tracked = run("plain"), run("tracked", pass_rate_estimator="ema")
    assert torch.equal(weights_of(plain), weights_of(tracked))
    assert not (tmp_path / "plain" / "checkpoint-2" / PASS_RATES_FILE).exists()
    path = tmp_path / "tracked" / "checkpoint-2" / PASS_RATES_FILE
    table = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert set(table["prompt_id"]) <= set(map(prompt_key, PROMPTS)) and max(table["last_step"]) == 2
    rollouts = sum(logs["ada/samples_per_prompt/mean"] * 2 for logs in logs_of(tracked))
    assert sum(table["rollouts"]) == rollouts
    assert 0 < sum(table["positives"]) < rollouts
    assert not any("ada/estimator/brier" in logs for logs in logs_of(plain))


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}], ids=["all", "save_only_model"])
def test_a_checkpoint_is_complete_when_it_is_pushed(options, tmp_path, monkeypatch):
    pushed = []

    def push(trainer, folder):
        pushed.append(sorted(path.name for path in Path(folder).glob("*") if path.name.startswith(("ada_", "model"))))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *args, **kwargs: None)
    options = RESUME | {"push_to_hub": True, "hub_strategy": "all_checkpoints"} | options
    build(tmp_path, by_prompt, adaptive_sampling="est-value", **options).train()
    assert pushed == [[PASS_RATES_FILE, STATE_FILE, VALUE_HEAD_FILE, "model.safetensors"]] * 2
