from datasets import load_dataset

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.recipes.arithmetic.task import exact_match, prepare


prepare("outputs/arithmetic")  # sums such as 12+345=, and a small model that gets some of them right: a minute, once
args = AdaGRPOConfig("outputs/first-run", max_steps=20, learning_rate=2e-4, per_device_train_batch_size=128)
args.max_completion_length, args.logging_steps = 6, 5
sums = load_dataset("outputs/arithmetic/data", split="train")
trainer = AdaGRPOTrainer("outputs/arithmetic/base", exact_match, args, sums)
trainer.train()
print(trainer.evaluate(load_dataset("outputs/arithmetic/data", split="test"))["eval_reward"])
