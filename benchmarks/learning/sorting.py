"""
Sorting with a scratch pad: prompts, and evaluation by sampling.

A prompt has too many correct completions for exact pass rates, so each test prompt is sampled `SAMPLES` times. The
standard error of an accuracy, given the prompts, is √(mean of p(1 − p) / 4096), at most 0.008.
"""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ada_trl.recipes.math.statistics import pass_at_k
from recipes.sorting.task import MAX_COMPLETION_TOKENS, problems, sample, sorted_by_swaps, work_and_answer

from . import prompt_sets
from .training import Task


NUM_TRAIN, NUM_TEST = 1024, 256
SAMPLES = 16  # per test prompt
PASS_AT = (1, 2, 4, 8, 16)


def read(task_dir: Path, prompt_set: str) -> tuple[Dataset, Dataset]:
    """
    Training and test prompts, not selected by difficulty. Both sets have the same prompts and differ in the reward.
    """
    rows = problems(NUM_TRAIN + NUM_TEST, seed=2000)
    return rows.select(range(NUM_TEST, len(rows))), rows.select(range(NUM_TEST))


def evaluate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    samples: int = SAMPLES,
    seed: int = 0,
) -> dict:
    """Accuracy, its standard error and pass@k, unbiased; tokens per completion, and the fraction of truncated ones."""
    rows = rows.sort("digits")  # completions of a batch have similar lengths
    completions, lengths = [], []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(rows), 64):
            prompts = rows[start : start + 64]["prompt"]
            texts, tokens = sample(model, tokenizer, [prompt for prompt in prompts for _ in range(samples)])
            completions += texts
            lengths.append(tokens)
    drawn = [[value for value in rows[name] for _ in range(samples)] for name in ("prompt", "answer")]
    right = np.reshape(sorted_by_swaps(drawn[0], completions, drawn[1]), (len(rows), samples))
    mean_reward = np.mean(work_and_answer(drawn[0], completions, drawn[1]))
    # From the unbiased variance of each prompt's mean: the prompts are fixed.
    error = np.sqrt(right.var(axis=1, ddof=1).sum() / samples) / len(rows)
    evaluation = {"accuracy": float(right.mean()), "accuracy_error": float(error), "mean_reward": float(mean_reward)}
    for k in PASS_AT:
        if k <= samples:
            evaluation[f"pass@{k}"] = float(pass_at_k(right.sum(axis=1).astype(int), samples, k).mean())
    tokens = torch.cat(lengths).double()
    ended = tokens < MAX_COMPLETION_TOKENS  # a completion that ends with its last token counts as truncated
    evaluation |= {"completion_tokens": float(tokens.mean()), "truncated": float(1 - ended.double().mean())}
    evaluation["entropy"] = prompt_sets.sampled_entropy(model, tokenizer, rows["prompt"], MAX_COMPLETION_TOKENS)
    return evaluation


# Fewer rollouts than in the addition task, since completions are ten times as long.
SHARED = {"rollouts_per_step": 64, "steps": 60, "read": read, "evaluate": evaluate, "load": prompt_sets.load}
OPTIONS = {"max_completion_length": MAX_COMPLETION_TOKENS}
SORTING = Task(sorted_by_swaps, OPTIONS, **SHARED)
# Almost correct completions receive more than 0.9.
SORTING_GRADED = Task(work_and_answer, OPTIONS | {"positive_threshold": 0.99}, **SHARED)
