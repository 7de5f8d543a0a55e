"""What every source of rollouts has in common: it keeps the completions and hands out the selected ones."""

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..core import Pool, Rollout
from ..utils.distributed import exchange
from .batch_slots import BatchSlot


class Completion(NamedTuple):
    """
    One completion, with what it takes to train on it.

    Args:
        columns (`tuple`):
            Its entries of what the trainer's generation returned; opaque here.
        row (`dict`):
            What the prompt can be prepared from again: the prompt as generated from, with images and an environment's
            observation in its messages, and the environment's name where there are several.
        extras (`dict[str, Any]`):
            What reward functions logged of it for the completions table.
        length (`int`):
            Generated tokens.
        truncated (`bool`):
            Whether the length cap ended it.
        environment (`Any`, *optional*):
            In which it was played.
    """

    columns: tuple
    row: dict
    extras: dict[str, Any]
    length: int
    truncated: bool
    environment: Any = None


class Completions(NamedTuple):
    """
    What one process has generated and scored at once.

    Args:
        rows (`list[Completion]`):
            At least one.
        rewards (`torch.Tensor` of shape `(rows, num_reward_funcs)`):
            Unweighted rewards; NaN where a function returned `None`.
        tool_calls (`tuple[int, int]`):
            Calls of tools, and how many of them failed.
        reward_seconds (`float`):
            Time spent in reward functions.
        tokens_seen (`int`):
            Tokens of prompts and completions.
        states (`torch.Tensor` of shape `(rows, H)`, *optional*):
            The policy's hidden states at the last prompt token, where they were caught.
    """

    rows: list[Completion]
    rewards: torch.Tensor
    tool_calls: tuple[int, int]
    reward_seconds: float
    tokens_seen: int
    states: torch.Tensor | None = None


class SelectedRollouts(NamedTuple):
    """
    The selected completions that one process trains on, and what is known of all processes' sampling.

    Args:
        rows (`list[Completion]`):
            Of this process.
        stats (`dict[str, float]`):
            Counts summed over processes, seconds averaged.
        first_round (`list[tuple[int, bool]]`):
            Length of every completion of the first round, and whether it was truncated.
    """

    rows: list[Completion]
    stats: dict[str, float]
    first_round: list[tuple[int, bool]]


class RolloutSampler:
    """
    Base class of the sources of rollouts. A rollout's `location` is `(process, row)`: which process holds the completion, and where.

    Args:
        prompts (`range`):
            Which of all processes' prompts this process asks for.
        split_rewards (`Callable[[torch.Tensor], tuple[list[float], list[float]]]`):
            Rewards of shape `(rows, num_reward_funcs)` to total rewards and signals.
        accelerator (`Accelerator`):
            This process and the others.
        slots (`Sequence[BatchSlot]`, *optional*):
            Of all processes, if there are several prompts to ask one after another in place of each. `prompts` are
            slots then; what is given for each prompt is given for each candidate of each slot, in their order.
    """

    def __init__(
        self,
        *,
        prompts: range,
        split_rewards: Callable[[torch.Tensor], tuple[list[float], list[float]]],
        accelerator: Accelerator,
        slots: Sequence[BatchSlot] | None = None,
    ):
        self.prompts = prompts
        self.slots = slots
        if slots is not None:
            self._first = list(itertools.accumulate((len(slot.candidates) for slot in slots), initial=0))
        self.split_rewards = split_rewards
        self.accelerator = accelerator
        self.process_index = accelerator.process_index
        self.num_processes = accelerator.num_processes
        # Sums over the step on this process: `tokens/*`, `server/*` are counts, `time/*` seconds.
        self.stats: dict[str, float] = defaultdict(float)
        self.first_round: list[tuple[int, bool]] = []  # of this process's completions: length, truncated
        self._rows: list[Completion] = []  # what this process generated
        self.states: dict[
            int, torch.Tensor
        ] = {}  # by row (see `dataset_row_index`) that this process was the first to generate for

    def dataset_row_index(self, prompt: int, draw: int) -> int:
        """Which of the rows that the source was given is asked: the prompt, or the slot's candidate of that time."""
        return prompt if self.slots is None else self._first[prompt] + self.slots[prompt].candidate_at(draw)

    def sample(self, **loop) -> list[Pool]:
        """
        Draw until every prompt is retired. Collective.

        Args:
            loop:
                `exit_condition`, `samples_per_round`, `max_rounds`, `positive_threshold`, `progress` of the loop. Where
                `samples_per_round` differs by prompt, it has one entry for each of `prompts`.

        Returns:
            `list[Pool]`: the pools of all processes' prompts, in order; the same on every process. The slots, if there
            are slots.
        """
        raise NotImplementedError

    def store(self, completions: Completions, *, is_first_round: bool, padding: int = 0) -> int:
        """
        Store what this process has generated.

        Args:
            completions ([`Completions`]):
                Of one round.
            is_first_round (`bool`):
                Whether that was the first one.
            padding (`int`, *optional*, defaults to `0`):
                How many at their end are nobody's rollouts: they cost tokens, and that is all.

        Returns:
            `int`: position of the first of them.
        """
        offset, rows = len(self._rows), completions.rows
        self._rows += rows
        self.stats["tokens/generated"] += sum(row.length for row in rows)
        self.stats["tokens/seen"] += completions.tokens_seen
        self.stats["time/reward"] += completions.reward_seconds
        if is_first_round:
            counted = rows[: len(rows) - padding]
            self.first_round += [(row.length, row.truncated) for row in counted]
            if counted:
                for name, count in zip(("calls", "failures"), completions.tool_calls, strict=True):
                    self.stats[f"tools/{name}"] += count
        return offset

    def rollouts(self, draws: Sequence[int], rewards: torch.Tensor, sources: Sequence[tuple]) -> list[Rollout]:
        totals, signals = self.split_rewards(rewards)
        return [
            Rollout(draw, total, signal, tuple(per_func), source)
            for draw, total, signal, per_func, source in zip(
                draws, totals, signals, rewards.tolist(), sources, strict=True
            )
        ]

    def fetch(self, selected: Sequence[Rollout]) -> SelectedRollouts:
        """
        Bring the selected completions to the processes that train on them, and to nobody else. Collective; a completion
        that is trained on where it was generated does not travel.

        Args:
            selected (`Sequence[Rollout]`):
                The update batch of all processes, in process order; the same on every process.
        """
        share = len(selected) // self.num_processes
        rows: dict[int, Completion] = {}  # by position in the batch
        outgoing: dict[int, dict[int, Completion]] = defaultdict(dict)
        somebody_sends = False
        for position, rollout in enumerate(selected):
            (holder, row), trains = rollout.location, position // share
            somebody_sends |= holder != trains
            if holder == self.process_index == trains:
                rows[position] = self._rows[row]
            elif holder == self.process_index:
                outgoing[trains][position] = _portable(self._rows[row])
        if somebody_sends:
            for package in exchange(outgoing, self.accelerator).values():
                rows |= package
        received = gather_object([(dict(self.stats), self.first_round)])
        names = sorted({name for stats, _ in received for name in stats})
        start = self.process_index * share
        return SelectedRollouts(
            rows=[rows[position] for position in range(start, start + share)],
            stats={
                name: sum(stats.get(name, 0.0) for stats, _ in received)
                / (self.num_processes if name.startswith("time/") else 1)
                for name in names
            },
            first_round=[row for _, first_round in received for row in first_round],
        )


def _portable(completion: Completion) -> Completion:
    """Without its environment where that cannot leave its process, because it holds a connection, say."""
    try:
        pickle.dumps(completion.environment)
    except (pickle.PicklingError, TypeError, AttributeError):
        return completion._replace(environment=None)
    return completion
