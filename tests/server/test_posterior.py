"""The posterior baseline on a scripted server: one request per prompt, one completion each."""

import pytest
import torch

from ..helpers import Watch, logs_of, prompt_dataset
from .fake import FakeServer, by_prompt
from .helpers import ONE_ROUND, build, our_threads


POSTERIOR = {
    "adaptive_sampling": "uniform",
    "baseline": "posterior",
    "num_generations": 1,
    "pass_rate_estimator": "ema",
}


def test_one_completion_per_prompt_is_asked_for_and_all_are_trained_on(tmp_path):
    with FakeServer(by_prompt) as server:
        options = POSTERIOR | ONE_ROUND | {"per_device_train_batch_size": 4, "max_steps": 4}
        # In order: equal prompts that are neighbours in a step would share a request.
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), **options, shuffle_dataset=False)
        trainer.train()
    assert [call.n for call in server.completions] == [1] * 16
    for logs in logs_of(trainer):
        assert logs["ada/samples_per_prompt/mean"] == 1
        assert logs["ada/frac_zero_advantage_groups"] == (logs["reward_std"] == 0)
    assert our_threads() == []


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_pass_over_completions_gives_the_features_of_their_prompts(iterations, tmp_path):
    """What a server has generated is passed once more for its log-probabilities: no further pass is made."""
    with FakeServer(by_prompt) as server:
        options = {"pass_rate_estimator": "ema+value", "num_iterations": iterations, "max_steps": 2 + iterations}
        options = POSTERIOR | ONE_ROUND | {"per_device_train_batch_size": 4, "learning_rate": 0.05} | options
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), **options)
        watch = Watch(trainer)
        trainer.train()
    assert watch.own_passes == 0 and len(watch.compared) >= 2
    for found, expected in watch.compared:
        assert len(found) == 4
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
