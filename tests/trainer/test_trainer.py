"""The trainer end to end on a tiny model: what reaches the loss, what is logged, resume, cards."""

import logging
import math
import re

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig

from ..helpers import (
    PROMPTS,
    ScriptedRewards,
    build,
    even_reward,
    length_reward,
    logs_of,
    moved,
    prompt_dataset,
    prompts_of,
    remember_rollouts,
    tiny_tokenizer,
)


LISTED = GRPOConfig.__doc__.split("loss_type (`str`")[1].split("mask_truncated_completions")[0]
LOSS_TYPES = re.findall(r"^ *- `\"(\w+)\"`", LISTED, re.MULTILINE)
assert len(LOSS_TYPES) >= 8, "TRL's documentation lists them in another way."


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_moves_every_parameter(loss_type, tmp_path):
    trainer = build(tmp_path, loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.28)
    assert all(moved(trainer).values())
    for logs in trainer.state.log_history:
        # A minimum over completions that ended is 0/0 in TRL too when none did; everything else must be finite.
        assert all(math.isfinite(value) for value in logs.values() if isinstance(value, float)), logs


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"steps_per_generation": 2},
        {"num_iterations": 2},
        {"num_generations": 3, "per_device_train_batch_size": 6},
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
        },
        {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    ],
    ids=lambda overrides: next(iter(overrides), "plain"),
)
def test_exactly_one_group_per_prompt_reaches_the_loss(overrides, tmp_path):
    trainer = build(tmp_path, max_steps=3, **overrides)
    trainer.train()
    n = trainer.num_generations
    for batch in trainer.batches:
        prompts = prompts_of(batch)
        assert len(prompts) == trainer.args.generation_batch_size
        for i in range(0, len(prompts), n):
            assert len(set(prompts[i : i + n])) == 1
        assert batch["advantages"].shape == (len(prompts),)
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_a_step_line_by_line(tmp_path):
    """One prompt meets its exit condition in round 1, one in round 2, the others never; rewards are ±1, so the baseline matters."""
    scripts = {
        "1+2=": [1, -1, 1, -1],
        "31+4=": [-1, -1, -1, -1, 1, 1, -1, -1],
        "5+55=": [1] * 12,
        "7+8=": [-1] * 12,
    }
    rewards = ScriptedRewards(**scripts)
    trainer = build(
        tmp_path,
        rewards,
        prompt_dataset(1),
        per_device_train_batch_size=16,
        max_steps=1,
        samples_per_round=4,
        max_rounds=3,
        log_completions=True,
    )
    trainer.train()

    rounds = [sorted(set(call), key=PROMPTS.index) for call in rewards.calls]
    assert rounds == [PROMPTS, PROMPTS[1:], PROMPTS[2:]]
    assert all(call.count(prompt) == 4 for call in rewards.calls for prompt in set(call))

    (batch,) = trainer.batches
    advantages = dict.fromkeys(PROMPTS, ())
    for prompt, advantage in zip(prompts_of(batch), batch["advantages"].tolist(), strict=True):
        advantages[prompt] += (round(advantage, 4),)
    assert sorted(advantages["1+2="]) == pytest.approx([-(2**0.5)] * 2 + [2**0.5] * 2, abs=1e-3)
    assert sorted(advantages["31+4="]) == [-1, -1, 3, 3]  # mean −1/2, pass rate 1/4: weight 2
    assert advantages["5+55="] == advantages["7+8="] == (0, 0, 0, 0)

    (logs,) = logs_of(trainer)
    first_round = torch.tensor([1, -1, 1, -1] + [-1] * 4 + [1] * 4 + [-1] * 4, dtype=torch.float32)
    assert logs["reward"] == logs["rewards/scripted/mean"] == pytest.approx(first_round.mean().item())
    assert logs["reward_std"] == logs["rewards/scripted/std"] == pytest.approx(first_round.std().item())
    assert logs["frac_reward_zero_std"] == logs["ada/frac_reward_zero_std/first_round"] == 0.75
    assert logs["ada/frac_zero_advantage_groups"] == 0.5
    assert logs["ada/samples_per_prompt/mean"] == (4 + 8 + 12 + 12) / 4
    assert logs["ada/samples_per_prompt/max"] == 12
    assert [logs[f"ada/active_prompts/round_{k}"] for k in (1, 2, 3)] == [4, 3, 2]


def test_tokens_are_counted_once(tmp_path):
    class Counting(ScriptedRewards):
        tokens = prompt_tokens = 0

        def __call__(self, prompts, completions, completion_ids, **kwargs):
            self.tokens += sum(map(len, completion_ids))
            self.prompt_tokens += sum(map(len, prompts))
            return super().__call__(prompts, completions)

    rewards = Counting(**{prompt: [0] * 32 for prompt in PROMPTS})
    trainer = build(tmp_path, rewards, prompt_dataset(1), per_device_train_batch_size=16, max_steps=1)
    trainer.train()
    (logs,) = logs_of(trainer)
    assert len(rewards.calls) == 8 and len(rewards.calls[0]) == 16
    assert logs["ada/tokens/generated"] == rewards.tokens
    assert logs["num_tokens"] == trainer.state.num_input_tokens_seen == rewards.tokens + rewards.prompt_tokens
    trained = trainer.batches[0]["completion_mask"].sum().item()
    assert logs["ada/tokens/discarded"] == rewards.tokens - trained


def test_duplicate_prompts_in_one_batch_have_separate_pools(tmp_path):
    dataset = prompt_dataset(1).select([0, 0])
    rewards = ScriptedRewards(**{"1+2=": [1, 1, 0, 0] + [0] * 4 + [1, 1, 0, 0]})
    trainer = build(tmp_path, rewards, dataset, max_steps=1, samples_per_round=4)
    trainer.train()
    assert [len(call) for call in rewards.calls] == [8, 4]


def test_none_rewards(tmp_path):
    scripts = {"1+2=": [None] * 8, "31+4=": [1, None, 0, 0, 1, None, None, None], "5+55=": [1, 0] * 4}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1).select([0, 1, 2]),
        per_device_train_batch_size=12,
        max_steps=1,
        samples_per_round=4,
        max_rounds=2,
        min_positives=2,
        log_completions=True,
    )
    assert any(moved(trainer).values())
    (batch,) = trainer.batches
    for prompt, advantage in zip(prompts_of(batch), batch["advantages"].tolist(), strict=True):
        assert (advantage == 0) == (prompt == "1+2=")
    assert logs_of(trainer)[0]["ada/frac_unscored"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", ["seq-balance", "est-ema", "uniform"])
def test_infinite_rewards_are_unscored(mode, tmp_path):
    inf = math.inf

    def reward(completions, **kwargs):
        return [(inf, 1.0, -inf, 0.0)[i % 4] for i in range(len(completions))]

    trainer = build(tmp_path, reward, adaptive_sampling=mode, max_steps=1)
    has_moved = any(moved(trainer).values())
    assert has_moved or mode == "uniform", "GRPO's own statistics of such a group are NaN."
    assert all(math.isfinite(value) for name, value in logs_of(trainer)[0].items() if name.startswith("ada/"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_total_reward_that_overflows_is_unscored(dtype, tmp_path, request):
    scripts = {"1+2=": [3e38, 1, 0, 0], "31+4=": [-3e38, 3e38] + [0] * 30}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1).select([0, 1]),
        max_steps=1,
        reward_weights=[10.0],
    )
    steps = remember_rollouts(trainer)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(dtype)
    trainer.train()
    assert [rollouts.scored_P.tolist() for rollouts in steps] == [[3, 30]]
    (batch,) = trainer.batches
    assert batch["advantages"].isfinite().all() and batch["advantages"].any()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert all(math.isfinite(value) for name, value in logs_of(trainer)[0].items() if name.startswith("ada/"))


@pytest.mark.parametrize(
    "overrides",
    [
        {"adaptive_sampling": "seq-balance", "prompt_weighting": "inverse"},
        {"adaptive_sampling": "uniform", "baseline": "batch", "num_generations": 1},
    ],
    ids=["pool", "batch"],
)
def test_rewards_near_the_largest_float_leave_the_weights_finite(overrides, tmp_path):
    def reward(completions, **kwargs):
        return [(3e38, -3e38, 1.0, 0.0)[i % 4] for i in range(len(completions))]

    trainer = build(tmp_path, reward, max_steps=2, **overrides)
    trainer.train()
    assert all(batch["advantages"].isfinite().all() and batch["advantages"].any() for batch in trainer.batches)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_success_reward_defines_success_and_the_total_is_trained_on(tmp_path):
    trainer = build(
        tmp_path,
        [even_reward, length_reward],
        success_reward="even_reward",
        reward_weights=[1.0, 10.0],
        max_steps=1,
    )
    steps = remember_rollouts(trainer)
    trainer.train()
    (rollouts,) = steps
    even_N, length_N = rollouts.rewards_NF.T
    assert (rollouts.success_reward_N == even_N).all() and (rollouts.is_positive_N == (even_N == 1)).all()
    assert rollouts.reward_N == pytest.approx(even_N + 10 * length_N)


def test_columns_reach_the_reward_function_in_every_round(tmp_path):
    dataset = prompt_dataset(1).add_column("answer", [f"answer to {prompt}" for prompt in PROMPTS])
    calls = []

    def reward(prompts, completions, answer, trainer_state, **kwargs):
        calls.append(trainer_state.global_step)
        assert answer == [f"answer to {prompt}" for prompt in prompts]
        return [0.0] * len(prompts)

    build(tmp_path, reward, dataset, max_steps=1).train()
    assert len(calls) == 8


@pytest.mark.parametrize("scale_rewards", ["none", "group", "batch"])
def test_scale_rewards_uses_pool_statistics(scale_rewards, tmp_path):
    scripts = {"1+2=": [1, 0, 0, 0, 1, 0, 0, 0], "31+4=": [1, 1, 0, 0]}
    trainer = build(
        tmp_path,
        ScriptedRewards(**scripts),
        prompt_dataset(1).select([0, 1]),
        max_steps=1,
        samples_per_round=4,
        min_positives=2,
        prompt_weighting="none",
        scale_rewards=scale_rewards,
    )
    trainer.train()
    (batch,) = trainer.batches
    everything = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0])
    for prompt, mean in (("1+2=", 0.25), ("31+4=", 0.5)):
        pool = torch.tensor([float(reward) for reward in scripts[prompt]])
        std = {"none": 1.0, "group": pool.std() + 1e-4, "batch": everything.std() + 1e-4}[scale_rewards]
        rows = [i for i, p in enumerate(prompts_of(batch)) if p == prompt]
        expected = sorted([(1 - mean) / std] * 2 + [-mean / std] * 2)
        assert sorted(batch["advantages"][rows].tolist()) == pytest.approx([float(e) for e in expected])


def test_log_completions_shows_the_selected_group_with_its_advantages(tmp_path):
    def reward(prompts, completions, log_extra, log_metric, **kwargs):
        log_extra("reversed", [completion[::-1] for completion in completions])
        log_metric("rows", len(prompts))
        return even_reward(completions)

    trainer = build(tmp_path, reward, log_completions=True, num_completions_to_print=1, max_steps=1)
    trainer.train()
    (batch,) = trainer.batches
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    decoded = tiny_tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
    assert table["completion"].tolist() == decoded
    assert table["prompt"].tolist() == prompts_of(batch)
    assert table["advantage"].tolist() == pytest.approx(batch["advantages"].tolist())
    assert table["reversed"].tolist() == [completion[::-1] for completion in decoded]
    assert table["reward"].tolist() == even_reward(decoded)
    assert logs_of(trainer)[0]["rows"] == 8  # of the first round


def test_too_few_extra_values_are_rejected_if_completions_are_logged(tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("column", [0])
        return even_reward(completions)

    with pytest.raises(ValueError, match=r"log_extra\('column', …\) was given 1 values for 8 completions"):
        build(tmp_path, reward, log_completions=True).train()
    trainer = build(tmp_path, reward)
    trainer.train()
    assert len(logs_of(trainer)) == 2, "As in GRPOTrainer."


def test_of_two_functions_that_log_one_column_the_last_one_is_logged(tmp_path):
    def first(completions, log_extra, **kwargs):
        log_extra("column", [f"first {completion}" for completion in completions])
        log_extra("pool_size", [-1] * len(completions))
        return even_reward(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("column", [f"second {completion}" for completion in completions])
        return even_reward(completions)

    build(tmp_path, [first, second], log_completions=True, max_steps=1, success_reward="second").train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["column"].tolist() == [f"second {completion}" for completion in table["completion"]]
    assert table["pool_size"].min() >= 4, "What the trainer adds comes after what reward functions log."


def test_evaluation_is_untouched(tmp_path):
    calls = []

    def reward(prompts, completions, **kwargs):
        calls.append(len(prompts))
        return even_reward(completions)

    trainer = build(tmp_path, reward, eval_dataset=prompt_dataset(1), num_generations_eval=2)
    metrics = trainer.evaluate()
    assert sum(calls) == len(PROMPTS) * 2
    assert "eval_reward" in metrics
    assert not any("ada/" in name for name in metrics)


def test_trl_warns_of_unscored_completions_once_per_step(tmp_path, caplog):
    trainer = build(tmp_path, lambda completions, **kwargs: [None] * len(completions), max_steps=3, max_rounds=4)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sum("All reward functions returned None" in record.getMessage() for record in caplog.records) == 3


def test_a_reward_that_is_equal_to_the_threshold_is_not_positive(tmp_path):
    """In float32 0.1 is larger than in float64."""

    def reward(completions, **kwargs):
        return [0.1] * len(completions)

    options = {"positive_threshold": 0.1, "eval_dataset": prompt_dataset(1), "per_device_eval_batch_size": 4}
    trainer = build(tmp_path, reward, num_generations_eval=2, max_steps=1, **options)
    steps = remember_rollouts(trainer)
    trainer.train()
    assert steps[0].positives_P.tolist() == [0, 0]
    assert trainer.evaluate()["eval_pass@2"] == 0


def test_functions_that_score_different_prompts_define_successes_by_their_sum(tmp_path):
    def of_first(prompts, completions, **kwargs):
        return [float(len(c) % 2) if p == PROMPTS[0] else None for p, c in zip(prompts, completions, strict=True)]

    def of_others(prompts, completions, **kwargs):
        return [None if p == PROMPTS[0] else float(len(c) % 2) for p, c in zip(prompts, completions, strict=True)]

    with pytest.raises(ValueError, match=r"success_reward \(None\) must be 'of_first' or 'of_others' or 'sum'"):
        build(tmp_path, [of_first, of_others])
    trainer = build(tmp_path, [of_first, of_others], success_reward="sum", log_completions=True)
    trainer.train()
    assert all(logs["ada/frac_unscored"] == 0 for logs in logs_of(trainer))


def test_a_second_call_of_train_generates_again(tmp_path):
    trainer = build(tmp_path, num_iterations=2, max_steps=3)
    steps, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        steps.append(trainer.state.global_step),
        generate(inputs),
    )[1]
    trainer.train()
    trainer.train()
    assert steps == [0, 2, 0, 2]
