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


# Reward functions


def constant(value):
    return lambda completions, **kwargs: [value] * len(completions)


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


def graded(completions, **kwargs):
    """Above the default threshold of 0.7."""
    return [1 + 9 * reward for reward in half_reward(completions)]


def one_success(completions, **kwargs):
    return [1.0, *[0.0] * (len(completions) - 1)]


def one_scored(completions, **kwargs):
    return [1.0, *[None] * (len(completions) - 1)]


def reward_of_prompt(prompts, **kwargs):
    return [float(prompt[0] in "13") for prompt in prompts]


def success_in_step(step):
    return lambda completions, trainer_state, **_: (
        even_reward(completions) if trainer_state.global_step == step else [0.0] * len(completions)
    )


# Warnings during training

WINDOW = 8  # steps that a problem must last, instead of 20
UNIFORM = {"adaptive_sampling": "uniform"}
ONE_ROUND = {"max_rounds": 1}
NO_GROUP = {
    "batch": {"baseline": "batch"},
    "batch of groups": {"baseline": "batch", "num_generations": 2},
    "posterior": {"baseline": "posterior"},
    "posterior of groups": {"baseline": "posterior", "num_generations": 2},
    "retries": {"baseline": "posterior", "adaptive_sampling": "seq-balance", "num_generations": 2},
    "est": {"baseline": "posterior", "adaptive_sampling": "est", "num_generations": 2, "min_samples": 1},
}


@pytest.fixture
def train(tmp_path, caplog):
    """Train and return the trainer and the warnings of its diagnostics."""

    def run(reward, steps=2, prepare=None, window=WINDOW, **options):
        with caplog.at_level(logging.WARNING, "ada_trl.trainer.diagnostics"):
            trainer = build(tmp_path, reward, max_steps=steps, learning_rate=0.0, **options)
            trainer._diagnostics.steps = window
            if prepare is not None:
                prepare(trainer)
            trainer.train()
        records = [record for record in caplog.records if record.name == "ada_trl.trainer.diagnostics"]
        return trainer, [record.getMessage() for record in records]

    return run


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        (constant(1.0), ONE_ROUND, ("only successful rollouts", "too easy", "100% of the prompts have no gradient")),
        (constant(0.0), ONE_ROUND, ("only failed rollouts", "too hard", "100% of the prompts have no gradient")),
        (constant(None), ONE_ROUND, ("no rollout with a reward", "None or NaN", "100% of the prompts have no gradient")),
        (constant(None), NO_GROUP["batch"], ("no rollout with a reward", "None or NaN")),
        *(
            (constant(0.1), options, ("all rollouts of the batch have had the same reward (0.1 now)", "too easy", "too hard"))
            for options in NO_GROUP.values()
        ),
        (constant(1.0), NO_GROUP["batch"], ("the same reward (1 now)",)),
        (constant(0.0), NO_GROUP["posterior"], ("the same reward (0 now)",)),
        (reward_of_prompt, ONE_ROUND, ("no prompt has had a gradient", "distinguish completions of the same prompt")),
        (constant(1.0), ONE_ROUND | {"adaptive_sampling": "seq-pos"}, ("no prompt has had a gradient", "equal rewards")),
        (one_scored, UNIFORM, ("no prompt has had a gradient", "only one of them had a reward")),
        (one_scored, NO_GROUP["batch"], ("no rollout with a reward",)),
    ],
)  # fmt: skip
def test_a_problem_that_lasts_is_reported_once(reward, options, fragments, train):
    trainer, (warning,) = train(reward, steps=WINDOW + 3, **options)
    assert f"For {WINDOW} steps" in warning and all(fragment in warning for fragment in fragments)
    assert "max_rounds or" not in warning or trainer.strategy.is_sequential, "Other modes have one round."


@pytest.mark.parametrize(
    ("reward", "steps", "options"),
    [
        *((success_in_step(step), WINDOW, ONE_ROUND) for step in (2, WINDOW - 2)),
        *((one_success, WINDOW + 3, options) for options in NO_GROUP.values()),
    ],
)
def test_no_warning_where_rewards_differ_now_and_then(reward, steps, options, train):
    _, warnings = train(reward, steps, **options)
    assert not [warning for warning in warnings if "predict" not in warning and "the baseline has been" not in warning]


def test_several_reward_functions_without_success_reward_are_reported_at_construction_and_after_two_steps(train):
    """The format reward alone exceeds the threshold, so every rollout is a success."""
    trainer, (first, second) = train([format_reward, even_reward], max_rounds=2)
    assert "2 reward functions and no success_reward" in first
    assert "the weighted sum of format_reward and even_reward exceeds positive_threshold (0.7)" in first
    assert "success_reward='format_reward' or success_reward='even_reward'" in first
    assert "Every rollout of the first two generation batches is a success" in second
    assert "ranges from 1 to 2 and positive_threshold is 0.7" in second and "success_reward='even_reward'" in second
    assert all(logs["ada/pass_rate/mean"] == 1 for logs in logs_of(trainer))


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        *(
            (
                half_reward,
                {"adaptive_sampling": mode},
                ("No rollout", "The reward ranges from 0", "and positive_threshold is 0.7", "set positive_threshold to a value that separates"),
            )
            for mode in ("seq-balance", "seq-pos", "est-ema")
        ),
        (
            graded,
            UNIFORM | {"prompt_weighting": "inverse_sqrt"},
            ("Every rollout", "The reward ranges from 1", "sampling and prompt weights are the same for all prompts"),
        ),
        (
            graded,
            UNIFORM | {"pass_rate_estimator": "ema"},
            ("Every rollout", "the recorded pass rates carry no information; training does not depend on them"),
        ),
    ],
)  # fmt: skip
def test_a_threshold_outside_the_range_of_rewards_is_reported_after_two_generations(reward, options, fragments, train):
    _, (warning,) = train(reward, **options)
    assert f"{fragments[0]} of the first two generation batches is a success" in warning
    assert all(fragment in warning for fragment in fragments)


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (half_reward, {"positive_threshold": 0.2, "max_rounds": 2}),
        *(([format_reward, even_reward], {"success_reward": "even_reward"} | mode) for mode in ({}, UNIFORM)),
        ([format_reward, even_reward], {"reward_weights": [0.0, 1.0]}),
    ],
)
def test_no_warning_where_the_threshold_separates_rewards(reward, options, train):
    assert not train(reward, **options)[1]


@pytest.mark.parametrize("baseline", ["pool", "posterior", "batch"])
@pytest.mark.parametrize("reward", [graded, half_reward, [format_reward, half_reward]])
def test_no_warning_of_a_threshold_without_effect(baseline, reward, train):
    """Although all prompts have only successes or only failures for long enough."""
    trainer, warnings = train(reward, steps=WINDOW + 2, baseline=baseline, **UNIFORM)
    assert not warnings
    assert {logs["ada/pass_rate/mean"] for logs in logs_of(trainer)} <= {0.0, 1.0}


def test_a_threshold_outside_the_range_of_rewards_is_the_reported_cause_after_20_steps(train):
    trainer, warnings = train(half_reward, steps=20, window=20, max_rounds=2)
    assert len(warnings) == 2 and "For 20 steps" in warnings[1] and "only failed rollouts" in warnings[1]
    assert "positive_threshold is 0.7" in warnings[1] and "too hard" not in warnings[1]
    share = logs_of(trainer)[-1]["ada/frac_zero_advantage_groups"]
    assert share < 1 and f"{share:.0%} of the prompts have no gradient" in warnings[1]


def test_a_baseline_that_predicts_worse_than_the_mean_is_reported(train):
    def misestimate(trainer):
        trainer.pass_rates.reward_estimator.estimate = lambda expectation, rates: [
            BaselineEstimate(9.0 * i, 50, 0.5) for i in range(len(rates))
        ]

    options = {"baseline": "posterior", "num_generations": 1, "positive_threshold": 0.2}
    _, (warning,) = train(half_reward, steps=WINDOW + 5, prepare=misestimate, **UNIFORM, **options)
    assert f"For {WINDOW} steps, the posterior baseline has predicted the rewards worse than their mean" in warning
    assert "baseline='batch'" in warning


def test_the_leave_one_out_mean_of_a_small_batch_is_not_reported_as_a_bad_baseline(train):
    """For 8 rollouts it explains 1 - (8/7)², whatever the rewards are."""
    trainer, warnings = train(half_reward, steps=WINDOW + 5, baseline="batch")
    assert trainer.args.generation_batch_size == 8
    assert not any("the baseline has been" in warning for warning in warnings)
    assert not any(name.startswith("ada/baseline/") for logs in logs_of(trainer) for name in logs)


# Warnings at the start of training


@pytest.fixture
def start_warnings(caplog):
    """Warnings about the group, the epochs or the size of the batch."""

    def collect(num_prompts=1000, rows=64, **options):
        args = AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=rows, **options)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ada_trl.trainer.run_summary"):
            warn_at_start(args, num_prompts)
        return [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.run_summary"]

    return collect


@pytest.mark.parametrize("baseline", ["batch", "posterior"])
def test_a_group_that_the_baseline_does_not_need_is_reported(baseline, start_warnings):
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
def test_epochs_with_fewer_rollouts_than_in_grpo_are_reported(num_generations_of_grpo, rows, steps, start_warnings):
    """1,000 prompts in batches of 16: 500 steps of GRPO with 8 rollouts per prompt, 62 with one."""
    n = num_generations_of_grpo
    warning = start_warnings(baseline="batch", num_train_epochs=1, rows=rows)[0]
    assert f"num_train_epochs=1 gives {steps[0]} steps with one rollout per prompt" in warning
    assert (
        f"GRPO with num_generations={n} would make {steps[1]}. Set max_steps={steps[1]} or num_train_epochs={n} "
        in warning
    )
    grpo = GRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=rows, num_generations=n)
    assert steps[1] == 1000 // (grpo.generation_batch_size // n), "The number of batches of TRL's sampler."
    rows = max(rows, 16)
    for fixed in ({"max_steps": steps[1]}, {"num_train_epochs": 8}):
        assert not start_warnings(baseline="batch", rows=rows, **fixed)


def test_a_batch_below_16_rollouts_is_reported(start_warnings):
    for rows, factor in ((2, "2.00"), (4, "1.33"), (15, "1.07")):
        (warning,) = start_warnings(baseline="batch", max_steps=5, rows=rows)
        assert f"generation_batch_size={rows} is small for baseline='batch'" in warning
        assert f"N/(N-1) = {factor}. Use at least 16" in warning
    assert "up to N/(N-1) = 1.14" in start_warnings(baseline="posterior", max_steps=5, rows=8)[0]
    assert not start_warnings(baseline="batch", max_steps=5, rows=16)


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 8},
        {"rows": 8} | UNIFORM,
        {"rows": 8, "adaptive_sampling": "est"},
        # Modes that retry or allocate need several rollouts per prompt.
        {"baseline": "posterior", "adaptive_sampling": "seq-pos"},
        {"baseline": "posterior", "adaptive_sampling": "est"},
    ],
)
def test_no_warning_at_the_start_where_the_group_is_needed(options, start_warnings):
    assert not start_warnings(num_train_epochs=1, **options)


def test_warnings_are_logged_when_training_starts(tmp_path, caplog):
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
            UNIFORM | {"prompt_oversampling": 2, "zero_variance_groups": "resample"},
            "GRPO (prompt_oversampling=2, zero_variance_groups='resample', ada_trl",
            "shao2024deepseekmath",
        ),
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
