"""The summary of a run that is printed at its start, and warnings about options with another effect than in GRPO."""

import math
from typing import Any

from trl import GRPOConfig

from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)


def pluralize(number: int, noun: str) -> str:
    """A number with its noun, such as "1 rollout" and "4 rollouts"."""
    return f"{number} {noun}{'s' * (number != 1)}"


# The advantage r_i - mean(r_j, j != i) has the variance σ²(1 + 1/(N - 1)) = σ² N/(N - 1) if the N rollouts of a batch are
# independent, against σ² with a known mean: 2 times for N = 2, 1.33 for 4, 1.14 for 8 and 1.07 for 16. The variance of the
# gradient has the same factor, and so has the number of rollouts that is needed for the same precision. From 16 rollouts on,
# the baseline costs less than 7 %. For the posterior, which also uses earlier steps, this is an upper bound.
SMALLEST_BATCH = 16


def grpo_group_size(args: AdaGRPOConfig) -> int | None:
    """
    Return the `num_generations` of the GRPO run that `args` are compared with: the same, or with one rollout per prompt, or if
    it was not set, the default of [`~trl.GRPOConfig`], or the largest smaller number that divides the batch. `None` if there is
    none.
    """
    if args.num_generations > 1 and args.group_size_is_explicit:
        return args.num_generations
    sizes = range(_grpo_default("num_generations"), 1, -1)
    return next((n for n in sizes if args.generation_batch_size % n == 0), None)


def training_steps(args: AdaGRPOConfig, num_prompts: int, num_generations: int, epochs: float = 1) -> int:
    """Return the optimizer steps of `epochs` over `num_prompts` rows with `num_generations` rollouts each, as in TRL."""
    generations = num_prompts // (args.generation_batch_size // num_generations)  # an incomplete one is dropped
    micro_steps = generations * args.steps_per_generation * args.num_iterations
    return math.ceil(epochs * math.ceil(micro_steps / args.gradient_accumulation_steps))


def summary(args: AdaGRPOConfig, num_prompts: int | None = None) -> str:
    """
    Describe in three lines how many prompts and rollouts a step samples and how their advantages are computed, what differs
    from [`~trl.GRPOTrainer`], and which default values differ.

    Args:
        args ([`AdaGRPOConfig`]):
            Configuration of the run.
        num_prompts (`int`, *optional*):
            Length of the training dataset; `None` if it is unknown.
    """
    lines = (_describe_step(args), _differences(args, num_prompts), _other_defaults(args))
    return "\n".join(line for line in lines if line)


def _describe_step(args: AdaGRPOConfig) -> str:
    rows, prompts = args.generation_batch_size, args.prompts_per_step
    sampled = f"{pluralize(prompts, 'prompt')}, {args.adaptive_sampling}"
    if args.adaptive_sampling == "uniform":
        sampled = f"{pluralize(prompts, 'prompt')} × {pluralize(args.num_generations, 'rollout')}"
    if args.zero_variance_groups == "resample":
        sampled += ", zero-variance groups replaced by other prompts"
    baseline = {
        "pool": "mean reward of the prompt's rollouts",
        "batch": "mean reward of the other rollouts in the batch",
    }[args.baseline]
    weights = {"none": "none", "inverse_sqrt": "1/√(pass rate)", "inverse": "1/(pass rate)"}
    weight = weights.get(args.prompt_weighting, f"(pass rate)^({args.prompt_weighting} - 1)")
    text = f"Each {_unit(args)}: {sampled}; baseline: {baseline}; prompt weight: {weight}. In total, {rows} rollouts are trained on"
    return text + (", while the server generates the next ones." if args.max_staleness else ".")


def _unit(args: AdaGRPOConfig) -> str:
    """Return whose prompts and rollouts are counted: a generation batch may be trained on in several steps, or in part of one."""
    one_step = args.steps_per_generation * args.num_iterations == args.gradient_accumulation_steps
    return "step" if one_step else "generation batch"


def _differences(args: AdaGRPOConfig, num_prompts: int | None) -> str:
    """List the differences from [`~trl.GRPOTrainer`] with the same batch size."""
    n, own, strategy = grpo_group_size(args), args.num_generations, args.sampling_strategy
    if n is None:
        return ""
    differences = []
    if n != own:
        differences.append(
            f"{pluralize(args.prompts_per_step, 'prompt')} per {_unit(args)} instead of {args.generation_batch_size // n}"
        )
        if not args.selects_groups and not strategy.uses_estimated_budgets:
            differences.append(f"{pluralize(own, 'rollout')} per prompt instead of {n}")
        if num_prompts is not None:
            steps, grpo_steps = training_steps(args, num_prompts, own), training_steps(args, num_prompts, n)
            differences.append(f"{pluralize(steps, 'step')} per epoch instead of {grpo_steps}")
        differences[-1] += " (option: num_generations)"
        if args.eval_strategy != "no" and args.num_generations_eval is None:
            differences.append(f"{pluralize(own, 'rollout')} per prompt in evaluations (option: num_generations_eval)")
    if strategy.retries_across_steps:
        differences.append("unsolved prompts are sampled again in later steps (option: adaptive_sampling)")
    elif strategy.is_sequential:
        differences.append(
            f"up to {strategy.max_rollouts} rollouts per prompt instead of {n} (option: adaptive_sampling)"
        )
    elif strategy.uses_estimated_budgets:
        differences.append(
            f"{args.min_samples} to {args.max_samples} rollouts per prompt instead of {n} (option: adaptive_sampling)"
        )
    groups = {"mask": "excluded from the loss", "skip": "not computed", "resample": "replaced by other prompts"}
    other_options = {
        "baseline": (f"baseline {args.baseline!r} instead of the group mean", args.baseline != "pool"),
        "prompt_weighting": ("advantages multiplied by a prompt weight", args.prompt_weighting not in ("none", 1.0)),
        "zero_variance_groups": (
            f"zero-variance groups {groups.get(args.zero_variance_groups)}",
            args.zero_variance_groups != "keep",
        ),
        "max_staleness": ("rollouts are from the weights before the last update", args.max_staleness > 0),
    }
    for option, (difference, applies) in other_options.items():
        if applies:
            differences.append(f"{difference} (option: {option})")
    is_default = n == _grpo_default("num_generations")
    grpo = f"GRPOTrainer with num_generations={n}{' (its default)' * is_default}"
    return f"Differences from {grpo}: {'; '.join(differences) or 'none'}."


def _other_defaults(args: AdaGRPOConfig) -> str:
    """List the fields that have a default of `AdaGRPOConfig`, set or not, if it differs from that of [`~trl.GRPOConfig`]."""
    defaults = {
        "num_generations": 4,  # where one rollout per prompt is the default, `_differences` lists it
        "scale_rewards": "none",
        "epsilon_high": 0.28,
    }
    shown = [
        f"{name}={default!r} ({_grpo_default(name)!r})"
        for name, default in defaults.items()
        if getattr(args, name) == default
    ]
    return f"Values that differ from GRPOConfig's defaults (in parentheses): {', '.join(shown)}." if shown else ""


def _grpo_default(name: str) -> Any:
    return GRPOConfig.__dataclass_fields__[name].default


def warn_at_start(args: AdaGRPOConfig, num_prompts: int | None) -> None:
    """
    Log a warning for a group that the baseline does not need, for epochs with fewer steps than in GRPO, and for a small batch.

    Args:
        args ([`AdaGRPOConfig`]), num_prompts (`int`, *optional*):
            As in [`summary`].
    """
    if args.baseline == "pool":
        return
    for warning in (_group_warning(args, num_prompts), _epoch_warning(args, num_prompts), _size_warning(args)):
        if warning:
            logger.warning(warning)


def _group_warning(args: AdaGRPOConfig, num_prompts: int | None) -> str:
    n, rows = args.num_generations, args.generation_batch_size
    is_too_small = num_prompts is not None and num_prompts < rows  # a step needs as many distinct prompts
    # Other sampling strategies than "uniform" use several rollouts per prompt by default.
    if n == 1 or args.adaptive_sampling != "uniform" or is_too_small:
        return ""
    text = (
        f"num_generations={n} with baseline={args.baseline!r} samples {pluralize(rows // n, 'prompt')} × {n} rollouts, but "
        f"this baseline does not need several rollouts per prompt. Set num_generations=1 for {rows} prompts × 1 rollout"
    )
    if num_prompts is None or args.max_steps > 0:
        return f"{text}."
    steps, epochs = training_steps(args, num_prompts, n, args.num_train_epochs), args.num_train_epochs * n
    return f"{text}, and max_steps={steps} (or num_train_epochs={epochs:g}) to train on as many rollouts as now."


def _epoch_warning(args: AdaGRPOConfig, num_prompts: int | None) -> str:
    n, epochs = grpo_group_size(args), args.num_train_epochs
    # A run of at least n epochs has been adapted to one rollout per prompt.
    if args.num_generations > 1 or n is None or epochs >= n or num_prompts is None or args.max_steps > 0:
        return ""
    steps, grpo_steps = (training_steps(args, num_prompts, k, epochs) for k in (1, n))
    return (
        f"num_train_epochs={epochs:g} gives {pluralize(steps, 'step')} with one rollout per prompt; GRPO with num_generations={n} "
        f"would make {grpo_steps}. Set max_steps={grpo_steps} or num_train_epochs={epochs * n:g} to train on as many rollouts."
    )


def _size_warning(args: AdaGRPOConfig) -> str:
    rows = args.generation_batch_size
    if not 1 < rows < SMALLEST_BATCH:
        return ""
    return (
        f"generation_batch_size={rows} is small for baseline={args.baseline!r}: a mean of {pluralize(rows - 1, 'other rollout')} "
        f"multiplies the variance of the advantages by N/(N-1) = {rows / (rows - 1):.2f}. Use at least {SMALLEST_BATCH} "
        "(raise per_device_train_batch_size or gradient_accumulation_steps), which keeps this factor below 1.07."
    )
