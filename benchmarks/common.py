"""Shared helpers: pools of prompts with known pass rates, stored results, tables, intervals, documents and figures."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ada_trl.core import ExitCondition, Pool, Rollout, eliminate
from ada_trl.utils.tables import markdown_table

from . import names


ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "reproducing_the_paper.md"
README = ROOT / "README.md"
ONE_ROUND = ExitCondition(0)  # met by any pool: GRPO and Est, which sample a single round
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


def bernoulli_pools(
    pass_rates: Sequence[float],
    rng: np.random.Generator,
    exit_condition: ExitCondition,
    *,
    samples_per_round: int | Sequence[int],
    max_rounds: int,
) -> list[Pool]:
    """Sample the pools of prompts whose rollouts have reward 1 with the given probabilities, else 0."""
    p = np.asarray(pass_rates)

    def sample_round(requests):
        rewards = (rng.random(len(requests)) < p[[prompt for prompt, _ in requests]]).astype(float).tolist()
        return [Rollout(index, reward, reward) for (_, index), reward in zip(requests, rewards, strict=True)]

    return eliminate(
        len(p),
        sample_round,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        positive_threshold=0.5,
    )


def save_rows(rows: list[dict], name: str) -> list[dict]:
    """Write the rows of a result. Returns them as stored, so that figures and tables use the stored precision."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(
        column for row in rows for column in row
    )  # of all rows, because tasks differ in their measurements
    table = pa.table({column: [row.get(column) for row in rows] for column in columns})
    pq.write_table(table, RESULTS / f"{name}.parquet", compression="zstd")
    return load_rows(name)


def load_rows(name: str, missing_ok: bool = False) -> list[dict]:
    """The rows of a result. With `missing_ok` none if it has not been stored, otherwise that is an error."""
    path = RESULTS / f"{name}.parquet"
    return [] if missing_ok and not path.exists() else pq.read_table(path).to_pylist()


def computed_or_stored(name: str, compute: Callable[[], list[dict]], description: str) -> list[dict]:
    """Rows of an analysis, according to the command line: computed and stored, or with `--plot` the stored ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="Use the stored data.")
    return load_rows(name) if parser.parse_args().plot else save_rows(compute(), name)


def markdown(rows: Sequence[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    """Rows as a Markdown table; `columns` maps a header to the function that formats a row's cell."""
    return markdown_table(list(columns), ([show(row) for show in columns.values()] for row in rows))


def ratio_of_repeats(measured: Sequence[float], relative_to: Sequence[float]) -> str:
    """Ratio of the sums over repeats, followed by the ratios of the single repeats in brackets."""
    single = (a / b for a, b in zip(measured, relative_to, strict=True))
    return f"{sum(measured) / sum(relative_to):.2f} ({', '.join(f'{ratio:.2f}' for ratio in single)})"


def fill(name: str, text: str, path: Path | None = None) -> None:
    """Replace the text between the document's markers `<!-- name -->` and `<!-- end -->`."""
    path = DOCUMENT if path is None else path
    document = path.read_text()
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    filled, times = pattern.subn(lambda match: f"{match[1]}{text}\n{match[2]}", document)
    if times != 1:
        raise ValueError(f"{path} has {times} places marked {name!r}; expected one <!-- {name} --> … <!-- end -->.")
    path.write_text(filled)


def save_figure(figure, name: str) -> None:
    figure.savefig(FIGURES / f"{name}.png", dpi=110)
