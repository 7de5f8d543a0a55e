"""
Reports of a run: a sentence at its start that describes the differences from GRPO, warnings about problems that would go
unnoticed, and the metrics that are logged in each mode.
"""

import logging
import math
from collections.abc import Mapping

import numpy as np
from trl import GRPOConfig

from ..core import Rollouts
from ..core.metrics import threshold_outside_reward_range
from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig
from .mode import Mode


logger = get_logger(__name__)


# Metrics


# TRL averages these over the rows that its loss receives, which with "skip" and "mask" are not all completions.
OF_ROWS_IN_LOSS = [
    "entropy",
    "kl",
    *(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
    "cispo_clip_ratio",
    "vespo/phi_seq_mean",
]


def logged_metrics(args: AdaGRPOConfig, mode: Mode) -> set[str]:
    """
    Names of the metrics under `ada/` that a person reads, in a mode: at most 20, and 12 with the batch baseline. All
    others are logged with `log_completions=True` only, and so are those of these that another mode has.
    """
    is_estimated, n = mode.is_estimated, mode.num_generations
    names = ["samples_per_prompt/mean", "frac_zero_advantage_groups", "pass_rate/mean"]
    names += ["tokens/generated", "time/generate", "time/reward"]
    if mode.is_sequential:
        names += ["rounds/mean", "frac_exit_condition_met"]
    if mode.is_sequential or is_estimated:
        names += ["samples_per_prompt/max"]
    is_adaptive = mode.is_sequential or mode.resamples_prompts or mode.baseline == "batch"
    if is_adaptive and n > 1 and not is_estimated:  # GRPO has groups of one size
        names += ["frac_reward_zero_std/first_round"]
        # In all other modes a group that has a gradient has it in the first round.
        names += ["frac_recovered_groups"] if mode.is_sequential or mode.baseline == "batch" else []
    if is_estimated:
        names += ["estimator/brier", "estimator/brier_constant"]
    if mode.is_multi_round or mode.zero_variance_groups == "mask":
        names += ["tokens/discarded"]
    if mode.resamples_prompts:
        names += ["prompts/queue", "prompts/epoch", f"prompts/{'frac_retried' if mode.retries else 'sampled'}"]
    if args.use_vllm and args.vllm_mode == "server":
        names += ["vllm/retries", "vllm/weight_check_logprob_diff"]
        if mode.is_multi_round:
            names += ["vllm/wasted_rounds", "time/idle", "time/reward_overlapped"]
    if mode.max_staleness:
        names += ["ess_ratio"]
    return set(names)


# The start of training


def report_start(args: AdaGRPOConfig, mode: Mode, num_prompts: int | None, own_advantages: str | None = None) -> None:
    """
    Print [`describe_run`] on the main process, unless warnings are hidden, and log a warning about epochs.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]):
            Configuration of the run, and its mode.
        num_prompts (`int`, *optional*):
            Length of the training dataset; `None` if it is unknown.
        own_advantages (`str`, *optional*):
            Name of the user's function that computes the advantages, if there is one.
    """
    sentence = describe_run(args, mode, own_advantages)
    if sentence and args.process_index == 0 and args.get_process_log_level() <= logging.WARNING:
        print(sentence, flush=True)
    if warning := _epoch_warning(args, num_prompts):
        logger.warning(warning)


def describe_run(args: AdaGRPOConfig, mode: Mode, own_advantages: str | None = None) -> str:
    """
    Describe in one sentence how a run differs from [`~trl.GRPOTrainer`] with the defaults of [`~trl.GRPOConfig`]. Empty if it
    does not.
    """
    values = {"scale_rewards": "none", "epsilon_high": 0.28}
    if not args.is_set("num_generations"):
        values["num_generations"] = args.num_generations
    defaults = [
        f"{name}={value!r} ({GRPOConfig.__dataclass_fields__[name].default!r})"
        for name, value in values.items()
        if getattr(args, name) == value
    ]
    sampling, advantages = _describe_sampling(args, mode), _describe_advantages(args, mode)
    if own_advantages is not None:
        sampling = sampling.replace("Batch baseline", "Uniform sampling")
        advantages = f"advantages are those of {own_advantages}"
    is_vanilla = mode.trains_as_grpo and own_advantages is None
    clauses = [
        "" if is_vanilla else f"{sampling}; {advantages}",
        _describe_zero_variance_groups(mode),
        "rollouts come from the weights before the last generation batch was trained on" if mode.max_staleness else "",
        f"{pluralize(args.num_generations_eval, 'rollout')} per prompt in evaluations"
        if args.eval_strategy != "no" and args.num_generations == 1 and args.num_generations_eval
        else "",
        f"defaults that differ from GRPOConfig's (in parentheses): {', '.join(defaults)}" if defaults else "",
    ]
    sentence = "; ".join(clause for clause in clauses if clause)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _describe_sampling(args: AdaGRPOConfig, mode: Mode) -> str:
    rule, n = mode.slot_rule, mode.num_generations
    name = mode.adaptive_sampling.capitalize()
    if mode.is_estimated:
        budgets = f"{mode.min_samples} to {mode.max_samples} rollouts per prompt, {n} on average"
        return f"{name}: {budgets}, more where the estimated pass rate is low"
    if not mode.is_sequential:
        name = "Batch baseline" if mode.baseline == "batch" else "Uniform sampling"
        text = f"{name}: {pluralize(args.prompts_per_step, 'prompt')} × {pluralize(n, 'rollout')} per generation batch"
        hint = " (num_generations=1 is sufficient and gives more prompts)"
        text += hint if mode.baseline == "batch" and n > 1 else ""
        again = f"in up to {pluralize(mode.retries, 'later step')}"
        return f"{text}, and one without a correct rollout is sampled again {again}" if mode.retries else text
    condition = f"until {rule.min_positives} {'is' if rule.min_positives == 1 else 'are'} correct"
    if rule.min_negatives:
        condition += f" and {rule.min_negatives} incorrect"
    rounds = f"up to {pluralize(rule.max_rounds, 'round')} of {pluralize(mode.round_size, 'rollout')}"
    return f"{name}: {rounds} per prompt, {condition}; {n} are trained on"


def _describe_advantages(args: AdaGRPOConfig, mode: Mode) -> str:
    rollouts = "all other rollouts of the batch" if mode.baseline == "batch" else "all rollouts of the prompt"
    text = f"advantages use the mean reward of {rollouts}"
    if mode.is_weighted:
        weights: dict[str | float, str] = {"inverse_sqrt": "1/√p̂", "inverse": "1/p̂"}
        weight = weights.get(mode.prompt_weighting, f"p̂^({mode.prompt_weighting} - 1)")
        text += f" and the weight {weight}, with p̂ its pass rate"
    elif args.divides_by_group_std and mode.adaptive_sampling != "uniform":
        text += (
            " and no prompt weight, because the division by the standard deviation of the group is a weight as well"
        )
    return text


def _describe_zero_variance_groups(mode: Mode) -> str:
    return {
        "mask": "zero-variance groups are excluded from the loss",
        "skip": "rows of zero-variance groups are not computed",
        "resample": f"zero-variance groups are replaced (up to {mode.candidates_per_slot} prompts for each place in the batch)",
    }.get(mode.zero_variance_groups, "")


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 rollout" and "4 rollouts"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _epoch_warning(args: AdaGRPOConfig, num_prompts: int | None) -> str:
    if args.num_generations > 1 or num_prompts is None or args.max_steps > 0:
        return ""
    epochs = args.num_train_epochs
    per_pass, steps = (pluralize(training_steps(args, num_prompts, number), "step") for number in (1, epochs))
    if args.retries:
        per_pass += (
            ", which with retries cover only a part of it, because retried prompts take the places of new ones,"
        )
    return (
        f"A generation batch has {pluralize(args.prompts_per_step, 'prompt')}, one pass over the dataset ({num_prompts}) takes "
        f"{per_pass} and num_train_epochs={epochs:g} makes {steps}. A GRPO run with n rollouts per prompt makes n times as many: to "
        "train on as many rollouts, set max_steps to its number of steps."
    )


def training_steps(args: AdaGRPOConfig, num_prompts: int, epochs: float) -> int:
    """Return the optimizer steps of `epochs` over `num_prompts` rows, as in TRL."""
    generations = num_prompts // args.prompts_per_step  # an incomplete one is dropped
    micro_steps = generations * args.steps_per_generation * args.num_iterations
    return math.ceil(epochs * math.ceil(micro_steps / args.gradient_accumulation_steps))


# During training


class TrainingDiagnostics:
    """
    Checks the metrics of every generation batch, and logs each of these warnings at most once:

    - a `positive_threshold` outside of the range of the rewards, after two generation batches, if sampling, prompt weights or
      recorded pass rates depend on it;
    - for `steps` steps, no gradient, because all rollouts that are compared have equal rewards or none, or are masked.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]):
            Configuration of the run, and its mode.
        steps (`int`, *optional*, defaults to `20`):
            Training steps.
    """

    def __init__(self, args: AdaGRPOConfig, mode: Mode, steps: int = 20):
        self.steps = steps
        self.mode, self._args = mode, args
        # Success rewards of the first two generation batches, and which of them are above the threshold; `None` once compared.
        self._early: list[tuple[np.ndarray, np.ndarray]] | None = None
        if mode.needs_successes or mode.pass_rate_estimator:  # anything depends on them
            self._early = []
        self._last_gradient: int | None = None  # the last step with one
        self._warned = False  # that there is none

    def observe(self, metrics: Mapping[str, float], rollouts: Rollouts, step: int) -> None:
        """
        Check one generation batch.

        Args:
            metrics (`Mapping[str, float]`):
                Metrics of [`~core.sampling_metrics`].
            rollouts ([`~core.Rollouts`]):
                Its rollouts.
            step (`int`):
                Training step, from 1.
        """
        if self._early is not None and rollouts.is_scored_N.any():
            self._early.append(
                (rollouts.success_reward_N[rollouts.is_scored_N], rollouts.is_positive_N[rollouts.is_scored_N])
            )
            if len(self._early) == 2:
                self._check_threshold(*map(np.concatenate, zip(*self._early, strict=True)))
                self._early = None
        self._check_gradient(metrics["frac_zero_advantage_groups"], rollouts.reward_N, step)

    def _check_gradient(self, fraction: float, reward_N: np.ndarray, step: int) -> None:
        if self._last_gradient is None or step < self._last_gradient:  # the first step of another training
            self._last_gradient = step - 1
        if fraction < 1:
            self._last_gradient = step
        if (steps := step - self._last_gradient) >= self.steps and not self._warned:
            self._warned = True
            rewards = reward_N[~np.isnan(reward_N)]
            is_constant = len(rewards) > 1 and rewards.min() == rewards.max()
            found = f"all rewards are {rewards[0]:.3g}" if is_constant else "ada/frac_zero_advantage_groups is 100%"
            longer = "max_rounds or max_completion_length" if self.mode.is_sequential else "max_completion_length"
            logger.warning(
                f"For {steps} steps, no prompt has had a gradient ({found} now). The rollouts that are compared have equal "
                "rewards or none, or are masked as truncated. If they are all correct, train on harder prompts; if they are all wrong, "
                f"train on easier prompts or raise {longer}; otherwise check with log_completions=True that the reward functions "
                "distinguish completions of the same prompt."
            )

    def _check_threshold(self, scored: np.ndarray, is_positive: np.ndarray) -> None:
        args, low, high, mean = self._args, scored.min(), scored.max(), scored.mean()
        pass_rate, threshold = is_positive.mean(), args.positive_threshold
        is_one_sided = low < high and not low <= threshold < high
        if not (is_one_sided or threshold_outside_reward_range(low, high, mean, pass_rate)):
            return
        reward = f"the reward of {args.success_function}" if args.success_function else "the reward"
        found = ("" if is_one_sided else "nearly ") + ("every rollout" if pass_rate > 0.5 else "no rollout")
        advice = f"set positive_threshold to a value between {low:.3g} and {high:.3g} that separates good from bad completions"
        if high <= threshold:
            advice = f"if a good completion gets more than {threshold:g}, the prompts are hard; otherwise {advice}"
        effect = f"sampling {'is' if self.mode.retries else 'and prompt weights are'} the same for all prompts"
        if not self.mode.needs_successes:
            effect = "the recorded pass rates carry no information; training does not depend on them"
        logger.warning(
            f"{found.capitalize()} of the first two generation batches is a success: {reward} ranges from {low:.3g} to "
            f"{high:.3g} (mean {mean:.3g}), and positive_threshold is {threshold:g}. {advice[0].upper()}{advice[1:]}; until then, {effect}."
        )
