"""The sentence at the start of a run, warnings, constant metrics, model cards, and the metrics that trackers receive."""

import json
import logging
import math
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer, __version__
from ada_trl.trainer.reporting import describe_run, logged_metrics, report_start, training_steps
from ada_trl.trainer.vllm_session import ess_ratio

from ..helpers import Recorder, build, even_reward, logs_of, run_module


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


DEFAULTS = "; defaults that differ from GRPOConfig's (in parentheses): scale_rewards='none' ('group'), epsilon_high=0.28 (None)"
POOL = "advantages use the mean reward of all rollouts of the prompt"
WEIGHTED = f"{POOL} and the weight 1/√p̂, with p̂ its pass rate{DEFAULTS}, num_generations=4 (8)."
OTHERS = f"advantages use the mean reward of all other rollouts of the batch{DEFAULTS}"
SENTENCES = {
    "batch": f"Batch baseline: 32 prompts × 1 rollout per generation batch; {OTHERS}, num_generations=1 (8).",
    "batch of groups": "Batch baseline: 16 prompts × 2 rollouts per generation batch (num_generations=1 is sufficient and gives more "
    f"prompts); {OTHERS}.",
    "retries": f"Batch baseline: 32 prompts × 1 rollout per generation batch, and one without a correct rollout is sampled again in up to "
    f"3 later steps; {OTHERS}.",
    "seq-balance": "Seq-balance: up to 8 rounds of 4 rollouts per prompt, until 1 is correct and 1 incorrect; 4 are trained on; "
    + WEIGHTED,
    "est": f"Est: 2 to 32 rollouts per prompt, 4 on average, more where the estimated pass rate is low; {WEIGHTED}",
    "uniform": f"{DEFAULTS[2].upper()}{DEFAULTS[3:]}, num_generations=4 (8).",
    "dynamic sampling": f"Uniform sampling: 8 prompts × 4 rollouts per generation batch; {POOL}; zero-variance groups are replaced (up "
    f"to 4 prompts for each place in the batch){DEFAULTS}, num_generations=4 (8).",
}


@pytest.mark.parametrize("mode", SENTENCES)
def test_a_sentence_describes_the_differences_from_grpo(mode):
    assert describe_run(config(**MODES[mode])) == SENTENCES[mode]


def test_nothing_is_said_where_nothing_differs():
    assert describe_run(config(**UNIFORM, num_generations=8, scale_rewards="group", epsilon_high=None)) == ""
    grpo = {field: GRPOConfig.__dataclass_fields__[field].default for field in ("scale_rewards", "epsilon_high")}
    assert grpo == {"scale_rewards": "group", "epsilon_high": None}


def test_the_sentence_names_options_with_an_effect_on_the_rollouts_of_evaluations_and_weights():
    evaluated = config(**BATCH, eval_strategy="steps", eval_steps=1, num_generations_eval=8)
    assert "; 8 rollouts per prompt in evaluations;" in describe_run(evaluated)
    scaled = describe_run(config(scale_rewards="group", prompt_weighting="none"))
    assert (
        "no prompt weight, because scale_rewards='group' is a weight as well" in scaled and "('group')" not in scaled
    )
    assert "the weight p̂^(0.25 - 1)" in describe_run(config(prompt_weighting=0.25))
    assert "excluded from the loss" in describe_run(config(zero_variance_groups="mask"))


@pytest.mark.parametrize("log_level", ["warning", "error"])
def test_the_sentence_is_printed_before_the_logs_of_trl(log_level, tmp_path, capsys):
    trainer = build(tmp_path, log_level=log_level)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "'grad_norm':" in line)
    assert (describe_run(trainer.args) in lines[:first]) == (log_level == "warning")
    assert sum("'grad_norm':" in line for line in lines) == 2


@pytest.mark.slow
def test_only_one_of_two_processes_prints_the_sentence(tmp_path):
    result = run_module("tests.trainer.log_worker", tmp_path, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Batch baseline: ") == 1


# Metrics


VARYING = {"reward", "entropy", "ada/samples_per_prompt/mean", "ada/frac_zero_advantage_groups", "ada/pass_rate/mean"}


SERVER = {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("mode", MODES)
def test_a_person_can_read_what_is_logged(mode, tmp_path):
    """At most 20 metrics of ours, 12 with the batch baseline, and all of them vary; everything else with `log_completions`."""

    def reward(completions, **kwargs):
        return [float(sum(map(ord, completion)) % 3 == 0) for completion in completions]

    few, all_of_them = (
        build(tmp_path, reward, **MODES[mode] | {"max_steps": 4, "log_completions": log}) for log in (False, True)
    )
    few.train()
    all_of_them.train()
    logs, details = logs_of(few), logs_of(all_of_them)
    ours = {name for name in logs[0] if name.startswith("ada/")}
    assert VARYING <= logs[0].keys() < details[0].keys()
    assert ours == {f"ada/{name}" for name in logged_metrics(few.args)}
    assert ("frac_reward_zero_std" in logs[0]) == (few.args.num_generations > 1 and mode != "est"), "As in GRPO."
    constants = {name for name in ours if len({step[name] for step in logs}) == 1}
    # The first two are logged in all modes, for comparisons; the others vary with other rewards.
    known = {
        "samples_per_prompt/mean",
        "frac_zero_advantage_groups",
        "frac_exit_condition_met",
        "frac_recovered_groups",
    }
    assert constants <= {f"ada/{name}" for name in known}


@pytest.mark.parametrize(
    ("options", "most"),
    [
        *((mode | SERVER, 12) for mode in (BATCH, BATCH | {"retries": 3}, BATCH | MODES["est"])),
        (BATCH | SERVER | {"retries": 3, "max_staleness": 1}, 12),
        (BATCH | SERVER | MODES["est"] | {"pass_rate_estimator": "value", "max_staleness": 1}, 12),
        (SERVER | {"zero_variance_groups": "resample"}, 20),
        (SERVER | MODES["est"] | {"max_staleness": 1}, 20),
    ],
)
def test_few_metrics_are_logged_with_a_server_too(options, most):
    assert len(logged_metrics(config(**options))) <= most


@pytest.mark.parametrize("groups", ["keep", "skip", "mask"])
def test_means_over_the_rows_of_the_loss_are_logged_if_these_are_all_completions(groups, tmp_path):
    trainer = build(tmp_path, **UNIFORM, zero_variance_groups=groups, max_steps=1)
    trainer.train()
    found = {name for name in logs_of(trainer)[0] if name == "entropy" or name.startswith("clip_ratio/")}
    assert len(found) == (6 if groups == "keep" else 0), found


# Warnings at the start


@pytest.fixture
def start_warnings(caplog):
    """Warnings about the epochs or the size of the batch."""

    def collect(num_prompts=1000, rows=64, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ada_trl.trainer.reporting"):
            report_start(config(per_device_train_batch_size=rows, **options), num_prompts)
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
        *(
            (half_reward, MODES.get(mode, {"adaptive_sampling": mode}), ("No rollout", "the reward ranges from 0", "the prompts are hard"))
            for mode in ("seq-balance", "seq-pos", "est")
        ),
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


# Trackers


def from_tensorboard(directory):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(Path(directory).rglob("events.out*")).parent))
    events.Reload()
    return {tag.removeprefix("train/"): [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def from_trackio(directory):
    path = next(Path(os.environ["TRACKIO_DIR"]).rglob(f"{directory.name}.db"))
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
    found = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name.removeprefix("train/"), []).append(value)
    return found


def assert_same(found, expected):
    metrics = [name for name in expected[0] if name.startswith("ada/") and all(name in logs for logs in expected)]
    assert len(metrics) > 10
    for metric in metrics:
        assert found[metric] == pytest.approx([logs[metric] for logs in expected], rel=1e-5, nan_ok=True), metric


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_adaptive_metrics_arrive(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = build(tmp_path / "run", report_to=[name], run_name="tiny", project=tmp_path.name)
    trainer.train()
    assert_same({"tensorboard": from_tensorboard, "trackio": from_trackio}[name](tmp_path), logs_of(trainer))


def test_adaptive_metrics_arrive_at_wandb(tmp_path, monkeypatch):
    """Offline. Its files are not meant to be read, so what it is given is."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    given, log = [], wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, **options: given.append(data) or log(run, data, **options))
    trainer = build(tmp_path / "run", report_to=["wandb"], log_completions=True)
    trainer.train()
    wandb.finish()
    rows = [row for row in given if "train/reward" in row]
    found = {name.removeprefix("train/"): [row.get(name) for row in rows] for name in rows[0]}
    assert_same(found, logs_of(trainer))
    tables = [row["completions"] for row in given if "completions" in row]
    assert len(tables) >= 2 and {"pool_size", "pool_positives", "advantage"} <= set(tables[0].columns)
    assert next(tmp_path.rglob("*.wandb")).stat().st_size > 0


# Metrics of an unbiased sample


class Scripted(Recorder):
    """Hard prompts, a quarter, have completions of five tokens, the others of one; all end."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        tokenizer = self.processing_class
        prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
        texts = ["12345" if prompt.startswith("9") else "1" for prompt in prompts]
        return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]], None


@pytest.mark.parametrize("mode", ["batch", "retries", "est"])
def test_lengths_are_those_of_an_unbiased_sample(mode, tmp_path):
    """With retries, most rollouts are of hard prompts, and Est samples them more often."""

    def solved(prompts, **kwargs):
        return [float(not prompt.startswith("9")) for prompt in prompts]

    rows = Dataset.from_dict({"prompt": [f"{'9' if i % 4 == 0 else '1'}{i:02d}+1=" for i in range(64)]})
    options = {"per_device_train_batch_size": 16, "max_steps": 12, "max_completion_length": 8} | MODES[mode]
    options |= {"max_samples": 16, "num_generations": 4, "max_steps": 24} if mode == "est" else {}  # two epochs
    trainer = build(tmp_path, solved, rows, trainer_class=Scripted, learning_rate=0.0, **options)
    trainer.train()
    steps = [logs for logs in logs_of(trainer) if "reward" in logs]
    assert len({logs["ada/tokens/generated"] for logs in steps}) > 1, "More of the hard prompts in some steps."
    for logs in steps:
        hard = 1 - logs["reward"]
        assert logs["completions/mean_length"] == pytest.approx(6 * hard + 2 * (1 - hard))
        assert logs["completions/max_length"] == (6 if hard else 2) and logs["completions/clipped_ratio"] == 0
