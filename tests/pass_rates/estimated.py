"""Runs whose budgets depend on estimated pass rates, and comparison of value networks."""

import torch

from ..helpers import build as build_trainer
from ..helpers import prompt_dataset


RESUME = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}


def build(tmp_path, *args, adaptive_sampling="est-ema", **options):
    return build_trainer(tmp_path, *args, adaptive_sampling=adaptive_sampling, **options)


def by_prompt(prompts, completions, **kwargs):
    """Rewards with very different pass rates by prompt, for any completions."""
    rates = {"1+2=": 0.9, "31+4=": 0.5, "5+55=": 0.1, "7+8=": 0.0}
    fractions = [sum(map(ord, completion)) % 97 / 97 for completion in completions]
    return [float(fraction < rates[prompt]) for prompt, fraction in zip(prompts, fractions, strict=True)]


def identified(repeats):
    """Prompts whose copies have different ids: many prompts."""
    dataset = prompt_dataset(repeats)
    return dataset.add_column("id", [str(i) for i in range(len(dataset))])


def assert_same_state(left, right):
    """Assert that two value networks have the same tensors, bit for bit."""
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
