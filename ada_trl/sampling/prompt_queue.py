"""The prompt queue: assigns retries and new prompts to the slots of a step, in dataset order or by predicted gain."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..utils.logging import get_logger
from .batch_slots import BatchSlot, QueuedPrompt, SlotConfig
from .prompt_stream import PromptStream


logger = get_logger(__name__)

# Largest fraction of the slots (at least one slot) for retries, which would otherwise fill the batch on a hard dataset.
MAX_RETRY_FRACTION = 0.75
# Smallest fraction of the new prompts in dataset order, so that no prompt depends on its estimate alone.
MIN_IN_ORDER_FRACTION = 0.25
MAX_SKIPS = 8  # a prompt that was skipped this often is taken when it is a candidate again


class CandidateScores(NamedTuple):
    """Predictions for the candidates of a step."""

    keys: list[str]  # identifier of each prompt, the same in every epoch
    # Predicted gain of sampling each; `None` while estimates are not better than the batch mean.
    gains: list[float] | None
    pass_rate: float  # mean predicted pass rate


class PromptQueue:
    """
    Provides the candidates of each step ([`next_slots`]) and takes back unsolved and unused prompts ([`finish_step`]).

    Every rank holds the same queue and calls both methods with the same arguments, so that no communication is needed.

    Attributes:
        retry_queue (`list[QueuedPrompt]`):
            Unsolved prompts, which are sampled again in the next step.
        reserved (`list[int]`):
            Positions of prompts that were selected by their score, but not needed. They are taken first in the next step.
        skips (`dict[str, int]`):
            Number of times that a prompt was not selected since it was sampled last, by key.
    """

    def __init__(self, stream: PromptStream, config: SlotConfig):
        self.stream, self.config = stream, config
        self.retry_queue: list[QueuedPrompt] = []
        self.reserved: list[int] = []
        self.skips: dict[str, int] = {}
        self.metrics: dict[str, float] = {}  # of the current step
        # States before the last two calls of `next_slots`, the latest first. A checkpoint may be written while the rollouts of
        # these steps are not trained on yet; a resumed run has to sample their prompts again.
        self._before: list[dict[str, Any]] = []
        self._steps_without_scores = 0  # steps without informative estimates
        self._new_prompts: list[QueuedPrompt] = []  # candidates of the current step that are not retries
        # Positions that the current step has taken from the stream; `None` between steps.
        self._taken: list[int] | None = None

    def next_slots(
        self, score_candidates: Callable[[list[int]], CandidateScores] | None = None
    ) -> list[list[QueuedPrompt]]:
        """
        Return the candidates of each slot: one retry per slot, as far as there are retries, then new prompts.

        New prompts are distributed evenly: every slot gets a first candidate before any slot gets a second one.

        Args:
            score_candidates (`Callable[[list[int]], CandidateScores]`, *optional*):
                Returns the scores of the rows at given stream positions. Called at most once, and only if
                `choices_per_prompt` is above 1.
        """
        self._before, self.metrics = [self._state(), *self._before[:1]], {}
        self._taken = []
        config, retries = self.config, self.retry_queue
        slots: list[list[QueuedPrompt]] = [[candidate] for candidate in retries]
        slots += [[] for _ in range(config.slots - len(slots))]
        number = config.slots * config.candidates_per_slot - len(retries)
        new = self._new_prompts = self._choose(number, {candidate.position for candidate in retries}, score_candidates)
        waiting = iter(new)
        for size in range(config.candidates_per_slot):
            for slot in slots:
                if len(slot) == size and (candidate := next(waiting, None)) is not None:
                    slot.append(candidate)
        if any(not slot for slot in slots):
            raise ValueError(
                f"Each step needs {config.slots} distinct prompts, but the training dataset has only "
                f"{len(new) + len(retries)}. Use a smaller batch or a larger dataset."
            )
        return slots

    def make_slots(self, candidates: Sequence[Sequence[QueuedPrompt]], sizes: Sequence[int]) -> list[BatchSlot]:
        """Create the slots of a step, with `sizes` rollouts per round."""
        return [BatchSlot(self.config, *slot) for slot in zip(candidates, sizes, strict=True)]

    def finish_step(self, slots: Sequence[BatchSlot]) -> dict[str, float]:
        """Queue unsolved prompts for a retry, put unused ones back, and return metrics."""
        self._taken = None
        sampled = [slot.candidates[i] for slot in slots for i in slot.sampled]
        used = {candidate.position for candidate in sampled}
        self._put_back([candidate for candidate in self._new_prompts if candidate.position not in used])
        candidates = [slot.unsolved for slot in slots] if self.config.fixed_budget else []
        unsolved = sorted((c for c in candidates if c is not None), key=lambda candidate: candidate.rounds)
        self.retry_queue = unsolved[: self._max_retries]
        self.stream.forget({candidate.position for candidate in self.retry_queue} | {*self.reserved})
        new = sum(not candidate.rounds for candidate in sampled)
        return self.metrics | {
            "prompts/frac_new": new / len(sampled),
            "prompts/frac_retried": 1 - new / len(sampled),
            "prompts/retries_dropped": float(len(unsolved) - len(self.retry_queue)),
            "prompts/resampled": float(len(sampled) - len(slots)),
            "prompts/queue": float(len(self.retry_queue) + len(self.reserved) + self.stream.put_back_rows),
            "prompts/epoch": self.stream.epoch,
        }

    def _put_back(self, unused: Sequence[QueuedPrompt]) -> None:
        # Prompts in dataset order stay unbiased samples, so they return to the stream. Selected ones do not: they wait in a
        # separate list, so that they are never mistaken for samples in dataset order.
        self.stream.put_back([candidate.position for candidate in unused if candidate.from_data_order])
        self.reserved = [candidate.position for candidate in unused if not candidate.from_data_order] + self.reserved

    @property
    def _max_retries(self) -> int:
        return max(1, int(MAX_RETRY_FRACTION * self.config.slots))

    def _choose(
        self, number: int, exclude: set[int], score_candidates: Callable[[list[int]], CandidateScores] | None
    ) -> list[QueuedPrompt]:
        """Select `number` new prompts; those reserved in an earlier step come first."""
        factor = self.config.choices_per_prompt
        if factor == 1 or score_candidates is None:
            self._taken = self.stream.take(number, exclude)
            return [QueuedPrompt(position) for position in self._taken]
        taken = [position for position in self.reserved if position not in exclude][:number]
        self.reserved = [position for position in self.reserved if position not in taken]
        chosen = [QueuedPrompt(position, from_data_order=False) for position in taken]
        number -= len(chosen)
        if not number:
            return chosen
        positions = self.stream.take(factor * number, exclude | {candidate.position for candidate in chosen})
        self._taken = positions
        keys, gains, pass_rate = score_candidates(positions)
        self.metrics = {"prompts/pass_rate": pass_rate, "prompts/skipped": 0.0}
        self.metrics["prompts/max_skips"] = self._max_skips
        if gains is None:
            # Selecting by uninformative estimates would only bias the sample. The other candidates are put back.
            self._warn_estimator_uninformative()
            self.stream.put_back(positions[number:])
            self._taken = positions[:number]
            return chosen + [QueuedPrompt(position) for position in positions[:number]]
        return chosen + self._best(positions, keys, gains, number)

    def _best(self, positions: list[int], keys: list[str], gains: list[float], number: int) -> list[QueuedPrompt]:
        """
        Select `number` of the candidates: those skipped too often, a minimum fraction in dataset order, then the largest gains.

        Returned in stream order, so that the assignment to slots does not depend on the gains.
        """
        every = range(len(positions))
        due = [i for i in every if self.skips.get(keys[i], 0) >= MAX_SKIPS]
        exploring = [i for i in every if i not in due][: math.ceil(MIN_IN_ORDER_FRACTION * number)]
        first = (due + exploring)[:number]
        rest = sorted((i for i in every if i not in first), key=lambda i: (-gains[i], i))
        chosen = sorted(first + rest[: number - len(first)])
        for i in every:
            if i in chosen:
                self.skips.pop(keys[i], None)
            else:
                self.skips[keys[i]] = self.skips.get(keys[i], 0) + 1
        self.metrics["prompts/skipped"] = float(len(positions) - len(chosen))
        self.metrics["prompts/max_skips"] = self._max_skips
        return [QueuedPrompt(positions[i], from_data_order=i in exploring) for i in chosen]

    @property
    def _max_skips(self) -> float:
        return float(max(self.skips.values(), default=0))

    def _warn_estimator_uninformative(self) -> None:
        self._steps_without_scores += 1
        if self._steps_without_scores == 20:
            logger.warning(
                f"prompt_oversampling={self.config.choices_per_prompt} has had no effect for 20 steps, because the pass-rate "
                "estimates are not yet better than the batch mean. Selection starts once they are."
            )

    def _state(self) -> dict[str, Any]:
        return {
            "stream": self.stream.state_dict(),
            "retry_queue": [candidate._asdict() for candidate in self.retry_queue],
            "reserved": list(self.reserved),
            "skips": dict(self.skips),
        }

    def state_dict(self, *, steps_back: int = 0) -> dict[str, Any]:
        """The current state, or the state before the last `steps_back` (1 or 2) calls of [`next_slots`]."""
        return self._before[steps_back - 1] if steps_back else self._state()

    def rollback(self) -> None:
        """
        Undo the last [`next_slots`] if [`finish_step`] has not followed, because its prompts will not be sampled: they are the
        next ones again. Does nothing between steps.

        Retries need no undoing: `next_slots` leaves them in the queue until `finish_step` replaces it.
        """
        if self._taken is None:
            return
        self.stream.put_back(self._taken)
        before, *self._before = self._before
        self.reserved, self.skips = list(before["reserved"]), dict(before["skips"])
        self._taken, self._new_prompts = None, []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        retries = [QueuedPrompt(**candidate) for candidate in state["retry_queue"]]
        queued = [candidate.position for candidate in retries]
        self.stream.check_positions([*queued, *state["reserved"], *state["stream"]["front"]])
        self.stream.load_state_dict(state["stream"])
        self.retry_queue = retries[: self._max_retries]
        if len(self.retry_queue) < len(retries):
            logger.warning(
                f"The checkpoint has {len(retries)} queued retries, but the batch now has room for {len(self.retry_queue)}; the "
                "others are dropped. Resume with the batch size of the checkpoint to keep them."
            )
        self.reserved, self.skips = list(state["reserved"]), dict(state["skips"])
