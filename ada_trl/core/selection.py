"""Selection of the group that is trained on."""

import numpy as np

from .pool import Pool, Rollout


def select_group(pool: Pool, num_generations: int, seed: tuple[int, ...]) -> list[Rollout]:
    """
    Downsample a pool to the balanced group that is trained on (Algorithm 2 of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996), "oversample – downsample").

    `num_generations // 2` positives and the rest negatives, each sampled uniformly without replacement. If there are too
    few of one kind, more of the other are selected, and unscored rollouts only if nothing else is left. The selection
    depends on the seed and on the set of rollouts, never on the order of their arrival: selecting those that finished first
    would favor short completions.

    Args:
        pool (`Pool`):
            At least `num_generations` rollouts.
        num_generations (`int`):
            n, the size of the group.
        seed (`tuple[int, ...]`):
            Non-negative integers, for example (run seed, step, prompt).

    Returns:
        `list[Rollout]`: `num_generations` rollouts in order of their index.

    Raises:
        `ValueError`: if the pool is smaller than the group.
    """
    if len(pool) < num_generations:
        raise ValueError(
            f"A pool of {len(pool)} rollouts cannot fill a group of num_generations ({num_generations}). Sample at least "
            "num_generations rollouts per prompt."
        )
    rollouts = sorted(pool.rollouts, key=lambda rollout: rollout.draw_index)
    order = np.random.default_rng(seed).permutation(len(rollouts))
    shuffled = [rollouts[i] for i in order]
    positives = [rollout for rollout in shuffled if pool.is_positive(rollout)]
    negatives = [rollout for rollout in shuffled if pool.is_scored(rollout) and not pool.is_positive(rollout)]
    unscored = [rollout for rollout in shuffled if not pool.is_scored(rollout)]

    half = num_generations // 2
    num_positives = min(len(positives), max(half, num_generations - len(negatives)))
    num_negatives = min(len(negatives), num_generations - num_positives)
    group = positives[:num_positives] + negatives[:num_negatives]
    group += unscored[: num_generations - len(group)]
    return sorted(group, key=lambda rollout: rollout.draw_index)
