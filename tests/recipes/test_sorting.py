"""The sorting task: rewards, demonstrations, evaluation by sampling, recipes, and runs of the benchmark."""

import json
import random
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from ada_trl.commands.reward_funcs import load_reward_funcs
from ada_trl.commands.train import main, parse_args
from benchmarks.common import load_rows, save_rows
from benchmarks.learning import equal_tokens, sorting
from recipes.arithmetic.task import build_tokenizer
from recipes.sorting import task

from ..helpers import tiny_config


ROOT = Path(__file__).parents[2]
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
    posterior = recipe.stem.startswith("posterior")
    assert (args.baseline, args.num_generations) == (("posterior", 1) if posterior else ("pool", 4))
    assert str(args.output_dir).endswith(recipe.stem)
    main(
        ["--config", str(recipe), f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}"]
        + [f"--output_dir={tmp_path}", "--use_cpu", "--max_steps=2", "--eval_steps=2", "--logging_steps=1"]
        + ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=8"]
    )
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [logs["step"] for logs in history if "eval_rewards/sorted_by_swaps/mean" in logs] == [0, 2]
    assert (tmp_path / "model.safetensors").exists()


# Evaluation and benchmark


def tiny_sorter(seed=0):
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(task.CHARACTERS)
    return Qwen2ForCausalLM(tiny_config(tokenizer, max_position_embeddings=128)), tokenizer


def test_evaluation_counts_correct_samples_without_side_effects(monkeypatch):
    model, tokenizer = tiny_sorter()
    rows = task.problems(6, seed=0)
    shares = [0, 0.25, 0.5, 0.75, 1, 1]  # of four samples of each prompt
    rows_sorted = rows.sort("digits")

    def sample(model, tokenizer, prompts):
        texts = []
        for i, prompt in enumerate(prompts):
            index = rows_sorted["prompt"].index(prompt)
            right = task.demonstration(prompt.removesuffix(":"), random.Random(0))
            texts.append(right if i % 4 < 4 * shares[index] else "")
        lengths = torch.tensor([48 if text else 1 for text in texts])
        return texts, lengths

    monkeypatch.setattr(sorting, "sample", sample)
    model.train()
    state = torch.get_rng_state()
    evaluation = sorting.evaluate(model, tokenizer, rows, samples=4)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert evaluation["accuracy"] == evaluation["pass@1"] == pytest.approx(3.5 / 6)
    assert evaluation["pass@4"] == pytest.approx(5 / 6) and "pass@8" not in evaluation
    # Two of four: all subsets of two but one, of six, have a right one; one and three of four: 1/2 and all.
    assert evaluation["pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 3) / 6)
    unbiased = [p * (1 - p) / 3 for p in shares]
    assert evaluation["accuracy_error"] == pytest.approx(sum(unbiased) ** 0.5 / 6)
    assert evaluation["truncated"] == pytest.approx(3.5 / 6) and evaluation["mean_reward"] == pytest.approx(3.5 / 6)
    assert evaluation["completion_tokens"] == pytest.approx(1 + 47 * 3.5 / 6)


def test_sampled_evaluation_is_seeded_and_precise_enough():
    model, tokenizer = tiny_sorter()
    rows = task.problems(3, seed=0)
    first, again, other = (sorting.evaluate(model, tokenizer, rows, samples=2, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert 0.5 / (sorting.NUM_TEST * sorting.SAMPLES) ** 0.5 < 0.01
    train, test, _ = sorting.read(Path(), "sorting")
    assert len(train) == sorting.NUM_TRAIN and len(test) == sorting.NUM_TEST
    assert not set(train["prompt"]) & set(test["prompt"])


def quarter(completions, **kwargs):
    return [0.25] * len(completions)


@pytest.mark.parametrize(
    ("method", "name", "reward"),
    [("GRPO n=4", "sorting", "sorted_by_swaps"), ("posterior baseline, n=1", "sorting-graded", "work_and_answer")],
)
def test_a_run_of_the_benchmark_and_its_rows(method, name, reward, task_dir, tmp_path, monkeypatch):
    small = {"rollouts_per_step": 16, "steps": 2, "rates": (1e-3, 2e-3)}
    evaluate = {"evaluate": lambda *arguments: sorting.evaluate(*arguments, samples=2)}
    few = {"read": lambda *arguments: tuple(rows and rows.select(range(16)) for rows in sorting.read(*arguments))}
    assert equal_tokens.SETS[name].reward is getattr(task, reward)
    cheap = equal_tokens.SETS[name]._replace(reward=quarter, **small, **evaluate, **few)
    monkeypatch.setitem(equal_tokens.SETS, name, cheap)
    runs = equal_tokens.tuning([method], [name])
    assert [run.rate for run in runs] == [1e-3, 2e-3]
    equal_tokens.train_and_save(runs[0], tmp_path, {name: task_dir}, steps=None, eval_every=2)
    record = json.loads((tmp_path / runs[0].file_name).read_text())
    assert [row["rollouts"] for row in record["steps"]] == [16, 16]
    assert record["options"]["max_completion_length"] == task.MAX_COMPLETION_TOKENS
    assert record["options"].get("positive_threshold") == (0.99 if name == "sorting-graded" else None)
    assert [row["reward"] for row in record["steps"]] == [pytest.approx(0.25)] * 2

    rows = equal_tokens.results(tmp_path, load_rows("equal_tokens"))
    mine = equal_tokens.finals(rows, method, name)
    assert {row["rate"] for row in mine if row["step"] == 2} >= {1e-3}
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    stored = save_rows(rows, "rows")
    assert [row["truncated"] for row in stored] == [row.get("truncated") for row in rows]
    assert all(0 <= row["truncated"] <= 1 for row in stored if row["prompt_set"] == name)


def test_the_two_best_rates_are_tried_on_a_second_seed():
    def row(rate, seed, accuracy):
        cell = {"method": "GRPO n=4", "prompt_set": "hard", "step": 100}
        return cell | {"seed": seed, "rate": rate, "accuracy": accuracy}

    first, second = equal_tokens.TUNING_SEEDS
    rows = [row(1e-4, first, 0.30), row(2e-4, first, 0.36), row(4e-4, first, 0.33)]
    tried = equal_tokens.second_tuning(["GRPO n=4"], ["hard"], rows)
    assert {(run.rate, run.seed) for run in tried} == {(2e-4, second), (4e-4, second)}
    assert equal_tokens.best_rate("GRPO n=4", "hard", rows) is None
    rows += [row(2e-4, second, 0.30), row(4e-4, second, 0.34)]
    assert equal_tokens.best_rate("GRPO n=4", "hard", rows) == 2e-4  # 0.33 against 0.335: a tie
    rows[-1] = row(4e-4, second, 0.38)
    assert equal_tokens.best_rate("GRPO n=4", "hard", rows) == 4e-4
    rows += [row(4e-4, 1, 0.5), row(2e-4, 2, 0.9)]
    assert equal_tokens.reported(rows)["seed"].tolist() == [1]
