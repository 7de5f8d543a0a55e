# /// script
# dependencies = ["ada_trl"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
r"""
Full fine-tuning on GSM8K with two rewards, one for the format and one for the answer.

`uv run examples/two_rewards.py`, or `accelerate launch examples/two_rewards.py`. `success_reward` selects the reward
function that defines success, and with it which prompts are sampled again; with the weighted sum, a correct format
alone could count as a success. `--baseline pool --retries 0` selects the paper's baseline.
"""

import re
import sys

from datasets import Dataset, load_dataset
from trl import TrlParser

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer


MODEL = "Qwen/Qwen2.5-0.5B"
INSTRUCTION = "Think step by step, and end with the answer as `#### number`."


def accuracy_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Return 1 if the last number of the completion equals the answer, else 0."""
    found = [re.findall(r"-?\d[\d,]*\.?\d*", completion) for completion in completions]
    numbers = [(numbers or [""])[-1].replace(",", "").rstrip(".") for numbers in found]
    return [float(number == right) for number, right in zip(numbers, answer, strict=True)]


def format_reward(completions: list[str], **kwargs) -> list[float]:
    """Return 1 if the completion ends with `#### number`, else 0."""
    return [float(bool(re.search(r"#### -?[\d,.]+\s*$", completion))) for completion in completions]


def gsm8k() -> Dataset:
    """Return rows with `prompt` and `answer`. Reward functions receive the columns as keyword arguments."""
    rows = load_dataset("openai/gsm8k", "main", split="train")
    return rows.map(
        lambda row: {
            "prompt": f"{row['question']}\n{INSTRUCTION}\n",
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }
    )


def main(args: list[str], model: str = MODEL, dataset: Dataset | None = None) -> AdaGRPOTrainer:
    parser = TrlParser(AdaGRPOConfig)
    parser.set_defaults(
        output_dir="outputs/two-rewards",
        baseline="batch",  # recommended; "pool" is the paper's baseline
        retries=2,  # a prompt without a success is sampled again in up to 2 later steps
        success_reward="accuracy_reward",
        reward_weights=[1.0, 0.2],
        per_device_train_batch_size=32,  # × 4 accumulation steps: 128 prompts per step, one rollout each
        gradient_accumulation_steps=4,
        max_completion_length=512,
        learning_rate=1e-6,
        max_steps=200,
    )
    (config,) = parser.parse_args_and_config(args)
    trainer = AdaGRPOTrainer(
        model=model,
        reward_funcs=[accuracy_reward, format_reward],
        args=config,
        train_dataset=gsm8k() if dataset is None else dataset,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
