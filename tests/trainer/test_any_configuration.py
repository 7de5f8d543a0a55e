"""
Random combinations of options, batch sizes and reward scales: each trains with finite weights and bounded advantages, or is
rejected with an error that names an option.
"""

import math
import random
import re

import numpy as np
import pytest

from ada_trl import AdaGRPOConfig

from ..helpers import build, config, prompt_dataset


FIELDS = {
    "adaptive_sampling": ["seq-balance", "seq-pos", "est", "est-ema", "est-value", "uniform"],
    "baseline": ["pool", "posterior", "batch"],
    "num_generations": [1, 2, 4],
    "per_device_train_batch_size": [1, 4, 8, 16],
    "zero_variance_groups": ["keep", "mask", "resample"],
    "prompt_oversampling": [1, 3],
    "prompt_weighting": [None, "none", "inverse", "inverse_sqrt", 0.25],
    "scale_rewards": ["none", "batch", "group"],
    "pass_rate_estimator": [None, "ema", "value", "ema+value"],
    "selection_correction": [True, False],
    "min_samples": [1, 2],
    "max_rounds": [1, 4],
    "num_iterations": [1, 2],
    "positive_threshold": [0.7, 50.0],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
}
DEFAULTS = {
    "min_samples": 2,
    "max_rounds": 4,
    "zero_variance_groups": "keep",
    "selection_correction": False,
    "num_iterations": 1,
}
# Reward as a function of a number from 0 to 1 that depends on the completion, and the range of these rewards.
SCALES = {
    "0 or 1": (lambda u: float(u > 0.5), 1.0),
    "rare": (lambda u: float(u > 0.97), 1.0),
    "0 to 100": (lambda u: 100 * u, 100.0),
    "-5 to 0": (lambda u: 5 * u - 5, 5.0),
    "constant": (lambda u: 0.3, 0.0),
    "tiny": (lambda u: 1e-6 * u, 1e-6),
    "some None": (lambda u: None if u < 0.3 else u, 1.0),
    "all None": (lambda u: None, 0.0),
    "shifted": (lambda u: 1000 + u, 1.0),
}


def random_configurations(number, seed=0):
    """Each option has its default value half of the time, so that many configurations are valid."""
    rng = random.Random(seed)
    for _ in range(number):
        options = {
            name: DEFAULTS[name] if name in DEFAULTS and rng.random() < 0.7 else rng.choice(values)
            for name, values in FIELDS.items()
        }
        for name in ("pass_rate_estimator", "prompt_weighting", "selection_correction"):
            if rng.random() < 0.5:
                options[name] = DEFAULTS.get(name)
        if rng.random() < 0.6:
            options |= {"prompt_oversampling": 1, "multi_objective_aggregation": "sum_then_normalize"}
        yield options, rng.choice(list(SCALES))


def largest_advantage(args: AdaGRPOConfig, reward_range: float) -> float:
    """
    Bound of |A|. |r − b| is at most the range of rewards, since every baseline is a mean of rewards, or a prediction of a value
    head that is shrunk towards it. The error of that prediction is at most 21 standard deviations σ: AdamW changes each of
    H + 1 = 17 weights by at most 8 · 0.04 in each of 3 generations, and inputs are at most 5/√16, so 3 · 8 · 0.04 · (16 · 5/4 + 1)
    < 21; σ is at most half the range.

    Divided by a standard deviation, |A| is at most (n − 1)/√n for a group of n, likewise for a batch or a pool of 128, and is
    clipped at 32 otherwise. The prompt weight is at most that of a pass rate of one in a pool.
    """
    pool = max(args.sampling_strategy.max_rollouts, 32)
    weight = 1.0 if args.prompt_weighting == "none" else float(pool)
    correction = args.num_generations if args.selection_correction else 1
    if args.multi_objective_aggregation == "normalize_then_sum" or args.scale_rewards != "none":
        return weight * correction * max(32.0, math.sqrt(128 * pool)) * 2
    return weight * correction * max(reward_range, 1e-9) * 12 + 1e-6


CASES = list(random_configurations(60))


@pytest.mark.parametrize(("options", "scale"), CASES, ids=range(len(CASES)))
def test_a_configuration_trains_or_is_rejected(options, scale, tmp_path):
    to_reward, reward_range = SCALES[scale]

    def reward(completions, **kwargs):
        return [to_reward((sum(map(ord, completion)) % 101) / 100) for completion in completions]

    try:
        trainer = build(
            tmp_path,
            reward,
            prompt_dataset(16),
            max_steps=3 * options["num_iterations"],
            learning_rate=1e-3,
            **options,
        )
    except ValueError as error:
        names = re.findall(r"\w+", str(error))
        assert set(names) & set(AdaGRPOConfig.__dataclass_fields__), f"No option is named: {error}"
        return
    trainer.train()
    assert trainer.state.global_step == 3 * options["num_iterations"]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    bound = largest_advantage(trainer.args, reward_range)
    for batch in trainer.batches:
        assert batch["advantages"].isfinite().all() and batch["advantages"].abs().max() <= bound
        if not reward_range and trainer.args.baseline != "pool":
            assert batch["advantages"].abs().max() < 1e-6


def test_enough_configurations_are_valid_and_enough_are_rejected(tmp_path):
    seen, rejected = [], 0
    for options, _ in CASES:
        try:
            config(tmp_path, **{"bf16": False, "use_cpu": True} | options)
            seen.append(options)
        except ValueError:
            rejected += 1
    assert len(seen) > 15 and rejected > 15
    chosen = {(name, options[name]) for options in seen for name in FIELDS}
    wanted = {(name, value) for name in ("adaptive_sampling", "baseline") for value in FIELDS[name]}
    assert wanted <= chosen, wanted - chosen
    assert np.mean([options["num_generations"] == 1 for options in seen]) > 0.1
