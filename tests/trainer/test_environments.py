"""Environments of several rounds: which of them belong to a step, and which are sent."""

import threading

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl.sampling.sampler import Completion, _portable

from ..conversations import NUMBERS, Counting, ToolUser
from ..conversations import build as build_multi_turn
from ..helpers import MODES, PROMPTS, Recorder, build, chat_tokenizer, tiny_chat_model
from .scripts import RUNNING, disturb, restore


class Late(Counting):
    """No rollout of a prompt's first round is right, so that there is a second round."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def get_reward(self):
        return float(self.resets[self.target] > 32 and super().get_reward())


def test_environments_after_a_step_are_those_of_its_rows(tmp_path):
    Counting.resets.clear()
    Late.made, seen = 0, []

    class Reader(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append([(environment.target, environment.given) for environment in trainer.environments])

    options = {"samples_per_round": 32, "max_rounds": 2, "max_steps": 2}
    trainer = build_multi_turn(ToolUser, tmp_path, [], factory=Late, **options)
    trainer.add_callback(Reader())
    trainer.train()
    for environments, output in zip(seen, trainer.batches, strict=True):
        prompts = trainer._tokenizer.batch_decode(output["prompt_ids"])
        completions = trainer._tokenizer.batch_decode(output["completion_ids"])
        for (target, given), prompt, completion in zip(environments, prompts, completions, strict=True):
            assert f"Please give {target}+0" in prompt
            assert (f"It is {given}." in completion) == (given is not None)
    assert len({id(environment) for environment in trainer.environments}) == 16
    assert sorted({given is None for _, given in seen[0]}) == [False, True]
    logs = trainer.state.log_history
    assert [logs[i]["ada/rounds/mean"] for i in (0, 1)] == [2, 1]
    # As many as rollouts of the first step, which has two rounds; the second step makes no new ones.
    assert Late.made == len(trainer._environment_pool[None]) == 4 * 2 * 32


@pytest.mark.parametrize("mode", ["batch", "seq-balance"])
def test_fewer_rows_than_a_step_has_prompts_are_an_error(mode, tmp_path):
    """Without it, training would end at once, without any step."""
    options = MODES[mode] | {"success_reward": "Counting"}
    with pytest.raises(ValueError, match=r"No training step can be run: each step needs \d+ distinct prompts"):
        build_multi_turn(ToolUser, tmp_path, [], NUMBERS.select([0]), factory=Counting, **options)


def test_a_failed_step_loses_no_environment(tmp_path):
    def reward(completions, **kwargs):
        raise ZeroDivisionError

    trainer = build_multi_turn(ToolUser, tmp_path, reward, factory=Counting, success_reward="Counting")
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert len(trainer._environment_pool[None]) == 16


def test_an_environment_that_cannot_be_pickled_is_not_sent():
    completion = Completion(([1], [2]), {"prompt": "1+2="}, {}, 1, False, threading.Lock())
    assert _portable(completion) == completion._replace(environment=None)
    counting = completion._replace(environment=Counting())
    assert _portable(counting) is counting


class Disturbing(Counting):
    """An environment whose reset and tool leave everything in another state."""

    def reset(self, **row):
        if RUNNING:
            disturb()
        return super().reset(target=1, **row)


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_state_that_an_environment_changes_is_restored(mode, tmp_path, request):
    request.addfinalizer(restore)
    tokenizer, seen = chat_tokenizer(), []

    class Observing(Recorder):
        def compute_loss(self, *args, **kwargs):
            seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
            return super().compute_loss(*args, **kwargs)

    trainer = build(
        tmp_path,
        lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 4]}),
        tiny_chat_model(tokenizer),
        tokenizer=tokenizer,
        environment_factory=Disturbing,
        trainer_class=Observing,
        success_reward="Disturbing",
        **MODES[mode],
    )
    RUNNING[:] = [trainer]
    trainer.train()
    assert set(seen) == {(torch.float32, True)}
    assert any("reward" in logs for logs in trainer.state.log_history), "Nothing was logged as an evaluation."
