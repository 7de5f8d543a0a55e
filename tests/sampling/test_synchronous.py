"""Synchronous rounds that are filled with rollouts that may be needed: the same pools in fewer rounds."""

from collections import Counter

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from ada_trl.core import Candidate, Scoring, Slot, SlotRule
from ada_trl.sampling.sampler import Completion, Generated, StepProgress
from ada_trl.sampling.synchronous import SynchronousSampler
from ada_trl.trainer.rounds import RoundGenerator
from ada_trl.trainer.step import plan_step

from ..helpers import build, even_reward


PROMPTS, MAX_ROUNDS = 12, 6


def reward_of(prompt: int, draw: int) -> float:
    """Prompts with pass rates from 0 to 1, the same rollouts in every run."""
    return float(np.random.default_rng((prompt, draw)).random() < prompt / (PROMPTS - 1))


def build_sampler(size: int, fills_rounds: bool, generate_and_score=None) -> SynchronousSampler:
    return SynchronousSampler(
        rows=[{"prompt": i} for i in range(PROMPTS)],
        row_ranks=[0] * PROMPTS,
        generate_and_score=generate_and_score,
        fills_rounds=fills_rounds,
        slots=[
            Slot(SlotRule(1, 1, MAX_ROUNDS), Scoring((1.0,), 0.5, None), [Candidate(i)], size) for i in range(PROMPTS)
        ],
        accelerator=Accelerator(cpu=True),
    )


def sample(size: int, fills_rounds: bool):
    """Slots after sampling, rows of each call, and whether what is fetched belongs to the rollouts in the pools."""
    drawn, calls = Counter(), []

    def generate_and_score(rows: list[dict], is_first_round: bool) -> Generated:
        assert is_first_round == (not calls)
        calls.append(len(rows))
        completions = []
        for row in rows:
            draw = drawn[row["prompt"]]
            drawn[row["prompt"]] += 1
            rewards = [reward_of(row["prompt"], draw)]
            completions.append(Completion((row["prompt"], draw), row, {}, 1, False, rewards=rewards))
        return completions, {"tokens/seen": len(rows), "time/reward": 0.0}

    sampler = build_sampler(size, fills_rounds, generate_and_score)
    slots = sampler.slots
    with StepProgress(sampler.num_shown, 1, True) as progress:
        sampler.sample(progress)
    rollouts = [(i, draw) for i, slot in enumerate(slots) for draw in range(slot.num_rollouts)]
    fetched = sampler.fetch(rollouts)
    assert len(sampler.first_round) == PROMPTS * size, "Without rounds that are sampled together with the first one."
    return slots, calls, [row.columns for row in fetched] == rollouts


@pytest.mark.parametrize("size, rollouts", [(2, 8), (4, 8), (9, 9)])
def test_filled_rounds_have_the_same_pools_in_fewer_rounds(size, rollouts):
    slots, calls, is_in_place = sample(size, fills_rounds=True)
    expected, calls_before, _ = sample(size, fills_rounds=False)
    assert [slot.rewards_of(0).tolist() for slot in slots] == [slot.rewards_of(0).tolist() for slot in expected]
    assert is_in_place
    assert len(calls) < len(calls_before) == MAX_ROUNDS
    assert max(calls) == calls[0] == PROMPTS * rollouts
    assert calls_before[0] == PROMPTS * size
    assert (sum(calls) > sum(calls_before)) == (rollouts > size)  # rollouts that are not needed


def test_tool_calls_of_padding_do_not_count():
    sampler = build_sampler(4, fills_rounds=False)
    row = Completion((), {}, {}, 1, False)
    of_three_and_padding = [row] * 4, {"tools/calls": 8, "tools/failures": 4}
    sampler.store([(0, 0), (0, 1), (0, 2)], of_three_and_padding)
    assert (sampler.stats["tools/calls"], sampler.stats["tools/failures"]) == (6, 3)
    sampler.store([(0, 4)], ([row], {"tools/calls": 5, "tools/failures": 5}))
    assert sampler.stats["tools/calls"] == 6, "Of the first round only."


@pytest.mark.parametrize("device, options", [("cuda", {}), ("cpu", {}), ("cuda", {"tools": [max]})])
def test_rounds_are_filled_on_a_gpu_without_tools(device, options, tmp_path, monkeypatch):
    trainer = build(tmp_path, even_reward)
    trainer.tools = options.get("tools", trainer.tools)
    plan = plan_step(trainer, next(iter(trainer.get_train_dataloader())))
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device(device))
    sampler = RoundGenerator(trainer).build_sampler(plan, [], samples_async=False)
    assert sampler.fills_rounds == (device == "cuda" and not options)
