"""Modes with one round per step, and dynamic sampling, on a scripted server."""

import asyncio

import pytest
from datasets import Dataset

from ..helpers import PROMPTS, logs_of, prompt_dataset
from .fake import RIGHT, WRONG, FakeServer, answer, by_prompt
from .helpers import ONE_ROUND, UNIFORM, build


@pytest.mark.parametrize("estimator", ["ema", "value"])
def test_est_requests_as_many_completions_of_each_prompt_as_its_budget(estimator, tmp_path):
    with FakeServer(by_prompt) as server:
        # In order: a prompt that is in a step twice would have one request if its copies are neighbours.
        options = {"adaptive_sampling": "est", "pass_rate_estimator": estimator, "max_steps": 8}
        options |= {"shuffle_dataset": False, "dataset": prompt_dataset(8)}
        trainer = build(tmp_path, server, **ONE_ROUND | options)
        trainer.train()
    steps = [[call.n for call in server.completions[i : i + 4]] for i in range(0, len(server.completions), 4)]
    assert len(steps) == 8
    for sizes, logs in zip(steps, logs_of(trainer), strict=True):
        assert sum(sizes) == 16
        assert max(sizes) == logs["ada/samples_per_prompt/max"]
        assert logs["ada/samples_per_prompt/mean"] == 4
    assert any(len(set(sizes)) > 1 for sizes in steps)


def test_dynamic_sampling_replaces_a_prompt_while_others_are_in_flight(tmp_path):
    """
    Two slots and four prompts: the first slot samples two prompts with zero variance while the second still waits.
    """
    first, slow, replacement, _ = PROMPTS
    finished = []

    async def behave(call):
        while call.prompt == slow and len(finished) < 2:
            await asyncio.sleep(0.01)
        finished.append(call.prompt)
        return answer(call, [RIGHT, WRONG] * 2 if call.prompt == slow else [WRONG] * 4)

    options = UNIFORM | ONE_ROUND | {"zero_variance_groups": "resample", "per_device_train_batch_size": 8}
    with FakeServer(behave) as server:
        dataset = Dataset.from_dict({"prompt": PROMPTS})
        trainer = build(tmp_path, server, dataset=dataset, num_generations=4, shuffle_dataset=False, **options)
        trainer.train()
    (logs,) = logs_of(trainer)
    assert finished == [first, replacement, slow]
    assert logs["ada/prompts/resampled"] == 1 and logs["ada/frac_zero_advantage_groups"] == 0.5
