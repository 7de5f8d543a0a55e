"""The examples do what they say, on tiny models; that of a vLLM server is in tests/server."""

import runpy

import pytest
from datasets import Dataset, DatasetDict

from ada_trl import AdaGRPOTrainer
from ada_trl.recipes.arithmetic.task import prepare

from ..helpers import (
    QUICK_ARGUMENTS,
    ROOT,
    chat_tokenizer,
    logs_of,
    read_rank_outputs,
    run_module,
    tiny_chat_model,
    tiny_model,
    tiny_tokenizer,
)
from .agent_worker import play


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def example(name: str) -> dict:
    """The names that an example defines."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.slow
def test_offline_is_ten_lines_and_learns_from_sums(tmp_path, monkeypatch):
    text = (ROOT / "examples" / "offline.py").read_text()
    assert len([line for line in text.splitlines() if line]) <= 11
    assert text.strip().replace("\n\n\n", "\n\n") in (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    prepare("outputs/arithmetic", steps=3, num_train=64, num_test=8)
    printed = []
    names = runpy.run_path(str(ROOT / "examples" / "offline.py"), {"print": lambda _, value: printed.append(value)})
    assert names["trainer"].state.global_step == 20 and len(logs_of(names["trainer"])) == 4
    assert len(printed) == 2 and all(0 <= accuracy <= 1 for accuracy in printed)


def test_two_rewards(tmp_path):
    names = example("two_rewards")
    completions = ["so it is 1,024.\n#### 1,024", "12", "#### 12 apples", "none"]
    assert names["accuracy_reward"](completions, ["1024", "12", "13", "1"]) == [1, 1, 0, 0]
    assert names["format_reward"](completions) == [1, 0, 0, 0]
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
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


def test_agent(tmp_path):
    """Every other game is played by halving, which wins; the others are given up."""
    game = example("agent")["HigherOrLower"]()
    assert game.reset(secret=40) == " It is between 1 and 100."
    assert [game.guess(number) for number in (50, 25, 40)] == ["lower", "higher", "found"] and game.get_reward() == 1
    trainer = play(tmp_path, "--per_device_train_batch_size=8")
    for logs in logs_of(trainer):
        assert logs["reward"] == logs["rewards/HigherOrLower/mean"] == 0.5 and logs["tools/call_frequency"] > 1
    assert (tmp_path / "model.safetensors").exists()


def test_agent_with_the_models_own_turns(tmp_path):
    own = AdaGRPOTrainer._generate_single_turn
    few = ["--per_device_train_batch_size=4", "--max_completion_length=32"]
    trainer = play(tmp_path, *few, "--baseline=posterior", policy=own)
    assert trainer.pass_rates.reads_hidden_states and [logs["reward"] for logs in logs_of(trainer)] == [0, 0]


def test_agent_in_the_papers_mode(tmp_path):
    trainer = play(tmp_path, "--baseline=pool", "--num_generations=4", "--per_device_train_batch_size=8")
    assert [logs["reward"] for logs in logs_of(trainer)] == [0.5, 0.5]


@pytest.mark.slow
def test_agent_on_two_processes(tmp_path):
    result = run_module("tests.recipes.agent_worker", tmp_path, "--per_device_train_batch_size=8", processes=2)
    first, second = read_rank_outputs(tmp_path, 2, result)
    assert first["weights"] == second["weights"]
    assert [logs["reward"] for logs in first["logs"]] == [0.5, 0.5]
    assert first["won"] == second["won"] == [1.0, 0.0] * 4, "The environments of the rows that are trained on."


def test_every_example_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES and all(f"[{path.name}]({path.name})" in listed for path in EXAMPLES)
