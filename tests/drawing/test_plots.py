"""Figures show what was logged, of Reinforce-Ada and of plain GRPO runs."""

import importlib
import itertools
import json
import math
import sys

import numpy as np
import pytest
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer, plots
from ada_trl.drawing.curves import by_round
from ada_trl.plots import (
    STEPS,
    TOKENS,
    against,
    curve,
    learning_figure,
    main,
    read_log,
    read_record,
    smoothed,
    total,
)

from ..helpers import QUICK, even_reward, prompt_dataset, tiny_model, tiny_tokenizer


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A Reinforce-Ada run that has only its checkpoint left, and a plain GRPO run with its final state."""
    directory = tmp_path_factory.mktemp("runs")
    for name, trainer_class, config_class, options in (
        (
            "ada",
            AdaGRPOTrainer,
            AdaGRPOConfig,
            {"pass_rate_estimator": "counts", "save_strategy": "steps", "save_steps": 4},
        ),
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
        "costs.md", "learning.png", "signal.png", "sampling.png", "quotas.png", "frontier.png", "levels.png", "allocation.png",
        "difficulty.png", "draws.png",
    ]  # fmt: skip
    assert all((tmp_path / "both" / name.rpartition("/")[2]).stat().st_size > 5000 for name in written[1:])
    main([str(runs / "grpo"), "--output_dir", str(tmp_path / "grpo")])
    assert sorted(path.name for path in (tmp_path / "grpo").iterdir()) == [
        "costs.md",
        "frontier.png",
        "learning.png",
        "signal.png",
    ]
    with pytest.raises(SystemExit):
        main([str(runs / "ada"), str(runs / "grpo"), "--labels", "one", "one"])


def test_labels_are_the_shortest_ends_that_differ(tmp_path):
    for path in ("a/run/checkpoint-5", "b/run"):
        (tmp_path / path).mkdir(parents=True)
    assert plots._labels([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert plots._labels([tmp_path / "a/run", tmp_path / "a/run/checkpoint-5"]) == ["run", "checkpoint-5"]
    (tmp_path / "b/run/trainer_state.json").touch()
    assert plots._labels([tmp_path / "b/run/trainer_state.json"]) == ["run"]


ROUNDS = [
    {
        "step": step,
        "reward": 0.1 * step,
        "entropy": 2.0 - 0.1 * step,
        "ada/samples_per_prompt/mean": 6.0,
        "ada/resolved": 0.75,
        "ada/active_prompts/round_1": 8.0,
        "ada/active_prompts/round_2": 4.0,
        "ada/short_of_positives/round_1": 0.5,
        "ada/short_of_positives/round_2": 0.25,
        "ada/short_of_negatives/round_1": 0.0,
        "ada/short_of_negatives/round_2": 0.0,
        "ada/reward/prompt_level": 0.5,
        "ada/reward/batch_level": 0.4,
        "ada/reward/samples_covariance": -0.6,
        "ada/estimator/samples_at_0.05": 10.0 + step,
        "ada/estimator/samples_at_0.95": 2.0,
    }
    for step in range(1, 7)
]


def line(panel, label):
    (found,) = [line for line in panel.lines if line.get_label() == label]
    return found.get_ydata().tolist()


def test_quotas_show_what_is_missing_after_each_round_and_what_was_met():
    rollouts, positives, negatives, met = plots.quota_figure({"run": ROUNDS}).axes
    assert [line.get_ydata().tolist() for line in rollouts.lines] == [[48] * 6]
    assert [line(positives, f"round {k}") for k in (1, 2)] == [[0.5] * 6, [0.25] * 6]
    assert [line(negatives, f"round {k}") for k in (1, 2)] == [[0] * 6] * 2
    assert [line(met, f"round {k}") for k in (1, 2)] == [[0.5] * 6, [0.75] * 6]
    assert plots.quota_figure({"grpo": [{"step": 1, "reward": 0.5}]}) is None


def test_frontier_is_reward_against_entropy_with_the_last_step_marked():
    cloud, last = plots.frontier_figure({"run": [*ROUNDS, {"step": 7, "reward": 0.9}]}).axes[0].lines
    assert cloud.get_xdata().tolist() == [logs["entropy"] for logs in ROUNDS]
    assert (last.get_xdata().tolist(), last.get_ydata().tolist()) == ([ROUNDS[-1]["entropy"]], [ROUNDS[-1]["reward"]])


def test_allocation_is_the_mean_of_a_third_of_the_run():
    first, last = plots.allocation_figure({"run": ROUNDS}).axes[0].lines
    assert first.get_xdata().tolist() == last.get_xdata().tolist() == [0.05, 0.95]
    assert (first.get_ydata().tolist(), last.get_ydata().tolist()) == ([11.5, 2], [15.5, 2])
    assert plots.allocation_figure({"run": [{"step": 1, "reward": 0.5}]}) is None


def test_levels_are_prompts_rollouts_and_their_covariance():
    panels = plots.levels_figure({"run": ROUNDS}).axes
    assert [panel.lines[0].get_ydata()[0] for panel in panels] == [0.5, 0.4, -0.6]


def test_prompts_are_shown_where_they_come_from_the_stream():
    log = [
        {"step": i, "ada/stream/asked": 8.0 + i, "ada/stream/new": 0.5, "ada/stream/epoch": i / 4} for i in (1, 2, 3)
    ]
    asked, new, epoch = plots.prompts_figure({"run": log, "grpo": ROUNDS}).axes
    assert [list(panel.lines[0].get_ydata()) for panel in (asked, new, epoch)] == [
        [9, 10, 11],
        [0.5] * 3,
        [0.25, 0.5, 0.75],
    ]
    assert len(asked.lines) == 1 and plots.prompts_figure({"grpo": ROUNDS}) is None


def test_draws_are_shares_of_subsets(tmp_path):
    """Counted by listing every subset of three problems with 1, 3 and 4 of 4 correct."""
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1], None]
    lines = [{"format": 1}] + [{"index": i, "rewards": row, "lengths": [1] * 4} for i, row in enumerate(rewards)]
    (tmp_path / "samples.scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    counts = plots.read_counts(tmp_path)
    assert counts == {tmp_path.name: ([1, 3, 4], 4)}
    passes, all_correct = plots.draws_figure(counts, {"run": (np.array([0.5]), np.array([1.0]))}).axes
    for k, i in ((1, 0), (2, 1), (4, 2)):
        subsets = [[set(subset) for subset in itertools.combinations(row, k)] for row in rewards[:3]]
        some, every = (np.mean([[test(s) for s in row] for row in subsets]) for test in (any, all))
        assert line(passes, tmp_path.name)[i] == pytest.approx(some)
        assert line(all_correct, tmp_path.name)[i] == pytest.approx(every)
        assert line(all_correct, "run (fitted)")[i] == 0.5**k
        assert line(passes, "run (fitted)")[i] == 1 - 0.5**k
    (tmp_path / "more.scores.jsonl").write_text('{"format": 1}\n{"index": 0, "rewards": [1], "lengths": [1]}\n')
    with pytest.raises(ValueError, match="problems with 1, 4 completions"):
        plots.read_counts(tmp_path)
    with pytest.raises(ValueError, match="no .*scores.jsonl"):
        plots.read_counts(tmp_path / "nothing")


def test_samples_alone_can_be_drawn(tmp_path, capsys):
    for model in ("base", "trained"):
        (tmp_path / "samples" / model).mkdir(parents=True)
        row = {"index": 0, "rewards": [1, 0], "lengths": [1, 1]}
        (tmp_path / "samples" / model / "math.scores.jsonl").write_text('{"format": 1}\n' + json.dumps(row) + "\n")
    assert set(plots.read_counts(tmp_path)) == {"base", "trained"}
    main(["--samples", str(tmp_path), "--output_dir", str(tmp_path / "plots")])
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["draws.png"]
    for bad, message in (
        ([], "nothing to draw"),
        ([str(tmp_path), "--smooth", "0"], r"--smooth (0) must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            main(bad)
        assert message in capsys.readouterr().err


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

    lines = plots.cost_table({"one": log(2.0), "other": log(5.0), "old": [{"step": 3, "step_time": 1.0}]}).splitlines()
    assert lines[2:] == [
        "| one | 5 | 4.0 | 50 | 2 | 1.00× |",
        "| other | 5 | 4.0 | 50 | 5 | 2.50× |",
        "| old | 3 | – | – | 1 | 0.50× |",
    ]


def test_a_value_alone_is_a_dot():
    log = [{"step": step, "reward": value} for step, value in enumerate((1.0, math.nan, 2.0, 3.0, math.nan, 4.0))]
    assert learning_figure({"run": log}).axes[0].lines[0].get_markevery() == [0, 5]
    assert learning_figure({"run": log[:1]}).axes[0].lines[0].get_markevery() == [0]


def test_rounds_that_were_not_logged_had_no_prompts():
    log = [{"step": 1, "ada/active_prompts/round_1": 4.0, "ada/active_prompts/round_2": 2.0}]
    log += [{"step": 2, "ada/active_prompts/round_1": 4.0}, {"step": 3, "reward": 1.0}]
    assert by_round(log, "ada/active_prompts")[2].values.tolist() == [2, 0]


def test_matplotlib_is_imported_only_to_draw(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    assert importlib.reload(plots).curve([], "reward").steps.size == 0
    with pytest.raises(ImportError):
        plots.signal_figure({})
