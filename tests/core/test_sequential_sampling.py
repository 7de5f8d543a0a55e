"""Successive elimination: which prompts stay active, and the same pools without a barrier in any order of arrival."""

import heapq
import itertools
import math
import random

import numpy as np
import pytest

from ada_trl.core import ExitCondition, Rollout, eliminate, eliminate_async

from .simulation import assert_mean, sample_pools


BALANCE = ExitCondition(2, 2)
POS = ExitCondition(1)
NAN = math.nan
MIXED = [1, 0, 1, 0] + [NAN] * 8
HARD = [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
EASY = [1] * 12
NEVER = [0] * 12
LOOP = {"samples_per_round": 4, "max_rounds": 3, "positive_threshold": 0.7}


def sample_scripts(*scripts, exit_condition=BALANCE):
    """The pools of prompts whose rewards are given in order, and the prompts that were sampled in each round."""
    rounds = []

    def sample_round(requests):
        rounds.append([prompt for prompt, _ in itertools.groupby(prompt for prompt, _ in requests)])
        return [
            Rollout(index, scripts[prompt][index], scripts[prompt][index], location=(prompt, index))
            for prompt, index in requests
        ]

    return eliminate(len(scripts), sample_round, exit_condition, **LOOP), rounds


# In rounds


def test_balance_samples_a_prompt_until_both_quotas_are_met_or_the_cap_is_reached():
    pools, rounds = sample_scripts(MIXED, HARD, EASY, HARD)
    assert rounds == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert [len(pool) for pool in pools] == [4, 12, 12, 12]
    assert [BALANCE(pool) for pool in pools] == [True, True, False, True]
    for prompt, pool in enumerate(pools):  # duplicates have separate pools
        assert [rollout.location for rollout in pool.rollouts] == [(prompt, index) for index in range(len(pool))]


def test_pos_retires_an_easy_prompt_after_one_round():
    pools, rounds = sample_scripts(MIXED, HARD, EASY, NEVER, exit_condition=POS)
    assert rounds == [[0, 1, 2, 3], [1, 3], [3]]
    assert [len(pool) for pool in pools] == [4, 8, 4, 12]


def test_unscored_rollouts_count_towards_the_cap_only():
    (pool,), rounds = sample_scripts([NAN] * 12, exit_condition=POS)
    assert rounds == [[0]] * 3
    assert (len(pool), pool.scored, pool.positives, pool.negatives) == (12, 0, 0, 0)


@pytest.mark.parametrize(("p", "m", "n"), [(0.1, 1, 400), (0.3, 1, 400), (0.7, 1, 400), (0.05, 8, 4), (0.2, 4, 3)])
def test_expected_rollouts_until_the_first_positive(p, m, n):
    """1 / p without a cap."""
    pools = sample_pools(np.full(4000, p), POS, samples_per_round=m, max_rounds=n)
    assert_mean([len(pool) for pool in pools], m * (1 - (1 - p) ** (m * n)) / (1 - (1 - p) ** m))


# Without a barrier


class Requests:
    """A server on which the rewards are a function of (prompt, index) and requests take `duration`."""

    def __init__(self, reward, duration, unavailable=()):
        self.reward, self.duration, self.unavailable = reward, duration, unavailable
        self.now, self.in_flight, self.log = 0.0, [], []

    def submit(self, prompt, first_index):
        self.log.append((prompt, first_index // 4))
        heapq.heappush(self.in_flight, (self.now + self.duration(prompt, first_index // 4), prompt, first_index))

    def collect(self):
        self.now, prompt, first_index = heapq.heappop(self.in_flight)
        if (prompt, first_index // 4) in self.unavailable:
            return [(prompt, first_index, None)]
        indices = range(first_index, first_index + 4)
        return [(prompt, first_index, [Rollout(i, self.reward(prompt, i), self.reward(prompt, i)) for i in indices])]


def reward(prompt, index):
    return float(random.Random(f"{prompt} {index}").random() < 0.05 + 0.1 * (prompt % 10))


def run(num_prompts=40, duration=lambda prompt, k: 1.0, unavailable=(), **options):
    requests = Requests(reward, duration, unavailable)
    pools = eliminate_async(num_prompts, requests.submit, requests.collect, BALANCE, **LOOP | options)
    return pools, requests


def pools_of_rounds(num_prompts=40):
    def sample_round(requests):
        return [Rollout(i, reward(prompt, i), reward(prompt, i)) for prompt, i in requests]

    return eliminate(num_prompts, sample_round, BALANCE, **LOOP)


@pytest.mark.parametrize("options", [{}, {"speculate_below": 10}, {"speculate_below": 40}], ids=str)
def test_same_pools_as_in_rounds_in_any_order_of_arrival(options):
    rng, progress = random.Random(0), []

    def duration(prompt, k):  # longer for positives, as if completions that succeed were longer
        return rng.random() * (1 + 9 * max(reward(prompt, 4 * k + i) for i in range(4)))

    pools, requests = run(duration=duration, progress=lambda *counts: progress.append(counts), **options)
    assert [pool.rollouts for pool in pools] == [pool.rollouts for pool in pools_of_rounds()]
    assert {len(pool) for pool in pools} == {4, 8, 12}
    unneeded = len(requests.log) - sum(map(len, pools)) // 4
    assert (
        unneeded > 0 if options.get("speculate_below") == 40 else unneeded >= 0
    )  # such rounds do not reach the pools
    assert progress[-1] == (0, sum(map(len, pools)))
    assert [rollouts for _, rollouts in progress] == sorted(rollouts for _, rollouts in progress)


def test_a_slow_request_does_not_delay_other_prompts():
    """Three prompts that need all rounds, each with one slow request in another round: with a barrier they would take 300."""

    def duration(prompt, k):
        return 100.0 if (prompt, k) in {(0, 0), (10, 1), (20, 2)} else 1.0

    assert run(duration=duration)[1].now == 102.0


def test_speculative_rounds_shorten_the_tail_after_every_prompt_was_requested():
    """One prompt needs three rounds of 10 each; the others finish at once."""

    def duration(prompt, k):
        return 10.0 if prompt == 0 else 1.0

    _, without = run(num_prompts=10, duration=duration)
    _, speculative = run(num_prompts=10, duration=duration, speculate_below=3)
    assert without.now == 30.0
    assert 10.0 < speculative.now < 15.0
    assert len(speculative.log) - len(without.log) <= 3
    assert [prompt for prompt, _ in speculative.log[:10]] == list(range(10))


@pytest.mark.parametrize("speculate_below", [0, 3])
def test_a_prompt_whose_request_fails_keeps_its_earlier_rollouts(speculate_below):
    """With speculation, the failure of round 1 of prompt 0 is known before round 0 has returned."""
    pools, requests = run(
        duration=lambda prompt, k: 10.0 if k == 0 else 1.0, speculate_below=speculate_below, unavailable={(0, 1)}
    )
    assert len(pools[0]) == 4
    assert [len(pool) for pool in pools[1:]] == [len(pool) for pool in pools_of_rounds()[1:]]
    assert speculate_below or sum(prompt == 0 for prompt, _ in requests.log) == 2


def test_no_prompts():
    assert run(num_prompts=0)[0] == []
