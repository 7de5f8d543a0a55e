"""Benchmarks on a GPU: all stages run on a CPU, within their limit, and continue."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.units import Unit, run

from .units_of_work import hang, square


def test_finished_units_are_not_run_again(tmp_path, capsys):
    units = [Unit(str(value), square, {"value": value}) for value in (0, 1, 2)]
    results = run(units, tmp_path / "units.json", 60, workers=2)
    assert results["2"]["square"] == 4 and "The value is 0." in results["0"]["error"]
    assert json.loads((tmp_path / "units.json").read_text())["environment"]["versions"]["torch"]

    capsys.readouterr()
    repeated = run(
        [Unit(str(value), square, {"value": value + 1}) for value in (0, 1, 2)], tmp_path / "units.json", 60
    )
    assert [repeated[str(value)]["square"] for value in (0, 1, 2)] == [1, 1, 4]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_at_the_limit_processes_end_with_what_they_have_started(tmp_path, capsys):
    units = [Unit("slow", hang, {"file": str(tmp_path / "pid")}), Unit("waiting", square, {"value": 1})]
    started = time.monotonic()
    assert run(units, tmp_path / "units.json", 8) == {}
    assert time.monotonic() - started < 40
    assert "slow; waiting" in capsys.readouterr().out
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_all_runs_of_a_training_seed_are_left_to_the_machine_of_the_first_one():
    from benchmarks.gpu import learn  # imports torch, which the processes of the other tests do not need

    parts = {name: part.runs for name, part in learn.PARTS.items()}
    every = learn.plan(set())
    assert sorted(run for _, run in every) == sorted(run for runs in parts.values() for run in runs)
    second, first_plan = every[:34], every[34:]
    assert [name for name, _ in second] == ["number of retries"] * 25 + ["longer answers"] * 9
    assert [run.seed for _, run in second[:25:5]] == [21, 22, 23, 24, 25]  # complete seeds first
    assert [name for name, _ in first_plan[:12]] == ["paper"] * 12
    assert [run.seed for _, run in first_plan[12:]] == [10] * 6 + [9] * 6 + [8] * 8 + [7] * 8 + [6] * 8

    first = parts["confirmation"][0]
    assert learn.plan({first}) == [(name, run) for name, run in every if name == "paper" or run.seed != first.seed]
    assert all(run.seed != 3 for name, run in learn.plan({parts["paper"][-1]}) if name == "paper")
    long = parts["longer answers"][0]  # another base model than that of the same training seed in the other part
    assert [run for run in every if run not in learn.plan({long})] == [
        (name, run) for name, run in every if name == "longer answers" and run.seed == long.seed
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["modes", "speed", "learn", "vllm"])
def test_every_stage_runs_on_a_cpu(stage, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", stage, "--smoke", "--limit", "280"]
    needed = {"learn": "reasoning_gym", "vllm": "vllm"}.get(stage)
    command += ["--output_dir", str(tmp_path)]
    output = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr
    if needed and not importlib.util.find_spec(needed):
        assert output.stdout.strip() == f"{stage} skipped: {needed} is not installed."
        return
    assert "| --- |" in output.stdout
    (results,) = tmp_path.glob("*.json")
    units = json.loads(results.read_text())["units"]
    assert len(units) >= 4 and all("seconds" in unit for unit in units.values())
