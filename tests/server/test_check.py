"""`ada-trl check` against a scripted server: flags, weights, and nothing left on it."""

import re

import pytest
from transformers import AutoTokenizer

from ada_trl.commands import start

from ..helpers import save_tiny_model, tiny_model, write_jsonl
from .fake import FakeServer
from .helpers import fail, no_adapters


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    save_tiny_model(folder / "model")
    write_jsonl(folder / "sums.jsonl", [{"prompt": f"{a}+1="} for a in range(8)])
    return folder


def serving(task, **options):
    """A server of the same model as the run, unless `model` is another one."""
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    return FakeServer(**{"model": tiny_model(), "tokenizer": tokenizer} | options)


def arguments(task, server, *more):
    options = {"model_name_or_path": task / "model", "dataset_name": task / "sums.jsonl"}
    options |= {"reward_funcs": "tests.server.fake.reward", "output_dir": task / "run", "learning_rate": 0.01}
    options |= {"per_device_train_batch_size": 16, "max_completion_length": 4, "use_cpu": True, "bf16": "false"}
    options |= {"gradient_checkpointing": "false", "dataloader_pin_memory": "false", "use_vllm": True}
    options |= {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_request_timeout": 3}
    options |= {"vllm_server_timeout": 0}
    return [f"--{name}={value}" for name, value in options.items()] + list(more)


LORA = ["--vllm_weight_sync=lora", "--use_peft", "--lora_target_modules=all-linear"]


@pytest.mark.parametrize("sync", [["--vllm_weight_sync=disk"], LORA], ids=["disk", "lora"])
@pytest.mark.parametrize("mode", ["seq-balance", "uniform", "uniform --max_staleness=1"])
def test_weights_are_verified_before_and_after_the_step(mode, sync, task, capsys):
    before, received = sorted(task.rglob("*")), []
    with serving(task) as server:
        for name in ("load", "load_adapter"):
            receive = getattr(server, name)
            setattr(server, name, lambda *args, receive=receive: (received.append(args), receive(*args)))
        start("check", arguments(task, server, *sync, *f"--adaptive_sampling={mode}".split()))
        assert len(server.completions) and server.weight_checks >= 2
        assert len(received) == 2  # the first weights, and those of the step
        assert set(server.served) == {"base"}  # no adapter stays
    printed = capsys.readouterr().out
    lines = {line.split(" | ")[0].strip("| "): line for line in printed.splitlines()}
    for name in ("vLLM server", "weights after the step"):
        assert f"sent by '{sync[0].split('=')[1]}'" in lines[name] and "differ by 0.0000" in lines[name]
    assert "0.50 of 64 rollouts" in lines["pass rate"]
    assert float(re.search(r"gradient norm ([\d.e+-]+)", lines["optimizer step"])[1]) > 1e-3
    assert sorted(task.rglob("*")) == before


def test_weights_that_do_not_arrive_fail_the_check(task, capsys):
    """The server confirms everything and keeps its first weights."""
    with serving(task, model=tiny_model(seed=1)) as server:
        server.load = lambda path: None
        before = sorted(task.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            start("check", arguments(task, server, "--vllm_weight_sync=disk"))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert "it does not have this step's weights" in printed.err
    assert "model and data" in printed.out and "optimizer step" not in printed.out
    assert sorted(task.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "sync", "message"),
    [
        ({"control": no_adapters}, LORA, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"behave": fail}, ["--vllm_weight_sync=disk"], "returned status 500"),
    ],
    ids=["missing flag", "failing server"],
)
def test_errors_of_the_server_fail_the_check(options, sync, message, task, capsys):
    with serving(task, **options) as server, pytest.raises(SystemExit) as ended:
        start("check", arguments(task, server, *sync))
    assert ended.value.code == 2 and message in capsys.readouterr().err
