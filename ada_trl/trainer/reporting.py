"""
Reports of a run: a sentence at its start that describes the differences from GRPO, warnings about problems that would
go unnoticed, and the metrics that are logged in each mode.
"""

import logging
import math
from collections.abc import Mapping

import numpy as np
from trl import GRPOConfig

from ..core import Rollouts
from ..core.metrics import RewardKind, kind_of_rewards, threshold_outside_reward_range
from ..utils.console import show
from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig
from .mode import WEIGHTED_SUM, Mode


logger = get_logger(__name__)

# Values of GRPO for options that the modes set by default, or with which they differ from it.
OF_GRPO = {"adaptive_sampling": "uniform", "baseline": "pool", "prompt_weighting": "none"} | {
    name: GRPOConfig.__dataclass_fields__[name].default
    for name in ("num_generations", "scale_rewards", "epsilon_high")
}

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
    Names of the metrics under `ada/` that a person reads, in a mode: at most 20, and 12 with the batch
    baseline. All others are logged with `log_completions=True` only, and so are those of these that another mode has.
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
    """Print [`describe_run`] on the main process, unless warnings are hidden."""
    sentence = describe_run(args, mode, num_prompts, own_advantages)
    if sentence and args.process_index == 0 and args.get_process_log_level() <= logging.WARNING:
        show(sentence)


def describe_run(
    args: AdaGRPOConfig, mode: Mode, num_prompts: int | None = None, own_advantages: str | None = None
) -> str:
    """
    Describe in one sentence how a run on `num_prompts` rows (`None` if unknown) differs from [`~trl.GRPOTrainer`] with
    the defaults of [`~trl.GRPOConfig`]; empty if it does not. `own_advantages` is the name of the user's function of
    advantages.
    """
    given = {name: getattr(args, name) for name in OF_GRPO}
    options = [f"{name}={value!r} ({OF_GRPO[name]!r})" for name, value in given.items() if value != OF_GRPO[name]]
    clauses = [
        "" if mode.trains_as_grpo else _describe_sampling(args, mode),
        f"advantages are those of {own_advantages}" if own_advantages else "",
        "" if num_prompts is None else _describe_length(args, mode, num_prompts),
        f"options that differ from GRPO (its values in parentheses): {', '.join(options)}" if options else "",
    ]
    sentence = "; ".join(filter(None, clauses))
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _describe_sampling(args: AdaGRPOConfig, mode: Mode) -> str:
    rule, n = mode.slot_rule, mode.num_generations
    number = pluralize(n, "rollout")
    if mode.is_estimated:
        number = f"{mode.min_samples} to {mode.max_samples} rollouts ({n} on average)"
    elif mode.is_sequential:
        condition = f"{rule.min_positives} positive" + f" and {rule.min_negatives} negative" * (rule.min_negatives > 0)
        number = f"up to {rule.max_rounds} rounds of {mode.round_size} rollouts, until there are {condition}"
    elif mode.baseline == "batch" and n > 1:
        number += " (num_generations=1 is sufficient and gives more prompts)"
    text = f"{pluralize(args.prompts_per_step, 'prompt')} per generation batch, each with {number}"
    again = f"in up to {pluralize(mode.retries, 'later step')}"
    return f"{text}, and without a positive one again {again}" if mode.retries else text


def _describe_length(args: AdaGRPOConfig, mode: Mode, num_prompts: int) -> str:
    """Steps and passes over the dataset of this run and of GRPO, and intervals that are longer than the run."""
    n, rows = mode.num_generations, args.generation_batch_size
    of_grpo = n
    if n == 1 or not args.is_set("num_generations"):
        of_grpo = next(size for size in range(OF_GRPO["num_generations"], 0, -1) if rows % size == 0)
    if of_grpo == n and mode.trains_as_grpo:
        return ""

    def describe(size: int, bound: str = "") -> str:
        steps = training_steps(args, num_prompts, size)
        rollouts = steps * rows * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
        passes = rollouts / size / num_prompts
        return f"{pluralize(steps, 'step')}, {bound}{passes:.3g} {'pass' if passes == 1 else 'passes'}"

    # Retries take the places of new prompts, and dynamic sampling takes more of them.
    bound = "at most " if mode.retries else "at least " if mode.resamples_prompts else ""
    text = f"{describe(n, bound)} over the dataset"
    steps, steps_of_grpo = (training_steps(args, num_prompts, size) for size in (n, of_grpo))
    if of_grpo != n:
        advice = f", as many rollouts as with max_steps={steps_of_grpo} here" if steps < steps_of_grpo else ""
        text += f" (GRPO with num_generations={of_grpo}: {describe(of_grpo)}{advice})"
    names = [f"{kind}_steps" for kind in ("logging", "eval", "save") if getattr(args, f"{kind}_strategy") == "steps"]
    late = [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) > steps]
    return f"{text}; the run ends before {', '.join(late)}" if late else text


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 rollout" and "4 rollouts"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def training_steps(args: AdaGRPOConfig, num_prompts: int, num_generations: int) -> int:
    """Return the optimizer steps of a run on `num_prompts` rows with `num_generations` rollouts of each, as in TRL."""
    if args.max_steps > 0:
        return args.max_steps
    generations = num_prompts // (args.generation_batch_size // num_generations)  # an incomplete one is dropped
    micro_steps = generations * args.steps_per_generation * args.num_iterations
    return math.ceil(args.num_train_epochs * math.ceil(micro_steps / args.gradient_accumulation_steps))


# During training


# Modes for rewards that cannot be compared with the mean of other prompts.
OF_GROUP = "baseline='pool', adaptive_sampling='uniform', num_generations=4 and scale_rewards='group'"
REWARDS_TO_COMPARE = 512  # as many as `kind_of_rewards` needs


def advise_on_rewards(kind: RewardKind) -> str:
    """The problem of rewards with `baseline="batch"` and the mode to use, in sentences; empty if there is none."""
    return {
        "comparable": "",
        "outliers": "Rare rewards far below all others dominate the gradient of baseline='batch'. Limit the reward to "
        "the range that matters, or use its ranks (examples/win_rates.py) if it means the same on every prompt, or "
        f"compare the rollouts of each prompt, with {OF_GROUP}.",
        "levels": "Rewards of different prompts differ much more than those of one prompt, so that baseline='batch' "
        f"learns next to nothing. Compare the rollouts of each prompt, with {OF_GROUP}.",
        "distinct": "Most rewards are different, as those of a reward model. If their level depends on the prompt, "
        f"baseline='batch' learns next to nothing: compare the rollouts of each prompt, with {OF_GROUP}. "
        "`ada-trl check` samples each prompt several times and tells whether it does.",
    }[kind]


class TrainingDiagnostics:
    """
    Checks the metrics of every generation batch, and logs each of these warnings at most once:

    - a `positive_threshold` outside of the range of the rewards, after two generation batches, if sampling, prompt
      weights or recorded pass rates depend on it;
    - for `steps` steps, no gradient, because all rollouts that are compared have equal rewards or none, or are masked;
    - with `compares_prompts`, rewards of different prompts that cannot be compared, after the first 512;
    - with retries, for `steps` generation batches, no success, or batches full of retries that hardly ever succeed.

    Args:
        args ([`AdaGRPOConfig`]), mode ([`~trainer.mode.Mode`]):
            Configuration of the run, and its mode.
        compares_prompts (`bool`, *optional*, defaults to `False`):
            Whether the mean reward of other prompts is the baseline.
        steps (`int`, *optional*, defaults to `20`):
            Training steps.
    """

    def __init__(self, args: AdaGRPOConfig, mode: Mode, compares_prompts: bool = False, steps: int = 20):
        self.steps = steps
        self._args, self._mode = args, mode
        # Success rewards of the first two generation batches, and which of them are above the threshold; `None` once
        # compared.
        self._early: list[tuple[np.ndarray, np.ndarray]] | None = None
        if mode.needs_successes or mode.pass_rate_estimator:  # anything depends on them
            self._early = []
        # Rollouts of the first generation batches that have a reward; `None` once the kind of the rewards is known.
        self._rewards: list[Rollouts] | None = [] if compares_prompts else None
        self._last_gradient: int | None = None  # the last step with one
        self._warned = False  # that there is none
        # Prompts, retries, solved retries and solved prompts of the last generation batches; `None` once reported.
        self._retries: list[tuple[int, int, int, int]] | None = [] if mode.retries else None

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
        if self._rewards is not None:
            self._check_rewards(rollouts)
        self._check_gradient(metrics["frac_zero_advantage_groups"], rollouts.reward_N, step)
        if self._retries is not None and metrics["frac_zero_advantage_groups"] < 1:
            self._check_retries(rollouts)

    def _check_rewards(self, rollouts: Rollouts) -> None:
        batches = self._rewards = [*(self._rewards or []), rollouts.where(rollouts.has_reward_N)]
        reward_N = np.concatenate([batch.reward_N for batch in batches])
        if len(reward_N) < REWARDS_TO_COMPARE:
            return
        self._rewards = None
        # The same prompt in two batches is two prompts here.
        first = np.cumsum([0, *(batch.num_prompts for batch in batches[:-1])])
        prompt_N = np.concatenate([start + batch.prompt_N for start, batch in zip(first, batches, strict=True)])
        if advice := advise_on_rewards(kind_of_rewards(reward_N, prompt_N)):
            low, median, high = np.quantile(reward_N, (0, 0.5, 1))
            logger.warning(
                f"The first {len(reward_N)} rewards range from {low:.3g} to {high:.3g} (median {median:.3g}). {advice}"
            )

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
            longer = "max_rounds or max_completion_length" if self._mode.is_sequential else "max_completion_length"
            logger.warning(
                f"For {steps} steps, no prompt has had a gradient ({found} now). The rollouts that are compared have "
                "equal rewards or none, or are masked as truncated. If they are all correct, train on harder prompts; "
                f"if they are all wrong, train on easier prompts or raise {longer}; otherwise check with "
                "log_completions=True that the reward functions distinguish completions of the same prompt."
            )

    def _check_retries(self, rollouts: Rollouts) -> None:
        is_retry_P, is_solved_P = rollouts.sum(rollouts.attempt_N) > 0, rollouts.positives_P > 0
        counts = (len(is_retry_P), is_retry_P.sum(), (is_retry_P & is_solved_P).sum(), is_solved_P.sum())
        self._retries = [*(self._retries or []), counts][-self.steps :]
        prompts, retries, solved_retries, solved = np.sum(self._retries, axis=0)
        # Half of the batch alone is no problem: two retries fill it at a pass rate of 0.38.
        is_full = retries > prompts / 2 and solved_retries < retries / 10
        is_futile = retries > 0 and (is_full or not solved)
        scored = rollouts.success_reward_N[rollouts.is_scored_N]
        if len(self._retries) < self.steps or not is_futile or not len(scored):
            return
        self._retries = None
        logger.warning(
            f"In {self.steps} generation batches, {retries / prompts:.0%} of the prompts were retries, and "
            f"{solved_retries / retries:.0%} of these had a rollout above positive_threshold "
            f"({self._args.positive_threshold:g}; {self._success} now ranges from {scored.min():.3g} to "
            f"{scored.max():.3g}). If a good completion gets less, lower positive_threshold, or name another function "
            "with success_reward. If the prompts are this hard, retries leave little room for new ones: "
            "set retries=0, or train on easier prompts."
        )

    @property
    def _success(self) -> str:
        name = self._args.success_reward
        return "the reward" if name in (None, WEIGHTED_SUM) else f"the reward of {name}"

    def _check_threshold(self, scored: np.ndarray, is_positive: np.ndarray) -> None:
        args, low, high, mean = self._args, scored.min(), scored.max(), scored.mean()
        pass_rate, threshold = is_positive.mean(), args.positive_threshold
        is_one_sided = low < high and not low <= threshold < high
        if not (is_one_sided or threshold_outside_reward_range(low, high, mean, pass_rate)):
            return
        found = ("" if is_one_sided else "nearly ") + ("every rollout" if pass_rate > 0.5 else "no rollout")
        advice = f"set positive_threshold to a value between {low:.3g} and {high:.3g} that separates good from bad"
        advice += " completions"
        if high <= threshold:
            advice = f"if a good completion gets more than {threshold:g}, the prompts are hard; otherwise {advice}"
        effect = "sampling and prompt weights are the same for all prompts"
        if self._mode.retries:
            effect = "no prompt is retried" if pass_rate > 0.5 else "retries=0 keeps retries from filling the batches"
            self._retries = None
        elif not self._mode.needs_successes:
            effect = "the recorded pass rates carry no information; training does not depend on them"
        logger.warning(
            f"{found.capitalize()} of the first two generation batches is a success: {self._success} ranges from "
            f"{low:.3g} to {high:.3g} (mean {mean:.3g}), and positive_threshold is {threshold:g}. "
            f"{advice[0].upper()}{advice[1:]}; until then, {effect}."
        )
