"""
Evaluation of a language model whose answers contain intermediate steps (`recipes.reasoning.written_steps`).

Many completions of a problem are correct, so each test problem is sampled `SAMPLES` times. The standard error of an
accuracy, given the problems, is √(mean of p(1 − p) / 1536), at most 0.013.
"""

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ada_trl.core import pass_at_k
from recipes.reasoning.written_steps import MAX_COMPLETION_TOKENS, solved

from .prompt_sets import by_family


SAMPLES, ROWS = 16, 256  # completions of a test problem, and of a batch
PASS_AT = (1, 4, 16)


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> tuple[list[str], torch.Tensor]:
    """
    Sample a completion of each prompt at temperature 1; returns the texts and their numbers of tokens, `(prompts,)`.
    """
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_COMPLETION_TOKENS)
    ids = output[:, inputs["input_ids"].size(1) :]  # (B, T)
    return tokenizer.batch_decode(ids, skip_special_tokens=True), (ids != tokenizer.pad_token_id).sum(1)


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, seed: int = 0) -> dict:
    """
    Accuracy and pass@k, unbiased; by family also the zero-variance groups of four; tokens, and truncated completions.
    """
    rows = rows.sort("family")  # completions of a batch have similar lengths
    drawn = {name: [value for value in rows[name] for _ in range(SAMPLES)] for name in ("prompt", "family", "entry")}
    texts, lengths = [], []
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(drawn["prompt"]), ROWS):
            found, tokens = sample(model, tokenizer, drawn["prompt"][start : start + ROWS])
            texts += found
            lengths.append(tokens)
    model.train(training)
    successes = np.reshape(solved(texts, drawn["family"], drawn["entry"]), (len(rows), SAMPLES)).sum(1).astype(int)
    failures = SAMPLES - successes
    # Of a group of four of the completions, without replacement: unbiased.
    alike = (1 - pass_at_k(successes, SAMPLES, 4)) + (1 - pass_at_k(failures, SAMPLES, 4))
    families = np.asarray(rows["family"])

    tokens = torch.cat(lengths).double()
    return {
        "accuracy": float(successes.mean() / SAMPLES),
        "by_family": by_family(successes / SAMPLES, families),
        "frac_zero_variance": by_family(alike, families) | {"all": float(alike.mean())},
        **{f"pass@{k}": float(pass_at_k(successes, SAMPLES, k).mean()) for k in PASS_AT},
        "completion_tokens": float(tokens.mean()),
        "truncated": float((tokens >= MAX_COMPLETION_TOKENS).double().mean()),
    }
