"""Random configurations, and random combinations of user code."""

import math
import random
import re

import pytest

from ada_trl import AdaGRPOConfig
from ada_trl.trainer.mode import Mode

from ..helpers import MODES, build, prompt_dataset
from .scripts import Script, check_script
from .test_datasets import DATASETS
from .test_reward_functions import REWARDS
from .test_subclasses import METHODS


FIELDS = {
    "adaptive_sampling": ["seq-balance", "seq-pos", "est-ema", "est-value", "uniform"],
    "baseline": ["pool", "batch"],
    "num_generations": [1, 2, 4],
    "per_device_train_batch_size": [4, 8, 16],
    "zero_variance_groups": ["keep", "mask", "skip", "resample"],
    "prompt_weighting": [None, "none", "inverse", "inverse_sqrt", 0.25],
    "scale_rewards": ["none", "batch", "group"],
    "min_samples": [1, 2],
    "max_rounds": [None, 1],
    "num_iterations": [1, 2],
    "positive_threshold": [0.7, 50.0],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
}
USUAL = {"min_samples": 2, "max_rounds": None, "zero_variance_groups": "keep", "num_iterations": 1}
USUAL |= {"prompt_weighting": None, "multi_objective_aggregation": "sum_then_normalize"}
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
    """Most options have their usual value in two thirds of the cases, so that many configurations are valid."""
    rng = random.Random(seed)
    for _ in range(number):
        options = {name: rng.choice(values) for name, values in FIELDS.items()}
        yield options | {name: value for name, value in USUAL.items() if rng.random() < 0.67}, rng.choice(list(SCALES))


def largest_advantage(args: AdaGRPOConfig, reward_range: float) -> float:
    """
    Bound of |A|. |r − b| is at most the range of rewards, since both baselines are means of rewards. Divided by a
    standard deviation, |A| is at most (n − 1)/√n for a group of n, likewise for a batch or a pool of 128, and is
    clipped at 32 otherwise. The prompt weight is at most that of a pass rate of one in a pool.
    """
    mode = Mode.of(args)
    pool = max(mode.round_size * mode.slot_rule.max_rounds, 32)
    weight = 1.0 if args.prompt_weighting == "none" else float(pool)
    if args.multi_objective_aggregation == "normalize_then_sum" or args.scale_rewards != "none":
        return weight * max(32.0, math.sqrt(128 * pool)) * 2
    return weight * reward_range + 1e-6


CONFIGURATIONS = list(random_configurations(40))


@pytest.mark.parametrize(("options", "scale"), CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_a_configuration_trains_or_is_rejected(options, scale, tmp_path):
    to_reward, reward_range = SCALES[scale]

    def reward(completions, **kwargs):
        return [to_reward((sum(map(ord, completion)) % 101) / 100) for completion in completions]

    steps = 2 * options["num_iterations"]
    try:
        trainer = build(tmp_path, reward, prompt_dataset(16), max_steps=steps, learning_rate=1e-3, **options)
    except ValueError as error:
        names = re.findall(r"\w+", str(error))
        assert set(names) & set(AdaGRPOConfig.__dataclass_fields__), f"No option is named: {error}"
        return
    trainer.train()
    assert trainer.state.global_step == steps
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    bound = largest_advantage(trainer.args, reward_range)
    for batch in trainer.batches:
        assert batch["advantages"].isfinite().all() and batch["advantages"].abs().max() <= bound
        if not reward_range and trainer.args.baseline != "pool":
            assert batch["advantages"].abs().max() < 1e-6


# Combinations of user code


def changed_fields(script):
    return {
        name for name in ("reward", "dataset", "methods") if getattr(script, name) is not Script._field_defaults[name]
    }


SCRIPTS = [*REWARDS.values(), *DATASETS.values(), *METHODS.values()]


def combination(seed):
    """
    A reward function, a dataset and methods, of rows that change only one of these and have no check, and a mode.
    """
    rng, combined = random.Random(seed), Script()
    plain = [s for s in SCRIPTS if not s.rejected and s.check is None and s.steps and len(s.modes) == len(MODES)]
    for name in ("reward", "dataset", "methods"):
        row = rng.choice([Script(), *(script for script in plain if changed_fields(script) == {name})])
        combined = combined._replace(**{name: getattr(row, name)}, options={**combined.options, **row.options})
        if row.equals is not None:
            combined = combined._replace(equals=row.equals)
    return combined, rng.choice(list(MODES))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_combinations_of_scripts_train(seed, tmp_path):
    check_script(*combination(seed), tmp_path)
