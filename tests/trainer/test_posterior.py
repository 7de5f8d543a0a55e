"""`baseline="posterior"` and `"batch"` end to end on a tiny model: single rollouts, every reward scale, resume."""

import math

import pytest
import torch
from peft import LoraConfig

from ada_trl.core import BaselineEstimate
from ada_trl.pass_rates.store import PASS_RATES_FILE, load_pass_rates

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
    remember_pools,
    train_with_and_without_resume,
)
from ..pass_rates.estimated import identified


POSTERIOR = {"adaptive_sampling": "uniform", "baseline": "posterior"}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def by_token(prompts, completions, **kwargs):
    """Continuous rewards that differ between nearly all rollouts."""
    return [sum(map(ord, completion)) % 97 / 97 for completion in completions]


@pytest.mark.parametrize(
    ("n", "estimator"),
    [(1, "ema"), (2, "ema"), (1, "value"), (4, "value"), (1, "ema+value"), (4, "ema+value")],
)
def test_every_parameter_moves_and_every_rollout_is_trained_on(n, estimator, tmp_path):
    trainer = build(tmp_path, by_token, num_generations=n, pass_rate_estimator=estimator, **POSTERIOR)
    assert all(moved(trainer).values())
    for batch, logs in zip(trainer.batches, logs_of(trainer), strict=True):
        prompts = prompts_of(batch)
        assert len(prompts) == 8 and (batch["advantages"] != 0).all()
        assert all(len(set(prompts[i : i + n])) == 1 for i in range(0, 8, n))
        assert logs["ada/frac_zero_advantage_groups"] == 0
        assert logs["ada/samples_per_prompt/mean"] == n
        assert ("ada/baseline/explained_variance_leave_one_out" in logs) == (n > 1)
        assert all(math.isfinite(value) for name, value in logs.items() if isinstance(value, float)), logs
        assert not any(name.startswith("ada/estimator") for name in logs), "Nothing depends on pass rates."


def test_zero_variance_groups_have_a_gradient(tmp_path):
    """Prompts that always pass together with prompts that never do, which have no gradient in GRPO."""

    def decided_by_prompt(prompts, **kwargs):
        return [float(prompt in PROMPTS[:2]) for prompt in prompts]

    options = {"num_generations": 2, "max_steps": 1}
    grpo = build(tmp_path / "grpo", decided_by_prompt, adaptive_sampling="uniform", **options)
    assert not any(moved(grpo).values()) and logs_of(grpo)[0]["ada/frac_zero_advantage_groups"] == 1
    posterior = build(tmp_path / "posterior", decided_by_prompt, **POSTERIOR, **options)
    assert all(moved(posterior).values()) and logs_of(posterior)[0]["ada/frac_recovered_groups"] == 1


def test_a_step_line_by_line(tmp_path):
    """Given estimates: advantages by hand, from real rewards, with the weight from before sampling."""
    rewards = {"1+2=": [3.0, -1.0], "31+4=": [1.0, 1.0]}
    trainer = build(
        tmp_path,
        ScriptedRewards(**rewards),
        prompt_dataset(1).select([0, 1]),
        num_generations=2,
        per_device_train_batch_size=4,
        max_steps=1,
        prompt_weighting="inverse_sqrt",
        pass_rate_estimator="ema",
        **POSTERIOR,
    )
    given = {"1+2=": BaselineEstimate(0.5, 4, 0.25), "31+4=": BaselineEstimate(0.0, 2, 1.0)}
    trainer.pass_rates.baseline_estimates = lambda: [
        given[prompt] for prompt in trainer.pass_rates.predictions.prompts
    ]
    trainer.pass_rates.reward_estimator.mean_reward = 0.0  # as after an earlier generation
    trainer.train()
    (batch,) = trainer.batches
    found = dict.fromkeys(PROMPTS, ())
    for prompt, advantage in zip(prompts_of(batch), batch["advantages"].tolist(), strict=True):
        found[prompt] += (advantage,)
    first = 0.5 + (1 + 1) / (2 + 16)  # shifted by the mean residual of the other prompt
    second = 0.0 + (3 - 1 - 2 * 0.5) / (2 + 16)
    assert found["1+2="] == pytest.approx([2 * (3 - (4 * first - 1) / 5), 2 * (-1 - (4 * first + 3) / 5)])
    assert found["31+4="] == pytest.approx([1 - (2 * second + 1) / 3] * 2)
    (logs,) = logs_of(trainer)
    assert (logs["ada/prompt_weight/mean"], logs["ada/prompt_weight/max"]) == pytest.approx((1.5, 2.0)), "As applied."


def test_the_baseline_of_a_copy_of_a_prompt_depends_on_the_other_copy_alone(tmp_path):
    dataset = prompt_dataset(1).select([0, 0])
    options = {"num_generations": 1, "per_device_train_batch_size": 2, "max_steps": 1}
    advantages = {}
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]):
        scripted = ScriptedRewards(**{"1+2=": list(rewards)})
        trainer = build(tmp_path, scripted, dataset, pass_rate_estimator="ema", **POSTERIOR, **options)
        trainer.pass_rates.reward_estimator.mean_reward = 0.5
        trainer.train()
        advantages[tuple(rewards)] = trainer.batches[0]["advantages"].tolist()
    baseline = {own: rewards - advantages[rewards, other][0] for own, rewards, other in ((1, 1.0, 0.0), (0, 0.0, 0.0))}
    assert baseline[1] == pytest.approx(baseline[0]), "The first copy's baseline depends on the second copy alone."
    assert advantages[1.0, 1.0][0] < advantages[1.0, 0.0][0]


@pytest.mark.parametrize(
    "overrides",
    [
        {"gradient_accumulation_steps": 2, "num_iterations": 2},
        {"steps_per_generation": 2, "max_steps": 4},
        {"scale_rewards": "batch"},
        {"beta": 0.1, "peft_config": LORA},
        {"bf16": True},
        {"adaptive_sampling": "est", "num_generations": 2, "min_samples": 1, "allocation_rule": "reward_std"},
        {"adaptive_sampling": "est-value", "num_generations": 4},
        {"reward_funcs": [even_reward, length_reward], "reward_weights": [1.0, -0.5], "success_reward": "even_reward"},
        {"dataset": prompt_dataset(1).select([0] * 16)},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
@pytest.mark.parametrize("baseline", ["posterior", "batch"])
def test_combinations_of_options_train_every_parameter(baseline, overrides, tmp_path):
    options = {"num_generations": 1, "max_steps": 2, "reward_funcs": by_token} | POSTERIOR | {"baseline": baseline}
    trainer = build(tmp_path, **options | overrides)
    has_moved = moved(trainer)
    assert all(has_moved[name] for name, p in trainer.model.named_parameters() if p.requires_grad)
    assert all(logs["ada/frac_zero_advantage_groups"] == 0 for logs in logs_of(trainer))


@pytest.mark.parametrize("baseline", ["posterior", "batch"])
def test_rollouts_without_a_success_reward_but_with_a_reward_are_trained_on(baseline, tmp_path):
    def seldom_scored(completions, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    funcs = [by_token, seldom_scored]
    options = {"success_reward": "seldom_scored", "reward_weights": [1.0, 0.0], "num_generations": 1}
    trainer = build(tmp_path, funcs, **options, **POSTERIOR | {"baseline": baseline})
    assert all(moved(trainer).values())
    assert all(batch["advantages"].count_nonzero() == 8 for batch in trainer.batches)


def test_the_batch_baseline_is_the_mean_of_all_other_rollouts(tmp_path):
    trainer = build(tmp_path, by_token, num_generations=2, **POSTERIOR | {"baseline": "batch"})
    rewards, original = [], trainer._compute_advantages
    trainer._compute_advantages = lambda replay, states: (
        rewards.append(torch.tensor([rollout.reward for pool in replay.pools for rollout in pool.rollouts])),
        original(replay, states),
    )
    trainer.train()
    assert trainer.pass_rates is None
    for batch, r in zip(trainer.batches, rewards, strict=True):
        torch.testing.assert_close(batch["advantages"], r - (r.sum() - r) / 7)


# In the first epoch, and in the second, in which the history is used.
@pytest.mark.parametrize(("estimator", "repeats"), [("ema+value", 48), ("ema", 16)])
def test_resume_continues_as_if_never_stopped(estimator, repeats, tmp_path):
    options = {"dataset": identified(repeats), "per_device_train_batch_size": 32, "max_steps": 6, "save_steps": 3}
    options |= {"save_strategy": "steps", "num_generations": 1, "pass_rate_estimator": estimator} | POSTERIOR
    train_with_and_without_resume(build, tmp_path, at=3, **options)
    states = [load_pass_rates(tmp_path / name / "checkpoint-6" / PASS_RATES_FILE)[0] for name in ("whole", "resumed")]
    histories = [state.pop("history") for state in states]
    assert states[0] == states[1] and states[0]["fitted"]["reward_estimator"]["mean_reward"] is not None
    assert histories[0].keys() == histories[1].keys() and histories[0]
    assert all((histories[0][key] == histories[1][key]).all() for key in histories[0])


def test_the_batch_baseline_resumes_with_its_standard_deviation(tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "scale_rewards": "batch"}
    options |= {"num_generations": 1, "reward_funcs": by_token} | POSTERIOR | {"baseline": "batch"}
    train_with_and_without_resume(build, tmp_path, at=3, **options)
    assert not (tmp_path / "whole" / "checkpoint-3" / PASS_RATES_FILE).exists()


def test_the_baseline_explains_rewards_that_depend_on_the_prompt(tmp_path):
    """Rewards of −1 and 3 by prompt: after some epochs the baseline explains nearly all of their variance."""

    def decided_by_prompt(prompts, **kwargs):
        return [3.0 if prompt in PROMPTS[:2] else -1.0 for prompt in prompts]

    options = {"per_device_train_batch_size": 16, "max_steps": 12, "num_generations": 1, "learning_rate": 1e-4}
    trainer = build(tmp_path, decided_by_prompt, prompt_dataset(20), pass_rate_estimator="ema", **POSTERIOR, **options)
    pools = remember_pools(trainer)
    trainer.train()
    explained = [logs["ada/baseline/explained_variance"] for logs in logs_of(trainer)]
    assert explained[0] < 0.5 and explained[-1] > 0.8
    assert {len(pool) for step in pools for pool in step} == {1}


def test_the_batch_baseline_resumes_from_a_grpo_checkpoint(tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    build(tmp_path / "grpo", by_token, adaptive_sampling="uniform", num_generations=2, **saving).train()
    trainer = build(tmp_path / "batch", by_token, num_generations=1, baseline="batch", **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "grpo" / "checkpoint-1"))
    assert trainer.state.global_step == 2 and "from the start of the dataset" not in caplog.text
    assert not list(tmp_path.rglob("ada_state.json")), "There is no state."
