"""
Pure Python and NumPy implementation of the algorithm, without torch and TRL.

| [Reinforce-Ada](https://huggingface.co/papers/2510.04996) | here |
|---|---|
| Algorithm 2, successive elimination | [`eliminate`], and without a barrier [`eliminate_async`] |
| exit conditions *pos* and *balance* | [`ExitCondition`] |
| downsampling to a balanced group | [`select_group`] |
| advantages with global statistics | [`group_advantages`] |
| weight of the power objective | [`prompt_weight`] |
| Est, step 1: pass rates from an EMA of counts | [`EMAPassRate`]; value networks are in `ada_trl.pass_rates` |
| Est, step 2: allocation | [`allocate`] |

Not in the paper: [`batch_leave_one_out_baselines`], and [`posterior_baselines`] with a [`RewardEstimator`].
"""

from .advantages import group_advantages, normalize_rewards, prompt_weight
from .allocation import allocate, check_budget
from .baselines import (
    BaselineEstimate,
    add_batch_information,
    baseline_advantages,
    batch_leave_one_out_baselines,
    explained_variance,
    posterior_baselines,
    shift_by_batch_residual,
)
from .empirical_bayes import PromptFeatures, RewardEstimator, RunningRewardStd
from .metrics import completion_metrics, sampling_metrics
from .pass_at_k import pass_at_k, pass_at_k_metrics
from .pass_rate_ema import EMAPassRate, brier_metrics
from .pool import Pool, Rollout
from .prompt_id import prompt_key
from .selection import select_group
from .sequential_sampling import ExitCondition, eliminate, eliminate_async
