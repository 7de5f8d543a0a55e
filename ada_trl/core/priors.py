"""How much a guess about a prompt's pass rate is worth beside what the prompt has shown."""

from collections.abc import Sequence

import numpy as np

from .pass_rate_ema import PromptCounts


PSEUDO_COUNTS = (
    4.0,
    1.0,
    2.0,
    8.0,
    16.0,
    32.0,
)  # candidates in rollouts; the first one is in use until something was seen
ERROR_MEMORY = 0.95  # weight of the errors of earlier steps


class PseudoCountSelector:
    """
    s of p̂ = (s h + k) / (s + n), which joins a guess h (of a value network) and a prompt's own discounted counts, k positives
    in n: the candidate whose p̂ has had the least squared error on what was drawn next.
    """

    def __init__(self) -> None:
        self.errors = np.zeros(len(PSEUDO_COUNTS))

    @property
    def best(self) -> float:
        """s."""
        return PSEUDO_COUNTS[int(np.argmin(self.errors))]

    def observe(
        self,
        guesses: Sequence[float],
        counts: Sequence[PromptCounts],
        positives: Sequence[int],
        draws: Sequence[int],
    ) -> None:
        """
        Score the candidates on one step.

        Args:
            guesses (`Sequence[float]`):
                h of each prompt.
            counts (`Sequence[PromptCounts]`):
                What each had shown before the step.
            positives, draws (`Sequence[int]`):
                What was drawn then.
        """
        h, k, n = (np.asarray(values, dtype=np.float64)[:, None] for values in (guesses, positives, draws))  # (P, 1)
        known = np.array([(c.discounted_positives, c.discounted_draws) for c in counts]).reshape(-1, 2)
        s = np.array(PSEUDO_COUNTS)
        p = (s * h + known[:, :1]) / (s + known[:, 1:])  # (P, S)
        self.errors = ERROR_MEMORY * self.errors + (k * (1 - p) ** 2 + (n - k) * p**2).sum(axis=0)

    def state_dict(self) -> list[float]:
        return self.errors.tolist()

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.errors = np.array(state, dtype=np.float64)
