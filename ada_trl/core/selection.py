"""Selection of the group that is trained on."""

from collections.abc import Sequence

import numpy as np

from .rollouts import Rollouts


def select_groups(rollouts: Rollouts, num_generations: int, seeds: Sequence[tuple[int, ...] | None]) -> np.ndarray:
    """
    Downsample each pool to the balanced group that is trained on (Algorithm 2 of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996), "oversample – downsample").

    `num_generations // 2` positives and the rest negatives, each sampled uniformly without replacement. If there are
    too few of one kind, more of the other are selected, and unscored rollouts only if nothing else is left. The
    selection depends on the seed and on the set of rollouts, never on the order of their arrival: selecting those that
    finished first would favor short completions.

    Args:
        rollouts ([`~core.Rollouts`]):
            At least `num_generations` of each prompt that is trained on.
        num_generations (`int`):
            n, the size of a group.
        seeds (`Sequence[tuple[int, ...] | None]`):
            For each prompt non-negative integers, for example (run seed, step, prompt); `None` for a prompt that is
            not trained on.

    Returns:
        `np.ndarray` of `int`: indices of the selected rollouts, prompt by prompt, ascending.

    Raises:
        `ValueError`: if a pool is smaller than the group.
    """
    bounds = np.searchsorted(rollouts.prompt_N, np.arange(rollouts.num_prompts + 1))
    selected = [np.empty(0, dtype=int)]
    for start, end, seed in zip(bounds[:-1], bounds[1:], seeds, strict=True):
        if seed is None:
            continue
        if end - start < num_generations:
            raise ValueError(
                f"A pool of {end - start} rollouts cannot fill a group of num_generations ({num_generations}). Sample "
                "at least num_generations rollouts per prompt."
            )
        shuffled = start + np.random.default_rng(seed).permutation(end - start)
        is_positive, is_scored = rollouts.is_positive_N[shuffled], rollouts.is_scored_N[shuffled]
        positives, negatives = shuffled[is_positive], shuffled[is_scored & ~is_positive]
        half = num_generations // 2
        num_positives = min(len(positives), max(half, num_generations - len(negatives)))
        num_negatives = min(len(negatives), num_generations - num_positives)
        group = np.concatenate([positives[:num_positives], negatives[:num_negatives], shuffled[~is_scored]])
        selected.append(np.sort(group[:num_generations]))
    return np.concatenate(selected)
