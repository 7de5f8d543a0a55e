"""The sentence at the start of a run, warnings at the start and during the training, and model cards."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer, __version__
from ada_trl.core import pool_advantages
from ada_trl.trainer.mode import Mode
from ada_trl.trainer.reporting import describe_run, report_start, training_steps
from ada_trl.trainer.vllm_session import ess_ratio

from ..helpers import PROMPTS, build, even_reward, logs_of, prompt_dataset


def config(**options) -> AdaGRPOConfig:
    return AdaGRPOConfig("unused", **{"bf16": False, "use_cpu": True, "per_device_train_batch_size": 32} | options)


UNIFORM = {"adaptive_sampling": "uniform"}
BATCH = {"baseline": "batch"}
MODES = {
    "batch": BATCH,
    "batch of groups": BATCH | {"num_generations": 2},
    "retries": BATCH | {"retries": 3, "num_generations": 1},
    "seq-balance": {},
    "est": {"adaptive_sampling": "est", "pass_rate_estimator": "ema"},
    "uniform": UNIFORM,
    "dynamic sampling": UNIFORM | {"zero_variance_groups": "resample"},
}


# The sentence at the start


WEIGHTED = ("prompt_weighting='inverse_sqrt' ('none')", "num_generations=4 (8)")
SENTENCES = [
    (BATCH, ("32 prompts per generation batch, each with 1 rollout;", "baseline='batch'", "num_generations=1 (8)")),
    (MODES["batch of groups"], ("16 prompts per", "each with 2 rollouts (num_generations=1 is sufficient")),
    (MODES["retries"], ("each with 1 rollout, and without a positive one again in up to 3 later steps",)),
    ({}, ("adaptive_sampling='seq-balance' ('uniform')", "8 rounds of 4", "1 positive and 1 negative;", *WEIGHTED)),
    ({"adaptive_sampling": "seq-pos", "min_positives": 2}, ("until there are 2 positive;",)),
    (MODES["est"], ("each with 2 to 32 rollouts (4 on average)", *WEIGHTED)),
    (UNIFORM, ("num_generations=4 (8), scale_rewards='none' ('group'), epsilon_high=0.28 (None)",)),
    ({"prompt_weighting": 0.25}, ("prompt_weighting=0.25 ('none')",)),
]


def describe(args, num_prompts=None):
    return describe_run(args, Mode.of(args), num_prompts)


@pytest.mark.parametrize(("options", "fragments"), SENTENCES)
def test_a_sentence_describes_the_differences_from_grpo(options, fragments):
    sentence = describe(config(**options))
    assert all(fragment in sentence for fragment in fragments), sentence
    assert sentence.isascii()


def test_nothing_is_said_where_nothing_differs():
    grpo = UNIFORM | {"num_generations": 8, "scale_rewards": "group", "epsilon_high": None}
    assert describe(config(**grpo, save_steps=500), 200) == ""
    defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in list(grpo)[1:]}
    assert defaults == {name: grpo[name] for name in defaults}


def test_the_sentence_is_printed_before_the_logs_of_trl(tmp_path, capsys):
    trainer = build(tmp_path)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "'grad_norm':" in line)
    assert describe_run(trainer.args, trainer.mode, len(trainer.train_dataset)) in lines[:first]


@pytest.mark.parametrize(("log_level", "process"), [("warning", 0), ("error", 0), ("warning", 1)])
def test_the_sentence_is_printed_on_the_main_process_unless_warnings_are_hidden(
    log_level, process, monkeypatch, capsys
):
    monkeypatch.setattr(AdaGRPOConfig, "process_index", property(lambda self: process))
    args = config(log_level=log_level)
    report_start(args, Mode.of(args), num_prompts=None)
    assert bool(capsys.readouterr().out) == ((log_level, process) == ("warning", 0))


# Steps and passes over the dataset


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (BATCH, "; 9 steps, 2.88 passes over the dataset (GRPO with num_generations=8: 75 steps, 3 passes, as many"),
        (MODES["retries"], "; 9 steps, at most 2.88 passes over the dataset (GRPO with num_generations=8: 75"),
        (
            MODES["retries"] | {"max_steps": 60},
            "; 60 steps, at most 19.2 passes over the dataset (GRPO with num_generations=8: 60 steps, 2.4 passes);",
        ),
        (BATCH | {"num_iterations": 2}, "; 18 steps, 2.88 passes over the dataset (GRPO with num_generations=8: 150"),
        # GRPO can have this group, too.
        (MODES["batch of groups"], "; 18 steps, 2.88 passes over the dataset; "),
        (MODES["dynamic sampling"], "; 36 steps, at least 2.88 passes over the dataset (GRPO with num_generations=8:"),
        (
            MODES["est"] | {"num_train_epochs": 1},
            "; 12 steps, 0.96 passes over the dataset (GRPO with num_generations=8: 25 steps, 1 pass,",
        ),
    ],
)
def test_steps_and_passes_are_those_of_this_run_and_of_grpo(options, expected):
    sentence = describe(config(**{"per_device_train_batch_size": 64, "num_train_epochs": 3} | options), 200)
    assert expected in sentence


@pytest.mark.parametrize("max_steps", [-1, 9])
def test_intervals_that_are_longer_than_the_run_are_named(max_steps):
    options = BATCH | {"per_device_train_batch_size": 64, "num_train_epochs": 3, "max_steps": max_steps}
    given = {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 20, "logging_steps": 9}
    assert "; the run ends before eval_steps=10, save_steps=20; " in describe(config(**options, **given), 200)
    none = {"eval_strategy": "epoch", "eval_steps": 10, "save_strategy": "no", "save_steps": 20, "logging_steps": 9}
    assert "the run ends before" not in describe(config(**options, **none), 200)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"num_iterations": 2}, {"baseline": "pool"}]
)
def test_training_steps_predicts_the_steps_of_a_run(options, tmp_path):
    options = BATCH | {"max_steps": -1, "num_train_epochs": 2} | options
    if options["baseline"] == "pool":
        options |= UNIFORM | {"num_generations": 2}
    data = build(tmp_path / "data").train_dataset
    data = data.select([i % len(data) for i in range(50)])
    trainer = build(tmp_path, dataset=data, per_device_train_batch_size=4, max_completion_length=1, **options)
    trainer.train()
    args = trainer.args
    assert trainer.state.global_step == training_steps(args, len(data), args.num_generations) > 10


# Warnings during training

WINDOW = 8  # steps that a problem must last, instead of 20
ONE_ROUND = {"max_rounds": 1}


def constant(value):
    return lambda completions, **kwargs: [value] * len(completions)


def format_reward(completions, **kwargs):
    return [1.0] * len(completions)


def half_reward(completions, **kwargs):
    """Continuous and never above 0.5."""
    return [(len(completion) + ord(completion[0]) % 2) / 20 if completion else 0.0 for completion in completions]


def graded(completions, **kwargs):
    """Above the default threshold of 0.7."""
    return [1 + 9 * reward for reward in half_reward(completions)]


def one_success(completions, **kwargs):
    return [1.0, *[0.0] * (len(completions) - 1)]


def one_scored(completions, **kwargs):
    return [1.0, *[None] * (len(completions) - 1)]


def reward_of_prompt(prompts, **kwargs):
    return [float(prompt[0] in "13") for prompt in prompts]


def one_success_at_first(completions, trainer_state, **kwargs):
    rewards = half_reward(completions)
    return rewards if trainer_state.global_step else [1.0, *rewards[1:]]


def never(completions, **kwargs):
    return [0.0] * len(completions)


def every_fourth(completions, **kwargs):
    return [float(i % 4 == 0) for i in range(len(completions))]


def success_in_step(step):
    return lambda completions, trainer_state, **_: (
        even_reward(completions) if trainer_state.global_step == step else [0.0] * len(completions)
    )


@pytest.fixture
def train(tmp_path, caplog):
    """Train and return the trainer and the warnings during training."""

    def run(reward, steps=2, **options):
        trainer = build(tmp_path, reward, max_steps=steps, learning_rate=0.0, **options)
        trainer._diagnostics.steps = WINDOW
        with caplog.at_level(logging.WARNING, "ada_trl.trainer.reporting"):
            trainer.train()
        records = [record for record in caplog.records if record.name == "ada_trl.trainer.reporting"]
        return trainer, [m for m in (record.getMessage() for record in records) if "is small for" not in m]

    return run


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        (constant(1.0), ONE_ROUND, ("all rewards are 1 now", "harder prompts", "raise max_rounds or")),
        (constant(None), ONE_ROUND, ("ada/frac_zero_advantage_groups is 100% now", "equal rewards or none")),
        (constant(None), BATCH, ("ada/frac_zero_advantage_groups is 100% now", "equal rewards or none")),
        # The mean of others is not exactly 0.1.
        *((constant(0.1), MODES[mode], ("all rewards are 0.1",)) for mode in ("batch", "batch of groups", "retries")),
        (
            reward_of_prompt,
            ONE_ROUND,
            ("ada/frac_zero_advantage_groups is 100% now", "completions of the same prompt"),
        ),
        (one_scored, UNIFORM, ("ada/frac_zero_advantage_groups is 100% now", "or raise max_completion_length")),
        (one_scored, BATCH, ("ada/frac_zero_advantage_groups is 100% now",)),
    ],
)  # fmt: skip
def test_a_problem_that_lasts_is_reported_once(reward, options, fragments, train):
    _, (warning,) = train(reward, steps=WINDOW + 3, **options)
    assert f"For {WINDOW} steps" in warning and all(fragment in warning for fragment in fragments), warning


@pytest.mark.parametrize(
    ("reward", "steps", "options"),
    [
        *((success_in_step(step), WINDOW, ONE_ROUND) for step in (2, WINDOW - 2)),
        *((one_success, WINDOW + 3, MODES[mode]) for mode in ("batch", "batch of groups", "retries")),
    ],
)
def test_no_warning_where_rewards_differ_now_and_then(reward, steps, options, train):
    assert not train(reward, steps, **options)[1]


def test_no_warning_where_advantages_do_not_come_from_equal_rewards(train):
    trainer, warnings = train(
        constant(1.0), WINDOW + 3, **BATCH, advantage_func=lambda rollouts: 1.0 + rollouts.draw_N + rollouts.prompt_N
    )
    assert not warnings and logs_of(trainer)[-1]["ada/frac_zero_advantage_groups"] == 0


def test_the_steps_without_a_gradient_are_counted_in_every_training(tmp_path, caplog):
    trainer = build(tmp_path, even_reward, max_steps=2 * WINDOW, learning_rate=0.0, **BATCH)
    trainer._diagnostics.steps = WINDOW
    trainer.train()
    trainer.reward_funcs[0] = constant(1.0)
    trainer.train()
    assert f"For {WINDOW} steps, no prompt has had a gradient" in caplog.text


def test_the_threshold_is_compared_with_both_generations(train):
    """Half of the first batch are successes, but none of the second."""

    def reward(completions, trainer_state, **kwargs):
        first = trainer_state.global_step == 0
        return [(1.0 if first else 0.69) if i % 2 else 0.0 for i in range(len(completions))]

    assert not train(reward, **UNIFORM | {"prompt_weighting": "inverse_sqrt"})[1]


def test_the_effective_sample_size_is_that_of_the_rows_that_are_not_masked():
    mask, sampling = torch.zeros(8, 4, dtype=torch.long), torch.zeros(8, 4)
    mask[:2, :3], sampling[0] = 1, 1.0
    weights = np.array([math.exp(-3), 1.0])
    output = {"old_per_token_logps": torch.zeros(8, 4), "sampling_per_token_logps": sampling, "completion_mask": mask}
    found = ess_ratio(output, SimpleNamespace(gather=lambda values: values))
    assert found == pytest.approx(weights.sum() ** 2 / (2 * (weights**2).sum()))


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        (half_reward, {}, ("No rollout", "the reward ranges from 0", "the prompts are hard")),
        (
            graded,
            UNIFORM | {"prompt_weighting": "inverse_sqrt"},
            ("Every rollout", "ranges from 1", "sampling and prompt weights are the same for all prompts"),
        ),
        (
            graded,
            UNIFORM | {"pass_rate_estimator": "ema"},
            ("Every rollout", "the recorded pass rates carry no information; training does not depend on them"),
        ),
        (half_reward, MODES["retries"], ("No rollout", "retries=0 keeps retries from filling the batches")),
        (graded, MODES["retries"], ("Every rollout", "until then, no prompt is retried")),
        (
            [format_reward, half_reward],
            {"success_reward": "half_reward"},
            ("No rollout", "the reward of half_reward ranges from 0"),
        ),
    ],
)  # fmt: skip
def test_a_threshold_outside_the_range_of_rewards_is_reported_after_two_generations(reward, options, fragments, train):
    _, (warning,) = train(reward, steps=WINDOW + 2, **options)
    assert "of the first two generation batches is a success" in warning and "positive_threshold is 0.7" in warning
    assert all(fragment in warning for fragment in fragments), warning


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (half_reward, {"positive_threshold": 0.2, "max_rounds": 2}),
        ([format_reward, even_reward], {"success_reward": "even_reward"}),
        # Nothing depends on the threshold.
        *(
            (reward, mode)
            for reward in (graded, half_reward, [format_reward, half_reward])
            for mode in (UNIFORM, BATCH)
        ),
    ],
)
def test_no_warning_where_the_threshold_separates_rewards_or_has_no_effect(reward, options, train):
    assert not train(reward, steps=WINDOW + 2, **options)[1]


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        # 8 rows, of which 6 are retries after the first step.
        (one_success_at_first, {"retries": 50}, ("66% of the prompts were retries, and 0%", "the reward now ranges")),
        # Of which 6 and 2 are retries in turn.
        (
            [half_reward, never],
            {"retries": 1, "success_reward": "never"},
            ("47% of the prompts were retries, and 0%", "the reward of never now ranges from 0 to 0"),
        ),
    ],
)
def test_retries_that_hardly_succeed_are_reported_once(reward, options, fragments, train):
    _, (warning,) = train(reward, steps=2 * WINDOW, **BATCH | options)
    assert f"In {WINDOW} generation batches" in warning and "above positive_threshold (0.7;" in warning
    assert all(fragment in warning for fragment in (*fragments, "success_reward", "set retries=0")), warning


@pytest.mark.parametrize("reward", [even_reward, every_fourth, one_success_at_first])
def test_no_warning_where_retries_succeed_or_for_a_few_steps(reward, train):
    trainer, warnings = train(
        reward, steps=WINDOW - 1 if reward is one_success_at_first else 2 * WINDOW, **MODES["retries"]
    )
    assert not warnings
    retried = [logs["ada/prompts/frac_retried"] for logs in logs_of(trainer)]
    assert reward is even_reward or np.mean(retried) > 0.5


# Rewards that cannot be compared with those of other prompts


def rewards_of(rollouts):
    """A reward function with rewards from a generator and the number of a prompt, which are the same in every run."""
    rng = np.random.default_rng(0)
    return lambda prompts, **kwargs: [rollouts(rng, PROMPTS.index(prompt)) for prompt in prompts]


with_outliers = rewards_of(lambda rng, _: -float(rng.lognormal(0, 2)))
of_reward_model = rewards_of(lambda rng, prompt: 4.0 * prompt + float(rng.random()))
binary = rewards_of(lambda rng, prompt: float(rng.random() < 0.1 + 0.2 * prompt))
LARGE = {"per_device_train_batch_size": 128, "max_completion_length": 1, "dataset": prompt_dataset(128)}


@pytest.mark.parametrize(
    ("reward", "options", "fragments"),
    [
        (with_outliers, {}, ("Rare rewards far below all others", "Limit the reward")),
        (with_outliers, {"retries": 2, "positive_threshold": -0.5}, ("Rare rewards far below all others",)),
        (
            of_reward_model,
            {},
            ("Most rewards are different", "If their level depends on the prompt", "`ada-trl check`"),
        ),
        (of_reward_model, {"num_generations": 4}, ("Rewards of different prompts differ much more",)),
    ],
)
def test_rewards_that_cannot_be_compared_across_prompts_are_reported_once(reward, options, fragments, train):
    _, (warning,) = train(reward, steps=5, **BATCH | LARGE | options)
    assert warning.startswith("The first 512 rewards range from")
    assert all(fragment in warning for fragment in (*fragments, "baseline='pool', adaptive_sampling='uniform'")), (
        warning
    )


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (binary, BATCH),
        (binary, BATCH | {"num_generations": 4}),
        *((of_reward_model, mode) for mode in (UNIFORM, BATCH | {"advantage_func": pool_advantages})),
    ],
)
def test_no_warning_where_rewards_are_comparable_or_not_compared(reward, options, train):
    assert not train(reward, steps=5, **LARGE | options)[1]


# Model cards


@pytest.mark.parametrize(
    ("options", "name", "paper"),
    [
        ({}, "Reinforce-Ada (ada_trl", "xiong2025reinforceada"),
        (UNIFORM, "GRPO (ada_trl", "shao2024deepseekmath"),
        (BATCH, "GRPO (baseline='batch', ada_trl", "shao2024deepseekmath"),
        (MODES["dynamic sampling"], "GRPO (zero_variance_groups='resample', ada_trl", "shao2024deepseekmath"),
        (MODES["retries"], "Reinforce-Ada (baseline='batch', retries=3, ada_trl", "xiong2025reinforceada"),
    ],
)
def test_a_model_card_names_method_package_and_version_and_cites_the_paper(options, name, paper, tmp_path):
    trainer = build(tmp_path, **options)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert f"trained with {name} {__version__})" in card and f"Cite {name} {__version__}) as:" in card
    assert paper in card and "None" not in card.partition("## Training procedure")[2]
    tags = {"trl", "grpo", "ada-trl"} | ({"reinforce-ada"} if name.startswith("Reinforce") else set())
    assert tags == set(trainer.model.model_tags) and all(f"- {tag}\n" in card for tag in tags)
    assert ("- reinforce-ada\n" in card) == ("reinforce-ada" in tags)


def test_a_subclass_keeps_the_name_on_its_card(tmp_path):
    class Mine(AdaGRPOTrainer):
        _name, _paper = "Mine", {}

    assert build(tmp_path, trainer_class=Mine, **UNIFORM)._name == f"Mine (ada_trl {__version__})"
