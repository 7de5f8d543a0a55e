"""Shared helpers: rollouts of prompts with known pass rates, stored results, tables, documents and figures."""

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from ada_trl.core import Rollouts, Scoring, needs_more
from ada_trl.utils.tables import markdown_table

from . import names


ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
ARCHIVE = ROOT / "benchmarks" / "README.md"
README = ROOT / "README.md"
# Sampling: options of `AdaGRPOConfig`, `bernoulli_rollouts` and the closed forms.
# The default of Seq-balance, and the paper's.
DEFAULT = {"min_positives": 1, "min_negatives": 1, "samples_per_round": 4, "max_rounds": 8}
POS = {"min_positives": 1, "samples_per_round": 8, "max_rounds": 4}
BALANCE = {"min_positives": 2, "min_negatives": 2, "samples_per_round": 8, "max_rounds": 4}
BINARY = Scoring(weights=(1.0,), threshold=0.5)  # one reward function, of 0 and 1
QUIET = {  # options of a trainer
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_level": "error",
    "gradient_checkpointing": False,
}
COLORS = {  # distinguishable with colour blindness (Okabe and Ito); darker blues are larger groups of GRPO
    names.GRPO_4: "#56b4e9",
    names.GRPO_8: "#0072b2",
    names.GRPO_16: "#00304f",
    names.DAPO: "#7f7f7f",
    names.SEQ_POS: "#999933",
    names.SEQ_BALANCE: "#d55e00",
    names.EST: "#cc79a7",
    names.BATCH: "#e69f00",
}


def binary_rollouts(positives: ArrayLike, sizes: ArrayLike) -> Rollouts:
    """Pools with given numbers of positive rollouts, which come first, among all rollouts."""
    pools = zip(*np.broadcast_arrays(positives, sizes), strict=True)
    return Rollouts.score([np.arange(size)[:, None] < k for k, size in pools], BINARY)


def bernoulli_rollouts(
    pass_rates: ArrayLike,
    rng: np.random.Generator,
    *,
    min_positives: int = 0,
    min_negatives: int = 0,
    samples_per_round: int,
    max_rounds: int = 1,
) -> Rollouts:
    """
    Sample prompts whose rollouts have reward 1 with the given probabilities, else 0,
    in the rounds of [`~core.sample_slots`].

    The defaults are those of GRPO: one round, which meets any exit condition.
    """
    p = np.asarray(pass_rates)
    # By prompt and draw; NaN for draws that are not needed.
    rewards_PD = np.full((len(p), samples_per_round * max_rounds), np.nan)
    active = np.arange(len(p))
    for first in range(0, samples_per_round * max_rounds, samples_per_round):
        is_positive = rng.random((len(active), samples_per_round)) < p[active, None]
        rewards_PD[active, first : first + samples_per_round] = is_positive
        positives, negatives = ((rewards_PD[active] == reward).sum(axis=1) for reward in (1, 0))
        active = active[needs_more(positives, negatives, min_positives, min_negatives)]
    return Rollouts.score([rewards[~np.isnan(rewards), None] for rewards in rewards_PD], BINARY)


def save_rows(rows: list[dict], name: str) -> None:
    """Write the rows of a result."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(
        column for row in rows for column in row
    )  # of all rows, because tasks differ in their measurements
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    pq.write_table(table, RESULTS / f"{name}.parquet", compression="zstd")


def load_rows(name: str, missing_ok: bool = False) -> list[dict]:
    """The rows of a result. With `missing_ok` none if it has not been stored, otherwise that is an error."""
    path = RESULTS / f"{name}.parquet"
    return [] if missing_ok and not path.exists() else pq.read_table(path).to_pylist()


def markdown(rows: Sequence[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    """Rows as a Markdown table; `columns` maps a header to the function that formats a row's cell."""
    return markdown_table(list(columns), ([show(row) for show in columns.values()] for row in rows))


def ratio_of_repeats(measured: Sequence[float], relative_to: Sequence[float]) -> str:
    """Ratio of the sums over repeats, followed by the ratios of the single repeats in brackets."""
    single = (a / b for a, b in zip(measured, relative_to, strict=True))
    return f"{sum(measured) / sum(relative_to):.2f} ({', '.join(f'{ratio:.2f}' for ratio in single)})"


def wrapped(text: str) -> str:
    """The text in lines of at most 119 characters, but for tables."""

    def wrap(line: str) -> str:
        indent = "  " if line.startswith("- ") else ""
        return textwrap.fill(line, 119, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)

    return "\n".join(line if line.startswith("|") else wrap(line) for line in text.splitlines())


def fill(name: str, text: str, path: Path | None = None) -> None:
    """Replace the text between the document's markers `<!-- name -->` and `<!-- end -->`."""
    path = ARCHIVE if path is None else path
    document = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    filled, times = pattern.subn(lambda match: f"{match[1]}{wrapped(text)}\n{match[2]}", document)
    if times != 1:
        raise ValueError(f"{path} has {times} places marked {name!r}; expected one <!-- {name} --> … <!-- end -->.")
    path.write_text(filled, encoding="utf-8")


def save_figure(figure, name: str) -> None:
    figure.savefig(FIGURES / f"{name}.png", dpi=110)
