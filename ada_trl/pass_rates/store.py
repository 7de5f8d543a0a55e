"""Per-prompt pass rates on disk: the outcomes of every prompt, and with them the state of the estimator."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..utils.files import atomic_write
from .success_counts import EMAPassRate


PASS_RATES_FILE = "ada_pass_rates.parquet"

_FORMAT = 4
_METADATA_KEY = b"ada_trl"
_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("rollouts", pa.int64(), nullable=False),
        pa.field("positives", pa.int64(), nullable=False),
        pa.field("last_step", pa.int64(), nullable=False),
        pa.field("estimate", pa.float64(), nullable=False),
        pa.field("discounted_rollouts", pa.float64(), nullable=False),
        pa.field("discounted_positives", pa.float64(), nullable=False),
    ]
)
_COUNT_COLUMNS = {  # column of the file by attribute of PromptCounts
    "num_rollouts": "rollouts",
    "positives": "positives",
    "last_step": "last_step",
    "discounted_rollouts": "discounted_rollouts",
    "discounted_positives": "discounted_positives",
}


def save_pass_rates(path: str | Path, estimator: EMAPassRate) -> None:
    """
    Write the pass rates of a run, atomically: one row per prompt that was ever sampled.

    | column | |
    |---|---|
    | `prompt_id` | identity ([`~pass_rates.prompt_id.prompt_key`]): a hash of the prompt, after the `id` of the dataset row if it has one |
    | `rollouts`, `positives` | scored and positive rollouts over the whole run |
    | `last_step` | last step in which the prompt was sampled |
    | `estimate` | p̂ at the time of writing |
    | `discounted_rollouts`, `discounted_positives` | n_x and k_x of [`~pass_rates.success_counts.EMAPassRate`], its exact state |

    It can be read with `datasets.load_dataset("parquet", data_files=path)`.

    Args:
        path (`str` or `Path`):
            Path of the file; `PASS_RATES_FILE` in a checkpoint.
        estimator ([`~pass_rates.success_counts.EMAPassRate`]):
            Estimator to write.
    """
    counts = estimator.state_dict()["counts"]
    columns = {
        "prompt_id": list(counts),
        "estimate": estimator.predict(list(counts)),
        **{column: [of_prompt[name] for of_prompt in counts.values()] for name, column in _COUNT_COLUMNS.items()},
    }
    metadata = {_METADATA_KEY: json.dumps({"format": _FORMAT}).encode()}
    with atomic_write(path) as temporary:
        pq.write_table(pa.table(columns, schema=_SCHEMA.with_metadata(metadata)), temporary, write_page_checksum=True)


def load_pass_rates(path: str | Path) -> dict[str, Any]:
    """
    Read a file of [`save_pass_rates`]. Nothing in the file is executed or unpickled.

    Args:
        path (`str` or `Path`):
            Path of the file.

    Returns:
        `dict[str, Any]`: the state for [`~pass_rates.success_counts.EMAPassRate.load_state_dict`].

    Raises:
        `FileNotFoundError`: if there is no such file; a run without one starts from the prior.
        `ValueError`: if the file is truncated, corrupt or of another kind; the message contains its path and the fix.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True, partitioning=None)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(path, f"it cannot be read as parquet ({error})") from error
    types = {field.name: field.type for field in table.schema}
    if any(types.get(field.name) != field.type for field in _SCHEMA):
        raise _corrupt(path, f"its columns are {_describe(table.schema)}; expected {_describe(_SCHEMA)}")
    try:
        file_format = json.loads((table.schema.metadata or {})[_METADATA_KEY])["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"its metadata {_METADATA_KEY.decode()!r} is missing or cannot be read") from error
    if file_format != _FORMAT:
        raise _corrupt(path, f"its format is {file_format!r}; this version of ada_trl reads {_FORMAT}")
    rows = table.to_pylist()
    return {
        "counts": {row["prompt_id"]: {name: row[column] for name, column in _COUNT_COLUMNS.items()} for row in rows}
    }


def _corrupt(path: str | Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a usable file of pass rates: {reason}. Restore it from another checkpoint, or delete it to "
        "start from the prior."
    )


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
