"""Runs of the equal-token benchmark on the sorting task, and its evaluation by sampling."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.common import load_rows, save_rows
from benchmarks.learning import equal_tokens, sorting
from recipes.arithmetic.task import build_tokenizer
from recipes.sorting import task
from tests.helpers import tiny_config


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sorting")
    task.prepare(directory, steps=2, num_train=64, num_test=8)
    return directory


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
