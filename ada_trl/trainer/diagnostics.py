"""Warnings, with cause and remedy, when the signal cannot tell good rollouts from bad ones."""

import math
from collections.abc import Mapping, Sequence

from ..core.metrics import threshold_outside_reward_range
from ..utils.logging import get_logger
from .ada_grpo_config import AdaGRPOConfig


logger = get_logger(__name__)

FOUND = {
    "all_correct": "only positive rollouts",
    "all_wrong": "only negative rollouts",
    "unscored": "no rollout that any reward function scored",
}
REMEDIES = {
    "all_correct": (
        "The prompts are too easy for the model, or the reward function accepts everything. Train on harder prompts, or "
        "look at the completions (log_completions=True)."
    ),
    "all_wrong": (
        "The prompts are too hard for the model, completions are cut off (completions/clipped_ratio), or the reward "
        "function is broken. Look at the completions (log_completions=True); train on easier prompts or raise max_rounds "
        "or max_completion_length."
    ),
    "unscored": (
        "The reward functions return None or NaN: check that they understand the completions and the data set's columns."
    ),
}


WORSE_THAN_NOTHING = -0.3  # explained variance of a baseline


class TrainingDiagnostics:
    """
    Looks at every generation's metrics and warns, once each:

    - at construction, if there are several reward functions and none is named as `success_reward`;
    - after two generations, if no rollout or every rollout counts as positive although rewards differ;
    - when more than `share` of the prompts have been unresolved for the same reason in all generations of `steps` steps;
    - when a baseline that is no pool has been worse than the rewards' own mean in all generations of `steps` steps.

    The first is left out where nothing but metrics depends on the signal.

    Args:
        args ([`AdaGRPOConfig`]):
            What the signal is compared with.
        names (`Sequence[str]`):
            Names of the reward functions.
        share (`float`, *optional*, defaults to `0.5`):
            Share of the prompts, between 0 and 1.
        steps (`int`, *optional*, defaults to `20`):
            Training steps.
    """

    def __init__(self, args: AdaGRPOConfig, names: Sequence[str], share: float = 0.5, steps: int = 20):
        self.threshold, self.share, self.steps = args.positive_threshold, share, steps
        self._choice = list(dict.fromkeys(names)) if args.success_reward is None and len(names) > 1 else []
        self._signal = "the reward" if args.success_reward is None else f"the reward of {args.success_reward}"
        if self._choice:
            self._signal = f"the weighted total of {' and '.join(self._choice)}"
        rows = max(args.generation_batch_size, 2)
        self._of_others = (rows / (rows - 1)) ** 2
        # Every rollout teaches where it is not compared with its own pool, whatever its neighbours earned.
        self._causes = list(FOUND) if args.baseline == "pool" else ["unscored"]
        self._matters = args.sampling_strategy.is_sequential or args.depends_on_pass_rates
        self._early = 2  # generations still to be looked at
        self._range = (math.inf, -math.inf)
        self._last_good: dict[str, int] = {}  # the last step at which it was not so
        self._warned: set[str] = set()
        if self._choice and self._matters:
            logger.warning(
                f"There are {len(names)} reward functions and no success_reward, so a rollout counts as positive when "
                f"{self._signal} exceeds positive_threshold ({self.threshold:g}). {self._success_reward_remedy()}"
            )

    def observe(self, metrics: Mapping[str, float], step: int) -> None:
        """
        Args:
            metrics (`Mapping[str, float]`):
                What [`~core.sampling_metrics`] returned of this generation.
            step (`int`):
                Training step, from 1.
        """
        low, high = metrics["success_reward/min"], metrics["success_reward/max"]
        if self._early and not math.isnan(low):
            self._range = min(self._range[0], low), max(self._range[1], high)
            self._early -= 1
            if not self._early:
                self._warn_of_threshold(*self._range, metrics)
        self._look_at_baseline(metrics.get("baseline/explained_variance", math.nan), step)
        for cause in self._causes:
            share = metrics[f"frac_{cause}"]
            if share <= self.share:
                self._last_good[cause] = step
            since = step - self._last_good.setdefault(cause, step - 1)
            if since >= self.steps and cause not in self._warned:
                self._warned.add(cause)
                remedy = REMEDIES[cause]
                if self._one_sided(low, high):
                    remedy = self._threshold_remedy(low, high, metrics["success_reward/mean"])
                logger.warning(
                    f"For {since} steps, more than {self.share:.0%} of the prompts have found {FOUND[cause]} "
                    f"(ada/frac_{cause} is {share:.0%} now); {metrics['frac_zero_advantage_groups']:.0%} of the prompts have no "
                    f"gradient. {remedy}"
                )

    def _look_at_baseline(self, explained: float, step: int) -> None:
        # Against the mean of all *other* rollouts, which explains less than their own mean does.
        if not 1 - (1 - explained) / self._of_others < WORSE_THAN_NOTHING:  # nor is NaN
            self._last_good["baseline"] = step
        since = step - self._last_good.setdefault("baseline", step - 1)
        if since >= self.steps and "baseline" not in self._warned:
            self._warned.add("baseline")
            logger.warning(
                f"For {since} steps, the baseline has been a worse guess at the rewards than their own mean "
                f"(ada/baseline/explained_variance is {explained:.2f} now), so that it adds noise. Use more rows per step, or "
                "baseline='batch', which compares with the other rollouts of the step alone."
            )

    def _one_sided(self, low: float, high: float) -> bool:
        """Whether rewards differ and the threshold does not."""
        return low < high and not low <= self.threshold < high

    def _warn_of_threshold(self, low: float, high: float, metrics: Mapping[str, float]) -> None:
        mean, pass_rate = metrics["success_reward/mean"], metrics["pass_rate/mean"]
        if self._one_sided(low, high) or threshold_outside_reward_range(low, high, mean, pass_rate):
            nearly = "" if self._one_sided(low, high) else "Nearly "
            which = "every" if pass_rate > 0.5 else "no"
            words = f"{nearly}{which} rollout of the first two generations is positive. "
            logger.warning(f"{words[0].upper()}{words[1:]}{self._threshold_remedy(low, high, mean)}")

    def _threshold_remedy(self, low: float, high: float, mean: float) -> str:
        words = (
            f"{self._signal[0].upper()}{self._signal[1:]} ranges from {low:.3g} to {high:.3g} and positive_threshold is "
            f"{self.threshold:g}. "
        )
        if self._choice:
            words += f"{self._success_reward_remedy()} Otherwise set "
        elif high <= self.threshold:
            words += (
                f"If a good answer earns more than {self.threshold:g}, the prompts are hard so far; otherwise set "
            )
        else:
            words += "Set "
        until_then = (
            "sampling and weights treat all prompts alike"
            if self._matters
            else "pass rates in metrics and records say nothing; training does not depend on them"
        )
        return words + (
            f"positive_threshold to what separates good from bad, between {low:.3g} and {high:.3g} (the mean is "
            f"{mean:.3g}): until then {until_then}."
        )

    def _success_reward_remedy(self) -> str:
        return (
            "If one of them alone says whether an answer is right, name it: success_reward="
            + " or success_reward=".join(map(repr, self._choice))
            + "."
        )
