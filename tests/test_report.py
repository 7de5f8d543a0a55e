"""Numbers of the report against tables small enough to compute by hand."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from benchmarks.common import interval
from benchmarks.learning import report
from benchmarks.learning.prompt_sets import PASS_AT
from benchmarks.learning.statistics import (
    accuracy_at,
    by_seed,
    collect,
    common_budget,
    cost_to_reach,
    paired_difference,
)


TOKENS = {"GRPO n=4": 10_000, "GRPO n=8": 20_000, "Seq-balance": 40_000}
ACCURACY = {"GRPO n=4": (0.2, 0.4, 0.5), "GRPO n=8": (0.2, 0.5, 0.6), "Seq-balance": (0.2, 0.6, 0.7)}


def record(method, seed, prompt_set="easy"):
    """Two steps; seeds 1 and 2 are 0.02 apart, so the interval is ± 12.706 · 0.02 / √2 / √2 = 0.127."""
    extra = {"reward": 0.5, "resolved": 1.0, "zero_signal/first_round": 0.5, "zero_signal/final": 0.25}
    extra |= {"unresolved/all_negative": 0.0, "unresolved/all_positive": 0.0}
    extra |= {f"active_prompts/round_{k}": 32.0 for k in range(1, 5)}
    costs = {"rollouts": 64, "generated_tokens": TOKENS[method], "trained_tokens": 5}
    costs |= {"cpu_seconds": TOKENS[method] / 1e4}
    steps = [{"step": i, "wall_seconds": 2.0} | costs | extra for i in (1, 2)]
    evaluations = [
        {
            "step": i,
            "accuracy": a + 0.01 * (seed - 1) * 2 * (i > 0),
            "entropy": 0.5 - 0.1 * i,
            "by_difficulty": [a] * 6,
        }
        | {f"pass@{k}": 1 - (1 - a) ** k for k in PASS_AT}
        for i, a in enumerate(ACCURACY[method])
    ]
    return {"method": method, "prompt_set": prompt_set, "seed": seed, "steps": steps, "evaluations": evaluations}


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    for method in TOKENS:
        for seed in (1, 2):
            for name in ("easy", "hard"):
                path = tmp_path / "runs" / f"{name}{method}{seed}.json"
                path.write_text(json.dumps(record(method, seed, name)))
    return tmp_path / "runs"


def test_interval():
    assert interval([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2)))
    assert interval([1, 2, 3, 4, 5]) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))
    mean, half = interval([0.5])
    assert mean == 0.5 and math.isnan(half)


def test_intervals_cover_as_often_as_they_say():
    draws = np.random.default_rng(0).normal(size=(4000, 5))
    covered = np.mean([abs(mean) <= half for mean, half in map(interval, draws)])
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_accuracy_and_cost_along_a_run():
    run = pd.DataFrame({"step": [0, 10, 20], "tokens": [0, 100, 400], "accuracy": [0.2, 0.4, 0.3]})
    assert accuracy_at(run, "tokens", 50) == pytest.approx(0.3)
    assert accuracy_at(run, "tokens", 400) == pytest.approx(0.3)
    assert math.isnan(accuracy_at(run, "tokens", 401))
    assert cost_to_reach(run, "step", 0.3) == pytest.approx(5)  # the first time
    assert cost_to_reach(run, "tokens", 0.4) == pytest.approx(100)
    assert cost_to_reach(run, "tokens", 0.1) == 0
    assert cost_to_reach(run, "tokens", 0.41) == math.inf


def test_differences_pair_the_seeds():
    assert paired_difference({1: 0.5, 2: 0.6, 3: 9.0}, {1: 0.4, 2: 0.5}) == (
        pytest.approx(0.1),
        pytest.approx(0, abs=1e-9),
    )


def test_costs_are_summed_up_to_each_evaluation(runs):
    steps, evaluations = collect(runs.glob("*.json"))
    assert len(steps) == 2 * 2 * 2 * 3 and len(evaluations) == 3 * 2 * 2 * 3
    run = by_seed(evaluations, "hard", "Seq-balance")[2]
    assert run["generated_tokens"].tolist() == [0, 40_000, 80_000]
    assert run["wall_seconds"].tolist() == [0, 2, 4]
    assert common_budget(evaluations, "easy", "generated_tokens", ["GRPO n=4", "GRPO n=8"]) == 20_000


def test_tables_by_hand(runs):
    _, evaluations = collect(runs.glob("*.json"))
    table = report.methods_table(evaluations, "easy").splitlines()
    assert table[0] == (
        "| Method | Seeds | 2 steps | 20 k tokens | 40 k tokens | 2 CPU s | 4 CPU s | Tokens | CPU s |"
    )
    # With 20k tokens GRPO n=4 is done and Seq-balance half way through its first step: (0.2 + 0.6) / 2 and 0.41.
    assert table[2] == "| GRPO n=4 | 2 | 0.510 ± 0.127 | 0.510 ± 0.127 | – | 0.510 ± 0.127 | – | 20k | 2 |"
    assert table[4] == (
        "| Seq-balance | 2 | 0.710 ± 0.127 | 0.405 ± 0.064 | 0.610 ± 0.127 | 0.405 ± 0.064 | 0.610 ± 0.127 | 80k | 8 |"
    )
    speed = report.speed_table(evaluations, "easy").splitlines()
    assert speed[0].startswith("| Method | Seeds reaching 0.610 |")
    assert speed[2] == "| GRPO n=4 | 0 of 2 | not reached | not reached | not reached |"
    assert speed[3] == "| GRPO n=8 | 1 of 2 | not reached | not reached | not reached |"
    # 1.1 steps with seed 1, 0.98 with seed 2; the worse of two is shown.
    assert speed[4] == "| Seq-balance | 2 of 2 | 1 (0.55×) | 44k (1.10×) | 4 (1.10×) |"
    differences = report.differences_table(evaluations, "easy")
    assert "**-0.100 ± 0.000**" in differences and "**+0.100 ± 0.000**" in differences
    summary = report.summary(evaluations, "easy").splitlines()
    assert summary[0] == (
        "- At 2 steps, Seq-balance has the best mean, 0.710 ± 0.127. Better than GRPO n=8 beyond chance: Seq-balance. "
        "Worse: GRPO n=4. Not told apart: 0 of 2."
    )
    assert "| Seq-balance | 0.700 | 1.000 |" in report.pass_table(evaluations, "easy", ks=(1, 64)).replace(
        " ± 0.000", ""
    )


def test_report_is_filled_from_what_was_stored(runs, tmp_path):
    document = tmp_path / "report.md"
    document.write_text(
        re.sub(r"(<!-- [\w-]+ -->\n).*?(<!-- end -->)", r"\1\2", report.DOCUMENT.read_text(), flags=re.S)
    )
    report.store(runs, tmp_path)
    report.build(document, tmp_path, tmp_path)
    text = document.read_text()
    assert "12 runs are stored: 0 to 2 seeds" in text
    assert not re.search(r"-->\n<!-- end", text)
    for image in re.findall(r"\(figures/(\w+\.png)\)", text):
        assert (tmp_path / image).stat().st_size > 5000


@pytest.mark.skipif(not (report.FIGURES / report.FILES[1]).exists(), reason="no results are stored")
def test_published_tables_are_those_of_the_stored_results(tmp_path):
    steps, evaluations = (pd.read_parquet(report.FIGURES / name) for name in report.FILES)
    text = report.DOCUMENT.read_text()
    for prompt_set in evaluations["prompt_set"].unique():
        for name, table in report.TABLES.items():
            assert f"<!-- {name}-{prompt_set} -->\n{table(evaluations, prompt_set)}\n<!-- end -->" in text
        assert report.sampling_table(steps, prompt_set) in text
