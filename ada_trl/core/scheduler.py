"""The elimination loop over an injected draw function."""

from collections.abc import Callable, Sequence

from .exit_conditions import ExitCondition
from .pool import Pool, Rollout


Draw = Callable[[Sequence[tuple[int, int]]], Sequence[Rollout]]
"""Takes rows `(prompt, draw)`, returns one rollout per row, in the same order."""


def eliminate(
    num_prompts: int,
    draw: Draw,
    exit_condition: ExitCondition,
    *,
    samples_per_round: int,
    max_rounds: int,
    positive_threshold: float,
) -> list[Pool]:
    """
    Successive elimination in rounds ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2).

    Each round draws `samples_per_round` (M) rollouts for every prompt still active and retires those whose pool meets
    the exit condition. A prompt still active after `max_rounds` (N) rounds is unresolved; that is no error. No prompt
    ever draws more than M × N rollouts. Prompts are positions `0 … num_prompts − 1`, so duplicates have pools of their
    own.

    Returns:
        `list[Pool]`: one pool per prompt, in order.
    """
    pools = [Pool(positive_threshold) for _ in range(num_prompts)]
    active = list(range(num_prompts))
    for round_index in range(max_rounds):
        first = round_index * samples_per_round
        rows = [(prompt, first + i) for prompt in active for i in range(samples_per_round)]
        for (prompt, _), rollout in zip(rows, draw(rows), strict=True):
            pools[prompt].add(rollout)
        active = [prompt for prompt in active if not exit_condition(pools[prompt])]
        if not active:
            break
    return pools
