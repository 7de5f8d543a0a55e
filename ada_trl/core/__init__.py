"""The algorithm, pure: no TRL, no transformers, no model. Everything here is tested on scripted pools."""

from .advantages import expected_rounds, group_advantages, normalize_rewards, prompt_weight
from .allocation import allocate, check_budget
from .baselines import (
    Prior,
    batch_priors,
    explained_variance,
    posterior_advantages,
    posterior_baselines,
    recentred,
)
from .belief import Belief, Expectation, RewardScale
from .counts import EMAPassRate, brier_metrics
from .elimination import Draw, eliminate, eliminate_per_prompt
from .exit_conditions import ExitCondition
from .identity import prompt_identity, prompt_key, prompt_text
from .metrics import completion_metrics, mean_and_std, samples_by_estimate, sampling_metrics, zero_signal_probability
from .pool import Pool, Rollout
from .selection import select_group


__all__ = [
    "Belief",
    "Draw",
    "EMAPassRate",
    "ExitCondition",
    "Expectation",
    "Pool",
    "Prior",
    "RewardScale",
    "Rollout",
    "allocate",
    "batch_priors",
    "brier_metrics",
    "check_budget",
    "completion_metrics",
    "eliminate",
    "eliminate_per_prompt",
    "expected_rounds",
    "explained_variance",
    "group_advantages",
    "mean_and_std",
    "posterior_advantages",
    "posterior_baselines",
    "normalize_rewards",
    "prompt_identity",
    "prompt_key",
    "prompt_text",
    "prompt_weight",
    "samples_by_estimate",
    "sampling_metrics",
    "recentred",
    "select_group",
    "zero_signal_probability",
]
