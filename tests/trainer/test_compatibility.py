"""Other versions: of TRL, and of this package (options and checkpoints of removed features)."""

import json
import shutil

import pytest
import trl
from trl import GRPOTrainer

from ada_trl import AdaGRPOConfig
from ada_trl.trainer import trl_version
from ada_trl.trainer.checkpointing import reject_removed_modes

from ..helpers import build


@pytest.fixture
def fresh_check():
    trl_version.check_trl.cache_clear()
    yield
    trl_version.check_trl.cache_clear()


def test_a_newer_trl_with_the_same_signatures_trains_with_one_warning(fresh_check, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    for name in ("first", "second"):
        build(tmp_path / name).train()
    warnings = [record for record in caplog.records if "newer than the newest version" in record.getMessage()]
    assert len(warnings) == 1 and "1.99.0" in warnings[0].getMessage()


def test_a_changed_signature_is_named(fresh_check, monkeypatch, tmp_path):
    def _calculate_rewards(self, inputs, prompts, completions):
        raise AssertionError("not reached")

    monkeypatch.setattr(trl, "__version__", "1.99.0")
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", _calculate_rewards)
    with pytest.raises(RuntimeError, match=r"_calculate_rewards has the parameters .* in TRL 1.99.0, but .* 1.16"):
        build(tmp_path)


def test_a_missing_method_is_named(fresh_check, monkeypatch, tmp_path):
    monkeypatch.delattr(GRPOTrainer, "_tool_call_loop")
    with pytest.raises(RuntimeError, match="_tool_call_loop does not exist"):
        build(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        {"prompt_oversampling": 3},
        {"baseline": "posterior"},
        {"value_model": "a/model"},
        {"selection_correction": True},
        {"pass_rate_prior": [1.0, 16.0]},
        {"adaptive_sampling": "est", "pass_rate_estimator": "ema+value"},
    ],
)
def test_removed_options_are_explained(option, tmp_path):
    name = list(option)[-1]
    with pytest.raises(ValueError, match=rf"{name} \(.*\) was removed in ada_trl 0.2.*negative_results"):
        AdaGRPOConfig(str(tmp_path), **option)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a kept mode, with a record of pass rates."""
    directory = tmp_path_factory.mktemp("run")
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    build(directory, adaptive_sampling="est-ema", **options).train()
    return directory / "checkpoint-1"


@pytest.mark.parametrize(
    "removed", ["ada_reward_head.safetensors", "ada_value_model.safetensors", "brier", "reward_estimator"]
)
def test_checkpoints_of_removed_modes_are_rejected(removed, checkpoint, tmp_path):
    import pyarrow.parquet as pq

    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    reject_removed_modes(str(copy))  # that of a kept mode is accepted
    if removed.endswith("safetensors"):
        (copy / removed).touch()
    else:
        table = pq.read_table(copy / "ada_pass_rates.parquet")
        metadata = {b"ada_trl": json.dumps({"format": 3, "fitted": {removed: {}}}).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), copy / "ada_pass_rates.parquet")
    with pytest.raises(ValueError, match="was removed in ada_trl 0.2. Finish the run with ada_trl 0.1, or start"):
        build(tmp_path, adaptive_sampling="est-ema").train(resume_from_checkpoint=str(copy))


def test_pass_rates_of_the_earlier_format_are_read(checkpoint, tmp_path):
    """It had the text of every prompt, and a column that only a removed feature filled."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    table = pq.read_table(copy / "ada_pass_rates.parquet")
    old = table.append_column("prompt", pa.array(["1+2="] * len(table)))
    old = old.append_column("reward_history", pa.nulls(len(table), pa.list_(pa.float64())))
    metadata = {b"ada_trl": json.dumps({"format": 3, "prior": None, "fitted": {"joint": {}}}).encode()}
    pq.write_table(old.replace_schema_metadata(metadata), copy / "ada_pass_rates.parquet")
    trainer = build(tmp_path / "out", adaptive_sampling="est-ema", max_steps=2)
    trainer.train(resume_from_checkpoint=str(copy))
    assert trainer.state.global_step == 2
    assert set(table["prompt_id"].to_pylist()) <= trainer.pass_rates.counts.counts.keys()
