"""Calls of TRL within a step: the state after them."""

import pytest
from trl.trainer import grpo_trainer

from ada_trl.utils.distributed import collectives_disabled

from ..helpers import build, even_reward


@pytest.mark.parametrize("mode", ["seq-balance", "est-ema", "uniform"])
def test_a_trainer_is_idle_again_after_a_step_and_after_a_failure(mode, tmp_path):
    broken = []

    def reward(completions, **kwargs):
        if broken:
            raise ZeroDivisionError("my bug")
        return even_reward(completions)

    def state():
        methods = {name for name in vars(trainer) if callable(getattr(type(trainer), name, None))}
        return trainer._is_in_step, methods, id(trainer._metrics), collectives_disabled(), grpo_trainer.gather

    trainer = build(tmp_path, reward, adaptive_sampling=mode)
    idle = state()
    trainer.train()
    assert state() == idle
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert state() == idle
