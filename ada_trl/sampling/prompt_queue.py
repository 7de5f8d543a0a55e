"""What each slot of a step asks: prompts that go on, and new ones of the stream, in its order or chosen by expected gain."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core import ExitCondition
from ..utils.logging import get_logger
from .batch_slots import BatchSlot, QueuedPrompt
from .prompt_stream import PromptStream


logger = get_logger(__name__)

MAX_RETRY_FRACTION = 0.75  # of the slots, or one, for prompts that go on: a hard set cannot fill the batch
MIN_IN_ORDER_FRACTION = 0.25  # of the new prompts, at least, in the data's order
MAX_SKIPS = 8  # times, then a prompt comes first


class CandidateScores(NamedTuple):
    """
    What is expected of candidates.

    Args:
        keys (`list[str]`):
            What tells each prompt from others, across epochs.
        gains (`list[float]`, *optional*):
            Expected gain of asking each; `None` while that is not known better than by a guess.
        pass_rate (`float`):
            Mean over the candidates.
    """

    keys: list[str]
    gains: list[float] | None
    pass_rate: float


@dataclass(frozen=True)
class SlotConfig:
    """
    How the slots of a step work.

    Args:
        slots (`int`):
            How many there are.
        candidates_per_slot (`int`):
            Prompts that a slot may ask one after another.
        exit_condition ([`~core.ExitCondition`]), max_rounds (`int`), fixed_budget (`bool`), positive_threshold (`float`):
            See [`BatchSlot`].
        choices_per_prompt (`int`):
            Of how many new prompts one is chosen; 1 takes all, in the data's order.
    """

    slots: int
    candidates_per_slot: int
    exit_condition: ExitCondition
    max_rounds: int
    fixed_budget: bool
    positive_threshold: float
    choices_per_prompt: int = 1


class PromptQueue:
    """
    Hands out the prompts of each step, `open`, and takes back what goes on or was not needed, `close`. All processes do
    both with the same arguments, so they agree.
    """

    def __init__(self, stream: PromptStream, config: SlotConfig):
        self.stream, self.config = stream, config
        self.retry_queue: list[QueuedPrompt] = []
        self.reserved: list[int] = []  # positions that were chosen, and not needed yet
        self.skips: dict[str, int] = {}  # by key, how often since it was last asked
        self.metrics: dict[str, float] = {}  # of the step under way
        self._before: list[dict[str, Any]] = []  # the states before the last two steps were opened, the last one first
        self._steps_without_scores = 0  # steps without informative estimates
        self._new_prompts: list[QueuedPrompt] = []  # that this step may ask

    def next_slots(
        self, score_candidates: Callable[[list[int]], CandidateScores] | None = None
    ) -> list[list[QueuedPrompt]]:
        """
        The candidates of each slot: first the prompts that go on, one per slot, then new ones, round by round.

        Args:
            score_candidates (`Callable[[list[int]], CandidateScores]`, *optional*):
                Of positions in the stream. Called once if there is a choice.
        """
        self._before, self.metrics = [self._state(), *self._before[:1]], {}
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
                f"A step asks {config.slots} different prompts, but the training data set has only "
                f"{len(new) + len(retries)}. Use a smaller batch or a larger data set."
            )
        return slots

    def make_slots(self, candidates: Sequence[Sequence[QueuedPrompt]], sizes: Sequence[int]) -> list[BatchSlot]:
        """One slot per entry, which draws `sizes` rollouts per round."""
        s = self.config
        return [
            BatchSlot(
                s.positive_threshold,
                of_slot,
                exit_condition=s.exit_condition,
                samples_per_round=size,
                max_rounds=s.max_rounds,
                fixed_budget=s.fixed_budget,
            )
            for of_slot, size in zip(candidates, sizes, strict=True)
        ]

    def finish_step(self, slots: Sequence[BatchSlot]) -> dict[str, float]:
        """What goes on, what was not needed, and what is logged of it."""
        sampled = [slot.candidates[i] for slot in slots for i in slot.sampled]
        used = {candidate.position for candidate in sampled}
        unused = [candidate for candidate in self._new_prompts if candidate.position not in used]
        self.stream.put_back([candidate.position for candidate in unused if candidate.from_data_order])
        self.reserved = [candidate.position for candidate in unused if not candidate.from_data_order] + self.reserved
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

    @property
    def _max_retries(self) -> int:
        return max(1, int(MAX_RETRY_FRACTION * self.config.slots))

    def _choose(
        self, number: int, exclude: set[int], score_candidates: Callable[[list[int]], CandidateScores] | None
    ) -> list[QueuedPrompt]:
        """`number` new prompts, those first that were chosen before."""
        factor = self.config.choices_per_prompt
        if factor == 1 or score_candidates is None:
            return [QueuedPrompt(position) for position in self.stream.take(number, exclude)]
        taken = [position for position in self.reserved if position not in exclude][:number]
        self.reserved = [position for position in self.reserved if position not in taken]
        chosen = [QueuedPrompt(position, from_data_order=False) for position in taken]
        number -= len(chosen)
        if not number:
            return chosen
        positions = self.stream.take(factor * number, exclude | {candidate.position for candidate in chosen})
        keys, gains, pass_rate = score_candidates(positions)
        self.metrics = {"prompts/pass_rate": pass_rate, "prompts/skipped": 0.0}
        self.metrics["prompts/max_skips"] = float(max(self.skips.values(), default=0))
        if gains is None:
            self._warn_estimator_uninformative()
            self.stream.put_back(positions[number:])
            return chosen + [QueuedPrompt(position) for position in positions[:number]]
        return chosen + self._best(positions, keys, gains, number)

    def _best(self, positions: list[int], keys: list[str], gains: list[float], number: int) -> list[QueuedPrompt]:
        """A share in the data's order, what has been passed over too often, and then what is expected to teach most."""
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
        self.metrics |= {
            "prompts/skipped": float(len(positions) - len(chosen)),
            "prompts/max_skips": float(max(self.skips.values(), default=0)),
        }
        return [QueuedPrompt(positions[i], from_data_order=i in exploring) for i in chosen]

    def _warn_estimator_uninformative(self) -> None:
        self._steps_without_scores += 1
        if self._steps_without_scores == 20:
            logger.warning(
                f"prompt_oversampling={self.config.choices_per_prompt} has asked prompts in the data's order for 20 steps: "
                "the estimated pass rates tell the prompts of a batch no better apart than its mean does. It chooses as soon "
                "as they do."
            )

    def _state(self) -> dict[str, Any]:
        retries = [candidate._asdict() for candidate in self.retry_queue]
        state = {"stream": self.stream.state_dict(), "retry_queue": retries, "reserved": list(self.reserved)}
        return state | {"skips": dict(self.skips)}

    def state_dict(self, *, steps_back: int = 0) -> dict[str, Any]:
        """For `load_state_dict`; of the time before the last `open`, or the last two, whose rollouts are not trained on yet."""
        return self._before[steps_back - 1] if steps_back else self._state()

    def rollback(self) -> None:
        """Nothing of what was opened last is asked: its prompts are the next ones again."""
        self.stream.put_back([candidate.position for candidate in self._new_prompts if candidate.from_data_order])
        self.reserved = [
            candidate.position for candidate in self._new_prompts if not candidate.from_data_order
        ] + self.reserved
        self._before, self._new_prompts = self._before[1:], []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        retries = [QueuedPrompt(**candidate) for candidate in state["retry_queue"]]
        self.retry_queue = retries[: self._max_retries]
        if len(self.retry_queue) < len(retries):
            logger.warning(
                f"{len(retries)} prompts were to be asked again; a step has room for {len(self.retry_queue)} of them now, since "
                "its batch is smaller than that of the checkpoint. The others are left out, as where a step has no room."
            )
        self.reserved, self.skips = list(state["reserved"]), dict(state["skips"])
