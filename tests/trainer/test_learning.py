"""The learning benchmark: runs are neither lost nor doubled, evaluation is exact."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from ada_trl import AdaGRPOConfig
from benchmarks import names
from benchmarks.learning import equal_tokens, prompt_sets, tables
from benchmarks.learning import run as learning
from recipes.arithmetic.task import MAX_ANSWER_TOKENS, problems

from ..helpers import tiny_model, tiny_tokenizer


EST_VALUE = f"{names.EST} (value head) n=4"


# The runner


def test_a_stopped_benchmark_continues_with_the_missing_runs(tmp_path):
    runs = learning.grid(list(learning.METHODS)[:3], ["hard"], [1, 2])
    done = []

    def work(run):
        if len(done) == 4:
            raise RuntimeError("stopped")
        done.append(run)
        with learning.atomic_write(tmp_path / run.file_name) as temporary:
            temporary.write_text(json.dumps(run))
        return run

    with pytest.raises(RuntimeError, match="stopped"):
        learning.run_missing(runs, tmp_path, work)
    assert done == runs[:4]
    first = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(first) == 4
    done.clear()
    assert learning.run_missing(runs, tmp_path, work) == 2
    assert done == runs[4:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(run.file_name for run in runs)
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert learning.run_missing(runs, tmp_path, work) == 0


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_model().save_pretrained(directory / "base")
    tiny_tokenizer().save_pretrained(directory / "base")
    rows = problems(64, seed=0)
    (directory / "learning").mkdir()
    rows = rows.add_column("base_pass_rate", np.linspace(0, 0.3, len(rows)))
    prompt_sets.write(directory / "learning" / "hard_train.jsonl", rows.select(range(48)))
    prompt_sets.write(directory / "learning" / "hard_test.jsonl", rows.select(range(48, 64)))
    prompt_sets.write(directory / "learning" / "spread_test.jsonl", rows.select(range(48, 64)))
    return directory


@pytest.mark.parametrize("method", [names.GRPO_8, names.DAPO, names.HYBRID, EST_VALUE])
def test_record_of_a_run(method, task_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "PROMPTS_PER_STEP", 4)
    run = learning.Run(method, "hard", 7)
    learning.train_and_save(run, tmp_path, task_dir, steps=3, eval_every=2)
    record = json.loads((tmp_path / run.file_name).read_text())
    assert (record["method"], record["prompt_set"], record["seed"]) == run
    assert [row["step"] for row in record["steps"]] == [1, 2, 3]
    assert [row["step"] for row in record["evaluations"]] == [0, 2, 3]
    rollouts = {names.GRPO_8: 32, EST_VALUE: 16}.get(method)
    for row in record["steps"]:
        assert row["rollouts"] == rollouts or (rollouts is None and row["rollouts"] >= 16)
        assert row["rollouts"] <= row["generated_tokens"] <= row["rollouts"] * MAX_ANSWER_TOKENS
        assert 0 < row["trained_tokens"] <= row["generated_tokens"]
        assert row["cpu_seconds"] > 0 and row["wall_seconds"] > 0
    before, between, after = record["evaluations"]
    assert before["accuracy"] == pytest.approx(before["pass@1"])
    assert 0 < before["pass@1"] < before["pass@8"] < 1 and before["entropy"] > 0
    assert len(after["by_difficulty"]) == len(prompt_sets.BIN_EDGES) - 1
    assert "by_difficulty" not in between and after["by_difficulty"][-1] is None


# Evaluation


def test_pass_rates_are_the_frequencies_of_sampling():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts, samples = ["1+2=", "31+4="], 4000
    candidates = [(prompt, str(digit)) for prompt in prompts for digit in range(100)]
    rows = Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in candidates])
    rates = prompt_sets.pass_rates(model, tokenizer, rows, batch_size=7).reshape(2, 100)
    for prompt, of_prompt in zip(prompts, rates, strict=True):
        best = int(of_prompt.argmax())
        torch.manual_seed(0)
        inputs = torch.tensor([tokenizer(prompt)["input_ids"]] * samples)
        generated = model.generate(inputs, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS)
        expected = [*tokenizer(str(best))["input_ids"], tokenizer.eos_token_id]
        frequency = (generated[:, len(prompt) : len(prompt) + len(expected)] == torch.tensor(expected)).all(1)
        p = of_prompt[best]
        assert p > 0.005
        assert frequency.double().mean().item() == pytest.approx(p, abs=4.5 * (p * (1 - p) / samples) ** 0.5)


def test_pass_at_k_of_known_rates():
    assert prompt_sets.pass_at_k(np.array([0.5, 0.0, 1.0]), 1) == pytest.approx(0.5)
    assert prompt_sets.pass_at_k(np.array([0.5, 0.0, 1.0]), 2) == pytest.approx(1.75 / 3)


def test_entropy_of_a_uniform_policy_and_training_undisturbed():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    torch.nn.init.zeros_(model.lm_head.weight)
    model.train()
    state = torch.get_rng_state()
    assert prompt_sets.sampled_entropy(model, tokenizer, ["1+2=", "10+5="]) == pytest.approx(np.log(len(tokenizer)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_prompt_sets_have_the_documented_pass_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_sets, "NUM_TRAIN", 40)
    monkeypatch.setattr(prompt_sets, "NUM_TEST", 20)
    monkeypatch.setattr(prompt_sets, "load", lambda base: (None, None))
    monkeypatch.setattr(prompt_sets, "pass_rates", lambda model, tokenizer, rows: np.linspace(0, 1, len(rows)))
    prompt_sets.build(tmp_path, tmp_path, num_candidates=2000)
    sets = {path.stem: prompt_sets.read(path) for path in tmp_path.glob("*.jsonl")}
    assert {name: len(rows) for name, rows in sets.items()} == {
        "easy_train": 40, "easy_test": 20, "hard_train": 40, "hard_test": 20, "spread_test": 20
    }  # fmt: skip
    for name in ("easy", "hard"):
        assert not set(sets[f"{name}_train"]["prompt"]) & set(sets[f"{name}_test"]["prompt"])
        assert not set(sets[f"{name}_train"]["prompt"]) & set(sets["spread_test"]["prompt"])
    hard, easy = (np.array(sets[f"{name}_train"]["base_pass_rate"]) for name in ("hard", "easy"))
    assert 0 < hard.min() and hard.max() < 0.5 and hard.mean() < easy.mean()
    with pytest.raises(ValueError, match="num_candidates"):
        prompt_sets.build(tmp_path, tmp_path, num_candidates=100)


def test_every_method_is_a_valid_configuration(tmp_path):
    for options in learning.METHODS.values():
        batch = learning.PROMPTS_PER_STEP * options["num_generations"]
        AdaGRPOConfig(str(tmp_path), per_device_train_batch_size=batch, **learning.COMMON | options)
    # The first bar of the ablation is GRPO, which test_uniform.py compares bit for bit.
    first = equal_tokens.METHODS[next(iter(tables.ABLATION))].options
    args = AdaGRPOConfig(str(tmp_path), per_device_train_batch_size=16, **learning.COMMON | first)
    assert args.is_vanilla_grpo and args.zero_variance_groups == "keep"


@pytest.mark.parametrize(("name", "of_a_step"), [(names.ORACLE, [4]), (names.OVERSAMPLING_ORACLE, [12])])
def test_the_oracle_uses_exact_pass_rates_as_baseline_and_for_selection(name, of_a_step, task_dir):
    seen = []

    class Remembers(equal_tokens.OraclePassRateTrainer):
        def _insert_exact_pass_rates(self):
            super()._insert_exact_pass_rates()
            visit, belief = self.pass_rates.predictions, self.pass_rates.reward_estimator
            guessed = (belief.mean_reward or 0.0) + visit.features.value_predictions * (belief.reward_std.std or 1.0)
            seen.append((visit.prompts, self.pass_rates.estimates, guessed))

    method = equal_tokens.METHODS[name]
    assert method.trainer is equal_tokens.OraclePassRateTrainer
    run = learning.Run("knows", "hard", 7)
    learning.train_once(run, method.options, 4, task_dir, steps=2, eval_every=2, trainer_class=Remembers)
    assert [len(known) for known, *_ in seen] == 2 * of_a_step
    model, tokenizer = prompt_sets.load(task_dir / "base")
    known = prompt_sets.read_set(task_dir, "hard")[0].filter(lambda row: row["prompt"] in seen[0][0])
    exact = dict(zip(known["prompt"], prompt_sets.pass_rates(model, tokenizer, known), strict=True))
    for prompts, estimates, guessed in seen[:1]:  # of the base model
        assert guessed == pytest.approx([exact[prompt] for prompt in prompts], abs=1e-5)  # rewards are 0 and 1
        assert estimates == pytest.approx(guessed)
