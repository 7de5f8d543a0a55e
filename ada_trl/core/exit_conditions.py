"""Exit conditions of sequential sampling."""

from dataclasses import dataclass
from typing import Protocol


class OutcomeCounts(Protocol):
    """Part of a pool that an exit condition depends on."""

    @property
    def positives(self) -> int: ...

    @property
    def negatives(self) -> int: ...


@dataclass(frozen=True)
class ExitCondition:
    """
    Condition that a pool has enough positives and enough negatives
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2, exit conditions *pos* and *balance*).

    Args:
        min_positives (`int`):
            K_pos. *Seq-pos* is `ExitCondition(1, 0)`.
        min_negatives (`int`, *optional*, defaults to `0`):
            K_neg. *Seq-balance* with n rollouts per group is `ExitCondition(n // 2, n - n // 2)`.
    """

    min_positives: int
    min_negatives: int = 0

    def __call__(self, pool: OutcomeCounts) -> bool:
        return pool.positives >= self.min_positives and pool.negatives >= self.min_negatives
