"""The exploration of a weight that keeps pass@k: the estimates of the pass rate and the advantages."""

import functools

import numpy as np
import pytest
import torch
from datasets import Dataset

from ada_trl.pass_rates.hidden_states import last_hidden_states
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


@pytest.mark.parametrize("estimator", ["probability", "counts", "value", "value and counts"])
def test_pass_rates_in_a_run(estimator, tmp_path, monkeypatch):
    """Probabilities are those of the sampled completions; counts and value head are read before the step's rewards are added."""
    rows = [{"prompt": f"{i % 3}+1=", "answer": str(i % 3 + 1)} for i in range(24)]
    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        Dataset.from_list(rows).to_json(tmp_path / "sums" / f"{split}.jsonl")
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    visits, predictions, compute = [], [], pass_at_k.PassAtKTrainer._pass_rates

    def probabilities(trainer, prompts, output):
        for prompt, ids, mask in zip(prompts, output["completion_ids"], output["completion_mask"], strict=True):
            known, ids = torch.tensor(trainer.processing_class(prompt)["input_ids"]), ids[mask.bool()]
            with torch.no_grad():
                logits = trainer.model(torch.cat([known, ids])[None]).logits[0, len(known) - 1 : -1].float()
            yield logits.log_softmax(-1).gather(1, ids[:, None]).sum().exp().item()

    def check(trainer, prompts, reward_N, output):
        counts = [tuple(trainer.counts[prompt]) for prompt in prompts]
        states = last_hidden_states(trainer.model, output["prompt_ids"], output["prompt_mask"], batch_size=8)
        priors = trainer.head.predict(states) if "value" in estimator else [reward_N.mean()] * len(prompts)
        found = compute(trainer, prompts, reward_N, output)
        visits.append(max(count for _, count in counts))
        predictions.append(priors)
        if estimator == "probability":
            expected = list(probabilities(trainer, prompts, output))
        else:
            expected = [(won + 2 * prior) / (count + 2) for (won, count), prior in zip(counts, priors, strict=True)]
        assert found == pytest.approx(expected, rel=0.05)  # the model is in bfloat16
        return found

    monkeypatch.setattr(pass_at_k.PassAtKTrainer, "_pass_rates", check)
    task = language_model.task("sums")._replace(
        reward=lambda completions, **_: [float(len(completion) % 2) for completion in completions],
        evaluate=lambda *given: {"accuracy": 0.5},
    )
    trainer = functools.partial(pass_at_k.PassAtKTrainer, k=2, estimator=estimator)
    run = training.Run("any", "sums", 31, 1e-3)
    training.train_once(run, {"baseline": "batch"}, 8, tmp_path, 2, 2, task, None, trainer)
    assert len(visits) == 2 and (visits[1] > 1) == ("counts" in estimator)
    assert (len({*predictions[1]}) > 1) == ("value" in estimator)  # it has learned
