"""Elimination without a barrier: the same algorithm, whatever finishes first."""

import heapq
import random

import numpy as np
import pytest

from ada_trl.core import ExitCondition, Rollout, eliminate, eliminate_async


M, N = 4, 3
LOOP = {"samples_per_round": M, "max_rounds": N, "positive_threshold": 0.7}
BALANCE = ExitCondition(2, 2)


class Requests:
    """Rewards are a function of (prompt, draw); when a request is answered is up to `duration`."""

    def __init__(self, reward, duration, unavailable=()):
        self.reward, self.duration, self.unavailable = reward, duration, unavailable
        self.now, self.under_way, self.log, self.most = 0.0, [], [], 0

    def submit(self, prompt, first_draw):
        self.log.append((prompt, first_draw // M))
        heapq.heappush(self.under_way, (self.now + self.duration(prompt, first_draw // M), prompt, first_draw))
        self.most = max(self.most, len(self.under_way))

    def collect(self):
        self.now, prompt, first_draw = heapq.heappop(self.under_way)
        if (prompt, first_draw // M) in self.unavailable:
            return [(prompt, first_draw, None)]
        draws = range(first_draw, first_draw + M)
        return [(prompt, first_draw, [Rollout(d, self.reward(prompt, d), self.reward(prompt, d)) for d in draws])]


def reward(prompt, draw):
    return float(random.Random(f"{prompt} {draw}").random() < 0.05 + 0.1 * (prompt % 10))


def run(num_prompts=40, duration=lambda prompt, k: 1.0, max_in_flight=1000, unavailable=(), **options):
    requests = Requests(reward, duration, unavailable)
    pools = eliminate_async(
        num_prompts, requests.submit, requests.collect, BALANCE, max_in_flight=max_in_flight, **LOOP | options
    )
    return pools, requests


def rounds(num_prompts=40):
    def draw(rows):
        return [Rollout(d, reward(prompt, d), reward(prompt, d)) for prompt, d in rows]

    return eliminate(num_prompts, draw, BALANCE, **LOOP)


@pytest.mark.parametrize(
    "options", [{}, {"barrier": True}, {"speculate_below": 10}, {"speculate_below": 40}], ids=lambda o: str(o)
)
@pytest.mark.parametrize("max_in_flight", [1, 3, 1000])
def test_same_pools_as_in_rounds_whatever_the_speed(options, max_in_flight):
    rng = random.Random(0)
    speculate_below = min(options.get("speculate_below", 0), max_in_flight)
    options = options | {"speculate_below": speculate_below, "max_in_flight": max_in_flight}
    pools, requests = run(duration=lambda *_: rng.random(), **options)
    assert [pool.rollouts for pool in pools] == [pool.rollouts for pool in rounds()]
    assert requests.most <= max_in_flight
    assert {len(pool) for pool in pools} == {4, 8, 12}


def test_a_slow_request_holds_nobody_up_without_a_barrier():
    """Three prompts that need all rounds, each slow in another one."""

    def duration(prompt, k):
        return 100.0 if (prompt, k) in {(0, 0), (10, 1), (20, 2)} else 1.0

    _, free = run(duration=duration)
    _, barrier = run(duration=duration, barrier=True)
    assert (free.now, barrier.now) == (102.0, 300.0)
    order = [k for _, k in barrier.log]
    assert order == sorted(order)


def test_speculation_shortens_the_tail_and_only_that():
    """One prompt needs three rounds of 10 each; the others are done at once."""

    def duration(prompt, k):
        return 10.0 if prompt == 0 else 1.0

    _, patient = run(num_prompts=10, duration=duration)
    _, eager = run(num_prompts=10, duration=duration, speculate_below=3)
    assert patient.now == 30.0
    assert 10.0 < eager.now < 15.0
    assert len(eager.log) - len(patient.log) <= 3
    assert [prompt for prompt, _ in eager.log[:10]] == list(range(10))  # not before every prompt has been asked


def test_an_unneeded_round_does_not_reach_the_pool():
    pools, requests = run(speculate_below=40)
    assert len(requests.log) > sum(len(pool) for pool in pools) // M
    assert [pool.rollouts for pool in pools] == [pool.rollouts for pool in rounds()]


def test_a_speculative_round_that_fails_waits_for_its_turn():
    """Round 1 of prompt 0 is unavailable and is known before round 0 is answered."""

    def duration(prompt, k):
        return 10.0 if k == 0 else 1.0

    pools, _ = run(num_prompts=1, duration=duration, speculate_below=3, unavailable={(0, 1)})
    assert len(pools[0]) == M


def test_waiting_prompts_are_served_in_order():
    _, requests = run(num_prompts=6, max_in_flight=2)
    assert [prompt for prompt, k in requests.log if k == 0] == list(range(6))


def test_a_prompt_that_can_get_no_more_keeps_its_pool():
    pools, requests = run(unavailable={(0, 1)})
    assert len(pools[0]) == M
    assert sum(prompt == 0 for prompt, _ in requests.log) == 2
    assert [len(p) for p in pools[1:]] == [len(p) for p in rounds()[1:]]


def test_progress_counts_active_prompts_and_rollouts():
    shown = []
    pools, _ = run(progress=lambda active, rollouts: shown.append((active, rollouts)))
    assert shown[-1] == (0, sum(map(len, pools)))
    assert [rollouts for _, rollouts in shown] == sorted(rollouts for _, rollouts in shown)


def test_no_prompts_at_all():
    assert run(num_prompts=0)[0] == []


def test_distribution_does_not_depend_on_the_barrier_or_on_lengths():
    """
    Sizes and pass rates of pools from independent randomness, when a positive takes ten times as long as a negative.
    Five standard errors of the difference of two means.
    """
    samples = []
    for seed, barrier in ((1, False), (2, True)):
        rng = np.random.default_rng(seed)
        drawn = {}

        def fresh(prompt, draw, rng=rng, drawn=drawn):
            return drawn.setdefault((prompt, draw), float(rng.random() < 0.2))

        requests = Requests(
            fresh, lambda prompt, k, fresh=fresh: 1.0 + 9.0 * max(fresh(prompt, k * M + i) for i in range(M))
        )
        pools = eliminate_async(
            4000, requests.submit, requests.collect, BALANCE, max_in_flight=64, barrier=barrier, **LOOP
        )
        samples.append(np.array([(len(pool), pool.pass_rate) for pool in pools]))
    one, other = samples
    errors = np.sqrt(one.var(axis=0, ddof=1) / len(one) + other.var(axis=0, ddof=1) / len(other))
    assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) < 5 * errors).all()
    assert (errors < 0.05 * one.mean(axis=0)).all()
