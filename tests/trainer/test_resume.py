"""Resumed runs equal uninterrupted ones, bit for bit, and checkpoints that lack something or are damaged."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from ada_trl.pass_rates.store import PASS_RATES_FILE, load_pass_rates
from ada_trl.pass_rates.value_head import VALUE_HEAD_FILE
from ada_trl.trainer.checkpointing import STATE_FILE

from ..helpers import (
    MODES,
    QUEUE_MODES,
    Recorder,
    assert_same_run,
    build,
    even_reward,
    logs_of,
    prompts_of,
    tiny_model,
    weights_of,
)
from ..pass_rates.estimated import by_prompt, identified


def numbered(number):
    return Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(number)]})


def seeding(completions, **kwargs):
    torch.manual_seed(7)
    return even_reward(completions)


def by_token(completions, **kwargs):
    return [sum(map(ord, completion)) % 97 / 97 for completion in completions]


RETRIES, DYNAMIC = MODES["retries"], MODES["dynamic sampling"]
LARGE = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2, "reward_funcs": by_prompt}
CASES = {
    "default": {"gradient_accumulation_steps": 2},
    "data loader workers": {"dataloader_num_workers": 1},
    "a last step with fewer micro-batches": {
        **{"num_generations": 2, "samples_per_round": 8, "max_rounds": 1, "per_device_train_batch_size": 4},
        **{"steps_per_generation": 1, "gradient_accumulation_steps": 2, "dataset": numbered(6)},
    },
    "batch": MODES["batch"] | {"reward_funcs": by_token, "scale_rewards": "batch"},
    "batch, a reward function that seeds": MODES["batch"] | {"reward_funcs": seeding},
    "seq-balance, a reward function that seeds": MODES["seq-balance"] | {"reward_funcs": seeding},
    # With 32 prompts per step: in the first epoch, in the middle of the second and at the end of the third.
    "est-value": LARGE | {"adaptive_sampling": "est-value", "num_generations": 4, "dataset": identified(48)},
    "est-ema": LARGE | {"adaptive_sampling": "est-ema", "num_generations": 4, "dataset": identified(16)},
    "est-ema, third epoch": LARGE | {"adaptive_sampling": "est-ema", "num_generations": 4, "dataset": identified(8)},
    "dynamic sampling": DYNAMIC,
    "dynamic sampling in rounds of a stream": {
        **{"zero_variance_groups": "resample", "num_generations": 4, "samples_per_round": 4, "max_rounds": 2},
        "dataset": numbered(32).to_iterable_dataset(),
    },
    "retries of a stream": RETRIES | {"dataset": numbered(32).to_iterable_dataset()},
    "retries of groups": {"baseline": "batch", "retries": 2, "num_generations": 2},
    "retries, a reward function that seeds": RETRIES | {"reward_funcs": seeding},
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    options = {"dataset": numbered(32), "save_strategy": "steps", "save_steps": 3, "max_steps": 6} | CASES[name]
    whole = build(tmp_path / "whole", **options)
    whole.train()
    resumed = build(tmp_path / "resumed", model=tiny_model(seed=9), **options)  # its weights are the checkpoint's
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_run(whole, resumed)
    checkpoints = [tmp_path / run / "checkpoint-6" for run in ("whole", "resumed")]
    own_files = [sorted(path.name for path in checkpoint.glob("ada_*")) for checkpoint in checkpoints]
    assert own_files[0] == own_files[1]
    states = [json.loads((checkpoint / STATE_FILE).read_text()) for checkpoint in checkpoints]
    assert states[0] == states[1] and ("queue" in states[0]) == name.startswith(("dynamic", "retries"))
    if PASS_RATES_FILE in own_files[0]:
        files = [load_pass_rates(checkpoint / PASS_RATES_FILE) for checkpoint in checkpoints]
        assert files[0] == files[1]
        assert whole.pass_rates.counts.counts == resumed.pass_rates.counts.counts
    if VALUE_HEAD_FILE in own_files[0]:
        heads = [trainer.pass_rates.head.state_dict() for trainer in (whole, resumed)]
        assert all(torch.equal(heads[0][tensor], heads[1][tensor]) for tensor in heads[0])
    expected = {"est-value": {PASS_RATES_FILE, VALUE_HEAD_FILE}, "est-ema": {PASS_RATES_FILE}}
    assert expected.get(name, set()) <= set(own_files[0])


def test_a_run_continues_with_the_state_of_other_features(tmp_path):
    options = {"use_adaptive_entropy": True, "entropy_target": 9.0, "save_strategy": "steps", "save_steps": 1}
    first = build(tmp_path, **options)
    first.train()
    trainer = build(tmp_path, **options | {"max_steps": 3})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert trainer.entropy_coef > first.entropy_coef > 0, "Two steps, then a third."


def test_the_batch_baseline_resumes_from_a_grpo_checkpoint(tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    build(tmp_path / "grpo", adaptive_sampling="uniform", num_generations=2, **saving).train()
    trainer = build(tmp_path / "batch", num_generations=1, baseline="batch", **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "grpo" / "checkpoint-1"))
    assert trainer.state.global_step == 2 and "from the start of the dataset" not in caplog.text


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"num_generations": 1, "baseline": "batch"}, "has 8 prompts, and one of the checkpoint {}"),
        ({"num_generations": 1, "baseline": "batch", "ignore_data_skip": True}, None),
        ({"num_generations": 2, "adaptive_sampling": "uniform"}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(("file", "prompts"), [("kept", "4"), ("missing", "another number")])
def test_another_number_of_prompts_than_in_the_checkpoint_is_reported(file, prompts, options, found, tmp_path, caplog):
    """A checkpoint of GRPOTrainer has no file of ours. The data position counts steps, so it is another one then."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    build(tmp_path / "first", adaptive_sampling="uniform", num_generations=2, **saving).train()
    checkpoint = tmp_path / "first" / "checkpoint-1"
    if file == "missing":
        (checkpoint / "ada_state.json").unlink()
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "second", **options).train(resume_from_checkpoint=str(checkpoint))
    assert caplog.text.count("position in the dataset differs") == (found is not None)
    assert found is None or found.format(prompts) in caplog.text


@pytest.mark.parametrize("retries", [0, 1])
def test_a_checkpoint_with_a_prompt_queue_resumes_without_one_at_another_position(retries, tmp_path, caplog):
    """A queue knows its position, also with another number of prompts."""
    options = MODES["retries"] | {"save_strategy": "steps", "save_steps": 1}
    build(tmp_path / "first", **options).train()
    with caplog.at_level(logging.WARNING):
        options |= {"retries": retries, "per_device_train_batch_size": 4 if retries else 8}
        build(tmp_path / "second", **options).train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert ("has a prompt queue, and this run has none, so that the position" in caplog.text) == (retries == 0)
    assert ("position in the dataset differs" in caplog.text) == (retries == 0)


class OwnSampler(Recorder):
    def _get_train_sampler(self, dataset=None):
        prompts = self.args.generation_batch_size // self.num_generations
        return RepeatSampler(
            self.train_dataset, self.num_generations, prompts, self.num_iterations, shuffle=True, seed=self.args.seed
        )


class OwnLoader(OwnSampler):
    """As TRL builds it, but not by TRL's method."""

    def get_train_dataloader(self):
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size * self.args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )


@pytest.mark.parametrize("trainer_class", [OwnSampler, OwnLoader])
def test_the_order_of_a_sampler_of_the_user_continues_after_the_first_epoch(trainer_class, tmp_path):
    options = MODES["batch"] | {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    whole = build(tmp_path / "whole", trainer_class=trainer_class, **options)
    whole.train()
    resumed = build(tmp_path / "resumed", trainer_class=trainer_class, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert whole.state.epoch == 2 and torch.equal(weights_of(whole), weights_of(resumed))


# The prompt queue


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}], ids=str)
@pytest.mark.parametrize("mode", ["batch", *QUEUE_MODES])
def test_a_checkpoint_on_a_signal_resumes_with_the_batch_that_it_interrupts(mode, options, tmp_path):
    """`enable_jit_checkpoint` saves after a batch was sampled and before its optimizer step."""
    calls = []

    def reward(prompts, completions, trainer_state, **kwargs):
        calls.append((trainer_state.global_step, sorted(prompts)))
        if signals and trainer_state.global_step == 2:
            signals.pop().is_checkpoint_requested = True
        return even_reward(completions)

    options = MODES[mode] | options | {"max_steps": 4, "enable_jit_checkpoint": True}
    trainer = build(tmp_path, reward, numbered(64), **options)
    signals = [c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]
    trainer.train()
    assert not signals and trainer.state.global_step < 4, "The signal has stopped the training."
    interrupted = [prompts for step, prompts in calls if step == 2]
    calls.clear()
    resumed = build(tmp_path / "resumed", reward, numbered(64), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = [prompts for step, prompts in calls if step == 2]
    # Later rounds, and retries in a second batch of the step, depend on the rewards of other random completions.
    number = 1 if mode in QUEUE_MODES else len(interrupted)
    assert again[:number] == interrupted[:number] and resumed.state.global_step == 4


@pytest.mark.parametrize(("accumulated", "per_generation"), [(3, 2), (4, 3), (5, 3)])
def test_a_signal_within_a_step_of_two_batches_loses_no_prompt(accumulated, per_generation, tmp_path):
    """The second step trains on the rest of an earlier generation batch and on another one."""
    sampled = []

    def reward(prompts, trainer_state, **kwargs):
        sampled.append(list(prompts))
        if signals and trainer_state.global_step == 1:
            signals.pop().is_checkpoint_requested = True
        return [1.0] * len(prompts)  # without retries

    options = {"gradient_accumulation_steps": accumulated, "steps_per_generation": per_generation, "max_steps": 4}
    options |= RETRIES | {"per_device_train_batch_size": 4, "enable_jit_checkpoint": True}
    trainer = build(tmp_path, reward, numbered(128), **options)
    signals = [c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager")]
    trainer.train()
    shared = accumulated // per_generation
    assert len(sampled) > shared + 1, "The signal arrived after another batch had been sampled."
    first_run, sampled[:] = list(sampled), []
    build(tmp_path / "resumed", reward, numbered(128), **options).train(str(tmp_path / "checkpoint-1"))
    assert sampled[:2] == first_run[shared : shared + 2]


@pytest.mark.parametrize("number", [8, 64])
@pytest.mark.parametrize("mode", ["batch", *QUEUE_MODES])
def test_ignore_data_skip_starts_from_the_first_row(mode, number, tmp_path):
    """Of a dataset that may be smaller or larger than the checkpoint's."""
    sampled = []

    def reward(prompts, completions, **kwargs):
        sampled.append(list(dict.fromkeys(prompts)))
        return [float(i % 2) for i in range(len(prompts))]

    options = MODES[mode] | {"shuffle_dataset": False, "save_strategy": "steps", "save_steps": 2}
    build(tmp_path, reward, numbered(32), **options).train()
    sampled.clear()
    options |= {"max_steps": 3, "ignore_data_skip": True}
    build(tmp_path / "resumed", reward, numbered(number), **options).train(str(tmp_path / "checkpoint-2"))
    assert sampled[0] == numbered(number)["prompt"][: len(sampled[0])]


def test_a_smaller_batch_resumes_with_fewer_retries(tmp_path, caplog):
    """As on fewer GPUs: a checkpoint with 6 queued retries, resumed with 4 slots and with 2."""

    def never(prompts, **kwargs):
        return [0.0] * len(prompts)

    options = RETRIES | {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "retries": 4}
    build(tmp_path, never, numbered(32), **options).train()
    for slots, room in ((4, 3), (2, 1)):
        resumed = build(
            tmp_path, never, numbered(32), **options | {"per_device_train_batch_size": slots, "max_steps": 4}
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 4 and len(resumed.batches[0]["advantages"]) == slots
        assert f"The checkpoint has 6 queued retries, but the batch now has room for {room}" in caplog.text


def test_a_checkpoint_inside_a_generation_batch_samples_its_prompts_again(tmp_path):
    options = RETRIES | {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    trainer = build(tmp_path, even_reward, numbered(32), **options)
    trainer.train()
    resumed = build(tmp_path / "again", even_reward, numbered(32), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert prompts_of(resumed.batches[0]) == prompts_of(trainer.batches[1])


def test_a_checkpoint_without_a_queue_warns_and_a_broken_one_is_rejected(tmp_path, caplog):
    options = RETRIES | {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    build(tmp_path, even_reward, numbered(32), **options).train()
    path = tmp_path / "checkpoint-1" / STATE_FILE
    path.write_text("{")
    with pytest.raises(ValueError, match="ada_state.json is not valid JSON .*Restore it, or delete it"):
        build(tmp_path, even_reward, numbered(32), **options).train(resume_from_checkpoint=str(path.parent))
    for content in ("{}", None):  # of a run without a queue, and no file
        path.write_text(content) if content else path.unlink()
        caplog.clear()
        build(tmp_path, even_reward, numbered(32), **options).train(resume_from_checkpoint=str(path.parent))
        assert sum("prompts are taken from the start of the dataset" in text for text in caplog.messages) == 1


# Pass rates


def estimated_run(tmp_path, adaptive_sampling, **options):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "num_generations": 4} | options
    return build(tmp_path, by_prompt, adaptive_sampling=adaptive_sampling, **options)


def checkpoint(tmp_path, adaptive_sampling):
    estimated_run(tmp_path, adaptive_sampling, max_steps=2).train()
    return tmp_path / "checkpoint-2"


def test_a_checkpoint_without_pass_rates_starts_from_the_prior_with_a_warning(tmp_path, caplog):
    path = checkpoint(tmp_path / "first", "uniform")
    trainer = estimated_run(tmp_path / "second", "est-value", log_completions=True)
    trainer.train(resume_from_checkpoint=str(path))
    warnings = [record.message for record in caplog.records if "start from the prior" in record.message]
    assert [n in text for n, text in zip((PASS_RATES_FILE, VALUE_HEAD_FILE), warnings, strict=True)] == [True] * 2
    assert trainer.state.global_step == 4
    third = logs_of(trainer)[2]
    assert third["ada/estimator/brier"] == pytest.approx(third["ada/estimator/brier_ema"])
