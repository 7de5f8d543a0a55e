"""Refill and rounds across steps, on a scripted server: without a barrier."""

import asyncio

from datasets import Dataset

from ..helpers import PROMPTS, logs_of, remember_pools
from .fake import RIGHT, WRONG, FakeServer, answer, by_prompt
from .helpers import ONE_ROUND, build, our_threads


REFILL = {"adaptive_sampling": "uniform", "zero_variance_groups": "resample", "num_generations": 4}
ACROSS = {
    "adaptive_sampling": "seq-pos",
    "baseline": "posterior",
    "num_generations": 2,
    "pass_rate_estimator": "ema",
}


def test_a_silent_prompt_is_replaced_while_others_are_under_way(tmp_path):
    """Two slots. What the first one asks is silent, twice, while the second place still awaits its answer."""
    finished, slow = [], []

    async def behave(call):
        if call.number == 1:
            slow.append(call.prompt)
            await asyncio.sleep(2)
        finished.append(call.prompt)
        return answer(call, [RIGHT, WRONG] * 2 if call.prompt in slow else [WRONG] * 4)

    with FakeServer(behave) as server:
        options = ONE_ROUND | REFILL | {"per_device_train_batch_size": 8}
        trainer = build(tmp_path, server, dataset=Dataset.from_dict({"prompt": PROMPTS}), **options)
        trainer.train()
    (logs,) = logs_of(trainer)
    # Four prompts, two slots, so that each may ask two: the first place is through before the second has an answer.
    assert finished[-1:] == slow and len(finished) == 3
    assert logs["ada/prompts/resampled"] == 1 and logs["ada/frac_zero_advantage_groups"] == 0.5
    assert our_threads() == []


def test_the_rows_are_the_same_whatever_arrives_first(tmp_path):
    def run(name, delays):
        async def behave(call):
            await asyncio.sleep(delays[PROMPTS.index(call.prompt)])
            return await by_prompt(call)

        with FakeServer(behave) as server:
            options = ONE_ROUND | ACROSS | {"per_device_train_batch_size": 8, "max_steps": 2}
            trainer = build(tmp_path / name, server, dataset=Dataset.from_dict({"prompt": PROMPTS}), **options)
            pools = remember_pools(trainer)
            trainer.train()
        return [[[(r.draw_index, r.reward) for r in pool.rollouts] for pool in step] for step in pools]

    assert run("a", (0, 0.1, 0.2, 0.3)) == run("b", (0.3, 0.2, 0.1, 0))
