"""
Prediction error of pass rates whose counts are discounted per visit of a prompt, compared with discounting per step.

`python -m benchmarks.analyses.discounting` prints the excess Brier score, mean (p̂ − p)², on a simulated policy that changes: all
prompts together, each prompt independently, or a prompt only when it is visited; in shuffled epochs, and with prompts that are
sampled much more often than others. `--recorded FILE …` uses the rollouts of runs instead (one JSON line per step: step, keys,
positives, rollouts) and prints the Brier score. The grid of discounts is the same, per visit and per mean interval of visits.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ada_trl.core import EMAPassRate, brier_metrics
from ada_trl.utils.tables import markdown_table


DECAYS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # per visit, or per mean interval between visits
PRIOR = (1.0, 1.5)  # of both, not tuned
PROMPTS, PER_STEP, STEPS, SEEDS = 512, 32, 240, 3


class ByVisits(EMAPassRate):
    """Counts as kept by `ada_trl`: discounted at each visit."""

    def __init__(self, decay: float):
        super().__init__(decay=decay, alpha=PRIOR[0], beta=PRIOR[1])

    def forget(self, keys: Sequence[str], step: int) -> None:
        """Discount old counts before a visit. Does nothing here, because they are discounted in the visit."""


class BySteps(ByVisits):
    """Counts that are multiplied by decay^t after t steps."""

    def forget(self, keys: Sequence[str], step: int) -> None:
        for counts in self.get_counts(keys):
            factor = self.decay ** max(step - counts.last_step - 1, 0)  # the visit itself is the last one
            counts.discounted_rollouts *= factor
            counts.discounted_positives *= factor
            counts.last_step = max(step - 1, 0)


class Step(NamedTuple):
    """Prompts sampled in one step, their positives and rollouts, and the true pass rates where available."""

    step: int
    keys: list[str]
    positives: list[int]
    draws: list[int]
    truth: np.ndarray | None = None


def simulated(drift: str, visits: str, draws: int, seed: int) -> Iterator[Step]:
    """A policy whose log-odds increase by 3 over the run, with noise, on all prompts or on the visited ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.5, PROMPTS)
    shares = np.ones(PROMPTS) if visits == "epochs" else rng.gamma(0.5, size=PROMPTS)
    order: list[int] = []
    for step in range(1, STEPS + 1):
        if visits == "epochs":
            order = order or rng.permutation(PROMPTS).tolist()
            sampled, order = np.array(order[:PER_STEP]), order[PER_STEP:]
        else:
            sampled = rng.choice(PROMPTS, PER_STEP, replace=False, p=shares / shares.sum())
        p = 1 / (1 + np.exp(-logits[sampled]))
        yield Step(step, list(map(str, sampled)), rng.binomial(draws, p).tolist(), [draws] * PER_STEP, p)
        if drift == "visited":
            logits[sampled] += 3 / (STEPS * PER_STEP / PROMPTS)
        else:
            logits += 3 / STEPS if drift == "together" else rng.normal(3 / STEPS, 0.15, PROMPTS)


def score(tracker: ByVisits, steps: Sequence[Step]) -> float:
    """Mean over rollouts of (p̂ − p)², or of (p̂ − y)² where p is unknown; for prompts with earlier visits."""
    total = rollouts = 0.0
    for step in steps:
        tracker.forget(step.keys, step.step)
        seen = np.array([counts.num_rollouts > 0 for counts in tracker.get_counts(step.keys)])
        p, k, n = (np.array(values)[seen] for values in (tracker.predict(step.keys), step.positives, step.draws))
        if seen.any():
            error = brier_metrics(p, k, n)["brier"] if step.truth is None else np.mean((p - step.truth[seen]) ** 2)
            total, rollouts = total + n.sum() * error, rollouts + n.sum()
        tracker.observe(step.keys, step.positives, step.draws, step=step.step)
    return total / rollouts


def compare(runs: Sequence[Sequence[Step]]) -> list[str]:
    """Scores of the discount per visit at 0.9 (the default), and of both discounts at their best value."""
    interval = np.mean(
        [len({key for s in run for key in s.keys}) / np.mean([len(s.keys) for s in run]) for run in runs]
    )
    visits = {decay: np.mean([score(ByVisits(decay), run) for run in runs]) for decay in DECAYS}
    steps = {decay: np.mean([score(BySteps(decay ** (1 / interval)), run) for run in runs]) for decay in DECAYS}
    best = [min(found, key=found.get) for found in (visits, steps)]
    return [
        f"{visits[0.9]:.5f}",
        *(f"{found[decay]:.5f} ({decay})" for found, decay in zip((visits, steps), best, strict=True)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, nargs="*", default=[])
    rows = []
    for path in parser.parse_args().recorded:
        run = [Step(*json.loads(line)) for line in path.read_text().splitlines()]
        rows.append([path.stem, *compare([run])])
    if not rows:
        for draws in (1, 4):
            for visits in ("epochs", "unequal"):
                for drift in ("together", "alone", "visited"):
                    runs = [list(simulated(drift, visits, draws, seed)) for seed in range(SEEDS)]
                    rows.append([f"{drift}, {visits}, n={draws}", *compare(runs)])
    print(markdown_table(["Drift, visits", "by visits, 0.9", "by visits, best", "by steps, best"], rows))


if __name__ == "__main__":
    main()
