"""`ada-trl check`: findings, failures, and the removal of its files."""

import itertools
import math
import re

import numpy as np
import pytest

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.commands import start
from ada_trl.commands.findings import SIMULATED_GROUPS, Sample, difficulty, expected_sampling, step_cost

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
    return rows[2:], code


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
        *("model and data", "generation", "truncated", "reward even_reward", "pass rate"),
        *("optimizer step", "peak memory", "cost"),
    ]
    assert f"16 rows of {LONGEST} + 7 tokens" in found["optimizer step"]
    norm = re.search(r"gradient norm ([\d.e+-]+)", found["optimizer step"])[1]
    assert float(norm) > 1e-3
    assert "17 rows" in found["model and data"] and "64 completions" in found["generation"]
    cost = re.search(r"\(\d+% of them with a gradient\): (\d+) rollouts, (\d+) tokens", found["cost"])
    assert found["cost"].endswith(("s of update", "s of update per step")), (
        "Eight prompts are too few to recommend another mode."
    )
    if mode == "uniform":  # samples n rollouts of each prompt
        rollouts, tokens = map(int, cost.groups())
        mean = int(re.search(r"of (\d+) tokens", found["generation"])[1])
        assert rollouts == 16 and abs(tokens - 16 * mean) <= 8


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
    assert "with a gradient" not in found["cost"]  # 64 failures do not determine any pass rate
    share = int(found["truncated"].split("%")[0])
    assert share > 50 and "Raise max_completion_length (1)" in found["truncated"]


SAMPLING = {
    "seq-balance": {"samples_per_round": 4, "max_rounds": 3, "min_positives": 2, "min_negatives": 1},
    "seq-pos": {"samples_per_round": 8, "max_rounds": 4, "min_positives": 1},
    "uniform": {"num_generations": 4},
    "uniform, resampled": {"num_generations": 4, "zero_variance_groups": "resample", "max_rounds": 3},
}


def enumerated(rate, size, max_rounds, is_met):
    """Mean and mean square of a prompt's rollouts, and the probability of equal outcomes, from every sequence of rounds."""
    moments = np.zeros(3)
    for successes in itertools.product(range(size + 1), repeat=max_rounds):
        probability = math.prod(math.comb(size, k) * rate**k * (1 - rate) ** (size - k) for k in successes)
        totals = [(size * k, sum(successes[:k])) for k in range(1, max_rounds + 1)]
        rollouts, positives = next((total for total in totals if is_met(total[1], total[0] - total[1])), totals[-1])
        moments += probability * np.array([rollouts, rollouts**2, positives in (0, rollouts)])
    return moments


@pytest.mark.parametrize("mode", SAMPLING)
def test_simulated_sampling_agrees_with_an_enumeration(mode):
    """With so many rollouts of each prompt that its pass rate is known."""
    rates, draws = np.array([0.05, 0.5, 0.9]), np.full(3, 10**7)
    options = SAMPLING[mode] | {"adaptive_sampling": mode.split(",")[0]}
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, per_device_train_batch_size=16, **options)
    successes, outcomes = np.rint(rates * draws), np.array([1.0, 0.0])
    counts_PK = np.stack([successes, draws - successes], axis=1)
    with_gradient, rollouts = expected_sampling(args, counts_PK, outcomes, outcomes)
    positives, negatives = options.get("min_positives", 0), options.get("min_negatives", 0)
    size, rounds = options.get("samples_per_round", 4), 1 if "uniform" in mode else options["max_rounds"]
    mean, square, lost = np.mean(
        [enumerated(rate, size, rounds, lambda k, m: k >= positives and m >= negatives) for rate in rates], axis=0
    )
    prompts = 1.0
    if "resampled" in mode:  # of three prompts
        prompts, lost = 1 + lost + lost**2, lost**3
    assert with_gradient == pytest.approx(1 - lost, abs=5 * 0.5 / math.sqrt(SIMULATED_GROUPS))
    assert rollouts == pytest.approx(
        mean * prompts, abs=5 * math.sqrt(square - mean**2 + 1) / math.sqrt(SIMULATED_GROUPS)
    )


@pytest.mark.parametrize("groups", ["keep", "resample"])
def test_groups_of_graded_rewards_have_a_gradient_where_their_rewards_differ(groups):
    """On whichever side of the threshold they are. Four rewards of 9 values are hardly ever equal."""
    options = {"adaptive_sampling": "uniform", "per_device_train_batch_size": 8, "zero_variance_groups": groups}
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, **options)
    grades = np.random.default_rng(0).integers(0, 9, (8, 8)) / 10
    cost = step_cost(args, Sample(grades[..., None], grades, grades, 4.0, 7.0, 0.0, 1.0, 0.0), 1.0).found
    found, rollouts = map(int, re.search(r"\((\d+)% of them with a gradient\): (\d+) rollouts", cost).groups())
    assert found >= 95 and rollouts == 8, cost


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
    rewards = np.array([rewards], dtype=float)
    sample = Sample(rewards[..., None], rewards, rewards, 4.0, 7.0, 0.0, 1.0, 0.0)
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, positive_threshold=threshold)
    found = difficulty(args, sample)
    assert advice in found.advice
    assert found.is_fatal == (rewards.min() == rewards.max())


def test_nothing_is_advised_to_a_run_with_retries():
    rewards = np.array([[0.0, 1.0] * 4])
    args = AdaGRPOConfig("unused", use_cpu=True, bf16=False, baseline="batch", retries=2)
    sample = Sample(rewards[..., None], rewards, rewards, 4.0, 7.0, 0.0, 1.0, 0.0)
    assert not difficulty(args, sample).advice


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
