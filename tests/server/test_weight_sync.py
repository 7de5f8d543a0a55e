"""Weight synchronization with a scripted server: flags, versions, adapters, and nothing left behind."""

import resource
import shutil
import signal

import pytest
from filelock import FileLock
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors import SafetensorError

from ada_trl.vllm.weight_sync import IN_USE

from ..helpers import prompt_dataset, tiny_model
from .fake import FakeServer
from .helpers import LORA, build, error_response, fails, no_adapters, stall, started, train, wait_until


def test_versions_on_disk_follow_each_other_and_are_removed(tmp_path):
    seen = []

    async def control(request, payload):
        if request.path == "/collective_rpc":
            seen.append(sorted(p.name for p in (tmp_path / "vllm_weight_sync").iterdir()))
            assert payload["kwargs"]["weights_path"].endswith(seen[-1][-1])

    trainer, server = train(tmp_path, FakeServer(control=control), max_steps=3)
    assert [len(names) for names in seen] == [1, 2, 2]
    assert len({name for names in seen for name in names}) == 3


def test_adapters_are_loaded_used_and_unloaded(tmp_path, no_speculation):
    trainer, server = train(tmp_path, FakeServer(), max_steps=2, **LORA)
    actions = [(path.split("/")[-1].split("_")[0], payload["lora_name"]) for path, payload in server.controls]
    first, second = actions[0][1], actions[1][1]
    assert actions == [("load", first), ("load", second), ("unload", first), ("unload", second)]
    assert [call.model for call in server.completions] == [first] * 4 + [second] * 4


def test_an_adapter_of_any_name_is_sent(tmp_path, no_speculation):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="policy")
    trainer, server = train(tmp_path, FakeServer(), model=model, peft_config=False, max_steps=2, **LORA)
    assert len(server.completions) == 8 and trainer.vllm_generation.weight_check.difference < 1e-4


def test_runtime_lora_loading_must_be_allowed(tmp_path):
    with FakeServer(control=no_adapters) as server, fails("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        build(tmp_path, server, **LORA).train()


def test_lora_requires_an_adapter(tmp_path):
    with FakeServer() as server, pytest.raises(ValueError, match="the model has none. Pass a peft_config"):
        build(tmp_path, server, peft_config=False, **LORA)


def lora(**options):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)


def two_active_adapters():
    model = get_peft_model(tiny_model(), lora())
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["second", "default"])
    return model


DISK = r", or vllm_weight_sync='disk', which sends merged weights\.$"
UNSUPPORTED = {
    "modules_to_save": (lora(modules_to_save=["embed_tokens"]), DISK),
    "trainable_token_indices": (lora(trainable_token_indices=[1, 2]), r"without it\.$"),
    "bias='lora_only'": (lora(bias="lora_only"), DISK),
    "use_dora=True": (lora(use_dora=True), DISK),
    "init_lora_weights='pissa'": (lora(init_lora_weights="pissa"), DISK),
    "peft_type='IA3'": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), DISK),
    "peft_type='PROMPT_TUNING'": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), r"without it\.$"),
    "several active adapters": (None, DISK),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_adapter_that_a_server_cannot_load_is_rejected_at_construction(name, tmp_path):
    config, fix = UNSUPPORTED[name]
    model = {} if config else {"model": two_active_adapters()}
    with FakeServer() as server, pytest.raises(ValueError, match=f"'lora' does not support {name}.*{fix}"):
        build(tmp_path, server, peft_config=config or False, **model, **LORA)


def test_weights_that_cannot_be_written_stop_the_run(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeServer() as server:
        trainer = build(tmp_path, server)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises((OSError, SafetensorError), match="File too large"):
                trainer.train()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not server.completions


# Leftovers (see `nothing_left`)


def test_evaluation_without_training_leaves_nothing(tmp_path):
    with FakeServer() as server:
        build(tmp_path, server, **LORA).evaluate(prompt_dataset(1))
        assert len(server.completions) == 4 and list(server.served) == ["base"]


def test_unloading_an_adapter_is_retried_and_does_not_stop_the_run(tmp_path):
    failed = []

    async def control(request, payload):
        if "unload" in request.path and len(failed) < 2:
            failed.append(payload["lora_name"])
            return error_response("not now")

    with FakeServer(control=control) as server:
        build(tmp_path, server, max_steps=4, **LORA).train()
        assert list(server.served) == ["base"]
    assert len(failed) == 2


def test_an_adapter_that_stays_on_the_server_is_named_and_removed_by_the_next_run(tmp_path, caplog):
    async def never(request, payload):
        return error_response("not now") if "unload" in request.path else None

    with FakeServer(control=never) as server:
        build(tmp_path, server, **LORA).train()
        (left,) = set(server.served) - {"base"}
        assert f"The adapter {left} is still on the vLLM server" in caplog.text
        assert [path.name for path in (tmp_path / "vllm_weight_sync").iterdir()] == [left]
        server.control = None
        build(tmp_path, server, **LORA).train()
        assert list(server.served) == ["base"]


def test_an_adapter_whose_load_was_reported_as_failed_is_unloaded(tmp_path):
    async def control(request, payload):
        if request.path == "/v1/load_lora_adapter":
            await server.obey(request.path, payload)
            return error_response("lost")

    with FakeServer(control=control) as server:
        trainer = build(tmp_path, server, **LORA)
        with fails("lost"):
            trainer.train()
        assert list(server.served) == ["base"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_nothing(tmp_path):
    with FakeServer(stall) as server:
        options = {"url": server.url, "vllm_request_timeout": 300.0, "max_rounds": 3} | LORA
        with started(tmp_path / "run", **options) as process:
            wait_until(lambda: server.completions, process)
            assert len(server.served) == 2
            process.send_signal(signal.SIGINT)
            # Python returns 1 instead of the signal if code is compiled while it exits, as torch and tabulate do.
            assert process.wait(60) in (-signal.SIGINT, 1)
        assert list(server.served) == ["base"]
    assert not list((tmp_path / "run").rglob("vllm_weight_sync"))


def test_leftovers_of_killed_runs_are_removed_and_nothing_of_running_ones(tmp_path):
    directory, locks = tmp_path / "vllm_weight_sync", {}
    for name in ("ada-00000000-3", "ada-11111111-7", "notes"):
        (directory / name).mkdir(parents=True)
        (directory / name / "adapter_model.safetensors").write_bytes(b"weights")
        locks[name] = FileLock(directory / name / IN_USE)
        locks[name].acquire()
    locks["ada-00000000-3"].release()  # as the death of its process does
    locks["notes"].release()
    with FakeServer() as server:
        server.served |= dict.fromkeys(("ada-00000000-3", "ada-11111111-7", "a user's"), server.served["base"])
        build(tmp_path, server, **LORA).vllm_generation.close()
        assert sorted(server.served) == ["a user's", "ada-11111111-7", "base"]
    assert sorted(path.name for path in directory.iterdir()) == ["ada-11111111-7", "notes"]
    locks["ada-11111111-7"].release()
    shutil.rmtree(directory)
