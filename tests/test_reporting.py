"""Where the figures arrive, and when the trainer speaks up."""

import json
import logging
import os
import sqlite3
from pathlib import Path

import pytest

from .helpers import build, even_reward, logs_of


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
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.signal_warning"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.signal_warning"]
    assert len(warnings) == 1 and "For 20 steps" in warnings[0]
    assert cause in warnings[0] and remedy in warnings[0]


@pytest.mark.parametrize("good_step", [3, 15])
def test_does_not_warn_while_there_is_signal_now_and_then(good_step, tmp_path, caplog):
    def reward(completions, trainer_state, **kwargs):
        return even_reward(completions) if trainer_state.global_step == good_step else nothing(completions)

    trainer = build(tmp_path, reward, max_steps=20, max_rounds=1, learning_rate=0.0)
    with caplog.at_level(logging.WARNING, "ada_trl.trainer.signal_warning"):
        trainer.train()
    assert not [record for record in caplog.records if record.name == "ada_trl.trainer.signal_warning"]


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
