"""`ada-trl data` and `evaluate` with a reward function of one's own: any columns, conversations, async, a score on a scale."""

import json

import pytest
from datasets import load_dataset

from ada_trl.data import main as select_main
from ada_trl.measurement.arguments import EvaluationArguments, SelectionArguments
from ada_trl.measurement.evaluation import run as evaluate
from ada_trl.measurement.training_set import run as select

from ..helpers import ScriptedSampler, tiny_model, tiny_tokenizer


REWARDS = '''
def graded(prompts, completions, total, **kwargs):
    """1 for the total, 0.6 next to it, 0 for what cannot be read."""
    assert all(prompt.startswith(f"{total // 2}+") for prompt, total in zip(prompts, total))
    return [max(0.0, 1 - 0.4 * abs(int(text or 0) - right)) for text, right in zip(completions, total)]

async def conversational(completions, total, **kwargs):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [float(completion[0]["content"] == str(right)) for completion, right in zip(completions, total)]

def too_few(completions, **kwargs):
    return [1.0]

def often_silent(completions, total, **kwargs):
    return [None if right == 0 else 1.0 for right in total]
'''
RIGHT = {0: 0, 1: 1, 2: 2, 3: 4}  # of 4 completions, by the first summand; the wrong ones are off by one


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_rewards", raising=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{a}+{a}=", "total": 2 * a, "level": {"name": "easy"}} for a in RIGHT]
    talks = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    for name, content in (("sums", [*rows, rows[0], rows[0] | {"prompt": ""}]), ("talks", talks)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return tmp_path


def make(*args):
    return ScriptedSampler(lambda text: RIGHT[int(text.split("+")[0])], 4)


def selection(**options) -> SelectionArguments:
    known = {"model_name_or_path": "model", "dataset_name": "sums.jsonl", "output_dir": "out", "num_samples": 4}
    known |= {"reward_func": "my_rewards.graded", "max_pass_rate": 0.5}
    return SelectionArguments(**known | options)


def test_problems_are_selected_by_it_and_keep_their_columns(files):
    kept = select(selection(), make)
    assert kept["prompt"] == ["1+1=", "2+2="] and kept["pass_rate"] == [0.25, 0.5] and kept["draws"] == [4, 4]
    assert kept["total"] == [2, 4] and kept["level"] == [{"name": "easy"}] * 2
    assert load_dataset("out", split="train")["total"] == [2, 4]
    counts = json.loads((files / "out/selection.json").read_text())
    assert counts["no problem"] == 1 and counts["duplicate"] == 1 and counts["sampled"] == 4
    card = (files / "out/README.md").read_text()
    assert "right where `my_rewards.graded` gives more than 0.7" in card and "math" not in card.replace(
        "mathematics", ""
    )


def test_what_is_right_is_a_question_of_the_threshold_and_not_of_new_samples(files):
    select(selection(), make)
    kept = select(selection(positive_threshold=0.5, max_pass_rate=1.0), None)
    assert kept["pass_rate"] == [1.0] * 4, "All are at most off by one."


def test_a_function_that_was_edited_is_noticed(files):
    select(selection(), make)
    (files / "my_rewards.py").write_text(REWARDS.replace("1 - 0.4 *", "1 - 0.2 *"))
    import importlib
    import linecache

    import my_rewards

    linecache.clearcache()
    importlib.reload(my_rewards)
    with pytest.raises(ValueError, match="samples.scores.jsonl was written with source"):
        select(selection(), make)


def test_models_are_compared_by_it_on_conversations(files):
    args = EvaluationArguments(
        models=["model"], datasets=["talks.jsonl"], output_dir="out", num_samples=4, reward_func="my_rewards.conversational"
    )  # fmt: skip
    figures = evaluate(args, make)["models"]["model"]["talks"]
    assert figures["average"] == (0 + 1 + 2 + 4) / 16
    assert "right where `my_rewards.conversational` gives" in (files / "out/benchmarks.md").read_text()


def test_a_problem_that_is_not_scored_counts_as_wrong_and_is_said(files):
    args = EvaluationArguments(
        models=["model"], datasets=["talks.jsonl"], output_dir="out", num_samples=4, reward_func="my_rewards.often_silent"
    )  # fmt: skip
    assert evaluate(args, make)["models"]["model"]["talks"]["average"] == 3 / 4
    assert "cannot be scored count as wrong: 1 in talks" in (files / "out/benchmarks.md").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards.nowhere", "could not be imported"),
        ("a/reward-model", r"reward_func \('a/reward-model'\) is no function"),
        ("my_rewards.too_few", "returned 1 rewards for 16 completions. Return one for each, or None"),
    ],
)
def test_mistakes_name_the_function(name, message, files):
    with pytest.raises(ValueError, match=message):
        select(selection(reward_func=name), make)


def test_a_missing_function_is_noticed_before_anything_is_sampled(files):
    options = ["--model_name_or_path=model", "--dataset_name=sums.jsonl", "--output_dir=out", "--backend=transformers"]
    with pytest.raises(ValueError, match="could not be imported"):
        select_main([*options, "--reward_func=my_rewards.nowhere"])
    assert not (files / "out").exists()
