"""The trainer with prompts from the queue: dynamic sampling, retries, exact resume."""

import numpy as np
import pytest
from datasets import Dataset

from ..helpers import build, even_reward, logs_of, prompts_of


ALL_PROMPTS = [f"{i}+{j}=" for i in range(1, 9) for j in range(1, 5)]
DYNAMIC = {
    "adaptive_sampling": "uniform",
    "zero_variance_groups": "resample",
    "num_generations": 4,
    "scale_rewards": "group",
}
RETRIES = {"baseline": "batch", "retries": 3}
MODES = {
    "dynamic sampling": DYNAMIC,
    "dynamic sampling in rounds": {
        "zero_variance_groups": "resample",
        "num_generations": 4,
        "samples_per_round": 4,
        "max_rounds": 2,
    },
    "retries": RETRIES,
    "retries of groups": {"baseline": "batch", "retries": 2, "num_generations": 2},
}


def prompts(number=32, streaming=False):
    dataset = Dataset.from_dict({"prompt": ALL_PROMPTS[:number]})
    return dataset.to_iterable_dataset() if streaming else dataset


class Script:
    """Different rewards for the prompts in `good`, equal ones for the others; records prompts and tokens."""

    __name__ = "script"

    def __init__(self, good):
        self.good, self.seen, self.tokens = good, [], 0

    def __call__(self, prompts, completion_ids, **kwargs):
        self.seen += prompts[::4]
        self.tokens += sum(map(len, completion_ids))
        return [float(i % 2 == 0) if prompt in self.good else 1.0 for i, prompt in enumerate(prompts)]


# Dynamic sampling


def dynamic(tmp_path, reward, **options):
    options = {"per_device_train_batch_size": 16, "max_steps": 1, "max_rounds": 8} | DYNAMIC | options
    trainer = build(tmp_path, reward, prompts(), **options)
    trainer.train()
    return trainer, trainer.batches[0], logs_of(trainer)[0]


def test_groups_with_zero_variance_are_replaced(tmp_path):
    probe = Script(set())
    dynamic(tmp_path, probe, adaptive_sampling="uniform", zero_variance_groups="keep", max_rounds=None)
    first_batch = probe.seen
    script = Script(set(ALL_PROMPTS) - set(first_batch[:3]))  # three of the first batch have zero variance
    trainer, output, logs = dynamic(tmp_path, script)

    assert script.seen[:4] == first_batch  # the prompts of GRPO
    assert len(script.seen) == len(set(script.seen)) == 7  # no more than needed
    kept = [*script.seen[4:], first_batch[3]]
    assert prompts_of(output) == [prompt for prompt in kept for _ in range(4)]
    assert list(trainer._logs["prompt"]) == prompts_of(output)
    advantage = 0.5 / (np.sqrt(1 / 3) + 1e-4)  # of GRPO, for two positive and two negative rollouts
    assert output["advantages"].tolist() == pytest.approx([advantage, -advantage] * 8)
    assert logs["ada/prompts/sampled"] == 4 + 3
    assert logs["ada/frac_zero_advantage_groups"] == 0 and logs["ada/frac_reward_zero_std/first_round"] == 3 / 4
    assert logs["reward"] == pytest.approx((3 * 1 + 1 * 0.5) / 4)  # of those that GRPO asks


def test_discarded_rollouts_are_counted_and_the_batch_is_filled(tmp_path):
    script = Script({"1+1="})
    trainer, output, logs = dynamic(tmp_path, script)
    assert 25 <= len(script.seen) == len(set(script.seen)) <= 32  # at most eight prompts for each of three slots
    assert logs["ada/tokens/generated"] == script.tokens
    assert logs["ada/tokens/discarded"] == script.tokens - output["completion_mask"].sum()
    tokens = script.tokens + sum(4 * len(prompt) for prompt in script.seen)
    assert logs["num_tokens"] == trainer.state.num_input_tokens_seen == tokens
    assert logs["ada/frac_zero_advantage_groups"] == 3 / 4  # filled up
    assert output["advantages"].count_nonzero() == 4


def test_a_data_set_without_variance_ends_and_has_zero_advantages(tmp_path):
    script = Script(set())
    trainer, output, logs = dynamic(tmp_path, script)
    assert sorted(script.seen) == sorted(ALL_PROMPTS) and not output["advantages"].any()
    assert logs["ada/frac_zero_advantage_groups"] == 1


# Retries


def test_unsolved_prompts_are_retried_in_the_next_step(tmp_path):
    sampled = []

    def never(prompts, **kwargs):
        sampled.append(list(prompts))
        return [0.0] * len(prompts)

    trainer = build(tmp_path, never, prompts(), max_steps=5, **RETRIES | {"retries": 2})
    trainer.train()
    # 8 rows: at most 6 retries, each prompt in at most 3 steps, and prompts with the fewest attempts first.
    assert [len(set(step)) for step in sampled] == [8] * 5
    assert sampled[1][:6] == sampled[0][:6] and len(set(sampled[1][6:]) & set(sampled[0])) == 0
    assert sampled[2][:2] == sampled[1][6:] and sampled[2][2:6] == sampled[0][:4]
    visits = [prompt for step in sampled for prompt in step]
    assert max(visits.count(prompt) for prompt in visits) == 3
    assert [logs["ada/prompts/frac_retried"] for logs in logs_of(trainer)] == [0.0, 0.75, 0.75, 0.5, 0.75]
    assert all((step.size_P == 1).all() for step in trainer.rollouts)


# What holds in every mode


def test_metrics_of_the_data_set_are_not_logged_without_unbiased_samples(tmp_path):
    """The only prompt of the second step is a retry."""
    options = RETRIES | {"num_generations": 8, "positive_threshold": 2.0}
    trainer = build(tmp_path, even_reward, prompts(), **options)
    trainer.train()
    for logs in logs_of(trainer)[1:]:
        for name in ("reward", "reward_std", "rewards/even_reward/mean", "ada/pass_rate/mean"):
            assert logs[name] is None
        assert 0 <= logs["ada/frac_zero_advantage_groups"] <= 1


@pytest.mark.parametrize("mode", ["dynamic sampling", "retries"])
def test_steps_and_epochs_are_counted_as_for_grpo(mode, tmp_path):
    options = {"num_train_epochs": 2, "max_steps": -1, "num_generations": 4} | MODES[mode]
    trainer = build(tmp_path, even_reward, prompts(), **options)
    trainer.train()
    per_step = 8 // options["num_generations"]
    assert trainer.state.global_step == 2 * 32 // per_step and trainer.state.epoch == 2
    assert "ada/prompts/epoch" in logs_of(trainer)[-1]


def test_the_data_loader_has_placeholder_rows(tmp_path):
    trainer = build(tmp_path, even_reward, prompts(), **DYNAMIC)
    rows = [row for batch in trainer.get_train_dataloader() for row in batch]
    assert rows and not any(dict(row) for row in rows)
    with pytest.raises(RuntimeError, match="no column 'prompt'.*placeholders, and prompts come from the prompt queue"):
        rows[0]["prompt"]
    assert len(trainer.train_dataset) == 32 and trainer.train_dataset[0]["prompt"] == ALL_PROMPTS[0]
