"""The elimination loop over injected sampling: in rounds, or prompt by prompt without a barrier."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .exit_conditions import ExitCondition
from .pool import Pool, Rollout


Draw = Callable[[Sequence[tuple[int, int]]], Sequence[Rollout]]
"""Takes rows `(prompt, draw)`, returns one rollout per row, in the same order."""

Submit = Callable[[int, int], None]
"""Takes a prompt and the number of its first draw, asks for the rollouts of its next round and returns at once."""

Collect = Callable[[], Sequence[tuple[int, int, Sequence[Rollout] | None]]]
"""Waits for at least one request; returns `(prompt, first draw, rollouts)`, `None` where there will be no rollouts."""

Progress = Callable[[int, int], None]
"""Takes the number of prompts still active and of rollouts drawn so far."""


def round_sizes(samples_per_round: int | Sequence[int], num_prompts: int) -> Sequence[int]:
    """Rollouts per round of each prompt, from one number for all or one per prompt."""
    return [samples_per_round] * num_prompts if isinstance(samples_per_round, int) else samples_per_round


def eliminate(
    num_prompts: int,
    draw: Draw,
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

    Each round draws `samples_per_round` (M) rollouts for every prompt still active and retires those whose pool meets
    the exit condition. A prompt still active after `max_rounds` (N) rounds is unresolved; that is no error. No prompt
    ever draws more than M × N rollouts. Prompts are positions `0 … num_prompts − 1`, so duplicates have pools of their
    own.

    M may be a sequence with one size per prompt. One round of such sizes is the sampling of Reinforce-Ada-Est.

    Args:
        pools (`Sequence[Pool]`, *optional*):
            Empty ones to fill, for those that do more than a [`Pool`] does.

    Returns:
        `list[Pool]`: one pool per prompt, in order.
    """
    pools = list(pools or (Pool(positive_threshold) for _ in range(num_prompts)))
    sizes = round_sizes(samples_per_round, num_prompts)
    active = list(range(num_prompts))
    for round_index in range(max_rounds):
        rows = [(prompt, round_index * sizes[prompt] + i) for prompt in active for i in range(sizes[prompt])]
        for (prompt, _), rollout in zip(rows, draw(rows), strict=True):
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
    samples_per_round: int | Sequence[int],
    max_rounds: int,
    positive_threshold: float,
    max_in_flight: int,
    pools: Sequence[Pool] | None = None,
    speculate_below: int = 0,
    barrier: bool = False,
    progress: Progress | None = None,
) -> list[Pool]:
    """
    The same algorithm where no prompt waits for another: each has a request in flight until it is retired.

    A prompt's M rollouts are awaited together, its rounds are taken in order and its exit condition is looked at after
    each, so the pools have the same distribution as those of [`eliminate`], whatever the requests' speed.

    Args:
        submit (`Submit`), collect (`Collect`):
            Start a request; wait for answers. A prompt whose next round is answered with `None` is retired with the
            pool it has. Requests still under way at the end are not needed.
        max_in_flight (`int`):
            Requests under way at once. Prompts that wait are served first come, first served.
        pools (`Sequence[Pool]`, *optional*):
            As in [`eliminate`].
        speculate_below (`int`, *optional*, defaults to `0`):
            When fewer requests are under way, ask for rounds of active prompts before the one before is answered. Such a
            round joins the pool only if the prompt turns out to need it; otherwise its rollouts are thrown away.
        barrier (`bool`, *optional*, defaults to `False`):
            Start a round only when the round before is complete, for comparison.

    Returns:
        `list[Pool]`: one pool per prompt, in order.
    """
    sizes = round_sizes(samples_per_round, num_prompts)
    pools = pools or [Pool(positive_threshold) for _ in sizes]
    prompts = [_Prompt(*prompt) for prompt in zip(range(num_prompts), sizes, pools, strict=True)]
    waiting = deque(prompts)
    in_flight = 0

    def next_prompt() -> _Prompt | None:
        if in_flight >= max_in_flight:
            return None
        if waiting:
            return waiting.popleft()
        if barrier or in_flight >= speculate_below:
            return None
        ahead = (prompt for prompt in prompts if not prompt.retired and prompt.asked < max_rounds)
        return min(ahead, key=lambda prompt: prompt.asked - prompt.done, default=None)

    while active := [prompt for prompt in prompts if not prompt.retired]:
        if barrier and not waiting and not in_flight:
            waiting.extend(active)
        while (prompt := next_prompt()) is not None:
            submit(prompt.number, prompt.asked * prompt.size)
            prompt.asked += 1
            in_flight += 1
        for number, first_draw, rollouts in collect():
            in_flight -= 1
            prompt = prompts[number]
            prompt.receive(first_draw, rollouts, exit_condition, max_rounds)
            if not barrier and not prompt.retired and prompt.asked == prompt.done:
                waiting.append(prompt)
        if progress is not None:
            progress(sum(not prompt.retired for prompt in prompts), sum(len(prompt.pool) for prompt in prompts))
    return [prompt.pool for prompt in prompts]


@dataclass(eq=False)
class _Prompt:
    """A prompt on its way through its rounds, whose answers may come in any order and are taken in theirs."""

    number: int
    size: int  # rollouts of a round
    pool: Pool
    asked: int = 0  # rounds
    done: int = 0  # rounds
    retired: bool = False
    answers: dict[int, Sequence[Rollout] | None] = field(default_factory=dict)  # by first draw, until their turn

    def receive(
        self, first_draw: int, rollouts: Sequence[Rollout] | None, exit_condition: ExitCondition, max_rounds: int
    ) -> None:
        self.answers[first_draw] = rollouts
        while not self.retired and (turn := self.done * self.size) in self.answers:
            rollouts = self.answers.pop(turn)
            self.done += 1
            for rollout in rollouts or ():
                self.pool.add(rollout)
            self.retired = rollouts is None or self.done == max_rounds or exit_condition(self.pool)
