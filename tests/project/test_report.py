"""Numbers of the report against tables small enough to compute by hand."""

import itertools
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
    effective_sample_size,
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
from benchmarks.learning.statistics import before_training, by_seed, collect, cost_to_reach


TOKENS = {"GRPO n=4": 10_000, "GRPO n=8": 20_000, names.HYBRID: 40_000}
ACCURACY = {"GRPO n=4": (0.2, 0.4, 0.5), "GRPO n=8": (0.2, 0.5, 0.6), names.HYBRID: (0.2, 0.6, 0.7)}


def record(method, seed, prompt_set="easy"):
    """Two steps; seeds 1 and 2 are 0.02 apart, so the interval is ± 12.706 · 0.02 / √2 / √2 = 0.127."""
    tokens = TOKENS[method]
    step = {"rollouts": 64, "generated_tokens": tokens, "trained_tokens": 5, "cpu_seconds": tokens / 1e4}
    step |= {"wall_seconds": 2.0, "frac_zero_advantage_groups": 0.25}
    evaluations = []
    for i, base in enumerate(ACCURACY[method]):
        row = {
            "step": i,
            "accuracy": base + 0.01 * (seed - 1) * 2 * (i > 0),
            "entropy": 0.5,
            "by_difficulty": [base] * 6,
        }
        evaluations.append(row | {f"pass@{k}": 1 - (1 - base) ** k for k in PASS_AT})
    steps = [{"step": i} | step for i in (1, 2)]
    return {"method": method, "prompt_set": prompt_set, "seed": seed, "steps": steps, "evaluations": evaluations}


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    for method, seed, name in itertools.product(TOKENS, (1, 2), ("easy", "hard")):
        path = tmp_path / "runs" / f"{name}{run.slug(method)}{seed}.json"
        path.write_text(json.dumps(record(method, seed, name)))
    return tmp_path / "runs"


def test_interval():
    assert interval([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2)))
    assert interval([1, 2, 3, 4, 5]) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))
    mean, half = interval([0.5])
    assert mean == 0.5 and math.isnan(half)


def test_cost_along_a_run():
    run = pd.DataFrame({"step": [0, 10, 20], "tokens": [0, 100, 400], "accuracy": [0.2, 0.4, 0.3]})
    assert cost_to_reach(run, "step", 0.3) == pytest.approx(5)  # the first time
    assert cost_to_reach(run, "tokens", 0.4) == pytest.approx(100)
    assert cost_to_reach(run, "tokens", 0.1) == 0
    assert cost_to_reach(run, "tokens", 0.41) == math.inf


def test_costs_are_summed_up_to_each_evaluation(runs, tmp_path):
    report.store(runs, tmp_path)
    steps, evaluations = (pd.read_parquet(tmp_path / name) for name in report.FILES)
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


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.43, 0.44, 0.45), "significantly better than GRPO n=4 on hard (+0.140 ± 0.025)"),
        ((0.30, 0.31, 0.32), "no significant difference from GRPO n=4 on hard (+0.010 ± 0.025)"),
        ((0.20, 0.20, 0.20), "significantly worse than GRPO n=4 on hard (-0.100 ± 0.000)"),
        ((), ""),
    ],
)
def test_only_significant_differences_are_bold(accuracies, expected):
    runs = [("GRPO n=4", seed, 0.30) for seed in (1, 2, 3)]
    runs += [(names.POSTERIOR, seed, accuracy) for seed, accuracy in enumerate(accuracies, start=1)]
    assert tables.differences(equal(*runs), names.POSTERIOR) == expected
    assert ("**" in tables.tokens_table(equal(*runs), "hard")) == expected.startswith("significantly")


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
    selection = tables.prompt_selection_table(equal(*runs, *[(names.RETRIES, seed, 0.30) for seed in (1, 2, 3)]))
    assert cells(selection.splitlines()[3])[:2] == [names.RETRIES, "0.300 (**-0.110 ± 0.025**)"], (
        "compared with the posterior"
    )


def test_tables_of_equal_prompts_by_hand(runs):
    steps, evaluations = collect(runs.glob("*.json"))
    row = cells(tables.steps_table(steps, evaluations, "easy").splitlines()[4])
    assert row == [names.HYBRID, "0.710 ± 0.127", "+0.100", "1.000 ± 0.000", "2.0", "0%", "25%", "80", "8"]
    assert cells(tables.difficulty_table(evaluations, "easy").splitlines()[-1])[1] == "0.700 ± 0.000"


def language_runs(gains, rise=0.0, steps=(0, 1, 2, 3)):
    """
    Three seeds of each method; final accuracies are 0.2, for two families 0.3 and 0.1, plus the gain. pass@16 is 0.5, with
    retries 0.6. `rise`: how much more every further seed gains.
    """
    rows = []
    families = {"all": 0.2, "clock": 0.3, "sums": 0.1}
    for (method, gain), seed, step, family in itertools.product(gains.items(), (1, 2, 3), steps, families):
        level, own = families[family], gain + rise * (seed - 2) * (gain > 0.1)
        row = {"method": method, "prompt_set": "mixture", "seed": seed, "step": step, "family": family}
        row |= {"accuracy": level + own * step / steps[-1], "frac_zero_variance": level if step == 0 else None}
        row["rate"] = 3e-4
        row |= {"frac_zero_advantage_groups": 0.75, "explained_variance": 0.125, "entropy": 0.5}
        row |= {"cpu_seconds": (11.0 + seed) * step, "generated_tokens": 1000 * step, "rollouts": 256 * step}
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
    without = language_tables.language_table(runs[runs["method"] != names.GRPO_8], "mixture").splitlines()
    assert cells(without[0])[3:5] == ["against GRPO n=4", "pass@16"], "no column about a method without runs"
    families = language_tables.family_table(runs, "mixture").splitlines()
    assert cells(families[2]) == ["clock", "30%", "0.300", "0.400", "0.400", "0.500", "0.400"]
    assert cells(families[3]) == ["sums", "10%", "0.100", "0.200", "0.200", "0.300", "0.200"]


def test_rates_are_compared_with_one_learning_rate_per_method():
    runs = language_runs(GAINS)
    runs.loc[runs["method"] == names.GRPO_4, "rate"] = 1e-4
    table = [cells(row) for row in language_tables.rates_table(runs).splitlines()]
    assert table[2] == ["before training", "", "", "0.200", "", "0.500", "", ""]
    assert table[3] == [names.GRPO_4, "1e-4", "3", "0.300", "1.00×", "0.500", "0.50", "12.0"]
    better = ["0.400 (**+0.100 ± 0.000**)", "0.50×", "0.500 (+0.000 ± 0.000)"]
    assert table[5] == [names.POSTERIOR, "3e-4", "3", *better, "0.50", "12.0"]
    in_readme = [cells(row) for row in language_tables.rates_table(runs, for_readme=True).splitlines()]
    assert in_readme[5] == [names.POSTERIOR, "3e-4", *better]
    fewer = runs[(runs["method"] != names.GRPO_8) | (runs["seed"] < 3)]
    in_readme = [cells(row)[0] for row in language_tables.rates_table(fewer, for_readme=True).splitlines()]
    assert in_readme[2:] == ["before training", names.GRPO_4, names.POSTERIOR, names.RETRIES]
    assert "3 steps at the learning rate in the table" in language_tables.caption(runs, "mixture", list(GAINS))
    runs.loc[runs["seed"] == 2, "rate"] = 2e-4
    with pytest.raises(ValueError, match="too many values"):
        language_tables.rates_table(runs)


def test_language_model_sentences():
    runs = language_runs(GAINS, steps=(0, 1, 2))
    lines = language_tables.language_verdict(runs, "mixture").splitlines()
    assert lines[0] == "- Before training, 20% of the groups of four rollouts have zero reward variance (exact)."
    half = "accuracy after half of the steps, compared with GRPO n=8 after all steps: {} ± 0.000."
    both = "GRPO n=4 ({0} ± 0.000), GRPO n=8 ({0} ± 0.000)"
    better = f"significantly better than {both.format('+0.100')}"
    assert lines[1] == f"- **{names.POSTERIOR}**: {better}; {half.format('+0.000')}"
    assert lines[2] == (
        f"- **{names.RETRIES}**: no significant difference from {both.format('+0.000')}; significantly worse than "
        f"{names.POSTERIOR} (-0.100 ± 0.000); pass@16 {better}, {names.POSTERIOR} (+0.100 ± 0.000); {half.format('-0.050')}"
    )
    not_evaluated = language_tables.language_verdict(language_runs(GAINS, steps=(0, 1, 2, 3)), "mixture")
    assert "half" not in not_evaluated
    two_seeds = language_tables.language_verdict(runs[runs["seed"] < 3], "mixture")
    assert len(two_seeds.splitlines()) == 1, "Two seeds have no interval."


def test_longer_answers_are_a_sentence_from_three_seeds_on():
    long = language_runs({names.GRPO_4: 0.1, names.BATCH: 0.2}, rise=0.01)
    long["prompt_set"] = language_model.LONG_SET
    runs = pd.concat([language_runs(GAINS | {names.BATCH: 0.2}), long])
    runs = pd.concat([runs, runs[runs["prompt_set"] == "mixture"].assign(prompt_set="hard")])
    *_, last = language_tables.readme_sentences(runs).splitlines()
    assert "4 tokens on average, accuracy 0.200 before training" in last
    assert "significantly better than GRPO n=4 (+0.100 ± 0.025), in pass@16 no significant difference" in last
    fewer = runs[(runs["prompt_set"] != language_model.LONG_SET) | (runs["seed"] < 3)]
    assert len(language_tables.readme_sentences(fewer).splitlines()) == 1


def test_captions_name_model_answers_and_seeds():
    """By seed the posterior gains 0.09, 0.10 and 0.11 more: half an interval is 4.303 · 0.01 / √3 = 0.025."""
    runs = language_runs(GAINS, rise=0.01)
    text = language_tables.caption(runs, "mixture", list(GAINS))
    assert "SmolLM2-135M-Instruct" in text and "answers of about 4 tokens, 3 seeds." in text
    assert "from GRPO n=4, depending on the method, is 0.000 to 0.025 in accuracy, 0.000 in pass@16." in text
    fewer = runs[(runs["method"] != names.RETRIES) | (runs["seed"] < 3)]
    assert "2 to 3 seeds" in language_tables.caption(fewer, "mixture", list(GAINS))


SUFFIX = language_tables.PAPER_SUFFIX
PAPER_GAINS = {names.GRPO_4 + SUFFIX: 0.1, names.GRPO_16 + SUFFIX: 0.1, names.ALGORITHM_2 + SUFFIX: 0.2}


def test_the_paper_protocol_is_a_section_as_soon_as_runs_are_stored():
    assert language_tables.paper_section(language_runs(GAINS)) == ""
    assert language_tables.paper_section(language_runs({names.ALGORITHM_2 + SUFFIX: 0.2})) == "", "no reference"
    runs = pd.concat([language_runs(GAINS), language_runs(PAPER_GAINS, rise=0.01, steps=(0, 20, 40, 60))])
    text = language_tables.paper_section(runs)
    table = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert table[2][:6] == ["before training", "", "0.200", "", "0.500", ""]
    assert table[3][:10] == ["GRPO n=4", "3", "0.300", "", "0.500", "", "256", "60", "0.75", "0.50"]
    assert table[5][:6] == [names.ALGORITHM_2, "3", "0.400", "**+0.100 ± 0.025**", "0.500", "+0.000 ± 0.000"]
    assert (
        "60 steps at learning rate 3e-4, answers of about 4 tokens, 3 seeds. With these seeds, the smallest significant"
        in text
    )
    assert f"**{names.ALGORITHM_2}**: significantly better than GRPO n=4 (+0.100 ± 0.025), GRPO n=16" in text
    assert SUFFIX not in text and "half of the steps" not in text
    in_readme = [cells(line) for line in language_tables.paper_readme_table(runs).splitlines()]
    assert in_readme[2] == ["GRPO n=4", "0.300", "0.500", "1.0×", "1.0×"]
    assert in_readme[4] == [names.ALGORITHM_2, "0.400 (**+0.100 ± 0.025**)", "0.500 (+0.000 ± 0.000)", "1.0×", "1.0×"]
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


def test_stored_runs_have_one_row_per_evaluation_and_family(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "RESULTS", tmp_path)
    step = {
        "generated_tokens": 40,
        "rollouts": 10,
        "cpu_seconds": 1.0,
        "frac_zero_advantage_groups": 0.75,
        "entropy": 0.5,
    }
    share = {"all": 0.6, "clock": 0.6}
    evaluations = [
        {"step": s, "accuracy": 0.1, "by_family": {"clock": 0.1}, "frac_zero_variance": share}
        | {f"pass@{k}": 0.5 for k in (1, 4, 16, 64)}
        for s in (0, 1)
    ]
    for method in (names.ALGORITHM_2 + SUFFIX, "GRPO n=4"):
        record = {"method": method, "prompt_set": "mixture", "seed": 1, "rate": 3e-4}
        text = json.dumps(record | {"steps": [step], "evaluations": evaluations})
        (tmp_path / f"{method[:4]}.json").write_text(text)
    rows = language_model.results(tmp_path, paper_protocol=True)
    assert {row["method"] for row in rows} == {names.ALGORITHM_2 + SUFFIX, names.GRPO_4 + SUFFIX}
    assert {row["method"] for row in language_model.results(tmp_path)} == {names.ALGORITHM_2 + SUFFIX, names.GRPO_4}
    assert {row["cpu_seconds"] for row in rows if row["step"] == 1} == {1}
    scaled = language_model.results(tmp_path, cpu_scale=1.5)
    assert {row["cpu_seconds"] for row in scaled if row["step"] == 1} == {1.5}, "of a faster machine"
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
        ("language_rates", language_model.EQUAL_TOKENS),
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
        args = AdaGRPOConfig(str(tmp_path), **run.COMMON | language_model.task("mixture").options | batch)
        assert args.generation_batch_size // args.num_generations == 16


def test_short_runs_of_the_language_model():
    """By their rate, then as in the main table; only where they ended."""
    rows = []
    for method, rate, gain in (("GRPO n=8", 3e-4, 0.2), ("GRPO n=4", 3e-4, 0.1), ("GRPO n=8", 1e-4, 0.0)):
        for step in (0, 50):
            row = {"method": method, "rate": rate, "step": step, "accuracy": 0.1 + gain * (step > 0), "pass@16": 0.5}
            row |= {"prompt_set": "mixture", "seed": 0, "cpu_seconds": 450.0 * (step > 0)}
            row["generating_seconds"] = math.nan if rate > 2e-4 else 2.0
            rows += [row | {"family": family} for family in ("all", "clock")]
    table = language_tables.pilot_table(pd.DataFrame(rows)).splitlines()
    assert [cells(row) for row in table[2:]] == [
        ["before training", "", "0.100", "0.500", ""],
        ["GRPO n=8", "1e-4", "0.100", "0.500", "22%"],
        ["GRPO n=4", "3e-4", "0.200", "0.500", "–"],
        ["GRPO n=8", "3e-4", "0.300", "0.500", "–"],
    ]


def test_a_dominated_run_is_worse_in_one_measure_and_better_in_none():
    rows = []
    ends = {(names.BATCH, 3e-4): (0.3, 0.5), (names.GRPO_4, 3e-4): (0.3, 0.4), (names.GRPO_4, 1e-4): (0.2, 0.6)}
    for (method, rate), (accuracy, pass_at_16) in ends.items():
        for step, family in itertools.product((0, 150), ("all", "clock")):
            row = {"method": method, "rate": rate, "prompt_set": "mixture", "seed": 9, "step": step, "family": family}
            row |= {"accuracy": accuracy if step else 0.1, "pass@16": pass_at_16 if step else 0.5}
            rows.append(row | {"generated_tokens": 200 * step, "entropy": 0.75})
    table = language_tables.frontier_table(pd.DataFrame(rows)).splitlines()
    assert [cells(row) for row in table[2:]] == [
        ["before training", "", "", "", "", "0.100", "0.500", ""],
        [names.GRPO_4, "1e-4", "150", "30", "0.75", "0.200", "0.600", "yes"],
        [names.GRPO_4, "3e-4", "150", "30", "0.75", "0.300", "0.400", ""],
        [names.BATCH, "3e-4", "150", "30", "0.75", "0.300", "0.500", "yes"],
    ]


def test_before_training_is_the_mean_of_seeds_whose_weights_differ():
    rows = [(1, 0, 0.1), (1, 0, 0.1), (2, 0, 0.4), (2, 50, 0.9)]
    runs = pd.DataFrame(rows, columns=["seed", "step", "accuracy"]).assign(prompt_set="mixture")
    assert before_training(runs, "mixture")["accuracy"] == pytest.approx(0.25)


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert formatting.show((-0.0001, 0.01), sign=True) == "+0.000 ± 0.010"


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
        re.sub(r"(<!-- (?:overview|language-[\w-]+|verdict) -->\n).*?(<!-- end -->)", r"\1\2", published, flags=re.S)
    )
    monkeypatch.setattr(overview, "README", readme)
    monkeypatch.setattr(overview, "FIGURES", tmp_path)
    overview.main()
    assert readme.read_text() == published


@pytest.mark.parametrize("module", [staleness, effective_sample_size], ids=lambda module: module.NAME)
def test_tables_of_the_vllm_page_are_those_of_the_stored_data(module):
    assert f"-->\n{module.table(load_rows(module.NAME))}\n<!-- end -->" in module.PAGE.read_text()


def test_weights_of_the_correction_modes_by_hand():
    """Completions of two and three tokens: ratios 2 and 2 (product 4, above the bound of 3), and 1, 1 and 0.5."""
    log_ratios = [np.log([2.0, 2.0]), np.log([1.0, 1.0, 0.5])]
    expected = {
        "sequence_mask": [0, 0, 0.5, 0.5, 0.5],
        "sequence_truncate": [3, 3, 0.5, 0.5, 0.5],
        "token_mask": [2, 2, 1, 1, 0.5],
        "token_truncate": [2, 2, 1, 1, 0.5],
    }
    for mode, weights in expected.items():
        assert effective_sample_size.token_weights(log_ratios, mode) == pytest.approx(weights), mode
    assert effective_sample_size.token_weights([np.log([4.0])], "token_mask") == [0]
    assert effective_sample_size.ess_ratio(np.array([1.0, 0.0, 1.0, 0.0])) == 0.5
