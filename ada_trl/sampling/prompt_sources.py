"""Prompt sources: the prompts of a step, from TRL's data loader or from the prompt queue."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate import Accelerator
from datasets import Dataset, IterableDataset

from ..core import Pool
from ..utils.distributed import synchronized_errors
from ..utils.logging import get_logger
from .batch_slots import BatchSlot, QueuedPrompt, SlotConfig
from .prompt_queue import CandidateScores, PromptQueue
from .prompt_stream import PromptStream


if TYPE_CHECKING:
    from ..pass_rates.predictions import PassRatePredictions
    from ..pass_rates.tracker import PassRateTracker


logger = get_logger(__name__)


# Settings with which prompts come from the data loader instead of the prompt queue.
WITHOUT_QUEUE = (
    "zero_variance_groups='keep', prompt_oversampling=1, max_staleness=0 and, in Seq modes, baseline='pool'"
)


class PlaceholderRow(dict):
    """
    Row of the data loader where prompts come from the queue. Until the step's prompts are chosen, it has no values, and reading one
    raises an error that explains this.
    """

    def __missing__(self, column: Any) -> Any:
        raise RuntimeError(
            f"This row has no column {column!r}: with zero_variance_groups='resample', prompt_oversampling > 1, max_staleness=1 or "
            "retries, the rows of the data loader are placeholders, and prompts come from the prompt queue. Read the output of "
            f"_generate_and_score_completions instead, or set {WITHOUT_QUEUE}."
        )

    def get(self, column: Any, default: Any = None) -> Any:
        return super().get(column, default) if self else self[column]


def collate_placeholders(rows: list[dict]) -> list[PlaceholderRow]:
    return [PlaceholderRow() for _ in rows]


class PromptBatch(NamedTuple):
    """
    The prompts of one generation batch, before they are sampled. A slot has one prompt, or several candidates of which the next
    is sampled if the one before has zero reward variance.
    """

    local_rows: list[dict]  # dataset rows of the candidates whose slots belong to this rank
    row_ranks: list[int]  # rank of each candidate of all ranks, in slot order
    slot_ranks: list[int]  # rank of each slot
    candidates: list[list[QueuedPrompt]] | None = None  # of each slot, where prompts come from the queue
    is_predicted: bool = False  # whether the tracker has predicted these prompts, and only these, already


@dataclass
class SampledPrompts:
    """
    The prompts that were sampled in a step, in slot order, with one entry per prompt in each list.

    Args:
        indices (`list[int]`):
            Position among the candidates of the [`PromptBatch`].
        seeds (`list[tuple[int, ...]]`):
            Slot and, where a slot may sample several prompts, position within the slot.
        is_trained (`list[bool]`):
            Whether the prompt is trained on, because no other one was sampled in its place.
        is_on_distribution (`list[bool]`):
            Whether the prompt is an unbiased sample of the dataset: sampled for the first time, in dataset order, and not in
            place of another one.
    """

    pools: list[Pool] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    seeds: list[tuple[int, ...]] = field(default_factory=list)
    is_trained: list[bool] = field(default_factory=list)
    is_on_distribution: list[bool] = field(default_factory=list)


@dataclass
class StepPlan:
    """
    Prompts and numbers of rollouts of one generation batch; one entry per prompt or slot of all ranks in each list.

    Args:
        prompts ([`PromptBatch`]):
            The prompts.
        sizes (`list[int]`):
            Rollouts per round of each prompt.
        slots (`list[BatchSlot]`, *optional*):
            Where the rollouts are collected, if prompts come from the queue.
        predictions ([`~pass_rates.predictions.PassRatePredictions`], *optional*):
            Predictions for the prompts.
        global_step (`int`):
            Number of optimizer steps of the weights that generate the rollouts.
        rows (`list[dict]`):
            Dataset rows of this rank, one per rollout, with one round per step.
        is_prefetched (`bool`):
            Whether the requests were sent to a server in the step before.
    """

    prompts: PromptBatch
    sizes: list[int]
    slots: list[BatchSlot] | None
    predictions: "PassRatePredictions | None"
    global_step: int
    rows: list[dict]
    is_prefetched: bool = False


class PromptSource(ABC):
    """Interface of the prompt sources. The same object exists on every rank."""

    @abstractmethod
    def next_prompts(self, inputs: list[dict]) -> PromptBatch:
        """The prompts of the next generation batch; `inputs` are this rank's rows from the data loader. Collective."""

    @abstractmethod
    def make_slots(self, prompts: PromptBatch, sizes: Sequence[int]) -> list[BatchSlot] | None:
        """Empty slots, with `sizes` rollouts per round; `None` where each slot is one prompt and a plain pool is enough."""

    @abstractmethod
    def sampled_prompts(self, pools: Sequence[Any]) -> SampledPrompts:
        """The prompts that the pools or slots of a step belong to."""

    @abstractmethod
    def finish_step(self, pools: Sequence[Any]) -> dict[str, float]:
        """Return unsolved and unused prompts to the source, and metrics to the caller."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo the last [`next_prompts`], whose prompts will not be sampled."""

    @abstractmethod
    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        """The state before the last `steps_back` calls of [`next_prompts`]."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


class DataLoaderPrompts(PromptSource):
    """
    Prompts that [`~trl.GRPOTrainer`]'s data loader yields, `num_generations` equal rows each. A prompt belongs to the rank that
    holds its first row.

    Args:
        accelerator (`Accelerator`):
            This rank and the others.
        num_generations (`int`):
            Number of rows of a prompt.
        check_groups (`bool`, *optional*, defaults to `True`):
            Whether different prompts in a group are an error, unlike in GRPOTrainer.
    """

    def __init__(self, accelerator: Accelerator, num_generations: int, *, check_groups: bool = True):
        self.accelerator, self.num_generations, self.check_groups = accelerator, num_generations, check_groups

    def next_prompts(self, inputs: list[dict]) -> PromptBatch:
        rows, n = len(inputs), self.num_generations
        start = self.accelerator.process_index * rows
        local_rows = []
        for i, row in enumerate(inputs):
            if (start + i) % n == 0:
                local_rows.append(row)
            elif self.check_groups and i and _are_different(row.get("prompt"), inputs[i - 1].get("prompt")):
                raise ValueError(
                    f"Rows {start + i - 1} and {start + i} of the generation batch have different prompts, but num_generations "
                    f"({n}) requires {n} consecutive rows of each prompt. Return a `trl.trainer.utils.RepeatSampler` from "
                    "`_get_train_sampler` or repeat each row in your data loader, and let a transform of the dataset give equal "
                    "prompts for equal rows."
                )
        ranks = [first // rows for first in range(0, rows * self.accelerator.num_processes, n)]
        return PromptBatch(local_rows, ranks, ranks)

    def make_slots(self, prompts: PromptBatch, sizes: Sequence[int]) -> None:
        return None

    def sampled_prompts(self, pools: Sequence[Any]) -> SampledPrompts:
        number = len(pools)
        seeds: list[tuple[int, ...]] = [(i,) for i in range(number)]
        return SampledPrompts(list(pools), list(range(number)), seeds, [True] * number, [True] * number)

    def finish_step(self, pools: Sequence[Any]) -> dict[str, float]:
        return {}

    def rollback(self) -> None:
        pass  # the data loader cannot go back; TRL's resuming skips its batches

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _are_different(a: Any, b: Any) -> bool:
    try:
        return bool(a != b)
    except (ValueError, RuntimeError):  # arrays and tensors in messages
        return False


class QueuedPrompts(PromptSource):
    """
    Prompts from a [`PromptQueue`], for modes in which a step samples other prompts than the data loader's next ones, or needs
    them before the data loader yields them.

    Args:
        dataset (`Dataset` or `IterableDataset`), shuffle (`bool`), seed (`int`):
            See [`PromptStream`].
        tracker ([`PassRateTracker`], *optional*):
            Predicts the pass rates of the candidates; required if they are selected by their score.
        learnability (`Callable[[float], float]`):
            Function from the predicted pass rate to the expected gradient magnitude of a prompt.
        load_rows (`Callable[[Iterable[dict]], list[dict]]`):
            Reads dataset rows, whose transform is user code, and drops unused columns.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        config: SlotConfig,
        accelerator: Accelerator,
        tracker: "PassRateTracker | None",
        learnability: Callable[[float], float],
        load_rows: Callable[[Iterable[dict]], list[dict]],
        *,
        shuffle: bool,
        seed: int,
    ):
        self.dataset, self.config, self.accelerator = dataset, config, accelerator
        self.tracker: PassRateTracker = tracker  # type: ignore[assignment] # not used without selection by score
        self.learnability, self.load_rows, self.shuffle, self.seed = learnability, load_rows, shuffle, seed
        self._predicted: list[int] = []  # positions that were predicted for the selection in this step
        self._reset_queue()

    def _reset_queue(self) -> None:
        self.queue = PromptQueue(PromptStream(self.dataset, shuffle=self.shuffle, seed=self.seed), self.config)

    def next_prompts(self, inputs: list[dict]) -> PromptBatch:
        self._predicted = []
        candidates = self.queue.next_slots(self._score_candidates if self.config.choices_per_prompt > 1 else None)
        rank, world_size, slots = self.accelerator.process_index, self.accelerator.num_processes, self.config.slots
        slot_ranks = [slot * world_size // slots for slot in range(slots)]
        ranked = [(owner, one) for owner, several in zip(slot_ranks, candidates, strict=True) for one in several]
        local_rows = self._rows([candidate.position for owner, candidate in ranked if owner == rank])
        is_predicted = self._reuse_predictions([candidate.position for _, candidate in ranked])
        return PromptBatch(local_rows, [owner for owner, _ in ranked], slot_ranks, candidates, is_predicted)

    def _rows(self, positions: Sequence[int]) -> list[dict]:
        """Read the rows at `positions`, other ones on each rank. Collective."""
        with synchronized_errors():
            return self.load_rows(self.queue.stream.row(position) for position in positions)

    def _score_candidates(self, positions: list[int]) -> CandidateScores:
        """Predict the expected gradient magnitude of the rows at `positions`. Collective."""
        tracker, self._predicted = self.tracker, list(positions)
        per_rank = -(-len(positions) // self.accelerator.num_processes)
        start = self.accelerator.process_index * per_rank
        tracker.start_step(self._rows(positions[start : start + per_rank]))
        rates = tracker.shared_estimates()
        gains = list(map(self.learnability, rates)) if tracker.is_informative else None
        return CandidateScores(tracker.predictions.keys, gains, sum(rates) / len(rates))

    def _reuse_predictions(self, selected: list[int]) -> bool:
        """
        Restrict the tracker to the selected prompts and return True, if all of them were predicted for the selection.

        Retries and prompts reserved in an earlier step were not. In that case, the whole step has to be predicted again,
        because the tracker holds the predictions of one call.
        """
        index = {position: i for i, position in enumerate(self._predicted)}
        if not index.keys() >= set(selected):
            return False
        self.tracker.restrict_to([index[position] for position in selected])
        return True

    def make_slots(self, prompts: PromptBatch, sizes: Sequence[int]) -> list[BatchSlot]:
        return self.queue.make_slots(prompts.candidates or [], sizes)

    def sampled_prompts(self, pools: Sequence[BatchSlot]) -> SampledPrompts:
        before = 0
        found = SampledPrompts()
        for number, slot in enumerate(pools):
            for i in slot.sampled:
                candidate = slot.candidates[i]
                found.pools.append(slot.pools[i])
                found.indices.append(before + i)
                found.seeds.append((number, i))
                found.is_trained.append(i == slot.sampled[-1])
                found.is_on_distribution.append(candidate.from_data_order and not candidate.rounds and not i)
            before += len(slot.candidates)
        return found

    def finish_step(self, pools: Sequence[BatchSlot]) -> dict[str, float]:
        sampled = [(slot, i) for slot in pools for i in slot.sampled]
        metrics = {"prompts/sampled": float(len(sampled))} | self.queue.finish_step(pools)
        if self.config.fixed_budget:
            # The exit condition counts the rollouts of earlier steps too, which the pools of this step do not contain.
            metrics["frac_exit_condition_met"] = sum(slot.resolved(i) for slot, i in sampled) / len(sampled)
        return metrics

    def rollback(self) -> None:
        self.queue.rollback()

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        return {"queue": self.queue.state_dict(steps_back=steps_back)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "queue" in state:
            self._reset_queue()
            self.queue.load_state_dict(state["queue"])
        else:
            logger.warning(
                "The checkpoint has no prompt queue (in ada_state.json), so prompts are taken from the start of the dataset. "
                "This is expected for a checkpoint of a run without a prompt queue; otherwise restore the file."
            )
