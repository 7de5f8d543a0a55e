"""Comparisons, tables and plans on runs small enough to compute by hand, and the generated documents."""

import math
import re

import pandas as pd
import pytest

from benchmarks import common, figures, names, plans, report
from benchmarks.comparisons import (
    ACCURACY,
    PASS_AT_16,
    SPEED,
    Comparison,
    by_seed,
    cost_to_reach,
    per_step,
)
from benchmarks.learning import confirmation, language_model, small_models
from benchmarks.learning.confirmation import PARTS
from benchmarks.learning.training import Run
from benchmarks.statistics import AS_FAST, BETTER, FASTER, SAME, SLOWER, interval


def run_rows(run: Run, accuracy: float, pass_at_16: float = 0.5, steps=(0, 1, 2)) -> list[dict]:
    """Evaluations of a run from accuracy 0.2 to `accuracy`, half of the way after half of the steps."""
    rows = []
    for step in steps:
        row = run._asdict() | {"step": step, "accuracy": 0.2 + (accuracy - 0.2) * step / steps[-1], "entropy": 0.5}
        row |= {"pass@16": 0.5 + (pass_at_16 - 0.5) * step / steps[-1], "generated_tokens": 1000 * step}
        row |= {"device": "CPU" if run.seed < 8 else "NVIDIA H200"}
        row |= {"completion_tokens": 30.0, "truncated": 0.1}
        row |= {"rollouts": 64 * step, "cpu_seconds": (2.0 + run.seed) * step, "frac_zero_advantage_groups": 0.75}
        rows += [row | {"family": "all"}, row | {"family": "clock"}]
    return rows


def evaluations(*runs: tuple[str, int, float]) -> pd.DataFrame:
    """Runs `(method, seed, final accuracy)`."""
    return pd.DataFrame(
        [row for method, seed, value in runs for row in run_rows(Run(method, "easy", seed, 2e-4), value)]
    )


GRPO = [(names.GRPO_4, seed, 0.30) for seed in (1, 2, 3)]


def compared(*accuracies: float) -> Comparison:
    """GRPO n=4 with a final accuracy of 0.30, and the batch baseline with the given ones."""
    rows = evaluations(*GRPO, *[(names.BATCH, seed, value) for seed, value in enumerate(accuracies, start=1)])
    return report.compare(rows, "easy", (names.GRPO_4, names.GRPO_8, names.BATCH))


# Comparisons


def test_cost_along_a_run():
    run = pd.DataFrame({"step": [0, 10, 20], "tokens": [0, 100, 400], "accuracy": [0.2, 0.4, 0.3]})
    assert cost_to_reach(run, "step", 0.3) == pytest.approx(5)  # the first time
    assert cost_to_reach(run, "tokens", 0.4) == pytest.approx(100)
    assert cost_to_reach(run, "tokens", 0.1) == 0
    assert cost_to_reach(run, "tokens", 0.41) == math.inf


def test_runs_are_selected_by_set_method_and_rate():
    rows = evaluations(*GRPO, (names.BATCH, 1, 0.4))
    assert set(by_seed(rows, "easy", names.GRPO_4)) == {1, 2, 3}
    assert by_seed(rows, "easy", names.GRPO_4, 1e-4) == by_seed(rows, "hard", names.GRPO_4) == {}
    assert by_seed(rows, "easy", names.BATCH, 2e-4)[1]["accuracy"].tolist() == pytest.approx([0.2, 0.3, 0.4])


def test_measures_of_a_run():
    (run,) = by_seed(evaluations((names.BATCH, 1, 0.4)), "easy", names.BATCH).values()
    assert (ACCURACY(run), PASS_AT_16(run)) == (0.4, 0.5)
    assert SPEED(run) == pytest.approx(0.35), "without the evaluation before training"
    assert per_step("cpu_seconds")(run) == 3.0


def test_differences_are_bold_and_put_in_words_by_the_same_test():
    better = compared(0.43, 0.44, 0.45)  # half an interval is 4.303 · 0.01 / √3 = 0.025
    assert better.cell(names.BATCH, ACCURACY) == "0.440 (**+0.140±0.025**)"
    assert better.words(names.BATCH, ACCURACY) == "significantly better than GRPO n=4 (+0.140±0.025)"
    assert compared(0.30, 0.31, 0.32).words(names.BATCH, ACCURACY) == f"{SAME} GRPO n=4 (+0.010±0.025)"
    assert compared(0.20, 0.20, 0.20).words(names.BATCH, ACCURACY) == (
        "significantly worse than GRPO n=4 (-0.100±0.000)"
    )
    assert compared(0.43, 0.44).words(names.BATCH, ACCURACY) == "not tested against GRPO n=4 (+0.135)"
    assert better.cell(names.GRPO_4, ACCURACY) == "0.300" and better.cell(names.GRPO_8, ACCURACY) == "–"


def test_share_of_tokens_is_relative_to_the_same_seed():
    # 0.30 is half of the way to 0.40, after 1,000 of 2,000 tokens.
    assert compared(0.40, 0.40, 0.40).share_of_tokens(names.BATCH) == "0.50±0.00"
    assert compared(0.40, 0.25, 0.40).share_of_tokens(names.BATCH) == "not reached by 1 of 3"


def test_table_of_a_comparison():
    found = compared(0.43, 0.44, 0.45)
    text = found.table({"Accuracy": lambda m: found.cell(m, ACCURACY)}, {"Accuracy": "accuracy"})
    assert text.splitlines()[2:] == [
        "| before training | 0.200 |",
        "| GRPO n=4 | 0.300 |",
        "| batch baseline, n=1 | 0.440 (**+0.140±0.025**) |",
    ]


# The planned confirmation


def planned(part: str, gains: dict[tuple[str, float], tuple[float, float]], noise: float = 0.001) -> list[dict]:
    """Rows of the runs of a part; `gains` in final accuracy and pass@16 over 0.3 and 0.5, with noise between seeds."""
    rows = []
    for run in PARTS[part].runs:
        accuracy, diversity = gains.get((run.method, run.rate), (0.0, 0.0))
        shift = noise * (run.seed % 2) * (run.method != names.GRPO_4)
        steps = (0, PARTS[part].steps // 2, PARTS[part].steps)
        rows += run_rows(run, 0.3 + accuracy + shift, 0.5 + diversity + shift, steps)
    return rows


RATE, RETRIES = confirmation.RATE, confirmation.RETRIES
FIRST_PLAN = confirmation.FIRST_PLAN


def plan_block(rows: pd.DataFrame) -> str:
    return plans.plan_block(FIRST_PLAN, rows)


def test_nothing_is_shown_before_the_last_run_of_a_part():
    assert "confirmation*: not finished: 0 of 30 runs." in plan_block(report.load("no such result"))
    rows = planned("confirmation", {(names.BATCH, RATE): (0.1, 0.0)})
    last = PARTS["confirmation"].runs[-1]
    is_last = [(row["method"], row["seed"], row["rate"]) == (last.method, last.seed, last.rate) for row in rows]
    without_end = [row for row, own in zip(rows, is_last, strict=True) if not (own and row["step"] == 150)]
    for unfinished in (without_end, [row for row, own in zip(rows, is_last, strict=True) if not own]):
        text = plan_block(pd.DataFrame(unfinished))
        assert text == (
            "*confirmation*: not finished: 29 of 30 runs.\n\n*group size*: not finished: 0 of 6 runs.\n\n"
            "*paper*: not finished: 0 of 12 runs."
        )


def test_runs_that_were_not_planned_do_not_count():
    rows = planned("paper", {})
    moved = [row | {"seed": row["seed"] + 10} for row in rows]
    assert "*paper*: not finished: 0 of 12 runs." in plan_block(pd.DataFrame(moved))


@pytest.mark.parametrize(
    ("gains", "speed", "holds"),
    [
        ({(names.BATCH, RATE): (0.04, 0.0), (RETRIES, RATE): (0.0, 0.1)}, FASTER, "holds"),
        ({(names.BATCH, RATE): (-0.04, 0.0), (RETRIES, RATE): (0.0, 0.0)}, SLOWER, "does not hold"),  # not higher
        ({(RETRIES, RATE): (-0.04, 0.1)}, AS_FAST, "does not hold"),  # the mean accuracy is lower by 0.03
        ({(RETRIES, RATE): (-0.008, 0.1)}, AS_FAST, "holds"),  # by 0.006, which is above -0.01
    ],
)
def test_endpoints_of_the_plan(gains, speed, holds):
    text = plan_block(pd.DataFrame(planned("confirmation", gains)))
    a, b = (line for line in text.splitlines() if line.startswith("- ("))
    assert a.startswith(f"- (a) {names.BATCH} {speed} {names.GRPO_4} (")
    assert b.startswith(f"- (b) {holds}: {RETRIES} against {names.GRPO_4}: ")
    assert "| GRPO n=4 at 5e-5 | " in text and "*group size*: not finished: 0 of 6 runs." in text


def test_the_better_rate_of_grpo_is_the_reference():
    gains = {(names.GRPO_4, confirmation.LOWER_RATE): (0.05, 0.0), (names.BATCH, RATE): (0.05, 0.0)}
    text = plan_block(pd.DataFrame(planned("confirmation", gains)))
    assert "Differences are from GRPO n=4 at 5e-5." in text
    assert "does not learn significantly faster than GRPO n=4 at 5e-5" in text


def test_the_group_size_is_compared_with_the_first_part_on_its_seeds():
    rows = planned("confirmation", {(names.BATCH, RATE): (0.05, 0.0)}) + planned("group size", {})
    text = plan_block(pd.DataFrame(rows)).split("**group size**")[1]
    assert f"| {names.BATCH_4} | " in text and f"| {names.BATCH} | " in text and f"| {names.GRPO_4} | 0.275 " in text
    baseline, prompts = (line for line in text.splitlines() if line.startswith("- "))
    assert baseline.startswith(f"- The baseline: {names.BATCH_4} {AS_FAST} {names.GRPO_4} (+0.000")
    assert prompts.startswith(
        f"- The number of prompts: {names.BATCH} {FASTER} {names.BATCH_4} (+0.0375"
    )  # 3/4 of 0.05


@pytest.mark.parametrize(
    ("gains", "rollouts", "is_met"),
    [
        ((-0.004, -0.009), 0.7, "met"),
        ((-0.02, 0.0), 0.7, "not met"),  # three quarters of it in the mean over the evaluations
        ((0.0, -0.02), 0.7, "not met"),
        ((0.0, 0.0), 1.0, "not met"),
    ],
)
def test_small_rounds_become_the_default_by_the_criterion_of_the_plan(gains, rollouts, is_met):
    method = names.SMALL_ROUNDS + language_model.PAPER_SUFFIX
    rows = planned("paper", {(method, RATE): gains}, noise=0)
    rows = [row | {"rollouts": row["rollouts"] * (rollouts if row["method"] == method else 1)} for row in rows]
    text = plan_block(pd.DataFrame(rows)).split("**paper**")[1]
    assert f"The criterion for another default is {is_met}: " in text and f", {rollouts:.2f} of its rollouts." in text


@pytest.mark.parametrize(
    ("gains", "number"),
    [
        ({1: (0.03, 0.0), 2: (0.02, 0.03), 3: (0.01, 0.05)}, 2),  # the largest gain of those with a higher pass@16
        (
            {1: (0.03, -0.005), 2: (0.02, 0.0), 3: (0.01, 0.0)},
            1,
        ),  # none is higher: the smallest that is not much lower
        ({1: (0.03, -0.03), 2: (0.02, -0.03), 3: (0.01, -0.03)}, None),
        ({1: (0.03, 0.02), 2: (0.02, 0.02), 3: (0.01, 0.05)}, 3),  # GRPO n=8 has a pass@16 that is higher by 0.03
    ],
)
def test_recommended_number_of_retries(gains, number):
    rows = planned("number of retries", {(names.batch_retries(n), RATE): gain for n, gain in gains.items()})
    if number == 3:
        rows = [row | {"pass@16": row["pass@16"] + 0.03 * (row["method"] == names.GRPO_8)} for row in rows]
    found = plans.part_comparison("number of retries", pd.DataFrame(rows))
    assert found is not None and plans.recommended_retries(found) == number
    text = plans.plan_block(["number of retries"], pd.DataFrame(rows))
    decision = f"{names.batch_retries(number)} is" if number else "no retries are"
    assert f"- By the rule of the second plan, {decision} recommended." in text


@pytest.mark.parametrize(
    ("retries", "est", "decision"),
    [
        ((0.0, 0.02), (0.02, 0.0), "no number of passes is named with retries, and Est (EMA) is named"),
        ((0.02, -0.02), (0.0, 0.0), "a number of passes is named with retries, and Est (EMA) is not named"),
        ((0.0, 0.0), (0.02, -0.02), "no number of passes is named with retries, and Est (EMA) is not named"),
    ],
)
def test_decisions_on_passes_over_the_data(retries, est, decision):
    gains = {(RETRIES, RATE): retries, (language_model.EST_EMA, RATE): est}
    rows = planned("passes over the data", gains)
    text = plans.plan_block(["passes over the data"], pd.DataFrame(rows))
    (line,) = (line for line in text.splitlines() if line.startswith("- "))
    assert line == f"- By the rule of the second plan, {decision} for several passes."
    # The same seeds of other parts have other problems.
    assert plans.part_comparison("number of retries", pd.DataFrame(rows)) is None


@pytest.mark.parametrize(
    ("retries", "decision"),
    [
        ((0.02, -0.02), "retries are recommended for short answers only"),
        ((-0.02, 0.02), "retries are recommended for short answers only"),
        ((0.02, 0.0), "the recommendation names both lengths"),
    ],
)
def test_decision_on_longer_answers(retries, decision):
    text = plans.plan_block(["longer answers"], pd.DataFrame(planned("longer answers", {(RETRIES, RATE): retries})))
    assert f"\n- By the rule of the second plan, {decision}.\n" in text
    assert f"{names.GRPO_4} 30.0 (10.0%; 0.50)" in text


def test_orders_of_the_longer_run_are_compared_by_seed():
    """Accuracy rises at a constant rate in the made-up runs, but for one with retries, which ends where it began."""
    ends = {names.BATCH: 0.34, RETRIES: 0.32, names.GRPO_4: 0.28, names.GRPO_8: 0.30}
    rows = []
    for run in PARTS["longer run"].runs:
        rows += run_rows(run, ends[run.method.removesuffix(language_model.LONGER_SUFFIX)], steps=(0, 150, 600))
    falls = (RETRIES + language_model.LONGER_SUFFIX, 22, 600)
    rows = [row | {"accuracy": 0.2} if (row["method"], row["seed"], row["step"]) == falls else row for row in rows]
    text = plans.plan_block(["longer run"], pd.DataFrame(rows))
    accuracy, diversity = (line for line in text.splitlines() if line.startswith("- Order by "))
    assert accuracy == (
        f"- Order by accuracy: after 150 steps {names.BATCH} (0.235), {RETRIES} (0.230), {names.GRPO_8} (0.225), "
        f"{names.GRPO_4} (0.220); after 600 steps {names.BATCH} (0.340), {names.GRPO_8} (0.300), {names.GRPO_4} "
        f"(0.280), {RETRIES} (0.260). "
        "It changes with 1 of 2 seeds."
    )
    assert diversity.endswith("It changes with 0 of 2 seeds.")


def test_methods_of_the_plan_exist_and_the_order_is_kept():
    assert tuple(PARTS) == FIRST_PLAN + confirmation.SECOND_PLAN + confirmation.THIRD_PLAN
    assert [len(part.runs) for part in PARTS.values()] == [30, 6, 12, 25, 9, 15, 8, 20, 15, 16]
    runs = {name: part.runs for name, part in PARTS.items()}
    first, second, third = (
        [run for name in plan for run in runs[name]]
        for plan in (FIRST_PLAN, confirmation.SECOND_PLAN, confirmation.THIRD_PLAN)
    )
    assert {run.method for run in first + second + third} <= set(language_model.METHODS)
    assert len(set(first + second)) == len(first + second)
    assert not {*first, *second} & set(third) and len(set(third)) == len(third)
    assert all(runs[name][0].method == names.batch_retries(2) for name in confirmation.THIRD_PLAN[:2])
    small_rounds = language_model.METHODS[names.SMALL_ROUNDS + language_model.PAPER_SUFFIX]
    assert [small_rounds[name] for name in ("samples_per_round", "min_positives", "min_negatives")] == [4, 1, 1]


# The third plan


def retried(part: str, gains: dict[int, tuple[float, float]], noise: float = 0.0) -> list[dict]:
    """Runs of a part with gains in accuracy and pass@16 by number of retries; the latter has ± noise between seeds."""
    rows = planned(part, {(names.batch_retries(n), RATE): gain for n, gain in gains.items()}, noise=0)
    varies = [names.batch_retries(n) for n in gains]
    return [
        row | {"pass@16": row["pass@16"] + noise * (-1) ** row["seed"] * (row["method"] in varies)} for row in rows
    ]


@pytest.mark.parametrize(
    ("gains", "noise", "number"),
    [
        ({1: (0.03, -0.02), 2: (0.02, 0.0), 3: (0.01, 0.03)}, 0.0, 2),  # the first one's pass@16 is too low
        ({1: (0.03, -0.005), 2: (0.02, 0.0), 3: (0.01, 0.03)}, 0.0, 1),  # lower, but by less than 0.01
        ({1: (0.03, -0.005), 2: (0.02, 0.0), 3: (0.01, 0.03)}, 0.01, 3),  # the lower bounds of two are below -0.01
        ({1: (0.03, -0.02), 2: (0.02, -0.02), 3: (0.01, -0.02)}, 0.0, None),
    ],
)
def test_number_of_retries_by_the_lower_bound_of_pass_at_16(gains, noise, number):
    rows = pd.DataFrame(retried("number of retries", gains, noise))
    found = plans.stored_part("number of retries", rows)
    assert plans.retries_by_lower_bound([found]) == number
    (line,) = (line for line in plans.third_plan_block(rows).splitlines() if line.startswith("| SmolLM2 |"))
    assert line.endswith(f"| {'none' if number is None else number} |")


def test_the_number_of_retries_is_that_of_all_seeds():
    """The second model has opposite gains, and the models disagree; nothing of it is used before its last run."""
    rows = retried("number of retries", {2: (0.03, 0.0)}) + retried(
        "second model family", {2: (-0.03, 0.0), 3: (0.01, 0.0)}
    )
    lines = plans.third_plan_block(pd.DataFrame(rows)).splitlines()
    numbers = {line.split(" | ")[0]: line.split(" | ")[-1] for line in lines if line.startswith("| ")}
    assert numbers["| SmolLM2"] == "2 |" and numbers["| Gemma"] == "3 |" and numbers["| both models"] == "3 |"
    parts = [plans.stored_part(name, pd.DataFrame(rows)) for name in ("number of retries", "second model family")]
    pooled = plans.pooled_gain(parts, names.batch_retries(2), ACCURACY)
    assert pooled == pytest.approx(interval([0.03] * 5 + [-0.03] * 5), abs=1e-12)
    unfinished = plans.third_plan_block(pd.DataFrame(rows[:-2]))
    assert "*second model family*: not finished: 15 of 16 runs." in unfinished and "| Gemma" not in unfinished


def test_the_better_grpo_is_that_of_the_seeds_of_both():
    """The seeds that GRPO n=8 lacks have a worse base model; over its own seeds, GRPO n=4 is the better one."""
    rows = planned("second model family", {(names.GRPO_8, RATE): (-0.01, 0.0)}, noise=0)
    rows = [row | {"accuracy": row["accuracy"] - 0.1 * (row["seed"] in (41, 42))} for row in rows]
    found = plans.stored_part("second model family", pd.DataFrame(rows))
    assert {method: len(own) for method, own in found.runs.items()} == {
        names.GRPO_4: 5, names.batch_retries(2): 5, names.GRPO_8: 3, RETRIES: 3
    }  # fmt: skip
    assert found.mean(names.GRPO_8, ACCURACY).mean > found.mean(names.GRPO_4, ACCURACY).mean
    assert plans.better_grpo(found, ACCURACY) == names.GRPO_4
    text = plans.plan_block(["second model family"], pd.DataFrame(rows))
    assert text.startswith("**second model family**, 150 steps, seeds 41 to 45 (41 and 42: two methods only).")


def test_a_part_may_have_another_rate_for_each_method(monkeypatch):
    part = PARTS["second model family"]
    methods = [(method, confirmation.LOWER_RATE if method == names.GRPO_8 else RATE) for method, _ in part.methods]
    monkeypatch.setitem(PARTS, "second model family", part._replace(methods=methods))
    found = plans.stored_part("second model family", pd.DataFrame(planned("second model family", {})))
    assert set(found.runs) == {names.GRPO_4, names.GRPO_8, names.batch_retries(2), RETRIES}


def test_runs_of_a_seed_have_one_base_model(monkeypatch):
    part = PARTS["repeated problems"]
    rows = planned("repeated problems", {})
    stored_24 = [row for row in rows if row["seed"] == 24 and row["method"] == names.GRPO_4]
    monkeypatch.setattr(confirmation, "load_rows", lambda *_, **__: stored_24)
    [start] = {row["accuracy"] for row in stored_24 if (row["step"], row["family"]) == (0, "all")}
    missing = [run for run in part.runs if run.method == RETRIES]
    confirmation.check_start(part, missing, start)
    confirmation.check_start(part, [run for run in missing if run.seed != 24], start + 0.01)
    with pytest.raises(SystemExit, match="with seed 24 started from a base model with accuracy"):
        confirmation.check_start(part, missing, start + 0.01)


def test_two_retries_are_compared_with_grpo_and_with_three():
    rows = retried("repeated problems", {2: (0.05, 0.0), 3: (0.02, 0.0)})
    text = plans.plan_block(["repeated problems"], pd.DataFrame(rows))
    grpo, three = (line for line in text.splitlines() if line.startswith("- "))
    assert f"{BETTER} {names.GRPO_4} (+0.05" in grpo and f"{BETTER} {RETRIES} (+0.030" in three


# Documents


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        *((name, methods) for name, methods in small_models.EXPERIMENTS.items()),
        ("language_model", language_model.METHODS),
        ("language_rates", language_model.EQUAL_TOKENS),
    ],
)
def test_stored_methods_exist(name, methods):
    assert {row["method"] for row in common.load_rows(name)} <= {*methods}


def test_documents_are_filled_from_stored_results():
    for document, texts in report.blocks().items():
        page = document.read_text(encoding="utf-8")
        for name, text in texts.items():
            (found,) = re.findall(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", page, flags=re.S)
            assert found == common.wrapped(text), f"{document.name}, {name}: run make report"


def test_figures_are_drawn_from_stored_results_with_few_lines():
    for name, figure in report.all_figures().items():
        assert (common.FIGURES / f"{name}.png").stat().st_size > 5000
        for axis in figure.axes:
            labels = [label for label in axis.get_legend_handles_labels()[1] if not label.startswith("_")]
            assert len(labels) <= 5, name


def test_figure_of_the_confirmation():
    found = plans.part_comparison("confirmation", pd.DataFrame(planned("confirmation", {})))
    assert found is not None
    drawn = figures.equal_tokens(found, (found.reference, names.BATCH, *figures.RETRIES))
    labels = drawn.axes[0].get_legend_handles_labels()[1]
    planned_retries = [method for method in figures.RETRIES if method != names.batch_retries(2)]
    assert labels == [names.GRPO_4, names.BATCH, *planned_retries]


def test_change_since_the_start_is_paired_by_seed():
    found = compared(0.21, 0.22, 0.23).change(names.BATCH, "accuracy")
    assert found.text(sign=True) == "+0.020±0.025" and not found.excludes_zero


def test_means_and_interval_of_a_curve():
    found = compared(0.43, 0.44, 0.45)
    means, halves = figures.means_by_step(found, names.BATCH, ("step", "accuracy"))
    assert means["step"].tolist() == [0, 1, 2]
    assert means["accuracy"].tolist() == pytest.approx([0.2, 0.32, 0.44])
    assert halves["accuracy"] == pytest.approx(0.0248, rel=0.01)
