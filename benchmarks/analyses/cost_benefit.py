"""
Accuracy against compute for each method and several mixes of difficulty, on a policy with exact pass rates.

A prompt is a feature vector. The policy is a softmax over eight answers, linear in the features, so all prompts share its
parameters and it generalises. The base policy is a noisy copy of the teacher that determines the correct answers. Rollouts,
pools, exit conditions, selection, advantages and budgets are those of `ada_trl.core`; held-out pass rates are computed, not
sampled. `python -m benchmarks.analyses.cost_benefit` writes `benchmarks/results/cost_benefit.parquet`,
`docs/figures/cost_benefit.png` and its table into `docs/reproducing_the_paper.md`; `--plot` uses the stored data.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tqdm import tqdm

from ada_trl.core import EMAPassRate, ExitCondition, Pool, Rollout, allocate, eliminate, group_advantages, select_group

from .. import names
from ..common import COLORS, ONE_ROUND, computed_or_stored, fill, interval, markdown, save_figure


FEATURES, ARMS = 128, 8
TRAIN, TEST = 2048, 1000
BATCH = 32  # prompts per step
BUDGET = 38_400  # rollouts: 300 steps of GRPO n=4, 75 of GRPO n=16
EVERY = 1_600  # rollouts between two evaluations
STEPS = 75  # of the comparison at equal steps
LEARNING_RATES = (0.01, 0.03, 0.1)
TUNING_SEED, SEEDS = 100, range(8)
MIXES = {"easy": (0.3, 1.0), "broad": (0.0, 1.0), "hard": (0.0, 0.125)}  # pass rates under the base policy


@dataclass(frozen=True)
class Method:
    """
    Options of a method, passed to `ada_trl.core`.

    Args:
        exit_condition, samples, rounds, trained:
            K, M, N and n. With `estimated`, `samples` is the mean budget of Est.
        weighting, correction:
            See [`~core.group_advantages`].
        divide_by_std (`bool`):
            Whether advantages are divided by the pool's standard deviation.
        refill_rounds (`int`):
            Rounds in which zero-variance groups are replaced by other prompts' groups (dynamic sampling).
        estimated (`bool`):
            Whether budgets are allocated by estimated pass rates (Est).
    """

    exit_condition: ExitCondition = ONE_ROUND
    samples: int = 4
    rounds: int = 1
    trained: int = 4
    weighting: str = "none"
    correction: bool = False
    divide_by_std: bool = False
    refill_rounds: int = 1
    estimated: bool = False


ADA = {"samples": 8, "rounds": 4, "weighting": "inverse_sqrt"}
BALANCE = ExitCondition(2, 2)
SMALL_QUOTA = f"{names.SEQ_BALANCE} (1/√p, M=4, K=1+1)"
METHODS = {
    names.GRPO_4: Method(divide_by_std=True),
    names.GRPO_8: Method(samples=8, trained=8, divide_by_std=True),
    names.GRPO_16: Method(samples=16, trained=16, divide_by_std=True),
    names.DAPO: Method(divide_by_std=True, refill_rounds=10),
    f"{names.SEQ_POS} (1/√p)": Method(ExitCondition(1), **ADA),
    names.HYBRID: Method(BALANCE, **ADA),
    names.ALGORITHM_2: Method(BALANCE, **ADA | {"weighting": "none"}),
    names.CORRECTED: Method(BALANCE, **ADA, correction=True),
    SMALL_QUOTA: Method(ExitCondition(1, 1), **ADA | {"samples": 4, "rounds": 8}),
    names.EST: Method(weighting="inverse_sqrt", estimated=True),
}
SHOWN = {  # in the figure: style
    names.GRPO_4: {"color": COLORS[names.GRPO_4]},
    names.GRPO_16: {"color": COLORS[names.GRPO_16]},
    names.DAPO: {"color": COLORS[names.DAPO], "linestyle": "--"},
    f"{names.SEQ_POS} (1/√p)": {"color": COLORS[names.SEQ_POS]},
    names.HYBRID: {"color": COLORS[names.SEQ_BALANCE]},
    SMALL_QUOTA: {"color": COLORS[names.SEQ_BALANCE], "linestyle": ":", "linewidth": 2.2},
}


@dataclass(frozen=True)
class Task:
    """
    Training and held-out prompts of one mix, and the base policy.

    Args:
        base (`np.ndarray`):
            Weights of the policy, `(ARMS, FEATURES)`.
        train, test (`np.ndarray`):
            Features, `(num_prompts, FEATURES)`.
        train_right, test_right (`np.ndarray`):
            The correct answers, `(num_prompts,)`.
    """

    base: np.ndarray
    train: np.ndarray
    train_right: np.ndarray
    test: np.ndarray
    test_right: np.ndarray


def probabilities(weights: np.ndarray, features: np.ndarray) -> np.ndarray:
    """π of each prompt, `(num_prompts, ARMS)`."""
    logits = features @ weights.T
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def make_task(mix: str, seed: int) -> Task:
    rng = np.random.default_rng([seed, 1])
    teacher = rng.normal(size=(ARMS, FEATURES)) / np.sqrt(FEATURES)
    base = 2.0 * teacher + 2.0 * rng.normal(size=teacher.shape) / np.sqrt(FEATURES)
    features = rng.normal(size=(12 * TRAIN, FEATURES))
    right = (features @ teacher.T).argmax(axis=1)
    pass_rates = probabilities(base, features)[np.arange(len(right)), right]
    low, high = MIXES[mix]
    kept = np.flatnonzero((pass_rates >= low) & (pass_rates <= high))[: TRAIN + TEST]
    train, test = kept[:TRAIN], kept[TRAIN:]
    return Task(base, features[train], right[train], features[test], right[test])


class Sampler:
    """Samples the pools of a step from the current policy."""

    def __init__(self, task: Task, method: Method, seed: int):
        self.task, self.method = task, method
        self.rng = np.random.default_rng([seed, 2])
        self.estimator = EMAPassRate(prior="empirical")
        self.order: list[int] = []
        self.step = 0

    def next_prompts(self, number: int) -> np.ndarray:
        if len(self.order) < number:
            self.order += self.rng.permutation(TRAIN).tolist()
        prompts, self.order = self.order[:number], self.order[number:]
        return np.array(prompts)

    def sample_pools(self, weights: np.ndarray, prompts: np.ndarray) -> list[Pool]:
        cumulative = probabilities(weights, self.task.train[prompts]).cumsum(axis=1)
        right = self.task.train_right[prompts]

        def sample_round(requests):
            index = np.array([position for position, _ in requests])
            answers = (cumulative[index] < self.rng.random(len(requests))[:, None]).sum(axis=1).clip(max=ARMS - 1)
            rewards = (answers == right[index]).astype(float).tolist()
            return [
                Rollout(n, reward, reward, location=answer)
                for (_, n), reward, answer in zip(requests, rewards, answers.tolist(), strict=True)
            ]

        return eliminate(
            len(prompts),
            sample_round,
            self.method.exit_condition,
            samples_per_round=self.sizes(prompts),
            max_rounds=self.method.rounds,
            positive_threshold=0.5,
        )

    def sizes(self, prompts: np.ndarray) -> int | list[int]:
        if not self.method.estimated:
            return self.method.samples
        estimates = self.estimator.predict([str(prompt) for prompt in prompts])
        return allocate(estimates, self.method.samples * len(prompts), min_samples=2, max_samples=32)

    def __call__(self, weights: np.ndarray) -> tuple[np.ndarray, list[Pool], int]:
        """Prompts and pools of the update, and the total number of sampled rollouts."""
        prompts, pools, num_rollouts = np.array([], dtype=int), [], 0
        for last in reversed(range(self.method.refill_rounds)):
            new = self.next_prompts(BATCH - len(prompts))
            new_pools = self.sample_pools(weights, new)
            num_rollouts += sum(map(len, new_pools))
            keep = [last == 0 or not pool.has_zero_variance or self.method.refill_rounds == 1 for pool in new_pools]
            prompts = np.concatenate([prompts, new[keep]])
            pools += [pool for pool, kept in zip(new_pools, keep, strict=True) if kept]
            if len(prompts) == BATCH:
                break
        if self.method.estimated:
            keys = [str(prompt) for prompt in prompts]
            counts = [pool.positives for pool in pools], [pool.scored for pool in pools]
            self.estimator.observe(keys, *counts, step=self.step)
        self.step += 1
        return prompts, pools, num_rollouts


def batch_gradient(
    task: Task, method: Method, weights: np.ndarray, prompts: np.ndarray, pools: list[Pool], seed: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """Mean of advantage × ∇ log π over all rollouts trained on, `(ARMS, FEATURES)`, and their number."""
    coefficients, trained = np.zeros((len(prompts), ARMS)), 0
    for i, pool in enumerate(pools):
        group = pool.rollouts if method.estimated else select_group(pool, method.trained, (*seed, i))
        advantages = group_advantages(
            pool,
            group,
            weighting=method.weighting,
            selection_correction=method.correction,
            std=pool.std if method.divide_by_std else None,
        )
        np.add.at(coefficients[i], [rollout.location for rollout in group], advantages)
        trained += len(group)
    features = task.train[prompts]
    scores = coefficients - coefficients.sum(axis=1, keepdims=True) * probabilities(weights, features)
    return scores.T @ features / trained, trained


def run(mix: str, name: str, seed: int, learning_rate: float) -> Iterator[dict]:
    """Train until the budget is spent. Yields an evaluation at every `EVERY` rollouts and after `STEPS` steps."""
    task, method = make_task(mix, seed), METHODS[name]
    weights = torch.tensor(task.base, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=learning_rate, maximize=True)
    sampler = Sampler(task, method, seed)
    generated = trained = zero_variance = 0
    next_evaluation = 0
    while True:
        if generated >= next_evaluation or sampler.step == STEPS:
            p = probabilities(weights.detach().numpy(), task.test)[np.arange(TEST), task.test_right]
            row = {"mix": mix, "method": name, "seed": seed, "learning_rate": learning_rate, "step": sampler.step}
            row |= {"generated": generated, "trained": trained, "accuracy": p.mean()}
            share = zero_variance / max(sampler.step, 1) / BATCH
            yield row | {"pass_at_8": (1 - (1 - p) ** 8).mean(), "frac_zero_variance": share}
            next_evaluation += EVERY * (generated >= next_evaluation)
        if generated >= BUDGET and sampler.step >= STEPS:
            return
        current = weights.detach().numpy()
        prompts, pools, num_rollouts = sampler(current)
        gradient, used = batch_gradient(task, method, current, prompts, pools, (seed, sampler.step))
        weights.grad = torch.from_numpy(gradient)
        optimizer.step()
        generated, trained = generated + num_rollouts, trained + used
        zero_variance += sum(pool.has_zero_variance for pool in pools)


def compute() -> list[dict]:
    """
    Train each method with two learning rates, tuned on an unreported seed: the best one at equal steps and the best one at
    equal rollouts, because runs with few steps need a larger rate.
    """
    rows = []
    for mix, name in tqdm([(mix, name) for mix in MIXES for name in METHODS]):
        tuning = {rate: list(run(mix, name, TUNING_SEED, rate)) for rate in LEARNING_RATES}
        for tuned_for, end in (("step", STEPS), ("generated", BUDGET)):
            best = max(tuning, key=lambda rate: at(tuning[rate], tuned_for, end, "accuracy"))
            for seed in SEEDS:
                again = [r for r in rows if is_run(r, mix, name, seed) and r["learning_rate"] == best]
                rows += [row | {"tuned_for": tuned_for} for row in again or run(mix, name, seed, best)]
    return rows


def is_run(row: dict, mix: str, name: str, seed: int) -> bool:
    return (row["mix"], row["method"], row["seed"]) == (mix, name, seed)


def at(rows: list[dict], axis: str, value: float, column: str) -> float:
    """A run's value of `column` at a number of steps, of generated rollouts, or of generated and trained rollouts."""
    x = [row["generated"] + row["trained"] if axis == "both" else row[axis] for row in rows]
    return float(np.interp(value, x, [row[column] for row in rows]))


def by_run(rows: list[dict]) -> dict[tuple, list[dict]]:
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["mix"], row["method"], row["seed"], row["tuned_for"]), []).append(row)
    return runs


def plot(rows: list[dict]) -> None:
    runs = by_run(rows)
    figure = Figure(figsize=(13, 7.6), layout="constrained")
    axes = figure.subplots(2, len(MIXES), sharey="col")
    for column, mix in enumerate(MIXES):
        for axis, x, end in zip(axes[:, column], ("step", "generated"), (STEPS, BUDGET), strict=True):
            grid = np.linspace(0, end, 40)
            for name, style in SHOWN.items():
                curves = [[at(runs[mix, name, seed, x], x, v, "accuracy") for v in grid] for seed in SEEDS]
                axis.plot(grid, np.mean(curves, axis=0), label=names.short(name), **style)
            equal = {"step": "equal steps", "generated": "equal rollouts"}[x]
            axis.set_title(f"{mix} (pass rates {MIXES[mix][0]:g} to {MIXES[mix][1]:g}), {equal}", fontsize="medium")
            axis.set_xlabel({"step": "Optimizer steps", "generated": "Generated rollouts"}[x])
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("Held-out mean pass rate")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, "cost_benefit")


def table(rows: list[dict]) -> str:
    """Held-out accuracy at equal steps, at equal generated rollouts, and at equal generated and trained rollouts."""
    runs = by_run(rows)

    def own(row, axis):
        return [runs[row["mix"], row["method"], seed, "step" if axis == "step" else "generated"] for seed in SEEDS]

    def values(row, axis, end, column):
        return np.array([at(rows, axis, end, column) for rows in own(row, axis)])

    def show(axis, end):
        def cell(row):
            mine, reference = (values(r, axis, end, "accuracy") for r in (row, row | {"method": names.GRPO_4}))
            if row["method"] == names.GRPO_4:
                return f"{mine.mean():.3f}"
            gain, half = interval(mine - reference)
            return f"{mine.mean():.3f} ({gain:+.3f} ± {half:.3f})"

        return cell

    columns = {
        "Method": lambda row: row["method"],
        "Learning rates": lambda row: " / ".join(
            str(own(row, x)[0][0]["learning_rate"]) for x in ("step", "generated")
        ),
        f"{STEPS} steps": show("step", STEPS),
        "rollouts in these steps": lambda row: f"{values(row, 'step', STEPS, 'generated').mean():,.0f}",
        f"{BUDGET:,} generated": show("generated", BUDGET),
        f"{BUDGET:,} generated + trained": show("both", BUDGET),
        "pass@8": lambda row: f"{values(row, 'generated', BUDGET, 'pass_at_8').mean():.3f}",
        "Zero-variance groups": lambda row: f"{values(row, 'generated', BUDGET, 'frac_zero_variance').mean():.0%}",
    }
    parts = [f"**{mix}**\n\n" + markdown([{"mix": mix, "method": m} for m in METHODS], columns) for mix in MIXES]
    return "\n\n".join(parts)


def main() -> None:
    rows = computed_or_stored("cost_benefit", compute, __doc__)
    plot(rows)
    fill("cost-benefit", table(rows))


if __name__ == "__main__":
    main()
