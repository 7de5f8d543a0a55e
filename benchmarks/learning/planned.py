"""
Is what `ada-trl plan` recommends ahead of its runner-up, and of GRPO n=4, when it is trained?

Four files of sums whose pass rates are hard, easy, both (two humps), or spread evenly. The plan sees 16 rollouts of each prompt. Its
recommendation, the best setting of another method, and GRPO n=4 are trained at about 128 rollouts per step.

`python -m benchmarks.learning.planned` writes one file per run to `outputs/learning/planned/`; stopped and started again, it
goes on with the runs that are missing. `--store` makes them the results in the repository, and writes the table of docs/plan.md.
"""

import argparse
import functools
import json
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ada_trl.planning.observed import prompts_from_counts
from ada_trl.planning.settings import Setting, describe, recommend, settings
from ada_trl.utils.files import atomic_write
from recipes.arithmetic.task import prepare, problems

from ..common import ROOT, fill, interval, markdown, save_rows
from . import prompt_sets
from .run import ADDITION, run_missing, slug, train_once


# Ranges of exact pass rates of which a file has equally many prompts.
FILES = {
    "hard": [(0.0, 0.1)],
    "easy": [(0.6, 1.0)],
    "two humps": [(0.0, 0.08), (0.85, 1.0)],
    "even": [(i / 10, (i + 1) / 10) for i in range(10)],
}
NUM_TRAIN, NUM_TEST = 1000, 250
ROLLOUTS_PER_STEP, STEPS = 128, 100
BUDGET = 8  # rollouts per prompt
NAME = "planned"
PAGE = ROOT / "docs" / "plan.md"


class Run(NamedTuple):
    """A method on a file."""

    method: str
    prompt_set: str
    seed: int

    @property
    def file_name(self) -> str:
        return "_".join(slug(str(part)) for part in self) + ".json"


def build(base: Path, folder: Path, seed: int = 0, num_candidates: int = 60_000) -> None:
    """Write `{name}_{train,test}.jsonl` for each of `FILES`, with `base_pass_rate`, and `positives` of 16."""
    model, tokenizer = prompt_sets.load(base)
    rows = problems(num_candidates, seed=seed + 4000)
    rates = prompt_sets.pass_rates(model, tokenizer, rows)
    rng = np.random.default_rng(seed)
    rows = rows.add_column("base_pass_rate", rates)
    rows = rows.add_column("positives", rng.binomial(prompt_sets.NUM_DRAWS, rates))
    folder.mkdir(parents=True, exist_ok=True)
    for name, ranges in FILES.items():
        share = (NUM_TRAIN + NUM_TEST) // len(ranges)
        found = [np.flatnonzero((rates >= low) & (rates < high))[:share] for low, high in ranges]
        if any(len(part) < share for part in found):
            raise ValueError(
                f"{name}: {[len(part) for part in found]} of {share} prompts found. Raise num_candidates."
            )
        chosen = rng.permutation(np.concatenate(found))
        prompt_sets.write(folder / f"{name}_test.jsonl", rows.select(chosen[:NUM_TEST]))
        prompt_sets.write(folder / f"{name}_train.jsonl", rows.select(chosen[NUM_TEST:]))


def methods(folder: Path, name: str) -> dict[str, Setting]:
    """What is trained on a file: the recommendation, the least noise of another method, and GRPO n=4."""
    positives = np.array(prompt_sets.read(folder / f"{name}_train.jsonl")["positives"])
    prompts = prompts_from_counts(name, positives, np.full(len(positives), prompt_sets.NUM_DRAWS))
    found = settings(prompts, num_generations=4, budget=BUDGET, max_samples=32)
    best = recommend(found, BUDGET)
    others = [s for s in found if s.method != best.method and s.rollouts <= BUDGET]
    chosen = [best, min(others, key=lambda s: s.noise), found[0]]
    return {f"{setting.method} {describe(setting)}": setting for setting in chosen}


def train_and_save(run: Run, runs_dir: Path, folder: Path, task_dir: Path) -> Run:
    setting = methods(folder, run.prompt_set)[run.method]
    options = {"adaptive_sampling": "uniform", "num_generations": 1} | setting.fields
    if setting.method in ("GRPO", "DAPO"):
        options["scale_rewards"] = "group"
    rows = setting.trained if setting.method != "Rounds" else 1  # of a prompt in a step
    asked = rows if options["adaptive_sampling"] in ("uniform", "seq-pos") else setting.rollouts
    task = ADDITION._replace(
        read=lambda *_: (*(read(folder, run.prompt_set, part) for part in ("train", "test")), None)
    )
    record = train_once(run, options, round(ROLLOUTS_PER_STEP / asked), task_dir, STEPS, 20, task)
    with atomic_write(runs_dir / run.file_name) as temporary:
        temporary.write_text(json.dumps(run._asdict() | record | {"noise": setting.noise}))
    return run


def read(folder: Path, name: str, part: str):
    return prompt_sets.read(folder / f"{name}_{part}.jsonl").select_columns(["prompt", "answer"])


def results(runs_dir: Path) -> list[dict]:
    """One row per run: the noise that the plan expects, GRPO n=4's being 1, and what came out."""
    rows = []
    for path in sorted(runs_dir.glob("*.json")):
        record = json.loads(path.read_text())
        row = {name: record[name] for name in (*Run._fields, "noise")}
        row |= {"base": record["evaluations"][0]["accuracy"], "accuracy": record["evaluations"][-1]["accuracy"]}
        rows.append(row | {"rollouts": sum(step["rollouts"] for step in record["steps"])})
    return rows


def table(rows: list[dict]) -> str:
    """Final accuracy by file and method, and what it is ahead of the recommendation, paired by seed."""
    shown, frame = [], pd.DataFrame(rows)
    for name in FILES:
        own = frame[frame.prompt_set == name].pivot(index="seed", columns="method", values="accuracy")
        noise = frame[frame.prompt_set == name].groupby("method").noise.first()
        best = own[next(method for method in own if method.startswith("Posterior"))]
        for method in sorted(own, key=noise.__getitem__):
            mean, width = interval((own[method] - best).to_numpy())
            difference = "recommended" if method == best.name else f"{mean:+.3f} ± {width:.3f}"
            shown.append((name, method, noise[method], own[method].mean(), difference))
    columns = {"File": 0, "Method": 1, "Noise expected": 2, "Accuracy": 3, "Against the recommendation": 4}
    return markdown(
        [dict(enumerate(row)) for row in shown],
        {
            title: lambda row, i=i: f"{row[i]:.3f}" if isinstance(row[i], float) else row[i]
            for title, i in columns.items()
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=1, help="Processes; one core each.")
    parser.add_argument("--task_dir", type=Path, default=Path("outputs/arithmetic"), help="Base model and data.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning/planned"))
    parser.add_argument("--store", action="store_true", help="Only make the runs there are the stored results.")
    args = parser.parse_args()
    if args.store:
        fill(NAME, table(save_rows(results(args.output_dir), NAME)), PAGE)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prepare(args.task_dir)
    folder = args.task_dir / "planned"
    if not (folder / "even_train.jsonl").exists():  # written last
        build(args.task_dir / "base", folder)
    work = functools.partial(train_and_save, runs_dir=args.output_dir, folder=folder, task_dir=args.task_dir)
    runs = [Run(method, name, seed) for seed in args.seeds for name in FILES for method in methods(folder, name)]
    run_missing(runs, args.output_dir, work, args.workers)


if __name__ == "__main__":
    main()
