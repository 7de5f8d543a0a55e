"""Budgets from estimated pass rates, against a scripted server and on several processes."""

import numpy as np
import pytest

from ada_trl.estimation.record import PASS_RATES_FILE, load_pass_rates

from ..helpers import PROMPTS, logs_of, prompt_dataset
from .fake import FakeServer, answer, random_texts
from .helpers import build, launch, our_threads


MODES = ["est-ema", "est-value"]
RATES = dict(zip(PROMPTS, (0.95, 0.5, 0.1, 0.0), strict=True))
ONE_ROUND = {"samples_per_round": None, "max_rounds": 4, "vllm_request_timeout": 30}  # not those of the other tests


async def by_prompt(call):
    return answer(call, [f"{text}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])


@pytest.mark.parametrize("mode", MODES)
def test_one_request_per_prompt_of_as_many_completions_as_its_budget(mode, tmp_path):
    with FakeServer(by_prompt) as server:
        dataset = prompt_dataset(8)
        trainer = build(tmp_path, server, dataset=dataset, adaptive_sampling=mode, max_steps=8, **ONE_ROUND)
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


@pytest.mark.parametrize("mode", MODES)
# Groups whole and not on 2 processes; one prompt too many for an even share of the value head's forward passes.
@pytest.mark.parametrize(("processes", "per_device"), [(2, 8), (2, 6)])
def test_same_updates_and_record_on_one_process_and_on_two(mode, processes, per_device, tmp_path):
    options = ONE_ROUND | {"adaptive_sampling": mode, "max_steps": 5}
    options |= {"save_strategy": "steps", "save_steps": 5}

    def run(count, name):
        with FakeServer(by_prompt) as server:
            rows = per_device * processes // count
            ranks = launch(count, server.url, tmp_path / name, per_device_train_batch_size=rows, **options)
        assert all(rank["error"] is None and rank["threads"] == [] for rank in ranks)
        return ranks, sorted((call.prompt, call.round, call.n) for call in server.completions)

    (alone,), asked_alone = run(1, "alone")
    ranks, asked = run(processes, "together")
    assert asked == asked_alone and len({n for *_, n in asked}) > 1
    for step, batch in enumerate(alone["batches"]):
        assert [row for rank in ranks for row in rank["batches"][step]] == batch
    untimed = [
        [{k: v for k, v in logs.items() if "ada/" in k and "time" not in k} for logs in run["logs"]]
        for run in (alone, ranks[0])
    ]
    for expected, found in zip(*untimed, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)  # features are float32
    records = [load_pass_rates(tmp_path / name / "checkpoint-5" / PASS_RATES_FILE) for name in ("alone", "together")]
    fitted = [state.pop("fitted") for state, _ in records]
    assert records[0] == records[1] and set(records[0][1].values()) == set(PROMPTS)
    assert fitted[0].keys() == fitted[1].keys() >= {"strength"}
    for name, values in fitted[0].items():
        np.testing.assert_allclose(fitted[1][name], values, rtol=1e-5, atol=1e-7)  # errors of float32 predictions


@pytest.mark.parametrize("mode", MODES)
def test_local_generation_on_two_processes(mode, tmp_path):
    options = ONE_ROUND | {"adaptive_sampling": mode, "use_vllm": False, "vllm_weight_sync": "nccl", "max_steps": 4}
    ranks = launch(2, "unused", tmp_path / "run", per_device_train_batch_size=6, **options)
    assert all(rank["error"] is None for rank in ranks)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    for step in range(4):
        rows = [row for rank in ranks for row in rank["batches"][step]]
        assert len(rows) == 12 and [len(rank["batches"][step]) for rank in ranks] == [6, 6]
        prompts = [prompt for prompt, *_ in rows]
        assert sum(a != b for a, b in zip(prompts, prompts[1:], strict=False)) == 2
    assert all(logs["ada/samples_per_prompt/mean"] == 4 for logs in ranks[0]["logs"])
