"""Graded rewards: the rewards, win rates, and the rule of the plan on runs that are made up."""

import json

import numpy as np
import pandas as pd
import pytest

from ada_trl.core.metrics import kind_of_rewards
from benchmarks import graded, names
from benchmarks.common import load_rows
from benchmarks.comparisons import ACCURACY
from benchmarks.learning import graded_rewards, small_models
from benchmarks.learning.training import Run
from benchmarks.tests.test_training import task_dir  # noqa: F401


def test_rewards_by_hand():
    completions, answer = ["123", "12", "", "9+"], ["123", "123", "5", "95"]
    assert graded_rewards.digits_right(completions, answer) == pytest.approx([1, 2 / 3, 0, 1 / 2])
    assert graded_rewards.closeness(completions, answer) == pytest.approx([1, 1 / 112, 0, 0])
    assert graded_rewards.negative_error(completions, answer) == pytest.approx([0, -1.11, -100, -100])
    assert graded_rewards.negative_error(["99999"], ["1"]) == [-100]
    assert graded_rewards.exact_and_short(completions, answer) == pytest.approx([0.94, -0.04, 0, -0.04])
    prompts = [f"{i}+{i}=" for i in range(200)]
    levels = graded_rewards.exact_with_offset(prompts, ["x"] * 200, ["1"] * 200)
    assert 0 <= min(levels) < 0.2 and 3.8 < max(levels) < 4 and np.std(levels) == pytest.approx(1.15, abs=0.1)
    gains = np.subtract(graded_rewards.exact_with_offset(prompts, ["1"] * 200, ["1"] * 200), levels)
    assert gains == pytest.approx(np.ones(200))
    assert graded_rewards.exact_before_sign(["12=", "12", "12==", "1="], ["12"] * 4) == [1, 1, 0, 0]
    assert graded_rewards.in_format(["12=", "12"]) == [1, 0]


@pytest.mark.parametrize("method", [names.WIN_RATES, names.batch_retries(2)])
def test_rewards_of_the_first_steps_are_stored(method, task_dir, tmp_path, monkeypatch):  # noqa: F811
    task = small_models.SETS["hard-functions"]
    cheap = task._replace(rollouts_per_step=4, evaluate=lambda *_: {"accuracy": 0.5}, load=small_models.ADDITION.load)
    monkeypatch.setitem(small_models.SETS, "hard-functions", cheap)
    (run,) = small_models.planned_runs("graded_rewards", [method], ["hard-functions"], [7])
    small_models.train_and_save(run, "graded_rewards", tmp_path, {"hard-functions": task_dir}, steps=2)
    path = tmp_path / run.file_name
    record = json.loads(path.read_text())
    assert {name: [len(call["reward"]) for call in calls] for name, calls in record["rewards"].items()} == {
        "exact_before_sign": [4, 4],
        "in_format": [4, 4],
    }
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    first = record["rewards"]
    first["in_format"][1]["reward"], first["exact_before_sign"][1]["reward"] = [1, 0, 1, 0], [1, 1, 0, 0]
    path.write_text(json.dumps(record | {"method": names.BATCH}))
    graded_rewards.store_first_steps(tmp_path)
    _, second = load_rows(graded_rewards.FIRST_STEPS)
    assert second["step"] == 2 and second["reward"] == pytest.approx([1.2, 1.0, 0.2, 0])


# The rule


def stored(gains: dict[tuple[str, str], float], seeds=(41, 42, 43)) -> list[dict]:
    """All runs of both parts, with an accuracy of 0.3 plus the gain of the set and method, and a little noise."""
    rows = []
    for name, method in sorted(graded.CELLS):
        for seed in seeds:
            end = 0.3 + gains.get((name, method), 0.0) + 0.002 * (seed % 2) * (method != names.GRPO_4)
            run = Run(method, name, seed, 2e-4)._asdict() | {"family": "all"}
            rows += [run | {"step": 0, "accuracy": 0.1}, run | {"step": 100, "accuracy": end}]
    return rows


def test_a_seed_counts_when_all_runs_of_its_part_are_finished():
    rows = stored({}, seeds=(41, 42, 43, 44))
    missing = ("hard-digits", names.WIN_RATES, 44)
    part_a = [row for row in rows if (row["prompt_set"], row["method"], row["seed"]) != missing]
    found = graded.complete(pd.DataFrame(part_a))
    assert set(found["sorting-graded"].runs[names.GRPO_4]) == {41, 42, 43}, "another set of the same part"
    assert set(found["sorting-graded"].runs[graded.RETRIES]) == {41, 42, 43, 44}, "the other part"
    assert (
        graded.complete(pd.DataFrame(part_a[:50])) == {}
        and graded.block(pd.DataFrame(part_a[:50])) == "*Not finished.*"
    )


def test_a_method_that_is_significantly_worse_on_one_set_is_not_recommended():
    win, batch = names.WIN_RATES, names.BATCH
    gains = {("hard-digits", batch): 0.2, ("easy-digits", batch): -0.05, ("hard-digits", win): 0.02}
    found = graded.complete(pd.DataFrame(stored(gains)))
    assert graded.recommended(found, "digits") == win
    gains["easy-digits", batch] = 0.0
    assert graded.recommended(graded.complete(pd.DataFrame(stored(gains))), "digits") == batch
    rows = stored(gains | {("easy-digits", graded.RETRIES): 0.5})
    unfinished = [row for row in rows if row["seed"] != 43 or row["method"] != graded.RETRIES]
    assert graded.recommended(graded.complete(pd.DataFrame(unfinished)), "digits") == batch, "two seeds are no test"
    assert graded.recommended(graded.complete(pd.DataFrame(stored({}, seeds=(41, 42)))), "digits") is None
    everywhere = {cell: -0.1 for cell in graded.CELLS if cell[1] != names.GRPO_4}
    assert graded.recommended(graded.complete(pd.DataFrame(stored(everywhere))), "offset") == names.GRPO_4


@pytest.mark.parametrize(
    ("gains", "replace"),
    [
        ({}, True),
        ({("hard-offset", names.WIN_RATES): -0.2}, True),  # does not mean the same on every prompt
        ({("easy-length", names.WIN_RATES): -0.02}, False),
        ({("hard-error", names.WIN_RATES): -0.02}, False),
    ],
)
def test_win_rates_replace_scaled_rewards_by_the_rule(gains, replace):
    text = graded.block(pd.DataFrame(stored(gains)))
    assert f"- By the rule, win rates {'become' if replace else 'do not become'} a value of `scale_rewards`." in text
    assert "| fraction of right digits | hard (0.100) | 0.300 | 0.301 (+0.001±0.00" in text


def test_differences_below_the_resolution_are_none():
    rows = stored({})
    for row in rows:
        if row["prompt_set"] == "hard-length" and row["step"]:
            row["accuracy"] = 1e-14 * (0.5 if row["method"] == names.WIN_RATES else 1.0 + 0.01 * row["seed"])
    assert graded.decision(graded.complete(pd.DataFrame(rows))) == "win rates become"


def test_the_pooled_difference_has_a_say():
    """A loss that is not significant with the three seeds of any set, because they vary, is so over all pairs."""
    sets = [name for kind in graded.SAME_MEANING for name in graded.SETS[kind]]
    rows = stored({(name, names.WIN_RATES): -0.03 for name in sets})
    for row in rows:
        if row["method"] == names.WIN_RATES and row["step"]:
            row["accuracy"] += {41: 0.04, 42: -0.04, 43: 0.0}[row["seed"]]
    found = graded.complete(pd.DataFrame(rows))
    assert not any(found[name].difference(names.WIN_RATES, ACCURACY).is_lower for name in sets)
    assert graded.decision(found) == "win rates do not become"
    assert "not decided" in graded.decision(graded.complete(pd.DataFrame([row for row in rows if row["seed"] != 43])))


def test_kinds_of_rewards_are_recognized_in_the_first_steps():
    """One rollout per prompt: an offset by prompt and an unbounded error, but nothing else, in every stored run."""
    rewards: dict[tuple[str, int], list[float]] = {}
    for row in load_rows(graded_rewards.FIRST_STEPS):
        rewards.setdefault((row["prompt_set"], row["seed"]), []).extend(row["reward"])
    expected = {"offset": "distinct", "error": "outliers"}
    for (name, seed), own in rewards.items():
        reward_N = np.array(own[:512])
        kind = kind_of_rewards(reward_N, np.arange(len(reward_N)))
        assert kind == expected.get(name.partition("-")[2], "comparable"), (name, seed)
    assert {name for name, _ in rewards} >= {"hard-offset", "hard-error", "hard-digits", "sorting-graded"}
