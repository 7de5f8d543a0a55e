"""Allocation of a fixed total of rollouts to prompts."""

import math
from collections.abc import Sequence

import numpy as np


AllocationRule = str | float  # a name, or the exponent of the power

RULES = ("power", "variance", "reward_std")

_SMALLEST_WEIGHT = 1e-100  # relative to the largest: an extreme exponent must not underflow to 0


def allocate(
    pass_rates: Sequence[float],
    total: int,
    *,
    min_samples: int,
    max_samples: int,
    rule: AllocationRule = "power",
    epsilon: float = 0.01,
) -> list[int]:
    """
    Split `total` rollouts over prompts by their estimated pass rates
    ([Reinforce-Ada](https://huggingface.co/papers/2510.04996), Reinforce-Ada-Est, step 2).

    | `rule` | N_x ∝ | |
    |---|---|---|
    | `"power"` | (p̂ + ε)^(−1/2) | half of the log objective's 1/p, in rollouts |
    | a number a | (p̂ + ε)^(−a) | 0 is uniform |
    | `"variance"` | √((1 − p̂ + ε) / (p̂ + ε)) | appendix B: least gradient variance of log p at a fixed total |
    | `"reward_std"` | √((p̂ + ε)(1 − p̂ + ε)) | most for pass rates of one half, where rewards vary most |

    The variance rule minimizes Σ_x p(1−p) / (N_x p²), the variance of Σ_x ∇p / p from N_x rollouts each. The sum over
    all rollouts *is* that gradient only if each advantage is weighted by 1 / (p N_x) ∝ 1/√(p(1−p)): divide by the
    standard deviation and use no prompt weight. With other weights the allocation has no optimality property.

    Bounds are met by water-filling: N_x is the integer part or the next integer of clip(c · w_x, `min_samples`,
    `max_samples`), with the one c for which the clipped values sum to `total`. So prompts that are at no bound keep
    their exact proportions, up to rounding. The rest of `total` goes to the largest remainders, and among equal
    estimates to the earlier prompts.

    The result is deterministic and monotone (a harder prompt never gets less than an easier one; with `"reward_std"`,
    one closer to a half), and follows a permutation of the prompts, except that equal estimates which cannot get equal
    integers differ by position.

    Args:
        pass_rates (`Sequence[float]`):
            p̂, one per prompt, between 0 and 1 (both included).
        total (`int`):
            Number of rollouts to allocate, exactly.
        min_samples, max_samples (`int`):
            Fewest and most rollouts of a prompt (N_min, N_max).
        rule (`str` or `float`, *optional*, defaults to `"power"`):
            `"power"`, `"variance"`, `"reward_std"`, or the exponent of the power, at least 0.
        epsilon (`float`, *optional*, defaults to `0.01`):
            ε > 0 keeps the weights finite at p̂ = 0 and positive at p̂ = 1.

    Returns:
        `list[int]`: N_x, one per prompt.

    Raises:
        `ValueError`: if no integers within the bounds sum to `total` (see [`check_budget`]), or for a pass rate
            outside [0, 1] or an unknown rule (see [`check_rule`]).
    """
    check_budget(len(pass_rates), total, min_samples=min_samples, max_samples=max_samples)
    if not len(pass_rates):
        return []
    rates = np.asarray(pass_rates, dtype=np.float64)
    # Largest first: sums over sorted values do not depend on the order in which the prompts were given.
    order = np.argsort(np.abs(rates - 0.5) if rule == "reward_std" else rates, kind="stable")
    weights = _weights(rates[order], rule, epsilon)
    real = _water_fill(weights, total, min_samples, max_samples)
    integers = np.floor(real).astype(np.int64)
    left_over = total - int(integers.sum())
    integers[np.argsort(integers - real, kind="stable")[:left_over]] += 1
    budgets = np.empty_like(integers)
    budgets[order] = integers
    return budgets.tolist()


def check_budget(num_prompts: int, total: int, *, min_samples: int, max_samples: int) -> None:
    """
    Check that `num_prompts` integers between `min_samples` and `max_samples` can sum to `total`.

    Raises:
        `ValueError`: if they cannot, or if the bounds are negative or crossed.
    """
    if not 0 <= min_samples <= max_samples:
        raise ValueError(
            f"min_samples ({min_samples}) must be between 0 and max_samples ({max_samples}). Lower min_samples or "
            "raise max_samples."
        )
    if total < num_prompts * min_samples:
        raise ValueError(
            f"A budget of {total} rollouts cannot give {num_prompts} prompts min_samples ({min_samples}) each, which "
            f"takes {num_prompts * min_samples}. Lower min_samples or raise the budget."
        )
    if total > num_prompts * max_samples:
        raise ValueError(
            f"A budget of {total} rollouts does not fit into {num_prompts} prompts with max_samples ({max_samples}) "
            f"each, which takes {num_prompts * max_samples}. Raise max_samples or lower the budget."
        )


def check_rule(rule: AllocationRule) -> AllocationRule:
    """
    Return the name of a rule unchanged, and any other rule as a number, the exponent of the power.

    Raises:
        `ValueError`: for an unknown name or an exponent that is negative, infinite or NaN.
    """
    if rule in RULES:
        return rule
    try:
        exponent = float(rule)
    except (TypeError, ValueError):
        exponent = math.nan
    if not 0 <= exponent < math.inf:
        raise ValueError(
            f"allocation_rule ({rule!r}) must be one of {', '.join(map(repr, RULES))}, or a number of at least 0, the "
            "power's exponent: 0 for equal budgets, 0.5 for 'power'."
        )
    return exponent


def _weights(pass_rates: np.ndarray, rule: AllocationRule, epsilon: float) -> np.ndarray:
    """
    Compute weights `(P,)` in descending order, of which the largest is 1, from pass rates `(P,)` in the order of the
    rule.
    """
    is_valid = (pass_rates >= 0) & (pass_rates <= 1)
    if not is_valid.all():
        raise ValueError(
            f"Pass rates must be between 0 and 1, got {pass_rates[~is_valid][0]}. Replace unknown ones by a prior "
            "mean."
        )
    shifted = pass_rates + epsilon
    if rule == "variance":
        weights = np.sqrt((1 - pass_rates + epsilon) / shifted)
    elif rule == "reward_std":
        weights = np.sqrt(shifted * (1 - pass_rates + epsilon))
    else:
        exponent = 0.5 if rule == "power" else float(check_rule(rule))
        weights = (shifted / shifted[0]) ** -exponent
    weights = np.minimum.accumulate(weights)  # neighboring floats may round the other way round
    return np.maximum(weights / weights[0], _SMALLEST_WEIGHT)


def _water_fill(weights: np.ndarray, total: int, low: int, high: int) -> np.ndarray:
    """
    Compute clip(c · w, `low`, `high`) with the c that makes the sum `total`, for weights in descending order.

    The sum is piecewise linear in c with kinks where a prompt leaves `low` or reaches `high`. At any c the prompts at
    `high` come first, those at `low` last, and the free ones between them, so that the sum is known at all kinks at
    once; between two kinks c follows from the free ones.
    """
    leaves_low, reaches_high = low / weights, high / weights  # both ascending
    kinks = np.sort(np.concatenate([leaves_low, reaches_high]))  # (2 * num_prompts,)
    # Summed from the small end, so that no small weight is lost in the difference of two large sums.
    from_here = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]])

    at_high = np.searchsorted(reaches_high, kinks, side="right")
    not_at_low = np.searchsorted(leaves_low, kinks, side="right")
    sums = (
        high * at_high
        + low * (len(weights) - not_at_low)
        + kinks * (from_here[at_high] - from_here[not_at_low])  # the free ones
    )
    upper = min(int(np.searchsorted(sums, total)), len(kinks) - 1)
    c = kinks[upper]
    if upper:
        first, last = at_high[upper - 1], not_at_low[upper - 1]
        free = weights[first:last].sum()
        if free:
            c = (total - high * first - low * (len(weights) - last)) / free
    return np.clip(c * weights, low, high)
