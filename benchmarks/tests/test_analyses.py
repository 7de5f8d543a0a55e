"""The exactly solvable models of benchmarks/: gradients, moments, and documents that show the stored data."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from ada_trl.core import ExitCondition, Rollout, eliminate, group_advantages, select_group
from benchmarks import common, names
from benchmarks.analyses import baselines, closed_forms, signal_loss, variance


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
    std = pool.std if estimator.divide_by_std else None
    values = group_advantages(pool, group, weighting=estimator.weighting, std=std)
    return np.mean([a * scores[rollout.location] for a, rollout in zip(values, group, strict=True)], axis=0)


SMALL = {
    "balance": variance.Estimator(ExitCondition(1, 1), 2, 2, 2),
    "weighted": variance.Estimator(ExitCondition(1, 1), 2, 2, 2, weighting="inverse"),
    "one round": variance.Estimator(ExitCondition(1, 1), 3, 1, 2, weighting="inverse_sqrt"),
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
        (names.ALGORITHM_2, "no prompt weight (Algorithm 2), relative to 1", 0),
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


# The paper's closed forms


def test_rollouts_by_exit_condition_are_those_of_the_paper():
    """K = 1: the expected rounds of Seq-pos are a geometric series; Seq-balance needs both kinds, so it is symmetric in p."""
    p = np.array([0.1, 0.5, 0.9])
    rounds = (1 - (1 - p) ** 32) / (1 - (1 - p) ** 4)
    assert closed_forms.cost("Seq-pos", 1, 32, p).rollouts == pytest.approx(4 * rounds)
    balance = closed_forms.cost("Seq-balance", 2, 64, p).rollouts
    assert balance[0] == pytest.approx(balance[2]) and balance[1] < balance[0]


def test_allocations_use_the_budget():
    for rates, sizes in closed_forms.allocations().values():
        assert sum(sizes) == closed_forms.TOTAL and len(sizes) == len(rates)


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

    for p in (0.05, 0.3, 0.8):
        cases = {
            "GRPO n=2, no std normalization": needed(2, p, group),
            f"{names.BATCH}, mean reward 0.2": needed(1, p, lambda y, others: y - 0.2),
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
        (baselines.DOCUMENT, "baselines", lambda: f"{baselines.table()}\n\n{baselines.sentences()}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_documents_show_closed_forms_and_stored_data(page, marker, text):
    assert f"<!-- {marker} -->\n{text()}\n<!-- end -->" in page.read_text()


def test_stored_curves_are_those_of_the_code():
    """A few points are computed again, so that a change of the core without new analyses fails."""
    stored = {(r["method"], r["pass_rate"]): r for r in common.load_rows("signal_loss")}
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
