# /// script
# dependencies = ["ada_trl"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
import torch
from datasets import load_dataset

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.recipes.arithmetic.task import exact_match, prepare


torch.set_num_threads(1)  # the model is so small that a second thread only waits
prepare("outputs/arithmetic")  # integer addition and a small base model; takes a minute, once
data = load_dataset("outputs/arithmetic/data")
sizes = {"per_device_train_batch_size": 128, "max_completion_length": 6, "max_steps": 20, "logging_steps": 5}
args = AdaGRPOConfig("outputs/first-run", baseline="batch", retries=2, learning_rate=2e-4, bf16=False, **sizes)
trainer = AdaGRPOTrainer("outputs/arithmetic/base", exact_match, args, data["train"], data["test"])
print("before:", trainer.evaluate()["eval_reward"])
trainer.train()
print("after:", trainer.evaluate()["eval_reward"])
