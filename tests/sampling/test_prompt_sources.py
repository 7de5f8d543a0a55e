"""Prompt stream, slots and prompt queue with retries, without a model."""

import copy
import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from ada_trl.core import ExitCondition, Rollout
from ada_trl.sampling.batch_slots import BatchSlot, QueuedPrompt, SlotConfig
from ada_trl.sampling.prompt_queue import PromptQueue
from ada_trl.sampling.prompt_sources import DataLoaderPrompts
from ada_trl.sampling.prompt_stream import PromptStream


def rows(number):
    return Dataset.from_dict({"prompt": [str(i) for i in range(number)]})


def stream(number=10, streaming=False, shuffle=True):
    dataset = rows(number).to_iterable_dataset() if streaming else rows(number)
    return PromptStream(dataset, shuffle=shuffle, seed=3)


def slot_config(**options):
    defaults = {"slots": 4, "candidates_per_slot": 1, "exit_condition": ExitCondition(1), "max_rounds": 4}
    return SlotConfig(**defaults | {"fixed_budget": True, "positive_threshold": 0.5} | options)


def play(slot, rewards, rounds):
    """Sample rounds of one rollout, with the reward of the candidate's position."""
    for draw in range(rounds):
        if slot.done:
            break
        reward = rewards(slot.candidates[slot.candidate_at(draw)].position)
        slot.add(Rollout(draw, reward, reward, (reward,)))


@pytest.mark.parametrize("image", [np.zeros((2, 2)), torch.zeros(2, 2)])
def test_prompts_of_a_group_may_contain_arrays(image):
    rows = [{"prompt": [{"content": text, "image": copy.copy(image)}]} for text in "aabb"]
    assert DataLoaderPrompts(Accelerator(cpu=True), 2).next_prompts(rows).local_rows == [rows[0], rows[2]]


# The stream


def test_the_stream_has_the_order_of_grpos_sampler_without_its_repetitions():
    sampler = RepeatSampler(rows(10), mini_repeat_count=2, batch_size=5, repeat_count=3, shuffle=True, seed=3)
    expected = [index for _ in range(3) for index in list(dict.fromkeys(sampler))]
    prompts = stream()
    assert [prompts.take(5) for _ in range(6)] == [expected[i : i + 5] for i in range(0, 30, 5)]
    assert prompts.epoch == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_an_epoch_has_every_row_once_and_the_next_one_another_order(streaming):
    prompts = stream(streaming=streaming)
    epochs = [[prompts.row(position)["prompt"] for position in prompts.take(10)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    unshuffled = stream(streaming=streaming, shuffle=False)
    assert [unshuffled.row(position)["prompt"] for position in unshuffled.take(10)] == [str(i) for i in range(10)]


@pytest.mark.parametrize("kind", ["pandas", "numpy", "torch"])
def test_rows_are_those_of_a_data_loader(kind):
    dataset = rows(10).add_column("x", [[i, i] for i in range(10)]).with_format(kind)
    (expected,) = dataset.__getitems__([3])
    assert str(PromptStream(dataset, shuffle=False, seed=3).row(3)) == str(expected)


def test_put_back_rows_come_first_and_excluded_ones_later():
    prompts = stream(shuffle=False)
    prompts.put_back(prompts.take(4)[1:])
    assert prompts.take(4, exclude={2}) == [1, 3, 4, 5]
    assert prompts.take(2) == [2, 6]
    assert sorted(prompts.take(20)) == list(range(10))  # more than there are


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 8, 21])
def test_a_stream_resumes_exactly_in_any_epoch(streaming, steps):
    def step(prompts):
        taken = prompts.take(4)
        texts = [prompts.row(position)["prompt"] for position in taken]
        prompts.put_back(taken[1:3])
        prompts.forget({taken[0]})
        return texts

    prompts = stream(streaming=streaming)
    for _ in range(steps):
        step(prompts)
    state = json.loads(json.dumps(prompts.state_dict()))
    resumed = stream(streaming=streaming)
    resumed.load_state_dict(state)
    assert [step(resumed) for _ in range(10)] == [step(prompts) for _ in range(10)]
    assert resumed.state_dict() == prompts.state_dict()


def test_resuming_with_another_data_set_is_rejected():
    prompts = stream(20)
    prompts.take(15)
    with pytest.raises(ValueError, match="fewer rows than the checkpoint has read. Resume with the same dataset"):
        stream(10).load_state_dict(prompts.state_dict())
    with pytest.raises(ValueError, match="has no rows"):
        stream(0).take(1)


# Slots


REPLACE = {"candidates_per_slot": 3, "fixed_budget": False, "max_rounds": 1}


def slot(candidates, samples_per_round=1, **options):
    config = slot_config(**{"max_rounds": 3} | options)
    return BatchSlot(config, [QueuedPrompt(i) for i in range(candidates)], samples_per_round)


def test_a_fixed_budget_is_one_round_of_one_prompt():
    budget = slot(1, samples_per_round=2)
    for draw in range(2):
        assert not budget.done
        budget.add(Rollout(draw, 0.0, 0.0))
    assert budget.done and list(budget.sampled) == [0]
    assert budget.unsolved == QueuedPrompt(0, rounds=1, negatives=2, from_data_order=False)


@pytest.mark.parametrize(
    ("before", "reward", "resolved", "is_retried"),
    [
        ({"rounds": 2, "negatives": 2}, 1.0, True, False),
        ({"rounds": 2, "positives": 2}, 0.0, True, False),
        ({"rounds": 2, "positives": 2}, 1.0, False, True),
        ({"rounds": 3, "positives": 3}, 1.0, False, False),  # its last one
    ],
)
def test_rollouts_of_earlier_steps_count(before, reward, resolved, is_retried):
    config = slot_config(exit_condition=ExitCondition(1, 1))
    retry = BatchSlot(config, [QueuedPrompt(7, from_data_order=False, **before)], 1)
    retry.add(Rollout(0, reward, reward))
    assert retry.resolved(0) == resolved and (retry.unsolved is not None) == is_retried


def test_unused_candidates_are_sampled_in_the_next_steps():
    queue = PromptQueue(
        stream(1000, shuffle=False), slot_config(candidates_per_slot=3, fixed_budget=False, max_rounds=1)
    )
    sampled = []
    for _ in range(10):
        candidates = queue.next_slots()
        slots = queue.make_slots(candidates, [2] * len(candidates))
        for slot in slots:
            for draw, reward in enumerate((1.0, 0.0)):
                slot.add(Rollout(draw, reward, reward))
            assert slot.done
        queue.finish_step(slots)
        sampled += [slot.candidates[i].position for slot in slots for i in slot.sampled]
    assert sampled == list(range(40))


def test_prompts_with_zero_variance_are_replaced_while_candidates_are_left():
    replace = {"fixed_budget": False, "samples_per_round": 2, "max_rounds": 1}
    one = slot(3, **replace)
    for draw, reward in enumerate([1.0, 1.0, 0.0, 1.0]):
        assert not one.done
        one.add(Rollout(draw, reward, reward))
    assert one.done and list(one.sampled) == [0, 1] and not one.pools[1].has_zero_variance
    shaped = slot(2, **replace)
    for draw, reward in enumerate([0.9, 0.8]):  # two correct answers with different length penalties
        shaped.add(Rollout(draw, reward, 1.0))
    assert not shaped.done and shaped.current == 1
    zero_variance = slot(2, **replace)
    for draw in range(4):
        assert not zero_variance.done
        zero_variance.add(Rollout(draw, 1.0, 1.0))
    assert zero_variance.done and list(zero_variance.sampled) == [0, 1]


# Steps


def simulate(queue, passes, steps, rounds, seed=0):
    """Slots and metrics of each step, in which all slots are sampled; `passes` is the pass rate of a position."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        candidates = queue.next_slots()
        slots = queue.make_slots(candidates, [1] * len(candidates))
        for slot in slots:
            play(slot, lambda position: float(rng.random() < passes(position)), rounds)
        yield slots, queue.finish_step(slots)


def test_the_number_of_retries_follows_the_truncated_log_objective():
    """E[rounds] = (1 − (1 − p)^N) / p, if no retry is dropped."""
    p, max_rounds = 0.5, 4
    queue = PromptQueue(stream(100_000), slot_config(slots=64, max_rounds=max_rounds))
    visits = Counter()
    for step, metrics in simulate(queue, lambda position: p, 150, 1):
        assert metrics["prompts/retries_dropped"] == 0  # (1 - p) < the maximum share of retries
        for played in step:
            for i in played.sampled:
                visits[played.candidates[i].position] += len(played.pools[i])
    active = {candidate.position for candidate in queue.retry_queue}
    finished = np.array([count for position, count in visits.items() if position not in active])
    assert len(finished) > 2000
    # Prompts that are active at the end have many rounds: at most one per slot, each at most N, out of thousands.
    edge = max_rounds * 64 / len(finished)
    expected = (1 - (1 - p) ** max_rounds) / p
    assert finished.mean() == pytest.approx(expected, abs=4 * finished.std() / math.sqrt(len(finished)) + edge)
    assert finished.max() == max_rounds


@pytest.mark.parametrize(("slots", "retries"), [(8, 6), (2, 1), (1, 1)])
def test_retries_of_a_hard_data_set_do_not_fill_the_batch(slots, retries):
    """Three quarters of the slots, but at least one."""
    queue = PromptQueue(stream(1000), slot_config(slots=slots, max_rounds=50))
    (first, _), *steps = simulate(queue, lambda position: 0.0, 20, 1)
    assert not any(slot.candidates[0].rounds for slot in first)
    for played, metrics in steps:
        assert (
            sum(slot.candidates[0].rounds > 0 for slot in played) == slots * metrics["prompts/frac_retried"] == retries
        )
        assert metrics["prompts/retries_dropped"] == slots - retries
    assert max(candidate.rounds for candidate in queue.retry_queue) < 50


@pytest.mark.parametrize(
    "options", [{}, {"fixed_budget": False, "candidates_per_slot": 2}], ids=["retries", "resample"]
)
def test_no_prompt_is_sampled_twice_in_a_step_or_left_out(options):
    """Over random pass rates, through several epochs."""
    rng = np.random.default_rng(5)
    queue = PromptQueue(stream(40), slot_config(**options))
    rates = rng.random(40)
    last_step, longest = Counter(), Counter()
    for step, (played, _) in enumerate(simulate(queue, lambda position: rates[position], 400, 2)):
        sampled = [slot.candidates[i].position for slot in played for i in slot.sampled]
        assert len(set(sampled)) == len(sampled)
        for position in sampled:
            longest[position] = max(longest[position], step - last_step[position])
            last_step[position] = step
    assert set(last_step) == set(range(40))
    assert max(longest.values()) <= 2 * 40  # a prompt is new once in an epoch, of at most 40 steps


@pytest.mark.parametrize(
    "options", [{}, {"candidates_per_slot": 4, "fixed_budget": False}], ids=["retries", "resample"]
)
def test_the_queue_does_not_grow_where_a_step_may_take_more_rows_than_there_are(options):
    """64 prompts, 32 slots: the candidates of a step are up to 128."""
    queue = PromptQueue(stream(64), slot_config(slots=32, max_rounds=4, **options))
    sampled, epochs = Counter(), []
    for played, metrics in simulate(queue, lambda position: 0.3, 400, 4):
        sampled.update(slot.candidates[i].position for slot in played for i in slot.sampled)
        assert metrics["prompts/queue"] <= 3 * 64
        epochs.append(metrics["prompts/epoch"])
    assert min(sampled[position] for position in range(64)) > 0.5 * sampled.total() / 64
    # A step goes through the dataset at most once, and not without sampling a prompt.
    assert max(after - before for before, after in pairwise(epochs)) <= 2
    assert epochs[-1] <= 1.1 * sampled.total() / 64


@pytest.mark.parametrize("options", [{}, REPLACE], ids=["retries", "resample"])
def test_a_queue_resumes_exactly(options):
    rates, rounds = np.random.default_rng(1).random(30), options.get("candidates_per_slot", 1)

    def steps(queue, number, seed):
        played = simulate(queue, lambda p: rates[p], number, rounds, seed)
        return [[slot.candidates for slot in slots] for slots, _ in played]

    queue = PromptQueue(stream(30), slot_config(**options))
    steps(queue, 11, 0)
    state = json.loads(json.dumps(queue.state_dict(steps_back=0)))
    resumed = PromptQueue(stream(30), slot_config(**options))
    resumed.load_state_dict(state)
    assert steps(resumed, 15, 7) == steps(queue, 15, 7)
    # A checkpoint inside of a step repeats that step.
    before = [[candidate.position for candidate in slot] for slot in queue.next_slots()]
    again = PromptQueue(stream(30), slot_config(**options))
    again.load_state_dict(queue.state_dict(steps_back=1))
    assert [[candidate.position for candidate in slot] for slot in again.next_slots()] == before


@pytest.mark.parametrize("where", ["retry_queue", "front"])
def test_queued_prompts_that_the_data_set_does_not_have_are_rejected(where):
    queue = PromptQueue(stream(30), slot_config())
    state = queue.state_dict()
    if where == "front":
        state["stream"]["front"] = [12]
    else:
        state[where] = [QueuedPrompt(12)._asdict()]
    with pytest.raises(ValueError, match="Resume with the same dataset"):
        PromptQueue(stream(12), slot_config()).load_state_dict(state)
    PromptQueue(stream(13), slot_config()).load_state_dict(state)


@pytest.mark.parametrize("options", [{}, REPLACE], ids=["retries", "resample"])
def test_prompts_of_a_step_that_is_rolled_back_are_the_next_ones_again(options):
    queue = PromptQueue(stream(30), slot_config(**options))
    for _ in simulate(queue, lambda p: p % 2, 3, options.get("candidates_per_slot", 1)):
        pass
    expected = queue.next_slots()
    queue.rollback()
    queue.rollback()  # nothing to undo
    assert queue.next_slots() == expected
