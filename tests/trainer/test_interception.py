"""Calls of TRL within a step: state after them, failures, and threads."""

import threading
import traceback

import pytest
from trl.trainer import grpo_trainer

from ada_trl.utils.distributed import collectives_disabled, gather_unless_disabled, no_collectives

from ..helpers import (
    build,
    even_reward,
)


@pytest.mark.parametrize("mode", ["seq-balance", "est-ema", "uniform"])
def test_a_trainer_is_idle_again_after_a_step_and_after_a_failure(mode, tmp_path):
    broken = []

    def reward(completions, **kwargs):
        if broken:
            raise ZeroDivisionError("my bug")
        return even_reward(completions)

    def state():
        return trainer._interception, id(trainer._metrics), collectives_disabled(), grpo_trainer.gather

    trainer = build(tmp_path, reward, adaptive_sampling=mode)
    idle = state()
    trainer.train()
    assert state() == idle
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert state() == idle


def test_a_failing_reward_function_is_not_called_from_inside_of_trls_batch(tmp_path):
    def reward(completions, **kwargs):
        raise ZeroDivisionError("my bug")

    with pytest.raises(ZeroDivisionError) as caught:
        build(tmp_path, reward).train()
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (grpo_trainer.__file__, "_calculate_rewards") in frames
    assert (grpo_trainer.__file__, "_generate_and_score_completions") not in frames
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_collectives_are_disabled_for_one_thread_only():
    def collective(tensor):
        return "everyone's"

    gather, inside, outside = gather_unless_disabled(collective), threading.Event(), threading.Event()
    seen = []

    def other():
        inside.wait(10)
        seen.append(gather("mine"))
        with no_collectives():
            seen.append(gather("mine"))
            outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with no_collectives():
        inside.set()
        assert outside.wait(10)
        with no_collectives():
            assert gather("mine") == "mine"
        assert gather("mine") == "mine"
    thread.join()
    assert seen == ["everyone's", "mine"] and gather("mine") == "everyone's" and not collectives_disabled()
