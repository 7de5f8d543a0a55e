"""Budgets from estimated pass rates, against a scripted server."""

import pytest

from ..helpers import logs_of, prompt_dataset
from .fake import FakeServer, by_prompt
from .helpers import ONE_ROUND, build, our_threads


MODES = ["est-ema", "est-value"]


@pytest.mark.parametrize("mode", MODES)
def test_one_request_per_prompt_of_as_many_completions_as_its_budget(mode, tmp_path):
    with FakeServer(by_prompt) as server:
        # In order: a prompt that were in a step twice would have one request where its copies are neighbours.
        options = {"adaptive_sampling": mode, "max_steps": 8, "shuffle_dataset": False}
        trainer = build(tmp_path, server, dataset=prompt_dataset(8), **ONE_ROUND | options)
        trainer.train()
    steps = [server.completions[i : i + 4] for i in range(0, len(server.completions), 4)]
    assert len(steps) == 8
    for calls, logs in zip(steps, logs_of(trainer), strict=True):
        assert sum(call.n for call in calls) == 16
        sizes = [call.n for call in calls]
        assert min(sizes) == logs["ada/samples_per_prompt/min"]
        assert max(sizes) == logs["ada/samples_per_prompt/max"]
        assert logs["ada/samples_per_prompt/mean"] == 4
    assert any(len({call.n for call in calls}) > 1 for calls in steps)
    assert our_threads() == []
