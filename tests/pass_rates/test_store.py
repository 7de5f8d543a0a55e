"""The file of pass rates: exact round trip, readable by datasets, atomic, and a flipped bit is found."""

import pyarrow as pa
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
    resumed.counts = load_pass_rates(path)
    assert resumed.counts == estimator.counts  # float equality, bit for bit
    assert list(resumed.counts) == list(estimator.counts)
    assert list(path.parent.iterdir()) == [path]
    whole = observed(range(8))
    assert observed(range(steps, 8), resumed).counts == whole.counts
    assert resumed.predict([*KEYS, "new"]) == whole.predict([*KEYS, "new"])


def test_datasets_reads_the_file(path):
    estimator = observed(range(3))
    save_pass_rates(path, estimator)
    table = load_dataset("parquet", data_files=str(path), split="train", cache_dir=path.parent)
    assert table.column_names[:5] == ["prompt_id", "estimate", "rollouts", "positives", "last_step"]
    assert table["prompt_id"][:] == KEYS
    assert table["estimate"][:] == estimator.predict(KEYS)
    assert table["rollouts"][:] == [estimator.counts[key].rollouts for key in KEYS]
    assert set(table["last_step"]) == {2}


def test_no_flipped_bit_changes_a_count(path):
    """Every 29th byte: an error, or one of the bytes (of the column statistics, say) that are not read."""
    save_pass_rates(path, observed(range(3)))
    content, intact = path.read_bytes(), load_pass_rates(path)
    errors = 0
    for i in range(0, len(content), 29):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        try:
            assert load_pass_rates(path) == intact
        except (pa.ArrowException, OSError, ValueError):
            errors += 1
    assert errors > len(content) / 29 / 2


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
