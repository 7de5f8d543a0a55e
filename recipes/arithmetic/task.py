"""
Integer addition with mixed digit counts: a reinforcement learning task that needs no download.

`python -m recipes.arithmetic.task --output_dir outputs/arithmetic` writes `data/` (train and test problems) and
`base/` (a Qwen2 model of about one million parameters, pretrained until it solves short sums and mostly fails long
ones), which the configurations in this folder train on.
"""

import argparse
import random
from pathlib import Path

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed


CHARACTERS = "0123456789+="
MAX_DIGITS = 5
MAX_ANSWER_TOKENS = MAX_DIGITS + 2  # one carry and the end-of-sequence token


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer: one token per digit and sign, built on the spot."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 5, seed: int = 0
) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 (1.0 million parameters with the default sizes)."""
    set_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )


def problems(number: int, seed: int, digits: tuple[int, ...] = tuple(range(1, MAX_DIGITS + 1))) -> Dataset:
    """
    Distinct sums with columns `prompt` (`"12+345="`), `answer` (`"357"`) and `digits` (of the longer summand).

    Both summands' digit counts are drawn uniformly from `digits`, so that short sums are as frequent as long ones.
    """
    rng = random.Random(seed)
    rows = {}
    while len(rows) < number:
        a, b = (rng.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in rng.choices(digits, k=2))
        rows[f"{a}+{b}="] = {"prompt": f"{a}+{b}=", "answer": str(a + b), "digits": len(str(max(a, b)))}
    return Dataset.from_list(list(rows.values()))


def exact_match(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward 1 if the completion is the sum, else 0."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def pretrain(output_dir: str, steps: int, seed: int = 0) -> None:
    """Supervised learning on random sums (completion-only loss), saved to `output_dir`."""
    from trl import SFTConfig, SFTTrainer

    tokenizer = build_tokenizer()
    batch_size = 256
    dataset = problems(steps * batch_size // 4, seed=seed + 1)
    trainer = SFTTrainer(
        model=build_model(tokenizer, seed=seed),
        args=SFTConfig(
            output_dir=output_dir,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            adam_beta2=0.98,
            logging_steps=50,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to="none",
            seed=seed,
        ),
        train_dataset=dataset.map(lambda row: {"completion": row["answer"]}, remove_columns=["answer", "digits"]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/arithmetic", help="Where to write data/ and base/.")
    parser.add_argument("--steps", type=int, default=700, help="Pretraining steps of 256 sums.")
    parser.add_argument("--num_train", type=int, default=4096, help="Training problems.")
    parser.add_argument("--num_test", type=int, default=256, help="Held-out problems.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    output_dir = Path(args.output_dir)
    dataset = problems(args.num_train + args.num_test, seed=args.seed + 1000)
    data_dir = output_dir / "data"
    data_dir.mkdir(parents=True, exist_ok=True)
    dataset.select(range(args.num_test)).to_json(data_dir / "test.jsonl")
    dataset.select(range(args.num_test, len(dataset))).to_json(data_dir / "train.jsonl")
    if (output_dir / "base" / "model.safetensors").exists():
        print(f"Using the base model in {output_dir / 'base'}.")
    else:
        pretrain(str(output_dir / "base"), steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
