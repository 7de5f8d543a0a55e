"""Curves and figures of the logs of Reinforce-Ada and GRPO runs."""

import json
import math

import pytest

from benchmarks.analyses import paper
from benchmarks.plotting import (
    STEPS,
    TOKENS,
    against,
    by_round,
    curve,
    learning_figure,
    read_log,
    smoothed,
    total,
)


COST = {"step_time": 30.0, "ada/tokens/generated": 50.0}
RUN = [
    {"step": 0, "eval_reward": 0.25},
    *({"step": step, "reward": 0.1 * step, "num_tokens": 90.0 * step} | COST for step in (1, 2)),
    {"step": 2, "eval_reward": 0.5},
]  # fmt: skip


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


def test_logs_are_read_from_a_run_or_its_last_checkpoint(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"log_history": [{"step": step}]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert read_log(tmp_path / "checkpoint-9") == [{"step": 9}] and read_log(tmp_path) == [{"step": 10}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 11}]}))
    assert read_log(tmp_path) == [{"step": 11}]
    with pytest.raises(FileNotFoundError, match="trainer.save_state"):
        read_log(tmp_path.parent)


def test_lines_are_the_logged_values():
    figure = learning_figure({"ada": RUN})
    lines = [panel.lines[0].get_xydata().tolist() for panel in figure.axes]
    assert lines[:3] == [[[1, 0.1], [2, 0.2]], [[50, 0.1], [100, 0.2]], [[0.5, 0.1], [1, 0.2]]]
    assert lines[3:] == [[[0, 0.25], [2, 0.5]], [[0, 0.25], [100, 0.5]], [[0, 0.25], [1, 0.5]]]
    grpo = [
        {"step": 1, "reward": 0.5, "num_tokens": 90.0, "step_time": 1.0}
    ]  # GRPOTrainer counts prompts and completions
    both = learning_figure({"ada": RUN, "grpo": grpo})
    assert both.axes[1].get_xlabel() == "Prompt and generated tokens"
    assert [line.get_xdata().tolist() for line in both.axes[1].lines] == [[90, 180], [90]]


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


def test_rounds_that_were_not_logged_had_no_prompts():
    log = [{"step": 1, "ada/active_prompts/round_1": 4.0, "ada/active_prompts/round_2": 2.0}]
    log += [{"step": 2, "ada/active_prompts/round_1": 4.0}, {"step": 3, "reward": 1.0}]
    assert by_round(log, "ada/active_prompts")[2].values.tolist() == [2, 0]


def test_the_paper_figures_are_written_for_runs_with_distinct_names(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run" / "trainer_state.json").write_text(json.dumps({"log_history": RUN}))
    runs = [str(tmp_path / folder / "run") for folder in ("a", "b")]
    for labels in ([], ["--labels", "x"], ["--labels", "x", "y", "z"]):
        with pytest.raises(SystemExit):
            paper.main([*runs, *labels])
        assert "2 runs need as many different labels" in capsys.readouterr().err
    entropy = [row | {"entropy": 1.0} for row in RUN]
    (tmp_path / "b" / "run" / "trainer_state.json").write_text(json.dumps({"log_history": entropy}))
    paper.main([*runs, "--labels", "x", "y", "--output_dir", str(tmp_path / "plots")])
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["frontier.png"]
