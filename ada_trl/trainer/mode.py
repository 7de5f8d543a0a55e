"""The mode of a run: what the options mean for a step, decided once and read by everything that runs in it."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ..core import SlotRule
from .option_rules import check_rules


SEQ_MODES = ("seq-balance", "seq-pos")
WEIGHTED_SUM = "sum"  # as `success_reward`: for example if each reward function scores other prompts

# Options that a callback may change during training, because they are numbers that each step reads.
SCHEDULED = {
    *("positive_threshold", "success_reward", "prompt_weighting", "allocation_rule", "min_samples", "max_samples"),
    *("samples_per_round", "max_rounds", "min_positives", "min_negatives"),
}
# Options that only the construction of a trainer reads.
OF_CONSTRUCTION = ("num_generations", "vllm_weight_sync", "vllm_request_timeout")


@dataclass(frozen=True)
class Mode:
    """
    The three choices of a step (docs/method.md), with the values of the options of the same names.

    - Which prompts: the next ones of the data loader, or, if `uses_prompt_queue`, those of the queue, which samples
      unsolved ones again (`retries`), replaces those of zero variance (`candidates_per_slot`) or is a step ahead
      (`max_staleness`).
    - How many rollouts of each: `num_generations`; in Seq modes (`is_sequential`) rounds of `round_size` until
      `slot_rule` is met, of which `num_generations` are selected; in Est (`is_estimated`) a number that depends on the
      estimated pass rate.
    - Which advantage: reward minus `baseline`, times `prompt_weighting`, and the treatment of groups of zeros.
    """

    # Which prompts
    retries: int
    candidates_per_slot: int  # prompts that are sampled one after another for one place in the batch, at most
    max_staleness: int
    # How many rollouts
    adaptive_sampling: str
    num_generations: int  # that are trained on; in Est on average
    round_size: int  # of a prompt in one round; in Est on average
    slot_rule: SlotRule  # with one round, its numbers of positives and negatives are used for metrics only
    min_samples: int
    max_samples: int
    allocation_rule: str | float
    pass_rate_estimator: str | None  # in other modes than Est it only records
    # Which advantage
    baseline: str
    prompt_weighting: str | float
    zero_variance_groups: str
    # Values of all options of this package, to notice a change
    options: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, args: Any) -> "Mode":
        """
        The mode of an [`AdaGRPOConfig`] whose unset options have been derived.

        Raises:
            `ValueError`: If an option is invalid, or has no effect in this mode.
        """
        options = args.own_options()
        rounds = args.max_rounds or 1
        sums_successes = args.success_reward in (None, WEIGHTED_SUM)
        slot_rule = SlotRule(
            min_positives=args.min_positives,
            min_negatives=0 if args.retries or args.adaptive_sampling == "seq-pos" else args.min_negatives,
            max_rounds=rounds if args.adaptive_sampling in SEQ_MODES else 1,
            # Groups of equal sums have advantages if the rewards of single functions differ (GDPO).
            compares_each_reward=args.multi_objective_aggregation == "normalize_then_sum" and sums_successes,
        )
        mode = cls(
            candidates_per_slot=rounds if args.zero_variance_groups == "resample" else 1,
            round_size=args.samples_per_round or args.num_generations,
            slot_rule=slot_rule,
            options=options,
            **{field.name: options[field.name] for field in fields(cls) if field.name in options},
        )
        check_rules(args, mode)
        return mode

    def check_schedule(self, args: Any) -> None:
        """Raise a `ValueError` if an option has changed during training that decides what was built before."""
        # The queue has been built for this number of candidates.
        scheduled = SCHEDULED - {"max_rounds"} if self.candidates_per_slot > 1 else SCHEDULED
        for name, before in self.options.items():
            if getattr(args, name) != before and name not in scheduled:
                when = "when another trainer is built" if name in OF_CONSTRUCTION else "at the next call of `train()`"
                raise ValueError(
                    f"{name} was changed from {before!r} to {getattr(args, name)!r} during training, in which it is "
                    f"fixed. Change it between trainings: it takes effect {when}."
                )

    # Which prompts

    @cached_property
    def resamples_prompts(self) -> bool:
        """Whether a step samples other prompts than the next ones of the dataset."""
        return self.retries > 0 or self.zero_variance_groups == "resample"

    @cached_property
    def uses_prompt_queue(self) -> bool:
        """Whether a step samples other prompts than the data loader's next ones, or needs them earlier."""
        return self.resamples_prompts or self.max_staleness > 0

    # How many rollouts

    @cached_property
    def is_sequential(self) -> bool:
        """Whether a prompt has rounds until it is solved, and a group is selected from them (Seq modes)."""
        return self.adaptive_sampling in SEQ_MODES

    @cached_property
    def is_estimated(self) -> bool:
        """Whether rollouts are allocated by pass rates that are estimated before sampling (Est)."""
        return self.adaptive_sampling == "est"

    @cached_property
    def is_multi_round(self) -> bool:
        """Whether a step samples in several rounds, and selects the rollouts to train on from all of them."""
        return self.is_sequential or self.zero_variance_groups == "resample"

    # Which advantage

    @cached_property
    def is_weighted(self) -> bool:
        return self.prompt_weighting not in ("none", 1.0)

    @cached_property
    def needs_successes(self) -> bool:
        """Whether it matters for training which rollouts are successes, rather than for metrics only."""
        return self.adaptive_sampling != "uniform" or self.retries > 0 or self.is_weighted

    @cached_property
    def trains_as_grpo(self) -> bool:
        """Whether no option changes what [`~trl.GRPOTrainer`] trains on."""
        is_uniform = self.adaptive_sampling == "uniform" and not self.is_weighted
        return is_uniform and self.baseline == "pool" and not self.uses_prompt_queue
