"""
Base class of the samplers: completions stay on the rank that generated them, and selected ones are sent to where they
are used.
"""

import itertools
import pickle
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from ..core import Slot
from ..utils.distributed import exchange_rows


class Completion(NamedTuple):
    """
    One completion of a round with everything that is needed to train on it, on the rank that generated it.

    Args:
        columns (`tuple`):
            Entries of this completion in the columns that TRL's generation returned; not interpreted here.
        row (`dict`):
            Row from which TRL can prepare the prompt again: the prompt as it was generated from, with images and an
            environment's observation in its messages, and the environment's name where there are several.
        rewards (`Sequence[float]`):
            Unweighted rewards of each function; NaN where a function returned `None`.
    """

    columns: tuple
    row: dict
    extras: dict[str, Any]  # values that reward functions logged for the completions table
    length: int  # number of generated tokens
    truncated: bool  # at the maximum length
    environment: Any = None  # of the episode
    rewards: Sequence[float] = ()


Generated = tuple[list[Completion], dict[str, float]]
"""
Completions that one rank has generated and scored together, at least one, and their statistics: `tokens/seen` (of
prompts and completions), `time/reward` in seconds, `tools/calls` and `tools/failures`.
"""


class RolloutSampler(ABC):
    """
    Base class of the samplers.

    Args:
        slots (`Sequence[Slot]`):
            Slots of all ranks, which are filled; dataset rows are those of each candidate of each slot, in their
            order.
        accelerator (`Accelerator`):
            This rank and the others.

    Attributes:
        completions (`dict[tuple[int, int], Completion]`):
            What this rank has generated, by slot and draw.
        stats (`dict[str, float]`):
            Sums over the step: `tokens/*`, `tools/*` and `vllm/*` are counts, `time/*` seconds. Those of this rank
            until `sample` has returned; afterwards counts are summed over the ranks, and seconds averaged.
        first_round (`list[tuple[int, bool]]`):
            Length of each completion of the first round, and whether it was truncated; likewise.
        lengths (`dict[tuple[int, int], int]`):
            Length of each completion of all ranks, by slot and draw, after `sample`.
    """

    rollouts_in_flight = 8  # per prompt, as in the paper's first round: with fewer, further rounds are requested ahead

    def __init__(self, *, slots: Sequence[Slot], accelerator: Accelerator):
        self.slots = slots
        self._first_row = list(itertools.accumulate((len(slot.candidates) for slot in slots), initial=0))
        self.accelerator = accelerator
        self.process_index = accelerator.process_index
        self.num_processes = accelerator.num_processes
        self.stats: dict[str, float] = defaultdict(float)
        self.first_round: list[tuple[int, bool]] = []
        self.lengths: dict[tuple[int, int], int] = {}
        self.completions: dict[tuple[int, int], Completion] = {}
        self._holder_of: dict[tuple[int, int], int] = {}  # rank of each completion, by slot and draw

    def dataset_row_index(self, slot: int, draw: int) -> int:
        """Index of the dataset row that rollout `draw` of a slot belongs to."""
        return self._first_row[slot] + self.slots[slot].candidate_at(draw)

    @property
    @abstractmethod
    def num_shown(self) -> int:
        """Number of slots that this rank shows the progress of."""

    @abstractmethod
    def _fill_slots(self, progress: "StepProgress") -> None:
        """Sample until every slot is done, which then is filled in the same way on every rank. Collective."""

    def sample(self, progress: "StepProgress") -> None:
        """Fill the slots, and tell every rank what the others have sampled. Collective."""
        self._fill_slots(progress)
        own_lengths = {rollout: completion.length for rollout, completion in self.completions.items()}
        received = gather_object([(dict(self.stats), self.first_round, own_lengths)])
        for holder, (*_, lengths) in enumerate(received):
            self._holder_of |= dict.fromkeys(lengths, holder)
            self.lengths |= lengths
        self.first_round = [row for _, of_rank, _ in received for row in of_rank]
        names = sorted({name for stats, *_ in received for name in stats})
        sums = {name: sum(stats.get(name, 0.0) for stats, *_ in received) for name in names}
        self.stats = {name: s / self.num_processes if name.startswith("time/") else s for name, s in sums.items()}

    @classmethod
    def requests_in_flight(cls, num_slots: int, round_size: int) -> int:
        """
        Requests of `round_size` rollouts, for `num_slots` prompts, below which further rounds are requested ahead.
        """
        return cls.rollouts_in_flight * num_slots // round_size

    def store(self, rollouts: Sequence[tuple[int, int]], generated: Generated) -> None:
        """
        Keep completions of this rank by slot and draw, and add up their statistics. Completions after the last of
        `rollouts` are padding, which counts as generated tokens only.
        """
        completions, stats = generated
        rows = completions[: len(rollouts)]
        self.completions |= zip(rollouts, rows, strict=True)
        self.stats["tokens/generated"] += sum(completion.length for completion in completions)
        of_first_round = [
            (row.length, row.truncated)
            for (slot, draw), row in zip(rollouts, rows, strict=True)
            if draw < self.slots[slot].round_size
        ]
        self.first_round += of_first_round
        # Tools exclude sampling several rounds at once, so that all other rows are padding.
        share = len(of_first_round) / len(completions)
        for name, value in stats.items():
            self.stats[name] += value * share if name.startswith("tools/") else value

    def fetch(self, selected: Sequence[tuple[int, int]]) -> list[Completion]:
        """
        Send the selected completions, by slot and draw, to the ranks that train on them, after `sample`: the update
        batch of all ranks in rank order, of which this rank's part is returned. Collective; a completion that is
        trained on where it was generated does not travel.
        """
        per_rank, rank = len(selected) // self.num_processes, self.process_index
        held = []
        for position, rollout in enumerate(selected):
            if rollout in self.completions:
                completion = self.completions[rollout]
                held.append(completion if position // per_rank == rank else _portable(completion))
        needed = [range(first, first + per_rank) for first in range(0, len(selected), per_rank)]
        rows = exchange_rows(held, [self._holder_of[rollout] for rollout in selected], needed, self.accelerator)
        return [rows[position] for position in needed[rank]]


def _portable(completion: Completion) -> Completion:
    """
    The completion without its environment, if that cannot be pickled (because it holds a connection, for example).
    """
    try:
        pickle.dumps(completion.environment)
    except (pickle.PicklingError, TypeError, AttributeError):
        return completion._replace(environment=None)
    return completion


class StepProgress(tqdm):
    """
    A bar of the prompts whose sampling is finished in this step, with the number of rollouts and the elapsed time. It
    appears after two seconds, so that quick steps show nothing, and disappears at the end of the step.

    Args:
        total (`int`):
            Number of prompts to sample: those of this rank with a vLLM server, of all ranks otherwise.
        step (`int`):
            Training step, for the label.
        disable (`bool`):
            Show nothing.
    """

    monitor_interval = 0  # tqdm would start a thread, also for a bar that is not shown

    def __init__(self, total: int, step: int, disable: bool):
        label, look = f"Sampling for step {step}", {"miniters": 0, "leave": False, "dynamic_ncols": True}
        super().__init__(total=total, desc=label, unit="prompt", delay=2, disable=disable, **look)

    def __call__(self, active: int, rollouts: int) -> None:
        self.set_postfix(active=active, rollouts=rollouts, refresh=False)
        self.update(self.total - active - self.n)

    def tick(self) -> None:
        """Refresh the elapsed time while nothing else has changed."""
        self.update(0)
