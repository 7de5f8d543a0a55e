"""The exactly solvable models of benchmarks/: gradients, moments, and documents that show the stored data."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from ada_trl.core import ExitCondition, Rollout, eliminate, group_advantages, select_group
from benchmarks import common, names
from benchmarks.analyses import (
    baselines,
    cost_benefit,
    paper,
    sampling_cost,
    signal_loss,
    variance,
)


UNWEIGHTED_CORRECTED = f"{names.SEQ_BALANCE} (no weight, corrected)"
OBJECTIVES = {"p": lambda p: p, "√p": lambda p: 2 * torch.sqrt(p), "log p": torch.log}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_the_gradient_of_each_objective_agrees_with_autograd(objective, p):
    pi = variance.policy(p)
    logits = torch.tensor(np.log(pi), requires_grad=True)
    OBJECTIVES[objective](torch.softmax(logits, 0)[0]).backward()
    exact = p ** variance.OBJECTIVES[objective] * variance.pass_rate_gradient(pi)
    assert exact == pytest.approx(logits.grad.numpy())


def autograd_scores(pi):
    """∇ log π of each answer, `(ARMS, ARMS)`."""
    logits = torch.tensor(np.log(pi))
    return torch.autograd.functional.jacobian(lambda x: torch.log_softmax(x, 0), logits).numpy()


def draw_pool(answers, estimator):
    rewards = [float(answer == 0) for answer in answers]
    rollouts = [Rollout(i, r, r, location=a) for i, (r, a) in enumerate(zip(rewards, answers, strict=True))]
    return eliminate(
        1,
        lambda rows: [rollouts[draw] for _, draw in rows],
        estimator.exit_condition,
        samples_per_round=estimator.samples_per_round,
        max_rounds=estimator.max_rounds,
        positive_threshold=0.5,
    )[0]


def estimate(pool, estimator, scores, seed):
    group = select_group(pool, estimator.num_generations, seed)
    options = {"weighting": estimator.weighting, "selection_correction": estimator.selection_correction}
    values = group_advantages(pool, group, std=pool.std if estimator.divide_by_std else None, **options)
    return np.mean([a * scores[rollout.location] for a, rollout in zip(values, group, strict=True)], axis=0)


SMALL = {
    "balance": variance.Estimator(ExitCondition(1, 1), 2, 2, 2),
    "weighted": variance.Estimator(ExitCondition(1, 1), 2, 2, 2, weighting="inverse"),
    "corrected": variance.Estimator(ExitCondition(1, 1), 3, 1, 2, weighting="inverse_sqrt", selection_correction=True),
    "std": variance.Estimator(ExitCondition(0), 3, 1, 3, divide_by_std=True),
}


@pytest.mark.parametrize("name", SMALL)
def test_moments_agree_with_listing_every_sequence_of_answers(name):
    """
    All answers to all draws, each through the real scheduler. Which rollouts of a side are selected is random and the
    answers are exchangeable, so averaging over the sequences averages over the selection too.
    """
    estimator, pi = SMALL[name], variance.policy(0.3)
    scores = autograd_scores(pi)
    mean, square, rollouts = np.zeros(4), 0.0, 0.0
    for answers in itertools.product(range(4), repeat=estimator.samples_per_round * estimator.max_rounds):
        probability = np.prod(pi[list(answers)])
        pool = draw_pool(answers, estimator)
        gradient = estimate(pool, estimator, scores, (0,))
        mean, square = mean + probability * gradient, square + probability * gradient @ gradient
        rollouts += probability * len(pool)
    exact = variance.moments(estimator, pi)
    assert exact[0] == pytest.approx(mean)
    assert exact[1] == pytest.approx(square - mean @ mean)
    assert exact[2] == pytest.approx(rollouts)


@pytest.mark.parametrize(
    ("name", "label", "power"),
    [
        (names.HYBRID, "1/√p̂ (default), relative to 1/√p", -0.5),
        (names.CORRECTED, "1/√p̂ with correction, relative to 1/√p", -0.5),
        (UNWEIGHTED_CORRECTED, "no prompt weight, with correction, relative to 1", 0),
    ],
)
def test_documented_effective_weights_are_exact(name, label, power):
    """The table in docs/method.md, relative to the configured weight p^power."""
    text = (common.ROOT / "docs" / "method.md").read_text()
    (rates,) = re.findall(r"^\| Effective weight at a pass rate of \|(.*)\|$", text, flags=re.M)
    (documented,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", text, flags=re.M)
    for p, stated in zip(map(float, rates.split("|")), documented.split("|"), strict=True):
        pi = variance.policy(p)
        gradient, (mean, *_) = variance.pass_rate_gradient(pi), variance.moments(variance.ESTIMATORS[name], pi)
        assert f"{mean @ gradient / (gradient @ gradient) / p**power:.2f}" == stated.strip()
        assert power or p == 0.95 or stated.strip() in group_advantages.__doc__


def test_a_floor_bounds_the_weight():
    floored = variance.ESTIMATORS[f"{names.SEQ_BALANCE} (1/p, floor 0.1)"]
    for positives, floor_applies in ((1, True), (16, False)):
        with_floor = variance.advantages(floored, 32, positives)
        without = variance.advantages(variance.ESTIMATORS[f"{names.SEQ_BALANCE} (1/p)"], 32, positives)
        factor = (positives / 32) / 0.1 if floor_applies else 1
        assert with_floor[0] == pytest.approx(factor * without[0])


# The linear policy of the cost-benefit analysis


@pytest.fixture
def task():
    return cost_benefit.make_task("broad", 3)


@pytest.mark.parametrize("name", [names.GRPO_4, names.HYBRID, names.CORRECTED, names.EST])
def test_the_batch_gradient_agrees_with_autograd(task, name):
    method = cost_benefit.METHODS[name]
    prompts, pools, _ = cost_benefit.Sampler(task, method, 0)(task.base)
    gradient, trained = cost_benefit.batch_gradient(task, method, task.base, prompts, pools, (1,))
    weights = torch.tensor(task.base, requires_grad=True)
    log_pi = torch.log_softmax(torch.tensor(task.train[prompts]) @ weights.T, dim=1)
    loss, rows = 0.0, 0
    for i, pool in enumerate(pools):
        group = pool.rollouts if method.estimated else select_group(pool, method.trained, (1, i))
        std = pool.std if method.divide_by_std else None
        options = {"weighting": method.weighting, "selection_correction": method.correction, "std": std}
        for rollout, advantage in zip(group, group_advantages(pool, group, **options), strict=True):
            loss, rows = loss + advantage * log_pi[i, rollout.location], rows + 1
    (loss / rows).backward()
    assert trained == rows
    assert np.abs(weights.grad.numpy()).max() > 1e-3
    assert gradient == pytest.approx(weights.grad.numpy())


def test_methods_sample_the_stated_numbers_of_rollouts(task):
    cost = {}
    for name, method in cost_benefit.METHODS.items():
        prompts, pools, drawn = cost_benefit.Sampler(task, method, 0)(task.base)
        assert len(prompts) == len(pools) == cost_benefit.BATCH
        assert name != names.DAPO or not any(pool.has_zero_variance for pool in pools)
        cost[name] = drawn / cost_benefit.BATCH
    assert (cost[names.GRPO_4], cost[names.GRPO_16], cost[names.EST]) == (4, 16, 4)
    assert 8 <= cost[f"{names.SEQ_POS} (1/√p)"] < cost[names.HYBRID] < 32
    assert cost[names.DAPO] > 4


def test_a_mix_keeps_its_range_and_the_test_set_apart():
    low, high = cost_benefit.MIXES["hard"]
    task = cost_benefit.make_task("hard", 0)
    p = cost_benefit.probabilities(task.base, task.train)[np.arange(cost_benefit.TRAIN), task.train_right]
    assert low <= p.min() and p.max() <= high
    assert len(task.test) == cost_benefit.TEST
    assert not set(task.test[:, 0]) & set(task.train[:, 0])


def test_runs_learn_and_repeat(monkeypatch):
    for name, value in {"BUDGET": 3200, "EVERY": 800, "STEPS": 5, "FEATURES": 16}.items():
        monkeypatch.setattr(cost_benefit, name, value)
    rows = list(cost_benefit.run("broad", names.HYBRID, 0, 0.03))
    assert rows == list(cost_benefit.run("broad", names.HYBRID, 0, 0.03))
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.02
    assert rows[-1]["generated"] >= 3200 and 5 in [row["step"] for row in rows]
    assert cost_benefit.at(rows, "generated", 0, "accuracy") == rows[0]["accuracy"]


# The paper's closed forms


def test_the_sampling_cost_of_the_prompts_of_a_run(tmp_path, monkeypatch, capsys):
    run = common.ROOT / "notebooks" / "data" / "seq-balance"
    monkeypatch.setattr("sys.argv", ["sampling_cost", "--pass-rates", str(run)])
    sampling_cost.main()
    shown = capsys.readouterr().out
    rates, weights = paper.read_difficulty(run)
    lost, rollouts, _ = (weights @ values for values in sampling_cost.cost("Seq-balance", 1, 32, rates))
    assert f"| Seq-balance, N_max = 32, M = 4 | {rollouts:.1f} ({lost:.1%}) |" in shown
    monkeypatch.setattr("sys.argv", ["sampling_cost", "--pass-rates", str(tmp_path)])
    with pytest.raises(SystemExit):
        sampling_cost.main()


# Baselines


def test_noise_of_baselines_agrees_with_listing_all_rewards():
    """Rollouts · E[Σ A²] / E[Σ A (y − p)]² of groups of binary rewards, relative to the group mean with n = 4."""

    def needed(n, p, advantage):
        signal = power = 0.0
        for rewards in itertools.product((0, 1), repeat=n):
            probability = math.prod(p if reward else 1 - p for reward in rewards)
            values = [advantage(reward, [*rewards[:i], *rewards[i + 1 :]]) for i, reward in enumerate(rewards)]
            signal += probability * sum(a * (y - p) for a, y in zip(values, rewards, strict=True))
            power += probability * sum(a * a for a in values)
        return n * power / signal**2

    def group(reward, others):
        return reward - (reward + sum(others)) / (1 + len(others))

    strength = baselines.PSEUDO_COUNTS
    for p in (0.05, 0.3, 0.8):
        prior = 2 * p / (1 + p)  # odds doubled
        cases = {
            "GRPO n=2, no std normalization": needed(2, p, group),
            f"{names.BATCH}, mean reward 0.2": needed(1, p, lambda y, others: y - 0.2),
            f"{names.POSTERIOR}, prior odds doubled": needed(1, p, lambda y, others, m=prior: y - m),
            "posterior baseline, n=4, correct prior": needed(
                4, p, lambda y, others, p=p: y - (strength * p + sum(others)) / (strength + len(others))
            ),
        }
        for name, value in cases.items():
            found = baselines.rollouts_for_equal_noise(name, np.array([p])).item()
            assert found == pytest.approx(value / needed(4, p, group), rel=1e-6), name


# The document


@pytest.mark.parametrize(
    ("page", "marker", "text"),
    [
        (common.DOCUMENT, "signal-loss", lambda: signal_loss.table(common.load_rows("signal_loss"))),
        (common.DOCUMENT, "variance", lambda: variance.table(common.load_rows("variance"))),
        (common.DOCUMENT, "cost-benefit", lambda: cost_benefit.table(common.load_rows("cost_benefit"))),
        (common.DOCUMENT, "sampling-cost", lambda: sampling_cost.table(sampling_cost.at_pass_rates)),
        (baselines.DOCUMENT, "baselines", lambda: f"{baselines.table()}\n\n{baselines.sentences()}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_documents_show_closed_forms_and_stored_data(page, marker, text):
    assert f"<!-- {marker} -->\n{text()}\n<!-- end -->" in page.read_text()


def test_stored_curves_are_those_of_the_code():
    """A few points are computed again, so that a change of the core without new analyses fails."""
    stored = {(r["method"], r["pass_rate"]): r for r in common.load_rows("signal_loss") if r["part"] == "pass_rate"}
    for method in signal_loss.METHODS:
        zero, rollouts, _ = signal_loss.expected(method, np.array(signal_loss.TABLE_RATES))
        for i, p in enumerate(signal_loss.TABLE_RATES):
            assert stored[method, p]["frac_zero_variance"] == pytest.approx(zero[i])
            assert stored[method, p]["rollouts"] == pytest.approx(rollouts[i])
    stored = {(r["estimator"], r["pass_rate"]): r["weight"] for r in common.load_rows("variance")}
    for name, estimator in variance.ESTIMATORS.items():
        gradient = variance.pass_rate_gradient(variance.policy(0.1))
        mean, _, _ = variance.moments(estimator, variance.policy(0.1))
        assert stored[name, 0.1] == pytest.approx(mean @ gradient / (gradient @ gradient))


def test_a_missing_place_in_the_document_is_named(tmp_path, monkeypatch):
    document = tmp_path / "reproducing_the_paper.md"
    document.write_text("<!-- a -->\nold\n<!-- end -->\n\n<!-- b -->\n<!-- end -->\n")
    monkeypatch.setattr(common, "DOCUMENT", document)
    common.fill("a", "new")
    common.fill("b", r"a \1 table")
    assert document.read_text() == "<!-- a -->\nnew\n<!-- end -->\n\n<!-- b -->\na \\1 table\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places marked 'c'"):
        common.fill("c", "new")
