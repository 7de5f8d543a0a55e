"""
Compare models by average@k and unbiased pass@k with confidence intervals, as in the paper's evaluation.

`python -m ada_trl.recipes.math.evaluate --models Qwen/Qwen2.5-Math-1.5B outputs/seq-balance
--output_dir outputs/evaluation`

After an interruption the same command continues; with more models, only the new ones are sampled.
"""

import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from filelock import FileLock
from transformers.hf_argparser import HfArg

from ada_trl.utils.console import replace_unknown_characters

from .problems import load_problems
from .samplers import make_sampler
from .sampling import Measurement, Model, SamplingArguments, parse_arguments
from .statistics import bootstrap_interval, difficulty_bins, pass_at_k


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Test sets of the paper: MATH-500, Minerva Math, OlympiadBench, and 230 problems of AIME, HMMT, BRUMO, CMIMC and AMC.
DATASETS = (
    "weqweasdas/math500",
    "weqweasdas/minerva_math",
    "weqweasdas/olympiadbench",
    "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
)
ALL = "all"  # all problems: the paper's average, weighted by the sizes of the datasets


@dataclass(kw_only=True)
class EvaluateArguments(SamplingArguments):
    """Options of `evaluate.py`, in addition to [`~sampling.SamplingArguments`]."""

    models: list[str] = HfArg(
        help="Names or paths of models and LoRA adapters. The first one is the reference of the comparison."
    )
    datasets: list[str] = HfArg(
        default_factory=lambda: list(DATASETS),
        help="Names on the hub, files (JSON, JSON Lines, Parquet, CSV) or directories.",
    )
    pass_at: list[int] | None = HfArg(default=None, help="The k of pass@k; default: powers of two up to num_samples.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pass_at = self.pass_at or [2**i for i in range(self.num_samples.bit_length())]
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models ({self.models}) must be distinct.")
        if not all(1 <= k <= self.num_samples for k in self.pass_at):
            raise ValueError(f"pass_at ({self.pass_at}) must lie between 1 and num_samples ({self.num_samples}).")


def short_names(names: list[str]) -> list[str]:
    """Shorten names and paths to their last part without a data file's ending, unless that is ambiguous."""
    short = [re.sub(r"\.(jsonl?|parquet|csv)$", "", Path(name).name) or name for name in names]
    return [last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)]


def folder_name(name: str) -> str:
    """Turn a name or path into one part of a path, distinct for distinct names."""
    return f"{Path(name).name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def run(args: EvaluateArguments, make: Callable = make_sampler) -> pd.DataFrame:
    """Evaluate every model on every dataset; write `results.csv`, see [`tabulate`], and `pass_at_k.png`."""
    # Reward function, tokenizers and data first, so that their errors come before hours of sampling.
    models = [Model(name, args, make) for name in args.models]
    problems = {name: load_problems(name, args)[: args.max_problems] for name in args.datasets}
    output_dir = Path(args.output_dir)
    measured: dict[str, dict[str, Measurement]] = {}
    for model, label in zip(models, short_names(args.models), strict=True):
        folder = output_dir / "samples" / folder_name(model.name)
        try:
            measured[label] = {
                # The total over all datasets has the label ALL.
                name if short == ALL else short: model.measure(problems[name], folder / folder_name(name), name)
                for name, short in zip(args.datasets, short_names(args.datasets), strict=True)
            }
        finally:
            model.close()
    rates = [[problem.columns.get("pass_rate") for problem in rows] for rows in problems.values()]
    results = tabulate(measured, args, None if any(None in given for given in rates) else rates)
    with FileLock(output_dir / ".lock"):  # several processes may share the work; one writes at a time
        results.to_csv(output_dir / "results.csv", index=False)
        if importlib.util.find_spec("matplotlib") is not None:  # the extra `plots`
            plot(results).savefig(output_dir / "pass_at_k.png", dpi=150)
    return results


def tabulate(
    measured: Mapping[str, Mapping[str, Measurement]],
    args: EvaluateArguments,
    pass_rates: list[list[float]] | None = None,
) -> pd.DataFrame:
    """
    Compute all metrics of an evaluation; fractions are between 0 and 1.

    Args:
        measured (`Mapping[str, Mapping[str, Measurement]]`):
            Measurements by model and dataset. The first model is the reference, problem by problem.
        pass_rates (`list[list[float]]`, *optional*):
            Pass rates of the problems of each dataset, which define the difficulty bins. They must be measured with
            other completions than `measured`, since a low pass rate regresses to the mean when it is measured again.

    Returns:
        `pd.DataFrame`: `metric`, `model`, `problems` (a dataset, a difficulty bin, or all), their `number`, the
        `value`, and its 95 % interval from `low` to `high`.
    """
    reference, first = next(iter(measured.items()))
    everything = {name: np.arange(len(data.rewards)) for name, data in first.items()}
    groups = {name: {name: members} for name, members in everything.items()}  # positions by dataset
    if len(first) > 1:
        groups[ALL] = everything
    for data, rates in zip(first, pass_rates or [], strict=bool(pass_rates)):
        for name, members in difficulty_bins(rates):
            groups.setdefault(f"pass rate {name}", {})[data] = members
    rows = []
    for model, by_data in measured.items():
        for group, members in groups.items():
            ours = [by_data[name].take(positions) for name, positions in members.items()]
            others = [first[name].take(positions) for name, positions in members.items()]
            number = sum(len(part.rewards) for part in ours)
            metrics = {f"average@{args.num_samples}": [part.pass_rates for part in ours]}
            if model != reference:
                pairs = zip(ours, others, strict=True)
                metrics[f"difference from {reference}"] = [part.pass_rates - other.pass_rates for part, other in pairs]
            for k in args.pass_at:
                metrics[f"pass@{k}"] = [pass_at_k(part.correct, args.num_samples, k) for part in ours]
            metrics["tokens"] = [part.lengths.mean(axis=1) for part in ours]
            metrics["truncated"] = [(part.lengths >= args.max_new_tokens).mean(axis=1) for part in ours]
            metrics["unscored"] = [part.unscored.astype(float) for part in ours]
            for metric, values in metrics.items():
                if number:
                    mean = np.concatenate(values).mean()
                    rows.append((metric, model, group, number, mean, *bootstrap_interval(values)))
    return pd.DataFrame(rows, columns=["metric", "model", "problems", "number", "value", "low", "high"])


def show(results: pd.DataFrame) -> str:
    """Format results as a table with a column per group of problems, in percent except for the number of tokens."""
    metrics = list(dict.fromkeys(results["metric"]))  # models are compared within a metric
    rows = results.sort_values("metric", key=lambda column: column.map(metrics.index), kind="stable")
    rows["problems"] += rows["number"].map(" ({})".format)
    rows.loc[rows["metric"] != "tokens", ["value", "low", "high"]] *= 100
    rows["shown"] = [f"{row.value:.1f} [{row.low:.1f}, {row.high:.1f}]" for row in rows.itertuples()]
    # Unlike `pivot`, `unstack` with `sort=False` keeps the order of metrics, models and datasets.
    table = rows.set_index(["metric", "model", "problems"])["shown"].unstack("problems", sort=False, fill_value="")
    return table.to_string()


def plot(results: pd.DataFrame) -> "Figure":
    """Plot pass@k of all problems with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    rows = results[results["metric"].str.startswith("pass@")]
    group = ALL if ALL in set(rows["problems"]) else rows["problems"].iloc[0]
    for model, curve in rows[rows["problems"] == group].groupby("model", sort=False):
        ks = curve["metric"].str.removeprefix("pass@").astype(int)
        axis.plot(ks, 100 * curve["value"], marker=".", label=model)
        axis.fill_between(ks, 100 * curve["low"], 100 * curve["high"], alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="k", ylabel="pass@k in percent", ylim=(0, 100))
    axis.legend(frameon=False)
    return figure


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), evaluate, and print the results."""
    replace_unknown_characters()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments(EvaluateArguments, args, "Compare models by average@k and unbiased pass@k.")
    print(show(run(arguments)))
    print(f"\nIn percent (not tokens), with 95 % bootstrap intervals. Written to {arguments.output_dir}/results.csv.")


if __name__ == "__main__":
    main()
