"""Runs of the equal-token benchmark on the sorting task, and its evaluation by sampling."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks import names
from benchmarks.common import load_rows
from benchmarks.learning import small_models, sorting, training
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
    train, test = sorting.read(Path(), "sorting")
    assert len(train) == sorting.NUM_TRAIN and len(test) == sorting.NUM_TEST
    assert not set(train["prompt"]) & set(test["prompt"])


def quarter(completions, **kwargs):
    return [0.25] * len(completions)


@pytest.mark.parametrize(
    ("method", "name", "reward"),
    [(names.GRPO_4, "sorting", "sorted_by_swaps"), (names.BATCH, "sorting-graded", "work_and_answer")],
)
def test_a_run_of_the_benchmark_is_stored(method, name, reward, task_dir, tmp_path, monkeypatch):
    assert small_models.SETS[name].reward is getattr(task, reward)
    cheap = small_models.SETS[name]._replace(
        reward=quarter,
        rollouts_per_step=16,
        steps=2,
        evaluate=lambda *arguments: sorting.evaluate(*arguments, samples=2),
        read=lambda *arguments: tuple(rows.select(range(16)) for rows in sorting.read(*arguments)),
    )
    monkeypatch.setitem(small_models.SETS, name, cheap)
    (run,) = small_models.planned_runs("one_rollout", [method], [name], [7])
    small_models.train_and_save(run, "one_rollout", tmp_path, {name: task_dir}, eval_every=2)
    record = json.loads((tmp_path / run.file_name).read_text())
    assert [row["rollouts"] for row in record["steps"]] == [16, 16]
    assert record["options"]["max_completion_length"] == task.MAX_COMPLETION_TOKENS
    assert record["options"].get("positive_threshold") == (0.99 if name == "sorting-graded" else None)
    assert [row["reward"] for row in record["steps"]] == [pytest.approx(0.25)] * 2

    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    training.store("one_rollout", tmp_path)
    assert training.stored_runs("one_rollout") == {run}
    start, end = load_rows("one_rollout")
    assert (start["step"], start["rollouts"], end["step"], end["rollouts"]) == (0, 0, 2, 32)
    assert end["accuracy"] == record["evaluations"][-1]["accuracy"]
    training.store("one_rollout", tmp_path)
    assert len(load_rows("one_rollout")) == 2, "stored once"
