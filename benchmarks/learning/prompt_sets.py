"""
Easy and hard problems of the arithmetic task, and exact evaluation.

An answer is one string, so the probability of sampling it is a product of token probabilities: one forward pass gives
the pass rate of a problem exactly, where average@k would estimate it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ada_trl.utils.files import atomic_write
from recipes.arithmetic.task import MAX_ANSWER_TOKENS, collate, problems


NUM_DRAWS = 16  # samples of the base model per candidate, as in the paper
# Candidates of a set: correct samples out of 16. The paper's hard set is the same, its easy set has 1 to 6.
PROMPT_SETS = {"easy": (4, 12), "hard": (1, 2)}
LARGE_SET = (1, 12)
NUM_TRAIN, NUM_LARGE, NUM_TEST = 1024, 12_800, 256
PASS_AT = (1, 8, 16, 64)


@torch.no_grad()
def pass_rates(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Dataset, batch_size: int = 256
) -> np.ndarray:
    """Exact probability of sampling each row's answer at temperature 1, `(rows,)`."""
    training = model.training
    model.eval()
    pairs = list(zip(rows["prompt"], rows["answer"], strict=True))
    rates = []
    for start in range(0, len(pairs), batch_size):
        batch = collate(tokenizer, pairs[start : start + batch_size])
        labels = batch.pop("labels")[:, 1:]  # (B, T - 1)
        logps = model(**batch).logits[:, :-1].float().log_softmax(-1)  # (B, T - 1, V)
        chosen = logps.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        rates.append((chosen * (labels >= 0)).sum(1).exp())
    model.train(training)
    return torch.cat(rates).double().numpy()


def by_family(values: np.ndarray, families: np.ndarray) -> dict[str, float]:
    """Mean of the problems' values by family."""
    return {name: float(values[families == name].mean()) for name in sorted(set(families))}


def pass_at_k(rates: np.ndarray, k: int) -> float:
    """Mean probability that at least one of k completions is correct, E[1 − (1 − p)^k]."""
    return float(np.mean(1 - (1 - rates) ** k))


@torch.no_grad()
def sampled_entropy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int = MAX_ANSWER_TOKENS,
    seed: int = 0,
) -> float:
    """Entropy of the policy in nats, mean over the tokens of one sampled completion per prompt."""
    inputs = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    model.train(training)
    entropies = torch.distributions.Categorical(logits=torch.stack(output.logits, dim=1)).entropy()  # (B, T)
    ended = output.sequences[:, inputs["input_ids"].size(1) :] == tokenizer.eos_token_id
    is_token = ended.cumsum(1) - ended.long() == 0  # up to and including the end-of-sequence token
    return float(entropies[is_token].mean())


def evaluate(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> dict:
    """Exact accuracy and pass@k; entropy on one sample per prompt."""
    rates = pass_rates(model, tokenizer, rows)
    evaluation = {"accuracy": float(rates.mean())} | {f"pass@{k}": pass_at_k(rates, k) for k in PASS_AT}
    return evaluation | {"entropy": sampled_entropy(model, tokenizer, rows["prompt"])}


def build(base: Path, output_dir: Path, seed: int = 0, num_candidates: int = 12_000) -> None:
    """
    Write `{easy,hard}_{train,test}.jsonl` with a column `base_pass_rate`.

    As in the paper, candidates are selected by the number of correct completions among 16 of the base model. They are
    simulated with the exact pass rate, which has the same distribution. Training and test sets share no problems.
    """
    rows, positives = candidates(base, seed, seed + 2000, num_candidates)
    positives[:NUM_TEST] = -1  # the first ones were a third set of the stored runs
    for name, correct in PROMPT_SETS.items():
        write_set(output_dir, name, rows, positives, correct, NUM_TRAIN)


def build_large(base: Path, output_dir: Path, seed: int = 0, num_candidates: int = 48_000) -> None:
    """Write `large_{train,test}.jsonl`: so many prompts that no run samples one twice."""
    rows, positives = candidates(base, seed, seed + 3000, num_candidates)
    write_set(output_dir, "large", rows, positives, LARGE_SET, NUM_LARGE)


def candidates(base: Path, seed: int, problems_seed: int, number: int) -> tuple[Dataset, np.ndarray]:
    """Problems with their pass rates, and the correct completions of each among 16."""
    model, tokenizer = load(base)
    rows = problems(number, seed=problems_seed)
    rates = pass_rates(model, tokenizer, rows)
    return rows.add_column("base_pass_rate", rates), np.random.default_rng(seed).binomial(NUM_DRAWS, rates)


def write_set(
    output_dir: Path, name: str, rows: Dataset, positives: np.ndarray, correct: tuple[int, int], num_train: int
) -> None:
    """Write test and training problems, of which the base model solves `correct` (fewest, most) of 16."""
    selected = np.flatnonzero((positives >= correct[0]) & (positives <= correct[1]))
    if len(selected) < num_train + NUM_TEST:
        raise ValueError(
            f"Only {len(selected)} of {len(rows)} candidates are in the {name} set, {num_train + NUM_TEST} are "
            "needed. Raise num_candidates."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    write(output_dir / f"{name}_test.jsonl", rows.select(selected[:NUM_TEST]))
    write(output_dir / f"{name}_train.jsonl", rows.select(selected[NUM_TEST : NUM_TEST + num_train]))


def write(path: Path, rows: Dataset) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def read_set(task_dir: Path, prompt_set: str) -> tuple[Dataset, Dataset]:
    """Training and test prompts of a set."""
    train, test = (read(task_dir / "learning" / f"{prompt_set}_{split}.jsonl") for split in ("train", "test"))
    return train, test


def load(base: Path):
    """The base model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
