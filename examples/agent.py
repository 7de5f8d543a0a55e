# /// script
# dependencies = ["ada_trl"]
#
# [tool.uv.sources]
# ada_trl = { path = ".." }
# ///
r"""
An agent that plays higher-or-lower by calling a tool. The reward comes from the environment.

`uv run examples/agent.py`, or `accelerate launch --num_processes 2 examples/agent.py`. Every rollout gets a separate
environment. The public methods of the environment are the tools. `reset` receives every column of the dataset's row
and returns a text that is appended to the prompt. For stateless tools, pass functions as `tools=[...]` instead of
`environment_factory`.
"""

import random
import sys

from datasets import Dataset
from trl import TrlParser

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer


MODEL = "Qwen/Qwen3-0.6B"
LARGEST, GUESSES = 100, 7  # enough for binary search


class HigherOrLower:
    """One game with a secret number."""

    def reset(self, secret: int, **row) -> str:
        self.secret, self.guesses, self.found = secret, 0, False
        return f" It is between 1 and {LARGEST}."

    def guess(self, number: int) -> str:
        """
        Tell whether the secret number is higher or lower than a guess.

        Args:
            number: The guess.

        Returns:
            "higher", "lower" or "found".
        """
        self.guesses += 1
        self.found = self.found or int(number) == self.secret
        return "found" if self.found else "higher" if self.secret > int(number) else "lower"

    def get_reward(self) -> float:
        """Return 1 if the number was found within the allowed guesses, else 0."""
        return float(self.found and self.guesses <= GUESSES)


def games(number: int, seed: int = 0) -> Dataset:
    """Return one row per game. The secret is not part of the prompt, so a unique `id` identifies the row."""
    rng = random.Random(seed)
    prompt = [{"role": "user", "content": f"Find my secret number with at most {GUESSES} calls of the tool `guess`."}]
    return Dataset.from_list(
        [{"id": str(i), "prompt": prompt, "secret": rng.randint(1, LARGEST)} for i in range(number)]
    )


def main(args: list[str], model: str = MODEL, **options) -> AdaGRPOTrainer:
    parser = TrlParser(AdaGRPOConfig)
    parser.set_defaults(
        output_dir="outputs/agent",
        baseline="batch",  # recommended; "pool" is the paper's baseline
        retries=2,  # a prompt without a success is sampled again in up to 2 later steps
        per_device_train_batch_size=32,  # 32 games, one rollout each
        max_completion_length=1024,  # total of all turns
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
