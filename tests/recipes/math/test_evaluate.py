"""`ada_trl.evaluate` on local files of the benchmarks' schema: hand-computed figures, whatever interrupts it."""

import json
import random
import sys
from collections import Counter

import numpy as np
import pytest

from ada_trl.evaluate import main
from ada_trl.measurement.accuracy import bootstrap_interval
from ada_trl.measurement.arguments import DATASETS, EvaluationArguments, short_names
from ada_trl.measurement.evaluation import file_name, run
from ada_trl.measurement.measure import EvalResult
from ada_trl.measurement.summary import AVERAGE, markdown, summarise

from ..helpers import Interrupted, ScriptedSampler, tiny_model, tiny_tokenizer


# Correct completions of 4, by model and first summand. Two data sets, of 4 problems and of 2.
SMALL, LARGE = {10: 0, 11: 1}, {0: 0, 1: 1, 2: 2, 3: 4}
BASE = LARGE | SMALL
BETTER = {0: 1, 1: 1, 2: 3, 3: 4, 10: 0, 11: 3}


def scripted(**options):
    """Makes the sampler of each model, which is told by its directory's name."""

    def make(model, tokenizer, args):
        script = BETTER if model.endswith("better") else BASE
        return ScriptedSampler(lambda text: script[int(text.split("+")[0])], 4, **options)

    return make


def never(*args):
    raise AssertionError("Nothing should be sampled.")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluation")
    for i, model in enumerate(("base", "better")):
        tiny_tokenizer().save_pretrained(directory / model)
        tiny_model(seed=i).save_pretrained(directory / model)
    for name, column, firsts in (("large", "answer", LARGE), ("small", "gt", SMALL)):
        rows = [{"problem": f"{a}+{a}=", column: str(2 * a), "idx": a} for a in firsts]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(files, output_dir, **overrides):
    options = {
        "models": [str(files / "base"), str(files / "better")],
        "datasets": [str(files / "large.jsonl"), str(files / "small.jsonl")],
        "output_dir": str(output_dir),
        "prompt_format": "plain",
        "num_samples": 4,
        "backend": "transformers",
    }
    return EvaluationArguments(**options | overrides)


@pytest.fixture(scope="module")
def results(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    return directory, run(arguments(files, directory), scripted())


# The figures


def test_averages_by_hand(results):
    _, figures = results
    base, better = figures["models"]["base"], figures["models"]["better"]
    assert base["large"]["average"] == (0 + 1 + 2 + 4) / 16
    assert base["small"]["average"] == (0 + 1) / 8
    assert better["large"]["average"] == (1 + 1 + 3 + 4) / 16
    assert better["small"]["average"] == 3 / 8
    # by the number of problems: 4 and 2
    assert base[AVERAGE]["average"] == pytest.approx((4 * 7 / 16 + 2 * 1 / 8) / 6)
    assert better[AVERAGE]["difference"]["value"] == pytest.approx((4 * 2 / 16 + 2 * 2 / 8) / 6)
    assert "difference" not in base["large"]
    assert figures["problems"] == {"large": 4, "small": 2}


def test_pass_at_k_by_hand(results):
    _, figures = results
    large = figures["models"]["base"]["large"]["pass_at"]
    # c of 4: 0, 1, 2, 4. pass@2 of each: 0, 1/2, 5/6, 1.
    assert large["1"]["value"] == 7 / 16
    assert large["2"]["value"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert large["4"]["value"] == 3 / 4
    assert figures["models"]["base"][AVERAGE]["pass_at"]["4"]["value"] == pytest.approx(4 / 6)
    assert list(large) == ["1", "2", "4"]


def test_intervals_by_hand(results):
    """Of 2 problems with pass rates 0 and 1/4, the mean is 0, 1/8 or 1/4 with probability 1/4, 1/2, 1/4."""
    _, figures = results
    assert figures["models"]["base"]["small"]["interval"] == (0, 0.25)
    # The differences of those two problems are 0 and 1/2.
    assert figures["models"]["better"]["small"]["difference"]["interval"] == (0, 0.5)
    rates = [[0, 0.25, 0.5, 1], [0, 0.25]]
    assert figures["models"]["base"][AVERAGE]["interval"] == bootstrap_interval(rates)


def test_paired_differences_are_narrower_than_the_models_intervals():
    """Two models whose pass rates differ by 0.25 on every problem: the difference is known exactly."""
    rng = np.random.default_rng(0)
    correct = rng.integers(0, 4, size=50)
    lengths = np.ones((50, 4), dtype=int)

    def measured(counts):
        return {"data": EvalResult(np.arange(4) < counts[:, None], lengths, 0)}

    figures = summarise(
        {"a": measured(correct), "b": measured(correct + 1)},
        pass_at=[1],
        max_new_tokens=5,
        difficulty_edges=[0, 1],
    )["models"]["b"]["data"]
    assert figures["difference"] == {"value": 0.25, "interval": (0.25, 0.25)}
    assert figures["interval"][1] - figures["interval"][0] > 0.1
    assert AVERAGE not in figures


def test_the_papers_weighted_average():
    """Table 1, Qwen2.5-Math-1.5B: the benchmarks' numbers and sizes give the printed weighted averages."""
    sizes = {"math500": 500, "minerva_math": 272, "olympiadbench": 675, "aime": 230}
    for accuracies, printed in (([74.2, 34.4, 38.4, 16.2], 45.3), ([77.4, 36.5, 40.5, 17.5], 47.6)):
        measured = {
            name: EvalResult(np.full((size, 1), accuracy), np.ones((size, 1)), 0)
            for (name, size), accuracy in zip(sizes.items(), accuracies, strict=True)
        }
        figures = summarise({"m": measured}, pass_at=[], max_new_tokens=9, difficulty_edges=[0, 1])
        assert figures["models"]["m"][AVERAGE]["average"] == pytest.approx(printed, abs=0.15)  # rounded inputs
    assert [name.split("/")[1] for name in DATASETS][:3] == list(sizes)[:3]


def test_difficulty_bins_do_not_flatter_anyone():
    """
    Two equal models with pass rate 1/2 everywhere. Binning by half of the first one's completions, and measuring it on
    the other half, shows 1/2 in every bin for both; on the same half it would show the bin's own pass rate.
    """
    rng = np.random.default_rng(0)
    measured = {
        label: {"data": EvalResult(rng.random((3000, 8)) < 0.5, np.ones((3000, 8)), 0)} for label in ("a", "b")
    }
    bins = summarise(measured, pass_at=[1], max_new_tokens=9, difficulty_edges=[0, 0.5, 1])["difficulty"]
    assert [b["pass_rate"] for b in bins] == ["0", "(0, 0.5]", "(0.5, 1]"]
    assert sum(b["problems"] for b in bins) == 3000
    for b in bins:
        for label, samples in (("a", 4), ("b", 8)):
            standard_error = 0.5 / np.sqrt(b["problems"] * samples)
            assert abs(b["models"][label]["average"] - 0.5) < 4 * standard_error


def test_difficulty_from_a_column(files, tmp_path):
    rows = [
        {"problem": f"{a}+{a}=", "answer": str(2 * a), "pass_rate": rate} for a, rate in ((1, 0.9), (2, 0.0), (3, 1))
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = run(arguments(files, tmp_path / "out", datasets=[str(tmp_path / "d.jsonl")]), scripted())
    averages = {b["pass_rate"]: b["models"]["base"]["average"] for b in figures["difficulty"] if b["problems"]}
    assert averages == {"0": 0.5, "(0.5, 1]": (0.25 + 1) / 2}
    assert "in the column `pass_rate`" in (tmp_path / "out" / "benchmarks.md").read_text()


def test_unparsable_references_count_as_wrong_and_are_reported(files, tmp_path):
    (tmp_path / "d.csv").write_text("problem,answer\n3+3=,6\n2+2=,$$\n")
    figures = run(arguments(files, tmp_path / "out", datasets=[str(tmp_path / "d.csv")]), scripted())
    assert figures["models"]["base"]["d"]["average"] == 0.5
    assert figures["unparsable"] == {"d": 1}
    assert "cannot be scored count as wrong: 1 in d." in (tmp_path / "out" / "benchmarks.md").read_text()


def test_lengths_and_truncation(files, tmp_path):
    figures = run(arguments(files, tmp_path, max_new_tokens=2), scripted())
    # ServerCompletions "0", "2", "4", "8" and wrong ones "1", "3", "5" take a token, "20" to "23" two.
    assert figures["models"]["base"]["large"]["mean_length"] == 1
    assert figures["models"]["base"][AVERAGE]["truncated"] == pytest.approx(2 / 6)


def test_the_report(results):
    directory, figures = results
    report = (directory / "benchmarks.md").read_text()
    assert report == markdown(figures)
    assert "| Model | large (4) | small (2) | weighted average (6) | Tokens | Truncated |" in report
    assert "| base | 43.8 [12.5, 81.2] | 12.5 [0.0, 25.0] | 33.3 [" in report
    assert "| *difference* | +12.5 [+0.0, +25.0] | +25.0 [+0.0, +50.0] |" in report
    assert "| Model | 0 (4) | (0.2, 0.5] (1) | (0.5, 1] (1) |" in report
    assert "its own accuracy here is that of the second half" in report
    loaded = json.loads((directory / "results.json").read_text())
    assert loaded["models"]["base"]["large"]["average"] == 7 / 16
    assert loaded["settings"]["num_samples"] == 4
    assert (directory / "results.png").read_bytes().startswith(b"\x89PNG")


# Twice, interrupted, extended


def content(directory):
    return {name: (directory / name).read_bytes() for name in ("benchmarks.md", "results.png")} | {
        "results": json.loads((directory / "results.json").read_text())["models"]
    }


@pytest.mark.parametrize("seed", range(2))
def test_interrupted_at_random_points(seed, files, tmp_path, results, monkeypatch):
    rng = random.Random(seed)
    verify, sampled, torn = sys.modules["ada_trl.measurement.measure"].verify_answers, Counter(), 0

    def failing_verify(completions, references):
        if rng.random() < 0.3:
            raise Interrupted
        return verify(completions, references)

    monkeypatch.setattr("ada_trl.measurement.measure.verify_answers", failing_verify)
    for _ in range(100):
        samplers = []

        def make(model, tokenizer, args):
            samplers.append((model, scripted(fail_after=rng.randrange(5), seed=seed)(model, tokenizer, args)))  # noqa: B023
            return samplers[-1][1]  # noqa: B023

        try:
            run(arguments(files, tmp_path), make)
            break
        except Interrupted:
            written = list(tmp_path.rglob("[!.]*.jsonl"))
            if not written:  # interrupted before the first sample
                continue
            path = written[rng.randrange(len(written))]
            if rng.random() < 0.3 and path.read_bytes().count(b"\n") > 1:
                path.write_bytes(path.read_bytes()[:-5])
                torn += ".scores" not in path.name
        finally:
            sampled.update({model: len(sampler.finished) for model, sampler in samplers})
            assert all(sampler.closed for _, sampler in samplers)
    assert sampled.total() == 2 * 6 + torn
    assert content(tmp_path) == content(results[0])


def test_a_model_is_added_without_sampling_the_others_again(files, tmp_path, results):
    run(arguments(files, tmp_path, models=[str(files / "base")]), scripted())
    asked = []

    def make(model, *args):
        asked.append(model)
        return scripted()(model, *args)

    run(arguments(files, tmp_path), make)
    assert asked == [str(files / "better")]
    assert content(tmp_path) == content(results[0])
    run(arguments(files, tmp_path), never)


def test_other_settings_are_refused(files, tmp_path):
    run(arguments(files, tmp_path), scripted())
    with pytest.raises(ValueError, match="top_p 1.0, but this run has 0.9"):
        run(arguments(files, tmp_path, top_p=0.9), never)
    with pytest.raises(ValueError, match="with prompts"):
        run(arguments(files, tmp_path, max_problems=1), never)


# As a user runs it, with models


def test_the_command_with_real_models(files, tmp_path, capsys):
    command = ["--models", str(files / "base"), str(files / "better"), "--datasets", str(files / "large.jsonl")]
    command += ["--backend=transformers", "--prompt_format=plain", "--num_samples=6", "--max_new_tokens=3"]
    main([*command, f"--output_dir={tmp_path / 'a'}", "--batch_size=4", "--pass_at", "1", "5"])
    assert "| Model | k = 1 | k = 5 |" in capsys.readouterr().out
    main([*command, f"--output_dir={tmp_path / 'b'}", "--batch_size=4", "--pass_at", "1", "5"])
    assert content(tmp_path / "a") == content(tmp_path / "b")
    samples = [
        path.read_text() for path in sorted(tmp_path.rglob("*large.jsonl-*.jsonl")) if ".scores" not in path.name
    ]
    assert len(samples) == 4
    assert samples[0].splitlines()[1:] == samples[2].splitlines()[1:] != samples[1].splitlines()[1:]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"labels": ["a"]}, r"labels \(\['a'\]\) must be distinct, one for each of the 2 models"),
        ({"labels": ["a", "a"]}, "must be distinct"),
        ({"pass_at": [8]}, r"pass_at \(\[8\]\) must lie between 1 and num_samples \(4\)"),
    ],
)
def test_bad_arguments(overrides, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(files, tmp_path, **overrides)


def test_names():
    assert short_names(["a/b/c.jsonl", "x/c.d", "org/model"]) == ["c", "c.d", "model"]
    assert short_names(["a/final", "b/final"]) == ["a/final", "b/final"]
    names = ["a/b", "a-b", "a\\b", "../a/b", "ü" * 300]
    assert len({file_name(name) for name in names}) == len(names)
    assert all(len(file_name(name)) < 80 and "/" not in file_name(name) for name in names)
