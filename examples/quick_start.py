# /// script
# dependencies = ["ada_trl", "math-verify"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
from datasets import load_dataset
from trl.rewards import accuracy_reward

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer


trainer = AdaGRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    args=AdaGRPOConfig(
        output_dir="out",
        baseline="batch",  # one rollout for each of 64 prompts per step
        retries=2,  # an unsolved prompt again in up to 2 later steps
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        max_steps=200,
    ),
    train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
)
trainer.train()
