"""Trainings whose budgets follow estimated pass rates."""

from ..helpers import build as build_trainer
from ..helpers import prompt_dataset, remember_pools


RESUME = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}


def build(tmp_path, *args, adaptive_sampling="est-ema", **options):
    trainer = build_trainer(tmp_path, *args, adaptive_sampling=adaptive_sampling, **options)
    trainer.pools = remember_pools(trainer)
    return trainer


def by_prompt(prompts, completions, **kwargs):
    """Prompts of very different difficulty, whatever is generated."""
    rates = {"1+2=": 0.9, "31+4=": 0.5, "5+55=": 0.1, "7+8=": 0.0}
    fractions = [sum(map(ord, completion)) % 97 / 97 for completion in completions]
    return [float(fraction < rates[prompt]) for prompt, fraction in zip(prompts, fractions, strict=True)]


def identified(repeats):
    """Copies of a prompt with an identity of their own: enough prompts to fit a prior to."""
    dataset = prompt_dataset(repeats)
    return dataset.add_column("id", [str(i) for i in range(len(dataset))])
