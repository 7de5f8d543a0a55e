"""What a prompt's rollouts are expected to earn, learnt from what was drawn before: any rewards, nothing to set."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .baselines import BaselineEstimate, leave_one_out_sums
from .pool import Pool


# Candidates; the first of each is in use until something was seen.
VALUE_WEIGHTS = (0.5, 0.0, 1.0)  # κ, of a guess that is believed
PSEUDO_COUNTS = (8.0, 0.5, 1.0, 2.0, 4.0, 16.0, 32.0, 64.0)  # s, what a guess is worth in rollouts
DECAYS = (0.9, 1.0, 0.7)  # λ, of a prompt's earlier rollouts at each new visit
SHRINKAGE_COUNTS = (16.0, 0.0, 4.0, 64.0, 256.0)  # c, rollouts of other prompts before their residuals count half

ERROR_MEMORY = 0.98  # weight of the errors of earlier generations
SLOWEST_AVERAGE = 0.1  # weight of a new generation in the variance of rewards
SMALLEST_SHARE = 0.1  # of the largest deviation that a run has had: what rewards may be divided by


class RunningRewardStd:
    """
    How far a run's rewards scatter, known before the next ones are drawn: a running mean of the variance within each
    generation.
    """

    def __init__(self) -> None:
        self.variance = self.largest = 0.0  # σ², now and at most
        self.generations = 0

    @property
    def divisor(self) -> float:
        """σ², at least a hundredth of its largest value, since steps without any contrast would let it vanish."""
        return max(self.variance, SMALLEST_SHARE**2 * self.largest)

    @property
    def deviation(self) -> float:
        """σ, bounded below like its square; 0 until rewards have differed."""
        return math.sqrt(self.divisor)

    def observe(self, rewards: Sequence[float] | np.ndarray) -> None:
        """Take in all rewards of one generation."""
        if len(rewards):
            self.generations += 1
            share = max(1 / self.generations, SLOWEST_AVERAGE)
            of_generation = float(np.var(rewards)) if len(set(rewards)) > 1 else 0.0  # exactly 0, not a rounding error
            self.variance += share * (of_generation - self.variance)
            self.largest = max(self.largest, self.variance)

    def reward_stds(self, pools: Sequence[Pool]) -> list[float]:
        """
        What the rewards of each pool may be divided by, without a bias: σ of earlier generations. Until rewards have differed,
        that of the other prompts in this generation, 0 if theirs are all equal.
        """
        if self.largest:
            return [self.deviation] * len(pools)
        owners = np.repeat(np.arange(len(pools)), [len(pool.rewards) for pool in pools])
        everything = np.concatenate([pool.rewards for pool in pools])
        others = [everything[owners != i] for i in range(len(pools))]
        return [float(values.std()) if len(set(values)) > 1 else 0.0 for values in others]

    def state_dict(self) -> dict[str, float]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})


class PromptFeatures(NamedTuple):
    """
    What is known of the prompts of one generation before they are sampled; one entry per prompt.

    Args:
        keys (`list[str]`):
            Identities.
        guesses (`np.ndarray` of shape `(P,)`):
            ẑ, in deviations of the rewards from their level; 0 where nobody guesses.
        draws, residuals (`np.ndarray` of shape `(L, P)`):
            N and S by discount: what the prompt has drawn and how far that was from the level then, summed.
    """

    keys: list[str]
    guesses: np.ndarray
    draws: np.ndarray
    residuals: np.ndarray


class RewardEstimator:
    """
    The expected reward of a prompt: a level that is common to all, and what is known about this one,

    m_x = μ + (s · κ σ ẑ_x + S_x) / (s + N_x),    worth s + N_x rollouts.

    μ and σ are level and deviation of the run's rewards, ẑ_x is a guess (of a value head, in deviations), and S_x sums what
    earlier rollouts of the prompt were above the level of *their* generation, N_x counts them; both are discounted by λ at
    each visit. For rewards of 0 and 1 that is the mean of a Beta posterior, for normally distributed ones of a normal
    posterior: shrinkage of what was seen towards what was guessed. While a generation is compared, its level is corrected by
    what all *other* prompts have shown ([`~core.shift_by_batch_residual`], with c).

    κ, s, λ and c are chosen together from a grid, by the squared error of the baseline on rollouts that had no influence on
    it: what an update's noise is made of. It works for counts alone and with one rollout per prompt, where a likelihood of
    counts says nothing about s (one draw of a beta-binomial is a coin). Nothing of a generation is known to what it is
    compared with, so the baseline is unbiased whatever is chosen.

    Shifting rewards by a constant and scaling them by a positive one does the same to every m_x, from the second generation on.

    Args:
        guesses (`bool`):
            Whether there are guesses; else κ is 0.
        remembers (`bool`, *optional*, defaults to `True`):
            Whether a prompt's own earlier rollouts count.
    """

    def __init__(self, *, guesses: bool, remembers: bool = True):
        self.remembers = remembers
        self.shares = np.array(VALUE_WEIGHTS if guesses else (0.0,))
        self.strengths, self.discounts, self.shrinkages = map(np.array, (PSEUDO_COUNTS, DECAYS, SHRINKAGE_COUNTS))
        self.errors = np.zeros((len(self.shares), len(DECAYS), len(PSEUDO_COUNTS), len(SHRINKAGE_COUNTS)))
        self.history: dict[str, np.ndarray] = {}  # by key, draws and residuals by discount, (2, L)
        self.level: float | None = None  # μ; `None` until something was seen
        self.scale = RunningRewardStd()  # σ

    @property
    def shrinkage(self) -> float:
        """c in use; 0 before any level is known, so that it is the mean of the other prompts."""
        return 0.0 if self.level is None else float(self.shrinkages[self._best[3]])

    def expect(self, keys: Sequence[str], guesses: Sequence[float] | None = None) -> PromptFeatures:
        """
        What is known of the prompts that are to be compared.

        Args:
            keys (`Sequence[str]`):
                Identities of the prompts.
            guesses (`Sequence[float]`, *optional*):
                ẑ, one per prompt, in deviations from the level.
        """
        nothing = np.zeros((2, len(DECAYS)))
        known = np.array([self.history.get(key, nothing) if self.remembers else nothing for key in keys])  # (P, 2, L)
        guessed = np.zeros(len(keys)) if guesses is None else np.asarray(guesses, dtype=np.float64)
        return PromptFeatures(list(keys), guessed, *known.transpose(1, 2, 0))

    def priors(self, expectation: PromptFeatures, pass_rates: Sequence[float]) -> list[BaselineEstimate]:
        """The expected rewards, one [`~core.BaselineEstimate`] per prompt; `pass_rates` are what the prompts' weights are made of."""
        share, discount, strength, _ = self._best
        means, strengths = self._posterior(expectation)
        return [
            BaselineEstimate((self.level or 0.0) + float(mean), float(worth), rate)
            for mean, worth, rate in zip(
                means[share, discount, strength], strengths[discount, strength], pass_rates, strict=True
            )
        ]

    def observe(self, expectation: PromptFeatures, pools: Sequence[Pool]) -> None:
        """
        Learn from one generation.

        Args:
            expectation ([`PromptFeatures`]):
                Of its prompts, from before.
            pools (`Sequence[Pool]`):
                What each of them has drawn. Rollouts without a reward are left out.
        """
        rewards = [pool.rewards for pool in pools]
        everything = np.array([reward for own in rewards for reward in own])
        if not len(everything):
            return
        first = self.level is None
        level = everything.mean() if self.level is None else self.level
        n = np.array([len(own) for own in rewards], dtype=float)  # (P,)
        above = [np.array(own) - level for own in rewards]
        sums, squares = (np.array([values.sum() for values in v]) for v in (above, [values**2 for values in above]))

        means, strengths = self._posterior(expectation)  # (K, L, S, P), (L, S, P)
        others, drawn = leave_one_out_sums(sums - n * means, n)
        corrections = [self._correction(others, drawn, 0.0 if first else c) for c in self.shrinkages]
        share, discount, strength, shrinkage = best = self._best
        if not first and self.scale.divisor > 0:
            errors = [
                _squared_error(means + correction, strengths, n, sums, squares) / len(everything)
                for correction in corrections
            ]
            self.errors = ERROR_MEMORY * self.errors + np.stack(errors, axis=-1) / self.scale.divisor
        correction = corrections[shrinkage][share, discount, strength]
        for key, count, residual in zip(expectation.keys, n, sums - n * correction, strict=True):
            if count and self.remembers:
                before = self.history.get(key, np.zeros((2, len(DECAYS))))
                self.history[key] = before * self.discounts + np.array([[count], [residual]])
        if not first:
            surprise = (sums - n * means[best[:3]]).sum()
            level += surprise / (n.sum() + self.shrinkages[shrinkage])
        self.level = float(level)
        self.scale.observe(everything)

    @property
    def _best(self) -> tuple[int, ...]:
        """Positions of κ, λ, s and c in their candidates."""
        return tuple(int(i) for i in np.unravel_index(np.argmin(self.errors), self.errors.shape))

    def _posterior(self, expectation: PromptFeatures) -> tuple[np.ndarray, np.ndarray]:
        """What is expected above the level, `(K, L, S, P)`, and what that is worth, `(L, S, P)`."""
        guesses = self.shares[:, None] * self.scale.deviation * expectation.guesses  # (K, P)
        strengths = self.strengths[:, None] + expectation.draws[:, None, :]  # (L, S, P)
        known = self.strengths[:, None] * guesses[:, None, None, :] + expectation.residuals[:, None, :]
        return known / strengths, strengths

    @staticmethod
    def _correction(others: np.ndarray, drawn: np.ndarray, shrinkage: float) -> np.ndarray:
        weight = drawn + shrinkage
        return np.divide(others, weight, out=np.zeros_like(others), where=weight > 0)

    def state_dict(self) -> dict[str, Any]:
        """All but `history`; plain numbers and lists."""
        return {"level": self.level, "scale": self.scale.state_dict(), "errors": self.errors.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.level = state["level"]
        self.scale.load_state_dict(state["scale"])
        errors = np.array(state["errors"], dtype=np.float64)
        if errors.shape == self.errors.shape:  # else there were guesses, or there were none: choose anew
            self.errors = errors

    def metrics(self) -> dict[str, float]:
        """What is in use."""
        share, discount, strength, _ = self._best
        return {
            "guess_share": float(self.shares[share]),
            "guess_strength": float(self.strengths[strength]),
            "discount": float(self.discounts[discount]),
        }


def _squared_error(
    means: np.ndarray, strengths: np.ndarray, n: np.ndarray, sums: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """
    Σ (r_i − b_i)² over all rollouts with b_i = (s m + Σ_{j≠i} r_j) / (s + n − 1) within each prompt, `(K, L, S)`; all rewards
    relative to the same level.
    """
    total = strengths * means + sums  # (K, L, S, P)
    worth = strengths + n
    errors = worth**2 * squares - 2 * worth * total * sums + n * total**2
    return (errors / (worth - 1).clip(min=1e-12) ** 2 * (n > 0)).sum(axis=-1)
