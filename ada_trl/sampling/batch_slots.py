"""A slot asks one prompt after another, at its own pace."""

from collections.abc import Sequence
from typing import NamedTuple

from ..core import ExitCondition, Pool, Rollout


class QueuedPrompt(NamedTuple):
    """
    A prompt that a slot may ask, with what earlier steps have drawn of it.

    Args:
        position (`int`):
            Of its row, in the stream.
        rounds (`int`, *optional*, defaults to `0`), positives (`int`, *optional*, defaults to `0`), negatives (`int`, *optional*, defaults to `0`):
            Drawn before.
        from_data_order (`bool`, *optional*, defaults to `True`):
            Whether it is asked because its turn has come in the data's order, so that it stands for the data set.
    """

    position: int
    rounds: int = 0
    positives: int = 0
    negatives: int = 0
    from_data_order: bool = True


class BatchSlot(Pool):
    """
    Everything that one slot of the batch draws in a step, of one prompt after another. Slots know nothing of each other:
    what one draws depends on its own past only, so a step gives the same rollouts whether its slots wait for each other
    (rounds) or not (a server), on however many processes.

    A slot with a fixed budget is one round of one prompt, which can go on in the next step. In any other, a prompt leaves after
    the round that meets its exit condition, or after its last round; the next candidate follows if all signals of the one
    that leaves are equal: it is replaced, as in the dynamic sampling of [DAPO](https://huggingface.co/papers/2503.14476).

    Args:
        positive_threshold (`float`):
            See [`~core.Pool`].
        candidates (`Sequence[QueuedPrompt]`):
            At least one; with a fixed budget one.
        exit_condition ([`~core.ExitCondition`]):
            When a prompt has drawn enough, over all steps.
        samples_per_round (`int`):
            Rollouts of a round.
        max_rounds (`int`):
            Of a prompt, over all steps.
        fixed_budget (`bool`):
            See above.
    """

    def __init__(
        self,
        positive_threshold: float,
        candidates: Sequence[QueuedPrompt],
        *,
        exit_condition: ExitCondition,
        samples_per_round: int,
        max_rounds: int,
        fixed_budget: bool,
    ):
        super().__init__(positive_threshold)
        self.candidates = candidates
        self.pools = [Pool(positive_threshold) for _ in candidates]  # of this step
        self.current = 0  # which candidate is asked
        self.done = False
        self._candidate_of_round: list[int] = [0]  # by round of the slot, which candidate
        self._exit_condition, self._max_rounds = exit_condition, max_rounds
        self._samples_per_round, self._fixed_budget = samples_per_round, fixed_budget

    def candidate_at(self, draw: int) -> int:
        """Which of the candidates draw `draw` of the slot belongs to; known once the round before is over."""
        return self._candidate_of_round[draw // self._samples_per_round]

    @property
    def sampled(self) -> range:
        """The candidates that have drawn something in this step."""
        return range(sum(1 for pool in self.pools if len(pool)))

    def history(self, index: int) -> QueuedPrompt:
        """A candidate with what it has drawn until now."""
        candidate, pool = self.candidates[index], self.pools[index]
        return candidate._replace(
            rounds=candidate.rounds + len(pool) // self._samples_per_round,
            positives=candidate.positives + pool.positives,
            negatives=candidate.negatives + pool.negatives,
        )

    def resolved(self, index: int) -> bool:
        """Whether a candidate has met its exit condition, over all steps."""
        known, needed = self.history(index), self._exit_condition
        return known.positives >= needed.min_positives and known.negatives >= needed.min_negatives

    def prompt_has_zero_variance(self, index: int) -> bool:
        """Whether all signals of a candidate are equal, so that shaping terms beside them cannot fake a contrast."""
        pool = self.pools[index]
        return len({rollout.success_reward for rollout in pool.rollouts if pool.is_scored(rollout)}) <= 1

    @property
    def unsolved(self) -> QueuedPrompt | None:
        """The prompt that was asked last, if it has to go on."""
        last = self.sampled[-1]
        over = self.resolved(last) or self.history(last).rounds >= self._max_rounds
        return None if over else self.history(last)._replace(from_data_order=False)

    def add(self, rollout: Rollout) -> None:
        super().add(rollout)
        pool = self.pools[self.current]
        pool.add(rollout._replace(draw_index=len(pool)))
        if not len(self) % self._samples_per_round:
            self._end_round()

    def _end_round(self) -> None:
        if self._fixed_budget:
            self.done = True
            return
        if self.unsolved is None:
            if not self.prompt_has_zero_variance(self.current) or self.current + 1 == len(self.candidates):
                self.done = True
                return
            self.current += 1
        self._candidate_of_round.append(self.current)


def slot_done(slot: BatchSlot) -> bool:
    """The exit condition of a loop over slots."""
    return slot.done
