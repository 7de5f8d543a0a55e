"""
Integer addition with mixed digit counts: a reinforcement learning task that needs no download.

`python -m ada_trl.recipes.arithmetic.task --output_dir outputs/arithmetic` writes `data/` (train and test problems)
and `base/` (a Qwen2 model of 858 thousand parameters, pretrained until its pass rates spread from 0 to 1), which the
configurations in this folder start from. `ada-trl train` creates them automatically if they are missing.
"""

import argparse
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

from ada_trl.utils.console import replace_unknown_characters
from ada_trl.utils.files import atomic_write
from ada_trl.utils.threads import bounded_threads


CHARACTERS = "0123456789+="
MAX_DIGITS = 4
MAX_ANSWER_TOKENS = MAX_DIGITS + 2  # one carry and the end-of-sequence token
LEARNING_RATE = 2e-3  # of the pretraining


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Build a character tokenizer: one token per digit and sign."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int = 128,
    num_layers: int = 4,
    seed: int = 0,
    max_position_embeddings: int = 64,
) -> Qwen2ForCausalLM:
    """Build a randomly initialized Qwen2 (858 thousand parameters with the default sizes)."""
    set_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max_position_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )


def problems(number: int, seed: int, digits: tuple[int, ...] = tuple(range(1, MAX_DIGITS + 1))) -> Dataset:
    """
    Generate distinct sums with columns `prompt` (`"12+345="`),
    `answer` (`"357"`) and `digits` (of the longer summand).

    The digit counts of both summands are sampled uniformly from `digits`,
    so that short sums are as frequent as long ones.
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


def pretrain(
    output_dir: Path, steps: int, seed: int = 0, *, target: float = 0.35, check_every: int = 50, batch_size: int = 64
) -> None:
    """
    Train a model on random sums with a loss on the answers only, and save it to `output_dir`.

    Training stops at the first check in which sampling solves at least `target` of held-out problems, or after `steps`
    steps. Accuracy rises steeply, so a fixed number of steps would not give base models of similar accuracy.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    rows, held_out = problems(12_000, seed=seed + 1), problems(256, seed=seed + 2)
    imitate(
        model,
        tokenizer,
        list(zip(rows["prompt"], rows["answer"], strict=True)),
        lambda: sampled_accuracy(model, tokenizer, held_out),
        steps,
        target=target,
        check_every=check_every,
        batch_size=batch_size,
    )
    save(model, tokenizer, output_dir)


def imitate(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[tuple[str, str]],
    accuracy: Callable[[], float],
    steps: int,
    *,
    target: float,
    check_every: int = 50,
    batch_size: int = 64,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Train on pairs of prompt and completion until `accuracy` reaches `target`, or for `steps` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=50)  # warm-up
    batches = DataLoader(
        pairs,
        batch_size=batch_size,
        sampler=RandomSampler(pairs, replacement=True, num_samples=steps * batch_size),
        collate_fn=lambda pairs: collate(tokenizer, pairs),
    )
    # Without a total: training usually stops long before the last step.
    goal = f"Training the base model to accuracy {target:g} (at most {steps} steps)"
    progress = tqdm(batches, goal, total=math.inf, unit="step", disable=None)  # `None`: unless on a terminal
    with bounded_threads(model):
        for step, batch in enumerate(progress, start=1):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % check_every == 0:
                reached = accuracy()
                progress.set_postfix(accuracy=f"{reached:.2f}")
                if reached >= target:
                    break
    progress.close()


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, output_dir: Path) -> None:
    """Save a model atomically: `output_dir` never contains an incomplete model."""
    unfinished = output_dir.with_name(f".{output_dir.name}.unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, output_dir)


@torch.no_grad()
def sampled_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> float:
    """Return the fraction of `rows` solved by one sampled completion each (average@1 at temperature 1)."""
    model.eval()
    prompts = tokenizer(list(rows["prompt"]), padding=True, padding_side="left", return_tensors="pt")
    prompts.pop("token_type_ids", None)
    generated = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS)
    model.train()
    completions = tokenizer.batch_decode(generated[:, prompts["input_ids"].size(1) :], skip_special_tokens=True)
    return sum(exact_match(completions, list(rows["answer"]))) / len(rows)


def collate(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """
    Tokenize prompts and answers to `input_ids`, `attention_mask` and `labels` (−100 outside the answer), each (B, T).
    """
    prompts, answers = zip(*pairs, strict=True)
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in pairs]
    batch = tokenizer(list(texts), padding=True, padding_side="right", return_tensors="pt")
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)  # one token per character
    in_prompt = torch.arange(batch["input_ids"].size(1)) < prompt_lengths
    labels = batch["input_ids"].masked_fill(in_prompt | (batch["attention_mask"] == 0), -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def prepare(
    output_dir: str | Path, steps: int = 3000, num_train: int = 4096, num_test: int = 256, seed: int = 0
) -> None:
    """Write `data/train.jsonl`, `data/test.jsonl` and, unless it exists, `base/`."""
    dataset = problems(num_train + num_test, seed=seed + 1000)
    write_task(Path(output_dir), dataset, num_test, lambda base: pretrain(base, steps, seed))


def write_task(output_dir: Path, dataset: Dataset, num_test: int, pretrain: Callable[[Path], None]) -> None:
    """Write the splits of `dataset` (the first `num_test` rows are held out), and the base model if it is missing."""
    splits = {"test": range(num_test), "train": range(num_test, len(dataset))}
    for split, rows in splits.items():
        with atomic_write(output_dir / "data" / f"{split}.jsonl") as temporary:
            dataset.select(rows).to_json(temporary)
    if (output_dir / "base").exists():
        print(f"Using the base model in {output_dir / 'base'}.")
    else:
        # Also where there is no terminal, and therefore no progress bar.
        print(f"Building the base model in {output_dir / 'base'}, about a minute.", flush=True)
        pretrain(output_dir / "base")


def main() -> None:
    replace_unknown_characters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/arithmetic"), help="Directory of data/ and base/."
    )
    parser.add_argument(
        "--steps", type=int, default=3000, help="Maximum number of pretraining steps, of 64 sums each."
    )
    parser.add_argument("--num_train", type=int, default=4096, help="Training problems.")
    parser.add_argument("--num_test", type=int, default=256, help="Held-out problems.")
    parser.add_argument("--seed", type=int, default=0)
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
