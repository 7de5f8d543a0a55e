"""The sentence at the start of a run, warnings at the start and during the training, and model cards."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer, __version__
from ada_trl.trainer.mode import Mode
from ada_trl.trainer.reporting import describe_run, report_start, training_steps
from ada_trl.trainer.vllm_session import ess_ratio

from ..helpers import build, even_reward, logs_of


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


WEIGHTED = ("the mean reward of all rollouts of the prompt", "the weight 1/√p̂", "num_generations=4 (8)")
SENTENCES = [
    (
        BATCH,
        ("32 prompts × 1 rollout per", "the mean reward of all other rollouts of the batch", "num_generations=1 (8)"),
    ),
    (MODES["batch of groups"], ("16 prompts × 2 rollouts per", "num_generations=1 is sufficient")),
    (MODES["retries"], ("one without a correct rollout is sampled again in up to 3 later steps",)),
    ({}, ("Seq-balance: up to 8 rounds of 4", "until 1 is correct and 1 incorrect; 4 are trained on", *WEIGHTED)),
    (MODES["est"], ("Est: 2 to 32 rollouts per prompt, 4 on average", *WEIGHTED)),
    (MODES["dynamic sampling"], ("8 prompts × 4 rollouts per", "zero-variance groups are replaced (up to 4 prompts")),
    (UNIFORM, ("scale_rewards='none' ('group'), epsilon_high=0.28 (None), num_generations=4 (8)",)),
    (
        BATCH | {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 8},
        ("8 rollouts per prompt in eval",),
    ),
    (
        {"scale_rewards": "group", "prompt_weighting": "none"},
        ("no prompt weight, because the division by the standard deviation of the group is",),
    ),
    ({"prompt_weighting": 0.25}, ("the weight p̂^(0.25 - 1)",)),
    ({"zero_variance_groups": "mask"}, ("excluded from the loss",)),
]


def describe(args):
    return describe_run(args, Mode.of(args))


@pytest.mark.parametrize(("options", "fragments"), SENTENCES)
def test_a_sentence_describes_the_differences_from_grpo(options, fragments):
    sentence = describe(config(**options))
    assert all(fragment in sentence for fragment in fragments), sentence


def test_nothing_is_said_where_nothing_differs():
    assert describe(config(**UNIFORM, num_generations=8, scale_rewards="group", epsilon_high=None)) == ""
    grpo = {field: GRPOConfig.__dataclass_fields__[field].default for field in ("scale_rewards", "epsilon_high")}
    assert grpo == {"scale_rewards": "group", "epsilon_high": None}


def test_the_sentence_is_printed_before_the_logs_of_trl(tmp_path, capsys):
    trainer = build(tmp_path)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "'grad_norm':" in line)
    assert describe_run(trainer.args, trainer.mode) in lines[:first]


@pytest.mark.parametrize(("log_level", "process"), [("warning", 0), ("error", 0), ("warning", 1)])
def test_the_sentence_is_printed_on_the_main_process_unless_warnings_are_hidden(
    log_level, process, monkeypatch, capsys
):
    monkeypatch.setattr(AdaGRPOConfig, "process_index", property(lambda self: process))
    args = config(log_level=log_level)
    report_start(args, Mode.of(args), num_prompts=None)
    assert bool(capsys.readouterr().out) == ((log_level, process) == ("warning", 0))


# Warnings at the start


@pytest.fixture
def start_warnings(caplog):
    """Warnings about the epochs or the size of the batch."""

    def collect(num_prompts=1000, rows=64, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ada_trl.trainer.reporting"):
            args = config(per_device_train_batch_size=rows, **options)
            report_start(args, Mode.of(args), num_prompts)
        return [record.getMessage() for record in caplog.records if record.name == "ada_trl.trainer.reporting"]

    return collect


def test_the_steps_of_an_epoch_of_single_rollouts_are_reported(start_warnings):
    """Without a guess how many rollouts per prompt the script had before."""
    (warning,) = start_warnings(**BATCH, num_train_epochs=2)
    assert (
        "has 64 prompts, one pass over the dataset (1000) takes 15 steps and num_train_epochs=2 makes 30 steps"
        in warning
    )
    assert "num_generations" not in warning and "8" not in warning and "retr" not in warning
    (warning,) = start_warnings(**MODES["retries"], num_train_epochs=2)
    assert "takes 15 steps, which with retries cover only a part of it" in warning
    for mode in (BATCH | {"max_steps": 30}, BATCH | {"num_generations": 2}, {}):
        assert not start_warnings(**mode)


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
    assert trainer.state.global_step == training_steps(args, len(data), epochs=2) > 10


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
        (reward_of_prompt, ONE_ROUND, ("ada/frac_zero_advantage_groups is 100% now", "completions of the same prompt")),
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
        (
            [format_reward, half_reward],
            {"success_reward": "half_reward"},
            ("No rollout", "the reward of half_reward ranges from 0"),
        ),
    ],
)  # fmt: skip
def test_a_threshold_outside_the_range_of_rewards_is_reported_after_two_generations(reward, options, fragments, train):
    _, (warning,) = train(reward, **options)
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
