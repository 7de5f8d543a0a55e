"""Pure Python and NumPy implementation of the algorithm, without torch and TRL."""

from .advantages import expected_rounds, group_advantages, normalize_rewards, prompt_weight
from .allocation import allocate, check_budget
from .baselines import (
    BaselineEstimate,
    add_batch_information,
    batch_leave_one_out_baseline,
    explained_variance,
    posterior_advantages,
    posterior_baselines,
    shift_by_batch_residual,
)
from .empirical_bayes import PromptFeatures, RewardEstimator, RunningRewardStd
from .exit_conditions import ExitCondition
from .grid_selector import GridSelector
from .joint_pass_rate import JointPassRate
from .metrics import (
    completion_metrics,
    mean_and_std,
    rollouts_by_estimate,
    sampling_metrics,
    zero_gradient_probability,
)
from .pass_rate_ema import EMAPassRate, brier_metrics
from .pool import Pool, Rollout
from .prompt_id import prompt_identity, prompt_key, prompt_text
from .selection import select_group
from .sequential_sampling import Draw, eliminate, eliminate_async


__all__ = [
    "BaselineEstimate",
    "Draw",
    "EMAPassRate",
    "ExitCondition",
    "GridSelector",
    "JointPassRate",
    "Pool",
    "PromptFeatures",
    "RewardEstimator",
    "Rollout",
    "RunningRewardStd",
    "add_batch_information",
    "allocate",
    "batch_leave_one_out_baseline",
    "brier_metrics",
    "check_budget",
    "completion_metrics",
    "eliminate",
    "eliminate_async",
    "expected_rounds",
    "explained_variance",
    "group_advantages",
    "mean_and_std",
    "normalize_rewards",
    "posterior_advantages",
    "posterior_baselines",
    "prompt_identity",
    "prompt_key",
    "prompt_text",
    "prompt_weight",
    "rollouts_by_estimate",
    "sampling_metrics",
    "select_group",
    "shift_by_batch_residual",
    "zero_gradient_probability",
]
