"""Figures of the logs of Reinforce-Ada and GRPO runs."""

import json
import math

import numpy as np
import pytest
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.commands import plots, plotting
from ada_trl.commands.plots import main, read_log, read_record
from ada_trl.commands.plotting import STEPS, TOKENS, against, by_round, curve, learning_figure, smoothed, total
from benchmarks.analyses import paper

from ..helpers import QUICK, even_reward, prompt_dataset, tiny_model, tiny_tokenizer


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A Reinforce-Ada run that has only its checkpoint left, and a plain GRPO run with its final state."""
    directory = tmp_path_factory.mktemp("runs")
    saving = {"pass_rate_estimator": "ema", "save_strategy": "steps", "save_steps": 4}
    for name, trainer_class, config_class, options in (
        ("ada", AdaGRPOTrainer, AdaGRPOConfig, saving),
        ("grpo", GRPOTrainer, GRPOConfig, {"num_generations": 4}),
    ):
        args = config_class(str(directory / name), **QUICK | EVALUATION | {"max_steps": 4} | options)
        data = {"train_dataset": prompt_dataset(), "eval_dataset": prompt_dataset(1)}
        trainer = trainer_class(tiny_model(), even_reward, args, processing_class=tiny_tokenizer(), **data)
        trainer.train()
    trainer.save_state()
    return directory


def test_totals_count_every_step_between_two_logs():
    log = [
        {"step": 0, "eval_reward": 0.1},
        {"step": 5, "ada/tokens/generated": 2.0},
        {"step": 7, "ada/tokens/generated": 3.0},
        {"step": 6, "eval_reward": 0.3},
        {"step": 7, "eval_reward": None},
    ]
    assert total(log, "ada/tokens/generated").values.tolist() == [10, 16]
    spent, rewards = against(log, "eval_reward", TOKENS)
    assert spent.tolist() == [0, 13, 16]
    assert rewards[:2].tolist() == [0.1, 0.3] and math.isnan(rewards[2])
    assert against(log, "eval_reward", STEPS)[0].tolist() == [0, 6, 7]
    assert len(curve(log, "reward").steps) == 0


def test_read_log_of_directory_checkpoint_and_file(runs):
    state = json.loads((runs / "ada" / "checkpoint-4" / "trainer_state.json").read_text())
    for run in (runs / "ada", runs / "ada" / "checkpoint-4", runs / "ada" / "checkpoint-4" / "trainer_state.json"):
        assert read_log(run) == state["log_history"]
    assert read_record(runs / "grpo") is None
    with pytest.raises(FileNotFoundError, match="trainer.save_state"):
        read_log(runs)


def test_lines_are_the_logged_values(runs):
    log = read_log(runs / "ada")
    figure = learning_figure({"ada": log})
    by_steps, by_tokens, _ = (panel.lines[0] for panel in figure.axes[:3])
    assert by_steps.get_xdata().tolist() == [1, 2, 3, 4]
    assert by_steps.get_ydata().tolist() == [logs["reward"] for logs in log if "reward" in logs]
    tokens = np.cumsum([logs["ada/tokens/generated"] for logs in log if "reward" in logs])
    assert by_tokens.get_xdata().tolist() == tokens.tolist()
    assert figure.axes[3].lines[0].get_ydata().tolist() == [
        logs["eval_reward"] for logs in log if "eval_reward" in logs
    ]
    both = learning_figure({"ada": log, "grpo": read_log(runs / "grpo")})
    assert both.axes[1].get_xlabel() == "Prompt and generated tokens"


def test_command_line(runs, tmp_path, capsys):
    main([str(runs / "ada"), str(runs / "grpo"), "--output_dir", str(tmp_path / "both")])
    written = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in written] == [
        "costs.md", "learning.png", "signal.png", "sampling.png", "difficulty.png"
    ]  # fmt: skip
    assert all((tmp_path / "both" / name.rpartition("/")[2]).stat().st_size > 5000 for name in written[1:])
    main([str(runs / "grpo"), "--output_dir", str(tmp_path / "grpo")])
    assert sorted(path.name for path in (tmp_path / "grpo").iterdir()) == ["costs.md", "learning.png", "signal.png"]
    paper.main([str(runs / "ada"), "--output_dir", str(tmp_path / "paper")])
    assert sorted(path.stem for path in (tmp_path / "paper").iterdir()) == [
        "allocation", "draws", "frontier", "levels", "quotas"
    ]  # fmt: skip


@pytest.mark.parametrize("labels", [["x"], ["x", "x"], ["x", "x", "y"]])
def test_labels_that_do_not_fit_are_rejected(labels, runs, capsys):
    with pytest.raises(SystemExit):
        main([str(runs / "ada"), str(runs / "grpo"), "--labels", *labels])
    assert "2 runs need as many different labels" in capsys.readouterr().err


def test_default_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a/run/checkpoint-5", "b/run"):
        (tmp_path / path).mkdir(parents=True)
    assert plots.default_labels([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert plots.default_labels([tmp_path / "a/run", tmp_path / "a/run/checkpoint-5"]) == ["run", "checkpoint-5"]
    (tmp_path / "b/run/trainer_state.json").touch()
    assert plots.default_labels([tmp_path / "b/run/trainer_state.json"]) == ["run"]


def test_prompts_figure_has_runs_with_a_prompt_queue_only():
    log = [
        {"step": i, "ada/prompts/sampled": 8.0 + i, "ada/prompts/frac_new": 0.5, "ada/prompts/epoch": i / 4}
        for i in (1, 2, 3)
    ]
    plain = [{"step": 1, "reward": 0.5}]
    sampled, new, epoch = plotting.prompts_figure({"run": log, "grpo": plain}).axes
    assert [list(panel.lines[0].get_ydata()) for panel in (sampled, new, epoch)] == [
        [9, 10, 11],
        [0.5] * 3,
        [0.25, 0.5, 0.75],
    ]
    assert len(sampled.lines) == 1 and plotting.prompts_figure({"grpo": plain}) is None


def test_smoothing_is_the_mean_of_the_last_steps():
    values = [0.0, 2.0, math.nan, 4.0, 6.0]
    log = [
        {"step": step, "reward": value, "num_tokens": step}
        for step, value in zip((1, 2, 3, 5, 6), values, strict=True)
    ]
    log += [{"step": 6, "eval_reward": 1.0}]
    assert curve(smoothed(log, 1), "reward").values.tolist()[:2] == [0, 2]
    assert math.isnan(curve(smoothed(log, 1), "reward").values[2])
    assert curve(smoothed(log, 2), "reward").values.tolist() == [0, 1, 2, 4, 5]
    assert curve(smoothed(log, 20), "reward").values.tolist() == [0, 1, 1, 2, 3]
    assert curve(smoothed(log, 20), "num_tokens").values.tolist() == [1, 2, 3, 5, 6]
    assert curve(smoothed(log, 20), "eval_reward").values.tolist() == [1]
    assert log[0] == {"step": 1, "reward": 0.0, "num_tokens": 1}


def test_costs_are_per_step_and_relative_to_the_first_run():
    def log(seconds):
        # Logged every two steps, the last one alone.
        metrics = {"ada/tokens/generated": 10.0, "ada/samples_per_prompt/mean": 4.0, "step_time": seconds}
        return [{"step": step, **metrics} for step in (2, 4, 5)]

    lines = plotting.cost_table(
        {"one": log(2.0), "other": log(5.0), "old": [{"step": 3, "step_time": 1.0}]}
    ).splitlines()
    assert lines[2:] == [
        "| one | 5 | 4.0 | 50 | 2 | 1.00× |",
        "| other | 5 | 4.0 | 50 | 5 | 2.50× |",
        "| old | 3 | – | – | 1 | 0.50× |",
    ]


def test_the_first_round_is_plotted_for_runs_with_several_rounds_only():
    """With one rollout per prompt its fraction is 1, which has no meaning."""
    step = {"step": 1, "frac_reward_zero_std": 1.0, "ada/frac_zero_advantage_groups": 0.0}
    runs = {name: [step | {"ada/rounds/mean": rounds}] for name, rounds in (("one round", 1.0), ("several", 2.5))}
    signal, _ = plotting.signal_figure(runs).axes
    assert [(line.get_linestyle(), line.get_ydata()[0]) for line in signal.lines] == [("-", 0), (":", 1), ("-", 0)]


def test_rounds_that_were_not_logged_had_no_prompts():
    log = [{"step": 1, "ada/active_prompts/round_1": 4.0, "ada/active_prompts/round_2": 2.0}]
    log += [{"step": 2, "ada/active_prompts/round_1": 4.0}, {"step": 3, "reward": 1.0}]
    assert by_round(log, "ada/active_prompts")[2].values.tolist() == [2, 0]


def test_a_damaged_file_of_pass_rates_is_named(tmp_path):
    (tmp_path / "ada_pass_rates.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="ada_pass_rates.parquet cannot be read"):
        plots.read_record(tmp_path)
