"""The full settings of notebook 2, which its dry run does not use: they are valid for the trainer and for vLLM."""

import re
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from transformers.training_args import TrainingArguments

from ada_trl import AdaGRPOConfig
from ada_trl.recipes.reasoning.task import MAX_ANSWER_TOKENS


nbformat = pytest.importorskip("nbformat", reason="needs the extra [notebooks]")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "2_lora_on_colab.ipynb"
T4, L4 = (7, "float16"), (8, "bfloat16")


def cells(*words):
    """Sources of the code cells that contain any of `words`."""
    code = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    return [source for source in code if any(word in source for word in words)]


def settings(monkeypatch, tmp_path, major, generation):
    """The namespace of the notebook's settings on a GPU of this generation, without a dry run."""
    monkeypatch.delenv("ADA_TRL_DRY_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    device = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    namespace = {}
    switches, sizes = cells("DRY_RUN =", "OUTPUT =")
    exec(switches.replace('"transformers"', repr(generation)), namespace)
    exec(sizes, namespace)
    assert namespace["GENERATION"] == generation and not namespace["DRY_RUN"]
    return namespace


@pytest.mark.parametrize("generation", ["transformers", "vllm-server"])
@pytest.mark.parametrize(("major", "dtype"), [T4, L4], ids=["T4", "L4"])
def test_full_settings_are_a_valid_config(major, dtype, generation, monkeypatch, tmp_path):
    namespace = settings(monkeypatch, tmp_path, major, generation)
    given = {}

    def on_the_cpu(**options):
        given.update(options)
        return AdaGRPOConfig(**options | {"use_cpu": True, "fp16": False, "bf16": False})

    monkeypatch.setattr("ada_trl.AdaGRPOConfig", on_the_cpu)
    namespace["PORT"] = 8000
    exec(cells("args = AdaGRPOConfig(")[0], namespace)
    args = namespace["args"]
    assert isinstance(args, TrainingArguments) and not given["use_cpu"]
    assert args.model_init_kwargs == {"dtype": dtype}
    assert (given["fp16"], given["bf16"]) == (dtype == "float16", dtype == "bfloat16")
    assert args.generation_batch_size == namespace["PROMPTS"]
    assert args.baseline == "batch" and args.num_generations == 1
    assert args.steps_per_generation == args.gradient_accumulation_steps
    recipe = yaml.safe_load((ROOT / "recipes/reasoning/batch.yaml").read_text())
    assert args.learning_rate == recipe["learning_rate"] and args.max_completion_length == MAX_ANSWER_TOKENS
    assert args.max_steps == recipe["max_steps"]
    assert args.generation_batch_size == recipe["per_device_train_batch_size"]
    assert args.use_vllm == (generation == "vllm-server")
    assert args.vllm_weight_sync == ("lora" if args.use_vllm else "nccl")
    assert args.max_steps % args.save_steps == 0, "the last checkpoint has the pass rates of the whole run"


def test_the_package_comes_from_the_address_that_setup_cfg_names(monkeypatch, tmp_path):
    """One line installs it; the badge opens this notebook there."""
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    (source,) = re.findall(r"^Source = (\S+)$", metadata["metadata"]["project_urls"], flags=re.MULTILINE)
    namespace = settings(monkeypatch, tmp_path, T4[0], "vllm-server")
    assert namespace["REPOSITORY"] == source
    (badge,) = re.findall(
        r"\]\((https://colab[^)]+/blob/[^)]+)\)", nbformat.read(NOTEBOOK, as_version=4).cells[0].source
    )
    path = f"{urlparse(source).path}/blob/main/{NOTEBOOK.relative_to(ROOT)}"
    assert badge == f"https://colab.research.google.com/github{path}"
    (install,) = cells('"pip", "install"')
    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    exec(install, namespace | {"REPOSITORY": "https://example.org/a/ada_trl"})
    requirement = Requirement(commands[0][-1])
    assert requirement.url == "git+https://example.org/a/ada_trl" and requirement.extras <= set(
        metadata["options.extras_require"]
    )
    assert "vllm" in requirement.extras


def test_server_command_serves_the_model_that_is_trained(monkeypatch, tmp_path):
    """vLLM parses it in tests/server/test_notebook.py."""
    namespace, started = settings(monkeypatch, tmp_path, T4[0], "vllm-server"), []
    fake = SimpleNamespace(Popen=lambda command, env, **_: started.append((command, env)), STDOUT=None)
    Path(namespace["OUTPUT"]).mkdir(parents=True)  # by `prepare`
    known = namespace | {"subprocess": fake, "BASE": f"{namespace['OUTPUT']}/base"}
    exec("import sys\n" + cells("def start_server")[0] + "\nstart_server()", known)
    ((command, environment),) = started
    options = dict(zip(command, command[1:], strict=False))
    assert options["--model"] == "outputs/reasoning-360m/base" and options["--dtype"] == "float16"
    assert options["--max-lora-rank"] == "32" and "--enable-lora" in command
    assert int(options["--max-model-len"]) > 8
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == environment["VLLM_SERVER_DEV_MODE"] == "1"
