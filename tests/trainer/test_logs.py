"""What a run says: at its start, on the console, and to the trackers."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PrinterCallback, ProgressCallback

from ada_trl import AdaGRPOConfig
from ada_trl.trainer.callbacks import LARGEST_LINE, console_line, constant_metrics, summary

from ..helpers import build, logs_of, run_module
from .log_worker import MODES


def config(**options) -> AdaGRPOConfig:
    return AdaGRPOConfig("unused", bf16=False, use_cpu=True, per_device_train_batch_size=32, **options)


def test_one_word_is_the_whole_mode():
    for word in ("posterior", "batch"):
        args = config(baseline=word)
        assert (args.adaptive_sampling, args.num_generations, args.prompt_weighting) == ("uniform", 1, "none")
        assert config(baseline=word, num_generations=2).num_generations == 2
    assert (config().adaptive_sampling, config().num_generations) == ("seq-balance", 4)
    assert config(adaptive_sampling="uniform").num_generations == 4
    rounds = config(baseline="posterior", adaptive_sampling="seq-pos")
    assert (rounds.adaptive_sampling, rounds.num_generations) == ("seq-pos", 4)
    assert config(baseline="posterior", adaptive_sampling="est").num_generations == 4


def test_what_was_resolved_can_be_given_again():
    for options in MODES.values():
        args = config(**options)
        again = config(**options | {name: getattr(args, name) for name in ("adaptive_sampling", "num_generations")})
        assert summary(again) == summary(args)


@pytest.mark.parametrize(
    ("mode", "expected"),
    {
        "posterior": "Each step: 32 prompts; 1 rollout each; compared with what was expected of the prompt; all prompts count "
        "the same. 32 rows are trained on. GRPO with 4 rollouts has 8 prompts in as many.",
        "batch": "Each step: 32 prompts; 1 rollout each; compared with the mean of all other rollouts; all prompts count the "
        "same. 32 rows are trained on. GRPO with 4 rollouts has 8 prompts in as many.",
        "seq-balance": "Each step: 8 prompts; rounds of 8 rollouts until 2 right and 2 wrong, at most 32, of which 4 are "
        "trained on; compared with the mean of the prompt's rollouts; a prompt counts 1/√p. 32 rows are trained on.",
        "uniform": "Each step: 8 prompts; 4 rollouts each; compared with the mean of the prompt's rollouts; all prompts count "
        "the same. 32 rows are trained on.",
    }.items(),
)
def test_what_will_run_is_said_in_words(mode, expected):
    assert summary(config(**MODES[mode])) == expected


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


@pytest.mark.parametrize("mode", MODES)
def test_the_console_has_a_line_per_logging_step_and_trackers_what_can_vary(mode, tmp_path, capsys):
    def reward(completions, **kwargs):
        return [float(sum(map(ord, completion)) % 3 == 0) for completion in completions]

    trainer = build(tmp_path, reward, log_level="warning", **MODES[mode] | {"max_steps": 4})
    constants, trainer._constant_metrics = trainer._constant_metrics, set()
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(summary(trainer.args))  # deepspeed writes a line of its own, once
    lines = lines[start + 1 :]
    assert [line.partition(":")[0] for line in lines[:4]] == [f"step {i}" for i in (1, 2, 3, 4)]
    assert len(lines) == 5 and re.fullmatch(r"4 steps in \d+ s", lines[4])
    assert all(len(line) <= LARGEST_LINE for line in lines)

    logs = logs_of(trainer)
    assert VARYING <= logs[0].keys() - constants
    means = [[step[name] for step in logs] for name in ("reward", "ada/success_reward/mean", "ada/pass_rate/mean")]
    silent = [step["ada/frac_zero_advantage_groups"] for step in logs]
    for name in constants & logs[0].keys():
        if (
            name == "ada/baseline/explained_variance"
        ):  # of a batch: a function of its rows, none where rewards are all equal
            shares = [step[name] for step in logs if name in step]
            rows = trainer.args.generation_batch_size
            assert shares == pytest.approx([1 - (rows / (rows - 1)) ** 2] * len(shares))
            continue
        values = [step[name] for step in logs]
        copies = [*means, *([1 - value for value in copied] for copied in (means[2], silent))]
        same = len(set(values)) == 1 or any(values == pytest.approx(copy) for copy in copies)
        assert same or name.startswith("ada/pass_rate/p"), f"{name} varies: {values}"


@pytest.mark.slow
def test_on_two_processes_one_of_them_writes(tmp_path):
    result = run_module("tests.trainer.log_worker", tmp_path, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    runs = re.split(r"^mode (.+)\n", result.stdout, flags=re.MULTILINE)[1:]
    assert runs[::2] == list(MODES)
    for text in runs[1::2]:
        lines = [line for line in text.splitlines() if re.match(r"Each step: |step \d+: |\d+ steps in ", line)]
        assert [line.split()[0] for line in lines] == ["Each", "step", "step", "2"], text
        assert all(len(line) <= LARGEST_LINE for line in lines[1:])


def test_what_is_constant_is_not_logged(tmp_path):
    trainer = build(tmp_path, **MODES["posterior"] | {"max_steps": 1})
    trainer.train()
    names = logs_of(trainer)[0].keys()
    assert not names & constant_metrics(trainer.args) and VARYING <= names


def test_the_bar_has_the_same_lines_and_other_callbacks_stay(tmp_path, capsys):
    class Mine(ProgressCallback):
        pass

    trainer = build(tmp_path, baseline="posterior", disable_tqdm=False)
    trainer.add_callback(Mine)
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert Mine in kinds and not kinds & {ProgressCallback, PrinterCallback}
    trainer.remove_callback(Mine)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and all("explained" in line for line in lines)


def test_evaluation_and_the_log_level(tmp_path, capsys):
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
