"""A sampler whose completions are scripted, and files for it."""

import random

from tests.helpers import tiny_tokenizer


class Interrupted(Exception):
    pass


class ScriptedSampler:
    """
    Completes `a+b=` correctly as often as scripted.

    Args:
        counts (`Callable[[str], int]`):
            Correct completions of a sum.
        num_samples (`int`):
            Completions of each.
        fail_after (`int`, *optional*):
            Raises `Interrupted` when as many problems are finished.
    """

    def __init__(self, counts, num_samples: int, fail_after: float = float("inf")):
        self.counts, self.num_samples, self.fail_after = counts, num_samples, fail_after
        self.tokenizer = tiny_tokenizer()
        self.sampled: list[str] = []
        self.closed = False

    def generate(self, prompts, seeds):
        if len(self.sampled) + len(prompts) > self.fail_after:
            raise Interrupted
        completions = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            text = self.tokenizer.decode(prompt, skip_special_tokens=True)
            a, b = map(int, text.removesuffix("=").split("+"))
            answers = [str(a + b + (i >= self.counts(text))) for i in range(self.num_samples)]
            random.Random(seed).shuffle(answers)
            completions.append([self.tokenizer(answer)["input_ids"] for answer in answers])
            self.sampled.append(text)
        return completions

    def close(self) -> None:
        self.closed = True


def never(*args):
    raise AssertionError("Nothing should be sampled.")
