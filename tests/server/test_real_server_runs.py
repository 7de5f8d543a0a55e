"""
Runs against a real vLLM server on the CPU: recipes, `check`, several ranks, a restart, and a run that is terminated.
"""

import json
from contextlib import ExitStack

import pytest
from transformers import TrainerCallback

from ada_trl.commands.train import main
from recipes.arithmetic.vllm_server import running_server

from ..helpers import free_port
from .helpers import ROOT, launch
from .real import largest_difference, train


def test_a_restarted_server_gets_the_weights_again(task_dir, tmp_path):
    """It is killed and started again after a step."""
    port, log, running = free_port(), tmp_path / "vllm.log", ExitStack()
    url = running.enter_context(running_server(task_dir / "base", port, log, max_lora_rank=8))

    class Restart(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                running.close()
                running.enter_context(running_server(task_dir / "base", port, log, max_lora_rank=8))

    options = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "max_steps": 2, "eval_strategy": "no"}
    options |= {"adaptive_sampling": "uniform"}
    with running:
        logs = train(url, task_dir, tmp_path, vllm_weight_sync="disk", callbacks=[Restart()], **options)
    assert len(logs) == 2 and largest_difference(logs) < 1e-4


def test_two_ranks_share_the_server(server, task_dir, tmp_path):
    options = {"url": server, "model": str(task_dir / "base"), "max_steps": 3, "per_device_train_batch_size": 8}
    options |= {"samples_per_round": 4, "max_rounds": 3, "vllm_request_timeout": 60}
    ranks = [rank for (rank,) in launch(2, tmp_path / "run", [options])]
    assert [rank["error"] for rank in ranks] == [None, None]
    logs = ranks[0]["logs"]
    assert largest_difference(logs) < 1e-4
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize("recipe", ["vllm-disk", "vllm-lora"])
def test_recipes_train(recipe, server, task_dir, tmp_path):
    overrides = [f"--model_name_or_path={task_dir / 'base'}", f"--dataset_name={task_dir / 'data'}", "--use_cpu"]
    overrides += [f"--output_dir={tmp_path}", f"--vllm_server_base_url={server}", "--max_steps=2", "--logging_steps=1"]
    overrides += ["--per_device_train_batch_size=16", "--per_device_eval_batch_size=8", "--eval_steps=2"]
    main(["--config", str(ROOT / "recipes" / "arithmetic" / f"{recipe}.yaml"), *overrides])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    steps = [logs for logs in history if "ada/rounds/mean" in logs]
    assert len(steps) == 2 and largest_difference(steps) < 1e-4
    assert [logs["step"] for logs in history if "eval_reward" in logs] == [0, 2]
    assert (tmp_path / ("adapter_model.safetensors" if recipe == "vllm-lora" else "model.safetensors")).exists()
