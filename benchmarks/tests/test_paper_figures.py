"""The paper's figures, for given runs: they show the logged values."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.analyses import paper


ROUNDS = [
    {
        "step": step,
        "reward": 0.1 * step,
        "entropy": 2.0 - 0.1 * step,
        "ada/samples_per_prompt/mean": 6.0,
        "ada/frac_exit_condition_met": 0.75,
        "ada/active_prompts/round_1": 8.0,
        "ada/active_prompts/round_2": 4.0,
        "ada/frac_missing_positives/round_1": 0.5,
        "ada/frac_missing_positives/round_2": 0.25,
        "ada/frac_missing_negatives/round_1": 0.0,
        "ada/frac_missing_negatives/round_2": 0.0,
        "ada/reward/macro_mean": 0.5,
        "ada/reward/micro_mean": 0.4,
        "ada/allocation/rollouts_at_0.05": 10.0 + step,
        "ada/allocation/rollouts_at_0.95": 2.0,
    }
    for step in range(1, 7)
]


def line(panel, label):
    (found,) = [curve for curve in panel.lines if curve.get_label() == label]
    return found.get_ydata().tolist()


def test_quota_figure_shows_missing_and_met_quotas_by_round():
    rollouts, positives, negatives, met = paper.quota_figure({"run": ROUNDS}).axes
    assert [curve.get_ydata().tolist() for curve in rollouts.lines] == [[48] * 6]
    assert [line(positives, f"round {k}") for k in (1, 2)] == [[0.5] * 6, [0.25] * 6]
    assert [line(negatives, f"round {k}") for k in (1, 2)] == [[0] * 6] * 2
    assert [line(met, f"round {k}") for k in (1, 2)] == [[0.5] * 6, [0.75] * 6]
    assert paper.quota_figure({"grpo": [{"step": 1, "reward": 0.5}]}) is None


def test_frontier_is_reward_against_entropy_with_the_last_step_marked():
    cloud, last = paper.frontier_figure({"run": [*ROUNDS, {"step": 7, "reward": 0.9}]}).axes[0].lines
    assert cloud.get_xdata().tolist() == [logs["entropy"] for logs in ROUNDS]
    assert (last.get_xdata().tolist(), last.get_ydata().tolist()) == ([ROUNDS[-1]["entropy"]], [ROUNDS[-1]["reward"]])


def test_allocation_and_levels_are_means():
    """Allocation: over a third of the run. Levels: over prompts, and over rollouts."""
    first, last = paper.allocation_figure({"run": ROUNDS}).axes[0].lines
    assert first.get_xdata().tolist() == last.get_xdata().tolist() == [0.05, 0.95]
    assert (first.get_ydata().tolist(), last.get_ydata().tolist()) == ([11.5, 2], [15.5, 2])
    assert paper.allocation_figure({"run": [{"step": 1, "reward": 0.5}]}) is None
    assert [panel.lines[0].get_ydata()[0] for panel in paper.levels_figure({"run": ROUNDS}).axes] == [0.5, 0.4]


def write_scores(folder, rewards):
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"rewards": rewards}), folder / "scores.parquet")


def test_draws_are_shares_of_subsets(tmp_path):
    """Counted by listing every subset of three problems with 1, 3 and 4 of 4 correct."""
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1], [1, None, 0, 1]]
    write_scores(tmp_path / "math", rewards)
    counts = paper.read_counts(tmp_path)
    assert counts == {tmp_path.name: ([1, 3, 4], 4)}
    passes, all_correct = paper.draws_figure(counts).axes
    for k, i in ((1, 0), (2, 1), (4, 2)):
        subsets = [[set(subset) for subset in itertools.combinations(row, k)] for row in rewards[:3]]
        some, every = (np.mean([[test(s) for s in row] for row in subsets]) for test in (any, all))
        assert line(passes, tmp_path.name)[i] == pytest.approx(some)
        assert line(all_correct, tmp_path.name)[i] == pytest.approx(every)
    write_scores(tmp_path / "more", [[1]])
    with pytest.raises(ValueError, match="problems with 1, 4 completions"):
        paper.read_counts(tmp_path)
    with pytest.raises(ValueError, match="no scores.parquet"):
        paper.read_counts(tmp_path / "nothing")


def test_samples_can_be_plotted_without_runs(tmp_path, capsys):
    for model in ("base", "trained"):
        write_scores(tmp_path / "samples" / model / "math", [[1, 0]])
    assert set(paper.read_counts(tmp_path)) == {"base", "trained"}
    paper.main(["--samples", str(tmp_path), "--output_dir", str(tmp_path / "plots")])
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["draws.png"]
    for bad, message in (
        ([], "nothing to plot"),
        ([str(tmp_path), "--smooth", "0"], r"--smooth (0) must be at least 1"),
        ([str(tmp_path), str(tmp_path)], "2 runs need as many different labels"),
    ):
        with pytest.raises(SystemExit):
            paper.main(bad)
        assert message in capsys.readouterr().err
