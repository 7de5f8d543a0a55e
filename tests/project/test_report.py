"""Numbers of the report against tables small enough to compute by hand."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from ada_trl import AdaGRPOConfig
from benchmarks import names
from benchmarks.analyses import overview
from benchmarks.common import interval, load_rows
from benchmarks.learning import (
    equal_tokens,
    figures,
    formatting,
    language_model,
    language_tables,
    report,
    run,
    staleness,
    tables,
)
from benchmarks.learning.prompt_sets import PASS_AT
from benchmarks.learning.statistics import before_training, by_seed, collect, cost_to_reach, paired_difference


TOKENS = {"GRPO n=4": 10_000, "GRPO n=8": 20_000, names.HYBRID: 40_000}
ACCURACY = {"GRPO n=4": (0.2, 0.4, 0.5), "GRPO n=8": (0.2, 0.5, 0.6), names.HYBRID: (0.2, 0.6, 0.7)}


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
                path = tmp_path / "runs" / f"{name}{run.slug(method)}{seed}.json"
                path.write_text(json.dumps(record(method, seed, name)))
    return tmp_path / "runs"


def test_interval():
    assert interval([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2)))
    assert interval([1, 2, 3, 4, 5]) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))
    mean, half = interval([0.5])
    assert mean == 0.5 and math.isnan(half)


def test_intervals_have_their_nominal_coverage():
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
    found = by_seed(evaluations, "hard", names.HYBRID)[2]
    assert found["generated_tokens"].tolist() == [0, 40_000, 80_000]
    assert found["wall_seconds"].tolist() == [0, 2, 4]


def equal(*runs, prompt_set="hard"):
    """Evaluations of runs `(method, seed, final accuracy)`: two steps, half of the way after the first."""
    rows = []
    for method, seed, accuracy in runs:
        for step, value in enumerate((0.2, (0.2 + accuracy) / 2, accuracy)):
            row = {"method": method, "prompt_set": prompt_set, "seed": seed, "rate": 2e-4, "step": step}
            row |= {"accuracy": value, "entropy": 0.5, "generated_tokens": 1000 * step, "cpu_seconds": 3.0 * step}
            rows.append(row | {f"pass@{k}": 1 - (1 - value) ** k for k in PASS_AT})
    return pd.DataFrame(rows)


def test_more_tokens_are_compared_separately():
    most = equal_tokens.MORE_TOKENS
    runs = [(most, seed, 0.44 + 0.01 * seed) for seed in (1, 2, 3)]  # 0.45, 0.46, 0.47
    runs += [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)]
    runs += [(names.POSTERIOR, seed, 0.42 + 0.01 * seed) for seed in (1, 2, 3)]
    lines = tables.more_tokens_table(equal(*runs)).splitlines()
    assert cells(lines[0]) == ["Method", "Rollouts per step", "Hard"]
    assert cells(lines[2]) == ["GRPO n=16, 4× tokens", "512", "0.460"]
    assert cells(lines[3]) == ["GRPO n=4", "128", "0.300 (**-0.160 ± 0.025**)"]
    assert cells(lines[4]) == [names.POSTERIOR, "128", "0.440 (**-0.020 ± 0.000**)"]
    assert cells(lines[5]) == [names.POSTERIOR_2_ITERATIONS, "128", "–"]
    assert "n=16" not in tables.tokens_table(equal(*runs), "hard")
    assert "n=16" not in pass_table(runs)
    better = "significantly better than GRPO n=4 on hard (+0.140 ± 0.025)"
    assert tables.differences(equal(*runs), names.POSTERIOR) == better
    worse = f"significantly worse than {most} on hard (-0.020 ± 0.000)"
    assert tables.differences(equal(*runs), names.POSTERIOR, most) == worse
    assert tables.differences(equal(*runs), names.POSTERIOR_2_ITERATIONS) == ""


def test_expected_results_of_recipes():
    cheap = [("GRPO n=4", seed, 0.3) for seed in (1, 2, 3)]
    at_equal_tokens = equal(*cheap, *[(names.POSTERIOR, seed, 0.4) for seed in (1, 2, 3)])
    at_equal_prompts = equal(*cheap, *[("GRPO n=8", seed, 0.2) for seed in (1, 2, 3)])
    at_equal_prompts.loc[at_equal_prompts["method"] == "GRPO n=8", "generated_tokens"] *= 2
    lines = report.expect_arithmetic(at_equal_tokens, at_equal_prompts).splitlines()
    assert cells(lines[2]) == ["`arithmetic/grpo-n8.yaml`", "–", "**-0.100 ± 0.000**", "– / 2.0×"]
    assert cells(lines[-2]) == ["`arithmetic/posterior.yaml`", "–", "**+0.100 ± 0.000**", "– / 1.0×"]
    files = {re.search(r"`(.*)`", line)[1] for line in lines[2:]}
    sorting = equal(*[(names.POSTERIOR, seed, 0.4) for seed in (1, 2)], prompt_set="sorting")
    lines = report.expect_sorting(sorting).splitlines()
    assert cells(lines[3]) == ["`sorting/posterior.yaml`", "0.400", "2"]
    files |= {re.search(r"`(.*)`", line)[1] for line in lines[2:]}
    for name in files:
        assert (report.ROOT / "recipes" / name).is_file()


def pass_table(runs):
    return formatting.pass_table(equal(*runs), "hard", tables.PASS_AT, tables.SHOWN)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_of_equal_tokens_by_hand():
    # Differences from GRPO n=4 by seed: 0.10, 0.11, 0.12; half an interval is 4.303 · 0.01 / √3 = 0.025.
    runs = [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)] + [("GRPO n=8", seed, 0.25) for seed in (1, 2)]
    runs += [(names.POSTERIOR, seed, 0.39 + 0.01 * seed) for seed in (1, 2, 3)]
    lines = tables.tokens_table(equal(*runs), "hard").splitlines()
    # 0.25 is half of the way to 0.30; the median posterior has 0.41 after 2000 tokens.
    assert cells(lines[2])[:7] == ["GRPO n=4", "0.0002", "3", "0.300 ± 0.000", "", "+0.050", "0.50×"]
    assert cells(lines[3])[:7] == ["GRPO n=8", "0.0002", "2", "0.250", "-0.050", "", "1.00×"]
    assert cells(lines[4])[2:7] == ["3", "0.410 ± 0.025", "**+0.110 ± 0.025**", "+0.155", "0.24×"]
    assert cells(lines[4])[7:] == ["2", "6"]
    first = tables.first_table(equal(*runs)).splitlines()
    assert cells(first[0]) == ["Method", "Hard"]
    assert cells(first[6]) == [names.POSTERIOR, "0.410 (**+0.110 ± 0.025**)"]
    assert cells(first[4]) == [names.DAPO, "–"]
    ablation = tables.ablation_table(equal(*runs)).splitlines()
    assert cells(ablation[2])[:2] == ["GRPO n=4", "0.300"]
    assert cells(ablation[6])[1] == "0.410 (**+0.110 ± 0.025**)"
    assert cells(pass_table(runs).splitlines()[2])[:2] == ["before training", "0.200"]


def test_prompt_selection_is_compared_with_the_posterior_of_as_many_iterations():
    runs = [(names.POSTERIOR, seed, 0.40) for seed in (1, 2, 3)]
    runs += [(f"{names.POSTERIOR}, + prompt oversampling ×2", seed, 0.41 + 0.01 * seed) for seed in (1, 2, 3)]
    runs += [(names.POSTERIOR_2_ITERATIONS, seed, 0.50) for seed in (1, 2, 3)]
    runs += [(f"{names.RETRIES}, 2 iterations", seed, 0.47) for seed in (1, 2, 3)]
    runs += [(names.OVERSAMPLING_ORACLE, seed, 0.60) for seed in (1, 2, 3)]
    rows = {cells(line)[0]: cells(line) for line in tables.prompt_selection_table(equal(*runs)).splitlines()}
    assert rows[names.POSTERIOR][1:4] == ["0.400", "1.000", "–"]  # 1 - 0.6^16
    assert rows[f"{names.POSTERIOR}, + prompt oversampling ×2"][1] == "0.430 (**+0.030 ± 0.025**)"
    assert rows[f"{names.POSTERIOR}, + prompt oversampling ×4"][1] == "–"
    assert rows[names.OVERSAMPLING_ORACLE][1] == "0.600 (**+0.200 ± 0.000**)"
    assert "oracle" not in tables.tokens_table(equal(*runs), "hard") + pass_table(runs)
    assert rows[names.POSTERIOR_2_ITERATIONS][1] == "0.500"
    assert rows[f"{names.RETRIES}, 2 iterations"][1] == "0.470 (**-0.030 ± 0.000**)"


def test_differences_that_are_not_significant_are_not_bold():
    runs = [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)]
    runs += [(names.POSTERIOR, seed, 0.30 + 0.01 * (seed - 1)) for seed in (1, 2, 3)]
    assert "+0.010 ± 0.025" in tables.tokens_table(equal(*runs), "hard")
    assert "**" not in tables.tokens_table(equal(*runs), "hard")
    assert tables.differences(equal(*runs), names.POSTERIOR) == (
        "no significant difference from GRPO n=4 on hard (+0.010 ± 0.025)"
    )
    runs[3:] = [(names.POSTERIOR, seed, 0.20) for seed in (1, 2, 3)]
    assert tables.differences(equal(*runs), names.POSTERIOR).startswith("significantly worse than GRPO n=4")


def test_tables_of_equal_prompts_by_hand(runs):
    steps, evaluations = collect(runs.glob("*.json"))
    lines = tables.steps_table(steps, evaluations, "easy").splitlines()
    assert cells(lines[4]) == [
        names.HYBRID,
        "0.710 ± 0.127",
        "+0.100",
        "1.000 ± 0.000",
        "2.0",
        "0%",
        "25%",
        "80",
        "8",
    ]
    assert cells(tables.difficulty_table(evaluations, "easy").splitlines()[-1])[1] == "0.700 ± 0.000"


def language_runs(gains, rise=0.0, prompt_set="mixture"):
    """
    Three seeds and steps of each method; final accuracies are 0.2, for two families 0.3 and 0.1, plus the gain. pass@16 is 0.5, with
    retries 0.6. `rise`: how much more every further seed gains.
    """
    rows = []
    for method, gain in gains.items():
        for seed in (1, 2, 3):
            for step in (0, 1, 2, 3):
                for family, level in (("all", 0.2), ("clock", 0.3), ("sums", 0.1)):
                    row = {"method": method, "prompt_set": prompt_set, "seed": seed, "step": step, "family": family}
                    own = gain + rise * (seed - 2) * (gain > 0.1)
                    row |= {"accuracy": level + own * step / 3, "frac_zero_variance": level if step == 0 else None}
                    row |= {"frac_zero_advantage_groups": 0.75, "explained_variance": 0.125, "entropy": 0.5}
                    row |= {
                        "cpu_seconds": (11.0 + seed) * step,
                        "generated_tokens": 1000 * step,
                        "rollouts": 256 * step,
                    }
                    row["pass@16"] = 0.5 + 0.1 * (method == names.RETRIES and step > 0)
                    rows.append(row)
    return pd.DataFrame(rows).astype({"frac_zero_variance": float})


GAINS = {names.GRPO_4: 0.1, names.GRPO_8: 0.1, names.POSTERIOR: 0.2, names.RETRIES: 0.1}


def test_language_model_tables():
    """Metrics that do not apply to a method are not shown as a number."""
    runs = language_runs(GAINS)
    table = language_tables.language_table(runs, "mixture").splitlines()
    assert cells(table[2]) == ["before training", "", "0.200", "", "", "", "0.500", "", "", ""]
    assert cells(table[3]) == ["GRPO n=4", "3", "0.300", "", "+0.000 ± 0.000", "1.00×", "0.500", "0.75", "–", "12.0"]
    assert cells(table[4])[3:] == ["+0.000 ± 0.000", "", "1.00×", "0.500 (+0.000 ± 0.000)", "0.75", "–", "12.0"]
    better = "**+0.100 ± 0.000**"
    assert cells(table[5])[2:7] == ["0.400", better, better, "0.50×", "0.500 (+0.000 ± 0.000)"]
    assert cells(table[5])[7:] == ["–", "0.12", "12.0"]
    assert cells(table[6])[2] == "0.300" and cells(table[6])[6:8] == ["0.600 (**+0.100 ± 0.000**)", "–"]
    families = language_tables.family_table(runs, "mixture").splitlines()
    assert cells(families[2]) == ["clock", "30%", "0.300", "0.400", "0.400", "0.500", "0.400"]
    assert cells(families[3]) == ["sums", "10%", "0.100", "0.200", "0.200", "0.300", "0.200"]


def test_readme_table_has_few_methods_with_enough_seeds():
    runs = language_runs(GAINS | {names.BATCH: 0.2})
    table = language_tables.readme_table(runs[(runs["method"] != names.GRPO_8) | (runs["seed"] < 3)])
    assert [cells(row)[0] for row in table.splitlines()[2:]] == ["before training", names.GRPO_4, names.BATCH]
    assert cells(table.splitlines()[-1])[1:3] == ["0.400", "**+0.100 ± 0.000**"]
    assert len(language_tables.README_METHODS) < 5


def test_language_model_sentences():
    runs = language_runs(GAINS)
    lines = language_tables.language_verdict(runs, "mixture").splitlines()
    assert lines[0] == "- Before training, 20% of the groups of four rollouts have zero reward variance (exact)."
    half = "accuracy after half of the steps, compared with GRPO n=8 after all steps: {} ± 0.000."
    both = "GRPO n=4 ({0} ± 0.000), GRPO n=8 ({0} ± 0.000)"
    better = f"significantly better than {both.format('+0.100')}"
    assert lines[1] == f"- **{names.POSTERIOR}**: {better}; {half.format('-0.033')}"
    assert lines[2] == (
        f"- **{names.RETRIES}**: no significant difference from {both.format('+0.000')}; significantly worse than "
        f"{names.POSTERIOR} (-0.100 ± 0.000); pass@16 {better}, {names.POSTERIOR} (+0.100 ± 0.000); {half.format('-0.067')}"
    )
    two = language_tables.language_verdict(runs[runs["seed"] < 3], "mixture")
    assert len(two.splitlines()) == 1, "Two seeds have no interval."


def test_captions_name_model_answers_and_seeds():
    """By seed the posterior gains 0.09, 0.10 and 0.11 more: half an interval is 4.303 · 0.01 / √3 = 0.025."""
    runs = language_runs(GAINS, rise=0.01)
    text = language_tables.caption(runs, "mixture", list(GAINS))
    assert "SmolLM2-135M-Instruct" in text and "answers of about 4 tokens, 3 seeds." in text
    assert "from GRPO n=4: accuracy 0.000 to 0.025, pass@16 0.000 (" in text
    fewer = runs[(runs["method"] != names.RETRIES) | (runs["seed"] < 3)]
    assert "2 to 3 seeds" in language_tables.caption(fewer, "mixture", list(GAINS))


def test_the_paper_protocol_is_a_section_as_soon_as_runs_are_stored():
    assert language_tables.paper_section(language_runs(GAINS)) == ""
    suffix = language_tables.PAPER_SUFFIX
    stored = {names.GRPO_4 + suffix: 0.1, names.GRPO_16 + suffix: 0.1, names.ALGORITHM_2 + suffix: 0.2}
    assert language_tables.paper_section(language_runs({names.ALGORITHM_2 + suffix: 0.2})) == "", "no reference"
    runs = pd.concat([language_runs(GAINS), language_runs(stored)])
    text = language_tables.paper_section(runs)
    table = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert table[2][:4] == ["before training", "", "0.200", "0.500"]
    assert table[3] == ["GRPO n=4", "3", "0.300", "0.500", "16.0", "3", "0.75", "0.500 ± 0.000"]
    assert table[5][:4] == [names.ALGORITHM_2, "3", "0.400 (**+0.100 ± 0.000**)", "0.500 (+0.000 ± 0.000)"]
    assert f"**{names.ALGORITHM_2}**: significantly better than GRPO n=4 (+0.100 ± 0.000), GRPO n=16" in text
    assert suffix not in text
    assert "generates 1.0 times as many tokens as GRPO n=4; accuracy: significantly better than GRPO n=4" in (
        language_tables.paper_sentence(runs)
    )
    assert names.ALGORITHM_2 not in language_tables.language_table(language_tables.equal_tokens_runs(runs), "mixture")
    drawn = figures.language_paper(runs, "mixture")
    assert len(drawn.axes) == 6 and drawn.axes[0].get_legend_handles_labels()[1][-1] == "Seq-balance (Algorithm 2)"


def test_means_since_the_previous_evaluation():
    """Stored are means over all steps so far: 0.8 after 2 steps and 0.5 after 6 are 0.35 over the last 4."""
    rows = [
        {"prompt_set": "mixture", "method": "m", "seed": 1, "step": s, "x": x}
        for s, x in ((0, None), (2, 0.8), (6, 0.5))
    ]
    assert figures.per_interval(pd.DataFrame(rows), "x")["x"].tolist() == pytest.approx([0.8, 0.35])


def test_runs_from_before_methods_were_renamed_are_stored_under_the_current_names(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "RESULTS", tmp_path)
    step = {"generated_tokens": 40, "rollouts": 10, "cpu_seconds": 1.0, "zero_signal/final": 0.75, "entropy": 0.5}
    share = {"all": 0.6, "clock": 0.6}
    evaluations = [
        {"step": s, "accuracy": 0.1, "by_family": {"clock": 0.1}, "alike": share}
        | {f"pass@{k}": 0.5 for k in (1, 4, 16, 64)}
        for s in (0, 1)
    ]
    for method in ("Paper: Seq-balance", "GRPO n=4"):
        record = {"method": method, "prompt_set": "mixture", "seed": 1, "rate": 3e-4}
        (tmp_path / f"{method[:4]}.json").write_text(
            json.dumps(record | {"steps": [step], "evaluations": evaluations})
        )
    rows = language_model.results(tmp_path, paper_protocol=True)
    suffix = language_tables.PAPER_SUFFIX
    assert {row["method"] for row in rows} == {names.ALGORITHM_2 + suffix, names.GRPO_4 + suffix}
    assert {row["method"] for row in language_model.results(tmp_path)} == {names.ALGORITHM_2 + suffix, names.GRPO_4}
    assert {row["frac_zero_variance"] for row in rows} == {0.6}
    assert {row["frac_zero_advantage_groups"] for row in rows if row["step"] == 1} == {0.75}
    assert set(rows[0]) == set(load_rows("language_model")[0])


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("equal_tokens", equal_tokens.METHODS),
        ("one_rollout", equal_tokens.METHODS),
        ("staleness", equal_tokens.METHODS),
        ("language_model", language_model.METHODS),
        ("learning_steps", run.METHODS),
        ("learning_evaluations", run.METHODS),
    ],
)
def test_stored_methods_exist(name, methods):
    assert {row["method"] for row in load_rows(name)} <= set(methods)
    assert len({run.slug(method) for method in methods}) == len(methods), "one file name for two methods"


def test_methods_of_the_paper_protocol_train_on_16_prompts(tmp_path):
    for name, options in language_model.PAPER.items():
        assert language_model.PROMPTS_PER_STEP[name] == 16
        batch = {"per_device_train_batch_size": 16 * options["num_generations"]} | options
        args = AdaGRPOConfig(str(tmp_path), **run.COMMON | language_model.task().options | batch)
        assert args.generation_batch_size // args.num_generations == 16


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
    table = language_tables.pilot_table(pd.DataFrame(rows)).splitlines()
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
    assert before_training(pd.DataFrame(rows), "mixture")["accuracy"] == pytest.approx(0.25)


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert formatting.show((-0.0001, 0.01), sign=True) == "+0.000 ± 0.010"
    assert formatting.show((-0.0006, math.nan), sign=True) == "-0.001"


def test_report_is_filled_from_stored_results(tmp_path):
    published = {tmp_path / path.name: path for path in (report.DOCUMENT, report.PAPER)}
    published[tmp_path / "recipes.md"] = report.RECIPES
    for copy, page in published.items():
        # The paper's page has others' tables, too.
        name = r"(?:steps|difficulty)-\w+" if page == report.PAPER else r"[\w-]+"
        emptied = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", r"\1\2", page.read_text(), flags=re.S)
        assert re.search(r"-->\n<!-- end", emptied)
        copy.write_text(emptied)
    report.build(report.stored(), language_tables.stored_language(), *published, tmp_path)
    for copy, page in published.items():
        assert copy.read_text() == page.read_text()
        for image in re.findall(r"\(figures/((?:learning|language)_\w+\.png)\)", copy.read_text()):
            assert (tmp_path / image).stat().st_size > 5000


def test_results_of_the_readme_are_filled_from_stored_results(tmp_path, monkeypatch):
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


def test_the_cost_of_staleness_is_as_stored():
    rows = load_rows(staleness.NAME)
    assert staleness.table(rows) in staleness.PAGE.read_text()
    assert {row["seed"] for row in rows} == {1, 2, 3, 4, 5} and len(rows) == 2 * 2 * len(staleness.SETS) * 5
