"""Successive elimination (Algorithm 2 of the paper): when the sampling of a prompt stops, and the loop over rounds."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from .rollouts import Rollouts, Scoring


Counts = TypeVar("Counts", int, np.ndarray)


def needs_more(positives: Counts, negatives: Counts, min_positives: int, min_negatives: int):
    """
    Whether prompts with these numbers of positive and negative rollouts are sampled further
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2, exit conditions *pos*: K_pos positives,
    and *balance*: K_pos positives and K_neg negatives).
    """
    return (positives < min_positives) | (negatives < min_negatives)


class Candidate(NamedTuple):
    """
    A prompt that a step may sample: position of its row where the prompts come from, and earlier steps that sampled
    it.
    """

    position: int
    attempts: int = 0


@dataclass(frozen=True)
class SlotRule:
    """
    When the sampling of a slot's prompts stops.

    Args:
        min_positives, min_negatives (`int`):
            K_pos and K_neg; see [`needs_more`].
        max_rounds (`int`):
            N, the maximum number of rounds of a prompt.
        compares_each_reward (`bool`, *optional*, defaults to `False`):
            Whether a prompt has zero variance only if the rewards of every function are equal, rather than their sum
            or the success reward.
    """

    min_positives: int
    min_negatives: int
    max_rounds: int
    compares_each_reward: bool = False


@dataclass(eq=False)
class Slot:
    """
    One prompt's place in the batch: the rounds of its prompt, or of several *candidates* one after another.

    The next round of a slot depends on the earlier ones of the same slot only. A step therefore has the same rollouts
    whether slots wait for each other (synchronous rounds) or not (a vLLM server), and on any number of processes.

    A candidate is finished after the round that meets its exit condition, or after its last round. If it then has zero
    variance, the next candidate takes its place, as in the dynamic sampling of
    [DAPO](https://huggingface.co/papers/2503.14476). An abstained candidate ([`~core.Rollouts`]) has no exit condition
    that further rounds could meet.

    Args:
        rule ([`SlotRule`]):
            When sampling stops.
        scoring ([`~core.Scoring`]):
            Which rollouts are positive.
        candidates (`Sequence[Candidate]`):
            At least one.
        round_size (`int`):
            M, the number of rollouts per round.
    """

    rule: SlotRule
    scoring: Scoring
    candidates: Sequence[Candidate]
    round_size: int
    done: bool = False
    rounds: list[np.ndarray] = field(default_factory=list)  # rewards (M, F) of each round
    # Also of the next round, unless the slot is done.
    candidate_of_round: list[int] = field(default_factory=lambda: [0])
    requested: int = 0  # rounds
    # Of the candidate that is sampled now.
    _positives: int = 0
    _negatives: int = 0
    _is_abstained: bool = False  # unless it has positives or negatives
    # Rewards and outcomes of rounds by first draw, until their turn.
    _early: dict[int, tuple[np.ndarray, "Outcomes"]] = field(default_factory=dict)

    @property
    def max_rounds(self) -> int:
        """Maximum number of rounds in this step."""
        return self.rule.max_rounds * len(self.candidates)

    @property
    def rounds_ahead(self) -> int:
        """
        Number of rounds that were requested and are not complete, or not processed because an earlier one is not.
        """
        return self.requested - len(self.rounds)

    @property
    def num_rollouts(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def num_sampled(self) -> int:
        """Number of candidates that have rollouts in this step; they are the first ones."""
        return self.candidate_of_round[len(self.rounds) - 1] + 1 if self.rounds else 0

    @property
    def draws_in_flight(self) -> list[int]:
        """Index of the first rollout of each round that was requested and not received."""
        draws = range(self.num_rollouts, self.requested * self.round_size, self.round_size)
        return [draw for draw in draws if draw not in self._early]

    def candidate_at(self, draw: int) -> int:
        """
        Index of the candidate that rollout `draw` belongs to; of several, known once the round before is complete.
        """
        return self.candidate_of_round[draw // self.round_size] if len(self.candidates) > 1 else 0

    def rewards_of(self, index: int) -> np.ndarray:
        """Rewards `(rollouts, F)` of a candidate's rollouts in this step."""
        rounds = zip(self.candidate_of_round, self.rounds, strict=False)
        return np.concatenate([rewards for candidate, rewards in rounds if candidate == index])

    def add_round(self, rewards: np.ndarray, outcomes: "Outcomes | None" = None) -> None:
        """
        Add a round, and decide how the slot goes on.

        Args:
            rewards (`np.ndarray`):
                Rewards of the round's rollouts, `(M, F)`.
            outcomes ([`Outcomes`], *optional*):
                Its [`count_outcomes`], which takes less time for the rounds of many slots in one call.
        """
        positives, negatives, is_abstained = outcomes or count_outcomes([rewards], self.scoring)[0]
        rule, current = self.rule, self.candidate_of_round[len(self.rounds)]
        self.rounds.append(rewards)
        self._positives += positives
        self._negatives += negatives
        self._is_abstained |= is_abstained
        is_unmet = needs_more(self._positives, self._negatives, rule.min_positives, rule.min_negatives)
        if self._is_abstained and not self._positives + self._negatives:
            is_unmet = False
        if is_unmet and self.candidate_of_round.count(current) < rule.max_rounds:
            self.candidate_of_round.append(current)
        elif current + 1 == len(self.candidates) or not self._has_zero_variance(current):
            # Without another candidate the last one stays in the batch, if need be with zero advantages.
            self.done = True
        else:
            self.candidate_of_round.append(current + 1)
            self._positives = self._negatives = 0
            self._is_abstained = False

    def receive(self, first_draw: int, rewards: np.ndarray, outcomes: "Outcomes") -> None:
        """Add a requested round, after those before it: results may arrive in any order."""
        self._early[first_draw] = rewards, outcomes
        while not self.done and self.num_rollouts in self._early:
            self.add_round(*self._early.pop(self.num_rollouts))

    def _has_zero_variance(self, index: int) -> bool:
        pool = Rollouts.score([self.rewards_of(index)], self.scoring)
        if pool.is_abstained_P[0]:
            return bool(pool.has_zero_variance_P[0])
        # Equal successes say nothing about the task, even if another reward differs; equal sums have a zero gradient.
        outcomes = [pool.success_reward_N, pool.reward_N]
        if self.rule.compares_each_reward:
            outcomes = [self.scoring.distinguish(pool.rewards_NF)]
        return any(len(set(outcome_N[pool.is_scored_N].tolist())) <= 1 for outcome_N in outcomes)


class Outcomes(NamedTuple):
    """
    Numbers of positive and negative rollouts of a round, and whether its prompt would be abstained with this round
    alone.
    """

    positives: int
    negatives: int
    is_abstained: bool


def count_outcomes(rounds: Sequence[np.ndarray], scoring: Scoring) -> list[Outcomes]:
    """The outcomes of each round, from its rewards `(M, F)`."""
    if not rounds:
        return []
    scored = Rollouts.score(rounds, scoring)
    of_rounds = (scored.positives_P.tolist(), scored.negatives_P.tolist(), scored.is_abstained_P.tolist())
    return list(map(Outcomes, *of_rounds))


Submit = Callable[[int, int], None]
"""Takes a slot and the index of its next rollout, and requests the rollouts of its next round."""

Cancel = Callable[[int, int], None]
"""Takes a slot that is done and the index of the first rollout of a requested round, which is not needed any more."""

Collect = Callable[[], Sequence[tuple[int, int, np.ndarray]]]
"""Waits for at least one request that was not cancelled; returns `(slot, index of the first rollout, rewards)`."""

Progress = Callable[[int, int], None]
"""Takes the number of slots still active and of rollouts sampled so far."""


def sample_slots(
    slots: Sequence[Slot],
    submit: Submit,
    collect: Collect,
    *,
    speculate_below: int = 0,
    cancel: Cancel | None = None,
    progress: Progress | None = None,
) -> None:
    """
    Sample all slots until they are done: successive elimination
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2).

    Each active slot has one request in flight. If `collect` waits for all of them, these are the synchronous rounds of
    the paper. If it returns as soon as one is complete, no slot waits for another. The rollouts have the same
    distribution either way: the M rollouts of a round are awaited together, and rounds are processed in order.

    Args:
        slots (`Sequence[Slot]`):
            Slots without rounds, filled by this function.
        submit (`Submit`), collect (`Collect`):
            Start a request; wait for results.
        speculate_below (`int`, *optional*, defaults to `0`):
            If fewer requests of active slots are in flight, further rounds of these slots are requested before their
            previous round has returned. The rollouts of such a round are used only if the slot needs them, in order,
            so that pools have the same distribution. Not if a slot has several candidates: which of them is next is
            unknown before a round is complete.
        cancel (`Cancel`, *optional*):
            Called for requests of slots that are done; their results need not be collected.
        progress (`Progress`, *optional*):
            Called after each `collect`.
    """
    waiting = deque(enumerate(slots))
    # What a search of all slots would find in each turn, which is slow for thousands of slots. `ahead` has the slots
    # by their number of rounds ahead, with outdated numbers as well.
    in_flight, active, num_rollouts = 0, len(slots), 0
    ahead: list[tuple[int, int]] = []
    if any(len(slot.candidates) > 1 for slot in slots):
        speculate_below = 0

    def next_slot() -> tuple[int, Slot] | None:
        if waiting:
            return waiting.popleft()
        # All rounds that are known to be needed are in flight. If there is room, request one that may be needed, of
        # the slot with the fewest such rounds.
        while ahead and in_flight < speculate_below:
            rounds_ahead, number = heapq.heappop(ahead)
            slot = slots[number]
            if not slot.done and rounds_ahead == slot.rounds_ahead and slot.requested < slot.max_rounds:
                return number, slot
        return None

    while active:
        while (following := next_slot()) is not None:
            number, slot = following
            submit(number, slot.requested * slot.round_size)
            slot.requested += 1
            in_flight += 1
            heapq.heappush(ahead, (slot.rounds_ahead, number))
        received = collect()
        # In one call: NumPy takes longer for a round of a few rollouts than for its rewards.
        outcomes = count_outcomes([rewards for *_, rewards in received], slots[0].scoring)
        for (number, first_draw, rewards), of_round in zip(received, outcomes, strict=True):
            slot = slots[number]
            if slot.done:  # it was done before this round arrived
                continue
            in_flight -= 1
            num_rollouts -= slot.num_rollouts
            slot.receive(first_draw, rewards, of_round)
            num_rollouts += slot.num_rollouts
            heapq.heappush(ahead, (slot.rounds_ahead, number))
            if slot.done:
                active -= 1
                unneeded = slot.draws_in_flight
                in_flight -= len(unneeded)
                for draw in unneeded if cancel is not None else ():
                    cancel(number, draw)
            elif slot.requested == len(slot.rounds):  # no speculative round is in flight
                waiting.append((number, slot))
        if progress is not None:
            progress(active, num_rollouts)


class SampledPrompt(NamedTuple):
    """A prompt that was sampled in a step; of several candidates of a slot with its place among them."""

    candidate: Candidate
    slot: int
    candidate_index: int = 0  # among the candidates of the slot
    first_draw: int = 0  # index of its first rollout among those of the slot
    is_trained: bool = True  # whether the prompt is trained on, because no other one was sampled in its place

    @property
    def is_on_distribution(self) -> bool:
        """
        Whether the prompt is an unbiased sample of the dataset: sampled for the first time, and not in place of
        another one.
        """
        return not self.candidate.attempts and not self.candidate_index


def sampled_prompts(slots: Sequence[Slot]) -> list[SampledPrompt]:
    """
    The prompts that were sampled in a step, in the order of the slots: the P prompts of the step's [`~core.Rollouts`].
    """
    return [
        SampledPrompt(
            candidate=slot.candidates[index],
            slot=number,
            candidate_index=index,
            first_draw=slot.candidate_of_round.index(index) * slot.round_size,
            is_trained=index == slot.num_sampled - 1,
        )
        for number, slot in enumerate(slots)
        for index in range(slot.num_sampled)
    ]


def collect_rollouts(slots: Sequence[Slot], prompts: Sequence[SampledPrompt]) -> Rollouts:
    """The record of all rollouts of a step, from its slots and their [`sampled_prompts`]."""
    rewards = [slots[prompt.slot].rewards_of(prompt.candidate_index) for prompt in prompts]
    return Rollouts.score(rewards, slots[0].scoring, attempt_P=[prompt.candidate.attempts for prompt in prompts])
