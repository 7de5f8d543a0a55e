"""Where the figures arrive, and when the trainer speaks up."""

import json
import logging
import os
import sqlite3
from pathlib import Path

import pytest

from ada_trl.core import BaselineEstimate

from ..helpers import build, even_reward, logs_of


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


def everything(completions, **kwargs):
    return [1.0] * len(completions)


def unscored(completions, **kwargs):
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "cause", "remedy"),
    [
        (everything, "only positive rollouts", "too easy"),
        (nothing, "only negative rollouts", "too hard"),
        (unscored, "no rollout that any reward function scored", "None or NaN"),
    ],
)
def test_warns_once_when_most_prompts_teach_nothing_for_long(reward, cause, remedy, tmp_path, caplog):
    trainer = build(tmp_path, reward, max_steps=25, max_rounds=1, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]
    assert len(warnings) == 1 and "For 20 steps" in warnings[0]
    assert cause in warnings[0] and remedy in warnings[0] and "100% of the prompts have no gradient" in warnings[0]


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
    assert not any("taught nothing" in record.getMessage() for record in records)
    return trainer, [record.getMessage() for record in records]


def test_several_reward_functions_are_said_at_construction_and_within_two_steps(tmp_path, caplog):
    """Format and accuracy: the format alone crosses the threshold, so every rollout is positive."""
    trainer, (first, second) = warnings_of(tmp_path, caplog, [format_reward, even_reward])
    assert "2 reward functions and no success_reward" in first
    assert "the weighted total of format_reward and even_reward exceeds positive_threshold (0.7)" in first
    assert "success_reward='format_reward' or success_reward='even_reward'" in first
    assert "Every rollout of the first two generations is positive" in second
    assert "ranges from 1 to 2 and positive_threshold is 0.7" in second and "success_reward='even_reward'" in second
    assert all(logs["ada/pass_rate/mean"] == 1 for logs in logs_of(trainer))


@pytest.mark.parametrize("options", [{}, {"adaptive_sampling": "uniform"}])
def test_nothing_is_said_where_the_signal_is_named(options, tmp_path, caplog):
    assert not warnings_of(tmp_path, caplog, [format_reward, even_reward], success_reward="even_reward", **options)[1]


@pytest.mark.parametrize("baseline", ["pool", "posterior", "batch"])
def test_where_only_metrics_depend_on_the_threshold_that_is_said(baseline, tmp_path, caplog):
    """The posterior with rewards of 0 to 10 and the threshold of 0.7 learnt nothing, without a word, when it was of pass rates."""

    def graded(completions, **kwargs):
        return [1 + 9 * reward for reward in half_reward(completions)]

    options = {"adaptive_sampling": "uniform", "baseline": baseline}
    trainer, (warning,) = warnings_of(tmp_path, caplog, graded, **options)
    assert "Every rollout of the first two generations is positive. The reward ranges from 1" in warning
    assert "pass rates in metrics and records say nothing; training does not depend on them" in warning
    assert all(logs["ada/pass_rate/mean"] == 1 for logs in logs_of(trainer))


def test_a_baseline_that_stays_worse_than_the_mean_is_said(tmp_path, caplog):
    def graded(completions, **kwargs):
        return half_reward(completions)

    options = {
        "adaptive_sampling": "uniform",
        "baseline": "posterior",
        "num_generations": 1,
        "positive_threshold": 0.2,
    }
    trainer = build(tmp_path, graded, max_steps=25, learning_rate=0.0, **options)
    trainer.pass_rates.reward_estimator.estimate = lambda expectation, rates: [
        BaselineEstimate(9.0 * i, 50, 0.5) for i in range(len(rates))
    ]
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
        trainer.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "ada_trl.trainer.diagnostics"]
    assert "For 20 steps, the baseline has been a worse guess" in warning and "baseline='batch'" in warning


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
    assert "No rollout of the first two generations is positive. The reward ranges from 0" in warning
    assert (
        "and positive_threshold is 0.7" in warning
        and "set positive_threshold to what separates good from bad" in warning
    )


def test_after_long_the_threshold_is_the_cause_where_it_is_and_the_gradient_is_not_denied(tmp_path, caplog):
    trainer, warnings = warnings_of(tmp_path, caplog, half_reward, steps=20)
    assert len(warnings) == 2 and "For 20 steps" in warnings[1] and "only negative rollouts" in warnings[1]
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
