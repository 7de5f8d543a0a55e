"""Refill and rounds across steps, on a scripted server: without a barrier, on one process and on two."""

import asyncio

import pytest
from datasets import Dataset

from ..helpers import PROMPTS, logs_of, remember_pools
from .fake import RIGHT, WRONG, FakeServer, answer, random_texts
from .helpers import build, launch, our_threads


RATES = dict(zip(PROMPTS, (0.95, 0.5, 0.1, 0.0), strict=True))
NOT_THOSE_OF_THE_OTHER_TESTS = {"samples_per_round": None, "max_rounds": 4, "vllm_request_timeout": 30}
REFILL = {"adaptive_sampling": "uniform", "unresolved": "replace", "num_generations": 4}
ACROSS = {
    "adaptive_sampling": "seq-pos",
    "baseline": "posterior",
    "num_generations": 2,
    "pass_rate_estimator": "counts",
}
MODES = {  # others: test_processes.py beside this folder, whose processes start faster
    "refill in rounds": {"unresolved": "replace", "samples_per_round": 4, "max_rounds": 2},
    "across steps": ACROSS,
}


async def by_prompt(call):
    await asyncio.sleep(0.01 * PROMPTS.index(call.prompt))
    return answer(call, [f"{text}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])


@pytest.mark.parametrize("mode", MODES)
def test_same_updates_on_one_process_and_on_two(mode, tmp_path):
    options = NOT_THOSE_OF_THE_OTHER_TESTS | {"max_steps": 3} | MODES[mode]

    def run(count, name):
        with FakeServer(by_prompt) as server:
            ranks = launch(count, server.url, tmp_path / name, per_device_train_batch_size=8 // count, **options)
        assert all(rank["error"] is None and rank["threads"] == [] for rank in ranks)
        return ranks, sorted((call.prompt, call.round, call.n) for call in server.completions)

    (alone,), asked_alone = run(1, "alone")
    ranks, asked = run(2, "together")
    assert asked == asked_alone
    for step, batch in enumerate(alone["batches"]):
        assert len(batch) == 8 and [row for rank in ranks for row in rank["batches"][step]] == batch
    untimed = [
        [{k: v for k, v in logs.items() if "ada/" in k and "time" not in k} for logs in run["logs"]]
        for run in (alone, ranks[0])
    ]
    assert untimed[0] == untimed[1]


def test_a_silent_prompt_is_replaced_while_others_are_under_way(tmp_path):
    """Two places. What the first one asks is silent, twice, while the second place still awaits its answer."""
    finished, slow = [], []

    async def behave(call):
        if call.number == 1:
            slow.append(call.prompt)
            await asyncio.sleep(2)
        finished.append(call.prompt)
        return answer(call, [RIGHT, WRONG] * 2 if call.prompt in slow else [WRONG] * 4)

    with FakeServer(behave) as server:
        options = NOT_THOSE_OF_THE_OTHER_TESTS | REFILL | {"per_device_train_batch_size": 8}
        trainer = build(tmp_path, server, dataset=Dataset.from_dict({"prompt": PROMPTS}), **options)
        trainer.train()
    (logs,) = logs_of(trainer)
    # Four prompts, two places, so that each may ask two: the first place is through before the second has an answer.
    assert finished[-1:] == slow and len(finished) == 3
    assert logs["ada/stream/replaced"] == 1 and logs["ada/zero_signal/final"] == 0.5
    assert our_threads() == []


def test_the_rows_are_the_same_whatever_arrives_first(tmp_path):
    def run(name, delays):
        async def behave(call):
            await asyncio.sleep(delays[PROMPTS.index(call.prompt)])
            return answer(call, [f"{text}{i}" for i, text in enumerate(random_texts(call, RATES[call.prompt]))])

        with FakeServer(behave) as server:
            options = NOT_THOSE_OF_THE_OTHER_TESTS | ACROSS | {"per_device_train_batch_size": 8, "max_steps": 2}
            trainer = build(tmp_path / name, server, dataset=Dataset.from_dict({"prompt": PROMPTS}), **options)
            pools = remember_pools(trainer)
            trainer.train()
        return [[[(r.draw, r.reward) for r in pool.rollouts] for pool in step] for step in pools]

    assert run("a", (0, 0.1, 0.2, 0.3)) == run("b", (0.3, 0.2, 0.1, 0))
