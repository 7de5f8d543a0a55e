"""Reinforce-Ada-Est end to end on a tiny model: budgets, unequal groups, honest metrics, the record, resume."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import Trainer

from ada_trl.core import mean_and_std, prompt_key
from ada_trl.core.pass_rate_ema import beta_binomial_sufficient_stats, fit_beta_prior
from ada_trl.pass_rates.store import PASS_RATES_FILE, load_pass_rates
from ada_trl.pass_rates.value_head import VALUE_HEAD_FILE
from ada_trl.train import parse_args

from ..helpers import (
    PROMPTS,
    ScriptedRewards,
    even_reward,
    length_reward,
    logs_of,
    moved,
    prompt_dataset,
    prompts_of,
    tiny_tokenizer,
    train_with_and_without_resume,
)
from .estimated import RESUME, build, by_prompt, identified


MODES = ["est-ema", "est-value"]


def known(trainer, **counts):
    """Give the estimator a past: `(positives, draws)` per prompt."""
    positives, draws = zip(*counts.values(), strict=True)
    trainer.pass_rates.ema.observe([prompt_key(prompt) for prompt in counts], positives, draws, step=0)


LARGE = {"per_device_train_batch_size": 64}  # 16 prompts
HARD_AND_EASY = {"1+2=": (90, 100), "31+4=": (50, 100), "5+55=": (1, 100), "7+8=": (20, 100)}


# Budgets


@pytest.mark.parametrize(
    ("mode", "overrides"), [("est-ema", {"gradient_accumulation_steps": 2, "num_iterations": 2}), ("est-value", {})]
)
def test_the_budget_is_that_of_grpo_to_the_rollout(mode, overrides, tmp_path):
    rows = []

    def reward(prompts, completions, **kwargs):
        rows.append(len(prompts))
        return by_prompt(prompts, completions)

    options = {"per_device_train_batch_size": 16, "max_steps": 8} | overrides
    trainer = build(tmp_path, reward, adaptive_sampling=mode, **options)
    trainer.train()
    generation_batch = trainer.args.generation_batch_size
    assert rows == [generation_batch] * len(trainer.pools) and len(rows) >= 4
    sizes = [[len(pool) for pool in pools] for pools in trainer.pools]
    assert all(sum(step) == generation_batch and min(step) >= 2 and max(step) <= 32 for step in sizes)
    assert any(len(set(step)) > 1 for step in sizes)
    for logs in logs_of(trainer):
        assert logs["ada/samples_per_prompt/mean"] == 4
        assert logs["ada/tokens/discarded"] == 0
        assert logs["ada/rounds/mean"] == 1


def test_every_parameter_moves_and_everything_logged_is_finite(tmp_path):
    trainer = build(tmp_path, adaptive_sampling="est-value")
    assert all(moved(trainer).values())
    for logs in trainer.state.log_history:
        assert all(math.isfinite(value) for value in logs.values() if isinstance(value, float)), logs


def test_a_step_line_by_line(tmp_path):
    """Estimates from the past decide the sizes; all that is drawn is trained on, with the advantages of its pool."""
    scripts = {"1+2=": [1, -1], "31+4=": [1, 1], "5+55=": [-1] * 8 + [1], "7+8=": [-1] * 3}
    trainer = build(
        tmp_path, ScriptedRewards(**scripts), prompt_dataset(1), per_device_train_batch_size=16, max_steps=1
    )
    known(trainer, **HARD_AND_EASY)
    estimates = dict(zip(PROMPTS, trainer.pass_rates.ema.predict([prompt_key(p) for p in PROMPTS]), strict=True))
    trainer.train()

    (batch,) = trainer.batches
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
    # GRPO would have drawn two more of the second prompt and one more of the last, which might have differed; of the
    # third, four of nine would have missed the positive one with probability 5/9.
    a, b = fit_beta_prior(beta_binomial_sufficient_stats([(1, 2), (2, 2), (0, 3)]), 1.0, 1.0)
    zero_signal = [0, (a + 2) / (a + b + 2) * (a + 3) / (a + b + 3), 5 / 9, (b + 3) / (a + b + 3)]
    assert logs["ada/frac_reward_zero_std/first_round"] == pytest.approx(sum(zero_signal) / 4)
    assert logs["frac_reward_zero_std"] == logs["ada/frac_reward_zero_std/first_round"]
    assert logs["ada/frac_zero_advantage_groups"] == 0.5


def test_the_variance_rule_asks_for_more_of_the_hard_ones(tmp_path):
    def sizes(**options):
        trainer = build(tmp_path, dataset=prompt_dataset(1), per_device_train_batch_size=16, max_steps=1, **options)
        known(trainer, **HARD_AND_EASY)
        trainer.train()
        (batch,) = trainer.batches
        return [prompts_of(batch).count(prompt) for prompt in PROMPTS]

    assert sizes() == [2, 2, 9, 3]
    assert sizes(allocation_rule="variance") == [2, 2, 9, 3]
    assert sizes(allocation_rule=0.0) == [4, 4, 4, 4]
    assert sizes(max_samples=6) == [2, 3, 6, 5]


def test_duplicates_share_an_estimate_and_have_separate_pools(tmp_path):
    trainer = build(tmp_path, by_prompt, prompt_dataset(1).select([0, 0]), max_steps=1)
    trainer.train()
    (pools,) = trainer.pools
    assert [len(pool) for pool in pools] == [4, 4]
    (counts,) = trainer.pass_rates.ema.counts.values()
    assert counts.num_rollouts == 8 and counts.positives == sum(pool.positives for pool in pools)


def test_an_id_column_is_the_identity(tmp_path):
    dataset = prompt_dataset(1).add_column("id", ["a", "b", "c", "d"])
    trainer = build(tmp_path, by_prompt, dataset, per_device_train_batch_size=16, max_steps=1)
    trainer.train()
    assert set(trainer.pass_rates.ema.counts) == {"a", "b", "c", "d"}
    assert trainer.pass_rates.texts == dict(zip("abcd", PROMPTS, strict=True))


def test_the_prior_is_learnt_unless_told_otherwise(tmp_path):
    for options, learnt in [({}, True), ({"pass_rate_prior": [1.0, 16.0]}, False)]:
        trainer = build(tmp_path, by_prompt, identified(4), max_steps=4, **LARGE | options)
        trainer.train()
        assert ((trainer.pass_rates.ema.alpha, trainer.pass_rates.ema.beta) != (1.0, 16.0)) == learnt


# Unequal groups in what the parent logs and in the loss mask


def test_completions_table_and_extras_match_their_prompts(tmp_path):
    def reward(prompts, completions, log_extra, **kwargs):
        log_extra("asked", prompts)
        return even_reward(completions)

    trainer = build(
        tmp_path,
        reward,
        prompt_dataset(1),
        per_device_train_batch_size=16,
        max_steps=1,
        log_completions=True,
        num_completions_to_print=1,
    )
    known(trainer, **HARD_AND_EASY)
    trainer.train()
    (batch,) = trainer.batches
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    decoded = tiny_tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
    assert len(set(table["prompt"].value_counts())) > 1
    assert table["prompt"].tolist() == table["asked"].tolist() == prompts_of(batch)
    assert table["completion"].tolist() == decoded
    assert table["reward"].tolist() == even_reward(decoded)
    assert table["advantage"].tolist() == pytest.approx(batch["advantages"].tolist())


def test_masking_covers_exactly_the_rows_of_unresolved_prompts(tmp_path):
    scripts = {"1+2=": [1, 0], "31+4=": [0, 0], "5+55=": [0] * 8 + [1], "7+8=": [1, 0, 0]}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1),
        per_device_train_batch_size=16,
        max_steps=1,
        zero_variance_groups="mask",
    )
    known(trainer, **HARD_AND_EASY)
    trainer.train()
    (batch,) = trainer.batches
    for prompt, mask in zip(prompts_of(batch), batch["completion_mask"], strict=True):
        assert bool(mask.any()) == (prompt != "31+4=")
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_none_rewards_are_no_draws(tmp_path):
    scripts = {"1+2=": [None, None], "31+4=": [1, None], "5+55=": [0] * 8 + [1], "7+8=": [None, 1, 1]}
    trainer = build(
        tmp_path, ScriptedRewards(**scripts), prompt_dataset(1), per_device_train_batch_size=16, max_steps=1
    )
    known(trainer, **HARD_AND_EASY)
    trainer.train()
    counts = {p: trainer.pass_rates.ema.counts[prompt_key(p)] for p in PROMPTS}
    assert [counts[p].num_rollouts for p in PROMPTS] == [100, 101, 109, 102]
    assert [counts[p].positives for p in PROMPTS] == [90, 51, 2, 22]
    (logs,) = logs_of(trainer)
    assert logs["reward"] == pytest.approx((1 + 1 / 9 + 1) / 3)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# Metrics


@pytest.mark.parametrize("mode", MODES)
def test_batch_and_prompt_level_rewards_differ_by_the_covariance(mode, tmp_path):
    options = {"per_device_train_batch_size": 16, "max_steps": 4, "reward_weights": [1.0, 0.3]}
    trainer = build(tmp_path, [by_prompt, length_reward], adaptive_sampling=mode, **options)
    trainer.train()
    gaps = []
    for logs, pools in zip(logs_of(trainer), trainer.pools, strict=True):
        total, number = sum(map(len, pools)), len(pools)
        rewards = [[rollout.reward for rollout in pool.rollouts] for pool in pools]
        means = [sum(values) / len(values) for values in rewards]
        covariance = sum(len(v) * m for v, m in zip(rewards, means, strict=True)) / number - total / number * (
            sum(means) / number
        )
        gap = logs["ada/reward/micro_mean"] - logs["ada/reward/macro_mean"]
        assert gap * total == pytest.approx(number * covariance, abs=1e-6)
        assert gap * logs["ada/samples_per_prompt/mean"] == pytest.approx(
            logs["ada/reward/samples_covariance"], abs=1e-6
        )
        assert [logs["reward"], logs["ada/reward/macro_mean"]] == pytest.approx([sum(means) / number] * 2)
        gaps.append(abs(gap))
    assert max(gaps) > 0.01


def test_every_prompt_counts_once():
    values = [[1.0, 0.0], [0.0, math.nan], [1.0, 1.0, 1.0, 1.0], [math.nan]]
    mean, std = mean_and_std(values, each_prompt_once=True)
    assert mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert std**2 == pytest.approx((1 / 4) / (1 - (2 / 36 + 1 / 9 + 4 / 144)))
    equal = torch.tensor([[1.0, 0.0], [0.5, 0.25]])
    for once in (False, True):  # as TRL's where the groups are equal
        assert mean_and_std(equal.tolist(), each_prompt_once=once) == pytest.approx(
            (equal.mean().item(), equal.std().item())
        )
    assert all(map(math.isnan, mean_and_std([[math.nan], []], each_prompt_once=True)))


# The value head


@pytest.mark.parametrize(
    "overrides",
    [{}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}, {"bf16": True}],
    ids=["full", "lora", "bf16"],
)
def test_the_value_head_learns_and_is_compared(overrides, tmp_path):
    def decided_by_prompt(prompts, **kwargs):
        return [float(prompt in PROMPTS[:2]) for prompt in prompts]

    options = {"per_device_train_batch_size": 16, "max_steps": 20, "learning_rate": 1e-4}
    trainer = build(
        tmp_path, decided_by_prompt, prompt_dataset(20), adaptive_sampling="est-value", **options | overrides
    )
    trainer.pass_rates.network.gradient_steps = 30
    trainer.train()
    first, *_, last = (
        {name: logs[f"ada/estimator/{name}"] for name in ("brier", "brier_ema", "brier_constant")}
        for logs in logs_of(trainer)
    )
    assert first["brier"] == pytest.approx(first["brier_ema"])  # both start at the prior mean
    assert last["brier"] < 0.7 * last["brier_constant"]
    assert last["brier"] != last["brier_ema"]
    assert all(logs["ada/time/pass_rate_estimation"] > 0 for logs in logs_of(trainer))


def test_estimating_draws_no_random_number(tmp_path):
    """With equal budgets both modes sample the same completions, and so end with the same weights."""

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
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    assert torch.equal(weights("est-ema"), weights("est-value"))


# The record, and resume


@pytest.mark.parametrize("mode", ["seq-balance", "uniform"])
def test_observers_keep_a_record_and_change_nothing(mode, tmp_path):
    def run(name, **options):
        trainer = build(
            tmp_path / name, by_prompt, adaptive_sampling=mode, save_strategy="steps", save_steps=1, **options
        )
        trainer.train()
        return trainer

    plain, tracked = run("plain"), run("tracked", pass_rate_estimator="ema")
    for a, b in zip(plain.model.parameters(), tracked.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not (tmp_path / "plain" / "checkpoint-2" / PASS_RATES_FILE).exists()
    path = tmp_path / "tracked" / "checkpoint-2" / PASS_RATES_FILE
    record = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert set(record["prompt"]) <= set(PROMPTS) and max(record["last_step"]) == 2
    rollouts = sum(logs["ada/samples_per_prompt/mean"] * 2 for logs in logs_of(tracked))
    assert sum(record["draws"]) == rollouts
    assert 0 < sum(record["positives"]) < rollouts
    assert all("ada/estimator/brier" in logs for logs in logs_of(tracked))
    assert not any("ada/estimator/brier" in logs for logs in logs_of(plain))


# 32 prompts per step: within the first epoch, in the middle of the second, at the end of the third.
@pytest.mark.parametrize(("mode", "repeats"), [("est-value", 48), ("est-ema", 16), ("est-ema", 8)])
def test_resume_continues_as_if_never_stopped(mode, repeats, tmp_path):
    options = RESUME | {"adaptive_sampling": mode, "dataset": identified(repeats)} | LARGE
    whole, resumed = train_with_and_without_resume(build, tmp_path, by_prompt, at=3, **options)
    assert whole.pass_rates.ema.state_dict() == resumed.pass_rates.ema.state_dict()
    assert whole.pass_rates.texts == resumed.pass_rates.texts
    records = [load_pass_rates(tmp_path / run / "checkpoint-6" / PASS_RATES_FILE) for run in ("whole", "resumed")]
    assert records[0] == records[1]
    assert whole.pass_rates.ema.alpha != 1.0
    if mode == "est-value":
        heads = [trainer.pass_rates.network.state_dict() for trainer in (whole, resumed)]
        assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}], ids=["all", "save_only_model"])
def test_a_checkpoint_is_complete_when_it_is_pushed(options, tmp_path, monkeypatch):
    pushed = []

    def push(trainer, folder):
        pushed.append(sorted(path.name for path in Path(folder).glob("*") if path.name.startswith(("ada_", "model"))))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *args, **kwargs: None)
    options = RESUME | {"push_to_hub": True, "hub_strategy": "all_checkpoints"} | options
    build(tmp_path, by_prompt, adaptive_sampling="est-value", **options).train()
    assert pushed == [[PASS_RATES_FILE, VALUE_HEAD_FILE, "model.safetensors"]] * 2


def checkpoint(tmp_path, mode):
    build(tmp_path, by_prompt, adaptive_sampling=mode, **RESUME | {"max_steps": 3}).train()
    return tmp_path / "checkpoint-3"


def test_a_checkpoint_without_a_record_starts_from_the_prior_with_a_warning(tmp_path, caplog):
    path = checkpoint(tmp_path / "first", "uniform")
    trainer = build(tmp_path / "second", by_prompt, adaptive_sampling="est-value", **RESUME)
    trainer.train(resume_from_checkpoint=str(path))
    warnings = [record.message for record in caplog.records if "start from the prior" in record.message]
    assert [name in text for name, text in zip((PASS_RATES_FILE, VALUE_HEAD_FILE), warnings, strict=True)] == [
        True
    ] * 2
    assert trainer.state.global_step == 6
    assert logs_of(trainer)[3]["ada/estimator/brier"] == pytest.approx(logs_of(trainer)[3]["ada/estimator/brier_ema"])


def test_a_corrupt_record_raises_and_names_the_file(tmp_path):
    path = checkpoint(tmp_path / "first", "est-value")
    for name in (VALUE_HEAD_FILE, PASS_RATES_FILE):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
        trainer = build(tmp_path / "second", by_prompt, adaptive_sampling="est-value", **RESUME)
        with pytest.raises(ValueError, match=f"checkpoint-3/{name} is not a usable .*Restore it from another check"):
            trainer.train(resume_from_checkpoint=str(path))
        (path / name).write_bytes(content)


# Configuration


def test_observers_take_the_estimators_options(tmp_path):
    trainer = build(
        tmp_path, adaptive_sampling="seq-pos", pass_rate_estimator="ema", ema_decay=0.5, pass_rate_prior=[2.0, 2.0]
    )
    assert (trainer.pass_rates.ema.decay, trainer.pass_rates.ema.prior_mean) == (0.5, 0.5)


def test_the_prior_from_a_file_and_from_the_command_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("adaptive_sampling: est-ema\npass_rate_prior: [2.0, 6.0]\nbf16: false\nuse_cpu: true\n")
    command_line = ["--config", str(path), f"--output_dir={tmp_path}"]
    assert parse_args(command_line, required=())[1].pass_rate_prior == [2.0, 6.0]
    assert parse_args([*command_line, "--pass_rate_prior", "1", "3"], required=())[1].pass_rate_prior == [1.0, 3.0]
