"""Sampling strategies: how many rollouts each prompt gets in a step, and which of them are trained on."""

from dataclasses import dataclass
from typing import Any

from ..core import check_budget


MODES = ("seq-balance", "seq-pos", "est", "uniform")


@dataclass(frozen=True)
class SamplingStrategy:
    """
    Numbers of rollouts per prompt.

    Args:
        num_generations (`int`):
            n, rollouts per prompt that are trained on; the average where it differs between prompts.
        round_size (`int`):
            M, rollouts of a prompt in one round; the average where budgets differ.
        max_rounds (`int`):
            N, maximum number of rounds of a prompt, over all steps in which it is sampled.
        min_positives, min_negatives (`int`):
            Exit condition: sampling of a prompt stops when it has as many. With one round they are used for metrics only.
        selects_groups (`bool`):
            Whether a step samples several rounds of a prompt, and a group is selected from its pool (Seq modes).
        retries_across_steps (`bool`):
            Whether the next round of a prompt is part of a later step, and all rollouts are trained on (Seq modes with the
            batch baseline).
        uses_estimated_budgets (`bool`):
            Whether rollouts are allocated by pass rates estimated before sampling (Est).
    """

    num_generations: int
    round_size: int
    max_rounds: int = 1
    min_positives: int = 1
    min_negatives: int = 1
    selects_groups: bool = False
    retries_across_steps: bool = False
    uses_estimated_budgets: bool = False

    @property
    def is_sequential(self) -> bool:
        """Whether further rounds of a prompt depend on the rewards of earlier ones."""
        return self.selects_groups or self.retries_across_steps

    @property
    def rounds_per_step(self) -> int:
        return self.max_rounds if self.selects_groups else 1

    @property
    def max_rollouts(self) -> int:
        """Maximum number of rollouts of a prompt over all rounds."""
        return self.round_size * self.max_rounds


def build_strategy(args: Any) -> SamplingStrategy:
    """
    Build the strategy from `args`, an [`AdaGRPOConfig`] whose defaults are resolved.

    Raises:
        `ValueError`: for options that contradict each other.
    """
    n, mode = args.num_generations, args.adaptive_sampling
    if mode == "uniform":
        return SamplingStrategy(n, n)
    if mode == "est":
        _check_budget(args)
        return SamplingStrategy(n, n, uses_estimated_budgets=True)
    has_batch_baseline = args.baseline == "batch"
    is_balanced = mode == "seq-balance"
    positives, negatives = (1, int(is_balanced))
    if is_balanced and not has_batch_baseline:
        positives, negatives = n // 2, n - n // 2
    strategy = SamplingStrategy(
        n,
        args.samples_per_round,
        args.max_rounds,
        positives if args.min_positives is None else args.min_positives,
        negatives if args.min_negatives is None else args.min_negatives,
        selects_groups=not has_batch_baseline,
        retries_across_steps=has_batch_baseline,
    )
    _check_rounds(args, strategy)
    return strategy


def _check_budget(args: Any) -> None:
    if args.min_samples < 1:
        raise ValueError(f"min_samples ({args.min_samples}) must be at least 1.")
    try:
        check_budget(1, args.num_generations, min_samples=args.min_samples, max_samples=args.max_samples)
    except ValueError as error:
        raise ValueError(f"{error} The budget per prompt is num_generations ({args.num_generations}).") from error


def _check_rounds(args: Any, strategy: SamplingStrategy) -> None:
    n, size = strategy.num_generations, strategy.round_size
    if args.adaptive_sampling == "seq-pos" and args.min_negatives is not None:
        raise ValueError(
            f"min_negatives ({args.min_negatives}) is only used with adaptive_sampling='seq-balance'; 'seq-pos' counts "
            "successes only. Leave min_negatives unset, or use 'seq-balance'."
        )
    for name in ("min_positives", "min_negatives"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    if strategy.retries_across_steps and size != n:
        raise ValueError(
            f"samples_per_round ({size}) must be num_generations ({n}) with baseline='batch', which trains on every rollout of "
            "a round. Leave samples_per_round unset."
        )
    if size < n:
        raise ValueError(
            f"samples_per_round ({size}) must be at least num_generations ({n}), because the first round alone must fill a "
            "group. Raise samples_per_round, lower num_generations, or leave samples_per_round unset for twice num_generations."
        )
    positives, negatives = strategy.min_positives, strategy.min_negatives
    if positives + negatives > strategy.max_rollouts:
        raise ValueError(
            f"min_positives ({positives}) + min_negatives ({negatives}) can never be reached within samples_per_round ({size}) "
            f"* max_rounds ({strategy.max_rounds}) = {strategy.max_rollouts} rollouts. Lower min_positives and min_negatives, "
            "or raise max_rounds."
        )
