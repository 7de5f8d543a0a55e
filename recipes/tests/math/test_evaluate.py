"""`evaluate.py` on local files with the schema of the benchmarks: values computed by hand, interruptions, options."""

import sys

import numpy as np
import pandas as pd
import pytest

from ada_trl.recipes.math.evaluate import (
    ALL,
    DATASETS,
    EvaluateArguments,
    folder_name,
    main,
    run,
    short_names,
    tabulate,
)
from ada_trl.recipes.math.sampling import Measurement
from ada_trl.recipes.math.statistics import bootstrap_interval
from tests.helpers import save_tiny_model, write_jsonl

from .scripted import Interrupted, ScriptedSampler, never


# Correct completions of 4, by model and first summand. Two datasets, of 4 problems and of 2.
SMALL, LARGE = {10: 0, 11: 1}, {0: 0, 1: 1, 2: 2, 3: 4}
BASE = LARGE | SMALL
BETTER = {0: 1, 1: 1, 2: 3, 3: 4, 10: 0, 11: 3}


def scripted(model, tokenizer, args, **options):
    script = BETTER if model.endswith("better") else BASE
    return ScriptedSampler(lambda text: script[int(text.split("+")[0])], 4, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluation")
    for i, model in enumerate(("base", "better")):
        save_tiny_model(directory / model, seed=i)
    for name, column, firsts in (("large", "answer", LARGE), ("small", "gt", SMALL)):
        write_jsonl(directory / f"{name}.jsonl", [{"problem": f"{a}+{a}=", column: str(2 * a)} for a in firsts])
    return directory


def arguments(files, output_dir, **overrides):
    options = {
        "models": [str(files / "base"), str(files / "better")],
        "datasets": [str(files / "large.jsonl"), str(files / "small.jsonl")],
        "output_dir": str(output_dir),
        "prompt_format": "plain",
        "num_samples": 4,
        "save_every": 2,
    }
    return EvaluateArguments(**options | overrides)


@pytest.fixture(scope="module")
def results(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    return directory, run(arguments(files, directory), scripted)


def figure(results, metric, model, problems):
    """Value and interval of one row."""
    rows = results[
        (results["metric"] == metric) & (results["model"] == model) & (results["problems"] == problems)
    ].to_dict("records")
    assert len(rows) == 1
    return rows[0]["value"], (rows[0]["low"], rows[0]["high"])


# Metrics


@pytest.mark.parametrize(
    ("metric", "model", "problems", "expected"),
    [
        ("average@4", "base", "large", (0 + 1 + 2 + 4) / 16),
        ("average@4", "base", "small", (0 + 1) / 8),
        ("average@4", "better", "large", (1 + 1 + 3 + 4) / 16),
        ("average@4", "base", ALL, (4 * 7 / 16 + 2 * 1 / 8) / 6),  # by the number of problems: 4 and 2
        ("difference from base", "better", ALL, (4 * 2 / 16 + 2 * 2 / 8) / 6),
        # c of 4: 0, 1, 2, 4. pass@2 of each: 0, 1/2, 5/6, 1.
        ("pass@1", "base", "large", 7 / 16),
        ("pass@2", "base", "large", (0 + 1 / 2 + 5 / 6 + 1) / 4),
        ("pass@4", "base", "large", 3 / 4),
        ("pass@4", "base", ALL, 4 / 6),
    ],
)
def test_metrics_computed_by_hand(metric, model, problems, expected, results):
    assert figure(results[1], metric, model, problems)[0] == pytest.approx(expected)


def test_intervals_computed_by_hand(results):
    """Of 2 problems with pass rates 0 and 1/4, the mean is 0, 1/8 or 1/4 with probability 1/4, 1/2, 1/4."""
    _, table = results
    assert figure(table, "average@4", "base", "small")[1] == (0, 0.25)
    assert figure(table, "difference from base", "better", "small")[1] == (0, 0.5)  # of 0 and 1/2
    rates = [[0, 0.25, 0.5, 1], [0, 0.25]]
    assert figure(table, "average@4", "base", ALL)[1] == bootstrap_interval(rates)


def measurement(rewards):
    rewards = np.asarray(rewards, dtype=float)
    return Measurement(rewards, np.ones(rewards.shape), np.zeros(len(rewards), dtype=bool))


def test_paired_differences_are_narrower_than_the_models_intervals(files, tmp_path):
    """Two models whose pass rates differ by 0.25 on every problem: the difference is known exactly."""
    correct = np.random.default_rng(0).integers(0, 4, size=50)[:, None]
    measured = {"a": {"data": measurement(np.arange(4) < correct)}}
    measured["b"] = {"data": measurement(np.arange(4) < correct + 1)}
    table = tabulate(measured, arguments(files, tmp_path, pass_at=[1]))
    assert figure(table, "difference from a", "b", "data") == (0.25, (0.25, 0.25))
    low, high = figure(table, "average@4", "b", "data")[1]
    assert high - low > 0.1 and ALL not in set(table["problems"])


def test_the_papers_weighted_average(files, tmp_path):
    """Table 1, Qwen2.5-Math-1.5B: the benchmarks' numbers and sizes give the printed weighted averages."""
    sizes = {"math500": 500, "minerva_math": 272, "olympiadbench": 675, "aime": 230}
    for accuracies, printed in (([74.2, 34.4, 38.4, 16.2], 45.3), ([77.4, 36.5, 40.5, 17.5], 47.6)):
        measured = {
            name: measurement(np.full((size, 1), accuracy))
            for (name, size), accuracy in zip(sizes.items(), accuracies, strict=True)
        }
        args = arguments(files, tmp_path, num_samples=1)
        args.pass_at = []
        table = tabulate({"m": measured}, args)
        assert figure(table, "average@1", "m", ALL)[0] == pytest.approx(printed, abs=0.15)  # rounded inputs
    assert [name.split("/")[1] for name in DATASETS][:3] == list(sizes)[:3]


def test_a_data_set_with_the_name_of_the_total_is_listed_separately(files, tmp_path):
    for name, number in (("all", 1), ("other", 2)):
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{"problem": f"{a}+1=", "answer": str(a + 1)} for a in range(1, number + 1)]
        )
    names = [str(tmp_path / "all.jsonl"), str(tmp_path / "other.jsonl")]
    table = run(arguments(files, tmp_path / "out", datasets=names), scripted)
    sizes = dict(zip(table["problems"], table["number"], strict=True))
    assert (sizes[names[0]], sizes["other"], sizes[ALL]) == (1, 2, 3)


def test_difficulty_bins_of_a_column(files, tmp_path):
    rates = {1: 0.9, 2: 0.0, 3: 1}
    rows = [{"problem": f"{a}+{a}=", "answer": str(2 * a), "pass_rate": rate} for a, rate in rates.items()]
    write_jsonl(tmp_path / "d.jsonl", rows)
    table = run(arguments(files, tmp_path / "out", datasets=[str(tmp_path / "d.jsonl")]), scripted)
    assert figure(table, "average@4", "base", "pass rate 0")[0] == 0.5
    assert figure(table, "average@4", "base", "pass rate (0.5, 1]")[0] == (0.25 + 1) / 2
    assert figure(table, "difference from base", "better", "pass rate 0")[0] == 0.25
    assert sum("pass rate" in name for name in set(table["problems"])) == 2  # the others are empty


def test_unparsable_references_count_as_wrong_and_are_reported(files, tmp_path):
    (tmp_path / "d.csv").write_text("problem,answer\n3+3=,6\n2+2=,$$\n")
    table = run(arguments(files, tmp_path / "out", datasets=[str(tmp_path / "d.csv")]), scripted)
    assert figure(table, "average@4", "base", "d")[0] == figure(table, "unscored", "base", "d")[0] == 0.5


def test_lengths_and_truncation(files, tmp_path):
    table = run(arguments(files, tmp_path, max_new_tokens=2), scripted)
    # Completions "0", "2", "4", "8" and wrong ones "1", "3", "5" have one token, "20" to "23" two.
    assert figure(table, "tokens", "base", "large")[0] == 1
    assert figure(table, "truncated", "base", ALL)[0] == pytest.approx(2 / 6)


def test_written_files(results):
    directory, table = results
    pd.testing.assert_frame_equal(pd.read_csv(directory / "results.csv"), table)
    assert (directory / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_figure_is_missing(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(arguments(files, tmp_path), scripted)
    assert (tmp_path / "results.csv").exists() and not (tmp_path / "pass_at_k.png").exists()


# Interrupted and extended


def test_an_interruption_closes_the_sampler_and_models_are_added_without_sampling_again(files, tmp_path, results):
    sampler = scripted(str(files / "base"), None, None, fail_after=2)
    with pytest.raises(Interrupted):
        run(arguments(files, tmp_path, models=[str(files / "base")]), lambda *args: sampler)
    assert sampler.closed and len(sampler.sampled) == 2
    run(arguments(files, tmp_path, models=[str(files / "base")]), scripted)
    loaded = []

    def make(model, *args):
        loaded.append(model)
        return scripted(model, *args)

    table = run(arguments(files, tmp_path), make)
    assert loaded == [str(files / "better")]
    pd.testing.assert_frame_equal(table, results[1])
    pd.testing.assert_frame_equal(run(arguments(files, tmp_path), never), results[1])


# As a user runs it, with models


def test_the_command_with_real_models(files, tmp_path, capsys):
    command = ["--models", str(files / "base"), str(files / "better"), "--datasets", str(files / "large.jsonl")]
    command += ["--backend=transformers", "--prompt_format=plain", "--num_samples=6", "--max_new_tokens=3"]
    for name in "ab":
        main([*command, f"--output_dir={tmp_path / name}", "--batch_size=4", "--pass_at", "1", "5"])
    printed = capsys.readouterr().out
    assert "large (4)" in printed and "pass@5" in printed and "difference from base" in printed
    first, second = (pd.read_csv(tmp_path / name / "results.csv") for name in "ab")
    pd.testing.assert_frame_equal(first, second)
    samples = [pd.read_parquet(path) for path in sorted((tmp_path / "a").rglob("0*.parquet"))]
    assert len(samples) == 2 and not samples[0].equals(samples[1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pass_at": [8]}, r"pass_at \(\[8\]\) must lie between 1 and num_samples \(4\)"),
        ({"models": ["a", "a"]}, r"models \(\['a', 'a'\]\) must be distinct"),
    ],
)
def test_invalid_arguments_are_rejected(overrides, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(files, tmp_path, **overrides)


def test_no_problems(files, tmp_path):
    with pytest.raises(ValueError, match="has no usable problems .max_problems is 0"):
        run(arguments(files, tmp_path, max_problems=0), never)


def test_names():
    assert short_names(["a/b/c.jsonl", "x/c.d", "org/model"]) == ["c", "c.d", "model"]
    assert short_names(["a/final", "b/final"]) == ["a/final", "b/final"]
    names = ["a/b", "c/b", "a-b", "a\\b", "../a/b", ".."]
    assert len({folder_name(name) for name in names}) == len(names)
    assert all("/" not in folder_name(name) for name in names)
