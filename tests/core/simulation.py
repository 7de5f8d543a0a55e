"""Rollouts of known rewards, simulated sampling, and means of samples."""

import math

import numpy as np
import pytest

from ada_trl.core import Candidate, Rollouts, Scoring, Slot, SlotRule, collect_rollouts, sample_slots, sampled_prompts


BINARY = Scoring(weights=(1.0,), threshold=0.7)


def rollouts_of(*pools, success=None, rewards=None, threshold=0.7):
    """
    The record of prompts with these rewards in order of sampling.

    Args:
        pools (`Sequence[float]`):
            Total rewards of each prompt.
        success (`list[Sequence[float]]`, *optional*), rewards (`np.ndarray`, *optional*):
            Success rewards of each prompt, and rewards of all rollouts by function, if these are not the total
            rewards.
    """
    sizes = [len(pool) for pool in pools]
    total = np.concatenate([np.asarray(pool, dtype=float) for pool in pools])
    return Rollouts(
        prompt_N=np.repeat(np.arange(len(sizes)), sizes),
        draw_N=np.concatenate([np.arange(size) for size in sizes]),
        rewards_NF=total[:, None] if rewards is None else np.asarray(rewards, dtype=float),
        reward_N=total,
        success_reward_N=total if success is None else np.concatenate(success).astype(float),
        threshold=threshold,
        num_prompts=len(sizes),
        attempt_N=np.zeros(len(total), dtype=int),
        length_N=np.zeros(len(total), dtype=int),
    )


def by_prompt(rollouts, values_N):
    """The values of each prompt's rollouts."""
    return [values_N[rollouts.prompt_N == prompt].tolist() for prompt in range(rollouts.num_prompts)]


def sample_in_rounds(slots, sample_round):
    """
    Sample slots with a barrier; `sample_round` takes pairs of a slot and a first draw, and returns rewards `(M,)` of
    each.
    """
    requests = []

    def collect():
        round_, requests[:] = list(requests), []
        return [(*request, np.reshape(r, (-1, 1))) for request, r in zip(round_, sample_round(round_), strict=True)]

    sample_slots(slots, lambda slot, draw: requests.append((slot, draw)), collect)
    return collect_rollouts(slots, sampled_prompts(slots))


def sample_binary(pass_rates, *, min_positives, min_negatives=0, samples_per_round, max_rounds, seed=0):
    """All rollouts of prompts with these pass rates, sampled until each has enough positives and negatives."""
    rng, rule = np.random.default_rng(seed), SlotRule(min_positives, min_negatives, max_rounds)
    slots = [Slot(rule, BINARY, [Candidate(i)], samples_per_round) for i in range(len(pass_rates))]

    def sample_round(requests):
        p = np.array([pass_rates[slot] for slot, _ in requests])
        return (rng.random((len(p), samples_per_round)) < p[:, None]).astype(float)

    return sample_in_rounds(slots, sample_round)


def assert_mean(samples, expected, scale=None):
    """
    Assert that the mean of `samples` is within five standard errors of `expected`, and that these are small against
    `scale`.

    Seeds are fixed, so that the tests are deterministic; a wrong formula of a relevant size is dozens of standard
    errors away.
    """
    samples = np.asarray(samples, dtype=float)
    tolerance = 5 * samples.std(ddof=1) / math.sqrt(len(samples))
    assert tolerance < 0.1 * (scale or abs(expected)), "too few samples"
    assert samples.mean() == pytest.approx(expected, abs=tolerance)
