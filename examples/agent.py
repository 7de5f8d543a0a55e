r"""
An agent: the model plays higher-or-lower by calling a tool, and its environment rewards it.

`accelerate launch --num_processes 2 examples/agent.py`. Every rollout gets an environment of its own. The public methods of the
environment are the tools; `reset` returns what is added to the prompt, and sees every column of the data set's row. For tools
without a state, pass functions as `tools=[...]` in place of `environment_factory`.
"""

import random
import sys

from datasets import Dataset
from trl import TrlParser

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer


MODEL = "Qwen/Qwen3-0.6B"
LARGEST, GUESSES = 100, 7  # halving finds any number with so many guesses


class HigherOrLower:
    """A secret number, and who tries to find it."""

    def reset(self, secret: int, **row) -> str:
        self.secret, self.guesses, self.found = secret, 0, False
        return f" It is between 1 and {LARGEST}."

    def guess(self, number: int) -> str:
        """
        Says whether the secret number is higher or lower than a guess.

        Args:
            number: The guess.

        Returns:
            "higher", "lower" or "found".
        """
        self.guesses += 1
        self.found = self.found or int(number) == self.secret
        return "found" if self.found else "higher" if self.secret > int(number) else "lower"

    def get_reward(self) -> float:
        """1 if the number was found in time."""
        return float(self.found and self.guesses <= GUESSES)


def games(number: int, seed: int = 0) -> Dataset:
    """One row per game. Rows differ in the secret, which is not in the prompt, so each gets an `id` that tells it from the others."""
    rng = random.Random(seed)
    prompt = [{"role": "user", "content": f"Find my secret number with at most {GUESSES} calls of the tool `guess`."}]
    return Dataset.from_list(
        [{"id": str(i), "prompt": prompt, "secret": rng.randint(1, LARGEST)} for i in range(number)]
    )


def main(args: list[str], model: str = MODEL, **options) -> AdaGRPOTrainer:
    parser = TrlParser(AdaGRPOConfig)
    parser.set_defaults(
        output_dir="outputs/agent",
        baseline="batch",  # "pool" is the paper's mode
        per_device_train_batch_size=32,  # as many games, with one rollout each
        max_completion_length=1024,  # of all turns together
        max_tool_calling_iterations=GUESSES,
        learning_rate=1e-6,
        max_steps=200,
    )
    (config,) = parser.parse_args_and_config(args)
    trainer = AdaGRPOTrainer(
        model=model,
        reward_funcs=[],
        args=config,
        train_dataset=games(4096),
        environment_factory=HigherOrLower,
        **options,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
