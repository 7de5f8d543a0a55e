"""Warnings of the trainer, model cards, and the metrics that trackers receive."""

import json
import logging
import os
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest
from trl import GRPOConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer, __version__
from ada_trl.core import BaselineEstimate
from ada_trl.trainer.diagnostics import TrainingDiagnostics
from ada_trl.trainer.run_summary import warn_at_start

from ..helpers import QUICK, build, even_reward, logs_of


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


def everything(completions, **kwargs):
    return [1.0] * len(completions)


def unscored(completions, **kwargs):
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "cause", "remedy"),
    [
        (everything, "only successful rollouts", "too easy"),
        (nothing, "only failed rollouts", "too hard"),
        (unscored, "no rollout with a reward", "None or NaN"),
    ],
)
def test_warns_once_when_most_prompts_have_no_gradient_for_long(reward, cause, remedy, tmp_path, caplog):
    trainer = build(tmp_path, reward, max_steps=25, max_rounds=1, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]
    assert len(warnings) == 1 and "For 20 steps" in warnings[0]
    assert cause in warnings[0] and remedy in warnings[0] and "100% of the prompts have no gradient" in warnings[0]


NO_GROUP = {
    "batch": {"baseline": "batch"},
    "batch of groups": {"baseline": "batch", "num_generations": 2},
    "posterior": {"baseline": "posterior"},
    "posterior of groups": {"baseline": "posterior", "num_generations": 2},
    "retries": {"baseline": "posterior", "adaptive_sampling": "seq-balance", "num_generations": 2},
    "est": {"baseline": "posterior", "adaptive_sampling": "est", "num_generations": 2, "min_samples": 1},
}


def constant(completions, **kwargs):
    return [0.1] * len(completions)


def mostly_nothing(completions, **kwargs):
    return [1.0, *[0.0] * (len(completions) - 1)]


@pytest.mark.parametrize("mode", NO_GROUP)
@pytest.mark.parametrize(("reward", "value"), [(everything, "1"), (nothing, "0"), (constant, "0.1")])
def test_warns_once_when_a_whole_batch_is_constant_for_long(mode, reward, value, tmp_path, caplog):
    trainer = build(tmp_path, reward, max_steps=23, learning_rate=0.0, **NO_GROUP[mode])
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]
    assert len(warnings) == 1
    assert f"For 20 steps, all rollouts of the batch have had the same reward ({value} now)" in warnings[0]
    assert "too easy" in warnings[0] and "too hard" in warnings[0]
    assert ("raise max_rounds or" in warnings[0]) == (mode == "retries"), "Other modes have one round."


@pytest.mark.parametrize("mode", NO_GROUP)
def test_a_batch_with_one_other_reward_is_not_constant(mode, tmp_path, caplog):
    trainer = build(tmp_path, mostly_nothing, max_steps=23, learning_rate=0.0, **NO_GROUP[mode])
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    assert not any("have had the same reward" in record.getMessage() for record in caplog.records)


def test_unscored_batches_are_said_with_a_batch_baseline_too(tmp_path, caplog):
    trainer = build(tmp_path, unscored, max_steps=23, learning_rate=0.0, baseline="batch")
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "ada_trl.trainer.diagnostics"]
    assert "no rollout with a reward" in warning and "None or NaN" in warning


@pytest.mark.parametrize(
    ("mode", "ratios", "is_warned"),
    [
        ("sequence_mask", [0.4] * 6, True),
        ("sequence_truncate", [0.6, 0.4, 0.4, 0.6, 0.4, 0.4], False),
        ("token_truncate", [0.4] * 6, False),  # the ratio is one of whole completions
    ],
)
def test_warns_once_when_the_effective_sample_size_stays_low(mode, ratios, is_warned, tmp_path, caplog):
    args = AdaGRPOConfig(str(tmp_path), **QUICK, vllm_importance_sampling_mode=mode)
    diagnostics = TrainingDiagnostics(args, ["reward"], steps=3)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        for step, ratio in enumerate(ratios, start=1):
            diagnostics.observe(defaultdict(float, ess_ratio=ratio), [0.0, 1.0], step)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == is_warned
    assert all("For 3 steps" in message and "='token_truncate'" in message for message in messages)


def format_reward(completions, **kwargs):
    return [1.0] * len(completions)


def half_reward(completions, **kwargs):
    """Continuous and never above 0.5."""
    return [(len(completion) + ord(completion[0]) % 2) / 20 if completion else 0.0 for completion in completions]


def warnings_of(tmp_path, caplog, reward, steps=2, **options):
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        rounds = {} if "adaptive_sampling" in options else {"max_rounds": 2}
        trainer = build(tmp_path, reward, max_steps=steps, learning_rate=0.0, **rounds, **options)
        trainer.train()
    records = [record for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]
    return trainer, [record.getMessage() for record in records]


def test_several_reward_functions_are_said_at_construction_and_within_two_steps(tmp_path, caplog):
    """Format and accuracy: the format alone crosses the threshold, so every rollout is a success."""
    trainer, (first, second) = warnings_of(tmp_path, caplog, [format_reward, even_reward])
    assert "2 reward functions and no success_reward" in first
    assert "the weighted sum of format_reward and even_reward exceeds positive_threshold (0.7)" in first
    assert "success_reward='format_reward' or success_reward='even_reward'" in first
    assert "Every rollout of the first two generations is a success" in second
    assert "ranges from 1 to 2 and positive_threshold is 0.7" in second and "success_reward='even_reward'" in second
    assert all(logs["ada/pass_rate/mean"] == 1 for logs in logs_of(trainer))


@pytest.mark.parametrize("options", [{}, {"adaptive_sampling": "uniform"}])
def test_nothing_is_said_where_the_success_reward_is_named(options, tmp_path, caplog):
    assert not warnings_of(tmp_path, caplog, [format_reward, even_reward], success_reward="even_reward", **options)[1]


def graded(completions, **kwargs):
    """From 1 on, above the threshold of 0.7."""
    return [1 + 9 * reward for reward in half_reward(completions)]


UNIFORM = {"adaptive_sampling": "uniform"}


@pytest.mark.parametrize("baseline", ["pool", "posterior", "batch"])
@pytest.mark.parametrize("rewards", [graded, half_reward, [format_reward, half_reward]])
def test_nothing_is_said_of_a_threshold_that_nothing_depends_on(baseline, rewards, tmp_path, caplog):
    """Of 20 steps, as the prompts have "only successes" for long, too, although their rewards differ."""
    options = UNIFORM | {"baseline": baseline}
    trainer, warnings = warnings_of(tmp_path, caplog, rewards, steps=22, **options)
    assert not warnings
    assert {logs["ada/pass_rate/mean"] for logs in logs_of(trainer)} <= {0.0, 1.0}


def test_a_threshold_that_the_prompt_weights_depend_on_is_checked(tmp_path, caplog):
    _, (warning,) = warnings_of(tmp_path, caplog, graded, prompt_weighting="inverse_sqrt", **UNIFORM)
    assert "Every rollout of the first two generations is a success. The reward ranges from 1" in warning
    assert "sampling and prompt weights are the same for all prompts" in warning


def test_a_threshold_that_a_record_of_pass_rates_depends_on_is_checked(tmp_path, caplog):
    _, (warning,) = warnings_of(tmp_path, caplog, graded, pass_rate_estimator="ema", **UNIFORM)
    assert "Every rollout of the first two generations is a success. The reward ranges from 1" in warning
    assert "the recorded pass rates carry no information; training does not depend on them" in warning


def test_a_baseline_that_stays_worse_than_the_mean_is_said(tmp_path, caplog):
    options = {
        "adaptive_sampling": "uniform",
        "baseline": "posterior",
        "num_generations": 1,
        "positive_threshold": 0.2,
    }
    trainer = build(tmp_path, half_reward, max_steps=25, learning_rate=0.0, **options)
    trainer.pass_rates.reward_estimator.estimate = lambda expectation, rates: [
        BaselineEstimate(9.0 * i, 50, 0.5) for i in range(len(rates))
    ]
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "ada_trl.trainer.diagnostics"]
    assert (
        "For 20 steps, the baseline has been further from the rewards than their own mean" in warning
        and "baseline='batch'" in warning
    )


def test_the_mean_of_few_others_is_not_said_to_be_worse(tmp_path, caplog):
    """Of 8 rollouts the mean of the others explains 1 - (8/7)², whatever they earn."""
    trainer = build(tmp_path, half_reward, baseline="batch", max_steps=25, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    assert trainer.args.generation_batch_size == 8
    assert not any("the baseline has been" in record.getMessage() for record in caplog.records)
    assert not any(name.startswith("ada/baseline/") for logs in logs_of(trainer) for name in logs)


@pytest.mark.parametrize("mode", ["seq-balance", "seq-pos", "est-ema"])
def test_rewards_below_the_threshold_are_said_within_two_steps(mode, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer = build(tmp_path, half_reward, learning_rate=0.0, adaptive_sampling=mode, logging_steps=2)
        trainer.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "ada_trl.trainer.diagnostics"]
    (logs,) = logs_of(trainer)
    assert logs["ada/success_reward/min"] < logs["ada/success_reward/mean"] < logs["ada/success_reward/max"] <= 0.5
    assert "No rollout of the first two generations is a success. The reward ranges from 0" in warning
    assert (
        "and positive_threshold is 0.7" in warning
        and "set positive_threshold to a value that separates good from bad completions" in warning
    )


def test_after_long_the_threshold_is_the_cause_where_it_is_and_the_gradient_is_not_denied(tmp_path, caplog):
    trainer, warnings = warnings_of(tmp_path, caplog, half_reward, steps=20)
    assert len(warnings) == 2 and "For 20 steps" in warnings[1] and "only failed rollouts" in warnings[1]
    assert "positive_threshold is 0.7" in warnings[1] and "too hard" not in warnings[1]
    silent = logs_of(trainer)[-1]["ada/frac_zero_advantage_groups"]
    assert silent < 1 and f"{silent:.0%} of the prompts have no gradient" in warnings[1]


def test_nothing_is_said_when_the_threshold_is_between(tmp_path, caplog):
    assert not warnings_of(tmp_path, caplog, half_reward, positive_threshold=0.2)[1]


def test_rounds_without_prompts_are_logged_as_zero(tmp_path):
    """Else the mean over `logging_steps` would be that of the steps that had such a round."""

    def reward(completions, trainer_state, **kwargs):
        return even_reward(completions) if trainer_state.global_step else nothing(completions)

    options = {"max_steps": 4, "logging_steps": 4, "max_rounds": 3, "min_positives": 1, "min_negatives": 1}
    trainer = build(tmp_path, reward, **options)
    trainer.train()
    (logs,) = logs_of(trainer)
    assert 0.5 <= logs["ada/active_prompts/round_3"] < 1
    assert logs["ada/active_prompts/round_1"] == 2


@pytest.mark.parametrize("good_step", [3, 15])
def test_does_not_warn_while_there_is_signal_now_and_then(good_step, tmp_path, caplog):
    def reward(completions, trainer_state, **kwargs):
        return even_reward(completions) if trainer_state.global_step == good_step else nothing(completions)

    trainer = build(tmp_path, reward, max_steps=20, max_rounds=1, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    assert not [record for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]


# At the start of training


def start_warnings(num_prompts=1000, rows=64, **options):
    """Warnings at the start, by whether they concern the group, the epochs or the size of the batch."""
    args = AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=rows, **options)
    logger = logging.getLogger("ada_trl.trainer.run_summary")
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    try:
        warn_at_start(args, num_prompts)
    finally:
        logger.removeHandler(handler)
    return records


@pytest.mark.parametrize("baseline", ["batch", "posterior"])
def test_a_group_that_the_baseline_does_not_need_is_said(baseline):
    (warning,) = start_warnings(baseline=baseline, num_generations=8, num_train_epochs=1)
    assert f"num_generations=8 with baseline={baseline!r} samples 8 prompts × 8 rollouts" in warning
    assert "Set num_generations=1 for 64 prompts × 1 rollout, and max_steps=125 (or num_train_epochs=8)" in warning
    (warning,) = start_warnings(baseline=baseline, num_generations=8, max_steps=100)
    assert warning.endswith("Set num_generations=1 for 64 prompts × 1 rollout.")
    # A step of 64 prompts needs as many rows.
    assert not start_warnings(baseline=baseline, num_generations=8, max_steps=100, num_prompts=60)


@pytest.mark.parametrize(
    ("num_generations_of_grpo", "rows", "steps"), [(4, 4, (250, 1000)), (8, 16, (62, 500)), (6, 18, (55, 333))]
)
def test_the_epochs_that_keep_the_number_of_rollouts_are_said(num_generations_of_grpo, rows, steps):
    """1,000 prompts in batches of 16: 500 steps of GRPO with 8 rollouts, 62 with one."""
    n = num_generations_of_grpo
    warning = start_warnings(baseline="batch", num_train_epochs=1, rows=rows)[0]
    assert f"num_train_epochs=1 gives {steps[0]} steps" in warning and f"({steps[1]} for n={n})" in warning
    assert (
        f"Set max_steps={steps[1]} or num_train_epochs={n} to train on as many rollouts as GRPO with n={n}" in warning
    )
    grpo = GRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=rows, num_generations=n)
    assert steps[1] == 1000 // (grpo.generation_batch_size // n), "What TRL's sampler makes of it."
    rows = max(rows, 16)
    for fixed in ({"max_steps": steps[1]}, {"num_train_epochs": 8}):
        assert not start_warnings(baseline="batch", rows=rows, **fixed)


def test_a_batch_below_16_rollouts_is_said():
    for rows, factor in ((2, "2.00"), (4, "1.33"), (15, "1.07")):
        (warning,) = start_warnings(baseline="batch", max_steps=5, rows=rows)
        assert f"generation_batch_size={rows} is small for baseline='batch'" in warning
        assert f"N/(N-1) = {factor}. Use at least 16" in warning
    assert "up to N/(N-1) = 1.14" in start_warnings(baseline="posterior", max_steps=5, rows=8)[0]
    assert not start_warnings(baseline="batch", max_steps=5, rows=16)


@pytest.mark.parametrize("options", [{}, UNIFORM, {"adaptive_sampling": "est"}])
def test_nothing_is_said_at_the_start_where_the_group_is_the_baseline(options):
    assert not start_warnings(rows=8, num_train_epochs=1, **options)


def test_modes_that_retry_or_allocate_need_several_rollouts():
    for mode in ("seq-pos", "est"):
        assert not start_warnings(baseline="posterior", adaptive_sampling=mode, num_train_epochs=1)


def test_the_warnings_arrive_when_training_starts(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.run_summary"):
        trainer = build(tmp_path, baseline="batch", max_steps=-1, num_train_epochs=1)
        assert not caplog.records
        trainer.train()
    epochs, size = [r.getMessage() for r in caplog.records if r.name == "ada_trl.trainer.run_summary"]
    assert f"num_train_epochs=1 gives {trainer.state.global_step} step" in epochs
    assert "generation_batch_size=8 is small" in size


# Model cards


@pytest.mark.parametrize(
    ("options", "name", "paper"),
    [
        ({}, "Reinforce-Ada (ada_trl", "xiong2025reinforceada"),
        (UNIFORM, "GRPO (ada_trl", "shao2024deepseekmath"),
        ({"baseline": "batch"}, "GRPO (baseline='batch', ada_trl", "shao2024deepseekmath"),
        ({"baseline": "posterior"}, "GRPO (baseline='posterior', ada_trl", "shao2024deepseekmath"),
        (
            {"baseline": "posterior", "adaptive_sampling": "est", "num_generations": 2},
            "Reinforce-Ada (baseline='posterior', ada_trl",
            "xiong2025reinforceada",
        ),
    ],
)
def test_a_model_card_names_method_package_and_version_and_cites_the_paper(options, name, paper, tmp_path):
    trainer = build(tmp_path, **options)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert f"trained with {name} {__version__})" in card and f"Cite {name} {__version__}) as:" in card
    assert paper in card and "None" not in card.partition("## Training procedure")[2]
    tags = {"trl", "grpo", "ada-trl"} | ({"reinforce-ada"} if name.startswith("Reinforce") else set())
    assert tags == set(trainer.model.model_tags) and all(f"- {tag}\n" in card for tag in tags)
    assert ("- reinforce-ada\n" in card) == ("reinforce-ada" in tags)


def test_a_subclass_keeps_the_name_on_its_card(tmp_path):
    class Mine(AdaGRPOTrainer):
        _name, _paper = "Mine", {}

    assert build(tmp_path, trainer_class=Mine, **UNIFORM)._name == f"Mine (ada_trl {__version__})"


# Trackers


def from_tensorboard(directory):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(Path(directory).rglob("events.out*")).parent))
    events.Reload()
    return {tag.removeprefix("train/"): [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def from_trackio(directory):
    path = next(Path(os.environ["TRACKIO_DIR"]).rglob(f"{directory.name}.db"))
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
    found = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name.removeprefix("train/"), []).append(value)
    return found


def assert_same(found, expected):
    metrics = [name for name in expected[0] if name.startswith("ada/") and all(name in logs for logs in expected)]
    assert len(metrics) > 10
    for metric in metrics:
        assert found[metric] == pytest.approx([logs[metric] for logs in expected], rel=1e-5, nan_ok=True), metric


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_adaptive_metrics_arrive(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = build(tmp_path / "run", report_to=[name], run_name="tiny", project=tmp_path.name)
    trainer.train()
    assert_same({"tensorboard": from_tensorboard, "trackio": from_trackio}[name](tmp_path), logs_of(trainer))


def test_adaptive_metrics_arrive_at_wandb(tmp_path, monkeypatch):
    """Offline. Its files are not meant to be read, so what it is given is."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    given, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, **options: given.append(data) or log(run, data, **options))
    trainer = build(tmp_path / "run", report_to=["wandb"], log_completions=True)
    trainer.train()
    wandb.finish()
    rows = [row for row in given if "train/reward" in row]
    found = {name.removeprefix("train/"): [row.get(name) for row in rows] for name in rows[0]}
    assert_same(found, logs_of(trainer))
    tables = [row["completions"] for row in given if "completions" in row]
    assert len(tables) >= 2 and {"pool_size", "pool_positives", "advantage"} <= set(tables[0].columns)
    assert next(tmp_path.rglob("*.wandb")).stat().st_size > 0
