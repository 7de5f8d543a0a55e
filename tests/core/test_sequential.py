"""
Successive elimination: which prompts stay active, and the same rollouts without a barrier in any order of arrival.
"""

import heapq
import math
import random

import numpy as np
import pytest

from ada_trl.core import Candidate, Scoring, Slot, SlotRule, collect_rollouts, sample_slots, sampled_prompts

from .simulation import BINARY, assert_mean, by_prompt, sample_binary, sample_in_rounds


BALANCE, POS = SlotRule(2, 2, 3), SlotRule(1, 0, 3)
NAN = math.nan
MIXED = [1, 0, 1, 0] + [NAN] * 8
HARD = [0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
EASY = [1] * 12
NEVER = [0] * 12


def make_slots(number, rule=BALANCE):
    return [Slot(rule, BINARY, [Candidate(i)], round_size=4) for i in range(number)]


def sample_scripts(*scripts, rule=BALANCE):
    """The rollouts of prompts whose rewards are given in order, their slots, and the prompts of each round."""
    rounds, slots = [], make_slots(len(scripts), rule)

    def sample_round(requests):
        rounds.append([prompt for prompt, _ in requests])
        return [np.array(scripts[prompt][first : first + 4]) for prompt, first in requests]

    return sample_in_rounds(slots, sample_round), slots, rounds


# In rounds


def test_balance_samples_a_prompt_until_both_quotas_are_met_or_the_cap_is_reached():
    rollouts, _, rounds = sample_scripts(MIXED, HARD, EASY, HARD)
    assert rounds == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert rollouts.size_P.tolist() == [4, 12, 12, 12]
    assert by_prompt(rollouts, rollouts.reward_N) == [MIXED[:4], HARD, EASY, HARD]


def test_pos_retires_an_easy_prompt_after_one_round():
    rollouts, _, rounds = sample_scripts(MIXED, HARD, EASY, NEVER, rule=POS)
    assert rounds == [[0, 1, 2, 3], [1, 3], [3]]
    assert rollouts.size_P.tolist() == [4, 8, 4, 12]


def test_unscored_rollouts_count_towards_the_cap_only():
    rollouts, _, rounds = sample_scripts([NAN] * 12, rule=POS)
    assert rounds == [[0]] * 3
    counts = (rollouts.size_P, rollouts.scored_P, rollouts.positives_P, rollouts.negatives_P)
    assert [int(count[0]) for count in counts] == [12, 0, 0, 0]


@pytest.mark.parametrize(("p", "m", "n"), [(0.3, 1, 60), (0.05, 8, 4), (0.2, 4, 3)])
def test_expected_rollouts_until_the_first_positive(p, m, n):
    """1 / p without a cap."""
    rollouts = sample_binary(np.full(4000, p), min_positives=1, samples_per_round=m, max_rounds=n)
    assert_mean(rollouts.size_P, m * (1 - (1 - p) ** (m * n)) / (1 - (1 - p) ** m))


# Candidates of a slot


def play(slot, *rounds):
    for rewards in rounds:
        assert not slot.done
        slot.add_round(np.array(rewards, dtype=float).reshape(len(rewards), -1))
    return slot


def resampling(candidates, scoring=BINARY, **rule):
    return Slot(SlotRule(1, 1, 1, **rule), scoring, [Candidate(i) for i in range(candidates)], round_size=2)


def test_prompts_with_zero_variance_are_replaced_while_candidates_are_left():
    replaced = play(resampling(3), [1.0, 1.0], [0.0, 1.0])
    assert replaced.done and replaced.num_sampled == 2
    prompts = sampled_prompts([replaced])
    assert [(p.first_draw, p.is_trained, p.is_on_distribution) for p in prompts] == [
        (0, False, True),
        (2, True, False),
    ]
    rollouts = collect_rollouts([replaced], prompts)
    assert by_prompt(rollouts, rollouts.reward_N) == [[1, 1], [0, 1]]
    success = play(resampling(2, scoring=Scoring((1.0, 1.0), 0.7, success_column=0)), [[1.0, 0.1], [1.0, 0.2]])
    assert not success.done, "Two correct answers with different length penalties."
    no_gradient = play(resampling(2, scoring=Scoring((0.0, 1.0), 0.7, success_column=0)), [[1.0, 0.5], [0.0, 0.5]])
    assert not no_gradient.done, "A success without a weight, and equal rewards."
    last = play(resampling(2), [1.0, 1.0], [1.0, 1.0])
    assert last.done and sampled_prompts([last])[-1].is_trained, "Without another candidate it stays in the batch."


# The first function defines a success, and returns NaN where it does not apply.
SUCCESS_AND_QUALITY = Scoring((1.0, 1.0), 0.7, success_column=0)
NOTHING = [NAN, NAN]


@pytest.mark.parametrize(
    ("rounds", "is_abstained"),
    [
        ([[[NAN, 0.1], [NAN, 0.2]]], True),
        ([[[NAN, 0.1], [NAN, 0.1]]], True),
        ([[[NAN, 0.1], NOTHING]], True),
        # Without a reward, further rounds may have some.
        ([[NOTHING, NOTHING]] * 3, False),
        ([[NOTHING, NOTHING], [[NAN, 0.1], NOTHING]], True),
        # Scored rollouts decide.
        ([[[0.0, 0.1], [NAN, 0.2]]] * 3, False),
        ([[[1.0, 0.1], [NAN, 0.2]], [[NAN, 0.1], [NAN, 0.2]], [[0.0, 0.1], [NAN, 0.2]]], False),
    ],
)
def test_no_round_follows_where_the_function_of_success_abstains(rounds, is_abstained):
    slot = play(Slot(SlotRule(1, 1, 3), SUCCESS_AND_QUALITY, [Candidate(0)], round_size=2), *rounds)
    assert slot.done
    assert collect_rollouts([slot], sampled_prompts([slot])).is_abstained_P.tolist() == [is_abstained]


def test_a_prompt_on_which_the_function_of_success_abstains_is_replaced_if_its_rewards_are_equal():
    differs, equals = [[NAN, 0.1], [NAN, 0.2]], [[NAN, 0.1], [NAN, 0.1]]
    assert play(resampling(2, SUCCESS_AND_QUALITY), differs).done
    assert not play(resampling(2, SUCCESS_AND_QUALITY), equals).done
    # It says nothing about the next candidate.
    in_rounds = Slot(SlotRule(1, 1, 2), SUCCESS_AND_QUALITY, [Candidate(0), Candidate(1)], round_size=2)
    assert not play(in_rounds, equals, [NOTHING, NOTHING]).done


@pytest.mark.parametrize("compares_each_reward", [False, True])
def test_equal_sums_of_different_rewards_have_zero_variance_unless_each_reward_is_compared(compares_each_reward):
    """With GDPO, which normalizes each reward before the sum, such a group has advantages."""
    slot = resampling(2, Scoring((1.0, 1.0), 0.7), compares_each_reward=compares_each_reward)
    assert play(slot, [[1.0, 0.0], [0.0, 1.0]]).done == compares_each_reward


# Without a barrier


class Requests:
    """A server on which the rewards are a function of (slot, draw) and requests take `duration`."""

    def __init__(self, reward, duration):
        self.reward, self.duration = reward, duration
        self.now, self.in_flight, self.log = 0.0, [], []

    def submit(self, slot, first_draw):
        self.log.append((slot, first_draw // 4))
        heapq.heappush(self.in_flight, (self.now + self.duration(slot, first_draw // 4), slot, first_draw))

    def collect(self):
        self.now, slot, first_draw = heapq.heappop(self.in_flight)
        return [(slot, first_draw, rewards_of(slot, first_draw)[:, None])]


def reward(prompt, draw):
    return float(random.Random(f"{prompt} {draw}").random() < 0.05 + 0.1 * (prompt % 10))


def rewards_of(prompt, first_draw):
    return np.array([reward(prompt, first_draw + i) for i in range(4)])


def run(number=40, duration=lambda prompt, k: 1.0, **options):
    requests, slots = Requests(reward, duration), make_slots(number)
    sample_slots(slots, requests.submit, requests.collect, **options)
    return slots, requests


def slots_of_rounds(number=40):
    slots = make_slots(number)
    sample_in_rounds(slots, lambda requests: [rewards_of(*request) for request in requests])
    return slots


def rewards_by_slot(slots):
    return [slot.rewards_of(0)[:, 0].tolist() for slot in slots]


@pytest.mark.parametrize("options", [{}, {"speculate_below": 10}, {"speculate_below": 40}], ids=str)
def test_same_rollouts_as_in_rounds_in_any_order_of_arrival(options):
    rng, progress = random.Random(0), []

    def duration(prompt, k):  # longer for positives, as if completions that succeed were longer
        return rng.random() * (1 + 9 * max(rewards_of(prompt, 4 * k)))

    slots, requests = run(duration=duration, progress=lambda *counts: progress.append(counts), **options)
    assert rewards_by_slot(slots) == rewards_by_slot(slots_of_rounds())
    assert {slot.num_rollouts for slot in slots} == {4, 8, 12}
    rollouts = sum(slot.num_rollouts for slot in slots)
    unneeded = len(requests.log) - rollouts // 4  # such rounds do not reach the pools
    assert unneeded > 0 if options.get("speculate_below") == 40 else unneeded >= 0
    assert progress[-1] == (0, rollouts)
    assert [count for _, count in progress] == sorted(count for _, count in progress)


def test_a_slow_request_does_not_delay_other_prompts():
    """
    Three prompts that need all rounds, each with one slow request in another round: with a barrier they would take
    300.
    """

    def duration(prompt, k):
        return 100.0 if (prompt, k) in {(0, 0), (10, 1), (20, 2)} else 1.0

    assert run(duration=duration)[1].now == 102.0


def test_speculative_rounds_shorten_the_tail_after_every_prompt_was_requested():
    """One prompt needs three rounds of 10 each; the others finish at once."""

    def duration(prompt, k):
        return 10.0 if prompt == 0 else 1.0

    _, without = run(10, duration)
    _, speculative = run(10, duration, speculate_below=3)
    assert without.now == 30.0
    assert 10.0 < speculative.now < 15.0
    assert len(speculative.log) - len(without.log) <= 3
    assert [prompt for prompt, _ in speculative.log[:10]] == list(range(10))


@pytest.mark.parametrize("cancels", [True, False])
def test_as_many_rounds_of_active_slots_are_in_flight_as_in_the_first_round(cancels):
    """Those of slots that are done are cancelled, or arrive and are ignored."""
    rng, cancelled = random.Random(0), []
    requests, slots = Requests(reward, lambda prompt, k: rng.random()), make_slots(40)

    def collect():
        active = sum(not slots[slot].done for _, slot, _ in requests.in_flight)
        has_more = any(not slot.done and slot.requested < slot.max_rounds for slot in slots)
        assert active == 40 or active < 40 and not has_more
        return requests.collect()

    def cancel(slot, first_draw):
        (request,) = [request for request in requests.in_flight if request[1:] == (slot, first_draw)]
        requests.in_flight.remove(request)
        heapq.heapify(requests.in_flight)
        cancelled.append((slots[slot].done, first_draw >= slots[slot].num_rollouts))

    sample_slots(slots, requests.submit, collect, speculate_below=40, cancel=cancel if cancels else None)
    assert rewards_by_slot(slots) == rewards_by_slot(slots_of_rounds())
    if cancels:
        assert set(cancelled) == {(True, True)}
        assert not requests.in_flight, "The last slot is done when nothing else is in flight."


def test_the_slot_with_the_fewest_rounds_ahead_is_next():
    rng, slots = random.Random(0), make_slots(40, SlotRule(2, 2, 8))
    requests = Requests(reward, lambda prompt, k: rng.random())

    def submit(slot, first_draw):
        ahead = [one.rounds_ahead for one in slots if not one.done and one.requested < one.max_rounds]
        assert slots[slot].rounds_ahead == min(ahead)
        requests.submit(slot, first_draw)

    sample_slots(slots, submit, requests.collect, speculate_below=100)
    assert all(slot.done for slot in slots)


def test_no_round_is_speculative_if_a_slot_has_several_candidates():
    """The next round may be one of another prompt."""
    slots = [Slot(SlotRule(1, 1, 1), BINARY, [Candidate(i), Candidate(i + 10)], round_size=4) for i in range(10)]
    requests = Requests(reward, lambda prompt, k: 1.0)
    sample_slots(slots, requests.submit, requests.collect, speculate_below=40)
    assert {len(slot.rounds) for slot in slots} == {1, 2}
    assert len(requests.log) == sum(len(slot.rounds) for slot in slots)


def test_no_prompts():
    assert run(0)[0] == []
