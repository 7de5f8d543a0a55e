"""From what is known of a prompt to what its next rollouts should be compared with."""

from collections.abc import Sequence

import numpy as np


class RewardLevels:
    """
    What a positive and a negative rollout earn on average, to turn a pass rate into an expected reward: r₋ + (r₊ − r₋) p̂.

    Exact where rewards have two values; otherwise a rough first guess, which a prompt's own rewards soon outweigh.

    Args:
        decay (`float`, *optional*, defaults to `0.9`):
            Weight of what was seen before, per step.
    """

    def __init__(self, decay: float = 0.9):
        self.decay = decay
        self.sums = np.array([0.0, 1.0])  # of the rewards of negatives and of positives: as if they were 0 and 1
        self.counts = np.array([1.0, 1.0])

    def mean_reward(self, pass_rate: float) -> float:
        low, high = self.sums / self.counts
        return float(low + (high - low) * pass_rate)

    def observe(self, negatives: Sequence[float], positives: Sequence[float]) -> None:
        """Take in the rewards of one step, of negative and of positive rollouts."""
        for i, rewards in enumerate((negatives, positives)):
            if len(rewards):  # a kind that was not seen keeps what is known of it
                self.sums[i] = self.decay * self.sums[i] + np.sum(rewards)
                self.counts[i] = self.decay * self.counts[i] + len(rewards)

    def state_dict(self) -> list[list[float]]:
        return [self.sums.tolist(), self.counts.tolist()]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        self.sums, self.counts = map(np.array, state)


class PriorStrength:
    """
    How many rollouts an expectation is worth, chosen by how well it has predicted.

    A prompt's expectation joins a guess h (of a value network, or the mean of all prompts) and its own discounted counts,
    k positives in n: a posterior Beta(s m, s (1 − m)) with m = (s₀ h + k) / (s₀ + n) and s = min(s₀ + n, cap). Two numbers
    are chosen from a grid: s₀, what the guess is worth, and the cap, because the policy moves on and old news is worth
    less. Each candidate gives what is drawn next its beta-binomial likelihood; the largest discounted log-likelihood wins.
    Expectations are made before the draw and scored after it, so nothing is fitted to what it predicts.

    Args:
        bases (`Sequence[float]`):
            Candidates of s₀, the first one in use until something was seen.
        caps (`Sequence[float]`):
            Candidates of the cap, likewise.
        decay (`float`, *optional*, defaults to `0.95`):
            Weight of earlier steps.
    """

    def __init__(self, bases: Sequence[float], caps: Sequence[float], decay: float = 0.95):
        self.grid = np.array([(base, cap) for base in bases for cap in caps])  # (G, 2)
        self.decay = decay
        self.log_likelihood = np.zeros(len(self.grid))

    @property
    def best(self) -> tuple[float, float]:
        """s₀ and the cap."""
        base, cap = self.grid[np.argmax(self.log_likelihood)]
        return float(base), float(cap)

    def observe(
        self,
        guesses: Sequence[float],
        counted_positives: Sequence[float],
        counted_draws: Sequence[float],
        positives: Sequence[int],
        draws: Sequence[int],
        *,
        guess_strength: float | None = None,
    ) -> None:
        """
        Score the candidates on one step.

        Args:
            guesses (`Sequence[float]`):
                h of each prompt, strictly between 0 and 1.
            counted_positives, counted_draws (`Sequence[float]`):
                k and n, from before the step.
            positives, draws (`Sequence[int]`):
                What was drawn then.
            guess_strength (`float`, *optional*):
                s₀ where it is known otherwise; only the cap is chosen then.
        """
        h, k, n = (np.asarray(v, dtype=np.float64)[:, None] for v in (guesses, counted_positives, counted_draws))
        base, cap = self.grid.T  # (G,) each
        base = base if guess_strength is None else guess_strength
        mean = (base * h + k) / (base + n)  # (P, G)
        strength = np.minimum(base + n, cap)
        scores = _beta_binomial(mean * strength, (1 - mean) * strength, positives, draws)
        self.log_likelihood = self.decay * self.log_likelihood + scores.sum(axis=0)

    def state_dict(self) -> list[float]:
        return self.log_likelihood.tolist()

    def load_state_dict(self, state: Sequence[float]) -> None:
        if len(state) == len(self.grid):  # else of another kind of guess: start anew
            self.log_likelihood = np.array(state, dtype=np.float64)


def _beta_binomial(alpha: np.ndarray, beta: np.ndarray, positives: Sequence[int], draws: Sequence[int]) -> np.ndarray:
    """Log-likelihood of counts, up to what does not depend on α and β, `(P, G)`: Σ ln(α + i) + Σ ln(β + i) − Σ ln(α + β + i)."""
    k, n = (np.asarray(values)[:, None] for values in (positives, draws))
    total = np.zeros_like(alpha)
    for i in range(int(n.max(initial=0))):
        total += np.where(i < k, np.log(alpha + i), 0) + np.where(i < n - k, np.log(beta + i), 0)
        total -= np.where(i < n, np.log(alpha + beta + i), 0)
    return total
