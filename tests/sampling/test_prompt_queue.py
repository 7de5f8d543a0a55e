"""The trainer with prompts from a stream: refill, rounds across steps, selection, exact resume."""

import json
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset
from trl import GRPOTrainer

from ada_trl.sampling.prompt_sources import DataLoaderPrompts
from ada_trl.trainer.checkpointing import STATE_FILE

from ..helpers import build, even_reward, logs_of, prompts_of, remember_pools, train_with_and_without_resume


ALL_PROMPTS = [f"{i}+{j}=" for i in range(1, 9) for j in range(1, 5)]
REFILL = {
    "adaptive_sampling": "uniform",
    "zero_variance_groups": "resample",
    "num_generations": 4,
    "scale_rewards": "group",
}
ACROSS = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "num_generations": 1}
SELECTION = {"adaptive_sampling": "uniform", "prompt_oversampling": 3, "num_generations": 2}
MODES = {
    "refill": REFILL,
    "refill in rounds": {
        "zero_variance_groups": "resample",
        "num_generations": 4,
        "samples_per_round": 4,
        "max_rounds": 2,
    },
    "across steps": ACROSS,
    "both quotas": ACROSS | {"adaptive_sampling": "seq-balance", "num_generations": 2, "max_rounds": 3},
    "selection": SELECTION,
    "selection with rounds": ACROSS | {"prompt_oversampling": 2},
}


def prompts(number=32, streaming=False):
    dataset = Dataset.from_dict({"prompt": ALL_PROMPTS[:number]})
    return dataset.to_iterable_dataset() if streaming else dataset


class Script:
    """Rewards with contrast for the prompts in `good`, one value for the others; remembers what it has seen."""

    __name__ = "script"

    def __init__(self, good):
        self.good, self.seen, self.tokens = good, [], 0

    def __call__(self, prompts, completion_ids, **kwargs):
        self.seen += prompts[::4]
        self.tokens += sum(map(len, completion_ids))
        return [float(i % 2 == 0) if prompt in self.good else 1.0 for i, prompt in enumerate(prompts)]


# Refill


def refill(tmp_path, reward, **options):
    options = {"per_device_train_batch_size": 16, "max_steps": 1, "max_rounds": 8} | REFILL | options
    trainer = build(tmp_path, reward, prompts(), **options)
    trainer.train()
    return trainer, trainer.batches[0], logs_of(trainer)[0]


def test_silent_groups_are_replaced_until_the_batch_has_contrast(tmp_path):
    probe = Script(set())
    refill(tmp_path, probe, adaptive_sampling="uniform", zero_variance_groups="keep", max_rounds=4)
    first_batch = probe.seen
    script = Script(set(ALL_PROMPTS) - set(first_batch[:3]))  # three of the first batch are silent
    trainer, output, logs = refill(tmp_path, script)

    assert script.seen[:4] == first_batch  # those that GRPO asks
    assert len(script.seen) == len(set(script.seen)) == 7  # as many new ones as were silent, and no more
    kept = [*script.seen[4:], first_batch[3]]
    assert prompts_of(output) == [prompt for prompt in kept for _ in range(4)]
    assert list(trainer._logs["prompt"]) == prompts_of(output)
    advantage = 0.5 / (np.sqrt(1 / 3) + 1e-4)  # GRPO's, of two right and two wrong
    assert output["advantages"].tolist() == pytest.approx([advantage, -advantage] * 8)
    assert logs["ada/prompts/sampled"] == 7 and logs["ada/prompts/resampled"] == 3
    assert logs["ada/frac_zero_advantage_groups"] == 0 and logs["ada/frac_reward_zero_std/first_round"] == 3 / 4
    assert logs["reward"] == pytest.approx((3 * 1 + 1 * 0.5) / 4)  # of those that GRPO asks


def test_refill_counts_what_it_throws_away_and_fills_up(tmp_path):
    script = Script({"1+1="})
    _, output, logs = refill(tmp_path, script)
    assert 25 <= len(script.seen) == len(set(script.seen)) <= 32  # three slots ask eight each: the cap
    assert logs["ada/tokens/generated"] == script.tokens
    assert logs["ada/tokens/discarded"] == script.tokens - output["completion_mask"].sum()
    assert logs["num_tokens"] == script.tokens + sum(4 * len(prompt) for prompt in script.seen)
    assert logs["ada/frac_zero_advantage_groups"] == 3 / 4  # filled up
    assert output["advantages"].count_nonzero() == 4


def test_all_silent_is_no_hang_and_moves_nothing(tmp_path):
    script = Script(set())
    trainer, output, logs = refill(tmp_path, script)
    assert sorted(script.seen) == sorted(ALL_PROMPTS) and not output["advantages"].any()
    assert logs["ada/frac_zero_advantage_groups"] == 1


# Rounds across steps


def test_what_has_not_passed_returns_in_the_next_step(tmp_path):
    asked = []

    def never(prompts, **kwargs):
        asked.append(list(prompts))
        return [0.0] * len(prompts)

    trainer = build(tmp_path, never, prompts(), max_steps=5, **ACROSS | {"max_rounds": 3})
    pools = remember_pools(trainer)
    trainer.train()
    # 8 rows: at most 6 return, nobody draws more than 3 rounds, and those with the fewest go on first.
    assert [len(set(step)) for step in asked] == [8] * 5
    assert asked[1][:6] == asked[0][:6] and len(set(asked[1][6:]) & set(asked[0])) == 0
    assert asked[2][:2] == asked[1][6:] and asked[2][2:6] == asked[0][:4]
    visits = [prompt for step in asked for prompt in step]
    assert max(visits.count(prompt) for prompt in visits) == 3
    assert [logs["ada/prompts/frac_new"] for logs in logs_of(trainer)] == [1.0, 0.25, 0.25, 0.5, 0.25]
    assert all(len(pool) == 1 for step in pools for pool in step)


def test_a_prompt_is_resolved_by_what_earlier_steps_have_drawn_too(tmp_path):
    """Right and wrong in turns: of one rollout per step nobody is resolved, of two in a row everybody."""
    steps = []

    def in_turns(prompts, **kwargs):
        steps.append(len(steps) % 2)
        return [float(steps[-1])] * len(prompts)

    options = ACROSS | {"adaptive_sampling": "seq-balance", "max_rounds": 2}
    trainer = build(tmp_path, in_turns, prompts(), max_steps=4, **options)
    trainer.train()
    logs = logs_of(trainer)
    assert [step["ada/frac_exit_condition_met"] for step in logs] == [
        1 - step["ada/prompts/frac_new"] for step in logs
    ]
    assert logs[1]["ada/frac_exit_condition_met"] == 0.75 and "ada/active_prompts/round_2" not in logs[1]


def test_an_empirical_prior_is_fitted_to_what_stands_for_the_data(tmp_path):
    """Prompts return because they fail; taking them for a sample of the data would predict too little."""
    trainer = build(tmp_path, even_reward, prompts(), max_steps=1, **ACROSS | {"pass_rate_estimator": "ema"})
    seen = []
    learn = trainer.pass_rates.ema._fit_prior
    trainer.pass_rates.ema._fit_prior = lambda totals: seen.append(len(totals)) or learn(totals)
    trainer.args.max_steps = 3
    trainer.train()
    logs = logs_of(trainer)
    assert seen == [round(8 * step["ada/prompts/frac_new"]) for step in logs] and min(seen) < 8


# Selection


def test_prompts_that_are_expected_to_teach_more_are_asked_more_often(tmp_path):
    """Half of the prompts always pass. Once that is known, the others are asked; until then, the data's order."""
    every = [f"{i}+{j}=" for i in range(1, 13) for j in range(1, 9)]
    hard = set(every[::2])

    def reward(prompts, completions, **kwargs):
        return [
            float(sum(map(ord, c)) % 2 == 0) if p in hard else 1.0 for p, c in zip(prompts, completions, strict=True)
        ]

    options = SELECTION | {"pass_rate_estimator": "ema", "max_steps": 20, "per_device_train_batch_size": 32}
    trainer = build(tmp_path, reward, Dataset.from_dict({"prompt": every}), learning_rate=1e-6, **options)
    trainer.train()
    asked = [prompts_of(batch)[::2] for batch in trainer.batches]
    assert all(len(set(step)) == len(step) for step in asked)
    assert sorted(prompt for step in asked[:6] for prompt in step) == sorted(
        every
    )  # nothing is known in the first epoch
    # A quarter in the data's order is hard half of the time; of the chosen, nearly all.
    assert np.mean([prompt in hard for step in asked[10:] for prompt in step]) > 0.75
    skips = [step["ada/prompts/max_skips"] for step in logs_of(trainer)[-8:]]
    assert 1 <= max(skips) <= 8


# What holds in every mode


@pytest.mark.parametrize(
    ("mode", "streaming"), [(mode, mode in ("refill in rounds", "across steps")) for mode in MODES]
)
def test_resume_continues_as_if_never_stopped(mode, streaming, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6} | MODES[mode]
    train_with_and_without_resume(build, tmp_path, at=3, dataset=prompts(streaming=streaming), **options)
    states = [json.loads((tmp_path / name / "checkpoint-6" / STATE_FILE).read_text()) for name in ("whole", "resumed")]
    assert states[0] == states[1]


def test_a_smaller_batch_resumes_with_those_that_it_has_room_for(tmp_path, caplog):
    """As on fewer GPUs: a checkpoint with 6 prompts that are retried, resumed with 4 slots and with 2."""

    def never(prompts, **kwargs):
        return [0.0] * len(prompts)

    options = ACROSS | {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "max_rounds": 5}
    build(tmp_path, never, prompts(), **options).train()
    for slots, room in ((4, 3), (2, 1)):
        resumed = build(tmp_path, never, prompts(), **options | {"per_device_train_batch_size": slots, "max_steps": 4})
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 4 and len(resumed.batches[0]["advantages"]) == slots
        assert f"The checkpoint has 6 queued retries, but the batch now has room for {room}" in caplog.text


def test_one_of_two_slots_is_for_retries(tmp_path):
    asked = []

    def never(prompts, **kwargs):
        asked.extend(prompts)
        return [0.0] * len(prompts)

    options = ACROSS | {"per_device_train_batch_size": 2, "max_rounds": 3, "max_steps": 6}
    build(tmp_path, never, prompts(), **options).train()
    steps = [set(asked[i : i + 2]) for i in range(0, len(asked), 2)]
    assert all(len(before & after) == 1 for before, after in pairwise(steps)), "One of two slots is for retries."


def test_where_no_prompt_stands_for_the_data_nothing_is_said_of_it(tmp_path):
    """Instead of the mean over those that were chosen, under the same name."""
    trainer = build(tmp_path, even_reward, prompts(), **SELECTION | {"logging_steps": 1})
    asked, original = [], trainer.prompt_source.sampled_prompts

    def nobody_typical(slots):
        asked.append(original(slots))
        asked[-1].is_on_distribution[:] = [False] * len(asked[-1].is_on_distribution)
        return asked[-1]

    trainer.prompt_source.sampled_prompts = nobody_typical
    trainer.train()
    for logs in logs_of(trainer):
        for name in ("reward", "reward_std", "rewards/even_reward/mean", "frac_reward_zero_std", "ada/pass_rate/mean"):
            assert logs[name] is None
        assert 0 <= logs["ada/reward/trained"] <= 1


def test_a_checkpoint_in_the_middle_of_a_generation_asks_its_prompts_again(tmp_path):
    options = ACROSS | {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    trainer = build(tmp_path, even_reward, prompts(), **options)
    trainer.train()
    resumed = build(tmp_path / "again", even_reward, prompts(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert prompts_of(resumed.batches[0]) == prompts_of(trainer.batches[1])


@pytest.mark.parametrize("mode", ["refill", "across steps"])
def test_steps_and_epochs_are_counted_as_for_grpo(mode, tmp_path):
    options = {"num_train_epochs": 2, "max_steps": -1, "num_generations": 4} | MODES[mode]
    trainer = build(tmp_path, even_reward, prompts(), **options)
    trainer.train()
    per_step = 8 // options["num_generations"]
    assert trainer.state.global_step == 2 * 32 // per_step and trainer.state.epoch == 2
    assert "ada/prompts/epoch" in logs_of(trainer)[-1]


def test_a_streaming_set_that_ends_starts_again(tmp_path):
    trainer = build(tmp_path, even_reward, prompts(11, streaming=True), max_steps=4, **ACROSS)
    trainer.train()
    assert logs_of(trainer)[-1]["ada/prompts/epoch"] >= 1 and trainer.state.global_step == 4


def test_the_loader_reads_no_data(tmp_path):
    trainer = build(tmp_path, even_reward, prompts(), **REFILL)
    rows = [row for batch in trainer.get_train_dataloader() for row in batch]
    assert rows and not any(dict(row) for row in rows)
    with pytest.raises(RuntimeError, match="no column 'prompt'.*placeholders, and prompts come from the prompt queue"):
        rows[0]["prompt"]
    assert len(trainer.train_dataset) == 32 and trainer.train_dataset[0]["prompt"] == ALL_PROMPTS[0]


def test_too_small_a_data_set_is_named(tmp_path):
    with pytest.raises(ValueError, match="needs 8 distinct prompts.*the training dataset has only 5.*smaller batch"):
        build(tmp_path, even_reward, prompts(5), **ACROSS)


def test_a_missing_queue_is_said_and_a_broken_one_is_named(tmp_path, caplog):
    options = ACROSS | {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    build(tmp_path, even_reward, prompts(), **options).train()
    path = tmp_path / "checkpoint-1" / STATE_FILE
    path.write_text("{")
    with pytest.raises(ValueError, match="ada_state.json is not valid JSON .*Restore it, or delete it"):
        build(tmp_path, even_reward, prompts(), **options).train(resume_from_checkpoint=str(path.parent))
    path.unlink()
    build(tmp_path, even_reward, prompts(), **options).train(resume_from_checkpoint=str(path.parent))
    assert "prompts are taken from the start of the data set" in caplog.text


def test_with_everything_off_nothing_is_streamed(tmp_path):
    trainer = build(tmp_path, num_generations=4)
    assert type(trainer.prompt_source) is DataLoaderPrompts
    assert type(trainer).get_train_dataloader is not GRPOTrainer.get_train_dataloader
    assert {row["prompt"] for batch in trainer.get_train_dataloader() for row in batch} != {""}
