"""`baseline="batch"`: the mean of all other rollouts, and everything else as in GRPOTrainer."""

import math

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..helpers import (
    PROMPTS,
    QUICK,
    build,
    config,
    even_reward,
    length_reward,
    logs_of,
    moved,
    prompt_dataset,
    tiny_model,
    tiny_tokenizer,
)


BATCH = {"baseline": "batch"}


def by_token(completions, **kwargs):
    """Continuous rewards that differ between nearly all rollouts."""
    return [sum(map(ord, completion)) % 97 / 97 for completion in completions]


def test_zero_variance_groups_have_a_gradient(tmp_path):
    """Prompts that always pass together with prompts that never do, which have no gradient in GRPO."""

    def decided_by_prompt(prompts, **kwargs):
        return [float(prompt in PROMPTS[:2]) for prompt in prompts]

    options = {"num_generations": 2, "max_steps": 1}
    grpo = build(tmp_path / "grpo", decided_by_prompt, adaptive_sampling="uniform", **options)
    assert not any(moved(grpo).values()) and logs_of(grpo)[0]["ada/frac_zero_advantage_groups"] == 1
    batch = build(tmp_path / "batch", decided_by_prompt, prompt_dataset(1), **BATCH, **options)
    assert all(moved(batch).values()) and logs_of(batch)[0]["ada/frac_recovered_groups"] == 1


@pytest.mark.parametrize(("adaptive_sampling", "n"), [("uniform", 1), ("uniform", 4), ("est", 4)])
def test_advantages_are_rewards_minus_the_mean_of_all_other_rollouts(adaptive_sampling, n, tmp_path):
    calls = []

    def reward(completions, **kwargs):
        calls.append(torch.tensor(by_token(completions)))
        return calls[-1].tolist()

    options = {"adaptive_sampling": adaptive_sampling, "num_generations": n, "prompt_weighting": "none"}
    trainer = build(tmp_path, reward, **BATCH, **options)
    assert all(moved(trainer).values())
    assert (trainer.pass_rates is not None) == (adaptive_sampling == "est")
    for batch, r, logs in zip(trainer.batches, calls, logs_of(trainer), strict=True):
        torch.testing.assert_close(batch["advantages"], r - (r.sum() - r) / 7)
        assert logs["ada/frac_zero_advantage_groups"] == 0 and logs["ada/samples_per_prompt/mean"] == n
        assert all(math.isfinite(value) for value in logs.values() if isinstance(value, float)), logs


@pytest.mark.parametrize(
    "overrides",
    [
        {"gradient_accumulation_steps": 2, "num_iterations": 2},
        {"steps_per_generation": 2, "max_steps": 4},
        {"scale_rewards": "batch"},
        {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
        {"bf16": True},
        {"adaptive_sampling": "est", "num_generations": 2, "min_samples": 1, "allocation_rule": "reward_std"},
        {"adaptive_sampling": "est-value", "num_generations": 4},
        {"reward_funcs": [even_reward, length_reward], "reward_weights": [1.0, -0.5], "success_reward": "even_reward"},
        {"dataset": prompt_dataset(1).select([0] * 16)},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_combinations_of_options_train_every_parameter(overrides, tmp_path):
    trainer = build(tmp_path, **{"num_generations": 1, "reward_funcs": by_token} | BATCH | overrides)
    has_moved = moved(trainer)
    assert all(has_moved[name] for name, p in trainer.model.named_parameters() if p.requires_grad)
    assert all(logs["ada/frac_zero_advantage_groups"] == 0 for logs in logs_of(trainer))


def first_batch(trainer_class, args):
    """The first batch with its rewards, and the number of forward passes of the policy."""
    seen, passes = {}, []

    class Observer(trainer_class):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return seen.setdefault("batch", output)

        def _calculate_rewards(self, *given):
            return seen.setdefault("rewards", super()._calculate_rewards(*given))

    trainer = Observer(tiny_model(), length_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
    trainer.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    trainer.train()
    return seen["batch"] | {"rewards": seen["rewards"]}, len(passes)


def test_it_changes_the_advantages_and_nothing_else(tmp_path):
    """With two iterations per generation, so that there are old log-probabilities. beta is GRPOConfig's default."""
    options = QUICK | {"num_generations": 4, "num_iterations": 2, "beta": 0.0}
    options["generation_kwargs"] = {"min_new_tokens": QUICK["max_completion_length"]}
    grpo, passes = first_batch(GRPOTrainer, GRPOConfig(str(tmp_path / "grpo"), **options))
    ours, own_passes = first_batch(AdaGRPOTrainer, config(tmp_path / "ours", **options, **BATCH))
    assert ours.keys() == grpo.keys() and "old_per_token_logps" in ours
    differing = {name for name, value in grpo.items() if not torch.equal(ours[name], value)}
    assert differing == {"advantages"}
    assert grpo["rewards"].unique().numel() > 1 and own_passes == passes
