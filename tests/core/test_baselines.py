"""The posterior baseline: unbiased for any prior, any rewards, any stopping rule; exact enumeration throughout."""

import itertools
import math

import numpy as np
import pytest

from ada_trl.core import ExitCondition, Pool, Rollout, prompt_weight
from ada_trl.core import baselines as module
from ada_trl.core.baselines import BaselineEstimate, explained_variance, posterior_advantages, posterior_baselines


PRIORS = [
    BaselineEstimate(0.5, 0, 0.5),
    BaselineEstimate(0.3, 4, 0.3),
    BaselineEstimate(-7.0, 2.5, 0.9),
    BaselineEstimate(0.2, math.inf, 0.05),
]
WEIGHTED = list(zip(PRIORS, ("none", "inverse_sqrt", "inverse", "inverse_sqrt"), strict=True))
SHAPES = {  # exit condition, samples per round, rounds
    "uniform n=1": (ExitCondition(0), 1, 1),
    "uniform n=3": (ExitCondition(0), 3, 1),
    "seq-pos M=1": (ExitCondition(1), 1, 5),
    "seq-pos M=2": (ExitCondition(1), 2, 3),
    "seq-balance": (ExitCondition(1, 1), 2, 3),
    "seq-balance M=3": (ExitCondition(2, 1), 3, 2),
}
ANSWERS = {  # probability and reward of each answer of a softmax policy; a reward above 0.7 is positive
    "binary": ([0.3, 0.7], [1.0, 0.0]),
    "hard": ([0.05, 0.95], [1.0, 0.0]),
    "real": ([0.2, 0.5, 0.3], [1.5, 0.4, -1.0]),
}


def every_pool(probabilities, rewards, exit_condition, samples_per_round, max_rounds):
    """All pools that sampling can end with, the answers drawn and the probability of each."""
    stack = [((), 1.0)]
    while stack:
        answers, probability = stack.pop()
        for more in itertools.product(range(len(rewards)), repeat=samples_per_round):
            drawn = answers + more
            p = probability * math.prod(probabilities[a] for a in more)
            pool = Pool(0.7, (Rollout(i, rewards[a], rewards[a]) for i, a in enumerate(drawn)))
            if exit_condition(pool) or len(drawn) == samples_per_round * max_rounds:
                yield pool, drawn, p
            else:
                stack.append((drawn, p))


def expectations(answers, shape, to_advantages):
    """E[Σ A_i ∇log π(y_i)] by logit, and E[N], exactly."""
    probabilities, rewards = map(np.array, ANSWERS[answers])
    gradient, draws = np.zeros(len(rewards)), 0.0
    for pool, drawn, p in every_pool(probabilities, rewards, *SHAPES[shape]):
        for advantage, answer in zip(to_advantages(pool), drawn, strict=True):
            gradient += p * advantage * (np.eye(len(rewards))[answer] - probabilities)
        draws += p * len(pool)
    return gradient, draws


def round_by_round(pool, prior, size, **options):
    """As across steps: each round is compared with a prior that has seen the rounds before it."""
    advantages = []
    for start in range(0, len(pool), size):
        now = Pool(0.7, pool.rollouts[start : start + size])
        advantages += posterior_advantages(now, prior, **options)
        prior = prior.updated(now.rewards)
    return advantages


def mean_reward_gradient(answers):
    probabilities, rewards = map(np.array, ANSWERS[answers])
    return probabilities * (rewards - probabilities @ rewards)


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("prior", "weighting"), WEIGHTED, ids=str)
def test_the_expected_gradient_is_the_weight_times_the_draws_times_the_gradient(answers, shape, prior, weighting):
    def advantages(pool):
        return round_by_round(pool, prior, SHAPES[shape][1], weighting=weighting)

    gradient, draws = expectations(answers, shape, advantages)
    weight = prompt_weight(prior.pass_rate, 32, weighting)
    np.testing.assert_allclose(gradient, weight * draws * mean_reward_gradient(answers), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", ["seq-pos M=1", "seq-pos M=2", "seq-balance"])
def test_a_baseline_that_looks_ahead_would_be_biased(shape):
    """Leave-one-out over the *whole* pool contains rollouts that r_i decided about: the rounds are what it takes."""

    def advantages(pool):
        return posterior_advantages(pool, BaselineEstimate(0.3, 4, 0.3))

    gradient, draws = expectations("binary", shape, advantages)
    assert abs(gradient / draws / mean_reward_gradient("binary") - 1).max() > 0.01


def test_a_baseline_that_contains_the_reward_itself_would_be_biased(monkeypatch):
    honest = posterior_baselines

    def leaking(pool, prior):
        return [prior.updated([r.reward for r in pool.rollouts]).mean for _ in honest(pool, prior)]

    monkeypatch.setattr(module, "posterior_baselines", leaking)
    with pytest.raises(AssertionError):
        test_the_expected_gradient_is_the_weight_times_the_draws_times_the_gradient(
            "binary", "uniform n=3", PRIORS[1], "none"
        )


def test_by_hand():
    # BaselineEstimate mean 0.25 worth 4 rollouts.
    pool = Pool(0.7, (Rollout(i, r, r) for i, r in enumerate([1.0, 0.0, 1.0])))
    found = posterior_baselines(pool, BaselineEstimate(0.25, 4, 0.25))
    assert found == pytest.approx([(1 + 1) / 6, (1 + 2) / 6, (1 + 1) / 6])


def test_no_strength_is_leave_one_out_and_much_is_the_prior_mean():
    rewards = [1.0, 0.0, 0.0, 2.0]
    pool = Pool(0.7, (Rollout(i, r, r) for i, r in enumerate(rewards)))
    loo = posterior_baselines(pool, BaselineEstimate(9.0, 0, 0.5))
    assert loo == pytest.approx([(sum(rewards) - r) / 3 for r in rewards])
    assert posterior_baselines(pool, BaselineEstimate(9.0, 1e12, 0.5)) == pytest.approx([9.0] * 4)
    assert posterior_baselines(pool, BaselineEstimate(9.0, math.inf, 0.5)) == [9.0] * 4


def test_a_lone_rollout_without_any_prior_strength_is_compared_with_the_prior_mean():
    pool = Pool(0.7, [Rollout(0, 1.0, 1.0)])
    assert posterior_baselines(pool, BaselineEstimate(0.4, 0, 0.4)) == [0.4]


def test_the_order_of_arrival_does_not_matter():
    rollouts = [Rollout(i, r, r) for i, r in enumerate([1.0, 0.0, 0.3, 0.9, 1.0, 0.0])]
    prior = BaselineEstimate(0.4, 3, 0.4)
    from_data_order = posterior_baselines(Pool(0.7, rollouts), prior)
    backwards = posterior_baselines(Pool(0.7, rollouts[::-1]), prior)
    assert backwards[::-1] == from_data_order


def test_unscored_rollouts_are_in_no_sum_and_have_no_advantage():
    nan = math.nan
    pool = Pool(0.7, [Rollout(0, nan, nan), Rollout(1, 1.0, 1.0), Rollout(2, 0.0, 0.0)])
    prior = BaselineEstimate(0.5, 2, 0.5)
    assert posterior_baselines(pool, prior)[1:] == pytest.approx([1 / 3, 2 / 3])
    advantages = posterior_advantages(pool, prior)
    assert advantages == pytest.approx([0.0, 2 / 3, -2 / 3])


def test_all_equal_rewards_carry_an_advantage():
    pool = Pool(0.7, (Rollout(i, 1.0, 1.0) for i in range(4)))
    assert min(posterior_advantages(pool, BaselineEstimate(0.5, 4, 0.5))) > 0.2


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e-9])
def test_equal_rewards_of_a_batch_have_no_advantage(reward):
    """The mean of the others is a sum of rounded numbers, which differs from the reward in most sizes of a batch."""
    for size in range(2, 129):
        pools = [Pool(0.7, [Rollout(0, reward, reward)]) for _ in range(size)]
        estimates = module.batch_leave_one_out_baseline(pools, [0.5] * size)
        for pool, estimate in zip(pools, estimates, strict=True):
            assert posterior_advantages(pool, estimate) == [0.0], size


def test_the_oracle_prior_has_the_variance_of_the_oracle_baseline():
    """Var of one rollout's term with b = p is p(1−p)(1−2p)² + …: compared with the direct computation, exactly."""
    p, n = 0.3, 3
    second = {}
    for name, prior in (("infinite", BaselineEstimate(p, math.inf, p)), ("loo", BaselineEstimate(p, 0, p))):
        second[name] = sum(
            probability
            * sum(a * (y - p) for a, y in zip(posterior_advantages(pool, prior), [1 - d for d in drawn], strict=True))
            ** 2
            for pool, drawn, probability in every_pool([p, 1 - p], [1.0, 0.0], ExitCondition(0), n, 1)
        )
    one = sum(q * ((y - p) * (y - p)) ** 2 for y, q in ((1, p), (0, 1 - p)))
    mean = p * (1 - p)
    assert second["infinite"] == pytest.approx(n * (one - mean**2) + (n * mean) ** 2)
    assert second["loo"] > second["infinite"] * 1.1


def test_explained_variance():
    pools = [Pool(0.7, (Rollout(i, r, r) for i, r in enumerate(rewards))) for rewards in ([1.0, 1.0], [0.0, 0.0])]
    assert explained_variance(pools, [[1.0, 1.0], [0.0, 0.0]]) == pytest.approx(1)
    assert explained_variance(pools, [[0.5, 0.5], [0.5, 0.5]]) == pytest.approx(0)
    assert explained_variance(pools, [[0.0, 0.0], [1.0, 1.0]]) == pytest.approx(-3)
    assert math.isnan(explained_variance(pools[:1], [[1.0, 1.0]]))


def test_a_mean_that_is_worth_nothing_does_not_matter():
    """The leave-one-out mean that the posterior is compared with has no prior at all."""
    assert BaselineEstimate(math.nan, 0.0, 0.5).updated([1.0, 0.0]).mean == 0.5
