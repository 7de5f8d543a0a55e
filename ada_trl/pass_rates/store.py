"""Per-prompt pass rates on disk: the outcomes of every prompt, and with them the state of the estimator."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..utils.files import atomic_write
from .success_counts import EMAPassRate, PromptCounts


PASS_RATES_FILE = "ada_pass_rates.parquet"

_SCHEMA = pa.Table.from_pylist([{"prompt_id": "", "estimate": 0.0, **vars(PromptCounts())}]).schema


def save_pass_rates(path: str | Path, estimator: EMAPassRate) -> None:
    """
    Write the pass rates of a run, atomically: one row per prompt that was ever sampled, with its identity `prompt_id`
    ([`~pass_rates.prompt_id.prompt_key`]), its [`~pass_rates.success_counts.PromptCounts`], and the `estimate` p̂.

    It can be read with `datasets.load_dataset("parquet", data_files=path)`.
    """
    estimates = estimator.predict(list(estimator.counts))
    rows = [
        {"prompt_id": key, "estimate": estimate, **vars(counts)}
        for (key, counts), estimate in zip(estimator.counts.items(), estimates, strict=True)
    ]
    with atomic_write(path) as temporary:
        # With checksums, because a flipped bit of a count would otherwise not be noticed.
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), temporary, write_page_checksum=True)


def load_pass_rates(path: str | Path) -> dict[str, PromptCounts]:
    """
    Read the counts of a file of [`save_pass_rates`]. Nothing in the file is executed or unpickled.

    Raises:
        `FileNotFoundError`: if there is no such file; a run without one starts from the prior.
        `pyarrow.ArrowException`, `OSError` or `ValueError`: if the file is truncated or corrupt.
    """
    table = pq.read_table(path, page_checksum_verification=True, partitioning=None)
    # The checksums do not cover the names and types of the columns.
    rows = table.cast(_SCHEMA).drop_columns("estimate").to_pylist()
    return {row.pop("prompt_id"): PromptCounts(**row) for row in rows}
