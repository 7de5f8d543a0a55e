"""
Advantages: how much better than its baseline each rollout is. Read this file first.

An advantage is a function of all rollouts of a generation batch ([`~core.Rollouts`]) that returns one number per
rollout, `(N,)`. [`pool_advantages`] is the paper's, [`batch_advantages`] the one that we recommend, and any other
function with the same signature can be passed to the trainer: `AdaGRPOTrainer(..., advantage_func=f)`.

The gradient Σ_i A_i ∇log π(y_i) is unbiased if a rollout has no influence on its own baseline, weight and divisor, and
if all rollouts are trained on (or a selection that does not depend on their rewards). [`batch_advantages`] with
`scale="none"` has this property; the mean of the prompt's own pool does not, but its bias is a positive factor per
prompt.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from .rollouts import Rollouts


PromptWeighting = str | float  # a name of `POWERS`, or α
Scale = Literal["none", "group", "batch"]

POWERS = {"inverse": 0.0, "inverse_sqrt": 0.5, "none": 1.0}  # α of the power objective by its name
STD_EPSILON = 1e-4  # as in TRL's GRPOTrainer
LARGEST_DEVIATION = 1.5  # scaled residuals of the batch baseline are clipped to ± this
MAX_ADVANTAGE = 1e12  # larger ones overflow float32 in the loss or in the norm of the gradient, and weights become NaN


def pool_advantages(
    rollouts: Rollouts, *, weighting: PromptWeighting = "inverse_sqrt", scale: Scale = "none"
) -> np.ndarray:
    """
    Compute A_i = w(p̂) · (r_i − r̄) [/ (σ + 1e-4)], with r̄ and p̂ of **all rollouts of the prompt** and the real
    reward r_i ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Algorithm 2, global statistics).

    Selecting half positives and half negatives of a pool gives the prompt's expected gradient another factor,
    [(1−p)² + p²] / (2p(1−p)), in the paper as here.

    Args:
        rollouts ([`~core.Rollouts`]):
            All rollouts of the generation batch.
        weighting (`str` or `float`, *optional*, defaults to `"inverse_sqrt"`):
            See [`prompt_weights`].
        scale (`str`, *optional*, defaults to `"none"`):
            σ to divide by: none, the standard deviation of the prompt's rewards (`"group"`), or of all rewards
            (`"batch"`).

    Returns:
        `np.ndarray` of shape `(N,)`: exactly 0 for rollouts without a reward, and for a prompt whose rewards are all
        equal.
    """
    factor_P = prompt_weights(rollouts, weighting)
    if scale == "group":
        factor_P = factor_P / (rollouts.std_P + STD_EPSILON)
    elif scale == "batch":
        factor_P = factor_P / (_std(rollouts.reward_N[rollouts.has_reward_N]) + STD_EPSILON)
    advantage_N = factor_P[rollouts.prompt_N] * (rollouts.reward_N - rollouts.mean_P[rollouts.prompt_N])
    has_advantage_N = rollouts.has_reward_N & ~rollouts.has_zero_variance_P[rollouts.prompt_N]
    return _clip(np.where(has_advantage_N, advantage_N, 0.0))


def batch_advantages(rollouts: Rollouts, *, scale: Scale = "none") -> np.ndarray:
    """
    Compute A_i = r_i − Σ_{j ≠ i} r_j / (N − 1): the mean reward of all *other* rollouts of the generation batch is the
    baseline (leave-one-out as in RLOO, over the batch as in REINFORCE++).

    The baseline contains nothing that r_i had an influence on, so the gradient is unbiased for any number of rollouts
    per prompt, also if unsolved prompts are sampled again in later steps (Wald's identity).

    Args:
        rollouts ([`~core.Rollouts`]):
            All rollouts of the generation batch.
        scale (`str`, *optional*, defaults to `"none"`):
            With `"batch"`, divide by σ + 1e-4, σ the standard deviation of all other rewards, and clip to
            ±[`LARGEST_DEVIATION`]: the gradient is that of the mean *clipped* reward, in which outliers count but do
            not dominate.

    Returns:
        `np.ndarray` of shape `(N,)`: exactly 0 for rollouts without a reward, and if all rewards are equal.

    Raises:
        `ValueError`: for the scale of a group, which may have a single rollout.
    """
    if scale == "group":
        raise ValueError("scale_rewards ('group') must be 'none' or 'batch' with baseline='batch'. Use one of these.")
    advantage_N = np.zeros(len(rollouts))
    has_reward_N = rollouts.has_reward_N
    rewards = rollouts.reward_N[has_reward_N]
    num_others = len(rewards) - 1
    if num_others < 1 or rewards.min() == rewards.max():
        return advantage_N
    others_mean = (rewards.sum() - rewards) / num_others
    advantage_N[has_reward_N] = rewards - others_mean
    if scale == "batch":
        # Rounding errors of these sums are far below the residual of an outlier, which is clipped, and that of other
        # rewards.
        centered = rewards - rewards.mean()
        others_mean_square = ((centered**2).sum() - centered**2) / num_others
        variance = others_mean_square - ((centered.sum() - centered) / num_others) ** 2
        scaled = (rewards - others_mean) / (np.sqrt(variance.clip(min=0)) + STD_EPSILON)
        advantage_N[has_reward_N] = scaled.clip(-LARGEST_DEVIATION, LARGEST_DEVIATION)
    return _clip(advantage_N)


def prompt_weights(rollouts: Rollouts, weighting: PromptWeighting) -> np.ndarray:
    """
    Compute the weight f'(p̂) = p̂^(α−1) of a power objective J_f = E[f(p(x))], f(p) = p^α / α, for each prompt, `(P,)`
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), v3).

    | `weighting` | α | f'(p) | |
    |---|---|---|---|
    | `"none"` | 1 | 1 | Algorithm 2; f(p) = p |
    | `"inverse_sqrt"` | 1/2 | p^(−1/2) | the hybrid: the other half of 1/p is in the number of rollouts |
    | `"inverse"` | 0 | 1/p | f(p) = log p |

    p̂ is clamped below at one over the number of scored rollouts, which only affects pools without a positive. Without
    a scored rollout the weight is 1.

    Args:
        rollouts ([`~core.Rollouts`]):
            All rollouts of the generation batch.
        weighting (`str` or `float`):
            A name, or α between 0 and 1.
    """
    alpha = POWERS[weighting] if isinstance(weighting, str) else weighting
    smallest_P = 1 / np.maximum(rollouts.scored_P, 1)
    return np.where(rollouts.scored_P > 0, np.fmax(rollouts.pass_rate_P, smallest_P) ** (alpha - 1), 1.0)


def normalize_each_reward(rollouts: Rollouts, weights_F: np.ndarray) -> Rollouts:
    """
    Replace the weighted sums by Σ_k w_k · (r_k − r̄_k) / (σ_k + 1e-4): each reward function is normalized with its
    statistics over the prompt's **whole pool** before the sum, so that functions of a large scale do not dominate
    ([GDPO](https://huggingface.co/papers/2601.05242)). Success rewards stay the same. A function that did not score a
    rollout adds 0 to its sum; a rollout that no function scored keeps the reward NaN.
    """
    total_N = np.zeros(len(rollouts))
    for rewards_N, weight in zip(rollouts.rewards_NF.T, weights_F, strict=True):
        # Of one function, where it scored the rollout.
        of_function = replace(rollouts, reward_N=rewards_N)
        residual_N = rewards_N - of_function.mean_P[rollouts.prompt_N]
        total_N += np.nan_to_num(weight * residual_N / (of_function.std_P[rollouts.prompt_N] + STD_EPSILON))
    return replace(rollouts, reward_N=np.where(np.isnan(rollouts.reward_N), np.nan, total_N))


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _clip(advantage_N: np.ndarray) -> np.ndarray:
    return advantage_N.clip(-MAX_ADVANTAGE, MAX_ADVANTAGE)
