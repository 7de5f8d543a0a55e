"""The sorting task: rewards, demonstrations and recipes."""

import json
import random
from statistics import median

import numpy as np
import pytest

from ada_trl.commands.reward_funcs import load_reward_funcs
from ada_trl.commands.train import main, parse_args
from recipes.sorting import task
from tests.helpers import ROOT


RECIPES = sorted((ROOT / "recipes" / "sorting").glob("*.yaml"))


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sorting")
    task.prepare(directory, steps=2, num_train=64, num_test=8)
    return directory


# Problems and demonstrations


def test_problems_are_distinct_unsorted_and_reproducible():
    rows = task.problems(500, seed=1)
    assert len(set(rows["prompt"])) == 500
    for row in rows:
        digits = row["prompt"].removesuffix(":")
        assert row["answer"] == "".join(sorted(digits)) != digits
        assert row["digits"] == len(digits) == len(set(digits))
    assert rows.to_list() == task.problems(500, seed=1).to_list() != task.problems(500, seed=2).to_list()
    assert set(rows["digits"]) == set(task.LENGTHS)


def test_more_problems_than_there_are_lists_are_rejected():
    assert len(task.problems(600, 0, (3,))) == 600
    with pytest.raises(ValueError, match=r"number \(601\) must be at most 600"):
        task.problems(601, 0, (3,))


def demonstrations(number=2000):
    rows, rng = task.problems(number, seed=0), random.Random(0)
    return rows, [task.demonstration(prompt.removesuffix(":"), rng) for prompt in rows["prompt"]]


def test_demonstrations_receive_both_rewards_and_differ():
    rows, texts = demonstrations()
    assert set(task.sorted_by_swaps(rows["prompt"], texts, rows["answer"])) == {1.0}
    assert set(task.work_and_answer(rows["prompt"], texts, rows["answer"])) == {1.0}
    rng = random.Random(0)
    assert len({task.demonstration("43210", rng) for _ in range(100)}) > 90


def test_lengths_of_demonstrations_have_a_long_tail():
    _, texts = demonstrations()
    lengths = np.array([len(text) + 1 for text in texts])
    assert 20 < lengths.mean() < 40
    assert 0.02 < (lengths > task.MAX_COMPLETION_TOKENS).mean() < 0.25
    assert np.quantile(lengths, 0.99) > 2 * median(lengths)
    # Without random swaps, every demonstration has as many swaps as the list has inversions.
    rng = random.Random(0)
    assert {task.demonstration("43210", rng, random_swaps=0).count(",") + 1 for _ in range(50)} == {10}


def test_the_base_model_is_the_same_each_time(tmp_path, task_dir):
    task.prepare(tmp_path, steps=2, num_train=64, num_test=8)
    for name in ("base/model.safetensors", "data/train.jsonl", "data/test.jsonl"):
        assert (tmp_path / name).read_bytes() == (task_dir / name).read_bytes(), name
    splits = [
        {row["prompt"] for row in map(json.loads, open(task_dir / f"data/{s}.jsonl"))} for s in ("train", "test")
    ]
    assert [len(split) for split in splits] == [64, 8] and not splits[0] & splits[1]


# Rewards


@pytest.mark.parametrize(
    ("completion", "binary", "graded"),
    [
        ("1342,1324,1234", 1, 1),
        ("1342,3142,1342,1324,1234", 1, 1),  # a detour
        ("1234", 0, 0.5),  # the answer without the work
        ("1342,1234", 0, 0.75),  # two swaps at once
        ("1342,1324", 0, 0.75),  # not sorted: 1 and 4 … two of four places
        ("1342,1324,12", 0, 1 / 3),  # cut off
        ("1342,1342,1324,1234", 0, 0.875),  # a list that did not change
        ("3142", 0, 0),  # no swap, no place right
        ("", 0, 0),
        (",,", 0, 0),
        ("1342,1324,1234,", 0, 0.375),
    ],
)
def test_rewards(completion, binary, graded):
    columns = {"prompts": ["3142:"], "completions": [completion], "answer": ["1234"]}
    assert task.sorted_by_swaps(**columns) == [binary]
    assert task.work_and_answer(**columns) == pytest.approx([graded])


def test_the_graded_reward_is_one_if_and_only_if_the_binary_one_is():
    rng = random.Random(0)
    rows, texts = demonstrations(500)
    broken = []
    for text in texts:  # one character is another, or the end is missing
        i = rng.randrange(len(text))
        broken.append(rng.choice([text[:i], text[:i] + rng.choice(task.CHARACTERS) + text[i + 1 :]]))
    binary = task.sorted_by_swaps(rows["prompt"], broken, rows["answer"])
    graded = task.work_and_answer(rows["prompt"], broken, rows["answer"])
    assert 0 < sum(binary) < len(binary) / 4
    assert [reward > 0.99 for reward in graded] == [reward == 1 for reward in binary]
    assert len(set(graded)) > 20 and min(graded) >= 0


# Recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains(recipe, task_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script_args, args, _ = parse_args(["--config", str(recipe), "--use_cpu"])
    assert all(callable(function) for function in load_reward_funcs(script_args.reward_funcs))
    assert args.adaptive_sampling == "uniform" and args.max_completion_length == task.MAX_COMPLETION_TOKENS
    assert (args.baseline, args.num_generations) == {"grpo-n4": ("pool", 4), "batch": ("batch", 1)}[recipe.stem]
    assert str(args.output_dir).endswith(recipe.stem)
    main(
        ["--config", str(recipe), f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}"]
        + [f"--output_dir={tmp_path}", "--use_cpu", "--max_steps=2", "--eval_steps=2", "--logging_steps=1"]
        + ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=8"]
    )
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [logs["step"] for logs in history if "eval_rewards/sorted_by_swaps/mean" in logs] == [0, 2]
    assert (tmp_path / "model.safetensors").exists()
