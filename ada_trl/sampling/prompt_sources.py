"""Which prompts a step asks: those that the loader hands out, or others, from a stream of the data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from datasets import Dataset, IterableDataset

from ..core import Pool
from ..pass_rates.tracker import PassRateTracker
from ..utils.logging import get_logger
from .batch_slots import BatchSlot, QueuedPrompt
from .prompt_queue import CandidateScores, PromptQueue, SlotConfig
from .prompt_stream import PromptStream


logger = get_logger(__name__)


class PromptBatch(NamedTuple):
    """
    What a step asks.

    Args:
        own (`list[dict]`):
            The data set rows of this process's prompts, or of the candidates of its places in the batch.
        owners (`list[int]`):
            By prompt or candidate of all processes, in order, whose it is.
        slot_ranks (`list[int]`):
            By place in the batch, likewise.
        candidates (`list[list[QueuedPrompt]]`, *optional*):
            By place, where one prompt may be asked after another.
        predicted (`bool`):
            Whether the tracker has estimated these prompts, and only these.
    """

    own: list[dict]
    owners: list[int]
    slot_ranks: list[int]
    candidates: list[list[QueuedPrompt]] | None = None
    predicted: bool = False


@dataclass
class SampledPrompts:
    """
    The prompts that a step has asked; one entry each, place by place.

    Args:
        pools (`list[Pool]`):
            What each has drawn in this step.
        indices (`list[int]`):
            Its position in the question.
        numbers (`list[tuple[int, ...]]`):
            Its place in the batch and, where one may be asked after another, how many there were before it.
        trained (`list[bool]`):
            Whether it is trained on: no other was asked in its place.
        is_on_distribution (`list[bool]`):
            Whether it stands for the data set: asked for the first time, in the data's order, and not in the place of
            another one.
    """

    pools: list[Pool]
    indices: list[int]
    numbers: list[tuple[int, ...]]
    trained: list[bool]
    is_on_distribution: list[bool]


class DataLoaderPrompts:
    """
    The prompts that [`~trl.GRPOTrainer`]'s loader hands out, `num_generations` equal rows each. A prompt is its process's that
    has the first of them.
    """

    def __init__(self, accelerator: Accelerator, num_generations: int):
        self.accelerator, self.num_generations = accelerator, num_generations

    def ask(self, inputs: list[dict]) -> PromptBatch:
        """The next prompts; `inputs` are this process's rows of the batch."""
        rows, n = len(inputs), self.num_generations
        start = self.accelerator.process_index * rows
        own = [row for i, row in enumerate(inputs) if (start + i) % n == 0]
        owners = [first // rows for first in range(0, rows * self.accelerator.num_processes, n)]
        return PromptBatch(own, owners, owners)

    def lanes(self, question: PromptBatch, sizes: Sequence[int]) -> list[BatchSlot] | None:
        """What each place of the batch draws, if one prompt may be asked after another; `sizes` are rollouts per round."""
        return None

    def asked(self, pools: Sequence[Any]) -> SampledPrompts:
        """What the step has asked, from its pools or lanes."""
        number = len(pools)
        numbers: list[tuple[int, ...]] = [(i,) for i in range(number)]
        return SampledPrompts(list(pools), list(range(number)), numbers, [True] * number, [True] * number)

    def close(self, pools: Sequence[Any]) -> dict[str, float]:
        """End the step: what is logged of its prompts."""
        return {}

    def rollback(self) -> None:
        """As if the last question had not been asked."""

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        """As it was `steps_back` questions ago."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class QueuedPrompts(DataLoaderPrompts):
    """
    Prompts from a [`PromptQueue`], for modes in which a step asks other ones than the loader's next, or asks before the loader
    hands them out.

    Args:
        dataset (`Dataset` or `IterableDataset`), shuffle (`bool`), seed (`int`):
            As in [`PromptStream`].
        schedule ([`SlotConfig`]):
            How the places of a step work.
        accelerator (`Accelerator`):
            This process and the others.
        tracker ([`PassRateTracker`], *optional*):
            Estimates the prompts that are chosen from.
        gain (`Callable[[float], float]`):
            Estimated pass rate to what asking the prompt is expected to teach.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        schedule: SlotConfig,
        accelerator: Accelerator,
        tracker: PassRateTracker | None,
        gain: Callable[[float], float],
        *,
        shuffle: bool,
        seed: int,
    ):
        self.dataset, self.schedule, self.accelerator = dataset, schedule, accelerator
        self.tracker: PassRateTracker = tracker  # type: ignore[assignment] # there is one where prompts are chosen
        self.gain, self.shuffle, self.seed = gain, shuffle, seed
        self._estimated: list[int] = []  # positions of the prompts that were estimated to be chosen from, in this step
        self._start()

    def _start(self) -> None:
        self.queue = PromptQueue(PromptStream(self.dataset, shuffle=self.shuffle, seed=self.seed), self.schedule)

    def ask(self, inputs: list[dict]) -> PromptBatch:
        self._estimated = []
        candidates = self.queue.open(self._beliefs if self.schedule.choices_per_prompt > 1 else None)
        me, processes, places = self.accelerator.process_index, self.accelerator.num_processes, self.schedule.lanes
        by_place = [place * processes // places for place in range(places)]
        asked = [(owner, one) for owner, several in zip(by_place, candidates, strict=True) for one in several]
        own = [self.queue.stream.row(candidate.position) for owner, candidate in asked if owner == me]
        predicted = self._keep([candidate.position for _, candidate in asked])
        return PromptBatch(own, [owner for owner, _ in asked], by_place, candidates, predicted)

    def _beliefs(self, positions: list[int]) -> CandidateScores:
        """What is expected of the rows at `positions`. Collective."""
        tracker, self._estimated = self.tracker, list(positions)
        share = -(-len(positions) // self.accelerator.num_processes)
        start = self.accelerator.process_index * share
        tracker.start_step([self.queue.stream.row(position) for position in positions[start : start + share]])
        rates = tracker.shared_estimates()
        gains = [self.gain(p) for p in rates]
        return CandidateScores(
            tracker.predictions.keys, gains if tracker.is_informative else None, sum(rates) / len(rates)
        )

    def _keep(self, asked: list[int]) -> bool:
        """Whether all prompts that may be asked have been estimated when they were chosen: then only those are kept."""
        index = {position: i for i, position in enumerate(self._estimated)}
        if not index.keys() >= set(asked):
            return False
        self.tracker.restrict_to([index[position] for position in asked])
        return True

    def lanes(self, question: PromptBatch, sizes: Sequence[int]) -> list[BatchSlot]:
        return self.queue.lanes(question.candidates or [], sizes)

    def asked(self, pools: Sequence[BatchSlot]) -> SampledPrompts:
        before = 0
        found = SampledPrompts([], [], [], [], [])
        for place, lane in enumerate(pools):
            for i in lane.asked:
                candidate = lane.candidates[i]
                found.pools.append(lane.pools[i])
                found.indices.append(before + i)
                found.numbers.append((place, i))
                found.trained.append(i == lane.asked[-1])
                found.is_on_distribution.append(candidate.from_data_order and not candidate.rounds and not i)
            before += len(lane.candidates)
        return found

    def close(self, pools: Sequence[BatchSlot]) -> dict[str, float]:
        asked = [(lane, i) for lane in pools for i in lane.asked]
        metrics = {"prompts/sampled": float(len(asked))} | self.queue.close(pools)
        if self.schedule.fixed_budget:  # with what earlier steps have drawn
            metrics["frac_exit_condition_met"] = sum(lane.resolved(i) for lane, i in asked) / len(asked)
        return metrics

    def rollback(self) -> None:
        self.queue.rollback()

    def state_dict(self, steps_back: int = 0) -> dict[str, Any]:
        return {"queue": self.queue.state_dict(steps_back=steps_back)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "queue" in state:
            self._start()
            self.queue.load_state_dict(state["queue"])
        else:
            logger.warning(
                "The checkpoint has no queue of prompts (in ada_state.json), so the data set is asked from its start again. "
                "That is right for a checkpoint of a run that took its prompts from the loader; otherwise restore the file."
            )
