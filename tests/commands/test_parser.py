"""Values of configuration files: each is accepted or rejected in one sentence."""

import dataclasses
import re
import typing

import pytest
import yaml
from trl import ModelConfig

from ada_trl import AdaGRPOConfig
from ada_trl.commands.errors import UserError
from ada_trl.commands.options import AdaScriptArguments, parse_args
from ada_trl.commands.parser import MAPPING_OR_PATH


CLASSES = (AdaScriptArguments, AdaGRPOConfig, ModelConfig)
HINTS = {name: hint for config in CLASSES for name, hint in typing.get_type_hints(config).items()}
FIELDS = sorted(field.name for config in CLASSES for field in dataclasses.fields(config) if field.init)
OWN = {*AdaGRPOConfig.__annotations__, *AdaScriptArguments.__annotations__}
ONE_PER_TYPE = {str(HINTS[name]): name for name in FIELDS}.values()
SHAPES = [3, 0.5, "text", True, None, [1], ["text"], [{"key": 1}], [None], [], {"key": 1}, [[1]]]
PYTHONS_WORDS = re.compile("object of type|object has no|object is not|not supported between")
ALIASES = {"gradient_checkpointing_kwargs": "activation_checkpointing_kwargs"}  # of transformers
BASE = {"output_dir": "out", "use_cpu": True, "bf16": False}


def parse(path, config):
    path.write_text(yaml.safe_dump(BASE | config))
    return parse_args([f"--config={path}"], required=())


def fits(value, hint) -> bool:
    """Whether a parsed value has the shape of its type; transformers turns some text into other objects."""
    members = typing.get_args(hint) if typing.get_origin(hint) not in (list, dict, typing.Literal) else ()
    kinds = {typing.get_origin(member) or member for member in members or (hint,)}
    if isinstance(value, list):
        return list in kinds
    if isinstance(value, dict):
        return dict in kinds
    return not (kinds <= {list, dict, type(None)} and value is not None)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(sorted({*OWN, *ONE_PER_TYPE}), id="own and one per type"),
        pytest.param(FIELDS, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_value_of_any_shape_is_accepted_or_rejected_in_one_sentence(shape, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for name in fields:
        try:
            configs = parse(tmp_path / "run.yaml", {name: shape})
        except UserError as error:
            if (
                "\n" in str(error)
                or PYTHONS_WORDS.search(str(error))
                or not (error.__cause__ or name in str(error) or ALIASES.get(name, name) in str(error))
            ):
                wrong[name] = str(error)
            continue
        except Exception as error:
            wrong[name] = repr(error)
            continue
        (owner,) = [config for config in configs if name in vars(config)]
        value = vars(owner)[name]
        unread = isinstance(value, str) and dict in typing.get_args(HINTS[name]) and name not in MAPPING_OR_PATH
        # TRL's ModelConfig itself turns `lora_target_modules: [all-linear]` into text.
        if unread or not (fits(value, HINTS[name]) or name == "lora_target_modules"):
            wrong[name] = value
    assert not wrong


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"datasets": "plain.jsonl"}, "datasets: plain.jsonl is not a mapping"),
        ({"datasets": [{"path": ["a", "b"]}]}, "is not a mapping with a `path` that is text"),
        ({"datasets": [{"path": "a", "pth": "a"}]}, "unexpected keyword argument 'pth'"),
        ({"seed": [1, 2]}, r"seed: \[1, 2\], but it takes one value"),
        ({"seed": {"a": 1}}, "seed: {'a': 1}, but it takes one value"),
        ({"seed": None}, "seed: None, but it takes a value, not null"),
        ({"seed": "many"}, "seed: many, but it takes int, not 'many'"),
        ({"model_init_kwargs": "bfloat16"}, "model_init_kwargs is 'bfloat16', but it takes a mapping"),
        (
            {"model_init_kwargs": "{dtype: bfloat16}"},
            "model_init_kwargs is '{dtype: bfloat16}', but it takes a mapping",
        ),
        ({"model_init_kwargs": 5}, "model_init_kwargs: 5, but it takes a mapping"),
        ({"reward_weights": [[1]]}, r"reward_weights: \[\[1\]\], but it takes a list of values"),
        ({"env": ["A"]}, "env: .*takes a mapping of variables"),
        ({"env": {"A=B": 1}}, "env: {'A=B': 1}, but 'A=B' cannot be set"),
        ({"adaptive_sampling": "seq"}, "adaptive_sampling: seq, but it takes one of 'seq-balance'"),
    ],
)
def test_the_message_contains_field_value_and_shape(config, message, tmp_path):
    with pytest.raises(UserError, match=message):
        parse(tmp_path / "run.yaml", config)


@pytest.mark.parametrize(
    ("name", "given", "parsed"),
    [
        ("reward_weights", 1, [1.0]),
        ("reward_weights", [1, "0.5"], [1.0, 0.5]),
        ("reward_funcs", "my.reward", ["my.reward"]),
        ("learning_rate", "1e-5", 1e-5),  # YAML reads it as text
        ("max_rounds", "2", 2),
        ("dataset_name", 5, "5"),
        ("resume_from_checkpoint", True, "true"),
        ("log_completions", "yes", True),
        ("epsilon_high", None, None),
        ("adaptive_sampling", None, "seq-balance"),
        ("prompt_weighting", 0.25, 0.25),
        ("prompt_weighting", "none", "none"),
        ("model_init_kwargs", {"a": 1}, {"a": 1}),
        ("report_to", ["none"], []),
        ("eval_strategy", False, "no"),  # YAML reads `no` as false
        ("scale_rewards", False, "none"),
        ("scale_rewards", "True", "group"),
        ("fsdp", True, True),
    ],
)
def test_values_are_read_as_on_the_command_line(name, given, parsed, tmp_path):
    configs = parse(tmp_path / "run.yaml", {name: given})
    (owner,) = [config for config in configs if name in vars(config)]
    assert getattr(owner, name) == parsed


def test_a_field_that_is_set_twice_is_rejected(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1.0e-5\nseed: 1\nlearning_rate: 2.0e-5\n")
    with pytest.raises(UserError, match="run.yaml has learning_rate 2 times"):
        parse_args([f"--config={path}"], required=())
