"""
Sorting digits with intermediate steps: a task that needs no download, with completions of different lengths.

`python -m ada_trl.recipes.sorting.task --output_dir outputs/sorting` writes `data/` (train and test problems) and
`base/` (a Qwen2 model of 109 thousand parameters), which the configurations in this folder start from. `ada-trl train`
creates them automatically if they are missing.

The completion of `3142:` repeats the list after each swap of neighbors, `1342,1324,1234`, until it is sorted. A prompt
has many correct completions of different lengths. In the demonstrations for the base model, some swaps are of random
neighbors.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ada_trl.utils.console import replace_unknown_characters

from ..arithmetic.task import build_model, build_tokenizer, imitate, save, write_task


CHARACTERS = "0123456789,:"
LENGTHS = (3, 4, 5)  # of the lists
MAX_COMPLETION_TOKENS = 48
LONGEST_DEMONSTRATION = (
    64  # longer than the limit of sampling, so that some completions of the base model are truncated
)
RANDOM_SWAPS = 0.1  # fraction of the demonstrations' swaps that are of random neighbors
LEARNING_RATE = 3e-3  # of the pretraining


def problems(number: int, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Dataset:
    """
    Generate distinct unsorted lists of distinct digits with columns `prompt` (`"3142:"`),
    `answer` (`"1234"`) and `digits` (their number).

    The number of digits is sampled uniformly from `lengths`, as long as there are unused lists:
    600 of three digits, 4,830 of four.
    """
    existing = sum(math.perm(10, length) - math.comb(10, length) for length in lengths)
    if number > existing:
        raise ValueError(
            f"number ({number}) must be at most {existing}, the number of unsorted lists of these lengths."
        )
    rng = random.Random(seed)
    rows = {}
    while len(rows) < number:
        digits = _unsorted(rng, lengths)
        rows[digits] = {"prompt": f"{digits}:", "answer": "".join(sorted(digits)), "digits": len(digits)}
    return Dataset.from_list(list(rows.values()))


def _unsorted(rng: random.Random, lengths: tuple[int, ...] = LENGTHS) -> str:
    while True:
        digits = rng.sample("0123456789", rng.choice(lengths))
        if digits != sorted(digits):
            return "".join(digits)


def demonstration(digits: str, rng: random.Random, random_swaps: float = RANDOM_SWAPS) -> str:
    """
    Sort a list by swaps of random neighbors that are out of order or,
    with probability `random_swaps`, of any neighbors.

    The number of swaps has a long tail, because random swaps may have to be undone.
    """
    digits, lists = list(digits), []
    pairs = range(len(digits) - 1)
    while out_of_order := [i for i in pairs if digits[i] > digits[i + 1]]:
        i = rng.choice(pairs if rng.random() < random_swaps else out_of_order)
        digits[i], digits[i + 1] = digits[i + 1], digits[i]
        lists.append("".join(digits))
    return ",".join(lists)


def swaps_right(prompt: str, completion: str) -> float:
    """
    Return the fraction of lists that are one swap of neighbors away
    from the previous list (the prompt's for the first).
    """
    lists = [prompt.removesuffix(":"), *completion.split(",")]
    return sum(map(_is_swap, lists, lists[1:])) / (len(lists) - 1)


def _is_swap(before: str, after: str) -> bool:
    neighbors = range(len(before) - 1)
    return after in [before[:i] + before[i + 1] + before[i] + before[i + 2 :] for i in neighbors]


def sorted_by_swaps(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward 1 if the last list is the sorted one and each list is one swap away from the one before, else 0."""
    return [
        float(completion.rpartition(",")[2] == expected and swaps_right(prompt, completion) == 1)
        for prompt, completion, expected in zip(prompts, completions, answer, strict=True)
    ]


def work_and_answer(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """
    Graded reward from 0 to 1: half for the fraction of lists that are one swap away from the previous one, half for
    the fraction of correct positions in the last list.

    It is 1 if and only if [`sorted_by_swaps`] is 1. Almost correct completions receive more than 0.9: set
    `positive_threshold` to 0.99.
    """
    rewards = []
    for prompt, completion, expected in zip(prompts, completions, answer, strict=True):
        last = completion.rpartition(",")[2]
        places = sum(map(str.__eq__, last, expected)) if len(last) == len(expected) else 0
        rewards.append((swaps_right(prompt, completion) + places / len(expected)) / 2)
    return rewards


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> tuple[list[str], torch.Tensor]:
    """
    Sample one completion per prompt at temperature 1;
    return the texts and their numbers of tokens including EOS, `(prompts,)`.
    """
    training = model.training
    model.eval()
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_COMPLETION_TOKENS)
    model.train(training)
    ids = output[:, inputs["input_ids"].size(1) :]  # (B, T)
    return tokenizer.batch_decode(ids, skip_special_tokens=True), (ids != tokenizer.pad_token_id).sum(1)


def accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> float:
    """Return the fraction of `rows` solved by one sampled completion each (average@1 at temperature 1)."""
    completions, _ = sample(model, tokenizer, list(rows["prompt"]))
    return sum(sorted_by_swaps(list(rows["prompt"]), completions, list(rows["answer"]))) / len(rows)


def pretrain(output_dir: Path, steps: int, seed: int = 0, *, target: float = 0.35, check_every: int = 25) -> None:
    """
    Train a model on demonstrations and save it to `output_dir`.

    Training stops at the first check in which sampling solves at least `target` of held-out problems,
    or after `steps` steps.
    """
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, hidden_size=64, num_layers=2, seed=seed, max_position_embeddings=128)
    rng = random.Random(seed)
    lists = [_unsorted(rng) for _ in range(12_000)]
    pairs = [(f"{digits}:", demonstration(digits, rng)) for digits in lists]
    pairs = [pair for pair in pairs if len(pair[1]) < LONGEST_DEMONSTRATION]
    held_out = problems(512, seed=seed + 2)
    imitate(
        model,
        tokenizer,
        pairs,
        lambda: accuracy(model, tokenizer, held_out),
        steps,
        target=target,
        check_every=check_every,
        learning_rate=LEARNING_RATE,
    )
    save(model, tokenizer, output_dir)


def prepare(
    output_dir: str | Path, steps: int = 600, num_train: int = 4096, num_test: int = 256, seed: int = 0
) -> None:
    """Write `data/train.jsonl`, `data/test.jsonl` and, unless it exists, `base/`."""
    dataset = problems(num_train + num_test, seed=seed + 1000)
    write_task(Path(output_dir), dataset, num_test, lambda base: pretrain(base, steps, seed))


def main() -> None:
    replace_unknown_characters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/sorting"), help="Directory of data/ and base/."
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="Maximum number of pretraining steps, of 64 demonstrations each."
    )
    parser.add_argument("--num_train", type=int, default=4096, help="Training problems.")
    parser.add_argument("--num_test", type=int, default=256, help="Held-out problems.")
    parser.add_argument("--seed", type=int, default=0)
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
