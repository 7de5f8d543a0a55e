"""One round per step: everything but the advantages is GRPOTrainer's, because GRPOTrainer's own step runs once."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..helpers import QUICK, config, length_reward, prompt_dataset, tiny_model, tiny_tokenizer


OPTIONS = {
    "num_generations": 4,
    "num_iterations": 2,
    "max_steps": 2,
    "beta": 0.0,
}  # two iterations: old log-probabilities
OF_GRPO = {name: value for name, value in QUICK.items() if name in GRPOConfig.__dataclass_fields__}


def first_batch(trainer_class, args):
    """The first batch and its rewards."""
    seen = {}

    class Observer(trainer_class):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return seen.setdefault("batch", output)

        def _calculate_rewards(self, *given):
            return seen.setdefault("rewards", super()._calculate_rewards(*given))

    trainer = Observer(tiny_model(), length_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
    trainer.train()
    return seen["batch"] | {"rewards": seen["rewards"]}


@pytest.mark.parametrize("baseline", ["batch", "posterior"])
def test_a_baseline_changes_the_advantages_and_nothing_else(baseline, tmp_path):
    grpo = first_batch(GRPOTrainer, GRPOConfig(str(tmp_path / "grpo"), **OF_GRPO | OPTIONS))
    ours = first_batch(AdaGRPOTrainer, config(tmp_path / "ours", **QUICK | OPTIONS, baseline=baseline))
    assert ours.keys() == grpo.keys() and "old_per_token_logps" in ours
    differing = {name for name, value in grpo.items() if not torch.equal(ours[name], value)}
    assert differing == {"advantages"}
    assert grpo["rewards"].unique().numel() > 1


def test_the_trainer_is_one_class():
    assert AdaGRPOTrainer.__mro__[1] is GRPOTrainer
