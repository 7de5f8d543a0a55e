"""Successive elimination (Algorithm 2 of the paper): exit conditions, and the sampling loop in rounds or without a barrier."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .pool import Pool, Rollout


SampleFn = Callable[[Sequence[tuple[int, int]]], Sequence[Rollout]]
"""Takes requests `(prompt, rollout index)` and returns one rollout per request, in the same order."""

Submit = Callable[[int, int], None]
"""Takes a prompt and the index of its next rollout, requests the rollouts of its next round and returns at once."""

Collect = Callable[[], Sequence[tuple[int, int, Sequence[Rollout] | None]]]
"""Waits for at least one request; returns `(prompt, first index, rollouts)`, with `None` if the request has failed."""

Progress = Callable[[int, int], None]
"""Takes the number of prompts still active and of rollouts sampled so far."""


class OutcomeCounts(Protocol):
    """Part of a pool that an exit condition depends on."""

    @property
    def positives(self) -> int: ...

    @property
    def negatives(self) -> int: ...


@dataclass(frozen=True)
class ExitCondition:
    """
    Condition that a pool has enough positives and enough negatives
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2, exit conditions *pos* and *balance*).

    Args:
        min_positives (`int`):
            K_pos. *Seq-pos* is `ExitCondition(1, 0)`.
        min_negatives (`int`, *optional*, defaults to `0`):
            K_neg. *Seq-balance* with n rollouts per group is `ExitCondition(n // 2, n - n // 2)`.
    """

    min_positives: int
    min_negatives: int = 0

    def __call__(self, pool: OutcomeCounts) -> bool:
        return pool.positives >= self.min_positives and pool.negatives >= self.min_negatives


def eliminate(
    num_prompts: int,
    sample_round: SampleFn,
    exit_condition: ExitCondition,
    *,
    samples_per_round: int | Sequence[int],
    max_rounds: int,
    positive_threshold: float,
    pools: Sequence[Pool] | None = None,
    progress: Progress | None = None,
) -> list[Pool]:
    """
    Successive elimination in rounds ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2).

    Each round samples `samples_per_round` (M) rollouts for every prompt still active and retires those whose pool meets
    the exit condition. A prompt may still be active after `max_rounds` (N) rounds. No prompt ever has more
    than M × N rollouts. Prompts are positions `0 … num_prompts − 1`, so duplicates have separate pools.

    M may be a sequence with one size per prompt. One round of such sizes is the sampling of Reinforce-Ada-Est.

    Args:
        pools (`Sequence[Pool]`, *optional*):
            Empty pools to fill, of a subclass of [`Pool`].

    Returns:
        `list[Pool]`: one pool per prompt, in order.
    """
    pools = list(pools or (Pool(positive_threshold) for _ in range(num_prompts)))
    sizes = [samples_per_round] * num_prompts if isinstance(samples_per_round, int) else samples_per_round
    active = list(range(num_prompts))
    for round_index in range(max_rounds):
        requests = [(prompt, round_index * sizes[prompt] + i) for prompt in active for i in range(sizes[prompt])]
        for (prompt, _), rollout in zip(requests, sample_round(requests), strict=True):
            pools[prompt].add(rollout)
        active = [prompt for prompt in active if not exit_condition(pools[prompt])]
        if progress is not None:
            progress(len(active), sum(map(len, pools)))
        if not active:
            break
    return pools


def eliminate_async(
    num_prompts: int,
    submit: Submit,
    collect: Collect,
    exit_condition: ExitCondition,
    *,
    samples_per_round: int,
    max_rounds: int,
    positive_threshold: float,
    pools: Sequence[Pool] | None = None,
    speculate_below: int = 0,
    progress: Progress | None = None,
) -> list[Pool]:
    """
    Run the same algorithm without a barrier: each prompt has a request in flight until it is retired.

    A prompt's M rollouts are awaited together, its rounds are processed in order and its exit condition is checked after
    each, so the pools have the same distribution as those of [`eliminate`], whatever the speed of the requests.

    Args:
        submit (`Submit`), collect (`Collect`):
            Start a request; wait for results. A prompt whose next round is `None` is retired with the pool it has. The
            results of requests still in flight at the end are not needed.
        pools (`Sequence[Pool]`, *optional*):
            As in [`eliminate`].
        speculate_below (`int`, *optional*, defaults to `0`):
            If fewer requests are in flight, rounds of active prompts are requested before their previous round has returned.
            The rollouts of such a round are added to the pool only if the prompt needs them, and discarded otherwise.

    Returns:
        `list[Pool]`: one pool per prompt, in order.
    """
    pools = pools or [Pool(positive_threshold) for _ in range(num_prompts)]
    prompts = [_PromptState(number, samples_per_round, pool) for number, pool in enumerate(pools)]
    waiting = deque(prompts)
    in_flight = 0

    def next_prompt() -> _PromptState | None:
        if waiting:
            return waiting.popleft()
        if in_flight >= speculate_below:
            return None
        # All rounds that are known to be needed are in flight, and there is room: request one that may be needed, of the prompt
        # with the fewest such rounds.
        ahead = (prompt for prompt in prompts if not prompt.retired and prompt.submitted_rounds < max_rounds)
        return min(ahead, key=lambda prompt: prompt.submitted_rounds - prompt.completed_rounds, default=None)

    while any(not prompt.retired for prompt in prompts):
        while (prompt := next_prompt()) is not None:
            submit(prompt.number, prompt.submitted_rounds * prompt.round_size)
            prompt.submitted_rounds += 1
            in_flight += 1
        for number, first_index, rollouts in collect():
            in_flight -= 1
            prompt = prompts[number]
            prompt.receive(first_index, rollouts, exit_condition, max_rounds)
            # A speculative round may be in flight already.
            if not prompt.retired and prompt.submitted_rounds == prompt.completed_rounds:
                waiting.append(prompt)
        if progress is not None:
            progress(sum(not prompt.retired for prompt in prompts), sum(len(prompt.pool) for prompt in prompts))
    return [prompt.pool for prompt in prompts]


@dataclass(eq=False)
class _PromptState:
    """Progress of one prompt. Its rounds may return in any order and are processed in order."""

    number: int
    round_size: int  # rollouts
    pool: Pool
    submitted_rounds: int = 0
    completed_rounds: int = 0
    retired: bool = False
    pending: dict[int, Sequence[Rollout] | None] = field(default_factory=dict)  # by first index, until their turn

    def receive(
        self, first_index: int, rollouts: Sequence[Rollout] | None, exit_condition: ExitCondition, max_rounds: int
    ) -> None:
        self.pending[first_index] = rollouts
        while not self.retired and (turn := self.completed_rounds * self.round_size) in self.pending:
            rollouts = self.pending.pop(turn)
            self.completed_rounds += 1
            for rollout in rollouts or ():
                self.pool.add(rollout)
            self.retired = rollouts is None or self.completed_rounds == max_rounds or exit_condition(self.pool)
