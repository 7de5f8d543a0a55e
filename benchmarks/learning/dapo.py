"""Dynamic sampling of DAPO, the baseline that pays for signal with new prompts instead of more rollouts of the same."""

import numpy as np

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import Pool
from ada_trl.rollouts.in_rounds import RoundSource
from ada_trl.trainer.replay import Replay


class DapoTrainer(AdaGRPOTrainer):
    """
    GRPO with the dynamic sampling of [DAPO](https://huggingface.co/papers/2503.14476), for one process.

    Draws `num_generations` rollouts per prompt, drops the groups whose rewards are all equal, and draws as many new
    prompts again until the update batch is full of groups with contrast or `max_rounds` batches are drawn (DAPO's
    `max_num_gen_batches`). A batch that is still short is filled up with dropped groups, which carry no advantage. New
    prompts are drawn without replacement from the rest of the training set. Advantages are GRPO's.

    Only where the rollouts come from is changed: `reward`, `zero_signal/first_round` and the token counts are of
    everything that was drawn, `samples_per_prompt` is all rollouts per prompt of the update batch, `rounds/mean` the
    number of batches, and `zero_signal/final` the share of the update batch that had to be filled up.

    Raises:
        `ValueError`: with more than one process, with other arguments than those of [`dapo_arguments`], or if the
            training set is too small for `max_rounds` batches.
    """

    def __init__(self, *positional, **kwargs):
        super().__init__(*positional, **kwargs)
        args: AdaGRPOConfig = self.args
        if self.accelerator.num_processes > 1:
            raise ValueError(f"DapoTrainer runs on one process, not on {self.accelerator.num_processes}.")
        for name, value in dapo_arguments(args.num_generations).items():
            if getattr(args, name) != value:
                raise ValueError(f"DapoTrainer needs {name}={value!r}, got {getattr(args, name)!r}.")
        needed = args.max_rounds * args.generation_batch_size // args.num_generations
        if len(self.train_dataset) < needed:
            raise ValueError(
                f"max_rounds ({args.max_rounds}) batches need {needed} different prompts; the training set has "
                f"{len(self.train_dataset)}. Lower max_rounds."
            )

    def _collect(self, inputs: list[dict]) -> Replay:
        batch = self._own_prompts(inputs)
        rows = batch + self._other_rows({row["prompt"] for row in batch}, (self.args.max_rounds - 1) * len(batch))
        source = self._build_source(rows, [0] * len(rows))
        pools: list[Pool] = []
        while len(pools) < len(rows) and sum(not pool.is_uniform for pool in pools) < len(batch):
            pools += self._draw(source, range(len(pools), len(pools) + len(batch)))
        # Groups with contrast first, in the order drawn; the sort is stable.
        chosen = sorted(range(len(pools)), key=lambda i: pools[i].is_uniform)[: len(batch)]
        groups = [pool.rollouts if i in chosen else [] for i, pool in enumerate(pools)]
        replay = self._plan(source, pools, groups)
        replay.metrics |= self._dapo_metrics(pools, chosen)
        return replay

    def _other_rows(self, taken: set[str], number: int) -> list[dict]:
        rng = np.random.default_rng((self.args.seed, self.state.global_step))
        order = rng.permutation(len(self.train_dataset))[: number + len(taken)]
        others = [row for row in self.train_dataset.select(order) if row["prompt"] not in taken]
        return others[:number]

    def _draw(self, source: RoundSource, positions: range) -> list[Pool]:
        n = self.num_generations
        rollouts = source.draw([(position, draw) for position in positions for draw in range(n)])
        groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
        return [Pool(self.args.positive_threshold, group) for group in groups]

    def _dapo_metrics(self, pools: list[Pool], chosen: list[int]) -> dict[str, float]:
        batches = len(pools) / len(chosen)
        return {
            "samples_per_prompt/mean": batches * self.num_generations,
            "rounds/mean": batches,
            "zero_signal/final": float(np.mean([pools[i].is_uniform for i in chosen])),
        }


def dapo_arguments(num_generations: int) -> dict:
    """Arguments of an [`AdaGRPOConfig`] that make the update of a [`DapoTrainer`] that of GRPO."""
    return {
        "adaptive_sampling": "seq-balance",
        "num_generations": num_generations,
        "samples_per_round": num_generations,
        "min_positives": 1,
        "min_negatives": 1,
        "prompt_weighting": "none",
        "scale_rewards": "group",
    }
