"""The file of pass rates: exact round trip, readable by datasets, atomic, and damage is found."""

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from ada_trl.pass_rates.prompt_id import prompt_key
from ada_trl.pass_rates.store import load_pass_rates, save_pass_rates
from ada_trl.pass_rates.success_counts import EMAPassRate
from ada_trl.utils.files import atomic_write


PROMPTS = [f"{i}+{i}=" for i in range(50)]
KEYS = [prompt_key(prompt) for prompt in PROMPTS]


def observed(steps, estimator=None):
    estimator = estimator or EMAPassRate()
    for step in steps:
        num_rollouts = [1 + (7 * i + step) % 32 for i in range(50)]
        positives = [n * i // 60 for i, n in enumerate(num_rollouts)]
        estimator.observe(KEYS, positives, num_rollouts, step=step)
    return estimator


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pass_rates.parquet"


@pytest.mark.parametrize("steps", [0, 4])
def test_round_trip_is_exact_and_training_continues(steps, path):
    estimator, resumed = observed(range(steps)), EMAPassRate()
    save_pass_rates(path, estimator)
    state = load_pass_rates(path)
    assert state == estimator.state_dict()  # float equality, bit for bit
    assert list(state["counts"]) == list(estimator.counts)
    assert list(path.parent.iterdir()) == [path]
    resumed.load_state_dict(state)
    whole = observed(range(8))
    assert observed(range(steps, 8), resumed).state_dict() == whole.state_dict()
    assert resumed.predict([*KEYS, "new"]) == whole.predict([*KEYS, "new"])


def test_datasets_reads_the_file(path):
    estimator = observed(range(3))
    save_pass_rates(path, estimator)
    table = load_dataset("parquet", data_files=str(path), split="train", cache_dir=path.parent)
    assert table.column_names[:5] == ["prompt_id", "rollouts", "positives", "last_step", "estimate"]
    assert table["prompt_id"][:] == KEYS
    assert table["estimate"][:] == estimator.predict(KEYS)
    assert table["rollouts"][:] == [estimator.counts[key].num_rollouts for key in KEYS]
    assert set(table["last_step"]) == {2}


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_rejected(path, share):
    save_pass_rates(path, observed(range(3)))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"{path} is not a usable file .* delete it to start from the prior"):
        load_pass_rates(path)


def test_no_flipped_bit_changes_a_count(path):
    """Every 29th byte: rejected, or one of the bytes (of the column statistics, say) that are not read."""
    save_pass_rates(path, observed(range(3)))
    content, intact = path.read_bytes(), load_pass_rates(path)
    rejected = 0
    for i in range(0, len(content), 29):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        try:
            assert load_pass_rates(path) == intact
        except ValueError as error:
            assert f"{path} is not a usable file" in str(error)
            rejected += 1
    assert rejected > len(content) / 29 / 2


def test_other_columns_are_rejected(path):
    save_pass_rates(path, observed(range(3)))
    pq.write_table(pq.read_table(path).drop_columns(["discounted_rollouts"]), path)
    with pytest.raises(ValueError, match=rf"{path} .*its columns are .* expected .*discounted_rollouts \(double\)"):
        load_pass_rates(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [(None, "'ada_trl' is missing or cannot be read")]
    + [
        ({b"ada_trl": payload}, "'ada_trl' is missing or cannot be read")
        for payload in (b'{"format": 2, "pri', b'"format"', b"\xff")
    ]
    + [({b"ada_trl": b'{"format": 1, "prior": null}'}, "its format is 1; this version of ada_trl reads")],
)
def test_other_metadata_and_versions_are_rejected(path, metadata, message):
    save_pass_rates(path, observed(range(3)))
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    with pytest.raises(ValueError, match=f"{path} .*{message}"):
        load_pass_rates(path)


def test_a_failed_write_leaves_the_old_file(path):
    path.write_text("old")
    with pytest.raises(RuntimeError, match="disk full"), atomic_write(path) as temporary:
        temporary.write_text("half of the n")
        assert path.read_text() == "old"
        raise RuntimeError("disk full")
    assert path.read_text() == "old"
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
