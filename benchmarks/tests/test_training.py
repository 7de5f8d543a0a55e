"""The learning benchmark: runs are neither lost nor doubled, evaluation is exact."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from ada_trl import AdaGRPOConfig
from ada_trl.utils.files import atomic_write
from benchmarks import names
from benchmarks.learning import language_model, prompt_sets, small_models, training
from recipes.arithmetic.task import MAX_ANSWER_TOKENS, problems
from tests.helpers import tiny_model, tiny_tokenizer


EST_VALUE = f"{names.EST} (value head) n=4"
METHODS = list(small_models.EXPERIMENTS["equal_steps"])


# The runner


def test_a_stopped_benchmark_continues_with_the_missing_runs(tmp_path):
    runs = small_models.planned_runs("equal_steps", METHODS[:3], ["hard"], [1, 2])
    done = []

    def work(run):
        if len(done) == 4:
            raise RuntimeError("stopped")
        done.append(run)
        with atomic_write(tmp_path / run.file_name) as temporary:
            temporary.write_text(json.dumps(run))
        return run

    with pytest.raises(RuntimeError, match="stopped"):
        training.run_missing(runs, tmp_path, work)
    assert done == runs[:4]
    first = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(first) == 4
    done.clear()
    assert training.run_missing(runs, tmp_path, work) == 2
    assert done == runs[4:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(run.file_name for run in runs)
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert training.run_missing(runs, tmp_path, work) == 0


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
    return directory


@pytest.mark.parametrize("method", [names.GRPO_8, names.DAPO, names.HYBRID, EST_VALUE])
def test_record_of_a_run(method, task_dir, tmp_path, monkeypatch):
    methods = small_models.EXPERIMENTS["equal_steps"]
    monkeypatch.setitem(methods, method, methods[method]._replace(prompts=4))
    run = small_models.Run(method, "hard", 7, 1e-3)
    small_models.train_and_save(run, "equal_steps", tmp_path, {"hard": task_dir}, steps=3, eval_every=2)
    record = json.loads((tmp_path / run.file_name).read_text())
    assert (record["method"], record["prompt_set"], record["seed"], record["rate"]) == run
    assert record["options"]["learning_rate"] == 1e-3 and record["device"] == "CPU"
    assert f"torch {torch.__version__.split('+')[0]}" in record["versions"] and "trl " in record["versions"]
    assert [row["step"] for row in record["steps"]] == [1, 2, 3]
    assert [row["step"] for row in record["evaluations"]] == [0, 2, 3]
    rollouts = {names.GRPO_8: 32, EST_VALUE: 16}.get(method)
    for row in record["steps"]:
        assert row["rollouts"] == rollouts or (rollouts is None and row["rollouts"] >= 16)
        assert row["rollouts"] <= row["generated_tokens"] <= row["rollouts"] * MAX_ANSWER_TOKENS
        assert 0 < row["trained_tokens"] <= row["generated_tokens"]
        assert row["cpu_seconds"] > 0
    before = record["evaluations"][0]
    assert before["accuracy"] == pytest.approx(before["pass@1"])
    assert 0 < before["pass@1"] < before["pass@8"] < 1 and before["entropy"] > 0


def test_rows_of_a_record_sum_costs_and_average_metrics_until_each_evaluation():
    step = {"generated_tokens": 40, "trained_tokens": 30, "rollouts": 10, "cpu_seconds": 1.5, "entropy": 0.5}
    steps = [step | {"frac_zero_advantage_groups": share} for share in (1.0, 0.5)]
    evaluation = {"accuracy": 0.1, "by_family": {"clock": 0.2}, "frac_zero_variance": {"all": 0.6, "clock": 0.7}}
    record = small_models.Run("m", "mixture", 1, 3e-4)._asdict() | {"device": "CPU", "commit": "0a1b"}
    record |= {"steps": steps, "evaluations": [{"step": 0} | evaluation, {"step": 2, "pass@16": 0.3} | evaluation]}
    start, _, end, family = training.evaluation_rows(record)
    assert (start["family"], start["generated_tokens"], start["entropy"]) == ("all", 0, None)
    assert (end["device"], end["commit"], end["versions"]) == ("CPU", "0a1b", None)  # older runs have no versions
    assert (end["generated_tokens"], end["trained_tokens"], end["cpu_seconds"]) == (80, 60, 3.0)
    assert (end["frac_zero_advantage_groups"], end["pass@16"], end["frac_zero_variance"]) == (0.75, 0.3, 0.6)
    assert (family["family"], family["accuracy"], family["frac_zero_variance"]) == ("clock", 0.2, 0.7)


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
        "easy_train": 40, "easy_test": 20, "hard_train": 40, "hard_test": 20
    }  # fmt: skip
    for name in ("easy", "hard"):
        assert not set(sets[f"{name}_train"]["prompt"]) & set(sets[f"{name}_test"]["prompt"])
    hard, easy = (np.array(sets[f"{name}_train"]["base_pass_rate"]) for name in ("hard", "easy"))
    assert 0 < hard.min() and hard.max() < 0.5 and hard.mean() < easy.mean()
    with pytest.raises(ValueError, match="num_candidates"):
        prompt_sets.build(tmp_path, tmp_path, num_candidates=100)


def test_the_cut_mixture_has_the_first_training_problems_of_the_mixture(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "CUT_SIZE", 3)
    (tmp_path / "mixture").mkdir()
    for split in ("train", "test"):
        Dataset.from_list([{"prompt": f"{split} {i}"} for i in range(5)]).to_json(
            tmp_path / "mixture" / f"{split}.jsonl"
        )
    train, test = language_model.read(tmp_path, language_model.CUT_SET)
    assert train["prompt"][:] == ["train 0", "train 1", "train 2"] and len(test) == 5
    assert [len(rows) for rows in language_model.read(tmp_path, "mixture")] == [5, 5]


def configurations():
    for methods in small_models.EXPERIMENTS.values():
        for method in methods.values():
            options = {name: value for name, value in method.options.items() if name not in small_models.SERVER}
            yield options | {"max_staleness": 0}, method.prompts
    for name, options in language_model.METHODS.items():
        prompts = language_model.PROMPTS_PER_STEP.get(name, language_model.ROLLOUTS_PER_STEP)
        yield language_model.task("mixture").options | options, prompts


def test_every_method_is_a_valid_configuration(tmp_path):
    """GRPO is compared bit for bit in tests/trainer/test_uniform.py."""
    for options, prompts in configurations():
        options = {"per_device_train_batch_size": prompts * options.get("num_generations", 1)} | options
        args = AdaGRPOConfig(str(tmp_path), **training.COMMON | options)
        assert args.generation_batch_size // args.num_generations == prompts


def test_methods_have_different_file_names():
    for methods in (*small_models.EXPERIMENTS.values(), language_model.METHODS):
        assert len({training.slug(method) for method in methods}) == len(methods)
