"""Values of configuration files are those of the command line."""

import datetime

import pytest
import yaml

from ada_trl.commands.errors import UserError
from ada_trl.commands.options import parse_args
from ada_trl.commands.reward_funcs import load_reward_funcs

from ..helpers import even_reward


def parse(path, config):
    path.write_text(yaml.safe_dump({"output_dir": "out", "use_cpu": True, "bf16": False} | config))
    return parse_args([f"--config={path}"])


@pytest.mark.parametrize(
    ("name", "given", "parsed"),
    [
        ("reward_weights", [1, 0.5], [1, 0.5]),
        ("learning_rate", "1e-5", 1e-5),  # YAML reads it as text
        ("max_rounds", "2", 2),
        ("log_completions", "yes", True),
        ("epsilon_high", None, None),
        ("adaptive_sampling", None, "seq-balance"),
        ("prompt_weighting", 0.25, 0.25),
        ("prompt_weighting", "none", "none"),
        ("model_init_kwargs", {"a": 1}, {"a": 1}),
        ("report_to", ["none"], []),
        ("scale_rewards", False, "none"),
        ("scale_rewards", "True", "group"),
        ("fsdp", True, True),
        ("run_name", datetime.date(2024, 1, 31), "2024-01-31"),
        ("dataset_name", 7, "7"),
        ("max_steps", 20.0, 20),
    ],
)
def test_values_are_read_as_on_the_command_line(name, given, parsed, tmp_path):
    configs = parse(tmp_path / "run.yaml", {name: given})
    (owner,) = [config for config in configs if name in vars(config)]
    assert getattr(owner, name) == parsed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"adaptive_sampling": "seq"}, r"adaptive_sampling \('seq'\) must be one of"),
        ({"baseline": "batch", "retries": None}, r"retries \(None\) must be an integer\. Leave it unset"),
        ({"eval_strategy": False}, "YAML reads eval_strategy: false as False"),
    ],
)
def test_values_that_are_no_values_of_their_field_are_rejected(config, message, tmp_path):
    with pytest.raises(UserError, match=message):
        parse(tmp_path / "run.yaml", config)


def test_one_reward_function_needs_no_list(tmp_path):
    script, _, _ = parse(tmp_path / "run.yaml", {"reward_funcs": "tests.helpers.even_reward"})
    assert load_reward_funcs(script.reward_funcs) == [even_reward]


@pytest.mark.parametrize(
    ("has_gpu", "words", "expected", "is_said"),
    [
        (False, ["--output_dir=out"], (True, False), True),
        (False, ["--output_dir=out", "--bf16=true"], (True, True), True),
        (False, ["--output_dir=out", "--use_cpu"], (True, True), False),
        (False, ["--config=arithmetic/batch.yaml"], (True, False), False),
        (True, ["--config=arithmetic/batch.yaml"], (True, False), False),
        (True, ["--output_dir=out", "--bf16=false"], (False, False), False),
    ],
)
def test_a_run_without_a_gpu_uses_the_cpu(has_gpu, words, expected, is_said, monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_gpu)
    _, args, _ = parse_args(words)
    assert (args.use_cpu, args.bf16) == expected
    assert ("no GPU was found" in capsys.readouterr().err) == is_said
