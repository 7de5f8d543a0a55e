"""The arithmetic recipes parse with the real parser, and `ada_trl.commands.train` runs as a user would run it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ada_trl.commands.reward_funcs import load_reward_funcs
from ada_trl.commands.run_setup import build_trainer
from ada_trl.commands.train import main, parse_args
from recipes.arithmetic.demo import LABELS, summarize, table
from recipes.arithmetic.demo import main as demo
from recipes.arithmetic.task import build_tokenizer, collate, exact_match, prepare, problems
from recipes.arithmetic.vllm_server import ENVIRONMENT
from recipes.arithmetic.vllm_server import command as server_command
from tests.helpers import ROOT, Recorder, even_reward, run_module


RECIPES = sorted((ROOT / "recipes" / "arithmetic").glob("*.yaml"))


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    prepare(directory, steps=3, num_train=64, num_test=8)
    return directory


def command_line(task_dir, recipe, output_dir):
    return (
        ["--config", str(recipe), f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}"]
        + [f"--output_dir={output_dir}", "--use_cpu", "--max_steps=2", "--eval_steps=2", "--logging_steps=1"]
        + ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=8"]
    )


SETTINGS = {  # adaptive_sampling, baseline, num_generations
    "grpo-n4": ("uniform", "pool", 4),
    "grpo-n8": ("uniform", "pool", 8),
    "grpo-n16": ("uniform", "pool", 16),
    "seq-pos": ("seq-pos", "pool", 4),
    "seq-balance": ("seq-balance", "pool", 4),
    "est-ema": ("est", "pool", 4),
    "est-value": ("est", "pool", 4),
    "batch": ("uniform", "batch", 1),
    "maxrl": ("uniform", "pool", 8),
    "vllm-disk": ("seq-balance", "pool", 4),
    "vllm-lora": ("seq-balance", "pool", 4),
}


def test_every_recipe_is_known_and_every_method_is_in_the_demo():
    assert {path.stem for path in RECIPES} == set(SETTINGS) == {*LABELS, "vllm-disk", "vllm-lora"}


@pytest.mark.parametrize("name", SETTINGS)
def test_recipe_parses(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    script_args, args, model_args = parse_args(["--config", f"arithmetic/{name}.yaml", "--use_cpu"])
    assert all(callable(function) for function in load_reward_funcs(script_args.reward_funcs))
    assert model_args.model_name_or_path and script_args.dataset_name
    assert (args.adaptive_sampling, args.baseline, args.num_generations) == SETTINGS[name]
    prompts = args.per_device_train_batch_size // args.num_generations
    assert prompts == (128 if args.num_generations == 1 else 32)
    assert str(args.output_dir).endswith(name)
    assert args.use_vllm == name.startswith("vllm")
    if args.use_vllm:
        assert (args.vllm_weight_sync, model_args.use_peft) == (name.removeprefix("vllm-"), name == "vllm-lora")


def test_documented_server_commands_have_the_flags_of_the_tested_server():
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for words in (*ENVIRONMENT, "--enable-lora", "--max-lora-rank", "--logprobs-mode processed_logprobs"):
        assert words in text or words in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"), words
    started = " ".join(server_command(Path("model"), 8000))
    for flag in ("--enable-lora", "--max-lora-rank 8", "--logprobs-mode processed_logprobs", "--max-logprobs -1"):
        assert flag in started


def test_inputs_of_the_lm_head_are_contiguous_on_a_cpu(task_dir, tmp_path):
    """Otherwise torch copies the weights of the head once per row."""
    arguments = command_line(task_dir, ROOT / "recipes/arithmetic/batch.yaml", tmp_path)
    trainer = build_trainer(*parse_args([*arguments, "--max_steps=1", "--eval_strategy=no", "--eval_on_start=false"]))
    seen = []
    head = trainer.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0].is_contiguous()))
    trainer.train()
    assert len(seen) > 2 and all(seen)


@pytest.mark.parametrize("method", ["seq-balance", "est-value", "batch", "maxrl"])
def test_train_from_a_recipe(method, task_dir, tmp_path):
    main(command_line(task_dir, ROOT / f"recipes/arithmetic/{method}.yaml", tmp_path))
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert (tmp_path / "model.safetensors").exists()
    summary = summarize(history)
    assert summary["steps"] == [0, 2]
    assert summary["tokens"][0] == 0 < summary["tokens"][1]
    rollouts = summary["rollouts_per_prompt"]
    assert rollouts >= 8 if method == "seq-balance" else rollouts == SETTINGS[method][2]


def test_advantages_of_the_maxrl_recipe(task_dir, tmp_path, monkeypatch):
    """They are (r - mean) / pass rate of the prompt's rollouts, and 0 for prompts without a success."""
    monkeypatch.setattr("ada_trl.trainer.ada_grpo_trainer.AdaGRPOTrainer", Recorder)
    arguments = command_line(task_dir, ROOT / "recipes/arithmetic/maxrl.yaml", tmp_path)
    script_args, args, model_args = parse_args([*arguments, "--eval_strategy=no", "--eval_on_start=false"])
    script_args.reward_funcs = ["tests.helpers.even_reward"]
    trainer = build_trainer(script_args, args, model_args)
    trainer.train()
    for batch in trainer.batches:
        texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        rewards = torch.tensor(even_reward(texts)).view(-1, 8)
        pass_rates = rewards.mean(dim=1, keepdim=True)
        expected = torch.where(pass_rates > 0, (rewards - pass_rates) / pass_rates, 0.0)
        assert 0 < pass_rates.max() and expected.unique().numel() > 2
        assert torch.allclose(batch["advantages"].view(-1, 8), expected)


@pytest.mark.slow
def test_train_under_accelerate_launch_with_two_processes(task_dir, tmp_path):
    # 8 rows per process and step: 4 prompts in a step of both processes.
    words = command_line(task_dir, ROOT / "recipes/arithmetic/seq-balance.yaml", tmp_path)
    words += ["--per_device_train_batch_size=8", "--samples_per_round=5", "--max_rounds=3", "--log_completions"]
    result = run_module("ada_trl.commands.train", *words, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    steps = [logs for logs in history if "ada/active_prompts/round_1" in logs]
    assert [logs["ada/active_prompts/round_1"] for logs in steps] == [4, 4]
    assert all(logs["ada/samples_per_prompt/max"] <= 15 for logs in steps)


def test_reward_functions_by_name():
    (function, model) = load_reward_funcs(["tests.helpers.even_reward", "organization/reward-model"])
    assert function is even_reward and model == "organization/reward-model"
    with pytest.raises(ValueError, match="No reward function was given"):
        load_reward_funcs(None)


# The task


def test_problems_are_distinct_correct_and_reproducible():
    rows = problems(500, seed=1)
    assert len(set(rows["prompt"])) == 500
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)
        assert row["digits"] == max(len(a), len(b))
    assert rows.to_list() == problems(500, seed=1).to_list()
    assert set(rows["digits"]) == {1, 2, 3, 4}


def test_train_and_test_do_not_overlap(task_dir):
    splits = [
        {json.loads(line)["prompt"] for line in (task_dir / "data" / f"{split}.jsonl").read_text().splitlines()}
        for split in ("train", "test")
    ]
    assert [len(split) for split in splits] == [64, 8]
    assert not splits[0] & splits[1]


def test_tokenizer_round_trip_and_reward():
    tokenizer = build_tokenizer()
    ids = tokenizer("12+3=15<eos>")["input_ids"]
    assert len(ids) == 8 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+3=15"
    assert exact_match(["15", "15+", ""], answer=["15", "15", "15"]) == [1.0, 0.0, 0.0]


def test_pretraining_learns_the_answer_only():
    tokenizer = build_tokenizer()
    batch = collate(tokenizer, [("1+2=", "3"), ("10+20=", "30")])
    learnt = [tokenizer.decode(row[row >= 0]) for row in batch["labels"]]
    assert learnt == ["3<eos>", "30<eos>"]
    assert batch["attention_mask"].sum(dim=1).tolist() == [6, 9]


def test_the_base_model_is_built_with_one_thread_and_announced(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        "recipes.arithmetic.task.collate", lambda *given: seen.append(torch.get_num_threads()) or collate(*given)
    )
    given = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare(tmp_path, steps=2, num_train=4, num_test=2)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(given)
    assert f"Building the base model in {tmp_path / 'base'}, about a minute." in capsys.readouterr().out


def test_demo_report():
    names = ("ada/tokens/generated", "ada/frac_zero_advantage_groups", "ada/samples_per_prompt/mean", "step_time")
    log_history = [
        {"step": 0, "eval_reward": 0.25},
        {"step": 5} | dict(zip(names, (100.0, 0.5, 8.0, 2.0), strict=True)),
        {"step": 10} | dict(zip(names, (300.0, 0.25, 12.0, 4.0), strict=True)),
        {"step": 10, "eval_reward": 0.5},
    ]
    summary = summarize(log_history)
    assert summary["accuracy"] == [0.25, 0.5]
    assert summary["tokens"] == [0, 2000]
    assert summary["step_seconds"] == 30
    results = [summary | {"method": "Seq-balance"}]
    assert "| Seq-balance | 0.250 | 0.500 | 37.5% | 10.0 | 2,000 | 30 |" in table(results)


@pytest.mark.slow
def test_demo_end_to_end(tmp_path, monkeypatch, capsys):
    prepare(tmp_path / "task", steps=3)
    options = ["--task_dir", str(tmp_path / "task"), "--output_dir", str(tmp_path / "demo")]
    options += ["--max_steps=2", "--eval_steps=2", "--logging_steps=1"]
    monkeypatch.setattr(sys, "argv", ["demo", *options, "--use_cpu"])
    demo()
    assert "Using the base model" in capsys.readouterr().out
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert [result["method"] for result in results] == ["GRPO n=4", "Seq-balance", "batch baseline, n=1, 2 retries"]
    assert [round(result["rollouts_per_prompt"]) for result in results][::2] == [4, 1]
    assert results[1]["rollouts_per_prompt"] >= 8
    key = "frac_zero_advantage_groups"
    assert results[2][key] <= results[0][key]  # equal to 1 if nothing passes
    report = (tmp_path / "demo" / "report.md").read_text()
    assert "| Seq-balance |" in report and "2 optimizer steps" in report.replace("\n", " ")
    assert (tmp_path / "demo" / "curves.png").read_bytes().startswith(b"\x89PNG")
