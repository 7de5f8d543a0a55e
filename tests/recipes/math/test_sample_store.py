"""What is finished is on disk once: after a kill, a torn write, other settings, a second writer."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from ada_trl.measurement.store import SampleStore


SETTINGS = {"model": "m", "num_samples": 2, "weights": None}


def filled(path, number=3):
    with SampleStore(path, SETTINGS).open() as store:
        for i in range(number):
            store.append(i, completions=[f"text {i}\n\u2028é\x85", ""])
    return path.read_bytes()


def test_rows_come_back_as_written(tmp_path):
    filled(tmp_path / "a" / "samples.jsonl")
    with SampleStore(tmp_path / "a" / "samples.jsonl", SETTINGS).open() as store:
        assert store.done == {0, 1, 2}
        store.append(7, completions=[])
        rows = list(store.rows())
    assert [row["index"] for row in rows] == [0, 1, 2, 7]
    assert rows[1]["completions"] == ["text 1\n\u2028é\x85", ""]


def test_every_possible_torn_write(tmp_path, caplog):
    """Cut the file at every byte after the header: whole lines stay, a torn one goes, and the file is sound again."""
    path = tmp_path / "samples.jsonl"
    content = filled(path)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(ends[0], len(content) + 1):
        path.write_bytes(content[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING), SampleStore(path, SETTINGS).open() as store:
            whole = sum(end <= cut for end in ends) - 1
            assert store.done == set(range(whole))
            assert bool(caplog.records) == (cut not in ends)
            for i in range(whole, 3):
                store.append(i, completions=[f"text {i}\n\u2028é\x85", ""])
        assert path.read_bytes() == content


def test_an_index_is_stored_once(tmp_path):
    with SampleStore(tmp_path / "s.jsonl", SETTINGS).open() as store:
        store.append(1)
        with pytest.raises(ValueError, match="Prompt 1 is already in"):
            store.append(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 4}, "with num_samples 2, but this run has 4"),
        ({"model": "other"}, "with model 'm', but this run has 'other'"),
        ({"weights": "abc"}, "with weights None, but this run has 'abc'"),
    ],
)
def test_other_settings_are_refused_with_both_values(settings, message, tmp_path):
    content = filled(tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match=message + ".*delete the file"):
        with SampleStore(tmp_path / "s.jsonl", SETTINGS | settings).open():
            pass
    assert (tmp_path / "s.jsonl").read_bytes() == content


def test_what_fails_before_the_first_row_leaves_nothing(tmp_path):
    path = tmp_path / "s.jsonl"
    with pytest.raises(ZeroDivisionError):
        with SampleStore(path, SETTINGS).open():
            1 / 0  # noqa: B018
    assert not path.exists()
    with SampleStore(path, SETTINGS).open():
        pass
    assert list(SampleStore(path, SETTINGS).rows()) == []


@pytest.mark.parametrize("torn", [b"", b'{"index": 0, "compl'])
def test_a_header_alone_does_not_refuse_other_settings(torn, tmp_path):
    path = tmp_path / "s.jsonl"
    header = filled(path).splitlines(keepends=True)[0]
    path.write_bytes(header + torn)
    with SampleStore(path, SETTINGS | {"num_samples": 4}).open() as store:
        store.append(0)
    assert json.loads(path.read_text().splitlines()[0])["settings"]["num_samples"] == 4
    with pytest.raises(ValueError, match="with num_samples 4, but this run has 2"):
        with SampleStore(path, SETTINGS).open():
            pass


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json\n", "line 3 is not JSON"),
        (b"\xff\n", "line 3 is not JSON"),
        (b"[1]\n", "line 3 is not an object"),
        (b'{"index": 0}\n', "line 3 has index 0, which is missing or repeated"),
        (b'{"completions": []}\n', "line 3 has index None"),
    ],
)
def test_corruption_is_named(line, message, tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(filled(path, number=1) + line)
    with pytest.raises(ValueError, match=message):
        with SampleStore(path, SETTINGS).open():
            pass


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b'{"format": 2, "settings": {}}\n'])
def test_a_file_without_a_header_is_refused(content, tmp_path):
    (tmp_path / "s.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="corrupt: it.* (header|format)"):
        with SampleStore(tmp_path / "s.jsonl", SETTINGS).open():
            pass


def test_a_second_writer_is_refused(tmp_path):
    with SampleStore(tmp_path / "s.jsonl", SETTINGS).open():
        with pytest.raises(RuntimeError, match="Another process is writing"):
            with SampleStore(tmp_path / "s.jsonl", SETTINGS).open():
                pass


WRITER = """
import sys
from ada_trl.measurement.store import SampleStore
with SampleStore(sys.argv[1], {"model": "m"}).open() as store:
    for i in range(100_000):
        if i not in store.done:
            store.append(i, completions=["x" * (i * 37 % 5000)])
            print(i, flush=True)
"""


def test_killed_processes_lose_nothing(tmp_path):
    """SIGKILL at random moments, five times: every row that was reported as stored is there, once and whole."""
    path, reported = tmp_path / "s.jsonl", set()
    for round_ in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        time.sleep(0.01 * round_)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        written = [int(i) for i in (first + rest).split("\n") if i][
            : -1 if not (first + rest).endswith("\n") else None
        ]
        assert not reported & set(written)
        reported |= set(written)
    with SampleStore(path, {"model": "m"}).open() as store:
        rows = list(store.rows())
    assert reported and reported <= store.done
    assert len(store.done - reported) <= 5  # stored, and killed before it could be reported
    assert len(rows) == len(store.done)
    assert all(row["completions"] == ["x" * (row["index"] * 37 % 5000)] for row in rows)
    assert json.loads(path.read_text().splitlines()[0])["settings"] == {"model": "m"}
