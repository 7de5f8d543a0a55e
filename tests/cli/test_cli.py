"""Ctrl-C during `ada-trl data` and `ada-trl evaluate`."""

import json
import os
import re
import signal
import time

import pytest

from ..commands.test_commands import command
from ..helpers import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and sums."""
    directory = tmp_path_factory.mktemp("cli")
    tiny_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("name", ["data", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_ctrl_c_counts_what_is_done(name, folder, tmp_path):
    """SIGINT while it samples: how far it is, code 130, no traceback, and the samples are there."""
    model, data = str(folder / "model"), str(folder / "sums.jsonl")
    words = {"data": ["--model_name_or_path", model, "--dataset_name", data], "evaluate": ["--models", model]}[name]
    words += ["--datasets", data] * (name == "evaluate")
    words += ["--backend=transformers", "--prompt_format=plain", "--num_samples=500", "--max_new_tokens=30"]
    process = command(name, *words, "--output_dir", str(tmp_path), start_new_session=True)
    while not (samples := [path for path in tmp_path.rglob("*.jsonl") if path.read_text().count("\n") > 1]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in error
    done, total = re.search(
        r"(\d+) of (\d+) problems of \S+ sampled and on disk; the same command continues", error
    ).groups()
    assert total == "8" and int(done) == samples[0].read_text().count("\n") - 1
