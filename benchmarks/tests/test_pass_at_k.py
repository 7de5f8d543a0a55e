"""The exploration of a weight that keeps pass@k."""

import functools

import numpy as np
import pytest
import torch
from datasets import Dataset

from benchmarks.learning import language_model, pass_at_k, training
from tests.helpers import tiny_model, tiny_tokenizer


def test_weighted_rewards_are_compared_with_those_of_the_other_rollouts():
    found = pass_at_k.weighted_advantages(np.array([1.0, 0.0, 1.0]), np.array([0.5, 0.9, 0.0]), k=3)
    assert found == pytest.approx([0.25 - 0.5, -0.625, 1 - 0.125])


def test_the_expected_gradient_is_that_of_pass_at_k():
    """One prompt, whose correct completion has probability p = sigmoid(x): d/dx (pass@2 / 2) = (1 - p) dp/dx."""
    x, rng = -1.0, np.random.default_rng(0)
    p = 1 / (1 + np.exp(-x))
    success_BN = rng.random((40_000, 2)) < p
    score_BN = success_BN - p  # d log π(y) / dx
    rates_BN = np.where(success_BN, p, 1 - p)  # π(y)
    advantage_BN = np.array(
        [
            pass_at_k.weighted_advantages(reward_N.astype(float), rates_N, k=2)
            for reward_N, rates_N in zip(success_BN, rates_BN, strict=True)
        ]
    )
    gradient_B = (advantage_BN * score_BN).mean(1)
    assert gradient_B.mean() == pytest.approx((1 - p) * p * (1 - p), abs=4 * gradient_B.std() / 200)


def test_weights_in_a_run_are_probabilities_of_the_sampled_completions(tmp_path):
    rows = [{"prompt": f"{i % 3}+1=", "answer": str(i % 3 + 1)} for i in range(24)]
    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        Dataset.from_list(rows).to_json(tmp_path / "sums" / f"{split}.jsonl")
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    outputs = []

    def probabilities(trainer, output):
        for row in range(len(output["completion_ids"])):
            known, ids = (
                output[f"{part}_ids"][row][output[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
            )
            with torch.no_grad():
                logits = trainer.model(torch.cat([known, ids])[None]).logits[0, len(known) - 1 : -1].float()
            yield logits.log_softmax(-1).gather(1, ids[:, None]).sum().exp().item()

    class Checked(pass_at_k.PassAtKTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            weighted = self.reward_N * (1 - np.array(list(probabilities(self, output))))
            expected = weighted - (weighted.sum() - weighted) / 7
            assert output["advantages"].tolist() == pytest.approx(expected, abs=0.02)  # the model is in bfloat16
            outputs.append(output)
            return output

    task = language_model.task("sums")._replace(
        reward=lambda completions, **_: [float(len(completion) % 2) for completion in completions],
        evaluate=lambda *given: {"accuracy": 0.5},
    )
    run = training.Run("any", "sums", 31, 1e-3)
    training.train_once(run, {"baseline": "batch"}, 8, tmp_path, 2, 2, task, None, functools.partial(Checked, k=2))
    assert len(outputs) == 2
