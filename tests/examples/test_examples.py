"""The examples run with tiny models; the one with a vLLM server is tested in tests/server."""

import re
import runpy
import tomllib
from configparser import ConfigParser
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import trl
from datasets import Dataset, DatasetDict
from packaging.requirements import Requirement

import ada_trl
from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Rollouts, Scoring, batch_advantages
from ada_trl.recipes.arithmetic.task import prepare

from ..documentation import quick_start_before
from ..helpers import (
    QUICK_ARGUMENTS,
    ROOT,
    Recorder,
    chat_tokenizer,
    even_reward,
    logs_of,
    prompt_dataset,
    read_rank_outputs,
    run_module,
    save_tiny_model,
    tiny_chat_model,
    tiny_model,
    tiny_tokenizer,
)
from .agent_worker import play


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def example(name: str) -> dict:
    """Return the names that an example defines."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("ours", [True, False], ids=["AdaGRPOTrainer", "the same script with TRL's names"])
def test_quick_start(tmp_path, monkeypatch, ours):
    """The quick start trains, and so does the GRPO script that the diff of the README begins with."""
    text = (ROOT / "examples" / "quick_start.py").read_text() if ours else quick_start_before()
    module, prefix = (ada_trl, "Ada") if ours else (trl, "")
    trainer_class, config_class = (getattr(module, f"{prefix}GRPO{name}") for name in ("Trainer", "Config"))
    sizes = {"max_steps": 2, "max_completion_length": 4, "use_cpu": True, "bf16": False, "report_to": "none"}

    def tiny_trainer(model, reward_funcs, args, train_dataset):
        assert "/" in model and callable(reward_funcs)
        return trainer_class(tiny_model(), even_reward, args, train_dataset, processing_class=tiny_tokenizer())

    monkeypatch.setattr(module, f"{prefix}GRPOTrainer", tiny_trainer)
    monkeypatch.setattr(module, f"{prefix}GRPOConfig", lambda **given: config_class(**given | sizes))
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: prompt_dataset(repeats=32))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "quick_start.py"
    script.write_text(text)
    trainer = runpy.run_path(str(script))["trainer"]
    assert trainer.state.global_step == 2
    assert trainer.args.generation_batch_size == 64
    assert trainer.args.num_generations == (1 if ours else 8)


@pytest.mark.slow
def test_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("outputs/arithmetic", steps=3, num_train=64, num_test=8)
    printed = []
    names = runpy.run_path(str(ROOT / "examples" / "offline.py"), {"print": lambda _, value: printed.append(value)})
    assert names["trainer"].state.global_step == 20 and len(logs_of(names["trainer"])) == 4
    assert len(printed) == 2 and all(0 <= accuracy <= 1 for accuracy in printed)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_inline_metadata_has_the_packages_that_are_imported(path):
    """As `uv run` reads it (PEP 723): the extras exist, and `ada_trl` comes from this repository."""
    (block,) = re.findall(r"^# /// script\n(.*?)^# ///$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    requirements = {item.name: item.extras for item in map(Requirement, metadata["dependencies"])}
    extras = ConfigParser()
    extras.read(ROOT / "setup.cfg", encoding="utf-8")
    assert requirements["ada_trl"] <= set(extras["options.extras_require"])
    assert (path.parent / metadata["tool"]["uv"]["sources"]["ada_trl"]["path"]).resolve() == ROOT
    if re.search("^from peft import", path.read_text(), flags=re.MULTILINE):
        assert "peft" in requirements["ada_trl"]


def test_two_rewards(tmp_path):
    names = example("two_rewards")
    completions = ["so it is 1,024.\n#### 1,024", "12", "#### 12 apples", "none"]
    assert names["accuracy_reward"](completions, ["1024", "12", "13", "1"]) == [1, 1, 0, 0]
    assert names["format_reward"](completions) == [1, 0, 0, 0]
    save_tiny_model(tmp_path / "model")
    dataset = Dataset.from_dict({"prompt": ["1+1=", "2+3="] * 16, "answer": ["2", "5"] * 16})
    trainer = names["main"]([*QUICK_ARGUMENTS, f"--output_dir={tmp_path / 'out'}"], str(tmp_path / "model"), dataset)
    assert trainer.args.success_reward == "accuracy_reward"
    for logs in logs_of(trainer):
        total = logs["rewards/accuracy_reward/mean"] + 0.2 * logs["rewards/format_reward/mean"]
        assert logs["reward"] == pytest.approx(total)
        assert logs["ada/pass_rate/mean"] == pytest.approx(logs["rewards/accuracy_reward/mean"])
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_conversation(tmp_path):
    names = example("conversation")
    messages = [[{"role": "assistant", "content": " 12\n"}], [{"role": "assistant", "content": "It is 12."}]]
    assert names["number_reward"](messages, ["12", "12"]) == [1, 0]
    tokenizer = chat_tokenizer()
    tiny_chat_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = names["conversations"](["How many?", "And now?"] * 8, ["1", "2"] * 8)
    sizes = ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=16", "--eval_steps=1", "--save_steps=1"]
    data = DatasetDict(train=rows, test=rows.select(range(4)))
    options = [*QUICK_ARGUMENTS, *sizes, f"--output_dir={tmp_path / 'out'}", "--log_completions=false"]
    trainer = names["main"](options, str(tmp_path / "model"), data)
    evaluations = [logs["eval_reward"] for logs in trainer.state.log_history if "eval_reward" in logs]
    assert len(evaluations) == 3 and trainer.state.best_metric == max(evaluations[1:])
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="batch"),
        pytest.param(
            ["--baseline=pool", "--retries=0", "--num_generations=4"], id="paper's mode", marks=pytest.mark.slow
        ),
    ],
)
def test_agent(options, tmp_path):
    """Every other game is won by binary search; in the others no number is guessed."""
    game = example("agent")["HigherOrLower"]()
    assert game.reset(secret=40) == " It is between 1 and 100."
    assert [game.guess(number) for number in (50, 25, 40)] == ["lower", "higher", "found"] and game.get_reward() == 1
    trainer = play(tmp_path, "--per_device_train_batch_size=8", *options)
    for logs in logs_of(trainer):
        assert logs["reward"] == logs["rewards/HigherOrLower/mean"] == 0.5 and logs["tools/call_frequency"] > 1
    assert (tmp_path / "model.safetensors").exists()


def test_agent_with_turns_of_the_model(tmp_path):
    generate = AdaGRPOTrainer._generate_single_turn
    few = ["--per_device_train_batch_size=4", "--max_completion_length=32"]
    trainer = play(tmp_path, *few, policy=generate)
    assert [logs["reward"] for logs in logs_of(trainer)] == [0, 0]


@pytest.mark.slow
def test_agent_on_two_processes(tmp_path):
    result = run_module("tests.examples.agent_worker", tmp_path, "--per_device_train_batch_size=8", processes=2)
    first, second = read_rank_outputs(tmp_path, 2, result)
    assert first["weights"] == second["weights"]
    assert [logs["reward"] for logs in first["logs"]] == [0.5, 0.5]
    assert first["won"] == second["won"] == [1.0, 0.0] * 4, "The environments of the rows that are trained on."


def run_script(name, tmp_path, monkeypatch, prepare=lambda rows: rows, reward=None, **sizes):
    """Run an example with an advantage function for two steps, with a tiny model. Returns its trainer."""
    sizes |= {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
    monkeypatch.setattr("ada_trl.AdaGRPOConfig", lambda **given: AdaGRPOConfig(**given | sizes))
    made = []

    def tiny_trainer(model, reward_funcs, args, train_dataset, advantage_func):
        tiny = {"processing_class": tiny_tokenizer(), "advantage_func": advantage_func}
        made.append(Recorder(tiny_model(), reward or reward_funcs, args, prepare(train_dataset), **tiny))
        return made[0]

    monkeypatch.setattr("ada_trl.AdaGRPOTrainer", tiny_trainer)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert made[0].state.global_step == 2
    return made[0]


def test_custom_advantage(tmp_path, monkeypatch):
    """
    The gradient is that of the mean reward: E[A_i (r_i - p_i)] = p_i (1 - p_i) for every rollout, by enumeration.
    """
    names = example("custom_advantage")
    pass_rate_N, expected_N = np.array([0.2, 0.7, 0.5, 0.9, 0.4]), np.zeros(5)
    columns = {"source": np.array(["a", "b", "a", "b", "a"])}
    for rewards in product((0.0, 1.0), repeat=5):
        rollouts = Rollouts.score([np.array([[reward]]) for reward in rewards], Scoring((1.0,), 0.5))
        advantage_N = names["baseline_per_source"](replace(rollouts, columns=columns))
        probability = np.prod(np.where(rollouts.reward_N == 1, pass_rate_N, 1 - pass_rate_N))
        expected_N += probability * advantage_N * (rollouts.reward_N - pass_rate_N)
    assert expected_N == pytest.approx(pass_rate_N * (1 - pass_rate_N))

    def source_of(prompt):
        return "ab"[len(prompt) % 2]

    rows = [{"problem": p, "prompt": p, "source": source_of(p)} for p in prompt_dataset(repeats=32)["prompt"]]
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: UnmappedDataset.from_list(rows))
    trainer = run_script("custom_advantage", tmp_path, monkeypatch, reward=even_reward, max_completion_length=4)
    for batch in trainer.batches:
        texts, prompts = (
            trainer.processing_class.batch_decode(batch[name], skip_special_tokens=True)
            for name in ("completion_ids", "prompt_ids")
        )
        length = batch["completion_mask"].sum(dim=1).numpy()
        reward = np.array(even_reward(texts)) - names["PENALTY_PER_TOKEN"] * length
        source = np.array([source_of(prompt) for prompt in prompts])
        assert len(set(source)) == 2
        for i, advantage in enumerate(batch["advantages"].tolist()):
            others = (source == source[i]) & (np.arange(len(source)) != i)
            assert advantage == pytest.approx(reward[i] - reward[others].mean(), abs=1e-6)


def test_win_rates(tmp_path, monkeypatch):
    names = example("win_rates")
    for rewards in product((-1e6, 0.0, 0.5, 1.0, None), repeat=4):
        advantage_N = names["win_rates"](Rollouts.of([[reward] for reward in rewards]))
        scored = [reward for reward in rewards if reward is not None]
        for reward, advantage in zip(rewards, advantage_N.tolist(), strict=True):
            signs = [] if reward is None else [np.sign(reward - other) for other in scored]
            assert advantage == pytest.approx(sum(signs) / max(len(scored) - 1, 1))
    binary = Rollouts.of([[1], [0], [0], [1], [1]])
    assert names["win_rates"](binary) == pytest.approx(batch_advantages(binary))
    assert names["negative_error"]([" 12.", "none"], [10, 3]) == [-2, -3]
    assert names["sums"]()[0] == {"prompt": "10 + 10 =", "answer": 20}

    def for_tiny_tokenizer(row):
        return {"prompt": row["prompt"].replace(" ", "")}

    trainer = run_script("win_rates", tmp_path, monkeypatch, prepare=lambda rows: rows.map(for_tiny_tokenizer))
    for rollouts, batch in zip(trainer.rollouts, trainer.batches, strict=True):
        assert batch["advantages"].numpy() == pytest.approx(names["win_rates"](rollouts), abs=1e-6)


class UnmappedDataset(Dataset):
    """Keeps its prompts as they are: texts, for the tiny tokenizer without a chat template."""

    def map(self, function):
        return self


def test_every_example_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES and all(f"[{path.name}]({path.name})" in listed for path in EXAMPLES)
