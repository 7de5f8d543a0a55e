"""Training against a real vLLM server on the CPU: the server generates from the weights being trained, and it helps."""

import json
import signal
from contextlib import ExitStack
from statistics import mean

import pytest
import requests
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.cli import start
from ada_trl.train import main
from ada_trl.vllm.generation import AdaVLLMGeneration
from ada_trl.vllm.weight_sync import WeightSync
from recipes.arithmetic.task import exact_match, prepare
from recipes.arithmetic.vllm_server import running_server

from ..helpers import QUICK, free_port, logs_of
from .helpers import ROOT, fails, launch, our_threads, started, wait_until


RANK = 8
UNIFORM = {"adaptive_sampling": "uniform"}
LORA = LoraConfig(r=RANK, target_modules="all-linear")


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    prepare(directory, num_train=32, num_test=8)
    return directory


@pytest.fixture(scope="session")
def server(task_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with running_server(task_dir / "base", free_port(), log, max_lora_rank=RANK) as url:
        yield url


@pytest.fixture(autouse=True)
def original_weights(server, task_dir):
    """Whatever a test has left on the server, the next one starts from the base model."""
    yield
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(task_dir / "base")}}
    requests.post(f"{server}/collective_rpc", json=reload, timeout=60).raise_for_status()
    requests.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()


def train(server, task_dir, tmp_path, peft_config=None, reward=exact_match, callbacks=None, **overrides):
    options = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server,
        "per_device_train_batch_size": 64,
        "max_completion_length": 6,
    }
    trainer = AdaGRPOTrainer(
        str(task_dir / "base"),
        reward,
        AdaGRPOConfig(str(tmp_path), **QUICK | options | overrides),
        load_dataset(str(task_dir / "data"), split="train"),
        load_dataset(str(task_dir / "data"), split="test"),
        peft_config=peft_config,
        callbacks=callbacks,
    )
    trainer.train()
    return logs_of(trainer)


@pytest.mark.parametrize(
    ("sync", "peft_config", "learning_rate"),
    [("disk", None, 5e-4), ("lora", LORA, 3e-3), ("disk", LORA, 3e-3)],
    ids=["disk", "lora", "disk-merged-lora"],
)
def test_reward_rises_and_the_server_has_the_trained_weights(
    sync, peft_config, learning_rate, server, task_dir, tmp_path
):
    logs = train(
        server,
        task_dir,
        tmp_path,
        peft_config,
        vllm_weight_sync=sync,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_steps=25 if sync == "lora" or peft_config is None else 4,
    )
    assert max(step["sampling/sampling_logp_difference/mean"] for step in logs) < 1e-4
    assert max(step["ada/vllm/retries"] for step in logs) == 0
    if len(logs) == 25:
        assert mean(step["reward"] for step in logs[-5:]) > mean(step["reward"] for step in logs[:5]) + 0.1
    assert our_threads() == []
    assert not (tmp_path / "vllm_weight_sync").exists()
    models = requests.get(f"{server}/v1/models", timeout=10).json()["data"]
    assert [model["id"] for model in models] == [str(task_dir / "base")]


@pytest.mark.parametrize(("sync", "peft_config"), [("disk", None), ("lora", LORA)], ids=["disk", "lora"])
def test_without_the_sync_the_difference_shows(sync, peft_config, server, task_dir, tmp_path, monkeypatch):
    """The negative control of the test above, in which nothing else stops the run."""
    monkeypatch.setattr(WeightSync, f"sync_{sync}", lambda self: None)
    for name in ("verify_weights", "verify_weights_after"):
        monkeypatch.setattr(AdaVLLMGeneration, name, lambda *_: True)
    logs = train(server, task_dir, tmp_path, peft_config, vllm_weight_sync=sync, learning_rate=5e-3, max_steps=4)
    assert logs[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert logs[-1]["sampling/sampling_logp_difference/mean"] > 0.05


@pytest.mark.parametrize(("sync", "peft_config"), [("disk", None), ("lora", LORA)], ids=["disk", "lora"])
def test_without_the_sync_the_proof_stops_the_run(sync, peft_config, server, task_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(WeightSync, f"sync_{sync}", lambda self: None)
    with fails("does not have this step's weights.*per token"):
        train(server, task_dir, tmp_path, peft_config, vllm_weight_sync=sync, learning_rate=5e-3, max_steps=4)
    assert our_threads() == [] and not (tmp_path / "vllm_weight_sync").exists()


@pytest.mark.parametrize("mode", [UNIFORM, {}], ids=["uniform", "seq"])
def test_another_run_that_uses_the_same_server_is_noticed(mode, server, task_dir, tmp_path):
    """It sends its weights while the completions of this one are being rewarded, or sampled further."""
    other = AutoModelForCausalLM.from_pretrained(task_dir / "base")
    for parameter in other.parameters():
        parameter.data *= 1.2
    other.save_pretrained(tmp_path / "other")

    def reward(completions, **kwargs):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "other")}}
        requests.post(f"{server}/collective_rpc", json=reload, timeout=60).raise_for_status()
        return exact_match(completions, **kwargs)

    with fails("other weights than those|does not have this step's weights"):
        options = {"eval_strategy": "no", "max_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
        train(server, task_dir, tmp_path, vllm_weight_sync="disk", reward=reward, **options, **mode)


def test_a_restarted_server_gets_the_weights_again(task_dir, tmp_path):
    """Killed and started again after an evaluation has pushed the weights of the next step: to the one before."""
    port, log, running = free_port(), tmp_path / "vllm.log", ExitStack()
    url = running.enter_context(running_server(task_dir / "base", port, log, max_lora_rank=RANK))

    class Restart(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            running.close()
            running.enter_context(running_server(task_dir / "base", port, log, max_lora_rank=RANK))

    options = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "max_steps": 2, "eval_strategy": "steps"}
    options |= {"eval_steps": 1, "per_device_eval_batch_size": 8, **UNIFORM}
    with running:
        logs = train(url, task_dir, tmp_path, vllm_weight_sync="disk", callbacks=[Restart()], **options)
    assert len(logs) == 2 and max(step["sampling/sampling_logp_difference/mean"] for step in logs) < 1e-4


def test_a_run_that_is_ended_by_a_signal_leaves_nothing(server, task_dir, tmp_path):
    def adapters():
        models = requests.get(f"{server}/v1/models", timeout=10).json()["data"]
        return [model["id"] for model in models if model["id"].startswith("ada-")]

    options = {"url": server, "model": str(task_dir / "base"), "lora": True, "vllm_weight_sync": "lora"}
    options |= {"max_steps": 1000, "per_device_train_batch_size": 16, "samples_per_round": 4, "max_rounds": 3}
    with started(tmp_path / "run", **options) as process:
        wait_until(adapters, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert adapters() == [] and not list((tmp_path / "run").rglob("vllm_weight_sync"))


def test_two_processes_share_the_server(server, task_dir, tmp_path):
    options = {"url": server, "model": str(task_dir / "base"), "max_steps": 3, "per_device_train_batch_size": 8}
    options |= {"samples_per_round": 4, "max_rounds": 3, "vllm_request_timeout": 60}
    ranks = [rank for (rank,) in launch(2, tmp_path / "run", [options])]
    for rank in ranks:
        assert rank["error"] is None
    logs = ranks[0]["logs"]
    assert max(step["sampling/sampling_logp_difference/mean"] for step in logs) < 1e-4
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert all(step["ada/active_prompts/round_1"] == 4 for step in logs)


def test_a_real_refusal_names_its_reason(server, task_dir, tmp_path):
    """A prompt and completion beyond --max-model-len: vLLM answers 400, and its words reach the user."""
    dataset = load_dataset(str(task_dir / "data"), split="train").map(lambda row: {"prompt": row["prompt"] * 8})
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, "vllm_weight_sync": "disk"}
    trainer = AdaGRPOTrainer(
        str(task_dir / "base"), exact_match, AdaGRPOConfig(str(tmp_path), **QUICK | options), dataset
    )
    with fails("400: .*maximum context length is 64"):
        trainer.train()


@pytest.mark.parametrize("recipe", ["vllm-disk", "vllm-lora"])
def test_recipes_train(recipe, server, task_dir, tmp_path):
    overrides = [f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}", "--use_cpu"]
    overrides += [f"--output_dir={tmp_path}", f"--vllm_server_base_url={server}", "--max_steps=2", "--logging_steps=1"]
    overrides += ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=8", "--eval_steps=2"]
    main(["--config", str(ROOT / "recipes" / "arithmetic" / f"{recipe}.yaml"), *overrides])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    differences = [logs["sampling/sampling_logp_difference/mean"] for logs in history if "ada/rounds/mean" in logs]
    assert len(differences) == 2 and max(differences) < 1e-4
    assert [logs["step"] for logs in history if "eval_reward" in logs] == [0, 2]
    assert (tmp_path / ("adapter_model.safetensors" if recipe == "vllm-lora" else "model.safetensors")).exists()


@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_check_proves_the_weights_and_leaves_nothing(sync, server, task_dir, tmp_path, capsys):
    words = {
        "model_name_or_path": task_dir / "base",
        "dataset_name": task_dir / "data",
        "output_dir": tmp_path / "run",
    }
    words |= {"reward_funcs": "recipes.arithmetic.task.exact_match", "use_vllm": True, "vllm_mode": "server"}
    words |= {"vllm_server_base_url": server, "vllm_weight_sync": sync, "learning_rate": 0.01, "use_cpu": True}
    words |= {"bf16": "false", "gradient_checkpointing": "false", "max_completion_length": 6}
    lora = ["--use_peft", f"--lora_r={RANK}", "--lora_target_modules=all-linear"] * (sync == "lora")
    start("check", [f"--{name}={value}" for name, value in words.items()] + lora)
    printed = capsys.readouterr().out
    assert f"sent by {sync!r}" in printed and "weights after the step" in printed
    assert list(tmp_path.iterdir()) == [] and our_threads() == []
    models = requests.get(f"{server}/v1/models", timeout=10).json()["data"]
    assert [model["id"] for model in models] == [str(task_dir / "base")]
