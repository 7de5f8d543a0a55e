"""Per-prompt pass rates on disk: outcomes of every prompt, and the estimator's state."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.empirical_bayes import DECAYS
from ..core.pass_rate_ema import EMAPassRate, PromptCounts, check_counts
from ..utils.files import atomic_write


PASS_RATES_FILE = "ada_pass_rates.parquet"

_FORMAT = 3
_METADATA_KEY = b"ada_trl"
_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("rollouts", pa.int64(), nullable=False),
        pa.field("positives", pa.int64(), nullable=False),
        pa.field("last_step", pa.int64(), nullable=False),
        pa.field("estimate", pa.float64(), nullable=False),
        pa.field("discounted_rollouts", pa.float64(), nullable=False),
        pa.field("discounted_positives", pa.float64(), nullable=False),
        pa.field("reward_history", pa.list_(pa.float64())),
    ]
)
_COUNT_COLUMNS = {  # column of the file by attribute of PromptCounts
    "num_rollouts": "rollouts",
    "positives": "positives",
    "last_step": "last_step",
    "discounted_rollouts": "discounted_rollouts",
    "discounted_positives": "discounted_positives",
}


def save_pass_rates(
    path: str | Path,
    estimator: EMAPassRate,
    prompts: Mapping[str, str] | None = None,
    fitted: Mapping[str, Any] | None = None,
    history: Mapping[str, np.ndarray] | None = None,
) -> None:
    """
    Write the pass rates of a run, atomically: one row per prompt that was ever sampled.

    | column | |
    |---|---|
    | `prompt_id` | identity ([`~core.prompt_key`]): a hash of the prompt, after the `id` of the dataset row if it has one |
    | `prompt` | its text, or null |
    | `rollouts`, `positives` | scored and positive rollouts over the whole run |
    | `last_step` | last step in which the prompt was sampled |
    | `estimate` | p̂ at the time of writing |
    | `discounted_rollouts`, `discounted_positives` | n_x and k_x of [`~core.EMAPassRate`], its exact state |
    | `reward_history` | N and S of [`~core.RewardEstimator`]: discounted rollouts and their residuals, by decay; or null |

    The file is also the estimator's state (with a fitted prior in its metadata, as JSON), and can be read with
    `datasets.load_dataset("parquet", data_files=path)`.

    Args:
        path (`str` or `Path`):
            Path of the file; `PASS_RATES_FILE` in a checkpoint.
        estimator ([`~core.EMAPassRate`]):
            Estimator to write.
        prompts (`Mapping[str, str]`, *optional*):
            Text by prompt id; without it the file contains no texts.
        fitted (`Mapping[str, Any]`, *optional*):
            State of everything else that was fitted to the run, as JSON values; returned as `state["fitted"]`.
        history (`Mapping[str, np.ndarray]`, *optional*):
            History of a [`~core.RewardEstimator`]; returned as `state["history"]`.
    """
    state, history = estimator.state_dict(), history or {}
    # Prompts without a scored rollout may have a reward history but no counts.
    rows = {key: vars(PromptCounts()) for key in history} | state["counts"]
    keys = list(rows)
    columns = {
        "prompt_id": keys,
        "prompt": [(prompts or {}).get(key) for key in keys],
        "estimate": estimator.predict(keys),
        **{column: [counts[name] for counts in rows.values()] for name, column in _COUNT_COLUMNS.items()},
        "reward_history": [history[key].ravel().tolist() if key in history else None for key in keys],
    }
    payload = json.dumps({"format": _FORMAT, "prior": state.get("prior"), "fitted": fitted}).encode()
    table = pa.table(columns, schema=_SCHEMA.with_metadata({_METADATA_KEY: payload}))
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


def load_pass_rates(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Read a file of [`save_pass_rates`]. Nothing in the file is executed or unpickled.

    Args:
        path (`str` or `Path`):
            Path of the file.

    Returns:
        `tuple[dict[str, Any], dict[str, str]]`: the state for [`~core.EMAPassRate.load_state_dict`], and the texts by
        prompt id (of the prompts that have one).

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
    if not table.schema.equals(_SCHEMA):
        raise _corrupt(path, f"its columns are {_describe(table.schema)}; expected {_describe(_SCHEMA)}")
    fitted = _load_fitted(path, table.schema.metadata or {})
    rows = table.to_pylist()
    for row in rows:
        _check_row(path, row)
    counts = {row["prompt_id"]: {name: row[column] for name, column in _COUNT_COLUMNS.items()} for row in rows}
    if len(counts) < len(rows):
        raise _corrupt(path, f"{len(rows)} rows have only {len(counts)} different values of prompt_id")
    state = {"counts": counts} | {name: value for name, value in fitted.items() if value is not None}
    history = {row["prompt_id"]: row["reward_history"] for row in rows}
    if any(history.values()):
        state["history"] = {key: np.array(values).reshape(2, -1) for key, values in history.items() if values}
    return state, {row["prompt_id"]: row["prompt"] for row in rows if row["prompt"] is not None}


def _check_row(path: str | Path, row: dict[str, Any]) -> None:
    if None in [row["prompt_id"], *(row[column] for column in _COUNT_COLUMNS.values())]:
        raise _corrupt(path, f"prompt {row['prompt_id']!r} has an empty value")
    k, n = row["discounted_positives"], row["discounted_rollouts"]
    try:
        check_counts(row["prompt_id"], row["positives"], row["rollouts"])
        check_counts(row["prompt_id"], k, n)
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    if not math.isfinite(n):
        raise _corrupt(path, f"prompt {row['prompt_id']!r} has discounted_rollouts ({n})")
    history = row["reward_history"]
    if history is not None and (len(history) != 2 * len(DECAYS) or None in history):
        raise _corrupt(path, f"prompt {row['prompt_id']!r} has reward_history ({history})")


def _load_fitted(path: str | Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        loaded = json.loads(metadata[_METADATA_KEY])
        file_format, fitted = loaded["format"], {"prior": loaded["prior"], "fitted": loaded.get("fitted")}
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"its metadata {_METADATA_KEY.decode()!r} is missing or cannot be read") from error
    if file_format != _FORMAT:
        raise _corrupt(path, f"its format is {file_format!r}; this version of ada_trl reads {_FORMAT}")
    return fitted


def _corrupt(path: str | Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a usable file of pass rates: {reason}. Restore it from another checkpoint, or delete it to "
        "start from the prior."
    )


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
