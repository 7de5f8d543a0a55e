"""The exactly solvable models of benchmarks/: gradients, moments, and the documents that show them."""

import itertools
import math

import numpy as np
import pytest
import torch

from ada_trl.core import Candidate, Slot, SlotRule, collect_rollouts, pool_advantages, sampled_prompts, select_groups
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


ONE = {"min_positives": 1, "min_negatives": 1}
SMALL = {
    "balance": variance.Estimator(ONE | {"samples_per_round": 2, "max_rounds": 2}, 2),
    "weighted": variance.Estimator(ONE | {"samples_per_round": 2, "max_rounds": 2}, 2, weighting="inverse"),
    "one round": variance.Estimator({"samples_per_round": 3}, 2, weighting="inverse_sqrt"),
    "std": variance.Estimator({"samples_per_round": 3}, 3, scale="group"),
}


@pytest.mark.parametrize("name", SMALL)
def test_moments_agree_with_listing_every_sequence_of_answers(name):
    """
    All answers to all draws, each a slot. Which rollouts of a side are selected is random and the answers are
    exchangeable, so averaging over the sequences averages over the selection too.
    """
    estimator, pi = SMALL[name], variance.policy(0.3)
    sampling = {"min_positives": 0, "min_negatives": 0, "max_rounds": 1} | estimator.sampling
    m = sampling.pop("samples_per_round")
    answers = np.array(list(itertools.product(range(4), repeat=m * sampling["max_rounds"])))
    slots = [Slot(SlotRule(**sampling), common.BINARY, [Candidate(0)], m) for _ in answers]
    for slot, sequence in zip(slots, answers, strict=True):
        while not slot.done:
            slot.add_round(sequence[slot.num_rollouts :][:m, None] == 0)
    rollouts = collect_rollouts(slots, sampled_prompts(slots))
    group = select_groups(rollouts, estimator.num_generations, [(0,)] * len(slots))
    advantages = pool_advantages(rollouts, weighting=estimator.weighting, scale=estimator.scale)[group]
    scores = autograd_scores(pi)[answers[rollouts.prompt_N, rollouts.draw_N]][group]
    gradients = (advantages[:, None] * scores).reshape(len(slots), -1, len(pi)).mean(axis=1)
    probability = pi[answers].prod(axis=1)
    mean = probability @ gradients
    exact = variance.moments(estimator, pi)
    assert exact[0] == pytest.approx(mean)
    assert exact[1] == pytest.approx(probability @ (gradients**2).sum(axis=1) - mean @ mean)
    assert exact[2] == pytest.approx(probability @ rollouts.size_P)


# The paper's closed forms


def test_rollouts_by_exit_condition_are_those_of_the_paper():
    """
    K = 1: the expected rounds of Seq-pos are a geometric series;
    Seq-balance needs both kinds, so it is symmetric in p.
    """
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
        (common.ARCHIVE, "signal-loss", signal_loss.table),
        (common.ARCHIVE, "variance", variance.table),
        (baselines.DOCUMENT, "baselines", lambda: f"{baselines.table()}\n\n{baselines.sentences()}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_documents_show_the_closed_forms(page, marker, text):
    assert f"<!-- {marker} -->\n{common.wrapped(text())}\n<!-- end -->" in page.read_text(encoding="utf-8")


def test_a_missing_place_in_the_document_is_named(tmp_path, monkeypatch):
    document = tmp_path / "README.md"
    document.write_text("<!-- a -->\nold\n<!-- end -->\n\n<!-- b -->\n<!-- end -->\n")
    monkeypatch.setattr(common, "ARCHIVE", document)
    common.fill("a", "new")
    common.fill("b", r"a \1 table")
    assert document.read_text() == "<!-- a -->\nnew\n<!-- end -->\n\n<!-- b -->\na \\1 table\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places marked 'c'"):
        common.fill("c", "new")
