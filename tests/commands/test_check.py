"""`ada-trl check`: findings, failures, and the removal of its files."""

import math
import re

import pytest

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.commands import short_run, start
from ada_trl.commands.findings import across_prompts, difficulty
from ada_trl.core import Rollouts

from ..helpers import run_module, save_tiny_model, write_jsonl


LONGEST = 11  # tokens of the longest prompt of the data, which is not among the first


def silent_reward(completions, **kwargs):
    return [None] * len(completions)


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


def none_reward(completions, **kwargs):
    return None


def text_reward(completions, **kwargs):
    return ["0.5"] * len(completions)


async def scalar_reward(completions, **kwargs):
    return 0.5


def failing_reward(completions, **kwargs):
    raise ZeroDivisionError("my bug")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a model and sums."""
    folder = tmp_path_factory.mktemp("check")
    save_tiny_model(folder / "model")
    prompts = [f"{a}+1=" for a in range(8)] + ["1" * (LONGEST - 3) + "+1="] + [f"{a}+2=" for a in range(8)]
    write_jsonl(folder / "sums.jsonl", [{"prompt": prompt} for prompt in prompts])
    return folder


def words(task, *more, output_dir="runs/mine", reward="tests.helpers.even_reward"):
    options = {"model_name_or_path": task / "model", "dataset_name": task / "sums.jsonl", "reward_funcs": reward}
    options |= {"output_dir": task / output_dir, "per_device_train_batch_size": 16, "max_completion_length": 7}
    options |= {"use_cpu": True, "bf16": "false", "gradient_checkpointing": "false", "dataloader_pin_memory": "false"}
    return [f"--{name}={value}" for name, value in options.items()] + list(more)


def checked(capsys, *words):
    """The printed table by its first column, and the exit code."""
    rows, code = printed_rows(capsys, *words)
    return {row[0]: " | ".join(row[1:]) for row in rows}, code


def printed_rows(capsys, *words):
    capsys.readouterr()
    code = 0
    try:
        start("check", list(words))
    except SystemExit as ended:
        code = ended.code
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return rows[1:], code


def files_of(folder):
    return sorted(str(path) for path in folder.rglob("*"))


MODES = {
    "uniform": ["--adaptive_sampling=uniform"],
    "seq-balance": [],
    "est-value": ["--adaptive_sampling=est", "--pass_rate_estimator=value"],
    "batch": ["--baseline=batch"],
    "lora": ["--use_peft", "--lora_target_modules=all-linear"],
    "refill": ["--adaptive_sampling=uniform", "--zero_variance_groups=resample"],
    "across steps": ["--baseline=batch", "--retries=2"],
    "logging nothing": ["--logging_strategy=no"],
    "kl, two iterations": ["--beta=0.1", "--num_iterations=2"],
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_checked_and_no_file_is_left(mode, task, capsys):
    before = files_of(task)
    found, code = checked(capsys, *words(task, *MODES[mode]))
    assert code == 0 and files_of(task) == before
    assert list(found) == [
        *("model and data", "generation", "truncated", "reward even_reward", "pass rate", "rewards across prompts"),
        *("optimizer step", "peak memory", "cost"),
    ]
    assert f"16 rows of {LONGEST} + 7 tokens" in found["optimizer step"]
    norm = re.search(r"gradient norm ([\d.e+-]+)", found["optimizer step"])[1]
    assert float(norm) > 1e-3
    assert "17 rows" in found["model and data"] and "64 completions" in found["generation"]
    cost = re.search(r"\(\d+% of them with a gradient\): (\d+) rollouts, (\d+) tokens", found["cost"])
    assert found["cost"].endswith(("s of update", "s of update per step"))
    rollouts, tokens = map(int, cost.groups())
    assert rollouts <= tokens <= 7 * rollouts
    if mode in ("uniform", "batch", "across steps"):  # n rollouts of each prompt
        assert rollouts == 16


def test_a_step_of_several_generation_batches_is_checked_once(task, capsys):
    options = ("--gradient_accumulation_steps=3", "--steps_per_generation=1", "--adaptive_sampling=uniform")
    rows, code = printed_rows(capsys, *words(task, *options))
    names = [name for name, *_ in rows]
    assert code == 0 and len(names) == len(set(names)), "No line is repeated."
    ((_, cost),) = (row for row in rows if row[0] == "cost")
    assert "a step of 12 prompts" in cost and ": 48 rollouts" in cost


def test_the_step_is_made_on_the_longest_rows(task, monkeypatch, capsys):
    """Prompt and completion of full length go through the model, and back."""
    seen, compute_loss = [], AdaGRPOTrainer.compute_loss

    def watched(self, model, inputs, *args, **kwargs):
        seen.append((inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1), inputs["advantages"]))
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(AdaGRPOTrainer, "compute_loss", watched)
    checked(capsys, *words(task))
    ((prompts, completions, advantages),) = seen
    assert prompts.tolist() == [LONGEST] * 16 and completions.tolist() == [7] * 16 and advantages.all()


def test_a_run_without_successes_and_with_truncated_completions(task, capsys):
    reward = "tests.commands.test_check.no_reward"
    found, code = checked(capsys, *words(task, "--max_completion_length=1", reward=reward))
    assert code == 1, "Nothing can be learnt from equal rewards."
    assert "0.00 of 64 rollouts; by prompt 0/8 0/8 0/8 0/8" in found["pass rate"] and "easier" in found["pass rate"]
    assert "(0% of them with a gradient)" in found["cost"]
    share = int(found["truncated"].split("%")[0])
    assert share > 50 and "Raise max_completion_length (1)" in found["truncated"]


@pytest.mark.parametrize("groups", ["keep", "resample"])
def test_the_cost_is_that_of_the_first_step(groups, task, capsys, monkeypatch):
    """Without it, a step of prompts that are all solved, or all unsolved, would have another cost than the run."""
    logged, log = [], AdaGRPOTrainer.log
    monkeypatch.setattr(AdaGRPOTrainer, "log", lambda self, logs, *rest: (log(self, logs, *rest), logged.append(logs)))
    found, _ = checked(capsys, *words(task, f"--zero_variance_groups={groups}"))
    (logs,) = (logs for logs in logged if "grad_norm" in logs)
    prompts = logs["ada/prompts/sampled"] if groups == "resample" else 4
    rollouts, tokens = map(int, re.search(r"\): (\d+) rollouts, (\d+) tokens", found["cost"]).groups())
    assert rollouts == round(logs["ada/samples_per_prompt/mean"] * prompts) and tokens == logs["ada/tokens/generated"]
    assert f"({1 - logs['ada/frac_zero_advantage_groups']:.0%} of them with a gradient)" in found["cost"]


MANY_POINTS = [0.5, *(2 + i % 9 for i in range(63))]  # all but one above 1


@pytest.mark.parametrize(
    ("rewards", "threshold", "advice"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 1], 0.7, "this solves 38% of these prompts, a single rollout 12%"),
        ([0, 0.3], 0.7, "range from 0 to 0.3 with a mean of 0.15, and positive_threshold (0.7) separates almost none"),
        (MANY_POINTS, 0.7, "positive_threshold (0.7) separates almost none of them"),
        (MANY_POINTS, 5, "baseline='batch' with retries=2 samples a prompt in up to 3 steps"),
        ([1, 1], 0.7, "All rollouts pass: use harder prompts"),
    ],
)
def test_advice_on_pass_rates(rewards, threshold, advice):
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, positive_threshold=threshold)
    found = difficulty(args, Rollouts.of([rewards], threshold=threshold))
    assert advice in found.advice
    assert found.is_fatal == (min(rewards) == max(rewards))


LEVELS = [[level + success for success in (0, 0, 1, 0)] for level in range(8)]


@pytest.mark.parametrize(
    ("baseline", "rewards", "found", "advice"),
    [
        ("batch", [[0, 1, 0, 0], [1, 1, 0, 1]] * 4, "differences within and between prompts are similar", None),
        ("batch", LEVELS, "their level differs by prompt", "baseline='batch' learns next to nothing.*baseline='pool'"),
        ("pool", LEVELS, "their level differs by prompt", None),
        ("batch", [[-0.1, -0.2, -0.1, 0.0]] * 15 + [[-0.1, -0.3, -100, 0]], "a few are far below all", "Rare rewards"),
        ("batch", [[math.nan] * 4] * 8, "unknown, nothing was scored", None),
    ],
)
def test_rewards_are_compared_across_prompts(baseline, rewards, found, advice):
    finding = across_prompts(
        AdaGRPOConfig("unused", baseline=baseline, bf16=False, use_cpu=True), Rollouts.of(rewards)
    )
    assert found in finding.found
    assert re.search(advice, finding.advice) if advice else not finding.advice


def test_the_batch_baseline_is_not_advised_for_rewards_that_do_not_compare_across_prompts():
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False)
    assert not difficulty(args, Rollouts.of(LEVELS)).advice
    assert "baseline='batch'" in difficulty(args, Rollouts.of([[0, 1, 0, 0], [1, 1, 0, 1]] * 4)).advice


def test_nothing_is_advised_to_a_run_with_retries():
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, baseline="batch", retries=2)
    assert not difficulty(args, Rollouts.of([[0, 1] * 4])).advice


def test_a_run_without_scores_exits_with_code_1(task, capsys):
    before = files_of(task)
    found, code = checked(capsys, *words(task, reward="tests.commands.test_check.silent_reward"))
    assert code == 1 and files_of(task) == before
    assert "nothing was scored" in found["pass rate"] and "no completion scored" in found["reward silent_reward"]


@pytest.mark.parametrize(
    ("name", "value"), [("none_reward", "null"), ("text_reward", '["0.5"'), ("scalar_reward", "0.5")]
)
def test_a_reward_function_that_returns_no_numbers_is_named(name, value, task, capsys):
    with pytest.raises(SystemExit) as ended:
        start("check", words(task, reward=f"tests.commands.test_check.{name}"))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"reward function {name} returned {value}" in error, error[-500:]


def test_rewards_of_a_generator_are_read_once():
    def lengths(completions):
        yield from map(len, completions)

    assert short_run._checked(lengths, "lengths")(completions=["a", "bb"]) == [1, 2]


def test_an_error_of_a_reward_function_keeps_its_traceback(task, capsys):
    before = files_of(task)
    with pytest.raises(ZeroDivisionError, match="my bug"):
        start("check", words(task, reward="tests.commands.test_check.failing_reward"))
    assert "model and data" in capsys.readouterr().out
    assert files_of(task) == before


def test_invalid_options_are_reported_as_by_train(task, capsys):
    for more, message in (("--max_stepz=1", "did you mean '--max_steps'"), ("--max_rounds=0", "max_rounds")):
        with pytest.raises(SystemExit) as ended:
            start("check", words(task, more))
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_start_line_is_that_of_the_run(task, capsys):
    """With its steps, although the check makes one."""
    start("check", words(task, "--num_train_epochs=3", "--save_strategy=steps", "--save_steps=100"))
    assert "; 12 steps, 2.82 passes" in (text := capsys.readouterr().out), text
    assert "the run ends before" in text and "save_steps=100" in text


def test_existing_files_of_a_run_are_not_changed(task, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_text("mine")
    checked(capsys, *words(task, output_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "mine"


@pytest.mark.slow
def test_two_processes_sample_different_prompts(task):
    """One table with the samples of both; no file is left."""
    before = files_of(task)
    more = [*MODES["batch"], "--per_device_train_batch_size=8"]
    done = run_module("ada_trl.commands.check", *words(task, *more), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("| cost |") == 1
    assert f"{2 * 8 * 8} completions" in done.stdout
    assert files_of(task) == before
