"""The algorithm, pure: no TRL, no transformers, no model. Everything here is tested on scripted pools."""

from .advantages import group_advantages, prompt_weight
from .exit_conditions import ExitCondition
from .metrics import sampling_metrics, zero_signal_probability
from .pool import Pool, Rollout
from .scheduler import Draw, eliminate
from .selection import select_group


__all__ = [
    "Draw",
    "ExitCondition",
    "Pool",
    "Rollout",
    "eliminate",
    "group_advantages",
    "prompt_weight",
    "sampling_metrics",
    "select_group",
    "zero_signal_probability",
]
