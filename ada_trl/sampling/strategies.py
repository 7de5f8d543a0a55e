"""
Sampling strategies: how many rollouts each prompt gets in a step, and which of them are trained on.

`adaptive_sampling` chooses one. To add a mode, write a subclass of [`SamplingStrategy`], add its name to [`STRATEGIES`] and build it
in [`build_strategy`].
"""

from collections.abc import Sequence
from typing import Any

from ..core import ExitCondition, Pool, Rollout, check_budget, select_group


class SamplingStrategy:
    """
    Numbers of rollouts per prompt. The base class has one round.

    Args:
        num_generations (`int`):
            Rollouts per prompt that are trained on; the average where it differs between prompts.

    Attributes:
        exit_condition ([`~core.ExitCondition`]):
            Condition under which sampling of a prompt stops. With one round, it is used for metrics only.
        rollouts_per_round (`int`):
            Rollouts of a prompt in one round; the average where budgets differ.
        rounds_per_step (`int`), max_rounds (`int`):
            Maximum number of rounds of a prompt within one step, and over all steps in which it is retried.
        max_rollouts (`int`):
            Maximum number of rollouts of a prompt over all of these rounds.
    """

    options: tuple[str, ...] = ()  # options of the config that only this strategy uses
    used_by = ""  # how an error message names the modes that use them
    is_sequential = False  # whether further rounds of a prompt depend on the rewards of earlier ones
    retries_across_steps = False  # whether the next round of a prompt is part of a later step
    uses_estimated_budgets = False  # whether rollouts are allocated by pass rates estimated before sampling
    default_weighting = "none"  # default of `prompt_weighting`

    def __init__(self, num_generations: int):
        self.num_generations = self.rollouts_per_round = self.max_rollouts = num_generations
        self.rounds_per_step = self.max_rounds = 1
        self.exit_condition = ExitCondition(1, 1)

    def select(self, pool: Pool, seed: Sequence[int]) -> list[Rollout]:
        """The rollouts of a pool that are trained on: all of them, unless a subclass selects."""
        return sorted(pool.rollouts, key=lambda rollout: rollout.draw_index)

    @property
    def min_positives(self) -> int:
        return self.exit_condition.min_positives

    @property
    def min_negatives(self) -> int:
        return self.exit_condition.min_negatives


class FixedSampling(SamplingStrategy):
    """`num_generations` rollouts of every prompt, all of them trained on: GRPO's own sampling."""


class EstimatedSampling(SamplingStrategy):
    """
    Reinforce-Ada-Est: one round, with more rollouts for prompts with a lower estimated pass rate, `num_generations` on average.

    Raises:
        `ValueError`: if no allocation between `min_samples` and `max_samples` has that average.
    """

    options = ("min_samples", "max_samples", "allocation_rule")
    used_by = "adaptive_sampling='est'"
    uses_estimated_budgets = True
    default_weighting = "inverse_sqrt"

    def __init__(self, num_generations: int, *, min_samples: int, max_samples: int):
        super().__init__(num_generations)
        if min_samples < 1:
            raise ValueError(f"min_samples ({min_samples}) must be at least 1.")
        try:
            check_budget(1, num_generations, min_samples=min_samples, max_samples=max_samples)
        except ValueError as error:
            raise ValueError(f"{error} The budget per prompt is num_generations ({num_generations}).") from error
        self.max_rollouts = max_samples


class SequentialSampling(SamplingStrategy):
    """
    Reinforce-Ada-Seq: rounds of `samples_per_round` rollouts until a prompt has enough successes (*pos*), or enough successes
    and failures (*balance*); `num_generations` of them are selected for training.

    Args:
        samples_per_round (`int`):
            M, at least `num_generations`.
        max_rounds (`int`):
            N, after which a prompt is not sampled further.
        exit_condition ([`~core.ExitCondition`]):
            K_pos and K_neg.

    Raises:
        `ValueError`: if a round cannot fill the group, or the exit condition can never be met.
    """

    options = ("samples_per_round", "max_rounds", "min_positives", "min_negatives")
    used_by = "adaptive_sampling='seq-balance' or 'seq-pos', which sample in rounds"
    is_sequential = True
    default_weighting = "inverse_sqrt"

    def __init__(
        self, num_generations: int, *, samples_per_round: int, max_rounds: int, exit_condition: ExitCondition
    ):
        super().__init__(num_generations)
        self.rollouts_per_round, self.max_rollouts = samples_per_round, samples_per_round * max_rounds
        self.rounds_per_step = self.max_rounds = max_rounds
        self.exit_condition = exit_condition
        if samples_per_round < num_generations:
            raise ValueError(
                f"samples_per_round ({samples_per_round}) must be at least num_generations "
                f"({num_generations}), because the first round alone must fill a group. Raise samples_per_round, "
                "lower num_generations, or leave samples_per_round unset for twice num_generations."
            )
        positives, negatives = exit_condition.min_positives, exit_condition.min_negatives
        if positives + negatives > self.max_rollouts:
            raise ValueError(
                f"min_positives ({positives}) + min_negatives ({negatives}) can never be reached within "
                f"samples_per_round ({samples_per_round}) * max_rounds ({max_rounds}) = {self.max_rollouts} rollouts. "
                "Lower min_positives and min_negatives, or raise max_rounds."
            )

    def select(self, pool: Pool, seed: Sequence[int]) -> list[Rollout]:
        return select_group(pool, self.num_generations, tuple(seed))


class RetryAcrossSteps(SequentialSampling):
    """
    Sequential sampling with a baseline that trains on every rollout: a round is `num_generations` rows of the batch, and a
    prompt that has not met its exit condition is sampled again in the next step.
    """

    retries_across_steps = True
    default_weighting = "none"

    def __init__(self, num_generations: int, **options: Any):
        super().__init__(num_generations, **options)
        self.rounds_per_step = 1

    def select(self, pool: Pool, seed: Sequence[int]) -> list[Rollout]:
        return SamplingStrategy.select(self, pool, seed)  # all rollouts of the round, instead of a group


STRATEGIES: dict[str, type[SamplingStrategy]] = {
    "seq-balance": SequentialSampling,
    "seq-pos": SequentialSampling,
    "est": EstimatedSampling,
    "uniform": FixedSampling,
}


def strategy_class(adaptive_sampling: str, baseline: str) -> type[SamplingStrategy]:
    """Class of the strategy. With a `baseline` other than the pool mean, the sequential modes retry across steps."""
    found = STRATEGIES[adaptive_sampling]
    return RetryAcrossSteps if found is SequentialSampling and baseline != "pool" else found


def build_strategy(args: Any) -> SamplingStrategy:
    """
    Build the strategy from `args`, an [`AdaGRPOConfig`] whose defaults are resolved.

    Raises:
        `ValueError`: for options that contradict each other.
    """
    found, n = strategy_class(args.adaptive_sampling, args.baseline), args.num_generations
    if found is FixedSampling:
        return FixedSampling(n)
    if found is EstimatedSampling:
        return EstimatedSampling(n, min_samples=args.min_samples, max_samples=args.max_samples)
    condition = _exit_condition(args, needs_group=found is SequentialSampling)
    return found(  # type: ignore[call-arg] # both take these
        n, samples_per_round=args.samples_per_round, max_rounds=args.max_rounds, exit_condition=condition
    )


def _exit_condition(args: Any, *, needs_group: bool) -> ExitCondition:
    """K_pos and K_neg; the defaults of *balance* are half of the group each where a group is selected, else one each."""
    balanced = args.adaptive_sampling == "seq-balance"
    half = args.num_generations // 2
    positives, negatives = (half, args.num_generations - half) if balanced and needs_group else (1, int(balanced))
    if not balanced and args.min_negatives is not None:
        raise ValueError(
            f"min_negatives ({args.min_negatives}) is only used with adaptive_sampling='seq-balance'; 'seq-pos' counts "
            "successes only. Leave min_negatives unset, or use 'seq-balance'."
        )
    for name in ("min_positives", "min_negatives"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    return ExitCondition(
        positives if args.min_positives is None else args.min_positives,
        negatives if args.min_negatives is None else args.min_negatives,
    )
