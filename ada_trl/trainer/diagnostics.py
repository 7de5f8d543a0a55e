"""Warnings about rewards, thresholds and baselines that leave nothing to learn, each with a cause and a fix."""

import math
from collections.abc import Mapping, Sequence

from ..core.metrics import threshold_outside_reward_range
from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)

WORST_EXPLAINED_VARIANCE = -0.3  # of a baseline; one constant for the whole batch has 0
LOWEST_ESS_RATIO = 0.5

TOO_EASY = "the prompts are too easy for the model, or the reward function accepts everything"
TOO_HARD = (
    "the prompts are too hard for the model, completions are truncated (completions/clipped_ratio), or the reward "
    "function is broken"
)
OBSERVATIONS = {
    "all_correct": "only successful rollouts",
    "all_wrong": "only failed rollouts",
    "unscored": "no rollout with a reward",
}


class TrainingDiagnostics:
    """
    Checks the metrics of every generation batch, and logs each of these warnings at most once:

    - several reward functions without `success_reward` (at construction), or a `positive_threshold` outside the range of the
      rewards (after two generation batches), if sampling, prompt weights or a record of pass rates depend on them;
    - for `steps` steps, more than `max_fraction` of the prompts with successes only, with failures only or without rewards;
    - for `steps` steps, equal rewards in the whole batch, with a baseline that does not need a group;
    - for `steps` steps, no prompt with a gradient, for any other reason;
    - for `steps` steps, a baseline that predicts the rewards worse than their own mean;
    - for `steps` steps, an effective sample size below half of the rollouts, with sequence-level importance sampling.

    Args:
        args ([`AdaGRPOConfig`]):
            Configuration of the run.
        reward_names (`Sequence[str]`):
            Names of the reward functions with a weight.
        max_fraction (`float`, *optional*, defaults to `0.5`):
            Fraction of the prompts, between 0 and 1.
        steps (`int`, *optional*, defaults to `20`):
            Training steps.
    """

    def __init__(self, args: AdaGRPOConfig, reward_names: Sequence[str], max_fraction: float = 0.5, steps: int = 20):
        self.threshold, self.max_fraction, self.steps = args.positive_threshold, max_fraction, steps
        self._candidates = list(dict.fromkeys(reward_names))  # for `success_reward`
        if args.success_reward is not None or len(reward_names) == 1:
            self._candidates = []
        self._reward = "the reward" if args.success_reward is None else f"the reward of {args.success_reward}"
        if self._candidates:
            self._reward = f"the weighted sum of {' and '.join(self._candidates)}"
        self._needs_groups = args.baseline == "pool"
        self._correction_mode = args.vllm_importance_sampling_mode
        self._more_rollouts = "max_rounds or " if args.is_sequential else ""
        rows = max(args.generation_batch_size, 2)
        self._leave_one_out_factor = (rows / (rows - 1)) ** 2
        self._is_recorded = args.tracks_pass_rates
        self._is_trained_on = args.needs_successes
        self._early_generations = 2  # in which the threshold is still to be compared with the rewards
        self._range = (math.inf, -math.inf)
        self._last_absent: dict[str, int] = {}  # by problem, the last step without it
        self._warned: set[str] = set()
        if self._candidates and self._is_trained_on:
            logger.warning(
                f"There are {len(reward_names)} reward functions and no success_reward, so a rollout is a success if "
                f"{self._reward} exceeds positive_threshold ({self.threshold:g}). {self._success_reward_fix()}"
            )

    def observe(self, metrics: Mapping[str, float], rewards: Sequence[float], step: int) -> None:
        """
        Check one generation.

        Args:
            metrics (`Mapping[str, float]`):
                Metrics of [`~core.sampling_metrics`].
            rewards (`Sequence[float]`):
                Rewards of all rollouts that have one.
            step (`int`):
                Training step, from 1.
        """
        if self._is_trained_on or self._is_recorded:
            self._check_threshold(metrics)
        self._check_baseline(metrics.get("baseline/explained_variance", math.nan), step)
        self._check_effective_sample_size(metrics.get("ess_ratio", math.nan), step)
        self._check_prompts(metrics, step)
        if not self._needs_groups:
            self._check_constant_batch(rewards, step)
        self._check_gradient(metrics["frac_zero_advantage_groups"], step)

    def _steps_to_report(self, problem: str, is_present: bool, step: int) -> int:
        """Record whether `problem` is present. Return for how many steps it has been, if a warning is due, and 0 otherwise."""
        if not is_present:
            self._last_absent[problem] = step
        steps = step - self._last_absent.setdefault(problem, step - 1)
        if steps < self.steps or problem in self._warned:
            return 0
        self._warned.add(problem)
        return steps

    def _check_prompts(self, metrics: Mapping[str, float], step: int) -> None:
        low, high = metrics["success_reward/min"], metrics["success_reward/max"]
        no_gradient = metrics["frac_zero_advantage_groups"]
        for problem, observation in OBSERVATIONS.items():
            fraction = metrics[f"frac_{problem}"]
            is_present = fraction > self.max_fraction
            if problem != "unscored":
                # With other baselines a prompt has a gradient even if its own rewards are equal, and where nothing depends
                # on the threshold, rewards on one side of it may still differ.
                is_present &= self._needs_groups and (self._is_trained_on or no_gradient > self.max_fraction)
            if steps := self._steps_to_report(problem, is_present, step):
                logger.warning(
                    f"For {steps} steps, more than {self.max_fraction:.0%} of the prompts have had {observation} "
                    f"(ada/frac_{problem} is {fraction:.0%} now); {no_gradient:.0%} of the prompts have no gradient. "
                    f"{self._fix(problem, low, high, metrics['success_reward/mean'])}"
                )

    def _check_constant_batch(self, rewards: Sequence[float], step: int) -> None:
        if len(rewards) < 2:  # see "unscored"
            return
        if steps := self._steps_to_report("constant_batch", min(rewards) == max(rewards), step):
            logger.warning(
                f"For {steps} steps, all rollouts of the batch have had the same reward ({rewards[0]:.3g} now), so that "
                f"no rollout is better than another. If {rewards[0]:.3g} is the best reward, {TOO_EASY}: train on harder prompts. "
                f"Otherwise {TOO_HARD}: train on easier prompts or raise {self._more_rollouts}max_completion_length. Check the "
                "completions with log_completions=True."
            )

    def _check_gradient(self, fraction: float, step: int) -> None:
        # What the warnings above leave out: rewards that depend on the prompt only, one reward per prompt, Seq-pos that stops at
        # the first of equal rewards, and rollouts that are all masked.
        is_reported = bool(self._warned & {*OBSERVATIONS, "constant_batch"})
        if steps := self._steps_to_report("no_gradient", fraction == 1 and not is_reported, step):
            logger.warning(
                f"For {steps} steps, no prompt has had a gradient (ada/frac_zero_advantage_groups is 100%): the rollouts of each "
                "prompt that are trained on have had equal rewards, only one of them had a reward, or all are masked as truncated. Check with "
                "log_completions=True that the reward functions distinguish completions of the same prompt, and "
                "completions/clipped_ratio."
            )

    def _check_baseline(self, explained_variance: float, step: int) -> None:
        # Compared with the mean of all *other* rollouts, which explains less than the mean of all.
        relative = 1 - (1 - explained_variance) / self._leave_one_out_factor
        if steps := self._steps_to_report("baseline", relative < WORST_EXPLAINED_VARIANCE, step):  # False for NaN
            logger.warning(
                f"For {steps} steps, the posterior baseline has predicted the rewards worse than their mean "
                f"(ada/baseline/explained_variance is {explained_variance:.2f} now), so that it adds noise. Use more rollouts "
                "per step, or baseline='batch', the mean reward of the other rollouts in the batch."
            )

    def _check_effective_sample_size(self, ratio: float, step: int) -> None:
        # The ratio is one of whole completions, so that it says nothing about token-level correction.
        is_low = self._correction_mode.startswith("sequence") and ratio < LOWEST_ESS_RATIO  # False for NaN
        if steps := self._steps_to_report("effective_sample_size", is_low, step):
            logger.warning(
                f"For {steps} steps, the effective sample size of the rollouts has been less than {LOWEST_ESS_RATIO:g} of their "
                f"number (ada/ess_ratio is {ratio:.2f} now): vllm_importance_sampling_mode={self._correction_mode!r} weights a "
                "completion by the product of the ratios of all its tokens, so that few completions determine the update. Set "
                "vllm_importance_sampling_mode='token_truncate', lower the learning rate, or set max_staleness=0."
            )

    def _check_threshold(self, metrics: Mapping[str, float]) -> None:
        low, high = metrics["success_reward/min"], metrics["success_reward/max"]
        if not self._early_generations or math.isnan(low):
            return
        self._early_generations -= 1
        low, high = self._range = min(self._range[0], low), max(self._range[1], high)
        if self._early_generations:
            return
        mean, pass_rate = metrics["success_reward/mean"], metrics["pass_rate/mean"]
        is_one_sided = self._is_one_sided(low, high)
        if is_one_sided or threshold_outside_reward_range(low, high, mean, pass_rate):
            rollouts = "every rollout" if pass_rate > 0.5 else "no rollout"
            rollouts = rollouts.capitalize() if is_one_sided else f"Nearly {rollouts}"
            logger.warning(
                f"{rollouts} of the first two generation batches is a success. {self._threshold_fix(low, high, mean)}"
            )

    def _is_one_sided(self, low: float, high: float) -> bool:
        """Whether rewards differ, but all of them are above the threshold or none is."""
        return low < high and not low <= self.threshold < high

    def _fix(self, problem: str, low: float, high: float, mean: float) -> str:
        if problem == "unscored":
            return "The reward functions return None or NaN, or have weight 0: check that they can read the completions and the columns."
        if self._is_trained_on and self._is_one_sided(low, high):
            return self._threshold_fix(low, high, mean)
        cause, fix = (
            (TOO_EASY, "Train on harder prompts.")
            if problem == "all_correct"
            else (TOO_HARD, f"Train on easier prompts or raise {self._more_rollouts}max_completion_length.")
        )
        return f"{cause[0].upper()}{cause[1:]}. {fix} Check the completions with log_completions=True."

    def _threshold_fix(self, low: float, high: float, mean: float) -> str:
        start = f"{self._reward} ranges from {low:.3g} to {high:.3g} and positive_threshold is {self.threshold:g}. "
        if self._candidates:
            choice = f"{self._success_reward_fix()} Otherwise set "
        elif high <= self.threshold:
            choice = f"If a good completion gets more than {self.threshold:g}, the prompts are hard; otherwise set "
        else:
            choice = "Set "
        effect = (
            "until then, sampling and prompt weights are the same for all prompts"
            if self._is_trained_on
            else "until then, the recorded pass rates carry no information; training does not depend on them"
        )
        return (
            f"{start[0].upper()}{start[1:]}{choice}positive_threshold to a value that separates good from bad completions, between {low:.3g} and "
            f"{high:.3g} (the mean is {mean:.3g}): {effect}."
        )

    def _success_reward_fix(self) -> str:
        options = " or ".join(f"success_reward={name!r}" for name in self._candidates)
        return f"If one of them alone is the correctness of a completion, set {options}."
