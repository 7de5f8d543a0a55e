"""
Graded rewards on addition and sorting: tasks, and rewards of the first steps. The plan is in benchmarks/README.md.

A set is the hard or the easy set of addition with one kind of reward, such as `hard-digits`, or `sorting-graded`.
"""

import functools
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from recipes.arithmetic.task import MAX_ANSWER_TOKENS, exact_match, imitate, problems, save

from .. import names
from ..common import save_rows
from . import prompt_sets
from .training import Task


SIGN = "="  # the last character of a completion in the required format
OFFSETS = 4.0
NO_NUMBER = -100.0  # reward of a completion that is no number, in place of -|error| / 100
RECORDED_STEPS = 16  # two passes over the training prompts with one rollout per prompt
FIRST_STEPS, STORED_STEPS = "graded_first_steps", 5


def digits_right(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Fraction of positions with the right digit, of the longer one of completion and answer."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, one, right)) / max(len(one), len(right)) for one, right in pairs]


def errors(completions: list[str], answer: list[str]) -> np.ndarray:
    """|completion − answer|; infinite if a completion is no number."""
    pairs = zip(completions, answer, strict=True)
    return np.array([abs(int(one) - int(right)) if one.isdigit() else np.inf for one, right in pairs])


def closeness(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    return (1 / (1 + errors(completions, answer))).tolist()


def negative_error(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    return np.maximum(-errors(completions, answer) / 100, NO_NUMBER).tolist()


def exact_with_offset(prompts: list[str], completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Exact, plus a level between 0 and 4 that depends on the prompt, as that of a reward model does."""
    levels = [OFFSETS * zlib.crc32(prompt.encode()) / 2**32 for prompt in prompts]
    return np.add(exact_match(completions, answer), levels).tolist()


def exact_and_short(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Exact, minus 0.02 for each character."""
    return [right - 0.02 * len(one) for right, one in zip(exact_match(completions, answer), completions, strict=True)]


def exact_before_sign(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    return exact_match([completion.removesuffix(SIGN) for completion in completions], answer)


def in_format(completions: list[str], **kwargs) -> list[float]:
    return [float(completion.endswith(SIGN)) for completion in completions]


def recorded(reward: Callable, calls: list[dict]) -> Callable:
    """`reward`, which adds its prompts (hashed) and rewards to `calls` in the first steps of a run."""

    @functools.wraps(reward)
    def score(prompts: list[str], **columns) -> list[float]:
        rewards = reward(prompts=prompts, **columns)
        if len(calls) < RECORDED_STEPS:
            hashes = [zlib.crc32(prompt.encode()) for prompt in prompts]
            calls.append({"prompt": hashes, "reward": rewards})
        return rewards

    return score


def store_first_steps(runs_dir: Path) -> None:
    """Store the rewards of the first steps of the runs with the batch baseline, the weighted sum of all functions."""
    rows = []
    for path in sorted(runs_dir.glob("*.json")):
        record = json.loads(path.read_text())
        if record["method"] != names.BATCH:
            continue
        weights = record["options"].get("reward_weights", [1.0])
        for step, calls in enumerate(zip(*record["rewards"].values(), strict=True), start=1):
            total = np.dot(weights, [call["reward"] for call in calls]).astype(np.float32)
            rows.append(
                {"prompt_set": record["prompt_set"], "seed": record["seed"], "step": step, "reward": total.tolist()}
            )
    save_rows([row for row in rows if row["step"] <= STORED_STEPS], FIRST_STEPS)


def read(task_dir: Path, name: str):
    """Training and test prompts of a set, which are those of addition."""
    return prompt_sets.read_set(task_dir, name.partition("-")[0])


def evaluate_with_sign(model, tokenizer, rows) -> dict:
    """Exact accuracy with the sign or without it, and the accuracy in the required format."""
    signed = rows.map(lambda row: {"answer": row["answer"] + SIGN})
    in_format, without = (prompt_sets.pass_rates(model, tokenizer, own) for own in (signed, rows))
    return {"accuracy": float((in_format + without).mean()), "accuracy_in_format": float(in_format.mean())}


def load_with_sign(base: Path):
    return prompt_sets.load(base.with_name("base-sign"))


def prepare_base_with_sign(task_dir: Path, steps: int = 150) -> None:
    """
    Write `base-sign`: the base model after training on its own completions, half of them, at random, with the sign.
    So it misses the format about half of the time, and its accuracy is about that of the base model.
    """
    if (task_dir / "base-sign").exists():
        return
    model, tokenizer = prompt_sets.load(task_dir / "base")
    prompts = problems(6_000, seed=5000)["prompt"]
    torch.manual_seed(0)
    inputs = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    sampled = model.eval().generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS)
    texts = tokenizer.batch_decode(sampled[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    rng = random.Random(0)
    pairs = [(prompt, text + rng.choice(("", SIGN))) for prompt, text in zip(prompts, texts, strict=True)]
    imitate(model.train(), tokenizer, pairs, lambda: 0.0, steps, target=1.0, learning_rate=5e-4)
    save(model, tokenizer, task_dir / "base-sign")


def addition(reward: Callable | list[Callable], **options) -> Task:
    """`rollouts_per_step` and `steps` are those of addition with rewards of 0 and 1."""
    return Task(reward, options, 128, steps=100, read=read, evaluate=prompt_sets.evaluate, load=prompt_sets.load)


ABOVE_INCOMPLETE = {"positive_threshold": 0.99}  # a success is a right answer
KINDS = {
    "digits": addition(digits_right, **ABOVE_INCOMPLETE),
    "distance": addition(closeness, **ABOVE_INCOMPLETE),
    "error": addition(negative_error),
    "offset": addition(exact_with_offset),
    "functions": addition(
        [exact_before_sign, in_format],
        reward_weights=[1.0, 0.2],
        success_reward="exact_before_sign",
        max_completion_length=MAX_ANSWER_TOKENS + 1,
    )._replace(evaluate=evaluate_with_sign, load=load_with_sign),
    "length": addition(exact_and_short),
}
TASKS = {f"{level}-{kind}": task for kind, task in KINDS.items() for level in ("hard", "easy")}
WITHOUT_SUCCESS = ("error", "offset")  # kinds that define none
