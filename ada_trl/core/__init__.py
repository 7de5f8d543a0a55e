"""The algorithm, pure: no TRL, no transformers, no model. Everything here is tested on scripted pools."""

from .advantages import group_advantages, prompt_weight
from .exit_conditions import ExitCondition
from .metrics import completion_metrics, sampling_metrics, zero_signal_probability
from .pool import Pool, Rollout
from .scheduler import Draw, eliminate, eliminate_per_prompt
from .selection import select_group


__all__ = [
    "Draw",
    "ExitCondition",
    "Pool",
    "Rollout",
    "completion_metrics",
    "eliminate",
    "eliminate_per_prompt",
    "group_advantages",
    "prompt_weight",
    "sampling_metrics",
    "select_group",
    "zero_signal_probability",
]
