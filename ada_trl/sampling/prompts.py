"""
Prompts of each step, from TRL's data loader or from the prompt queue.

The queue is used where a step samples other prompts than the data loader's next ones (retries, dynamic sampling), or
needs them before the data loader yields them (one step ahead).
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from ..core import Candidate, Rollouts, SampledPrompt
from ..utils.distributed import synchronized_errors
from ..utils.logging import get_logger
from .prompt_stream import PromptStream


if TYPE_CHECKING:
    from ..pass_rates.tracker import PromptEstimates


logger = get_logger(__name__)

# Settings with which prompts come from the data loader instead of the prompt queue.
WITHOUT_QUEUE = "zero_variance_groups='keep', retries=0 and max_staleness=0"
# Largest fraction of the slots (at least one slot) for retries, which would otherwise fill the batch on a hard
# dataset.
MAX_RETRY_FRACTION = 0.75
SHUFFLE_WITH_SEED = "Shuffle it with a seed (`.shuffle(seed=…)`) and yield the same rows each time it is read"


class PlaceholderRow(dict):
    """
    Row of the data loader where prompts come from the queue. Until the step's prompts are chosen, it has no values,
    and reading one raises an error that explains this.
    """

    def __missing__(self, column: Any) -> Any:
        raise RuntimeError(
            f"This row has no column {column!r}: with zero_variance_groups='resample', retries or max_staleness=1, "
            "the rows of the data loader are placeholders, and prompts come from the prompt queue. Read the output of "
            f"_generate_and_score_completions instead, or set {WITHOUT_QUEUE}."
        )

    def get(self, column: Any, default: Any = None) -> Any:
        return super().get(column, default) if self else self[column]


class SampledRow(PlaceholderRow):
    """The same, with the values of a rollout of the step."""


def collate_placeholders(rows: list[dict]) -> list[PlaceholderRow]:
    return [PlaceholderRow() for _ in rows]


@dataclass
class StepPlan:
    """
    What a step is to sample: its prompts, which come from a source, and the number of rollouts of each, which the
    trainer adds.

    Args:
        local_rows (`list[dict]`):
            Dataset rows of the candidates whose slots belong to this rank.
        row_ranks (`list[int]`), slot_ranks (`list[int]`):
            Rank of each candidate of all ranks, in slot order, and of each slot.
        candidates (`list[list[Candidate]]`):
            Prompts of each slot: one, or several that may be sampled one after another.
        sizes (`list[int]`):
            Number of rollouts of each prompt, of all ranks; with several rounds, in one of them.
        estimates ([`~pass_rates.tracker.PromptEstimates`], *optional*):
            Estimated pass rates of the prompts.
        global_step (`int`):
            Number of optimizer steps of the weights that generate the rollouts.
        rows (`list[dict]`):
            With one round per step: dataset rows of this rank, one per rollout.
    """

    local_rows: list[dict]
    row_ranks: list[int]
    slot_ranks: list[int]
    candidates: list[list[Candidate]]
    sizes: list[int] = field(default_factory=list)
    estimates: "PromptEstimates | None" = None
    global_step: int = 0
    rows: list[dict] = field(default_factory=list)

    def rows_of(self, prompts: Sequence[SampledPrompt]) -> list[int]:
        """Index of the row of each sampled prompt among those of all candidates of all ranks."""
        first = list(itertools.accumulate(map(len, self.candidates), initial=0))
        return [first[prompt.slot] + prompt.candidate_index for prompt in prompts]


class PromptSource(ABC):
    """Interface of the sources of prompts. The same object exists on every rank."""

    @abstractmethod
    def next_prompts(self, inputs: list[dict]) -> StepPlan:
        """The prompts of the next generation batch; `inputs` are this rank's rows from the data loader. Collective."""

    def finish_step(self, prompts: Sequence[SampledPrompt], rollouts: Rollouts) -> dict[str, float]:
        """Return unsolved and unused prompts to the source, and metrics to the caller."""
        return {}

    def rollback(self) -> None:  # noqa: B027 # the data loader cannot go back; TRL's resuming skips its batches
        """Undo the last [`next_prompts`], whose prompts will not be sampled."""

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        """The state before the last `steps_back` calls of [`next_prompts`]."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""


class DataLoaderPrompts(PromptSource):
    """
    Prompts that [`~trl.GRPOTrainer`]'s data loader yields, `num_generations` equal rows each. A prompt belongs to the
    rank that holds its first row.

    Args:
        accelerator (`Accelerator`):
            This rank and the others.
        num_generations (`int`):
            Number of rows of a prompt.
        checks_groups (`bool`):
            Whether different prompts in a group are an error, unlike in [`~trl.GRPOTrainer`].
    """

    def __init__(self, accelerator: Accelerator, num_generations: int, *, checks_groups: bool):
        self.accelerator, self.num_generations, self.checks_groups = accelerator, num_generations, checks_groups

    def next_prompts(self, inputs: list[dict]) -> StepPlan:
        rows, n = len(inputs), self.num_generations
        start = self.accelerator.process_index * rows
        local_rows = []
        for i, row in enumerate(inputs):
            if (start + i) % n == 0:
                local_rows.append(row)
            elif self.checks_groups and i and _are_different(row.get("prompt"), inputs[i - 1].get("prompt")):
                raise ValueError(
                    f"Rows {start + i - 1} and {start + i} of the generation batch have different prompts, but "
                    f"num_generations ({n}) requires {n} consecutive rows of each prompt. Return a "
                    "`trl.trainer.utils.RepeatSampler` from `_get_train_sampler` or repeat each row in your data "
                    "loader, and let a transform of the dataset give equal prompts for equal rows."
                )
        ranks = [first // rows for first in range(0, rows * self.accelerator.num_processes, n)]
        return StepPlan(local_rows, ranks, ranks, [[Candidate(i)] for i in range(len(ranks))])


def _are_different(a: Any, b: Any) -> bool:
    try:
        return bool(a != b)
    except (ValueError, RuntimeError):  # arrays and tensors in messages
        return False


class PromptQueue(PromptSource):
    """
    Prompts of the dataset in its order, after those that an earlier step has left unsolved or unused.

    Every rank holds the same queue and makes the same calls, so that only the rows themselves are communicated.

    Args:
        dataset (`Dataset` or `IterableDataset`), shuffle (`bool`), seed (`int`):
            See [`PromptStream`].
        accelerator (`Accelerator`):
            This rank and the others.
        load_rows (`Callable[[Iterable[dict]], list[dict]]`):
            Reads dataset rows, whose transform is user code, and drops unused columns.
        num_slots (`int`):
            Prompts that are trained on in a step.
        candidates_per_slot (`int`, *optional*, defaults to `1`):
            Maximum number of prompts that are sampled one after another in a slot (dynamic sampling).
        retries (`int`, *optional*, defaults to `0`):
            Number of later steps in which a prompt without a positive rollout is sampled again, first in line.
        kept_states (`int`, *optional*, defaults to `2`):
            Largest `steps_back` of [`state_dict`].

    Attributes:
        retry_queue (`list[Candidate]`):
            Unsolved prompts.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        accelerator: Accelerator,
        load_rows: Callable[[Iterable[dict]], list[dict]],
        *,
        shuffle: bool,
        seed: int,
        num_slots: int,
        candidates_per_slot: int = 1,
        retries: int = 0,
        kept_states: int = 2,
    ):
        self._new_stream = lambda: PromptStream(dataset, shuffle=shuffle, seed=seed)
        self.stream = self._new_stream()
        self.accelerator, self.load_rows = accelerator, load_rows
        self.num_slots, self.candidates_per_slot, self.retries = num_slots, candidates_per_slot, retries
        self.retry_queue: list[Candidate] = []
        # States before the last calls of `next_prompts`, the latest first. A checkpoint may be written while the
        # rollouts of these steps are not trained on yet; a resumed run has to sample their prompts again.
        self._before: deque[dict[str, Any]] = deque(maxlen=kept_states)
        # Positions that the current step has taken from the stream; `None` between steps.
        self._taken: list[int] | None = None

    def next_prompts(self, inputs: list[dict]) -> StepPlan:
        candidates = self.next_candidates()
        if not self.stream.indexed:  # each process reads it itself, and retries change between processes
            queues = gather_object([self._before[0]["retry_queue"]])
            if any(queue != queues[0] for queue in queues):
                raise ValueError(
                    "The processes read different rows from the train_dataset, a stream, so that retries would be "
                    f"other prompts than those that were sampled. {SHUFFLE_WITH_SEED}, or set retries=0."
                )
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        slot_ranks = [slot * world_size // self.num_slots for slot in range(self.num_slots)]
        ranked = [(owner, one) for owner, several in zip(slot_ranks, candidates, strict=True) for one in several]
        with synchronized_errors():
            local_rows = self.load_rows(
                self.stream.row(candidate.position) for owner, candidate in ranked if owner == rank
            )
        return StepPlan(local_rows, [owner for owner, _ in ranked], slot_ranks, candidates)

    def next_candidates(self) -> list[list[Candidate]]:
        """
        Return the candidates of each slot: one retry per slot, as far as there are retries, then new prompts.

        New prompts are distributed evenly: every slot gets a first candidate before any slot gets a second one.
        """
        self._before.appendleft(self._state())
        retries = self.retry_queue
        slots: list[list[Candidate]] = [[candidate] for candidate in retries]
        slots += [[] for _ in range(self.num_slots - len(slots))]
        number = self.num_slots * self.candidates_per_slot - len(retries)
        new = self._taken = self.stream.take(number, {candidate.position for candidate in retries})
        waiting = map(Candidate, new)
        for size in range(self.candidates_per_slot):
            for slot in slots:
                if len(slot) == size and (candidate := next(waiting, None)) is not None:
                    slot.append(candidate)
        if any(not slot for slot in slots):
            raise ValueError(
                f"Each step needs {self.num_slots} distinct prompts, but the training dataset has only "
                f"{len(new) + len(retries)}. Use a smaller batch or a larger dataset."
            )
        return slots

    def finish_step(self, prompts: Sequence[SampledPrompt], rollouts: Rollouts) -> dict[str, float]:
        used = {prompt.candidate.position for prompt in prompts}
        self.stream.put_back([position for position in self._taken or [] if position not in used])
        self._taken = None
        is_unsolved_P = (rollouts.positives_P == 0) & ~rollouts.is_abstained_P
        unsolved = [
            prompt.candidate._replace(attempts=prompt.candidate.attempts + 1)
            for prompt, is_unsolved in zip(prompts, is_unsolved_P.tolist(), strict=True)
            if is_unsolved and prompt.candidate.attempts < self.retries
        ]
        by_attempts = sorted(unsolved, key=lambda candidate: candidate.attempts)
        self.retry_queue = by_attempts[: self._max_retries]
        self.stream.forget({candidate.position for candidate in self.retry_queue})
        frac_new = sum(not prompt.candidate.attempts for prompt in prompts) / len(prompts)
        return {
            "prompts/sampled": float(len(prompts)),
            "prompts/frac_new": frac_new,
            "prompts/frac_retried": 1 - frac_new,
            "prompts/resampled": float(len(prompts) - self.num_slots),
            "prompts/queue": float(len(self.retry_queue) + self.stream.put_back_rows),
            "prompts/epoch": self.stream.epoch,
        }

    @property
    def _max_retries(self) -> int:
        return max(1, int(MAX_RETRY_FRACTION * self.num_slots))

    def rollback(self) -> None:
        """
        Undo the last [`next_prompts`] if [`finish_step`] has not followed: its prompts are the next ones again.

        Retries need no undoing: they stay in the queue until `finish_step` replaces it.
        """
        if self._taken is None:
            return
        self.stream.put_back(self._taken)
        self._before.popleft()
        self._taken = None

    def _state(self) -> dict[str, Any]:
        retries = [
            candidate._asdict() | {"row": self.stream.row_key(candidate.position)} for candidate in self.retry_queue
        ]
        return {"stream": self.stream.state_dict(), "retry_queue": retries}

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        return {"queue": self._before[steps_back - 1] if steps_back else self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "queue" not in state:
            logger.warning(
                "The checkpoint has no prompt queue (in ada_state.json), so prompts are taken from the start of the "
                "dataset. This is expected for a checkpoint of a run without a prompt queue; otherwise restore the "
                "file."
            )
            return
        stored = state["queue"]
        retries = [Candidate(*map(candidate.get, Candidate._fields)) for candidate in stored["retry_queue"]]
        self.stream = self._new_stream()
        queued = [candidate.position for candidate in retries]
        self.stream.check_positions([*queued, *stored["stream"]["front"]])
        self.stream.load_state_dict(stored["stream"])
        # Checkpoints of earlier versions have no keys of rows.
        keys = [candidate.get("row") for candidate in stored["retry_queue"]]
        is_same = [key in (None, self.stream.row_key(one.position)) for key, one in zip(keys, retries, strict=True)]
        if not all(is_same):
            logger.warning(
                f"{is_same.count(False)} of {len(retries)} queued retries are dropped, because the train_dataset, a "
                f"stream, has other rows than those that were sampled. {SHUFFLE_WITH_SEED}, so that a run can be "
                "resumed exactly."
            )
            retries = list(itertools.compress(retries, is_same))
        self.retry_queue = retries[: self._max_retries]
        if len(self.retry_queue) < len(retries):
            logger.warning(
                f"The checkpoint has {len(retries)} queued retries, but the batch now has room for "
                f"{len(self.retry_queue)}; the others are dropped. Resume with the batch size of the checkpoint to "
                "keep them."
            )
