"""`select.py` and `evaluate.py` with custom reward functions: any columns, conversations, async, graded rewards."""

import importlib
import json
import sys

import pytest
from datasets import load_dataset

from ada_trl.recipes.math.evaluate import EvaluateArguments
from ada_trl.recipes.math.evaluate import run as evaluate
from ada_trl.recipes.math.select import SelectArguments
from ada_trl.recipes.math.select import run as select
from tests.helpers import tiny_model, tiny_tokenizer, write_jsonl

from .scripted import ScriptedSampler, never


REWARDS = '''
from my_helpers import LOSS

def graded(prompts, completions, total, **kwargs):
    """1 for the total, 0.6 next to it, 0 for what cannot be read."""
    assert all(prompt.startswith(f"{total // 2}+") for prompt, total in zip(prompts, total))
    return [max(0.0, 1 - LOSS * abs(int(text or 0) - right)) for text, right in zip(completions, total)]

async def conversational(completions, total, **kwargs):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [float(completion[0]["content"] == str(right)) for completion, right in zip(completions, total)]

def too_few(completions, **kwargs):
    return [1.0]

def often_silent(completions, total, **kwargs):
    return [None if right == 0 else 1.0 for right in total]


def sometimes_silent(completions, **kwargs):
    return [None if i % 4 == 0 else 1.0 for i in range(len(completions))]
'''
RIGHT = {0: 0, 1: 1, 2: 2, 3: 4}  # of 4 completions, by the first summand; the wrong ones are off by one


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my_helpers.py").write_text("LOSS = 0.4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards", "my_helpers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # Bytecode is keyed by the source's size and its time in seconds:
    # a module rewritten at once would not be compiled again.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{a}+{a}=", "total": 2 * a, "level": {"name": "easy"}} for a in RIGHT]
    talks = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    for name, content in (("sums", [*rows, rows[0], rows[0] | {"prompt": ""}]), ("talks", talks)):
        write_jsonl(tmp_path / f"{name}.jsonl", content)
    return tmp_path


def make(*args):
    return ScriptedSampler(lambda text: RIGHT[int(text.split("+")[0])], 4)


def selection(**options) -> SelectArguments:
    known = {"model_name_or_path": "model", "dataset_name": "sums.jsonl", "output_dir": "out", "num_samples": 4}
    known |= {"reward_func": "my_rewards.graded", "max_pass_rate": 0.5}
    return SelectArguments(**known | options)


def test_selected_problems_keep_their_columns(files):
    kept = select(selection(), make)
    assert kept["prompt"] == ["1+1=", "2+2="] and kept["pass_rate"] == [0.25, 0.5] and kept["rollouts"] == [4, 4]
    assert kept["total"] == [2, 4] and kept["level"] == [{"name": "easy"}] * 2
    assert load_dataset("out", split="train")["total"] == [2, 4]
    counts = json.loads((files / "out/selection.json").read_text())["problems"]
    assert (
        counts["removed: no text or no answer"] == 1 and counts["removed: duplicate"] == 1 and counts["sampled"] == 4
    )


def test_problems_without_a_reward_have_no_pass_rate(files):
    options = {"reward_func": "my_rewards.often_silent", "min_pass_rate": 0.0, "max_pass_rate": 1.0}
    assert select(selection(**options), make)["total"] == [2, 4, 6]
    counts = json.loads((files / "out/selection.json").read_text())["problems"]
    assert counts["without any reward"] == 1 and counts["selected"] == 3


def test_another_threshold_needs_no_new_samples(files):
    select(selection(), make)
    kept = select(selection(positive_threshold=0.5, max_pass_rate=1.0), never)
    assert kept["pass_rate"] == [1.0] * 4, "All are at most off by one."


@pytest.mark.parametrize("edit", ["reward function", "helper", "column"])
def test_changed_inputs_are_scored_again_without_sampling(edit, files):
    select(selection(), make)
    if edit == "column":
        text = (files / "sums.jsonl").read_text()
        (files / "sums.jsonl").write_text(text.replace('"total": 2,', '"total": 3,'))
        kept = select(selection(max_pass_rate=1.0), never)
        assert kept["pass_rate"] == [0.75, 0.5, 1.0]  # three wrong answers to 1+1 are 3
        return
    if edit == "helper":
        (files / "my_helpers.py").write_text("LOSS = 0.2")
        importlib.reload(sys.modules["my_helpers"])
    else:
        (files / "my_rewards.py").write_text(REWARDS.replace("1 - LOSS *", "1 - LOSS / 2 *"))
    importlib.reload(sys.modules["my_rewards"])
    assert select(selection(max_pass_rate=1.0), never)["pass_rate"] == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "average", "unscored"),
    [("conversational", 7 / 16, 0), ("often_silent", 3 / 4, 1 / 4), ("sometimes_silent", 3 / 4, 0)],
)
def test_models_are_evaluated_on_conversations(name, average, unscored, files):
    """`None` counts as wrong, and problems without any reward are reported."""
    options = {"models": ["model"], "datasets": ["talks.jsonl"], "output_dir": "out", "num_samples": 4}
    results = evaluate(EvaluateArguments(**options, reward_func=f"my_rewards.{name}"), make)
    values = results.set_index("metric")["value"]
    assert (values["average@4"], values["unscored"]) == (average, unscored)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards.nowhere", "could not be imported"),
        ("a/reward-model", r"reward_func \('a/reward-model'\) is not a function"),
        ("my_rewards.too_few", "returned 1 rewards for 16 completions. Return one for each, or None"),
    ],
)
def test_errors_contain_the_function(name, message, files):
    with pytest.raises(ValueError, match=message):
        select(selection(reward_func=name), make)
    assert (files / "out" / "samples").exists() == (name == "my_rewards.too_few"), "Imports fail before sampling."
