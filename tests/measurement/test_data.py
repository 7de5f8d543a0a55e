"""`ada_trl.data` on local files of OpenR1-Math-220k's schema: exactly the right problems, whatever interrupts it."""

import json
import logging
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_dataset

from ada_trl.data import main
from ada_trl.mathematics.problems import Problem, load_problems, normalise
from ada_trl.mathematics.prompts import to_prompt
from ada_trl.measurement.arguments import SelectionArguments
from ada_trl.measurement.training_set import clean, run, select

from ..helpers import Interrupted, ScriptedSampler, tiny_model, tiny_tokenizer


# With the trailing digit of the first summand: correct completions of 8.
SCRIPT = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 8, 8: 0, 9: 1}


def counts(text):
    return SCRIPT[int(text.split("+")[0]) % 10]


def openr1_row(problem, answer, solution=None, verified=(True, True)):
    """All columns of the data set's card."""
    generations = [f"<think>\n…\n</think>\n\n\\boxed{{{answer}}}"] * len(verified)
    return {
        "problem": problem,
        "solution": f"We add, so \\boxed{{{answer}}}." if solution is None else solution,
        "answer": answer,
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "source": "olympiads",
        "uuid": "f4e1ab2c",
        "is_reasoning_complete": [True] * len(verified),
        "generations": generations,
        "correctness_math_verify": list(verified),
        "correctness_llama": None,
        "finish_reasons": None,
        "correctness_count": sum(verified),
        "messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": generations[0]}],
    }


ROWS = [openr1_row(f"{a}+{a + 1}=", str(2 * a + 1)) for a in range(20)]
# One row for each filter, and two that look suspicious but are fine.
FLAWED = [
    openr1_row("", "1"),
    openr1_row("90+1=", None, solution="none"),
    openr1_row("1+1=" + "0" * 700, "2"),
    openr1_row("91+1=", "92", verified=(False, False)),
    openr1_row("92+1=", "$$", solution="by inspection"),
    openr1_row("94+1=", "Proof", solution="by inspection"),
    openr1_row("93+1=", "94", solution="so it is \\boxed{95}"),
    openr1_row(" 3+4=\n", "7"),
]
FINE = [
    openr1_row("31+1=", "32", solution="a proof without a box"),
    openr1_row("32+1=", "33", verified=(False, True)),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model directory and the data as JSON Lines."""
    directory = tmp_path_factory.mktemp("data")
    tiny_tokenizer().save_pretrained(directory / "model")
    tiny_model().save_pretrained(directory / "model")
    write_jsonl(directory / "openr1.jsonl", ROWS[:7] + FLAWED[:4] + ROWS[7:] + FLAWED[4:] + FINE)
    return directory


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(files, output_dir, **overrides):
    options = {
        "model_name_or_path": str(files / "model"),
        "dataset_name": str(files / "openr1.jsonl"),
        "output_dir": str(output_dir),
        "prompt_format": "plain",
        "num_samples": 8,
        "backend": "transformers",
    }
    return SelectionArguments(**options | overrides)


def scripted(**options):
    return lambda *args: ScriptedSampler(counts, 8, **options)


def never(*args):
    raise AssertionError("Nothing should be sampled.")


def written(directory):
    return load_dataset(str(directory), split="train").to_list()


# Which problems


def test_it_keeps_exactly_the_problems_in_the_range(files, tmp_path):
    run(arguments(files, tmp_path, max_pass_rate=0.375), scripted())
    kept = written(tmp_path)
    # The file has its flawed rows in two places; 91 and 93 are sound where not all evidence is asked for.
    order = (*range(7), 91, *range(7, 20), 93, 31, 32)
    expected = [a for a in order if 0 < SCRIPT[a % 10] / 8 <= 0.375]
    assert [row["problem"] for row in kept] == [f"{a}+{a + 1 if a < 20 else 1}=" for a in expected]
    assert [row["pass_rate"] for row in kept] == [SCRIPT[a % 10] / 8 for a in expected]
    assert [row["answer"] for row in kept] == [str(sum(map(int, row["problem"][:-1].split("+")))) for row in kept]
    assert [row["prompt"] for row in kept] == [row["problem"] for row in kept]
    assert len({row["id"] for row in kept}) == len(kept)


def test_every_filter_drops_what_it_should_and_says_so(files, tmp_path):
    run(arguments(files, tmp_path, max_pass_rate=0.375, strict=True), scripted())
    numbers = json.loads((tmp_path / "selection.json").read_text())
    assert numbers == {
        "loaded": 30,
        "no problem or no answer": 3,
        "more than 700 tokens": 1,
        "no recorded solution verified": 1,
        "answer not verifiable": 1,
        "solution disagrees with the answer": 1,
        "duplicate": 1,
        "sampled": 22,
        "pass rate at most 0": 4,
        "pass rate above 0.375": 8,
        "kept": 10,
    }
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\ntask_categories:")
    assert "| dropped: duplicate | 1 |" in card and "| kept | 10 |" in card and "# 10 problems" in card
    assert (tmp_path / "pass_rates.png").read_bytes().startswith(b"\x89PNG")


EVIDENCE = {  # answer, solution, verified: kept with which answer, and what strict says
    "all": (("2", "\\boxed{2}", (True, True)), "2", None),
    "answer and records, no solution": (("2", "by inspection", (True, True)), "2", None),
    "records failed, solution agrees": (("2", "\\boxed{2}", (False, False)), "2", "no recorded solution verified"),
    "records failed, no solution": (("2", "by inspection", (False, False)), None, "no recorded solution verified"),
    "records failed, solution disagrees": (("2", "\\boxed{3}", (False, False)), None, "no recorded solution verified"),
    "solution disagrees": (("2", "\\boxed{3}", (True, False)), "2", "solution disagrees with the answer"),
    "nothing recorded": (("2", "\\boxed{2}", ()), "2", None),
    "answer unreadable, solution readable": (
        ("$$", "\\boxed{3}, so \\boxed{2}", (True,)),
        "2",
        "answer not verifiable",
    ),
    "answer unreadable, no solution": (("$$", "by inspection", (True,)), None, "answer not verifiable"),
    "both unreadable": (("$$", "\\boxed{}", (True,)), None, "answer not verifiable"),
}


@pytest.mark.parametrize("case", EVIDENCE)
def test_a_problem_goes_when_both_references_and_solution_fail_and_strictly_when_one_does(case):
    (answer, solution, verified), kept_as, strict_filter = EVIDENCE[case]
    problem = Problem("1+1=", answer, {"solution": solution, "correctness_math_verify": list(verified)})
    kept, dropped = clean([problem], tiny_tokenizer(), 700)
    assert [p.answer for p in kept] == ([] if kept_as is None else [kept_as])
    assert dropped["neither references nor solution verified"] == (kept_as is None)
    kept, dropped = clean([problem], tiny_tokenizer(), 700, strict=True)
    assert bool(kept) == (strict_filter is None)
    assert {name for name, number in dropped.items() if number} == ({strict_filter} if strict_filter else set())


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [(0, 0.125, [1]), (0.125, 0.25, [2]), (0, 0.124, None), (0.5, 1, [5, 6, 8]), (-1, 0, [0]), (0.75, 0.99, None)],
)
def test_the_range_is_open_below_and_closed_above(low, high, kept):
    rates = np.array(sorted(set(SCRIPT.values()))) / 8
    if kept is None:
        with pytest.raises(ValueError, match=f"None of 8 problems has {low} < pass rate <= {high}: .* Widen"):
            select(rates, low, high)
    else:
        assert (rates[select(rates, low, high)] * 8).tolist() == kept


def test_the_papers_ranges_with_sixteen_samples():
    rates = np.arange(17) / 16
    assert select(rates, 0, 0.125).tolist() == [1, 2]
    assert select(rates, 0, 0.313).tolist() == [1, 2, 3, 4, 5]
    assert select(rates, 0, 0.375).tolist() == [1, 2, 3, 4, 5, 6]


def test_answers_with_several_references_need_one_that_can_be_verified():
    problems = [Problem(f"{i}+1=", answer, {}) for i, answer in enumerate([["$$", "2"], ["$$", "$"], ["3"], []])]
    kept, dropped = clean(problems, tiny_tokenizer(), 700)
    assert [problem.text for problem in kept] == ["0+1=", "2+1="]
    assert dropped["neither references nor solution verified"] == 1 and dropped["no problem or no answer"] == 1


def test_normalisation_merges_spelling_and_nothing_else():
    assert normalise(" a\n\tb\u00a0c ") == normalise("a b c") == normalise("\uff41 b c")
    assert len({normalise(text) for text in ("x", "X", "x'", "x 1", "x1")}) == 5


def test_the_chat_format_is_the_papers(files, tmp_path):
    directory = tmp_path / "chat"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    run(arguments(files, tmp_path / "out", model_name_or_path=str(directory), prompt_format="chat"), scripted())
    kept = written(tmp_path / "out")
    assert kept[0]["prompt"] == to_prompt("1+2=") and kept[0]["problem"] == "1+2="
    with pytest.raises(ValueError, match="has no chat template.*--prompt_format plain"):
        run(arguments(files, tmp_path / "other", prompt_format="chat"), scripted())


# Twice, and interrupted


def content(directory):
    """What a selection is, file by file; the samples in order of their position."""
    kept = {name: (directory / name).read_bytes() for name in ("README.md", "selection.json", "pass_rates.png")}
    lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()[1:]]
    kept["samples"] = sorted(lines, key=lambda row: row["index"])
    return kept | {"rows": written(directory)}


@pytest.fixture(scope="module")
def uninterrupted(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(arguments(files, directory), scripted())
    return content(directory)


def test_twice_in_a_row_gives_the_same(files, tmp_path, uninterrupted):
    run(arguments(files, tmp_path), scripted(seed=1))  # problems finish in another order
    assert content(tmp_path) == uninterrupted
    run(arguments(files, tmp_path), never)
    assert content(tmp_path) == uninterrupted


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_at_random_points(seed, files, tmp_path, uninterrupted, monkeypatch):
    """Sampling or verification stops, or the last write is torn: nothing is done twice, and the result is the same."""
    rng = random.Random(seed)
    monkeypatch.setattr("ada_trl.measurement.measure.VERIFY_TOGETHER", 40)
    verify, sampled, torn = sys.modules["ada_trl.measurement.measure"].verify_answers, Counter(), 0
    scored = Counter()

    def failing_verify(completions, references):
        if rng.random() < 0.4:
            raise Interrupted
        scored.update(references)
        return verify(completions, references)

    monkeypatch.setattr("ada_trl.measurement.measure.verify_answers", failing_verify)
    for _ in range(100):
        samplers = []

        def sampler(*args):
            samplers.append(ScriptedSampler(counts, 8, fail_after=rng.randrange(12), seed=rng.randrange(99)))  # noqa: B023
            return samplers[0]  # noqa: B023

        try:
            run(arguments(files, tmp_path), sampler)
            break
        except Interrupted:
            sampled.update(index for sampler in samplers for index in sampler.finished)
            path = tmp_path / "samples.jsonl"
            data = path.read_bytes() if path.exists() else b""  # interrupted before the first sample
            if rng.random() < 0.5 and data.count(b"\n") > 1:
                path.write_bytes(data[: -rng.randrange(1, 20)])
                torn += 1
        finally:
            assert all(sampler.closed for sampler in samplers)
    else:
        raise AssertionError("It never finished.")
    sampled.update(index for sampler in samplers for index in sampler.finished)
    assert set(sampled) == set(range(24))
    assert sampled.total() == 24 + torn
    assert content(tmp_path) == uninterrupted


def test_another_range_needs_no_new_samples(files, tmp_path):
    run(arguments(files, tmp_path / "easy", max_pass_rate=0.375), scripted())
    hard = arguments(files, tmp_path / "hard", samples_dir=str(tmp_path / "easy"), max_pass_rate=0.125)
    run(hard, never)
    assert {row["pass_rate"] for row in written(tmp_path / "hard")} == {0.125}


def test_load_dataset_never_serves_another_selection(files, tmp_path):
    """Neither an earlier one of the same directory nor one of a directory with the same name, out of its cache."""
    first = arguments(files, tmp_path / "a" / "set", max_pass_rate=0.375)
    run(first, scripted())
    assert len(written(tmp_path / "a" / "set")) == 12
    other = arguments(files, tmp_path / "b" / "set", samples_dir=first.output_dir, max_pass_rate=0.25)
    run(other, never)
    assert len(written(tmp_path / "b" / "set")) == 9
    run(arguments(files, first.output_dir, max_pass_rate=0.125), never)
    assert len(written(tmp_path / "a" / "set")) == 6


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"num_samples": 4}, "num_samples 8, but this run has 4"),
        ({"temperature": 0.6}, r"temperature 1\.0, but this run has 0\.6"),
        ({"seed": 1}, "seed 42, but this run has 1"),
        ({"max_problem_tokens": 5}, "prompts '.*', but this run has '.*'"),
    ],
)
def test_resuming_with_other_settings_is_refused(overrides, name, files, tmp_path):
    run(arguments(files, tmp_path), scripted())
    with pytest.raises(ValueError, match=name):
        run(arguments(files, tmp_path, **overrides), never)


def test_another_checkpoint_under_the_same_path_is_noticed(files, tmp_path):
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    tiny_model(seed=0).save_pretrained(model)
    run(arguments(files, tmp_path / "out", model_name_or_path=str(model)), scripted())
    tiny_model(seed=1).save_pretrained(model)
    with pytest.raises(ValueError, match="weights '.*', but this run has '.*'"):
        run(arguments(files, tmp_path / "out", model_name_or_path=str(model)), never)


def test_samples_drawn_anew_are_scored_anew(files, tmp_path):
    run(arguments(files, tmp_path), scripted())
    (tmp_path / "samples.jsonl").unlink()
    with pytest.raises(ValueError, match="samples.scores.jsonl was written with samples"):
        run(arguments(files, tmp_path), scripted())


# As a user runs it, with a model


def command_line(files, output_dir):
    return [
        f"--model_name_or_path={files / 'model'}",
        f"--dataset_name={files / 'openr1.jsonl'}",
        f"--output_dir={output_dir}",
        *("--backend=transformers", "--prompt_format=plain", "--max_new_tokens=3", "--num_samples=6"),
        *("--batch_size=4", "--min_pass_rate=-1", "--max_pass_rate=1"),
    ]


@pytest.mark.slow
def test_a_killed_command_continues(files, tmp_path, capsys):
    """The real command with a real model: killed while it samples, run again, and equal to one that was not."""
    samples = tmp_path / "killed" / "samples.jsonl"
    command = [sys.executable, "-m", "ada_trl.data", *command_line(files, tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not samples.exists() or samples.read_bytes().count(b"\n") < 4):
        time.sleep(0.001)
    process.kill()
    process.wait()
    before = samples.read_bytes()
    assert before.count(b"\n") >= 4
    main(command_line(files, tmp_path / "killed"))
    assert samples.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    main(command_line(files, tmp_path / "whole"))
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert len(written(tmp_path / "whole")) == 24
    assert "24  kept" in capsys.readouterr().out


def test_a_configuration_file(files, tmp_path):
    options = {"model_name_or_path": str(files / "model"), "dataset_name": str(files / "openr1.jsonl")}
    options |= {"backend": "transformers", "prompt_format": "plain", "max_new_tokens": 2, "max_problems": 3}
    (tmp_path / "select.yaml").write_text(json.dumps(options | {"output_dir": str(tmp_path / "o")}))
    main(["--config", str(tmp_path / "select.yaml"), "--min_pass_rate=-1", "--max_pass_rate=1", "--num_samples=2"])
    assert [row["problem"] for row in written(tmp_path / "o")] == ["0+1=", "1+2=", "2+3="]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"min_pass_rate": 0.5}, r"min_pass_rate \(0.5\) must be less than max_pass_rate \(0.375\)"),
        ({"num_samples": 0}, r"num_samples \(0\) must be at least 1"),
        ({"top_p": 0}, r"top_p \(0\) in \(0, 1\]"),
    ],
)
def test_bad_arguments(overrides, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(files, tmp_path, **overrides)


# Files and columns


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv", "saved", "saved with splits", "directory"])
def test_every_kind_of_local_data_set(kind, tmp_path):
    rows = [{"question": f"{i}+1=", "gt": i + 1, "other": "x"} for i in range(3)]
    dataset, path = Dataset.from_list(rows), tmp_path / f"data.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        write_jsonl(path, rows)
    elif kind in ("parquet", "csv"):
        getattr(dataset, f"to_{kind}")(path)
    elif kind == "saved":
        dataset.save_to_disk(path)
    elif kind == "saved with splits":
        DatasetDict(test=dataset.select([0]), train=dataset).save_to_disk(path)
    else:
        (path / "data").mkdir(parents=True)
        dataset.to_parquet(path / "data" / "train-00000-of-00001.parquet")
    problems, *columns = load_problems(str(path))
    assert [(p.text, p.answer) for p in problems] == [("0+1=", "1"), ("1+1=", "2"), ("2+1=", "3")]
    assert columns == ["question", "gt"]


def test_columns_are_found_and_named(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    write_jsonl(path, [{"prompt": "p", "problem": "q", "solution": "s", "gt": ["1", "2"], "answer": "a"}])
    with caplog.at_level(logging.INFO):
        problems, *columns = load_problems(str(path))
    assert columns == ["problem", "answer"] and problems[0].answer == "a"
    assert "the answer is column 'answer' (also there: gt, solution)" in caplog.text
    problems, *_ = load_problems(str(path), problem_column="prompt", answer_column="gt")
    assert (problems[0].text, problems[0].answer) == ("p", ["1", "2"])


def test_what_cannot_be_loaded_says_why(tmp_path):
    path = tmp_path / "d.jsonl"
    write_jsonl(path, [{"text": "p", "label": "q", "messages": [{"role": "user", "content": "p"}]}])
    with pytest.raises(
        ValueError, match="columns 'text', 'label', 'messages', but not any of .* Set --problem_column"
    ):
        load_problems(str(path))
    with pytest.raises(ValueError, match="but not 'gold' for the answer"):
        load_problems(str(path), problem_column="text", answer_column="gold")
    with pytest.raises(ValueError, match="holds list, not text"):
        load_problems(str(path), problem_column="messages", answer_column="label")
    (tmp_path / "d.txt").write_text("x")
    with pytest.raises(ValueError, match="is a .txt file"):
        load_problems(str(tmp_path / "d.txt"))
    DatasetDict(test=Dataset.from_dict({"problem": ["p"]})).save_to_disk(tmp_path / "s")
    with pytest.raises(ValueError, match="'train' is not a split of .*, which has 'test'"):
        load_problems(str(tmp_path / "s"))
