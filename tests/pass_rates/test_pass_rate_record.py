"""The difficulty record: exact round trip, readable by datasets, atomic, and loud when it is damaged."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from ada_trl.core import EMAPassRate, prompt_key
from ada_trl.pass_rates.store import load_pass_rates, save_pass_rates
from ada_trl.utils.files import atomic_write


PROMPTS = [f"{i}+{i}=" for i in range(50)]
KEYS = [prompt_key(prompt) for prompt in PROMPTS]
TEXTS = dict(zip(KEYS, PROMPTS, strict=True))


def visited(steps, estimator=None, prior="fixed"):
    estimator = estimator or EMAPassRate(prior=prior)
    for step in steps:
        draws = [1 + (7 * i + step) % 32 for i in range(50)]
        positives = [n * i // 60 for i, n in enumerate(draws)]
        estimator.observe(KEYS, positives, draws, step=step)
    return estimator


@pytest.fixture(params=["fixed", "empirical"])
def prior(request):
    return request.param


def test_round_trip_is_exact(tmp_path, prior):
    estimator = visited(range(5), prior=prior)
    save_pass_rates(tmp_path / "record.parquet", estimator, TEXTS)
    state, texts = load_pass_rates(tmp_path / "record.parquet")
    assert state == estimator.state_dict()  # float equality, bit for bit
    assert list(state["counts"]) == list(estimator.counts)
    assert texts == TEXTS
    assert [path.name for path in tmp_path.iterdir()] == ["record.parquet"]


def test_resumed_equals_uninterrupted(tmp_path, prior):
    save_pass_rates(tmp_path / "record.parquet", visited(range(4), prior=prior))
    resumed = EMAPassRate(prior=prior)
    resumed.load_state_dict(load_pass_rates(tmp_path / "record.parquet")[0])
    whole = visited(range(8), prior=prior)
    assert visited(range(4, 8), resumed).state_dict() == whole.state_dict()
    assert resumed.predict([*KEYS, "unseen"]) == whole.predict([*KEYS, "unseen"])


def test_datasets_reads_the_record(tmp_path):
    estimator = visited(range(3))
    save_pass_rates(tmp_path / "record.parquet", estimator, {KEYS[0]: PROMPTS[0]})
    record = load_dataset("parquet", data_files=str(tmp_path / "record.parquet"), split="train", cache_dir=tmp_path)
    assert record.column_names[:6] == ["prompt_id", "prompt", "draws", "positives", "last_step", "estimate"]
    assert record["prompt_id"][:] == KEYS
    assert record["prompt"][:2] == [PROMPTS[0], None]
    assert record["estimate"][:] == estimator.predict(KEYS)
    assert record["draws"][:] == [estimator.counts[key].num_rollouts for key in KEYS]
    assert set(record["last_step"]) == {2}
    assert load_pass_rates(tmp_path / "record.parquet")[1] == {KEYS[0]: PROMPTS[0]}


def test_an_empty_record(tmp_path, prior):
    save_pass_rates(tmp_path / "record.parquet", EMAPassRate(prior=prior))
    state, texts = load_pass_rates(tmp_path / "record.parquet")
    assert (state["counts"], texts) == ({}, {})
    EMAPassRate(prior=prior).load_state_dict(state)


def test_a_missing_file_is_told_apart_from_a_corrupt_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_pass_rates(tmp_path / "record.parquet")


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tmp_path / "record.parquet"
    save_pass_rates(path, visited(range(3)), TEXTS)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"{path} is not a usable record .* delete it to start from the prior"):
        load_pass_rates(path)


def test_no_flipped_bit_changes_a_count_or_a_text(tmp_path, prior):
    """Every 29th byte: refused, or one of the bytes (of the column statistics, say) that are not read."""
    path = tmp_path / "record.parquet"
    save_pass_rates(path, visited(range(3), prior=prior), TEXTS)
    content, (sound, texts) = path.read_bytes(), load_pass_rates(path)
    refused = 0
    for i in range(0, len(content), 29):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        try:
            state, found = load_pass_rates(path)
            assert (state["counts"], found) == (sound["counts"], texts)
        except ValueError as error:
            assert f"{path} is not a usable record" in str(error)
            refused += 1
    assert refused > len(content) / 29 / 2


def rewritten(path, change):
    """The record with `change` applied to its columns, a dict of lists."""
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    schema = pa.schema([field for field in table.schema if field.name in columns], metadata=table.schema.metadata)
    pq.write_table(pa.table(columns, schema=schema), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("discounted_draws"), r"its columns are .* expected .*discounted_draws \(double\)"),
        (lambda c: c["positives"].__setitem__(3, 10**6), "has 1000000 positives in"),
        (lambda c: c["discounted_positives"].__setitem__(3, math.nan), "has nan positives in"),
        (lambda c: c["discounted_draws"].__setitem__(3, math.inf), r"discounted_draws \(inf\)"),
        (lambda c: c["prompt_id"].__setitem__(3, c["prompt_id"][4]), "50 rows have only 49 different"),
    ],
)
def test_wrong_columns_and_values_are_refused(tmp_path, change, message):
    path = tmp_path / "record.parquet"
    save_pass_rates(path, visited(range(3)))
    rewritten(path, change)
    with pytest.raises(ValueError, match=f"{path} .*{message}"):
        load_pass_rates(path)


def test_a_file_of_something_else_or_of_another_version_is_refused(tmp_path):
    path = tmp_path / "record.parquet"
    save_pass_rates(path, visited(range(3)))
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(ValueError, match=f"{path} .*'ada_trl' is missing or cannot be read"):
        load_pass_rates(path)
    for payload in (b'{"format": 2, "pri', b'"format"', b'{"format": 2}', b"\xff"):
        pq.write_table(table.replace_schema_metadata({b"ada_trl": payload}), path)
        with pytest.raises(ValueError, match=f"{path} .*'ada_trl' is missing or cannot be read"):
            load_pass_rates(path)
    pq.write_table(table.replace_schema_metadata({b"ada_trl": b'{"format": 1, "prior": null}'}), path)
    with pytest.raises(ValueError, match=f"{path} .*its format is 1; this version of ada_trl reads 3"):
        load_pass_rates(path)


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "record.parquet"
    path.write_bytes(b"\x80\x04N.")  # a pickle
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load_pass_rates(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="disk full"), atomic_write(path) as temporary:
        temporary.write_text("half of the n")
        assert path.read_text() == "old"
        raise RuntimeError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
