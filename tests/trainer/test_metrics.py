"""
Metrics that are logged: which of them a person reads, lengths of an unbiased sample, and trackers that receive them.
"""

import pytest
from datasets import Dataset

from ada_trl.trainer.reporting import logged_metrics

from ..helpers import Recorder, build, logs_of
from .test_reporting import MODES, UNIFORM


VARYING = {"reward", "entropy", "ada/samples_per_prompt/mean", "ada/frac_zero_advantage_groups", "ada/pass_rate/mean"}


@pytest.mark.parametrize("mode", MODES)
def test_a_person_can_read_what_is_logged(mode, tmp_path):
    """All of them vary; everything else is logged with `log_completions`."""

    def reward(completions, **kwargs):
        return [float(sum(map(ord, completion)) % 3 == 0) for completion in completions]

    few, all_of_them = (
        build(tmp_path, reward, **MODES[mode] | {"max_steps": 4, "log_completions": log}) for log in (False, True)
    )
    few.train()
    all_of_them.train()
    logs, details = logs_of(few), logs_of(all_of_them)
    ours = {name for name in logs[0] if name.startswith("ada/")}
    assert VARYING <= logs[0].keys() < details[0].keys()
    assert ours == {f"ada/{name}" for name in logged_metrics(few.args, few.mode)}
    assert ("frac_reward_zero_std" in logs[0]) == (few.args.num_generations > 1 and mode != "est"), "As in GRPO."
    constants = {name for name in ours if len({step[name] for step in logs}) == 1}
    # The first two are logged in all modes, for comparisons; the others vary with other rewards.
    known = {
        "samples_per_prompt/mean",
        "frac_zero_advantage_groups",
        "frac_exit_condition_met",
        "frac_recovered_groups",
    }
    assert constants <= {f"ada/{name}" for name in known}


@pytest.mark.parametrize("groups", ["keep", "skip", "mask"])
def test_means_over_the_rows_of_the_loss_are_logged_if_these_are_all_completions(groups, tmp_path):
    trainer = build(tmp_path, **UNIFORM, zero_variance_groups=groups, max_steps=1)
    trainer.train()
    found = {name for name in logs_of(trainer)[0] if name == "entropy" or name.startswith("clip_ratio/")}
    assert len(found) == (6 if groups == "keep" else 0), found


# Metrics of an unbiased sample


class Scripted(Recorder):
    """Hard prompts, a quarter, have completions of five tokens, the others of one; all end."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        tokenizer = self.processing_class
        prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
        texts = ["12345" if prompt.startswith("9") else "1" for prompt in prompts]
        return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]], None


@pytest.mark.parametrize("mode", ["batch", "retries", "est"])
def test_lengths_are_those_of_an_unbiased_sample(mode, tmp_path):
    """With retries, most rollouts are of hard prompts, and Est samples them more often."""

    def solved(prompts, **kwargs):
        return [float(not prompt.startswith("9")) for prompt in prompts]

    rows = Dataset.from_dict({"prompt": [f"{'9' if i % 4 == 0 else '1'}{i:02d}+1=" for i in range(64)]})
    options = {"per_device_train_batch_size": 16, "max_steps": 12, "max_completion_length": 8} | MODES[mode]
    options |= {"max_samples": 16, "num_generations": 4, "max_steps": 24} if mode == "est" else {}  # two epochs
    trainer = build(tmp_path, solved, rows, trainer_class=Scripted, learning_rate=0.0, **options)
    trainer.train()
    steps = [logs for logs in logs_of(trainer) if "reward" in logs]
    assert len({logs["ada/tokens/generated"] for logs in steps}) > 1, "More of the hard prompts in some steps."
    for logs in steps:
        hard = 1 - logs["reward"]
        assert logs["completions/mean_length"] == pytest.approx(6 * hard + 2 * (1 - hard))
        assert logs["completions/max_length"] == (6 if hard else 2) and logs["completions/clipped_ratio"] == 0


# Trackers


def assert_same(found, expected):
    metrics = [name for name in expected[0] if name.startswith("ada/") and all(name in logs for logs in expected)]
    assert len(metrics) > 10
    for metric in metrics:
        assert found[metric] == pytest.approx([logs[metric] for logs in expected], rel=1e-5, nan_ok=True), metric


def test_metrics_arrive_at_tensorboard(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = build(tmp_path / "run", report_to=["tensorboard"])
    trainer.train()
    events = accumulator.EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    events.Reload()
    tags = {tag.removeprefix("train/"): [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert_same(tags, logs_of(trainer))


def test_metrics_and_completions_arrive_at_wandb(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("mode", ["uniform", "retries"])
def test_the_final_model_arrives_at_wandb(mode, tmp_path, monkeypatch):
    """Its callback saves it with a trainer of a copy of the arguments."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    given: list[set] = []
    monkeypatch.setattr(wandb.Run, "log_artifact", lambda run, files, **_: given.append({*files.manifest.entries}))
    build(tmp_path / "run", report_to=["wandb"], **MODES[mode]).train()
    wandb.finish()
    assert {"model.safetensors", "config.json"} <= given[-1]
