"""A real vLLM server on the CPU generates from the weights that are trained, and errors show if it does not."""

from statistics import mean

import pytest
import requests
from datasets import load_dataset
from transformers import AutoModelForCausalLM

from ada_trl.vllm.weight_sync import WeightSync
from recipes.arithmetic.task import exact_match

from .helpers import fails
from .real import LORA, largest_difference, served_models, train


@pytest.mark.parametrize(
    ("sync", "peft_config", "learning_rate", "steps"),
    [("disk", None, 5e-4, 25), ("lora", LORA, 3e-3, 25), ("disk", LORA, 3e-3, 4)],
    ids=["disk", "lora", "disk-merged-lora"],
)
def test_the_reward_rises_with_the_trained_weights(
    sync, peft_config, learning_rate, steps, server, task_dir, tmp_path
):
    options = {"learning_rate": learning_rate, "lr_scheduler_type": "constant", "max_steps": steps}
    logs = train(server, task_dir, tmp_path, peft_config, vllm_weight_sync=sync, **options)
    assert largest_difference(logs) < 1e-4
    assert max(step["ada/vllm/retries"] for step in logs) == 0
    if steps == 25:
        assert mean(step["reward"] for step in logs[-5:]) > mean(step["reward"] for step in logs[:5]) + 0.1
    assert served_models(server) == [str(task_dir / "base")]


def test_the_weight_check_stops_a_run_without_the_synchronization(server, task_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(WeightSync, "sync_lora", lambda self: None)
    with fails("does not have this step's weights.*per token"):
        train(server, task_dir, tmp_path, LORA, vllm_weight_sync="lora", learning_rate=5e-3, max_steps=4)


def test_another_run_on_the_same_server_is_detected(server, task_dir, tmp_path):
    """It sends its weights while the completions of this run are being rewarded."""
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
        train(server, task_dir, tmp_path, vllm_weight_sync="disk", reward=reward, **options)


def test_a_rejection_by_vllm_is_quoted(server, task_dir, tmp_path):
    """Prompts longer than --max-model-len, which vLLM answers with 400; the message depends on its version."""
    dataset = load_dataset(str(task_dir / "data"), split="train").map(lambda row: {"prompt": row["prompt"] * 8})
    with fails("400: .*(maximum context length is 64|max_tokens must be at least 1)"):
        train(server, task_dir, tmp_path, vllm_weight_sync="disk", dataset=dataset)
