"""
`select.py` on local files with the schema of OpenR1-Math-220k: selected problems, interruptions, options, file types.
"""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from datasets import Dataset, load_dataset

from ada_trl.recipes.math import sampling
from ada_trl.recipes.math.cleaning import clean
from ada_trl.recipes.math.problems import Problem, load_problems, normalize
from ada_trl.recipes.math.prompts import to_prompt, with_prompts
from ada_trl.recipes.math.sampling import SamplingArguments
from ada_trl.recipes.math.select import SelectArguments, in_range, main, run
from tests.helpers import ROOT, save_tiny_model, tiny_tokenizer, write_jsonl

from .scripted import Interrupted, ScriptedSampler, never


# By the last digit of the first summand: correct completions of 8.
SCRIPT = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 8, 8: 0, 9: 1}


def openr1_row(problem, answer, solution=None, verified=(True, True)):
    """The columns of the dataset's card that matter, and one that is dropped."""
    return {
        "problem": problem,
        "solution": f"We add, so \\boxed{{{answer}}}." if solution is None else solution,
        "answer": answer,
        "generations": [f"<think>\n…\n</think>\n\n\\boxed{{{answer}}}"] * len(verified),
        "correctness_math_verify": list(verified),
    }


ROWS = [openr1_row(f"{a}+{a + 1}=", str(2 * a + 1)) for a in range(20)]
# Rows that are removed, then rows that look suspicious but are usable.
FLAWED = [
    openr1_row("", "1"),
    openr1_row("90+1=", None, solution="none"),
    openr1_row("1+1=" + "0" * 700, "2"),
    openr1_row("94+1=", "Proof", solution="by inspection"),
    openr1_row("92+1=", "$$", solution="by inspection"),
    openr1_row(" 3+4=\n", "7"),
]
FINE = [
    openr1_row("31+1=", "32", solution="a proof without a box"),
    openr1_row("32+1=", "33", verified=(False, True)),
]
SUMS = [*range(20), 31, 32]  # first summands of the usable problems


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model directory and the data as JSON Lines."""
    directory = tmp_path_factory.mktemp("data")
    save_tiny_model(directory / "model")
    write_jsonl(directory / "openr1.jsonl", FLAWED[:4] + ROWS + FLAWED[4:] + FINE)
    return directory


def arguments(files, output_dir, **overrides):
    options = {
        "model_name_or_path": str(files / "model"),
        "dataset_name": str(files / "openr1.jsonl"),
        "output_dir": str(output_dir),
        "prompt_format": "plain",
        "num_samples": 8,
        "save_every": 5,
    }
    return SelectArguments(**options | overrides)


def scripted(*args, **options):
    return ScriptedSampler(lambda text: SCRIPT[int(text.split("+")[0]) % 10], 8, **options)


def written(directory):
    return load_dataset(str(directory), split="train").to_list()


# Which problems


def test_problems_in_the_range_are_selected_and_the_others_counted(files, tmp_path):
    run(arguments(files, tmp_path, max_pass_rate=0.375), scripted)
    rows = written(tmp_path)
    expected = [a for a in SUMS if 0 < SCRIPT[a % 10] / 8 <= 0.375]
    assert [row["problem"] for row in rows] == [f"{a}+{a + 1 if a < 20 else 1}=" for a in expected]
    assert [row["pass_rate"] for row in rows] == [SCRIPT[a % 10] / 8 for a in expected]
    assert [row["answer"] for row in rows] == [str(sum(map(int, row["problem"][:-1].split("+")))) for row in rows]
    assert all(row["prompt"] == row["problem"] and row["rollouts"] == 8 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    report = json.loads((tmp_path / "selection.json").read_text())
    assert report["problems"] == {
        "loaded": 28,
        "removed: no text or no answer": 3,
        "removed: more than 700 tokens": 1,
        "removed: neither references nor solution verified": 1,
        "removed: duplicate": 1,
        "sampled": 22,
        "without any reward": 0,
        "pass rate below 0.125": 4,
        "pass rate above 0.375": 8,
        "selected": 10,
    }
    assert report["problems_by_correct_completions"] == [4, 5, 3, 2, 2, 2, 2, 0, 2]
    assert report["settings"]["num_samples"] == 8


def test_answers_that_are_texts_or_lists_are_written_as_lists(files, tmp_path):
    write_jsonl(tmp_path / "d.jsonl", [openr1_row("1+2=", "3"), openr1_row("2+3=", ["5", "five"], "\\boxed{5}")])
    run(arguments(files, tmp_path / "out", dataset_name=str(tmp_path / "d.jsonl")), scripted)
    assert [row["answer"] for row in written(tmp_path / "out")] == [["3"], ["5", "five"]]


EVIDENCE = {  # answer, solution, verified: the answer with which the problem is kept
    "all": ("2", "\\boxed{2}", (True, True), "2"),
    "answer and records, no solution": ("2", "by inspection", (True, True), "2"),
    "records failed, solution agrees": ("2", "\\boxed{2}", (False, False), "2"),
    "records failed, no solution": ("2", "by inspection", (False, False), None),
    "records failed, solution disagrees": ("2", "\\boxed{3}", (False, False), None),
    "solution disagrees": ("2", "\\boxed{3}", (True, False), "2"),
    "nothing recorded": ("2", "\\boxed{2}", (), "2"),
    "answer unreadable, solution readable": ("$$", "\\boxed{3}, so \\boxed{2}", (True,), "2"),
    "answer unreadable, no solution": ("$$", "by inspection", (True,), None),
    "both unreadable": ("$$", "\\boxed{}", (True,), None),
    "several answers, one readable": (["$$", "2"], "", (), ["$$", "2"]),
    "a list without a readable answer": (["$$"], ["We add.", "So \\boxed{2}"], (True,), ["2"]),
    "several answers, none readable": (["$$", "$"], "", (), None),
}


@pytest.mark.parametrize("case", EVIDENCE)
def test_a_problem_without_verified_reference_and_solution_is_removed(case):
    answer, solution, verified, kept_as = EVIDENCE[case]
    columns = {"answer": answer, "solution": solution, "correctness_math_verify": list(verified)}
    kept, removed = clean([Problem("1+1=", columns)], tiny_tokenizer(), 700)
    assert [problem.columns["answer"] for problem in kept] == ([] if kept_as is None else [kept_as])
    assert removed["neither references nor solution verified"] == (kept_as is None)


def test_by_default_problems_are_solved_at_least_once():
    options = {"model_name_or_path": "m", "output_dir": "o", "num_samples": 8}
    assert SelectArguments(**options).min_pass_rate == 1 / 8
    assert SelectArguments(**options, min_pass_rate=0).min_pass_rate == 0


@pytest.mark.parametrize(
    ("low", "high", "selected"),
    [
        (1 / 16, 0.125, [1, 2]),  # the authors' hard set: 1 or 2 of 16
        (1 / 16, 0.313, [1, 2, 3, 4, 5]),  # their easy one
        (1 / 16, 0.375, [1, 2, 3, 4, 5, 6]),  # the paper's
        (0.125, 0.25, [2, 3, 4]),
        (0, 0, [0]),
        (0, 0.0625, [0, 1]),
        (0.01, 0.05, None),
        (0.95, 0.99, None),
    ],
)
def test_the_range_includes_both_ends(low, high, selected):
    rates = np.arange(17) / 16
    if selected is None:
        with pytest.raises(ValueError, match=f"None of 17 problems has {low} <= pass rate <= {high}: .* Widen"):
            in_range(rates, low, high)
    else:
        assert in_range(rates, low, high).tolist() == selected


def test_a_problem_that_is_missing_is_no_prompt():
    with pytest.raises(ValueError, match="'problem' has the value None"):
        with_prompts(Dataset.from_list([{"problem": "1+1="}, {"problem": None}]))


def test_normalization():
    assert normalize(" a\n\tb\u00a0c ") == normalize("a b c") == normalize("\uff41 b c")
    assert len({normalize(text) for text in ("x", "X", "x'", "x 1", "x1")}) == 5


def test_the_chat_format_is_the_papers(files, tmp_path):
    directory = tmp_path / "chat"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    run(arguments(files, tmp_path / "out", model_name_or_path=str(directory), prompt_format="chat"), scripted)
    rows = written(tmp_path / "out")
    assert rows[0]["prompt"] == to_prompt("1+2=") and rows[0]["problem"] == "1+2="
    with pytest.raises(ValueError, match="has no chat template. Set --prompt_format plain"):
        run(arguments(files, tmp_path / "other", prompt_format="chat"), scripted)


# Interrupted and repeated


def content(directory):
    """Completions, scores and selected problems."""
    samples = [load_dataset("parquet", data_files=str(directory / "samples" / "0*.parquet"), split="train").to_list()]
    scores = load_dataset("parquet", data_files=str(directory / "samples" / "scores.parquet"), split="train")
    return samples, scores.to_list(), written(directory)


@pytest.fixture(scope="module")
def uninterrupted(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(arguments(files, directory), scripted)
    return content(directory)


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_at_random_points(seed, files, tmp_path, uninterrupted, monkeypatch):
    """
    Sampling or scoring stops, or a write is left unfinished: no saved problem is sampled again, the result is equal.
    """
    rng = random.Random(seed)
    verify, sampled = sampling.math_accuracy_reward.__class__.__call__, []

    def failing_verify(self, *args, **kwargs):
        if rng.random() < 0.4:
            raise Interrupted
        return verify(self, *args, **kwargs)

    monkeypatch.setattr(sampling.math_accuracy_reward.__class__, "__call__", failing_verify)
    for _ in range(100):
        samplers = []

        def make(*args):
            samplers.append(scripted(fail_after=rng.randrange(4, 12)))  # noqa: B023
            return samplers[0]  # noqa: B023

        try:
            run(arguments(files, tmp_path, save_every=rng.choice([4, 5])), make)  # the first run's is kept
            break
        except Interrupted:
            (tmp_path / "samples" / ".00000005.parquet.tmp").write_bytes(b"torn")
        finally:
            assert all(sampler.closed for sampler in samplers)
            sampled += [text for sampler in samplers for text in sampler.sampled]
    assert len(sampled) == len(set(sampled)) == 22
    assert content(tmp_path) == uninterrupted


def test_other_selections_from_the_same_samples(files, tmp_path, uninterrupted):
    """The cache of `load_dataset` returns neither an earlier selection nor that of a directory with the same name."""
    first = tmp_path / "a" / "set"
    run(arguments(files, first), scripted)
    run(arguments(files, first), never)
    assert content(first) == uninterrupted
    run(arguments(files, tmp_path / "b" / "set", samples_dir=str(first), max_pass_rate=0.25), never)
    assert len(written(tmp_path / "b" / "set")) == 8
    run(arguments(files, first, max_pass_rate=0.125), never)
    assert [row["pass_rate"] for row in written(first)] == [0.125] * 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_samples": 4}, "num_samples 8, but this run has 4"),
        ({"temperature": 0.6}, r"temperature 1\.0, but this run has 0\.6"),
        ({"model_kwargs": '{"dtype": "bfloat16"}'}, "dtype None, but this run has 'bfloat16'"),
        ({"seed": 1}, "seed 42, but this run has 1"),
        ({"max_problem_tokens": 5}, "prompts '.*', but this run has '.*'"),
        ({"model_name_or_path": "other"}, "(model|weights) '.*', but this run has '.*'"),
    ],
)
def test_resuming_with_other_settings_is_rejected(overrides, message, files, tmp_path, monkeypatch):
    """Also with other weights under the same path."""
    model = files / "model"
    run(arguments(files, tmp_path / "out", model_name_or_path=str(model)), scripted)
    if "model_name_or_path" in overrides:
        model = tmp_path / "model"
        save_tiny_model(model, seed=1)
        stored = json.loads((tmp_path / "out/samples/settings.json").read_text()) | {"model": str(model)}
        (tmp_path / "out/samples/settings.json").write_text(json.dumps(stored))
        overrides = {"model_name_or_path": str(model)}
    with pytest.raises(ValueError, match=message):
        run(arguments(files, tmp_path / "out", **overrides), never)


# As a user runs it, with a model


def command_line(files, output_dir, *more):
    return [
        f"--model_name_or_path={files / 'model'}",
        f"--dataset_name={files / 'openr1.jsonl'}",
        f"--output_dir={output_dir}",
        *("--backend=transformers", "--prompt_format=plain", "--max_new_tokens=3", "--num_samples=6"),
        *("--batch_size=4", "--min_pass_rate=0", "--max_pass_rate=1", "--save_every=2", *more),
    ]


def start(files, output_dir, *more, module="ada_trl.recipes.math.select"):
    words = [sys.executable, "-m", module, *command_line(files, output_dir, *more)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_samples(process, output_dir):
    while not (saved := list(output_dir.glob("samples/0*.parquet"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(0.1)  # then it samples again: Python ignores an interrupt inside of `__del__`, which FileLock has
    return saved


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGINT", 130)])
def test_a_killed_command_continues(name, code, files, tmp_path, capsys):
    """The real command with a real model: stopped while it samples, run again, and equal to one that was not."""
    process = start(files, tmp_path / "killed", "--num_samples=200")
    saved = wait_for_samples(process, tmp_path / "killed")
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert code != 130 or error.rstrip().endswith("The same command continues with the samples saved so far.")
    before = {path: path.stat().st_mtime_ns for path in saved}
    main(command_line(files, tmp_path / "killed", "--num_samples=200"))
    assert {path: path.stat().st_mtime_ns for path in saved} == before
    main(command_line(files, tmp_path / "whole", "--num_samples=200"))
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert len(written(tmp_path / "whole")) == 22
    assert "22  selected" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_share_the_work(files, tmp_path):
    """Two processes, started with either name of the module, sample different files and end with the same result."""
    modules = ("ada_trl.recipes.math.select", "recipes.math.select")
    processes = [start(files, tmp_path / "shared", "--num_samples=100", module=module) for module in modules]
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    main(command_line(files, tmp_path / "alone", "--num_samples=100"))
    assert content(tmp_path / "shared") == content(tmp_path / "alone")


def test_a_configuration_file(files, tmp_path):
    options = {"model_name_or_path": str(files / "model"), "dataset_name": str(files / "openr1.jsonl")}
    options |= {"backend": "transformers", "prompt_format": "plain", "max_new_tokens": 2, "max_problems": 3}
    (tmp_path / "select.yaml").write_text(json.dumps(options | {"output_dir": str(tmp_path / "o")}))
    main(["--config", str(tmp_path / "select.yaml"), "--min_pass_rate=0", "--max_pass_rate=1", "--num_samples=2"])
    assert [row["problem"] for row in written(tmp_path / "o")] == ["0+1=", "1+2=", "2+3="]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--min_pass_rate=0.5", "min_pass_rate (0.5) and max_pass_rate (0.375) must satisfy 0 <= min <= max <= 1"),
        ("--min_pass_rate=-1", "min_pass_rate (-1.0)"),
        ("--max_pass_rate=31.3", "max_pass_rate (31.3)"),
        ("--max_pass_rate=nan", "max_pass_rate (nan)"),
        ("--num_samples=0", "num_samples (0) must be at least 1"),
        ("--top_p=0", "top_p (0.0) must be in (0, 1]"),
        ("--temperature=nan", "temperature (nan) must be at least 0."),
        ("--backend=cuda", "'cuda' (choose from"),
        ("--chat_template_kwargs={a: 1}", "chat_template_kwargs ({a: 1}) must be a JSON object"),
        ("--model_kwargs=[1]", "model_kwargs ([1]) must be a JSON object"),
        ("--seeed=1", "--seeed=1"),
    ],
)
def test_an_invalid_option_is_rejected(option, message, capsys):
    with pytest.raises((SystemExit, ValueError)) as ended:
        main(["--model_name_or_path=m", "--output_dir=o", option])
    assert message in capsys.readouterr().err + str(ended.value)


# Files and columns


PLAIN = SamplingArguments(output_dir="unused")


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv", "directory"])
def test_every_kind_of_local_data_set(kind, tmp_path):
    rows = [{"question": f"{i}+1=", "gt": i + 1, "other": "x"} for i in range(3)]
    dataset, path = Dataset.from_list(rows), tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        write_jsonl(path, rows)
    elif kind in ("parquet", "csv"):
        getattr(dataset, f"to_{kind}")(path)
    else:
        (path / "data").mkdir(parents=True)
        dataset.to_parquet(path / "data" / "train-00000-of-00001.parquet")
    problems = load_problems(str(path), PLAIN)
    assert [(p.text, p.columns) for p in problems] == [(f"{i}+1=", {"answer": str(i + 1)}) for i in range(3)]


def test_columns_are_found_and_logged(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    write_jsonl(path, [{"prompt": "p", "problem": "q", "solution": "s", "gt": ["1", "2"], "answer": "a"}])
    with caplog.at_level(logging.INFO):
        (problem,) = load_problems(str(path), PLAIN)
    assert (problem.text, problem.columns) == ("q", {"answer": "a", "solution": "s"})
    assert "the answer is column 'answer' (also present: gt, solution)" in caplog.text
    chosen = SamplingArguments(output_dir="unused", problem_column="prompt", answer_column="gt")
    (problem,) = load_problems(str(path), chosen)
    assert (problem.text, problem.answers) == ("p", ["1", "2"])


def test_the_name_of_a_file_is_not_a_pattern(tmp_path):
    for name in ("d[1].jsonl", "d1.jsonl", "s*.jsonl", "some.jsonl"):
        write_jsonl(tmp_path / name, [{"problem": name, "answer": "1"}])
    for name in ("d[1].jsonl", "s*.jsonl"):
        assert [problem.text for problem in load_problems(str(tmp_path / name), PLAIN)] == [name]


def test_errors_of_loading(tmp_path):
    path = tmp_path / "d.jsonl"
    write_jsonl(path, [{"text": "p", "label": "q", "other": [1, 2]}])
    for name, columns, message in (
        ("d.jsonl", {}, "columns 'text', 'label', 'other', but not any of .* Set --problem_column"),
        ("d.jsonl", {"problem_column": "text", "answer_column": "gold"}, "but not 'gold' for the answer"),
        ("d.jsonl", {"problem_column": "other", "answer_column": "label"}, "contains neither text nor conversations"),
        ("d.jsonl", {"dataset_split": "tset"}, "'tset'.*Should be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            load_problems(str(tmp_path / name), SamplingArguments(output_dir="unused", **columns))
