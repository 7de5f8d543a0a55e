"""All rollouts of a generation batch on arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class computed_array(cached_property):
    """[`~functools.cached_property`] whose array is read-only."""

    def __init__(self, compute: Callable[[Any], np.ndarray]):
        super().__init__(lambda instance: read_only(compute(instance)))
        self.__doc__ = compute.__doc__


class Columns(dict[str, np.ndarray]):
    """Arrays by name, in which a name that is missing is an error that lists the names there are."""

    def __missing__(self, name: Any) -> np.ndarray:
        raise KeyError(f"no column {name!r}: the columns are {', '.join(map(repr, self)) or 'not recorded'}")


def column_array(values: Sequence[Any], is_numeric: bool = False) -> np.ndarray:
    """
    Make an array of a column's values, one per prompt: of numbers, booleans or strings if all are such, otherwise of
    objects. Scalars of NumPy, torch or JAX, as a formatted dataset has them, become values of Python, and missing
    numbers NaN.

    Args:
        values (`Sequence[Any]`), is_numeric (`bool`, *optional*, defaults to `False`):
            The values, and whether the column is known to have numbers, although all of these may be missing.
    """
    plain = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    kinds = {type(value) for value in plain}
    if kinds <= {int, float, type(None)} and (is_numeric or kinds & {int, float}):
        return np.array([math.nan if value is None else value for value in plain])
    if kinds in ({bool}, {str}):
        return np.array(plain)
    array = np.empty(len(plain), dtype=object)
    for i, value in enumerate(plain):  # all at once, lists would become another dimension
        array[i] = value
    return array


@dataclass(eq=False, frozen=True)
class Rollouts:
    """
    All rollouts of a generation batch, of all processes. Suffixes give shapes: N rollouts, P prompts, F reward
    functions. All arrays are read-only.

    The rollouts of a prompt are its *pool*. They are sorted by prompt and draw, so that no sum and no choice depends
    on the order in which completions arrive. A rollout is *scored* if it has a reward and a success reward; only then
    it is positive or negative. Baselines and advantages need the reward only. A prompt is *abstained* if it has
    rewards, but the function of the success reward scored no rollout, as one that does not apply to this kind of
    prompt: neither solved nor unsolved.

    Args:
        prompt_N (`np.ndarray` of `int`):
            Prompt of each rollout, ascending. The same text twice in a batch is two prompts.
        draw_N (`np.ndarray` of `int`):
            Position among the rollouts of the prompt, from 0, ascending within a prompt.
        rewards_NF (`np.ndarray` of `float`):
            Unweighted rewards, one column per reward function; NaN where a function returned `None`.
        reward_N (`np.ndarray` of `float`):
            Weighted sum of the rewards; NaN if no function with a weight scored the rollout.
        success_reward_N (`np.ndarray` of `float`):
            Reward that is compared with the threshold: `reward_N`, or the column of `success_reward`.
        threshold (`float`):
            A rollout is positive if its success reward is strictly greater.
        num_prompts (`int`):
            P.
        attempt_N (`np.ndarray` of `int`):
            Number of earlier steps in which the prompt was sampled; above 0 for retries only.
        length_N (`np.ndarray` of `int`):
            Number of completion tokens that the model has generated.
        columns (`dict[str, np.ndarray]`, *optional*):
            Columns of the dataset but for prompts and images, with the value of each rollout's prompt, `(N,)`. Empty
            unless an advantage function is used. Numbers, booleans and strings are arrays of these, with NaN for a
            missing number; other columns are arrays of objects.
    """

    prompt_N: np.ndarray
    draw_N: np.ndarray
    rewards_NF: np.ndarray
    reward_N: np.ndarray
    success_reward_N: np.ndarray
    threshold: float
    num_prompts: int
    attempt_N: np.ndarray
    length_N: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An advantage function that works in place would change what is logged and selected.
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                object.__setattr__(self, name, read_only(value))
        columns = {name: read_only(values) for name, values in self.columns.items()}
        object.__setattr__(self, "columns", Columns(columns))

    def __len__(self) -> int:
        return len(self.prompt_N)

    @computed_array
    def has_reward_N(self) -> np.ndarray:
        return ~np.isnan(self.reward_N)

    @computed_array
    def is_scored_N(self) -> np.ndarray:
        return self.has_reward_N & ~np.isnan(self.success_reward_N)

    @computed_array
    def is_positive_N(self) -> np.ndarray:
        return self.is_scored_N & (self.success_reward_N > self.threshold)

    @computed_array
    def size_P(self) -> np.ndarray:
        """Number of rollouts of each prompt, scored or not."""
        return np.bincount(self.prompt_N, minlength=self.num_prompts)

    @computed_array
    def scored_P(self) -> np.ndarray:
        return np.bincount(self.prompt_N[self.is_scored_N], minlength=self.num_prompts)

    @computed_array
    def positives_P(self) -> np.ndarray:
        return np.bincount(self.prompt_N[self.is_positive_N], minlength=self.num_prompts)

    @computed_array
    def negatives_P(self) -> np.ndarray:
        return self.scored_P - self.positives_P

    @computed_array
    def is_abstained_P(self) -> np.ndarray:
        return (self.scored_P == 0) & (self.sum(self.has_reward_N) > 0)

    @computed_array
    def pass_rate_P(self) -> np.ndarray:
        """p̂ = positives / scored rollouts; NaN if nothing was scored."""
        return self.positives_P / np.where(self.scored_P > 0, self.scored_P, np.nan)

    @computed_array
    def mean_P(self) -> np.ndarray:
        """r̄, the mean reward of each prompt; NaN if no rollout has a reward."""
        number_P = self.sum(self.has_reward_N)
        return self.sum(np.where(self.has_reward_N, self.reward_N, 0.0)) / np.where(number_P > 0, number_P, np.nan)

    @computed_array
    def std_P(self) -> np.ndarray:
        """
        Standard deviation of the rewards of each prompt with Bessel's correction, as in TRL; 0 for fewer than two.
        """
        deviation_N = np.where(self.has_reward_N, self.reward_N - self.mean_P[self.prompt_N], 0.0)
        return np.sqrt(self.sum(deviation_N**2) / np.maximum(self.sum(self.has_reward_N) - 1, 1))

    @computed_array
    def has_zero_variance_P(self) -> np.ndarray:
        """Whether all rewards of a prompt are equal, so that every rollout equals the mean."""
        low_P, high_P = np.full(self.num_prompts, np.inf), np.full(self.num_prompts, -np.inf)
        np.minimum.at(low_P, self.prompt_N[self.has_reward_N], self.reward_N[self.has_reward_N])
        np.maximum.at(high_P, self.prompt_N[self.has_reward_N], self.reward_N[self.has_reward_N])
        return high_P <= low_P

    def sum(self, values_N: np.ndarray) -> np.ndarray:
        """Sum over the rollouts of each prompt, `(P,)`."""
        return np.bincount(self.prompt_N, weights=values_N, minlength=self.num_prompts)

    def where(self, mask_N: np.ndarray) -> "Rollouts":
        """The rollouts at which the mask is true; the prompts stay the same ones."""
        if mask_N.all():
            return self
        return replace(
            self,
            prompt_N=self.prompt_N[mask_N],
            draw_N=self.draw_N[mask_N],
            rewards_NF=self.rewards_NF[mask_N],
            reward_N=self.reward_N[mask_N],
            success_reward_N=self.success_reward_N[mask_N],
            attempt_N=self.attempt_N[mask_N],
            length_N=self.length_N[mask_N],
            columns={name: values[mask_N] for name, values in self.columns.items()},
        )

    @classmethod
    def of(
        cls,
        rewards: Sequence[Sequence],
        *,
        columns: Mapping[str, Sequence] | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
        attempts: Sequence[int] | None = None,
        threshold: float = 0.7,
    ) -> "Rollouts":
        """
        Build rollouts by hand, to test an advantage function.

        Args:
            rewards (`Sequence[Sequence]`):
                Rewards of each prompt's rollouts, of which prompts may have different numbers, at least one. A reward
                is a number, `None` if there is none, or a list of those of several reward functions of weight 1.
            columns (`Mapping[str, Sequence]`, *optional*):
                Columns of the dataset, with one value per prompt.
            lengths (`Sequence[Sequence[int]]`, *optional*):
                Numbers of tokens of the completions, by prompt as the rewards; by default 0.
            attempts (`Sequence[int]`, *optional*):
                Earlier steps that sampled each prompt; by default 0.
            threshold (`float`, *optional*, defaults to `0.7`):
                A rollout is positive if its reward is strictly greater.

        Example:

        ```python
        import numpy as np
        from ada_trl.core import Rollouts


        def centered_by_source(rollouts: Rollouts) -> np.ndarray:
            source_N = np.unique(rollouts.columns["source"], return_inverse=True)[1]
            mean_S = np.bincount(source_N, rollouts.reward_N) / np.bincount(source_N)
            return rollouts.reward_N - mean_S[source_N]


        rollouts = Rollouts.of([[1, 0], [0, 0], [1, 1]], columns={"source": ["web", "web", "book"]})
        assert centered_by_source(rollouts).tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0]
        ```
        """
        rewards_by_prompt = [np.asarray(pool, dtype=float).reshape(len(pool), -1) for pool in rewards]
        scoring = Scoring(weights=(1.0,) * rewards_by_prompt[0].shape[1], threshold=threshold)
        length_N = None if lengths is None else np.concatenate(lengths)
        rollouts = cls.score(rewards_by_prompt, scoring, attempt_P=attempts, length_N=length_N)
        arrays = {name: column_array(values)[rollouts.prompt_N] for name, values in (columns or {}).items()}
        return replace(rollouts, columns=arrays)

    @classmethod
    def score(
        cls,
        rewards_by_prompt: Sequence[np.ndarray],
        scoring: "Scoring",
        *,
        attempt_P: ArrayLike | None = None,
        length_N: ArrayLike | None = None,
    ) -> "Rollouts":
        """
        Build the record of a batch from the rewards `(rollouts, F)` of each prompt in order of sampling.

        Args:
            rewards_by_prompt (`Sequence[np.ndarray]`), scoring ([`Scoring`]):
                Rewards, and what they amount to.
            attempt_P (`ArrayLike`, *optional*), length_N (`ArrayLike`, *optional*):
                Earlier steps that sampled each prompt, and tokens of each rollout; by default 0.
        """
        sizes = [len(rewards) for rewards in rewards_by_prompt]
        rewards_NF = scoring.clean(np.concatenate(rewards_by_prompt))
        reward_N, success_reward_N = scoring.totals(rewards_NF)
        return cls(
            prompt_N=np.repeat(np.arange(len(sizes)), sizes),
            draw_N=np.concatenate([np.arange(size) for size in sizes]),
            rewards_NF=rewards_NF,
            reward_N=reward_N,
            success_reward_N=success_reward_N,
            threshold=scoring.threshold,
            num_prompts=len(sizes),
            attempt_N=np.repeat(np.zeros(len(sizes), dtype=int) if attempt_P is None else attempt_P, sizes),
            length_N=np.zeros(sum(sizes), dtype=int) if length_N is None else np.asarray(length_N),
        )


@dataclass(frozen=True)
class Scoring:
    """
    What the rewards of several reward functions amount to.

    Args:
        weights (`tuple[float, ...]`):
            Weight of each reward function in the sum.
        threshold (`float`):
            A rollout is positive if its success reward is strictly greater.
        success_column (`int`, *optional*):
            Reward function whose reward is the success reward; by default the weighted sum is.
        needs_weight (`bool`, *optional*, defaults to `False`):
            Whether a rollout that only functions of weight 0 have scored has no reward. As in [`~trl.GRPOTrainer`],
            its reward is 0 by default, which has no effect on a group that is all like this, but would be compared
            with the rewards of a batch.
    """

    weights: tuple[float, ...]
    threshold: float
    success_column: int | None = None
    needs_weight: bool = False

    def clean(self, rewards_NF: np.ndarray) -> np.ndarray:
        """The rewards in float64 with NaN (unscored) in place of infinities, which would turn every mean into NaN."""
        rewards_NF = np.asarray(rewards_NF, dtype=np.float64)
        return np.where(np.isinf(rewards_NF), np.nan, rewards_NF)

    def totals(self, rewards_NF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Weighted sum and success reward of each rollout, both `(N,)`, from `clean` rewards.

        The sum is computed in float32, as [`~trl.GRPOTrainer`] does, so that equal sums are the same ones here and
        there. It is NaN if no function scored the rollout, or if it exceeds float32.
        """
        weights_F = np.array(self.weights, dtype=np.float32)
        with np.errstate(over="ignore"):
            reward_N = np.nansum(rewards_NF.astype(np.float32) * weights_F, axis=1).astype(np.float64)
        scoring_F = weights_F != 0 if self.needs_weight else slice(None)
        reward_N[np.isnan(rewards_NF[:, scoring_F]).all(axis=1) | np.isinf(reward_N)] = np.nan
        return reward_N, reward_N if self.success_column is None else rewards_NF[:, self.success_column]

    def distinguish(self, rewards_NF: np.ndarray) -> np.ndarray:
        """One tuple per rollout, `(N,)`, equal for rollouts with the same reward from every function with a weight."""
        weighted = np.where(np.isnan(rewards_NF), np.inf, rewards_NF)[:, np.array(self.weights) != 0]
        tuples = np.empty(len(rewards_NF), dtype=object)
        tuples[:] = list(map(tuple, weighted.tolist()))
        return tuples
