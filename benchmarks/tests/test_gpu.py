"""Benchmarks on a GPU: all stages run on a CPU, within their limit, and continue."""

import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import names
from benchmarks.gpu import fast, pack, target
from benchmarks.gpu.units import Unit, run
from benchmarks.gpu.unpack import unpack

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


def test_a_unit_that_reaches_its_own_limit_fails_alone(tmp_path):
    units = [
        Unit("slow", hang, {"file": str(tmp_path / "pid")}, seconds=6),
        Unit("quick", square, {"value": 3}, seconds=60),
    ]
    results = run(units, tmp_path / "units.json", 60, workers=2, reuse_processes=False)
    assert results["slow"]["error"].startswith("No result after 6") and results["quick"]["square"] == 9
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def write_parts(directory: Path) -> int:
    """Two archives in three parts; the first one is complete with the second part."""
    archives = {}
    for name, size in (("trainer", 60), ("learn", 70)):
        (directory / name / "site").mkdir(parents=True)
        (directory / name / "site" / f"{name}.txt").write_bytes(random.Random(name).randbytes(size))
        archives[name] = directory / f"{name}.zip"
        pack.compress(directory / name, archives[name])
    return pack.split(archives, directory / "parts")


def test_parts_are_unpacked_in_order_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "PART", 150)
    assert write_parts(tmp_path) == 3
    parts, target = tmp_path / "parts", tmp_path / "target"
    with pytest.raises(ValueError, match="in order"):
        unpack(parts / "2", tmp_path / "other")
    assert [unpack(parts / name, target) for name in ("1", "2", "3")] == [[], ["trainer"], ["learn"]]
    for name in ("trainer", "learn"):
        assert (target / "site" / f"{name}.txt").read_bytes() == (
            tmp_path / name / "site" / f"{name}.txt"
        ).read_bytes()

    content = (parts / "2" / "part").read_bytes()
    (parts / "2" / "part").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    unpack(parts / "1", tmp_path / "damaged")
    with pytest.raises(ValueError, match="another SHA-256"):
        unpack(parts / "2", tmp_path / "damaged")


def test_each_call_runs_the_stages_that_are_due_and_prints_the_next_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack, "PART", 150)
    monkeypatch.setattr(pack, "STAGES", {"trainer": [["modes"]], "learn": [["learn:9"], ["fast"]]})
    write_parts(tmp_path)
    started = []
    monkeypatch.setattr(target, "run_stage", lambda stage, *_: started.append(stage))
    printed = []
    for more in ((), ("--stages", "right:5"), (), (), ()):
        options = ["--results", str(tmp_path), "--parts", str(tmp_path / "parts"), "--work", str(tmp_path / "work")]
        monkeypatch.setattr(sys, "argv", ["target", *options, *more])
        target.main()
        printed.append(capsys.readouterr().out.splitlines()[-1])
    assert started == ["right:5", "modes", "learn:9", "fast"]
    assert all("Call 2 of 4 (modes): carry" in line for line in printed[:2])
    assert "Call 3 of 4 (learn:9): carry" in printed[2] and "Call 4 of 4 (fast): python3" in printed[3]
    assert printed[4].endswith("This was the last call.")


def test_all_runs_of_a_training_seed_are_left_to_the_machine_of_the_first_one():
    from benchmarks.gpu import learn  # imports torch, which the processes of the other tests do not need

    parts = {name: part.runs for name, part in learn.PARTS.items() if name not in learn.THIRD_PLAN}
    every = learn.plan(set())
    assert sorted(run for _, run in every) == sorted(run for runs in parts.values() for run in runs)
    second, first_plan = every[:57], every[57:]
    names = ["number of retries"] * 25 + ["longer answers"] * 9 + ["passes over the data"] * 15 + ["longer run"] * 8
    assert [name for name, _ in second] == names
    assert [run.seed for _, run in second[:25:5]] == [21, 22, 23, 24, 25]  # complete seeds first
    assert [name for name, _ in first_plan[:12]] == ["paper"] * 12
    assert [run.seed for _, run in first_plan[12:]] == [10] * 6 + [9] * 6 + [8] * 8 + [7] * 8 + [6] * 8

    first = parts["confirmation"][0]
    assert learn.plan({first}) == [(name, run) for name, run in every if name == "paper" or run.seed != first.seed]
    assert all(run.seed != 3 for name, run in learn.plan({parts["paper"][-1]}) if name == "paper")
    passes = parts["passes over the data"][0]  # is not compared with the other parts of the same training seed
    assert [run for run in every if run not in learn.plan({passes})] == [
        (name, run) for name, run in every if name == "passes over the data" and run.seed == passes.seed
    ]


def test_ratios_that_decide_are_those_of_the_steps_of_256_rows():
    units = {
        "step, GRPO n=4, 256 rows": {"step_seconds": [10.0, 10.0]},
        f"step, {names.SEQ_BALANCE}, 256 rows": {"step_seconds": [15.0, 18.0]},
        f"step, {names.SEQ_BALANCE}, 64 rows": {"step_seconds": [1.0, 1.0]},
        f"step, {fast.PAPER_ROUNDS}, 256 rows": {"error": "too late"},
    }
    assert fast.decisions(units).splitlines()[2:] == [
        "| Seq-balance / GRPO n=4 | 1.65 (1.50, 1.80) | 1.6 |",
        "| asynchronous / synchronous rounds | not measured | 0.75 |",
        "| the default's / the paper's rounds | not measured | 1 |",
    ]


NEEDED = {"learn": "reasoning_gym", "right": "vllm", "fast": "vllm", "rounds": "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["modes", "learn", "right", "fast", "rounds"])
def test_every_stage_runs_on_a_cpu(stage, tmp_path):
    """`make test-vllm` runs those with vLLM."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", stage, "--smoke", "--limit", "600"]
    command += ["--output_dir", str(tmp_path)]
    output = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr
    if stage in NEEDED and not importlib.util.find_spec(NEEDED[stage]):
        assert output.stdout.strip() == f"{stage} skipped: {NEEDED[stage]} is not installed."
        return
    assert "|---|" in output.stdout
    (results,) = tmp_path.glob("*.json")
    units = json.loads(results.read_text())["units"]
    assert len(units) >= 3 and all("seconds" in unit for unit in units.values())
