"""The posterior baseline on a scripted server: one request per prompt, one completion each, on one process and on two."""

import pyarrow.parquet as pq
import pytest
import torch

from ada_trl.estimation.record import PASS_RATES_FILE, load_pass_rates

from ..helpers import PROMPTS, Watch, logs_of, prompt_dataset
from .fake import FakeServer, answer, random_texts
from .helpers import build, launch, our_threads


RATES = dict(zip(PROMPTS, (0.95, 0.5, 0.1, 0.0), strict=True))
POSTERIOR = {
    "adaptive_sampling": "uniform",
    "baseline": "posterior",
    "num_generations": 1,
    "pass_rate_estimator": "counts",
}
ONE_ROUND = {"samples_per_round": None, "max_rounds": 4, "vllm_request_timeout": 30}  # not those of the other tests


async def by_prompt(call):
    return answer(call, [f"{text}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])


def test_one_completion_per_prompt_is_asked_for_and_all_are_trained_on(tmp_path):
    with FakeServer(by_prompt) as server:
        options = POSTERIOR | ONE_ROUND | {"per_device_train_batch_size": 4, "max_steps": 4}
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), **options)
        trainer.train()
    assert [call.n for call in server.completions] == [1] * 16
    for logs in logs_of(trainer):
        assert logs["ada/samples_per_prompt/mean"] == 1
        assert logs["ada/zero_signal/final"] == (logs["reward_std"] == 0) and logs["ada/server/unneeded"] == 0
    assert our_threads() == []


def test_same_updates_and_record_on_one_process_and_on_two(tmp_path):
    options = POSTERIOR | ONE_ROUND | {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}

    def run(count, name):
        with FakeServer(by_prompt) as server:
            ranks = launch(count, server.url, tmp_path / name, per_device_train_batch_size=4 // count, **options)
        assert all(rank["error"] is None and rank["threads"] == [] for rank in ranks)
        return ranks

    (alone,) = run(1, "alone")
    ranks = run(2, "together")
    for step, batch in enumerate(alone["batches"]):
        assert len(batch) == 4 and [row for rank in ranks for row in rank["batches"][step]] == batch
    files = [tmp_path / name / "checkpoint-4" / PASS_RATES_FILE for name in ("alone", "together")]
    assert pq.read_table(files[0]).to_pylist() == pq.read_table(files[1]).to_pylist()
    assert set(load_pass_rates(files[0])[1].values()) == set(PROMPTS)


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_pass_over_completions_gives_the_features_of_their_prompts(iterations, tmp_path):
    """What a server has generated is passed once more for its log-probabilities: no further pass is made."""
    with FakeServer(by_prompt) as server:
        options = {"pass_rate_estimator": "value+counts", "num_iterations": iterations, "max_steps": 2 + iterations}
        options = POSTERIOR | ONE_ROUND | {"per_device_train_batch_size": 4, "learning_rate": 0.05} | options
        trainer = build(tmp_path, server, dataset=prompt_dataset(4), **options)
        watch = Watch(trainer)
        trainer.train()
    assert watch.own_passes == 0 and len(watch.compared) >= 2
    for found, expected in watch.compared:
        assert len(found) == 4
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
