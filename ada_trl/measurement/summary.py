"""Measurements of several models as numbers, Markdown and a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..utils.tables import markdown_table
from .accuracy import NUM_RESAMPLES, bootstrap_interval, difficulty_bins, pass_at_k
from .measure import EvalResult


if TYPE_CHECKING:
    from matplotlib.axes import Axes


AVERAGE = "weighted average"


def summarise(
    measured: Mapping[str, Mapping[str, EvalResult]],
    *,
    pass_at: Sequence[int],
    max_new_tokens: int,
    difficulty_edges: Sequence[float],
    pass_rates: Sequence[float] | None = None,
) -> dict[str, Any]:
    """
    All figures of an evaluation, as JSON values; shares are between 0 and 1.

    The weighted average weighs each data set by its number of problems, as in the paper's table 1, which makes it the
    mean over all problems. Intervals are those of [`~measurement.accuracy.bootstrap_interval`].

    Args:
        measured (`Mapping[str, Mapping[str, EvalResult]]`):
            By model and data set; the first model is what the others are compared with, problem by problem.
        pass_at (`Sequence[int]`):
            The k of pass@k.
        max_new_tokens (`int`):
            Limit that makes a completion count as truncated.
        difficulty_edges (`Sequence[float]`):
            See [`~measurement.accuracy.difficulty_bins`].
        pass_rates (`Sequence[float]`, *optional*):
            Of all problems, in order, measured elsewhere: what the difficulty bins are made of. By default the first half
            of the first model's completions; its own accuracy in a bin is then that of the second half, since problems
            chosen for a low measured pass rate regress to the mean when they are measured again.

    Returns:
        `dict[str, Any]`: `problems` and `unparsable` by data set; `models`: by model and data set (and `AVERAGE`) the
        `average` with its `interval`, its `difference` from the first model with an interval, `pass_at` with intervals,
        `mean_length` and `truncated`; `difficulty`: for each bin its number of problems and each model's average.
    """
    first = next(iter(measured.values()))
    num_samples = next(iter(first.values())).rewards.shape[1]
    models = {}
    for label, by_data in measured.items():
        parts = {name: ([by_data[name]], [first[name]]) for name in first}
        if len(first) > 1:
            parts[AVERAGE] = (list(by_data.values()), list(first.values()))
        models[label] = {
            name: _figures(ours, None if by_data is first else base, pass_at, max_new_tokens)
            for name, (ours, base) in parts.items()
        }
    return {
        "num_samples": num_samples,
        "problems": {name: len(m.rewards) for name, m in first.items()},
        "unparsable": {name: m.unparsable for name, m in first.items()},
        "models": models,
        "difficulty": _difficulty(measured, difficulty_edges, pass_rates),
        "difficulty_from": "column pass_rate" if pass_rates is not None else next(iter(measured)),
    }


def _figures(
    ours: list[EvalResult], base: list[EvalResult] | None, pass_at: Sequence[int], max_new_tokens: int
) -> dict[str, Any]:
    rates = [m.pass_rates for m in ours]
    lengths = np.concatenate([m.lengths.ravel() for m in ours])
    by_k = {k: [pass_at_k(m.correct, m.rewards.shape[1], k) for m in ours] for k in pass_at}
    figures = {
        "average": _mean(rates),
        "interval": bootstrap_interval(rates),
        "pass_at": {str(k): {"value": _mean(v), "interval": bootstrap_interval(v)} for k, v in by_k.items()},
        "mean_length": float(lengths.mean()),
        "truncated": float((lengths >= max_new_tokens).mean()),
    }
    if base is not None:
        differences = [m.pass_rates - b.pass_rates for m, b in zip(ours, base, strict=True)]
        figures["difference"] = {"value": _mean(differences), "interval": bootstrap_interval(differences)}
    return figures


def _difficulty(
    measured: Mapping[str, Mapping[str, EvalResult]], edges: Sequence[float], pass_rates: Sequence[float] | None
) -> list[dict[str, Any]]:
    rewards = {label: np.concatenate([m.rewards for m in by_data.values()]) for label, by_data in measured.items()}
    if pass_rates is None:
        label, own = next(iter(rewards.items()))
        half = own.shape[1] // 2
        if not half:
            return []
        pass_rates, rewards[label] = own[:, :half].mean(axis=1), own[:, half:]
    bins = []
    for name, members in difficulty_bins(pass_rates, edges):
        values = {label: ours[members].mean(axis=1) for label, ours in rewards.items()}
        figures = {label: {"average": _mean([v]), "interval": bootstrap_interval([v])} for label, v in values.items()}
        bins.append({"pass_rate": name, "problems": len(members), "models": figures if len(members) else {}})
    return bins


def _mean(values: Sequence[np.ndarray]) -> float:
    everything = np.concatenate(values)
    return float(everything.mean()) if len(everything) else math.nan


REPORT = """\
# Evaluation

{num_samples} completions per problem at temperature {temperature:g}, top_p {top_p:g}, at most {max_new_tokens} tokens; prompt
format "{prompt_format}", seed {seed}; {scored_by}. In brackets: 95 % intervals from
{num_resamples:,} bootstrap resamples of the problems (percentile; problems are resampled within their data set).

## average@{num_samples}, in percent

{average}

{difference}The weighted average weighs each data set by its number of problems.{notes}

## pass@k, in percent, {pooled}

{pass_at}

Unbiased: the share of all subsets of k of a problem's {num_samples} completions that hold a correct one.
{difficulty}
![Accuracy, pass@k and accuracy by difficulty](results.png)
"""

DIFFICULTY = """
## average@{num_samples} by difficulty, in percent

{table}

Problems of all data sets by pass rate {source}.
"""


def markdown(results: dict[str, Any]) -> str:
    """The report: what [`summarise`] returned, with the run's `settings`."""
    settings, models = results["settings"], results["models"]
    first = next(iter(models))
    names = list(models[first])
    ks = list(models[first][names[-1]]["pass_at"])
    by_k = [[label, *(_share(**m[names[-1]]["pass_at"][k]) for k in ks)] for label, m in models.items()]
    return REPORT.format(
        **{k: v for k, v in settings.items() if k not in ("pass_at", "difficulty")},
        average=_average_table(results),
        difference=f"*Difference*: from {first}, problem by problem (paired). " if len(models) > 1 else "",
        notes=_notes(results),
        pooled=f"all {sum(results['problems'].values())} problems",
        pass_at=markdown_table(["Model", *(f"k = {k}" for k in ks)], by_k, align_right=True),
        num_resamples=NUM_RESAMPLES,
        difficulty=_difficulty_section(results),
    )


def _average_table(results: dict[str, Any]) -> str:
    models, problems = results["models"], results["problems"]
    first = next(iter(models))
    names = list(models[first])
    rows = []
    for label, by_data in models.items():
        pooled = by_data[names[-1]]
        averages = [_share(by_data[n]["average"], by_data[n]["interval"]) for n in names]
        rows.append([label, *averages, f"{pooled['mean_length']:.0f}", _share(pooled["truncated"])])
        if label != first:
            differences = [by_data[n]["difference"] for n in names]
            shown = [_share(d["value"], d["interval"], sign="+") for d in differences]
            rows.append(["*difference*", *shown, "", ""])
    header = [f"{n} ({problems.get(n, sum(problems.values()))})" for n in names]
    return markdown_table(["Model", *header, "Tokens", "Truncated"], rows, align_right=True)


def _notes(results: dict[str, Any]) -> str:
    unparsable = ", ".join(f"{count} in {name}" for name, count in results["unparsable"].items() if count)
    return f" Problems that cannot be scored count as wrong: {unparsable}." if unparsable else ""


def _difficulty_section(results: dict[str, Any]) -> str:
    bins = [b for b in results["difficulty"] if b["problems"]]
    if not bins:
        return ""
    rows = [
        [label, *(_share(b["models"][label]["average"], b["models"][label]["interval"]) for b in bins)]
        for label in results["models"]
    ]
    source = "in the column `pass_rate`"
    if results["difficulty_from"] != "column pass_rate":
        source = (
            f"in the first half of {results['difficulty_from']}'s completions; its own accuracy here is that of the "
            "second half"
        )
    header = ["Model", *(f"{b['pass_rate']} ({b['problems']})" for b in bins)]
    table = markdown_table(header, rows, align_right=True)
    return DIFFICULTY.format(num_samples=results["num_samples"], table=table, source=source)


def _share(value: float, interval: Sequence[float] | None = None, sign: str = "") -> str:
    text = f"{100 * value:{sign}.1f}"
    return text if interval is None else f"{text} [{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def plot(results: dict[str, Any], path: Path) -> None:
    """Accuracy by data set, pass@k over all problems, accuracy by difficulty, each with its intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    models, bins = results["models"], [b for b in results["difficulty"] if b["problems"]]
    names = list(next(iter(models.values())))
    for i, (label, by_data) in enumerate(models.items()):
        place = {"number": i, "of": len(models), "label": label}
        _bars(axes[0], [(n, by_data[n]["average"], by_data[n]["interval"]) for n in names], **place)
        by_k = by_data[names[-1]]["pass_at"]
        ks = [int(k) for k in by_k]
        axes[1].plot(ks, [100 * v["value"] for v in by_k.values()], marker="o", markersize=3.5, label=label)
        low, high = zip(*(v["interval"] for v in by_k.values()), strict=True)
        axes[1].fill_between(ks, 100 * np.array(low), 100 * np.array(high), alpha=0.15)
        shown = [(f"{b['pass_rate']}\n({b['problems']})", *b["models"][label].values()) for b in bins]
        _bars(axes[2], shown, **place)
    axes[1].set_xscale("log", base=2)
    axes[1].xaxis.set_major_formatter("{x:g}")
    for axis, title in zip(
        axes, (f"average@{results['num_samples']}", "pass@k", "by pass rate (problems)"), strict=True
    ):
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].tick_params(axis="x", labelrotation=10)
    axes[0].set_ylabel("Percent")
    axes[1].set_xlabel("k")
    axes[0].set_ylim(0, 100)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def _bars(axis: "Axes", values: list[tuple[str, float, Sequence[float]]], *, number: int, of: int, label: str) -> None:
    width = 0.8 / of
    positions = np.arange(len(values)) + (number - (of - 1) / 2) * width
    heights = [100 * average for _, average, _ in values]
    errors = [[100 * max(average - low, 0), 100 * max(high - average, 0)] for _, average, (low, high) in values]
    axis.bar(positions, heights, width, yerr=np.reshape(errors, (-1, 2)).T, label=label, error_kw={"linewidth": 1})
    axis.set_xticks(range(len(values)), [name for name, *_ in values])
