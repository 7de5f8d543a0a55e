"""
Any combination of the four choices, of sizes and of reward scales: it trains with finite weights and bounded advantages, or it
is refused in a sentence that names an option.
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
    "selection_correction": [None, True, False],
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
    "selection_correction": None,
    "num_iterations": 1,
}
# Rewards by completion, from 0 to 1: what they are made of, and how far they reach.
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


def drawn(number, seed=0):
    """Configurations of which each option is at its default half of the time, so that many are not refused."""
    rng = random.Random(seed)
    for _ in range(number):
        options = {
            name: DEFAULTS[name] if name in DEFAULTS and rng.random() < 0.7 else rng.choice(values)
            for name, values in FIELDS.items()
        }
        for name in ("pass_rate_estimator", "prompt_weighting", "selection_correction"):
            if rng.random() < 0.5:
                options[name] = None
        if rng.random() < 0.6:
            options |= {"prompt_oversampling": 1, "multi_objective_aggregation": "sum_then_normalize"}
        yield options, rng.choice(list(SCALES))


def largest_advantage(args: AdaGRPOConfig, reach: float) -> float:
    """
    |r − b| is at most what rewards reach, since every baseline is a mean of rewards, or a guess that is shrunk to their level:
    a head that is off by up to 8 deviations (AdamW moves each of H + 1 = 17 weights by at most 8 · 0.04 in each of 3 generations,
    on features of at most 5/√16 each) adds 3 · 8 · 0.04 · (16 · 5/4 + 1) < 21 of them, and σ is at most half the reach.

    Divided by a deviation: of n rewards of a group, (n − 1)/√n at most, and so of a batch or a pool of 128; otherwise cut off
    at 32. The weight is at most that of a pass rate of one in a pool.
    """
    pool = max(args.sampling_strategy.max_rollouts, 32)
    weight = 1.0 if args.prompt_weighting == "none" else float(pool)
    correction = args.num_generations if args.selection_correction else 1
    if args.multi_objective_aggregation == "normalize_then_sum" or args.scale_rewards != "none":
        return weight * correction * max(32.0, math.sqrt(128 * pool)) * 2
    return weight * correction * max(reach, 1e-9) * 12 + 1e-6


CASES = list(drawn(60))


@pytest.mark.parametrize(("options", "scale"), CASES, ids=range(len(CASES)))
def test_it_trains_or_is_refused_in_a_sentence(options, scale, tmp_path):
    to_reward, reach = SCALES[scale]

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
    bound = largest_advantage(trainer.args, reach)
    for batch in trainer.batches:
        assert batch["advantages"].isfinite().all() and batch["advantages"].abs().max() <= bound
        if not reach and trainer.args.baseline != "pool":
            assert batch["advantages"].abs().max() < 1e-6


def test_enough_of_them_train_and_enough_are_refused(tmp_path):
    """And every choice is among those that train."""
    seen, refused = [], 0
    for options, _ in CASES:
        try:
            config(tmp_path, **{"bf16": False, "use_cpu": True} | options)
            seen.append(options)
        except ValueError:
            refused += 1
    assert len(seen) > 15 and refused > 15
    chosen = {(name, options[name]) for options in seen for name in FIELDS}
    wanted = {(name, value) for name in ("adaptive_sampling", "baseline") for value in FIELDS[name]}
    assert wanted <= chosen, wanted - chosen
    assert np.mean([options["num_generations"] == 1 for options in seen]) > 0.1
