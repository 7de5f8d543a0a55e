"""Environments of several rounds: which of them belong to a step, and which are sent."""

import threading

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from ada_trl.sampling.sampler import Completion, _portable

from ..conversations import Counting, ToolUser
from ..conversations import build as build_multi_turn


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
    rows = {"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": [1, 2, 3, 4]}

    class Reader(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append([(environment.target, environment.given) for environment in trainer.environments])

    options = {"samples_per_round": 32, "max_rounds": 2, "max_steps": 2}
    outputs = []

    class Observed(ToolUser):
        def _generate_and_score_completions(self, inputs):
            outputs.append(super()._generate_and_score_completions(inputs))
            return outputs[-1]

    trainer = build_multi_turn(Observed, tmp_path, [], Dataset.from_dict(rows), factory=Late, **options)
    trainer.add_callback(Reader())
    trainer.train()
    for environments, output in zip(seen, outputs, strict=True):
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


def test_a_failed_step_loses_no_environment(tmp_path):
    def reward(completions, **kwargs):
        raise ZeroDivisionError

    rows = {"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": [1, 2, 3, 4]}
    trainer = build_multi_turn(
        ToolUser, tmp_path, reward, Dataset.from_dict(rows), factory=Counting, success_reward="Counting"
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert len(trainer._environment_pool[None]) == 16


def test_an_environment_that_cannot_be_pickled_is_not_sent():
    completion = Completion(([1], [2]), {"prompt": "1+2="}, {}, 1, False, threading.Lock())
    assert _portable(completion) == completion._replace(environment=None)
    counting = completion._replace(environment=Counting())
    assert _portable(counting) is counting
