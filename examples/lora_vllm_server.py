# /// script
# dependencies = ["ada_trl[math,peft,vllm]"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
"""
LoRA with a vLLM server on the same GPU. Only the adapter is sent to the server after each step.

1. Start the server, in another terminal:

VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve Qwen/Qwen2.5-1.5B-Instruct \
    --enable-lora --max-lora-rank 16 --gpu-memory-utilization 0.4 --logprobs-mode processed_logprobs --max-logprobs -1

2. `uv run examples/lora_vllm_server.py`
"""

import sys

from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import TrlParser

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.recipes.math.prompts import to_prompt
from ada_trl.recipes.math.rewards import math_accuracy_reward


MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
RANK = 16  # must not exceed the server's --max-lora-rank


def gsm8k() -> Dataset:
    """Return conversational prompts that ask for a boxed answer, and the answers."""
    rows = load_dataset("openai/gsm8k", "main", split="train")
    return rows.map(
        lambda row: {"prompt": to_prompt(row["question"]), "answer": row["answer"].rpartition("####")[2].strip()}
    )


def main(args: list[str], model: str = MODEL, dataset: Dataset | None = None, **options) -> AdaGRPOTrainer:
    parser = TrlParser(AdaGRPOConfig)
    parser.set_defaults(
        output_dir="outputs/lora",
        baseline="batch",  # recommended; "pool" is the paper's baseline
        retries=2,  # a prompt without a success is sampled again in up to 2 later steps
        use_vllm=True,
        vllm_mode="server",
        vllm_weight_sync="lora",
        per_device_train_batch_size=32,  # × 4 accumulation steps: 128 prompts per step, one rollout each
        gradient_accumulation_steps=4,
        max_completion_length=512,
        learning_rate=1e-5,  # LoRA needs a higher rate than full fine-tuning
        max_steps=200,
    )
    (config,) = parser.parse_args_and_config(args)
    trainer = AdaGRPOTrainer(
        model=model,
        reward_funcs=math_accuracy_reward,
        args=config,
        train_dataset=gsm8k() if dataset is None else dataset,
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
        **options,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
