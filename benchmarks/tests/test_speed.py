"""Benchmarks of speed: they run and print their tables. Their numbers are not tested."""

import pytest

from benchmarks.speed import skip
from recipes.arithmetic.task import build_model, build_tokenizer, save


@pytest.mark.slow
def test_skipping_is_compared_with_keeping_for_every_method(tmp_path, capsys):
    tokenizer = build_tokenizer()
    save(build_model(tokenizer), tokenizer, tmp_path / "base")
    skip.compare(skip.SUMS, tmp_path, "sums", prompts_per_step=4, steps=2, repeats=1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0].removeprefix("| ") for row in rows] == list(skip.METHODS)
    assert {row[1] for row in rows} == {"100%"}  # the model is untrained
    assert all(float(seconds) > 0 for row in rows for seconds in row[2:4])
