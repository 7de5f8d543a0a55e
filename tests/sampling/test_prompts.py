"""Prompt stream and prompt queue, without a model."""

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

from ada_trl.core import (
    Candidate,
    Rollouts,
    SampledPrompt,
    Scoring,
    Slot,
    SlotRule,
    collect_rollouts,
    sampled_prompts,
)
from ada_trl.sampling.prompt_stream import PromptStream
from ada_trl.sampling.prompts import DataLoaderPrompts, PromptQueue

from ..core.simulation import BINARY


NAN = math.nan


def rows(number):
    return Dataset.from_dict({"prompt": [str(i) for i in range(number)]})


def stream(number=10, streaming=False, shuffle=True):
    dataset = rows(number).to_iterable_dataset() if streaming else rows(number)
    return PromptStream(dataset, shuffle=shuffle, seed=3)


def make_queue(number=1000, slots=4, shuffle=True, **options):
    """A queue of prompts 0 to `number` - 1."""
    return PromptQueue(rows(number), Accelerator(cpu=True), list, shuffle=shuffle, seed=3, num_slots=slots, **options)


@pytest.mark.parametrize("image", [np.zeros((2, 2)), torch.zeros(2, 2)])
def test_prompts_of_a_group_may_contain_arrays(image):
    rows = [{"prompt": [{"content": text, "image": copy.copy(image)}]} for text in "aabb"]
    assert DataLoaderPrompts(Accelerator(cpu=True), 2, checks_groups=True).next_prompts(rows).local_rows == [
        rows[0],
        rows[2],
    ]


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


def test_resuming_a_stream_holds_only_rows_that_are_needed(monkeypatch):
    prompts, resumed = stream(1000, streaming=True), stream(1000, streaming=True)
    prompts.take(900)
    prompts.forget({3, 5})
    held, read = [], PromptStream._next

    def observed(stream):
        position = read(stream)
        held.append(len(stream._cache))
        return position

    monkeypatch.setattr(PromptStream, "_next", observed)
    resumed.load_state_dict(prompts.state_dict())
    assert len(held) == 900 and max(held) == 3 and resumed.row(5) == prompts.row(5)


def test_resuming_with_another_data_set_is_rejected():
    prompts = stream(20)
    prompts.take(15)
    with pytest.raises(ValueError, match="fewer rows than the checkpoint has read. Resume with the same dataset"):
        stream(10).load_state_dict(prompts.state_dict())
    with pytest.raises(ValueError, match="has no rows"):
        stream(0).take(1)


# The queue

RETRIES, RESAMPLE = {"retries": 3}, {"candidates_per_slot": 3}
modes = pytest.mark.parametrize("options", [RETRIES, RESAMPLE], ids=["retries", "resample"])


def simulate(queue, passes, steps, seed=0):
    """Sampled prompts and metrics of each step; `passes` is the pass rate of a position."""
    rng = np.random.default_rng(seed)
    size = 1 if queue.retries else 2
    for _ in range(steps):
        slots = [Slot(SlotRule(1, 1, max_rounds=1), BINARY, one, size) for one in queue.next_candidates()]
        for slot in slots:
            while not slot.done:
                position = slot.candidates[slot.candidate_of_round[-1]].position
                slot.add_round((rng.random((size, 1)) < passes(position)).astype(float))
        prompts = sampled_prompts(slots)
        yield prompts, queue.finish_step(prompts, collect_rollouts(slots, prompts))


def positions(prompts):
    return [prompt.candidate.position for prompt in prompts]


def test_the_number_of_retries_follows_the_truncated_log_objective():
    """E[attempts] = (1 − (1 − p)^N) / p with N = `retries` + 1, if no retry is dropped."""
    p, slots, attempts = 0.5, 64, RETRIES["retries"] + 1
    queue = make_queue(100_000, slots, **RETRIES)
    visits = Counter()
    for prompts, _ in simulate(queue, lambda position: p, 150):
        assert len(queue.retry_queue) < 0.75 * slots  # as (1 - p) is less than this, none was dropped
        visits.update(positions(prompts))
    active = {candidate.position for candidate in queue.retry_queue}
    finished = np.array([count for position, count in visits.items() if position not in active])
    assert len(finished) > 2000
    # Prompts that are active at the end have many attempts: at most one per slot, each at most N, out of thousands.
    edge = attempts * slots / len(finished)
    expected = (1 - (1 - p) ** attempts) / p
    assert finished.mean() == pytest.approx(expected, abs=4 * finished.std() / math.sqrt(len(finished)) + edge)
    assert finished.max() == attempts


def test_a_prompt_is_retried_until_it_has_a_positive_rollout_or_no_retry_is_left():
    """Also one of which no rollout was scored."""
    queue = make_queue(slots=4, retries=2)
    prompts = [SampledPrompt(Candidate(i, attempts), i) for i, attempts in enumerate((0, 1, 1, 2))]
    queue.finish_step(prompts, Rollouts.score([np.array([[r]]) for r in (math.nan, 1.0, 0.0, 0.0)], BINARY))
    assert queue.retry_queue == [Candidate(0, 1), Candidate(2, 2)]


@pytest.mark.parametrize(("weight", "retries"), [(1.0, [1, 2]), (0.0, [0, 1, 2])])
def test_a_prompt_on_which_the_function_of_success_abstains_is_not_retried(weight, retries):
    """Unless the other function only records its rewards: then all are retried, up to three quarters of the slots."""
    queue = make_queue(slots=4, retries=2)
    prompts = [SampledPrompt(Candidate(i), i) for i in range(4)]
    pools = [[[NAN, 0.1]], [[NAN, 0.1], [0.0, 0.2]], [[NAN, NAN]], [[NAN, NAN], [NAN, 0.0]]]
    scoring = Scoring((1.0, weight), 0.7, success_column=0, needs_weight=True)
    queue.finish_step(prompts, Rollouts.score(list(map(np.array, pools)), scoring))
    assert queue.retry_queue == [Candidate(i, 1) for i in retries]


@pytest.mark.parametrize(("slots", "retries"), [(8, 6), (2, 1), (1, 1)])
def test_retries_of_a_hard_dataset_do_not_fill_the_batch(slots, retries):
    """Three quarters of the slots, but at least one; prompts with the fewest attempts first."""
    queue = make_queue(slots=slots, retries=50)
    (first, _), *steps = simulate(queue, lambda position: 0.0, 20)
    assert not any(prompt.candidate.attempts for prompt in first)
    for prompts, metrics in steps:
        retried = sum(prompt.candidate.attempts > 0 for prompt in prompts)
        assert retried == slots * metrics["prompts/frac_retried"] == retries
    assert max(candidate.attempts for candidate in queue.retry_queue) < 50


def test_unused_candidates_are_sampled_in_the_next_steps():
    queue, sampled = make_queue(shuffle=False, **RESAMPLE), []
    for _ in range(10):
        prompts = [SampledPrompt(candidates[0], i) for i, candidates in enumerate(queue.next_candidates())]
        queue.finish_step(prompts, Rollouts.score([np.array([[1.0], [0.0]])] * 4, BINARY))
        sampled += positions(prompts)
    assert sampled == list(range(40))


@modes
def test_no_prompt_is_sampled_twice_in_a_step_or_left_out(options):
    """Over random pass rates, through several epochs."""
    rates = np.random.default_rng(5).random(40)
    last_step, longest = Counter(), Counter()
    steps = simulate(make_queue(40, **options), lambda position: rates[position], 300)
    for step, (prompts, _) in enumerate(steps):
        sampled = positions(prompts)
        assert len(set(sampled)) == len(sampled)
        for position in sampled:
            longest[position] = max(longest[position], step - last_step[position])
            last_step[position] = step
    assert set(last_step) == set(range(40))
    assert max(longest.values()) <= 2 * 40  # a prompt is new once in an epoch, of at most 40 steps


@modes
def test_the_queue_does_not_grow_where_a_step_may_take_more_rows_than_there_are(options):
    """64 prompts, 32 slots: the candidates of a step are up to 96."""
    sampled, epochs = Counter(), []
    for prompts, metrics in simulate(make_queue(64, 32, **options), lambda position: 0.3, 200):
        sampled.update(positions(prompts))
        assert metrics["prompts/queue"] <= 3 * 64
        epochs.append(metrics["prompts/epoch"])
    assert min(sampled[position] for position in range(64)) > 0.5 * sampled.total() / 64
    # A step goes through the dataset at most once, and not without sampling a prompt.
    assert max(after - before for before, after in pairwise(epochs)) <= 2
    assert epochs[-1] <= 1.1 * sampled.total() / 64


@modes
def test_a_queue_resumes_exactly(options):
    rates = np.random.default_rng(1).random(30)

    def steps(queue, number, seed):
        played = simulate(queue, lambda p: rates[p], number, seed)
        return [[prompt.candidate for prompt in prompts] for prompts, _ in played]

    queue = make_queue(30, **options)
    steps(queue, 11, 0)
    state = json.loads(json.dumps(queue.state_dict()))
    resumed = make_queue(30, **options)
    resumed.load_state_dict(state)
    assert steps(resumed, 15, 7) == steps(queue, 15, 7)
    # A checkpoint inside of a step repeats that step.
    expected, again = queue.next_candidates(), make_queue(30, **options)
    again.load_state_dict(json.loads(json.dumps(queue.state_dict(1))))
    assert [[c.position for c in slot] for slot in again.next_candidates()] == [
        [c.position for c in slot] for slot in expected
    ]


@pytest.mark.parametrize("seed", [None, 7])
def test_retries_after_resuming_are_prompts_that_were_sampled(seed, caplog):
    """A stream that is shuffled without a seed has other rows at their positions."""

    def build():
        dataset = rows(1000).to_iterable_dataset().shuffle(seed=seed)
        return PromptQueue(dataset, Accelerator(cpu=True), list, shuffle=True, seed=3, num_slots=8, retries=3)

    queue, sampled = build(), set()

    def passes(position):
        sampled.add(queue.stream.row(position)["prompt"])
        return 0.1

    list(simulate(queue, passes, 4))
    state, resumed = json.loads(json.dumps(queue.state_dict())), build()
    resumed.load_state_dict(state)
    retried = {resumed.stream.row(candidate.position)["prompt"] for candidate in resumed.retry_queue}
    assert retried <= sampled
    assert [len(queue.retry_queue), len(resumed.retry_queue)] == ([6, 6] if seed else [6, 0])
    assert ("6 of 6 queued retries are dropped" in caplog.text) == (not seed)
    for candidate in state["queue"]["retry_queue"]:  # as in a checkpoint of version 0.2
        del candidate["row"]
    build().load_state_dict(state)


@pytest.mark.parametrize("where", ["retry_queue", "front"])
def test_queued_prompts_that_the_dataset_does_not_have_are_rejected(where):
    state = make_queue(30).state_dict()
    if where == "front":
        state["queue"]["stream"]["front"] = [12]
    else:
        state["queue"]["retry_queue"] = [Candidate(12)._asdict()]
    with pytest.raises(ValueError, match="Resume with the same dataset"):
        make_queue(12).load_state_dict(state)
    make_queue(13).load_state_dict(state)


@modes
def test_prompts_of_a_step_that_is_rolled_back_are_the_next_ones_again(options):
    queue = make_queue(30, **options)
    for _ in simulate(queue, lambda p: p % 2, 3):
        pass
    expected = queue.next_candidates()
    queue.rollback()
    queue.rollback()  # nothing to undo
    assert queue.next_candidates() == expected
