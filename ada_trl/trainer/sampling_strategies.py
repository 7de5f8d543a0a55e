"""
The ways to sample: how many rollouts a prompt draws in a step, and which of them are trained on. `adaptive_sampling` chooses
one; a new one is a class here.
"""

from typing import TYPE_CHECKING

from ..core import ExitCondition, Pool, Rollout, check_budget, select_group


if TYPE_CHECKING:
    from .ada_grpo_config import AdaGRPOConfig


class Uniform:
    """Exactly `num_generations` rollouts of every prompt, all of them trained on."""

    fields: tuple[str, ...] = ()  # of the config, that no other way reads
    needed = ""  # who reads them
    in_rounds = False  # whether what a prompt has drawn decides about its next round, of this step or a later one
    across_steps = False  # whether its next round is one of a later step
    by_estimates = False  # whether it takes estimates of the pass rates from before the draw
    estimator: str | None = None  # the only one that it takes
    weighting = "none"  # the default of `prompt_weighting`

    def resolve(self, args: "AdaGRPOConfig") -> None:
        """Give the fields that are `None` their values."""

    def check(self, args: "AdaGRPOConfig") -> None:
        """
        Raises:
            `ValueError`: for fields that contradict each other.
        """

    def exit_condition(self, args: "AdaGRPOConfig") -> ExitCondition:
        """What resolves a prompt. Without rounds it is for metrics only."""
        return ExitCondition(1, 1)

    def round_size(self, args: "AdaGRPOConfig") -> int:
        """Rollouts of a prompt in one round; on average, where budgets differ."""
        return args.num_generations

    def rounds(self, args: "AdaGRPOConfig") -> int:
        """The most rounds of a prompt in one step."""
        return 1

    def max_rounds(self, args: "AdaGRPOConfig") -> int:
        """The same over all steps that the prompt goes on in."""
        return 1

    def max_samples(self, args: "AdaGRPOConfig") -> int:
        """The most rollouts of a prompt, over all of these steps."""
        return self.round_size(args)

    def group(self, pool: Pool, args: "AdaGRPOConfig", seed: tuple[int, ...]) -> list[Rollout]:
        """Which of a pool's rollouts are trained on."""
        return sorted(pool.rollouts, key=lambda rollout: rollout.draw_index)

    def describe(self, args: "AdaGRPOConfig") -> str:
        """In words: the rollouts of a prompt."""
        return f"{count(args.num_generations, 'rollout')} each"


class EstimatedBudget(Uniform):
    """Reinforce-Ada-Est: one round, of more rollouts for prompts with a lower estimated pass rate."""

    fields = ("min_samples", "max_samples", "allocation_rule")
    needed = "adaptive_sampling='est', 'est-ema' or 'est-value'"
    by_estimates = True
    weighting = "inverse_sqrt"

    def __init__(self, estimator: str | None = None):
        self.estimator = estimator

    def check(self, args: "AdaGRPOConfig") -> None:
        if args.min_samples < 1:
            raise ValueError(f"min_samples ({args.min_samples}) must be at least 1.")
        try:
            check_budget(1, args.num_generations, min_samples=args.min_samples, max_samples=args.max_samples)
        except ValueError as error:
            raise ValueError(f"{error} The budget per prompt is num_generations ({args.num_generations}).") from error
        if args.zero_variance_groups == "resample":
            raise ValueError(
                "zero_variance_groups='resample' asks another prompt for as many rollouts, but adaptive_sampling="
                f"{args.adaptive_sampling!r} gives every prompt a number of its own. Use 'uniform', 'seq-pos' or "
                "'seq-balance'."
            )

    def max_samples(self, args: "AdaGRPOConfig") -> int:
        return args.max_samples

    def describe(self, args: "AdaGRPOConfig") -> str:
        return f"{args.num_generations} rollouts each on average, more for those that pass rarely"


class SequentialSampling(Uniform):
    """
    Reinforce-Ada-Seq: rounds of `samples_per_round` rollouts until a prompt has enough positives, and `negatives`; a group of
    `num_generations` is trained on.
    """

    fields = ("samples_per_round", "max_rounds", "min_positives", "min_negatives")
    needed = "adaptive_sampling='seq-balance' or 'seq-pos', which sample in rounds"
    in_rounds = True
    weighting = "inverse_sqrt"

    def __init__(self, negatives: bool):
        self.negatives = negatives

    def resolve(self, args: "AdaGRPOConfig") -> None:
        if args.samples_per_round is None:
            args.samples_per_round = 2 * args.num_generations
        if args.selection_correction is None:
            args.selection_correction = True

    def check(self, args: "AdaGRPOConfig") -> None:
        if args.samples_per_round < args.num_generations:
            raise ValueError(
                f"samples_per_round ({args.samples_per_round}) must be at least num_generations "
                f"({args.num_generations}), because the first round alone must fill a group. Raise samples_per_round, "
                "lower num_generations, or leave samples_per_round unset for twice num_generations."
            )
        if not self.negatives and args.min_negatives is not None:
            raise ValueError(
                f"min_negatives ({args.min_negatives}) has no effect with adaptive_sampling='seq-pos', which counts "
                "positives only. Use adaptive_sampling='seq-balance' or leave min_negatives unset."
            )
        for name in ("min_positives", "min_negatives"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        quotas, cap = self.exit_condition(args), self.max_samples(args)
        if quotas.min_positives + quotas.min_negatives > cap:
            raise ValueError(
                f"min_positives ({quotas.min_positives}) + min_negatives ({quotas.min_negatives}) can "
                f"never be reached within samples_per_round ({args.samples_per_round}) * max_rounds "
                f"({args.max_rounds}) = {cap} rollouts. Lower the quotas or raise max_rounds."
            )

    def exit_condition(self, args: "AdaGRPOConfig") -> ExitCondition:
        half = args.num_generations // 2
        return self._condition(args, *((half, args.num_generations - half) if self.negatives else (1, 0)))

    def _condition(self, args: "AdaGRPOConfig", positives: int, negatives: int) -> ExitCondition:
        return ExitCondition(
            positives if args.min_positives is None else args.min_positives,
            negatives if args.min_negatives is None else args.min_negatives,
        )

    def round_size(self, args: "AdaGRPOConfig") -> int:
        return args.samples_per_round

    def rounds(self, args: "AdaGRPOConfig") -> int:
        return args.max_rounds

    def max_rounds(self, args: "AdaGRPOConfig") -> int:
        return args.max_rounds

    def max_samples(self, args: "AdaGRPOConfig") -> int:
        return args.samples_per_round * args.max_rounds

    def group(self, pool: Pool, args: "AdaGRPOConfig", seed: tuple[int, ...]) -> list[Rollout]:
        return select_group(pool, args.num_generations, seed)

    def describe(self, args: "AdaGRPOConfig") -> str:
        rounds = (
            f"rounds of {args.samples_per_round} rollouts until {self._until(args)}, at most {self.max_samples(args)}"
        )
        return f"{rounds}, of which {args.num_generations} are trained on"

    def _until(self, args: "AdaGRPOConfig") -> str:
        quotas = self.exit_condition(args)
        return f"{quotas.min_positives} right" + f" and {quotas.min_negatives} wrong" * (quotas.min_negatives > 0)


class CrossStepRetries(SequentialSampling):
    """The same with a baseline that trains on every rollout: a round is rows of the update batch, one per step."""

    across_steps = True
    weighting = "none"
    group = Uniform.group

    def resolve(self, args: "AdaGRPOConfig") -> None:
        if args.samples_per_round is None:
            args.samples_per_round = args.num_generations

    def check(self, args: "AdaGRPOConfig") -> None:
        if args.samples_per_round != args.num_generations:
            raise ValueError(
                f"samples_per_round ({args.samples_per_round}) must be num_generations ({args.num_generations}) with "
                f"baseline={args.baseline!r}, which trains on every rollout of a round. Leave samples_per_round unset."
            )
        super().check(args)

    def exit_condition(self, args: "AdaGRPOConfig") -> ExitCondition:
        return self._condition(args, 1, int(self.negatives))

    def rounds(self, args: "AdaGRPOConfig") -> int:
        return 1

    def describe(self, args: "AdaGRPOConfig") -> str:
        return f"{count(args.num_generations, 'rollout')} per round until {self._until(args)}, over at most {args.max_rounds} rounds"


def count(number: int, name: str) -> str:
    """In words, such as "1 rollout" and "4 rollouts"."""
    return f"{number} {name}{'s' * (number != 1)}"


SAMPLING_STRATEGIES = {
    "seq-balance": SequentialSampling(negatives=True),
    "seq-pos": SequentialSampling(negatives=False),
    "est": EstimatedBudget(),
    "est-ema": EstimatedBudget("ema"),  # the last two are the paper's names
    "est-value": EstimatedBudget("value"),
    "uniform": Uniform(),
}
CROSS_STEP_STRATEGIES = {"seq-balance": CrossStepRetries(negatives=True), "seq-pos": CrossStepRetries(negatives=False)}


def get_sampling_strategy(adaptive_sampling: str, baseline: str) -> Uniform:
    """What `adaptive_sampling` names; with a `baseline` other than the pool's mean, rounds are those of later steps."""
    return (SAMPLING_STRATEGIES if baseline == "pool" else SAMPLING_STRATEGIES | CROSS_STEP_STRATEGIES)[
        adaptive_sampling
    ]
