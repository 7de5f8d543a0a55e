"""The trainer end to end on a tiny model: what reaches the loss, and what is logged."""

import logging
import math

import pandas as pd
import pytest
import torch
from peft import LoraConfig

from ..helpers import (
    PROMPTS,
    ScriptedRewards,
    build,
    even_reward,
    logs_of,
    prompt_dataset,
    prompts_of,
    tiny_tokenizer,
)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        {"num_iterations": 3, "gradient_accumulation_steps": 2, "max_steps": 4},
        {"num_generations": 3, "per_device_train_batch_size": 6},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
        {"pad_to_multiple_of": 8},
        {"cache_implementation": "static"},
        {"generation_kwargs": {"max_new_tokens": 4}, "max_completion_length": None},
        {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
        },
        {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
    ],
    ids=lambda overrides: next(iter(overrides), "plain"),
)
def test_exactly_one_group_per_prompt_reaches_the_loss(overrides, tmp_path):
    trainer = build(tmp_path, **{"max_steps": 3} | overrides)
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
    """
    One prompt meets its exit condition in round 1, one in round 2, the others never;
    rewards are ±1, so the baseline matters.
    """
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


def test_duplicate_prompts_in_one_batch_have_separate_pools(tmp_path):
    dataset = prompt_dataset(1).select([0, 0])
    rewards = ScriptedRewards(**{"1+2=": [1, 1, 0, 0] + [0] * 4 + [1, 1, 0, 0]})
    trainer = build(tmp_path, rewards, dataset, max_steps=1, samples_per_round=4)
    trainer.train()
    assert [len(call) for call in rewards.calls] == [8, 4]


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
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(dtype)
    trainer.train()
    assert [rollouts.scored_P.tolist() for rollouts in trainer.rollouts] == [[3, 30]]
    (batch,) = trainer.batches
    assert batch["advantages"].isfinite().all() and batch["advantages"].any()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert all(math.isfinite(value) for name, value in logs_of(trainer)[0].items() if name.startswith("ada/"))


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
    trainer.train()
    assert trainer.rollouts[0].positives_P.tolist() == [0, 0]
    assert trainer.evaluate()["eval_pass@2"] == 0


def test_functions_that_score_different_prompts_define_successes_by_their_sum(tmp_path):
    def of_first(prompts, completions, **kwargs):
        return [float(len(c) % 2) if p == PROMPTS[0] else None for p, c in zip(prompts, completions, strict=True)]

    def of_others(prompts, completions, **kwargs):
        return [None if p == PROMPTS[0] else float(len(c) % 2) for p, c in zip(prompts, completions, strict=True)]

    trainer = build(tmp_path, [of_first, of_others], success_reward="sum")
    trainer.train()
    assert trainer.rollouts and all(rollouts.is_scored_N.all() for rollouts in trainer.rollouts)


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
