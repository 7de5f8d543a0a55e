# /// script
# dependencies = ["ada_trl"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
"""
Conversational data with evaluation on a held-out set. The best checkpoint is kept.

`uv run examples/conversation.py`. Each `prompt` is a list of messages. Evaluation samples 4 completions per held-out
prompt without adaptive sampling, so `eval_reward` can be compared with any GRPO run.
"""

import sys

from datasets import Dataset, DatasetDict, load_dataset
from trl import TrlParser

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer


MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SYSTEM = "Answer with the number alone."


def number_reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs) -> list[float]:
    """Return 1 if the assistant's message equals the answer, else 0. Each completion is a list of messages."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def conversations(questions: list[str], answers: list[str]) -> Dataset:
    """Return rows in TRL's conversational format."""
    prompts = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in questions
    ]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def gsm8k() -> DatasetDict:
    rows = load_dataset("openai/gsm8k", "main")
    answers = {name: [text.rpartition("####")[2].strip() for text in split["answer"]] for name, split in rows.items()}
    splits = {name: conversations(list(split["question"]), answers[name]) for name, split in rows.items()}
    return DatasetDict(train=splits["train"], test=splits["test"].select(range(256)))


def main(args: list[str], model: str = MODEL, data: DatasetDict | None = None, **options) -> AdaGRPOTrainer:
    parser = TrlParser(AdaGRPOConfig)
    parser.set_defaults(
        output_dir="outputs/conversation",
        baseline="batch",  # recommended; "pool" is the paper's baseline
        retries=2,  # a prompt without a success is sampled again in up to 2 later steps
        per_device_train_batch_size=64,  # 64 prompts, one rollout each
        max_completion_length=64,
        learning_rate=1e-6,
        max_steps=200,
        eval_strategy="steps",
        eval_steps=50,
        eval_on_start=True,
        per_device_eval_batch_size=64,
        num_generations_eval=4,
        save_strategy="steps",
        save_steps=50,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        log_completions=True,
    )
    (config,) = parser.parse_args_and_config(args)
    data = gsm8k() if data is None else data
    trainer = AdaGRPOTrainer(
        model=model,
        reward_funcs=number_reward,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        **options,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
