"""Numbers of the report against tables small enough to compute by hand."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from benchmarks.analyses import overview
from benchmarks.common import interval, load_rows
from benchmarks.learning import report, staleness
from benchmarks.learning.prompt_sets import PASS_AT
from benchmarks.learning.statistics import by_seed, collect, cost_to_reach, paired_difference


TOKENS = {"GRPO n=4": 10_000, "GRPO n=8": 20_000, "Seq-balance": 40_000}
ACCURACY = {"GRPO n=4": (0.2, 0.4, 0.5), "GRPO n=8": (0.2, 0.5, 0.6), "Seq-balance": (0.2, 0.6, 0.7)}


def record(method, seed, prompt_set="easy"):
    """Two steps; seeds 1 and 2 are 0.02 apart, so the interval is ± 12.706 · 0.02 / √2 / √2 = 0.127."""
    extra = {
        "reward": 0.5,
        "frac_exit_condition_met": 1.0,
        "frac_reward_zero_std/first_round": 0.5,
        "frac_zero_advantage_groups": 0.25,
    }
    extra |= {"frac_all_wrong": 0.0, "frac_all_correct": 0.0}
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


def test_cost_along_a_run():
    run = pd.DataFrame({"step": [0, 10, 20], "tokens": [0, 100, 400], "accuracy": [0.2, 0.4, 0.3]})
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


def equal(*runs, prompt_set="hard"):
    """Evaluations of runs `(method, seed, final accuracy)`: two steps, half of the way after the first."""
    rows = []
    for method, seed, accuracy in runs:
        for step, value in enumerate((0.2, (0.2 + accuracy) / 2, accuracy)):
            row = {"method": method, "prompt_set": prompt_set, "seed": seed, "rate": 2e-4, "step": step}
            row |= {"accuracy": value, "entropy": 0.5, "generated_tokens": 1000 * step, "cpu_seconds": 3.0 * step}
            rows.append(row | {f"pass@{k}": 1 - (1 - value) ** k for k in PASS_AT})
    return pd.DataFrame(rows)


def test_more_tokens_are_compared_apart():
    most = report.equal_tokens.MORE_TOKENS
    runs = [(most, seed, 0.44 + 0.01 * seed) for seed in (1, 2, 3)]  # 0.45, 0.46, 0.47
    runs += [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)]
    runs += [("Posterior n=1", seed, 0.42 + 0.01 * seed) for seed in (1, 2, 3)]
    lines = report.more_tokens_table(equal(*runs)).splitlines()
    assert cells(lines[0]) == ["Method", "Rollouts per step", "Hard"]
    assert cells(lines[2]) == ["GRPO n=16", "512", "0.460"]
    assert cells(lines[3]) == ["GRPO n=4", "128", "0.300 (**-0.160 ± 0.025**)"]
    assert cells(lines[4]) == ["Posterior n=1", "128", "0.440 (**-0.020 ± 0.000**)"]
    assert cells(lines[5]) == [report.TWICE, "128", "–"]
    assert "n=16" not in report.tokens_table(equal(*runs), "hard")
    assert "n=16" not in report.pass_table(equal(*runs), "hard")
    assert report.differences(equal(*runs), "Posterior n=1") == "ahead of GRPO n=4 on hard (+0.140 ± 0.025)"
    behind = report.differences(equal(*runs), "Posterior n=1", most, "GRPO n=16")
    assert behind == "behind GRPO n=16 on hard (-0.020 ± 0.000)"
    assert report.differences(equal(*runs), report.TWICE) == ""


def test_what_to_expect_of_recipes():
    cheap = [("GRPO n=4", seed, 0.3) for seed in (1, 2, 3)]
    at_equal_tokens = equal(*cheap, *[("Posterior n=1", seed, 0.4) for seed in (1, 2, 3)])
    at_equal_prompts = equal(*cheap, *[("GRPO n=8", seed, 0.2) for seed in (1, 2, 3)])
    at_equal_prompts.loc[at_equal_prompts["method"] == "GRPO n=8", "generated_tokens"] *= 2
    lines = report.expect_arithmetic(at_equal_tokens, at_equal_prompts).splitlines()
    assert cells(lines[2]) == ["`arithmetic/grpo-n8.yaml`", "–", "**-0.100 ± 0.000**", "– / 2.0×"]
    assert cells(lines[-2]) == ["`arithmetic/posterior.yaml`", "–", "**+0.100 ± 0.000**", "– / 1.0×"]
    names = {re.search(r"`(.*)`", line)[1] for line in lines[2:]}
    sorting = equal(*[("Posterior n=1", seed, 0.4) for seed in (1, 2)], prompt_set="sorting")
    lines = report.expect_sorting(sorting).splitlines()
    assert cells(lines[3]) == ["`sorting/posterior.yaml`", "0.400", "2"]
    names |= {re.search(r"`(.*)`", line)[1] for line in lines[2:]}
    for name in names:
        assert (report.ROOT / "recipes" / name).is_file()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_of_equal_tokens_by_hand():
    # Differences from GRPO n=4 by seed: 0.10, 0.11, 0.12; half an interval is 4.303 · 0.01 / √3 = 0.025.
    runs = [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)] + [("GRPO n=8", seed, 0.25) for seed in (1, 2)]
    runs += [("Posterior n=1", seed, 0.39 + 0.01 * seed) for seed in (1, 2, 3)]
    lines = report.tokens_table(equal(*runs), "hard").splitlines()
    # 0.25 is half of the way to 0.30; the median posterior has 0.41 after 2000 tokens.
    assert cells(lines[2])[:7] == ["GRPO n=4", "0.0002", "3", "0.300 ± 0.000", "", "+0.050", "0.50×"]
    assert cells(lines[3])[:7] == ["GRPO n=8", "0.0002", "2", "0.250", "-0.050", "", "1.00×"]
    assert cells(lines[4])[2:7] == ["3", "0.410 ± 0.025", "**+0.110 ± 0.025**", "+0.155", "0.24×"]
    assert cells(lines[4])[7:] == ["2", "6"]
    first = report.first_table(equal(*runs)).splitlines()
    assert cells(first[0]) == ["Method", "Hard"]
    assert cells(first[6]) == ["**Posterior, n=1**", "0.410 (**+0.110 ± 0.025**)"]
    assert cells(first[4]) == ["DAPO n=4", "–"]
    ablation = report.ablation_table(equal(*runs)).splitlines()
    assert cells(ablation[2])[:2] == ["GRPO n=4", "0.300"]
    assert cells(ablation[6])[1] == "0.410 (**+0.110 ± 0.025**)"
    assert cells(report.pass_table(equal(*runs), "hard").splitlines()[2])[:2] == ["before training", "0.200"]


def test_which_prompts_are_asked_is_compared_with_the_posterior_of_as_many_iterations():
    runs = [("Posterior n=1", seed, 0.40) for seed in (1, 2, 3)]
    runs += [("Posterior n=1, 1 of 2", seed, 0.41 + 0.01 * seed) for seed in (1, 2, 3)]
    runs += [(report.TWICE, seed, 0.50) for seed in (1, 2, 3)]
    runs += [("Rounds across steps, 2 iterations", seed, 0.47) for seed in (1, 2, 3)]
    runs += [(report.equal_tokens.BEST_KNOWN, seed, 0.60) for seed in (1, 2, 3)]
    rows = {cells(line)[0]: cells(line) for line in report.which_prompts_table(equal(*runs)).splitlines()}
    assert rows["Posterior n=1"][1:4] == ["0.400", "1.000", "–"]  # 1 - 0.6^16
    assert rows["Posterior n=1, 1 of 2"][1] == "0.430 (**+0.030 ± 0.025**)"
    assert rows["Posterior n=1, 1 of 4"][1] == "–"
    assert rows[report.equal_tokens.BEST_KNOWN][1] == "0.600 (**+0.200 ± 0.000**)"
    assert "known" not in report.tokens_table(equal(*runs), "hard") + report.pass_table(equal(*runs), "hard")
    assert rows[report.TWICE][1] == "0.500"
    assert rows["Rounds across steps, 2 iterations"][1] == "0.470 (**-0.030 ± 0.000**)"


def test_what_is_level_is_not_bold_and_is_said_to_be():
    runs = [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)]
    runs += [("Posterior n=1", seed, 0.30 + 0.01 * (seed - 1)) for seed in (1, 2, 3)]
    assert "+0.010 ± 0.025" in report.tokens_table(equal(*runs), "hard")
    assert "**" not in report.tokens_table(equal(*runs), "hard")
    assert report.differences(equal(*runs), "Posterior n=1") == "level with GRPO n=4 on hard (+0.010 ± 0.025)"
    runs[3:] = [("Posterior n=1", seed, 0.20) for seed in (1, 2, 3)]
    assert report.differences(equal(*runs), "Posterior n=1").startswith("behind GRPO n=4")


def test_tables_of_equal_prompts_by_hand(runs):
    steps, evaluations = collect(runs.glob("*.json"))
    lines = report.steps_table(steps, evaluations, "easy").splitlines()
    assert cells(lines[4]) == [
        "Seq-balance",
        "0.710 ± 0.127",
        "+0.100",
        "1.000 ± 0.000",
        "2.0",
        "0%",
        "25%",
        "80",
        "8",
    ]
    assert cells(report.difficulty_table(evaluations, "easy").splitlines()[-1])[1] == "0.700 ± 0.000"


def test_language_model_tables():
    """Three seeds; the posterior is 0.1 ahead at the end. What the other method logs is not shown as a number."""
    rows = []
    for method, gain in (("GRPO n=4", 0.1), ("GRPO n=8", 0.1), ("Posterior n=1", 0.2), ("Rounds across steps", 0.1)):
        for seed in (1, 2, 3):
            for step in (0, 1, 2, 3):
                for family, level in (("all", 0.2), ("clock", 0.3), ("sums", 0.1)):
                    row = {"method": method, "prompt_set": "mixture", "seed": seed, "step": step, "family": family}
                    row |= {"accuracy": level + gain * step / 3, "pass@16": 0.5, "alike": level if step == 0 else None}
                    row |= {"zero_variance": 0.75, "explained_variance": 0.125, "cpu_seconds": (11.0 + seed) * step}
                    row |= {"generated_tokens": 1000 * step}
                    row["pass@16"] += 0.1 * (method == "Rounds across steps" and step > 0)
                    rows.append(row)
    runs = pd.DataFrame(rows).astype({"alike": float})
    table = report.language_table(runs, "mixture").splitlines()
    assert cells(table[2]) == ["before training", "", "0.200", "", "", "", "0.500", "", "", ""]
    assert cells(table[3]) == ["GRPO n=4", "3", "0.300", "", "+0.000 ± 0.000", "1.00×", "0.500", "0.75", "–", "12.0"]
    assert cells(table[4])[3:] == ["+0.000 ± 0.000", "", "1.00×", "0.500 (+0.000 ± 0.000)", "0.75", "–", "12.0"]
    ahead = "**+0.100 ± 0.000**"
    assert cells(table[5])[2:7] == ["0.400", ahead, ahead, "0.50×", "0.500 (+0.000 ± 0.000)"]
    assert cells(table[5])[7:] == ["–", "0.12", "12.0"]
    assert cells(table[6])[2] == "0.300" and cells(table[6])[6:8] == ["0.600 (**+0.100 ± 0.000**)", "–"]
    names = ["Posterior n=1", "Rounds across steps"]
    brief = report.language_table(runs[(runs["method"] != "GRPO n=8") | (runs["seed"] < 3)], "mixture", brief=True)
    assert [cells(row)[0] for row in brief.splitlines()[2:]] == ["before training", "GRPO n=4", *names]
    assert cells(brief.splitlines()[-2])[1:3] == ["0.400", ahead] and len(cells(brief.splitlines()[-1])) == 6
    families = report.family_table(runs, "mixture").splitlines()
    assert cells(families[2]) == ["clock", "30%", "0.300", "0.400", "0.400", "0.500", "0.400"]
    assert cells(families[3]) == ["sums", "10%", "0.100", "0.200", "0.200", "0.300", "0.200"]
    said = report.language_verdict(runs, "mixture").splitlines()
    assert said[0] == "- Before training, 20% of GRPO n=4's groups have no contrast (exact)."
    half = "at half of the steps {} ± 0.000 against GRPO n=8 at the end."
    assert said[1] == f"- **Posterior n=1**: ahead of GRPO n=4, GRPO n=8; {half.format('-0.033')}"
    both = "GRPO n=4 (+0.100 ± 0.000), GRPO n=8 (+0.100 ± 0.000)"
    assert said[2] == (
        f"- **Rounds across steps**: level with GRPO n=4, GRPO n=8; behind Posterior n=1 (-0.100 ± 0.000); pass@16 ahead of "
        f"{both}, Posterior n=1 (+0.100 ± 0.000); {half.format('-0.067')}"
    )
    assert len(report.language_verdict(runs[runs["seed"] < 3], "mixture").splitlines()) == 1, "Two seeds say nothing."


def test_short_runs_of_the_language_model():
    """By their rate, then as in the main table; only where they ended."""
    rows = []
    for method, rate, gain in (("GRPO n=8", 3e-4, 0.2), ("GRPO n=4", 3e-4, 0.1), ("GRPO n=8", 1e-4, 0.0)):
        for step in (0, 50):
            row = {"method": method, "rate": rate, "step": step, "accuracy": 0.1 + gain * (step > 0), "pass@16": 0.5}
            row |= {
                "prompt_set": "mixture",
                "seed": 0,
                "cpu_seconds": 450.0 * (step > 0),
                "generating_seconds": math.nan if rate > 2e-4 else 2.0,
            }
            rows += [row | {"family": family} for family in ("all", "clock")]
    table = report.pilot_table(pd.DataFrame(rows)).splitlines()
    assert [cells(row) for row in table[2:]] == [
        ["before training", "", "0.100", "0.500", ""],
        ["GRPO n=8", "1e-4", "0.100", "0.500", "22%"],
        ["GRPO n=4", "3e-4", "0.200", "0.500", "–"],
        ["GRPO n=8", "3e-4", "0.300", "0.500", "–"],
    ]


def test_before_training_is_the_mean_of_seeds_whose_weights_differ():
    rows = [
        {"prompt_set": "mixture", "seed": seed, "step": step, "accuracy": accuracy, "entropy": None}
        for seed, step, accuracy in ((1, 0, 0.1), (1, 0, 0.1), (2, 0, 0.4), (2, 50, 0.9))
    ]
    assert report.before_training(pd.DataFrame(rows), "mixture")["accuracy"] == pytest.approx(0.25)


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    assert report.show((-0.0001, 0.01), sign=True) == "+0.000 ± 0.010"
    assert report.show((-0.0006, math.nan), sign=True) == "-0.001"


def test_report_is_filled_from_what_is_stored(tmp_path):
    published = {tmp_path / path.name: path for path in (report.DOCUMENT, report.PAPER)}
    published[tmp_path / "recipes.md"] = report.RECIPES
    for copy, page in published.items():
        # The paper's page has others' tables, too.
        name = r"(?:steps|difficulty)-\w+" if page == report.PAPER else r"[\w-]+"
        emptied = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", r"\1\2", page.read_text(), flags=re.S)
        assert re.search(r"-->\n<!-- end", emptied)
        copy.write_text(emptied)
    report.build(report.stored(), *published, tmp_path)
    for copy, page in published.items():
        assert copy.read_text() == page.read_text()
        for image in re.findall(r"\(figures/((?:learning|language)_\w+\.png)\)", copy.read_text()):
            assert (tmp_path / image).stat().st_size > 5000


def test_first_screen_of_the_readme_is_filled_from_what_is_stored(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    published = overview.README.read_text()
    readme.write_text(
        re.sub(r"(<!-- (?:overview|language-mixture|verdict) -->\n).*?(<!-- end -->)", r"\1\2", published, flags=re.S)
    )
    monkeypatch.setattr(overview, "README", readme)
    monkeypatch.setattr(overview, "FIGURES", tmp_path)
    overview.main()
    assert readme.read_text() == published


def test_store(runs, tmp_path):
    report.store(runs, tmp_path)
    steps, evaluations = (pd.read_parquet(tmp_path / name) for name in report.FILES)
    assert len(steps) == 2 * 2 * 2 * 3 and len(evaluations) == 3 * 2 * 2 * 3


def test_what_one_step_ahead_costs_is_as_stored():
    rows = load_rows(staleness.NAME)
    assert staleness.table(rows) in staleness.PAGE.read_text()
    assert {row["seed"] for row in rows} == {1, 2, 3, 4, 5} and len(rows) == 2 * 2 * len(staleness.SETS) * 5
