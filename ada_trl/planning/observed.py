"""What a user knows of the prompts: pass rates or counts, from a run, a selection or a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from ..pass_rates.store import PASS_RATES_FILE
from ..utils.files import last_checkpoint
from .difficulty import PassRateDistribution, fit_pass_rate_distribution


COUNT_COLUMNS = [("discounted_positives", "discounted_draws"), ("positives", "draws")]
READERS = {
    ".parquet": pq.read_table,
    ".csv": pa.csv.read_csv,
    ".json": pa.json.read_json,
    ".jsonl": pa.json.read_json,
}


class Prompts(NamedTuple):
    """
    What is known about the user's prompts.

    Args:
        observed (`np.ndarray`):
            Pass rates as in the file, `(X,)`.
        distribution ([`~difficulty.PassRateDistribution`]):
            Of the true ones.
        posterior (`np.ndarray`):
            Of each prompt, over the distribution's grid, `(X, G)`.
    """

    observed: np.ndarray
    distribution: PassRateDistribution
    posterior: np.ndarray


def read_prompts(path: str | Path, *, column: str = "pass_rate", draws: int | None = None) -> Prompts:
    """
    Read a difficulty record (`ada_pass_rates.parquet` of a checkpoint), or any parquet, CSV or JSON lines file with
    columns `positives` and `draws`, or with a column of pass rates; or find such a file in a directory ([`find_rates`]).

    From counts the true pass rates are estimated ([`~difficulty.fit_pass_rate_distribution`]); a record's discounted
    counts are preferred because they are about the policy as it is now. Pass rates are counts where there is a column
    `draws`, else taken as exact.

    Raises:
        `FileNotFoundError`: if there is no such file.
        `ValueError`: for a file without such columns or with values that cannot be pass rates.
    """
    path = find_rates(Path(path))
    table = _read_table(path)
    for names in COUNT_COLUMNS:
        if set(names) <= set(table.column_names):
            return prompts_from_counts(path, *_numbers(path, table, names))
    if column not in table.column_names:
        raise ValueError(
            f"{path} has columns {', '.join(table.column_names)}, neither 'positives' and 'draws' nor {column!r}. Name "
            "the column of pass rates with --column."
        )
    if "draws" in table.column_names and draws is None:
        rates, counts = _numbers(path, table, [column, "draws"])
        return prompts_from_counts(path, rates * counts, counts)
    (rates,) = _numbers(path, table, [column])
    _check(path, rates, np.ones_like(rates))
    if draws is not None:
        return prompts_from_counts(path, rates * draws, np.full_like(rates, draws))
    values, index, counts = np.unique(rates, return_inverse=True, return_counts=True)
    return Prompts(rates, PassRateDistribution(values, counts / len(rates)), np.eye(len(values))[index])


def find_rates(path: Path) -> Path:
    """
    The file with pass rates: itself, the record of a run or checkpoint, or the data file of a selection by `recipes.math.select`.

    Raises:
        `FileNotFoundError`: if there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"There is no {path}. Give a run, a selection by recipes.math.select, or a file.")
    checkpoint = last_checkpoint(path)
    candidates = [
        path / PASS_RATES_FILE,
        *([checkpoint / PASS_RATES_FILE] if checkpoint else []),
        *sorted(path.glob("data/*.parquet")),
    ]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{path} has neither a difficulty record ({PASS_RATES_FILE}; train with --pass_rate_estimator counts) nor data/*.parquet "
            "of recipes.math.select. Name a file with pass rates."
        )
    return found


def _read_table(path: Path) -> pa.Table:
    if path.suffix not in READERS:
        raise ValueError(f"{path} ends in {path.suffix!r}; expected one of {', '.join(READERS)}.")
    try:
        return READERS[path.suffix](str(path))
    except pa.ArrowInvalid as error:
        what = str(error).rstrip(".") if path.stat().st_size else "it is empty"
        raise ValueError(
            f"{path} cannot be read as {path.suffix.removeprefix('.')}: {what}. Write it anew."
        ) from error


def _numbers(path: Path, table: pa.Table, names: Sequence[str]) -> list[np.ndarray]:
    """
    The columns as numbers.

    Raises:
        `ValueError`: if a value is empty, not a number, or NaN; the remedy is the user's, since a prompt without a pass
            rate is not one that was never solved.
    """
    columns = []
    for name in names:
        try:
            values = table.column(name).cast(pa.float64()).to_numpy()
        except pa.ArrowException as error:
            raise ValueError(
                f"{path} has no numbers in column {name!r} ({error}). Name another with --column."
            ) from error
        columns.append(values)
    missing = np.isnan(np.stack(columns)).any(axis=0)
    if missing.any():
        raise ValueError(
            f"{path} has {missing.sum()} of {len(missing)} rows without a value in {' or '.join(map(repr, names))}, the "
            f"first one is row {np.argmax(missing) + 1}. Drop those rows, or fill them in."
        )
    return columns


def _check(path: str | Path, positives: np.ndarray, draws: np.ndarray) -> None:
    wrong = ~((positives >= 0) & (positives <= draws) & np.isfinite(draws))
    if wrong.any() or not len(positives):
        example = f"{positives[wrong][0]:g} of {draws[wrong][0]:g}" if wrong.any() else "no row"
        raise ValueError(f"{path} has {example} as pass rate; it takes 0 <= positives <= draws, or rates from 0 to 1.")


def prompts_from_counts(path: str | Path, positives: np.ndarray, draws: np.ndarray) -> Prompts:
    _check(path, positives, draws)
    seen = draws > 0
    distribution = fit_pass_rate_distribution(positives, draws)
    return Prompts(positives[seen] / draws[seen], distribution, distribution.posterior(positives[seen], draws[seen]))
