"""Several processes, without a server: the same update whatever their number, shared failures, sharded models."""

import json
from functools import cache

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from ..helpers import ON_CPU, ROOT, read_rank_outputs, run_module
from .worker import run


CONFIGS = ROOT / "recipes" / "accelerate_configs"
# `rows` is the sum over processes. Groups of 4 rows lie within one of 2 processes if there are 24 rows; of 12 rows
# they straddle 2 or 3 processes.
FOUR = {"rows": 12, "num_generations": 4}
ONE = {"rows": 12, "num_generations": 1}
UNIFORM = {"adaptive_sampling": "uniform"}
RETRIES = {"baseline": "batch", "retries": 3, "max_steps": 3}
RUNS = {
    "whole": {"rows": 24, "num_generations": 4},
    "straddling": FOUR | {"evaluated": 3, "num_generations_eval": 2, "per_device_eval_batch_size": 4},
    "a process without a prompt": {"rows": 12, "num_generations": 12, "samples_per_round": 12, "max_rounds": 2},
    "rounds that do not divide": {"rows": 12, "num_generations": 2, "samples_per_round": 5},
    "slow rewards": FOUR | {"slow_rank": 1},
    "est-ema": FOUR | {"adaptive_sampling": "est-ema"},
    "est-value": FOUR | {"adaptive_sampling": "est-value", "max_steps": 3},
    "batch": ONE | {"baseline": "batch", "scale_rewards": "batch", "max_steps": 2},
    "batch with budgets": FOUR | {"baseline": "batch", "adaptive_sampling": "est-ema"},
    "retries": ONE | RETRIES,
    "retries of a stream": ONE | RETRIES | {"stream_seed": 3},
    "dynamic sampling": FOUR | UNIFORM | {"zero_variance_groups": "resample"},
    "dynamic sampling in rounds": FOUR | {"samples_per_round": 4, "max_rounds": 2, "zero_variance_groups": "resample"},
    "skipped rows": {
        "rows": 12,
        "num_generations": 2,
        "samples_per_round": 4,
        "max_rounds": 2,
        "zero_variance_groups": "skip",
        "max_steps": 2,
    },
    "evaluation first": FOUR | {"evaluates_first": True, "per_device_eval_batch_size": 4},
    "large rows": FOUR | {"blob": 200_000, "max_rounds": 4},
    "large rows, tracked": FOUR | {"blob": 200_000, "pass_rate_estimator": "ema"},
    "failure": FOUR | {"failing_rank": 1},
    "failure in uniform mode": FOUR | UNIFORM | {"failing_rank": 1},
    "own advantages": ONE | RETRIES | {"own_advantages": True},
    "own advantages in rounds": FOUR | {"max_rounds": 2, "own_advantages": True},
    "failure in own advantages": ONE | RETRIES | {"own_advantages": "failing"},
    "failure in a transform": ONE | RETRIES | {"failing_transform": 1},
    "failure, a stream without a seed": ONE | RETRIES | {"stream_seed": None},
    "environment": FOUR | {"environment": True, "max_rounds": 2},
    "after failures": FOUR | {"max_steps": 2},
}
# One of every kind.
QUICK = (
    "own advantages",
    "own advantages in rounds",
    "failure in own advantages",
    "straddling",
    "rounds that do not divide",
    "est-value",
    "batch",
    "retries",
    "retries of a stream",
    "large rows, tracked",
)
QUICK += (
    "failure, a stream without a seed",
    "skipped rows",
    "evaluation first",
    "failure",
    "failure in a transform",
    "after failures",
)


def named(*names):
    """A test's parameter `name`; runs that are not in `QUICK` are slow."""
    marked = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


# With sharded models: the default mode, budgets from a value head that reads hidden states of the sharded model, and a
# failure, which must be the last run.
SHARDED_RUNS = [
    {"rows": 16, "scripted_generation": False, "max_steps": 2},
    RUNS["est-value"] | {"rows": 16, "scripted_generation": False, "max_steps": 2},
    {"rows": 16, "failing_rank": 1},
]


def options_of(processes, rows, **options):
    return options | {"per_device_train_batch_size": rows // processes}


def launch(processes, runs, output_dir, launcher=("--multi_gpu", "--mixed_precision=no"), environment=ON_CPU):
    """`tests.trainer.worker` on `processes` processes; what each of them wrote."""
    # A process that was killed while it compiled leaves a lock in the user's folder,
    # for which DeepSpeed waits for ever.
    environment = environment | {"TORCH_EXTENSIONS_DIR": str(output_dir.parent / "torch_extensions")}
    options = json.dumps([options_of(processes, **run) for run in runs])
    how = {"processes": processes, "launcher": launcher, "environment": environment}
    return read_rank_outputs(output_dir, processes, run_module("tests.trainer.worker", output_dir, options, **how))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def together(request, tmp_path_factory):
    """By name of the run, the output of each of several processes, for the runs of the selected tests."""
    calls = [item.callspec.params for item in request.session.items if "together" in getattr(item, "fixturenames", ())]
    used = {call["name"] for call in calls if call["together"] == request.param}
    runs = {name: options for name, options in RUNS.items() if name in used}
    ranks = launch(request.param, runs.values(), tmp_path_factory.mktemp(f"together{request.param}"))
    return dict(zip(runs, zip(*ranks, strict=True), strict=True))


@cache
def alone(name):
    """The output of the same run on this process."""
    options = {key: value for key, value in RUNS[name].items() if key != "slow_rank"}
    return json.loads(json.dumps(run("outputs/unused", options_of(1, **options))))


@named(*(name for name in RUNS if "failure" not in name and name != "environment"))
def test_same_pools_groups_and_advantages_as_on_one_process(name, together):
    ranks, expected = together[name], alone(name)
    assert [rank["error"] for rank in ranks] == [None] * len(ranks)
    assert all(rank["pools"] == expected["pools"] for rank in ranks)
    assert [row for rank in ranks for row in rank["batches"][0]] == expected["batches"][0]
    assert all(rank["wrapper"] == "DistributedDataParallel" for rank in ranks), "Gradients are not exchanged."
    assert all(rank["moved"] == expected["moved"] and all(rank["moved"]) for rank in ranks)
    for key, value in expected["logs"][0].items():
        if "time" not in key and not key.startswith(("ada/tokens", "num_tokens", "train_")):  # padded rows cost tokens
            assert ranks[0]["logs"][0][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@named("large rows", "large rows, tracked")
def test_rows_and_completions_are_sent_only_where_they_are_needed(name, together):
    """
    Each dataset row and each completion has 200 kB. Only identities, rewards and counts are sent to all processes.
    """
    traffic = [rank["traffic"][0] for rank in together[name]]
    for rank in traffic:
        assert rank["gathered"] < 20_000
        assert set(rank["held"]) == set(rank["own"]) | set(rank["generated"])
        assert rank["blobs"] == [200_000] * (12 // len(traffic)), "Extra columns of a completion are sent with it."
    assert sorted(prompt for rank in traffic for prompt in rank["own"]) == [0, 1, 2]
    assert any(len(rank["held"]) < 3 for rank in traffic) and any(rank["held"] != rank["own"] for rank in traffic)


@named("straddling")
def test_a_repeated_prompt_counts_once_in_pass_at_k(name, together):
    """Processes evaluate 8 or 12 rows, the last of which repeat prompts; 6 are those of the dataset."""
    for rank in together[name]:
        assert rank["evaluated"]["eval_pass@2"] == pytest.approx(1 / 3)
        assert rank["streamed"]["eval_pass@2"] == pytest.approx(1 / 3)


@named("failure", "failure in uniform mode", "failure in a transform", "failure in own advantages")
def test_training_state_that_raises_on_one_process_stops_all(name, together):
    first, second, *others = together[name]
    assert second["error"] == ["ZeroDivisionError", "my bug"]
    for rank in (first, *others):
        kind, message = rank["error"]
        assert kind == "RuntimeError" and "Process 1 failed" in message and "ZeroDivisionError: my bug" in message
    assert max(rank["seconds"] for rank in together[name]) < 60


@named("failure, a stream without a seed")
def test_processes_that_read_different_rows_do_not_retry_them(name, together):
    for rank in together[name]:
        kind, message = rank["error"]
        assert kind == "ValueError" and "processes read different rows" in message and ".shuffle(seed=…)" in message
        assert len(rank["batches"]) == 1, "Before the first retry."


@named("own advantages", "own advantages in rounds")
def test_an_advantage_function_has_the_columns_and_lengths_of_all_rollouts(name, together):
    for rank in together[name]:
        for prompt, text, advantage in rank["batches"][0]:
            assert advantage == int(prompt.partition("+")[0]) + len(text) / 8


@named("environment")
def test_environments_with_more_turns_on_one_process(name, together):
    """12 rows of the first round, 8 per prompt, are spread over the processes; only the main process's use a tool."""
    ranks = together[name]
    calls = 24 // len(ranks) // 2 / 24  # every other row of the main process's share
    for rank in ranks:
        assert rank["logs"]["tools/call_frequency"] == pytest.approx(calls)
        assert rank["logs"]["reward"] == pytest.approx(calls), "The rollouts that used the tool were right."
    positive = [positive for rank in ranks for positive in rank["positive"]]
    assert 0 < sum(positive) < len(positive) == 12
    for kind, target, given, prompt, completion in (row for rank in ranks for row in rank["played"]):
        assert kind == "Counting" and f"Please give {target}+0" in prompt, (
            "Also where the completion was generated on another process."
        )
        assert (f"It is {given}." in completion) == (given is not None)


@named("after failures")
def test_processes_can_train_again_after_a_failure(name, together):
    assert all(rank["error"] is None and len(rank["batches"]) == 2 for rank in together[name])


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return launch(2, SHARDED_RUNS, tmp_path_factory.mktemp("replicated"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "wrapper"),
    [("fsdp2", "FSDPQwen2ForCausalLM"), ("zero2", "DeepSpeedEngine"), ("zero3", "DeepSpeedEngine")],
)
def test_sharded_models_train_as_replicated_ones(config, wrapper, replicated, tmp_path):
    """FSDP2, ZeRO-2 and ZeRO-3 on two processes generate, score and update as plain data parallel does."""
    if wrapper == "DeepSpeedEngine":
        pytest.importorskip("deepspeed")
    sharded = {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launcher = ("--mixed_precision=no", f"--config_file={CONFIGS / config}.yaml")
    ranks = launch(2, SHARDED_RUNS, tmp_path, launcher, sharded)
    for ours, theirs in zip(ranks, replicated, strict=True):
        assert (ours[0]["wrapper"], theirs[0]["wrapper"]) == (wrapper, "DistributedDataParallel")
        for found, expected in zip(ours[:2], theirs[:2], strict=True):
            assert found["error"] is None
            assert len(found["batches"]) == 2 and found["pools"] == expected["pools"]
            for batch, same in zip(found["batches"], expected["batches"], strict=True):
                assert [row[:2] for row in batch] == [row[:2] for row in same]
                assert [row[2] for row in batch] == pytest.approx([row[2] for row in same], rel=1e-4, abs=1e-6)
            for logs, same in zip(found["logs"], expected["logs"], strict=True):
                assert logs["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
        assert ours[0]["batches"] == theirs[0]["batches"], "Advantages of a pool do not depend on the model."
        for logs, same in zip(ours[1]["logs"], theirs[1]["logs"], strict=True):
            assert logs["ada/estimator/brier"] == pytest.approx(same["ada/estimator/brier"], rel=1e-4)
        assert any(row[2] for batch in ours[1]["batches"] for row in batch)
        assert "ZeroDivisionError: my bug" in ": ".join(ours[2]["error"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_configs_are_valid(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}[path.stem]
    assert str(config.distributed_type).split(".")[-1] == kind
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config)), "A field that accelerate does not know."
