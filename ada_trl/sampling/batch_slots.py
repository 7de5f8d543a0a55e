"""Batch slots: each samples one prompt, or several candidates one after another (dynamic sampling)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core import ExitCondition, Pool, Rollout


class QueuedPrompt(NamedTuple):
    """
    A candidate for a slot, with its rounds, positive and negative rollouts in earlier steps.

    Args:
        position (`int`):
            Position of its row in the [`~sampling.prompt_stream.PromptStream`].
        from_data_order (`bool`, *optional*, defaults to `True`):
            Whether it was taken in dataset order, so that it is an unbiased sample of the dataset. `False` for retries and for
            prompts selected by their score.
    """

    position: int
    rounds: int = 0
    positives: int = 0
    negatives: int = 0
    from_data_order: bool = True


@dataclass(frozen=True)
class SlotConfig:
    """Configuration of the slots of a step."""

    slots: int  # their number
    candidates_per_slot: int  # maximum number of prompts that are sampled one after another in a slot
    exit_condition: ExitCondition  # condition under which a prompt has enough rollouts, counted over all steps
    max_rounds: int  # maximum number of rounds of a prompt, counted over all steps
    fixed_budget: bool  # whether a slot is one round of one prompt
    positive_threshold: float  # see `Pool`
    choices_per_prompt: int = 1  # new prompts out of which one is selected; 1 takes all of them, in dataset order


class BatchSlot(Pool):
    """
    All rollouts that are sampled for one slot of the batch in a step, possibly of several prompts.

    Slots are independent: the next rollout of a slot depends on the earlier ones of the same slot only. A step therefore
    gives the same rollouts whether slots wait for each other (synchronous rounds) or not (a vLLM server), and on any number of
    ranks.

    A slot with a fixed budget samples one round of one prompt, which may be retried in the next step. In any other slot, a
    prompt is finished after the round that meets its exit condition, or after its last round. If the success rewards of all its
    rollouts are equal, the next candidate is sampled in its place, as in the dynamic sampling of
    [DAPO](https://huggingface.co/papers/2503.14476).

    Args:
        candidates (`Sequence[QueuedPrompt]`):
            At least one; exactly one with a fixed budget.
        samples_per_round (`int`):
            Rollouts per round.
    """

    def __init__(self, config: SlotConfig, candidates: Sequence[QueuedPrompt], samples_per_round: int):
        super().__init__(config.positive_threshold)
        self.candidates = candidates
        self.pools = [Pool(config.positive_threshold) for _ in candidates]  # rollouts of this step, by candidate
        self.current = 0  # index of the candidate that is being sampled
        self.done = False
        self._candidate_of_round: list[int] = [0]  # index of the candidate sampled in each round of the slot
        self._config, self._samples_per_round = config, samples_per_round

    def candidate_at(self, rollout_index: int) -> int:
        """Index of the candidate that rollout `rollout_index` of the slot belongs to; known once the previous round is complete."""
        return self._candidate_of_round[rollout_index // self._samples_per_round]

    @property
    def sampled(self) -> range:
        """Indices of the candidates that have rollouts in this step."""
        return range(sum(1 for pool in self.pools if len(pool)))

    def history(self, index: int) -> QueuedPrompt:
        """The candidate with its rollouts of this step added to those of earlier steps."""
        candidate, pool = self.candidates[index], self.pools[index]
        return candidate._replace(
            rounds=candidate.rounds + len(pool) // self._samples_per_round,
            positives=candidate.positives + pool.positives,
            negatives=candidate.negatives + pool.negatives,
        )

    def resolved(self, index: int) -> bool:
        """Whether a candidate has met its exit condition, counted over all steps."""
        return self._config.exit_condition(self.history(index))

    def prompt_has_zero_variance(self, index: int) -> bool:
        """
        Whether the success rewards of a candidate's rollouts are all equal.

        Total rewards are not compared: a shaping term (length, say) makes them differ even if all answers are wrong.
        """
        pool = self.pools[index]
        return len({rollout.success_reward for rollout in pool.rollouts if pool.is_scored(rollout)}) <= 1

    @property
    def unsolved(self) -> QueuedPrompt | None:
        """The prompt sampled last, if it has neither met its exit condition nor used all its rounds."""
        last = self.sampled[-1]
        over = self.resolved(last) or self.history(last).rounds >= self._config.max_rounds
        # A retry is not an unbiased sample of the dataset: only prompts without a success are retried.
        return None if over else self.history(last)._replace(from_data_order=False)

    def add(self, rollout: Rollout) -> None:
        super().add(rollout)
        pool = self.pools[self.current]
        # Counted within the candidate, whose seeds and rounds must not depend on the candidates sampled before it.
        pool.add(rollout._replace(draw_index=len(pool)))
        if not len(self) % self._samples_per_round:
            self._end_round()

    def _end_round(self) -> None:
        if self._config.fixed_budget:
            # One round per step. The queue decides whether the prompt is retried in the next one, see `unsolved`.
            self.done = True
            return
        if self.unsolved is None:
            # The prompt is finished. Another one takes its place only if this one has no gradient and a candidate is
            # left; otherwise the last prompt stays in the batch, if need be with zero advantage.
            if not self.prompt_has_zero_variance(self.current) or self.current + 1 == len(self.candidates):
                self.done = True
                return
            self.current += 1
        self._candidate_of_round.append(self.current)


def slot_done(slot: BatchSlot) -> bool:
    """Exit condition of a sampling loop over slots."""
    return slot.done
