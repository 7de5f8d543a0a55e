"""The summary of a run, the lines on the console, and the metrics of trackers."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PrinterCallback, ProgressCallback

from ada_trl import AdaGRPOConfig
from ada_trl.trainer.callbacks import LARGEST_LINE, console_line, constant_metrics
from ada_trl.trainer.run_summary import summary, training_steps

from ..helpers import build, logs_of, run_module
from .log_worker import MODES


def config(**options) -> AdaGRPOConfig:
    return AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=32, **options)


def test_a_baseline_implies_the_other_defaults():
    for baseline in ("posterior", "batch"):
        args = config(baseline=baseline)
        assert (args.adaptive_sampling, args.num_generations, args.prompt_weighting) == ("uniform", 1, "none")
        assert config(baseline=baseline, num_generations=2).num_generations == 2
    assert (config().adaptive_sampling, config().num_generations) == ("seq-balance", 4)
    assert config(adaptive_sampling="uniform").num_generations == 4
    rounds = config(baseline="posterior", adaptive_sampling="seq-pos")
    assert (rounds.adaptive_sampling, rounds.num_generations) == ("seq-pos", 4)
    assert config(baseline="posterior", adaptive_sampling="est").num_generations == 4


def test_resolved_defaults_can_be_set_explicitly():
    for options in MODES.values():
        args = config(**options)
        again = config(**options | {name: getattr(args, name) for name in ("adaptive_sampling", "num_generations")})
        step, _, defaults = summary(again).split("\n")
        assert summary(args).startswith(step) and summary(args).endswith(defaults)


STEPS = {
    "posterior": "32 prompts × 1 rollout; baseline: predicted mean reward of the prompt; prompt weight: none.",
    "batch": "32 prompts × 1 rollout; baseline: mean reward of the other rollouts in the batch; prompt weight: none.",
    "seq-balance": "8 prompts, each with rounds of 8 rollouts until 2 are correct and 2 incorrect (at most 32 rollouts), of which 4 are "
    "trained on; "
    "baseline: mean reward of the prompt's rollouts; prompt weight: 1/√(pass rate).",
    "uniform": "8 prompts × 4 rollouts; baseline: mean reward of the prompt's rollouts; prompt weight: none.",
}
ONE_ROLLOUT = (
    "GRPOTrainer with num_generations=8 (its default): 32 prompts per step instead of 4; 1 rollout per prompt instead "
    "of 8; 31 steps per epoch instead of 250 (option: num_generations); baseline {!r} instead of the group mean (option: baseline)."
)
DIFFERENCES = {
    "posterior": ONE_ROLLOUT.format("posterior"),
    "batch": ONE_ROLLOUT.format("batch"),
    "seq-balance": "GRPOTrainer with num_generations=8 (its default): 8 prompts per step instead of 4; 125 steps per epoch "
    "instead of 250 (option: num_generations); up to 32 rollouts per prompt instead of 8 (option: adaptive_sampling); "
    "advantages multiplied by a prompt weight (option: prompt_weighting).",
    "uniform": "GRPOTrainer with num_generations=8 (its default): 8 prompts per step instead of 4; 4 rollouts per prompt instead "
    "of 8; 125 steps per epoch instead of 250 (option: num_generations).",
}


@pytest.mark.parametrize("mode", STEPS)
def test_the_summary_describes_a_step_and_the_differences_from_grpo(mode):
    step, differences, defaults = summary(config(**MODES[mode]), num_prompts=1000).split("\n")
    assert step == f"Each step: {STEPS[mode]} In total, 32 rollouts are trained on."
    assert differences == f"Differences from {DIFFERENCES[mode]}"
    group = "" if mode in ("posterior", "batch") else "num_generations=4 (8), "
    assert defaults.endswith(f"(in parentheses): {group}scale_rewards='none' ('group'), epsilon_high=0.28 (None).")


def test_the_summary_compares_an_explicit_group_with_the_same_in_grpo():
    assert "GRPOTrainer with num_generations=4: none." in summary(
        config(adaptive_sampling="uniform", num_generations=4)
    )


@pytest.mark.parametrize("options", [{"steps_per_generation": 4}, {"num_iterations": 2}])
def test_the_summary_counts_per_generation_if_a_step_is_not_one(options):
    text = summary(config(baseline="batch", **options), num_prompts=1000)
    assert text.startswith("Each generation batch: ") and re.search(
        r"\d+ prompts per generation batch instead of \d+;", text
    )


def test_the_summary_names_the_rollouts_of_evaluations():
    options = {"baseline": "batch", "eval_strategy": "steps", "eval_steps": 1}
    assert "1 rollout per prompt in evaluations (option: num_generations_eval)" in summary(config(**options))
    assert "in evaluations" not in summary(config(num_generations_eval=8, **options))


def test_the_summary_omits_unused_defaults_and_impossible_comparisons():
    as_grpo = {"num_generations": 8, "scale_rewards": "group", "epsilon_high": None}
    lines = summary(config(adaptive_sampling="uniform", **as_grpo), num_prompts=1000).split("\n")
    assert len(lines) == 2 and lines[1].endswith("(its default): none.")
    of_two = AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=2, baseline="batch")
    assert "GRPOTrainer with num_generations=2: 2 prompts per step instead of 1;" in summary(of_two, 1000)
    of_13 = AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=13, baseline="batch")
    assert "GRPOTrainer" not in summary(of_13)  # no group of at most 8 rollouts divides 13


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"num_iterations": 2}, {"baseline": "pool"}]
)
def test_training_steps_predicts_the_steps_of_a_run(options, tmp_path):
    options = {"baseline": "batch", "max_steps": -1, "num_train_epochs": 2} | options
    if options["baseline"] == "pool":
        options |= {"adaptive_sampling": "uniform", "num_generations": 2}
    data = build(tmp_path / "data").train_dataset
    data = data.select([i % len(data) for i in range(50)])
    trainer = build(tmp_path, dataset=data, per_device_train_batch_size=4, max_completion_length=1, **options)
    trainer.train()
    args = trainer.args
    assert trainer.state.global_step == training_steps(args, len(data), args.num_generations, epochs=2) > 10


VARYING = {"reward", "entropy", "ada/samples_per_prompt/mean", "ada/frac_zero_advantage_groups", "ada/pass_rate/mean"}
NUMBERS = st.floats(-1e4, 1e4) | st.just(math.nan)


@pytest.mark.parametrize("mode", MODES)
@given(
    step=st.integers(0, 10**6),
    reward=NUMBERS,
    others=st.floats(0, 1e4),
    tokens=st.integers(0, 10**13),
    prefix=st.sampled_from(["", "eval_"]),
)
def test_a_line_is_short(mode, step, reward, others, tokens, prefix):
    names = ["completions/mean_length", "entropy", "step_time", "ada/samples_per_prompt/mean"]
    names += ["ada/frac_zero_advantage_groups", "ada/baseline/explained_variance"]
    logs = dict.fromkeys(names, others) | {"reward": reward, "num_tokens": tokens}
    line = console_line({prefix + name: value for name, value in logs.items()}, config(**MODES[mode]), step)
    assert len(line) <= LARGEST_LINE
    assert ("reward" in line) == (not math.isnan(reward))
    assert "nan" not in line and not line.endswith((", ", ","))


LOGS = {
    "reward": 0.5,
    "rewards/accuracy/mean": 0.3,
    "rewards/format/mean": 0.2,
    "loss": -0.00123,
    "kl": 0.0456,
    "ada/frac_zero_advantage_groups": 0.25,
    "ada/samples_per_prompt/mean": 9.0,
    "entropy": 0.39,
    "completions/mean_length": 43.21,
    "num_tokens": 2230.0,
    "step_time": 1.5,
}


@pytest.mark.parametrize("baseline", ["pool", "posterior", "batch"])
def test_a_line_has_loss_kl_and_the_rewards_of_each_function(baseline):
    args = config(adaptive_sampling="uniform", baseline=baseline, beta=0.1)
    line = console_line(LOGS, args, 20)
    start = "step 20: reward 0.500, accuracy 0.300, format 0.200, KL 0.0456, loss -0.00123, zero advantage 0.25, "
    assert line.startswith(start)
    only = {name: LOGS[name] for name in LOGS if name not in ("kl", "rewards/format/mean")}
    expected = "step 20: reward 0.500, loss -0.00123, zero advantage 0.25, entropy 0.39, length 43.2, tokens in+out 2.23k, seconds 1.5"
    assert console_line(only, args, 20) == expected and len(expected) <= LARGEST_LINE
    replaced = only | {"entropy": "low"}  # by a callback
    assert console_line(replaced, args, 20) == expected.replace("entropy 0.39, ", "")
    evaluation = console_line({f"eval_{name}": value for name, value in LOGS.items()}, args, 20)
    assert evaluation.startswith("step 20, evaluation: reward 0.500, accuracy 0.300, format 0.200, KL 0.0456, loss")


def test_a_line_names_the_evaluation_set_a_loss_of_nan_and_the_logs_of_the_user():
    args = config(baseline="batch")
    evaluation = {"eval_hard_loss": 0.5, "eval_reward": 0.25, "eval_hard_runtime": 1.0}
    assert console_line(evaluation, args, 20) == "step 20, evaluation of hard: reward 0.250, loss 0.5"
    assert console_line({"reward": math.nan, "loss": math.nan}, args, 20) == "step 20: loss nan"
    assert console_line({"mine": 0.5}, args, 20) == "step 20: {'mine': 0.5}"


def test_a_long_line_omits_the_last_rewards_but_not_kl_and_loss():
    names = {f"rewards/a_reward_function_with_a_long_name_{i}/mean": 0.1 for i in range(4)}
    line = console_line(LOGS | names, config(adaptive_sampling="uniform", beta=0.1), 20)
    assert len(line) <= LARGEST_LINE and "accuracy 0.300" in line and "name_3" not in line
    assert "KL 0.0456, loss -0.00123, zero advantage 0.25" in line


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_an_environment_variable_restores_the_output_of_trl(disable_tqdm, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ADA_TRL_CONSOLE", "trl")
    trainer = build(tmp_path, disable_tqdm=disable_tqdm)
    trainer.train()
    output = capsys.readouterr().out
    assert output.count("'grad_norm':") == 2 and "step 1: " not in output
    monkeypatch.setenv("ADA_TRL_CONSOLE", "off")
    with pytest.raises(ValueError, match=r"ADA_TRL_CONSOLE \('off'\) must be 'compact' or 'trl'"):
        build(tmp_path)


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_callbacks_of_the_user_are_not_replaced(disable_tqdm, tmp_path, capsys):
    trainer = build(tmp_path, callbacks=[PrinterCallback()], disable_tqdm=disable_tqdm)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert sum("'grad_norm':" in line for line in lines) == 2
    assert sum(line.startswith("step ") for line in lines) == 2


@pytest.mark.parametrize("mode", MODES)
def test_the_console_has_a_line_per_logging_step_and_constant_metrics_are_constant(mode, tmp_path, capsys):
    def reward(completions, **kwargs):
        return [float(sum(map(ord, completion)) % 3 == 0) for completion in completions]

    trainer = build(tmp_path, reward, log_level="warning", **MODES[mode] | {"max_steps": 4})
    constants, trainer._constant_metrics = trainer._constant_metrics, set()
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    expected = summary(trainer.args, len(trainer.train_dataset)).splitlines()
    start = lines.index(expected[0])  # deepspeed writes a separate line, once
    assert lines[start : start + len(expected)] == expected
    lines = lines[start + len(expected) :]
    assert [line.partition(":")[0] for line in lines[:4]] == [f"step {i}" for i in (1, 2, 3, 4)]
    assert len(lines) == 5 and re.fullmatch(r"4 steps in \d+ s", lines[4])
    assert all(len(line) <= LARGEST_LINE for line in lines)

    logs = logs_of(trainer)
    assert VARYING <= logs[0].keys() - constants
    means = [[step[name] for step in logs] for name in ("reward", "ada/success_reward/mean", "ada/pass_rate/mean")]
    zero_advantage = [step["ada/frac_zero_advantage_groups"] for step in logs]
    for name in constants & logs[0].keys():
        values = [step[name] for step in logs]
        copies = [*means, *([1 - value for value in copied] for copied in (means[2], zero_advantage))]
        same = len(set(values)) == 1 or any(values == pytest.approx(copy) for copy in copies)
        assert same or name.startswith("ada/pass_rate/p"), f"{name} varies: {values}"


@pytest.mark.slow
def test_only_one_of_two_processes_prints(tmp_path):
    result = run_module("tests.trainer.log_worker", tmp_path, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    runs = re.split(r"^mode (.+)\n", result.stdout, flags=re.MULTILINE)[1:]
    assert runs[::2] == list(MODES)
    for text in runs[1::2]:
        lines = [line for line in text.splitlines() if re.match(r"Each step: |step \d+: |\d+ steps in ", line)]
        assert [line.split()[0] for line in lines] == ["Each", "step", "step", "2"], text
        assert all(len(line) <= LARGEST_LINE for line in lines[1:])


def test_constant_metrics_are_not_logged(tmp_path):
    trainer = build(tmp_path, **MODES["posterior"] | {"max_steps": 1})
    trainer.train()
    names = logs_of(trainer)[0].keys()
    assert not names & constant_metrics(trainer.args) and VARYING <= names


def test_the_progress_bar_prints_the_same_lines_and_other_callbacks_stay(tmp_path, capsys):
    class Mine(ProgressCallback):
        pass

    trainer = build(tmp_path, baseline="posterior", disable_tqdm=False)
    trainer.add_callback(Mine)
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert Mine in kinds and not kinds & {ProgressCallback, PrinterCallback}
    trainer.remove_callback(Mine)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and all("explained variance" in line for line in lines)


def test_console_lines_of_an_evaluation_and_the_log_level(tmp_path, capsys):
    data = build(tmp_path / "data").train_dataset.select(range(4))
    trainer = build(
        tmp_path, eval_dataset=data, baseline="batch", eval_strategy="steps", eval_steps=2, log_level="error"
    )
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert not lines[0].startswith("Each step") and any(
        line.startswith("step 2, evaluation: reward") for line in lines
    )
    assert torch.isfinite(torch.tensor([logs["loss"] for logs in logs_of(trainer)])).all()
