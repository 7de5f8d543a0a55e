"""`baseline="posterior"` end to end on a tiny model: one rollout is enough, nothing is silent, everything resumes."""

import math

import pytest
import torch
from peft import LoraConfig

from ada_trl.core import Prior
from ada_trl.estimation.record import PASS_RATES_FILE, load_pass_rates

from .helpers import (
    PROMPTS,
    ScriptedRewards,
    assert_same_run,
    build,
    even_reward,
    length_reward,
    logs_of,
    prompt_dataset,
    prompts_of,
    remember_pools,
    tiny_model,
)


POSTERIOR = {"adaptive_sampling": "uniform", "baseline": "posterior"}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def moved(trainer):
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    assert all(p.isfinite().all() for p in after)
    return [not torch.equal(a, b) for a, b, p in zip(before, after, after, strict=True) if p.requires_grad]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("estimator", ["counts", "value", "value+counts"])
def test_every_parameter_moves_and_every_rollout_is_trained_on(n, estimator, tmp_path):
    trainer = build(tmp_path, num_generations=n, pass_rate_estimator=estimator, **POSTERIOR)
    assert all(moved(trainer))
    for batch, logs in zip(trainer.batches, logs_of(trainer), strict=True):
        prompts = prompts_of(batch)
        assert len(prompts) == 8 and (batch["advantages"] != 0).all()
        assert all(len(set(prompts[i : i + n])) == 1 for i in range(0, 8, n))
        assert logs["ada/zero_signal/final"] == 0 and logs["ada/tokens/discarded"] == 0
        assert logs["ada/samples_per_prompt/mean"] == n
        assert ("ada/baseline/explained_leave_one_out" in logs) == (n > 1 and logs["reward_std"] > 0)
        assert all(math.isfinite(value) for name, value in logs.items() if isinstance(value, float)), logs


def test_groups_whose_rewards_are_all_equal_move_the_weights(tmp_path):
    """What GRPO can learn nothing from: prompts that always pass beside prompts that never do."""

    def decided_by_prompt(prompts, **kwargs):
        return [float(prompt in PROMPTS[:2]) for prompt in prompts]

    options = {"num_generations": 2, "max_steps": 1}
    plain = build(tmp_path / "plain", decided_by_prompt, adaptive_sampling="uniform", **options)
    assert not any(moved(plain)) and logs_of(plain)[0]["ada/zero_signal/final"] == 1
    ours = build(tmp_path / "ours", decided_by_prompt, **POSTERIOR, **options)
    assert all(moved(ours)) and logs_of(ours)[0]["ada/recovered"] == 1


def test_a_step_line_by_line(tmp_path):
    """Priors as told, one prompt twice: advantages by hand, real rewards, the weight from before the draw."""
    rewards = {"1+2=": [3.0, -1.0], "31+4=": [1.0, 1.0]}
    trainer = build(
        tmp_path,
        ScriptedRewards(**rewards),
        prompt_dataset(1).select([0, 1]),
        num_generations=2,
        per_device_train_batch_size=4,
        max_steps=1,
        prompt_weighting="inverse_sqrt",
        pass_rate_estimator="counts",
        **POSTERIOR,
    )
    told = {"1+2=": Prior(0.5, 4, 0.25), "31+4=": Prior(0.0, 2, 1.0)}
    trainer.pass_rates.priors = lambda: [told[row] for row in trainer.asked]
    estimate = trainer.pass_rates.predict

    def remember(prompts, *args):
        trainer.asked = [prompt for prompt, _ in prompts]
        return estimate(prompts, *args)

    trainer.pass_rates.predict = remember
    trainer.train()
    (batch,) = trainer.batches
    found = dict.fromkeys(PROMPTS, ())
    for prompt, advantage in zip(prompts_of(batch), batch["advantages"].tolist(), strict=True):
        found[prompt] += (advantage,)
    first = 0.5 + (1 + 1) / (2 + 8)  # moved by what the other prompt has shown beyond its prior
    second = 0.0 + (3 - 1 - 2 * 0.5) / (2 + 8)
    assert found["1+2="] == pytest.approx([2 * (3 - (4 * first - 1) / 5), 2 * (-1 - (4 * first + 3) / 5)])
    assert found["31+4="] == pytest.approx([1 - (2 * second + 1) / 3] * 2)


def test_copies_of_a_prompt_inform_each_other_and_nobody_itself(tmp_path):
    dataset = prompt_dataset(1).select([0, 0])
    options = {"num_generations": 1, "per_device_train_batch_size": 2, "max_steps": 1, "pass_rate_prior": [1.0, 1.0]}
    advantages = {}
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]):
        scripted = ScriptedRewards(**{"1+2=": list(rewards)})
        trainer = build(tmp_path, scripted, dataset, pass_rate_estimator="counts", **POSTERIOR, **options)
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
        {"reward_funcs": [even_reward, length_reward], "reward_weights": [1.0, -0.5], "exit_reward": "even_reward"},
        {"dataset": prompt_dataset(1).select([0] * 16)},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_combinations_learn(overrides, tmp_path):
    trainer = build(tmp_path, **{"num_generations": 1, "max_steps": 2} | POSTERIOR | overrides)
    assert all(moved(trainer))
    assert all(logs["ada/zero_signal/final"] == 0 for logs in logs_of(trainer))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo"])
def test_every_loss(loss_type, tmp_path):
    options = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    assert all(moved(build(tmp_path, loss_type=loss_type, num_generations=1, **POSTERIOR, **options)))


def test_unscored_rollouts_are_left_out(tmp_path):
    def sometimes(completions, **kwargs):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    trainer = build(tmp_path, sometimes, num_generations=1, **POSTERIOR)
    assert any(moved(trainer))
    assert all((batch["advantages"] == 0).sum() == 4 for batch in trainer.batches)


def test_evaluation_with_one_rollout(tmp_path):
    trainer = build(tmp_path, num_generations=1, eval_dataset=prompt_dataset(1), num_generations_eval=2, **POSTERIOR)
    assert 0 <= trainer.evaluate()["eval_reward"] <= 1


def identified(repeats):
    dataset = prompt_dataset(repeats)
    return dataset.add_column("id", [str(i) for i in range(len(dataset))])


# Within the first epoch, and in the second, where counts matter.
@pytest.mark.parametrize(("estimator", "repeats"), [("value+counts", 48), ("value+counts", 16), ("counts", 16)])
def test_resume_continues_as_if_never_stopped(estimator, repeats, tmp_path):
    options = {"dataset": identified(repeats), "per_device_train_batch_size": 32, "max_steps": 6, "save_steps": 3}
    options |= {"save_strategy": "steps", "num_generations": 1, "pass_rate_estimator": estimator} | POSTERIOR
    whole = build(tmp_path / "whole", **options)
    whole.train()
    resumed = build(tmp_path / "resumed", model=tiny_model(seed=9), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_run(whole, resumed)
    states = [load_pass_rates(tmp_path / name / "checkpoint-6" / PASS_RATES_FILE)[0] for name in ("whole", "resumed")]
    assert states[0] == states[1] and any(states[0]["fitted"]["strength"])


def test_the_prior_learns_what_prompts_earn(tmp_path):
    """Rewards of −1 and 3 by prompt: after some visits the baseline explains nearly all of their variance."""

    def decided_by_prompt(prompts, **kwargs):
        return [3.0 if prompt in PROMPTS[:2] else -1.0 for prompt in prompts]

    options = {"per_device_train_batch_size": 16, "max_steps": 12, "num_generations": 1, "learning_rate": 1e-4}
    trainer = build(
        tmp_path, decided_by_prompt, prompt_dataset(20), pass_rate_estimator="counts", **POSTERIOR, **options
    )
    pools = remember_pools(trainer)
    trainer.train()
    explained = [logs["ada/baseline/explained"] for logs in logs_of(trainer)]
    assert explained[0] < 0.5 and explained[-1] > 0.8
    assert {len(pool) for step in pools for pool in step} == {1}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scale_rewards": "group"}, r"scale_rewards='group' .*baseline='posterior' biased.*'none' or 'batch'"),
        ({"selection_correction": True}, r"selection_correction \(True\) has no effect .*baseline='posterior'"),
        ({"unresolved": "mask"}, r"unresolved \(mask\) has no effect .*baseline='posterior'"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            r"'normalize_then_sum' normalizes .*'sum_then_normalize'",
        ),
        ({"baseline": "oracle"}, r"baseline \('oracle'\) must be one of 'pool', 'posterior'"),
        ({"samples_per_round": 4}, r"samples_per_round \(4\) has no effect .*baseline='posterior'"),
        ({"max_samples": 8}, r"max_samples \(8\) has no effect .*'est'"),
        ({"baseline": "pool", "num_generations": 1}, r"at least 2 generations"),
        ({"baseline": "pool", "pass_rate_estimator": "value"}, r"pass_rate_estimator \('value'\) has no effect"),
        ({"value_model": "m", "pass_rate_estimator": "counts"}, r"value_model \(m\) has no effect .*'value\+counts'"),
    ],
)
def test_refused(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **POSTERIOR | overrides)
