"""Trainings against a real vLLM server on the CPU."""

import requests
from datasets import load_dataset
from peft import LoraConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import exact_match

from ..helpers import QUICK, logs_of


LORA = LoraConfig(r=8, target_modules="all-linear")


def train(server, task_dir, tmp_path, peft_config=None, reward=exact_match, dataset=None, callbacks=None, **overrides):
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
        dataset or load_dataset(str(task_dir / "data"), split="train"),
        load_dataset(str(task_dir / "data"), split="test"),
        peft_config=peft_config,
        callbacks=callbacks,
    )
    trainer.train()
    return logs_of(trainer)


def served_models(server):
    return [model["id"] for model in requests.get(f"{server}/v1/models", timeout=10).json()["data"]]


def largest_difference(logs):
    return max(step["sampling/sampling_logp_difference/mean"] for step in logs)
