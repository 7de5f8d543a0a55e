"""
Figures of [Reinforce-Ada](https://huggingface.co/papers/2510.04996) (v3) on sampling, for your own runs.

`python -m benchmarks.analyses.paper RUN [RUN …]` plots metrics that runs with `log_completions` have logged under
`ada/`; `--samples` plots completions sampled by `recipes.math.select` and `recipes.math.evaluate`. A figure without
logged data is `None`.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

from ..plotting import STEPS, Log, by_round, curve, draw, legend_above, make_panels, read_log, smoothed


if TYPE_CHECKING:
    from matplotlib.figure import Figure


ALLOCATION = "ada/allocation/rollouts_at_"  # followed by the middle of a bin of estimated pass rates


def read_counts(path: str | Path) -> dict[str, tuple[list[int], int]]:
    """
    Correct completions of each problem, and the number of its completions,
    as `recipes.math.select` and `evaluate` scored them.

    Args:
        path (`str` or `Path`):
            A `scores.parquet`, or a directory with some below it. Those of several datasets, which are in folders
            beside each other, are put together.

    Returns:
        `dict[str, tuple[list[int], int]]`: by the name of the folder of the datasets (in `evaluate`'s samples a
        model), or of `path` if there is only one.

    Raises:
        `ValueError`: if there is no file, or if problems of a folder have different numbers of completions.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("scores.parquet"))
    found: dict[Path, list[list[float]]] = {}
    for file in files:
        rows = pq.read_table(file)["rewards"].to_pylist()
        found.setdefault(file.parent.parent, []).extend(row for row in rows if None not in row)
    counts = {}
    for folder, rewards in found.items():
        numbers = {len(row) for row in rewards}
        if len(numbers) != 1:
            raise ValueError(
                f"{folder} has problems with {', '.join(map(str, sorted(numbers))) or 'no'} completions; the number "
                "must be the same for all. Give one of its scores.parquet files."
            )
        counts[folder.name] = [int(sum(row)) for row in rewards], numbers.pop()
    if not counts:
        raise ValueError(f"{path} has no scores.parquet, which recipes.math.select and recipes.math.evaluate write.")
    return counts if len(counts) > 1 else {path.name.removesuffix(".parquet"): next(iter(counts.values()))}


def with_metrics(runs: Mapping[str, Log], *names: str) -> dict[str, Log]:
    """Runs that have logged all of `names`."""
    return {run: log for run, log in runs.items() if all(len(curve(log, name).steps) for name in names)}


def quota_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    Rollouts and missing quotas after each round: figure 5, one row per run. The first panel shows rollouts per step
    (other runs in grey), the last one the fraction of prompts whose quotas are met after a round.
    """
    rows = {run: log for run, log in runs.items() if by_round(log, "ada/frac_missing_positives")}
    if not rows:
        return None
    figure, panels = make_panels(len(rows), 4, sharey="col")
    for row, (run, log) in zip(panels, rows.items(), strict=True):
        for other, other_log in rows.items():
            own = {"color": "C0", "zorder": 3} if other == run else {"color": "0.75", "linewidth": 1}
            draw(row[0], _rollouts(other_log), **own)
        row[0].set_ylabel(f"{run}\nrollouts per step")
        active = by_round(log, "ada/active_prompts")
        steps, prompts = active[1]
        for panel, kind in zip(row[1:3], ("positives", "negatives"), strict=True):
            for k, missing in by_round(log, f"ada/frac_missing_{kind}").items():
                draw(panel, missing, color=f"C{k - 1}", label=f"round {k}")
            panel.set_ylabel(f"Prompts with missing {kind}")
        for k in active:
            left = (
                active[k + 1].values / prompts
                if k + 1 in active
                else 1 - curve(log, "ada/frac_exit_condition_met").values
            )
            draw(row[3], (steps, 1 - left), color=f"C{k - 1}", label=f"round {k}")
        row[3].set_ylabel("Prompts with met quotas")
        for panel in row:
            panel.set_xlabel(STEPS)
        for panel in row[1:]:
            panel.set_ylim(-0.02, 1.02)
            legend_above(panel)
        row[0].set_ylim(bottom=0)
    return figure


def _rollouts(log: Log) -> tuple[np.ndarray, np.ndarray]:
    steps, mean = curve(log, "ada/samples_per_prompt/mean")
    return steps, mean * by_round(log, "ada/active_prompts")[1].values


def frontier_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """Training reward against the policy's entropy, one cloud per run with its last value marked: figure 6, left."""
    rows = with_metrics(runs, "reward", "entropy")
    if not rows:
        return None
    figure, ((panel,),) = make_panels(1, 1)
    for i, (run, log) in enumerate(rows.items()):
        pairs = [(row["entropy"], row["reward"]) for row in log if None not in (row.get("entropy"), row.get("reward"))]
        entropy, reward = np.array(pairs, dtype=float).T
        panel.plot(entropy, reward, ".", markersize=4, alpha=0.35, color=f"C{i}")
        panel.plot(entropy[-1:], reward[-1:], "o", markersize=8, markeredgecolor="black", color=f"C{i}", label=run)
    panel.set(xlabel="Entropy (nats/token)", ylabel="Training reward")
    panel.legend(fontsize="small", frameon=False, title="last step", title_fontsize="small")
    return figure


def allocation_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    Rollouts per prompt against its estimated pass rate, in the first and the last third of the run:
    the allocation of Est (compare figure 7).
    """
    rows = {run: curves for run, log in runs.items() if (curves := _allocations(log))}
    if not rows:
        return None
    figure, ((panel,),) = make_panels(1, 1)
    for i, (run, thirds) in enumerate(rows.items()):
        for (x, y), style, when in zip(thirds, (":", "-"), ("first third", "last third"), strict=True):
            dots = {"marker": "o", "markersize": 3, "markevery": None}
            draw(panel, (x, y), color=f"C{i}", linestyle=style, label=f"{run}, {when}", **dots)
    panel.set(xlabel="Estimated pass rate", ylabel="Rollouts per prompt", xlim=(-0.02, 1.02))
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small", frameon=False)
    return figure


def _allocations(log: Log) -> list[tuple[list[float], list[float]]]:
    """Middles of the bins and their mean rollouts, in the first and the last third of the logged steps."""
    names = sorted({name for row in log for name in row if name.startswith(ALLOCATION)})
    logged = [row for row in log if any(name in row for name in names)]
    third = math.ceil(len(logged) / 3)
    curves = []
    for rows in (logged[:third], logged[len(logged) - third :]) if names else ():
        values = [[row[name] for row in rows if row.get(name) is not None] for name in names]
        points = [
            (float(n.removeprefix(ALLOCATION)), float(np.mean(v))) for n, v in zip(names, values, strict=True) if v
        ]
        middles, means = zip(*points, strict=True)
        curves.append((list(middles), list(means)))
    return curves


def levels_figure(runs: Mapping[str, Log]) -> "Figure | None":
    """
    Mean over prompts of their mean rewards, and mean over all rollouts: figure 9. The second one is lower where hard
    prompts get more rollouts.
    """
    names = {
        "ada/reward/macro_mean": "Mean reward over prompts",
        "ada/reward/micro_mean": "Mean reward over rollouts",
    }
    rows = with_metrics(runs, *names)
    if not rows:
        return None
    figure, (panels,) = make_panels(1, 2)
    for i, (run, log) in enumerate(rows.items()):
        for panel, name in zip(panels, names, strict=True):
            draw(panel, curve(log, name), color=f"C{i}", label=run)
    for panel, label in zip(panels, names.values(), strict=True):
        panel.set(xlabel=STEPS, ylabel=label)
    panels[0].legend(fontsize="small", frameon=False)
    return figure


def draws_figure(counts: Mapping[str, tuple[Sequence[int], int]]) -> "Figure | None":
    """
    Fraction of prompts with at least one correct completion among k (pass@k, left) and of prompts with k correct
    completions, which are zero-variance groups (right): figure 2.

    Args:
        counts (`Mapping[str, tuple[Sequence[int], int]]`):
            Correct completions c of each problem and the number n of sampled ones, by label. The estimates
            1 − C(n − c, k) / C(n, k) and C(c, k) / C(n, k) are unbiased.
    """
    if not counts:
        return None
    figure, ((left, right),) = make_panels(1, 2)
    for i, (label, (correct, n)) in enumerate(counts.items()):
        ks = powers_of_two(n)
        some = [1 - subset_share([n - c for c in correct], n, k) for k in ks]
        every = [subset_share(correct, n, k) for k in ks]
        for panel, values in ((left, some), (right, every)):
            panel.plot(ks, values, color=f"C{i}", marker="o", markersize=3, label=label)
    for panel, title in ((left, "At least one of k correct (pass@k)"), (right, "All of k correct")):
        panel.set(xlabel="k", ylabel="Fraction of prompts", ylim=(-0.02, 1.02), title=title)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
    right.legend(fontsize="small", frameon=False)
    return figure


def powers_of_two(n: int) -> list[int]:
    return [2**i for i in range(n.bit_length())]


def subset_share(counts: Sequence[int], n: int, k: int) -> float:
    """
    Mean over prompts of C(c, k) / C(n, k): the fraction of subsets of k of n completions that are among c of them.
    """
    return float(np.mean([math.comb(int(c), k) for c in counts])) / math.comb(n, k)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="Output directories or checkpoints.")
    parser.add_argument("--labels", nargs="+", help="Names in the legends; by default those of the directories.")
    parser.add_argument("--smooth", type=int, default=1, help="Steps to average over; 20 in the paper's figures.")
    parser.add_argument(
        "--samples", nargs="+", default=[], type=Path, help="Output directories of recipes.math.select and evaluate."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("plots"), help="Directory of the PNG files.")
    options = parser.parse_args(args)
    if not options.runs and not options.samples:
        parser.error("nothing to plot: pass RUN, an output directory of a training run, or --samples")
    if options.smooth < 1:
        parser.error(f"--smooth ({options.smooth}) must be at least 1 (no smoothing)")
    labels = options.labels or [run.resolve().name for run in options.runs]
    if not len(set(labels)) == len(labels) == len(options.runs):
        parser.error(f"{len(options.runs)} runs need as many different labels, got {labels}; set --labels")
    paths = dict(zip(labels, options.runs, strict=True))
    runs = {label: smoothed(read_log(run), options.smooth) for label, run in paths.items()}
    counts = {label: value for path in options.samples for label, value in read_counts(path).items()}
    figures = {
        "quotas": quota_figure(runs),
        "frontier": frontier_figure(runs),
        "levels": levels_figure(runs),
        "allocation": allocation_figure(runs),
        "draws": draws_figure(counts),
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            path = options.output_dir / f"{name}.png"
            figure.savefig(path, dpi=130)
            print(path)


if __name__ == "__main__":
    main()
