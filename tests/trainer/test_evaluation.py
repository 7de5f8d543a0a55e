"""Unbiased pass@k during training."""

import math

import pandas as pd
import pytest
from accelerate.data_loader import IterableDatasetShard
from datasets import Dataset
from torch.utils.data import SequentialSampler

from ada_trl import AdaGRPOTrainer
from ada_trl.core import pass_at_k_metrics
from ada_trl.trainer.trainer_checks import has_whole_groups

from ..helpers import PROMPTS, build, even_reward, logs_of, prompt_dataset


def test_prompts_with_too_few_scored_completions_do_not_count():
    assert pass_at_k_metrics([(1, 4), (0, 4), (1, 1)]) == {
        "pass@1": pytest.approx((1 / 4 + 0 + 1) / 3),
        "pass@2": pytest.approx((1 - math.comb(3, 2) / math.comb(4, 2)) / 2),
        "pass@4": 0.5,
    }


@pytest.mark.parametrize("options", [{"adaptive_sampling": "uniform"}, {}, {"baseline": "batch"}])
def test_evaluation_logs_pass_at_k_of_the_success_reward(options, tmp_path):
    seen = []

    def shaped(completions, **kwargs):
        return [len(completion) for completion in completions]

    def right(completions, **kwargs):
        seen.append(even_reward(completions))
        return seen[-1]

    options = options | {"num_generations_eval": 4, "success_reward": "right", "per_device_eval_batch_size": 8}
    options |= {"metric_for_best_model": "eval_pass@4", "eval_strategy": "steps", "save_strategy": "steps"}
    options |= {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    rows = Dataset.from_dict({"prompt": PROMPTS})
    trainer = build(tmp_path, [right, shaped], eval_dataset=rows, **options)
    trainer.train()
    (logged,) = (logs for logs in trainer.state.log_history if "eval_pass@4" in logs)
    evaluated = [reward for rewards in seen[-2:] for reward in rewards]  # two batches of two prompts
    groups = [evaluated[i : i + 4] for i in range(0, 16, 4)]
    assert logged["eval_pass@1"] == pytest.approx(sum(evaluated) / 16)
    assert logged["eval_pass@4"] == pytest.approx(sum(any(group) for group in groups) / 4)
    assert trainer.state.best_metric == pytest.approx(logged["eval_pass@4"])
    assert "eval_pass@8" not in logged


def test_a_short_last_batch_weighs_as_much_as_its_prompts(tmp_path):
    rows = Dataset.from_dict({"prompt": PROMPTS[:3]})
    trainer = build(
        tmp_path, solves_the_first, eval_dataset=rows, num_generations_eval=2, per_device_eval_batch_size=4
    )
    assert trainer.evaluate()["eval_pass@2"] == pytest.approx(1 / 3)


def test_processes_that_read_their_own_shards_need_whole_groups(tmp_path, monkeypatch):
    stream = prompt_dataset().to_iterable_dataset(num_shards=2)
    assert has_whole_groups(stream, 2, 8, 4) and not has_whole_groups(stream, 2, 6, 4)
    assert has_whole_groups(stream, 1, 6, 4) and has_whole_groups(IterableDatasetShard(stream), 2, 6, 4)
    trainer = build(tmp_path)
    monkeypatch.setattr("ada_trl.trainer.ada_grpo_trainer.has_whole_groups", lambda *given: False)
    with pytest.raises(
        ValueError, match=r"num_generations \(4\) must divide .* \(8\), because each process reads its own"
    ):
        trainer.train()


def solves_the_first(prompts, completions, **kwargs):
    return [float(prompt == PROMPTS[0]) for prompt in prompts]


def test_a_prediction_on_a_stream_has_no_pass_at_k(tmp_path):
    """TRL samples each of its prompts once, so that its rollouts come from different prompts."""
    rows = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()
    trainer = build(tmp_path, solves_the_first, num_generations_eval=2, per_device_eval_batch_size=4)
    # First an evaluation, in which TRL sets how batches of streams are made.
    assert trainer.evaluate(rows)["eval_pass@2"] == pytest.approx(1 / 4)
    assert "test_pass@2" not in trainer.predict(rows).metrics
    rows = Dataset.from_dict({"prompt": PROMPTS[:1] * 4, "number": range(4)}).to_iterable_dataset()
    assert "test_pass@2" not in trainer.predict(rows).metrics, "Other columns may make a different problem."


def test_groups_of_different_prompts_have_no_pass_at_k(tmp_path):
    """For example where several processes read their own shards of a stream, or with another sampler of the user."""

    class InOrder(AdaGRPOTrainer):
        def _get_eval_sampler(self, dataset):
            return SequentialSampler(dataset)

    options = {"eval_dataset": prompt_dataset(), "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    assert "eval_pass@2" in build(tmp_path, **options).evaluate()
    assert "eval_pass@2" not in build(tmp_path, trainer_class=InOrder, **options).evaluate()


def test_each_evaluation_has_its_own_metrics(tmp_path):
    """
    Under the names that Transformers gives those of the loss, also for a prediction and for a prefix of the user.
    """
    sets = {"easy": Dataset.from_dict({"prompt": PROMPTS[:1]}), "hard": Dataset.from_dict({"prompt": PROMPTS[1:3]})}
    options = {"eval_dataset": sets, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = build(tmp_path, solves_the_first, **options)
    assert trainer.predict(sets["easy"]).metrics["test_pass@2"] == 1
    metrics = trainer.evaluate()
    assert [(name, value) for name, value in metrics.items() if "pass@2" in name] == [
        ("eval_easy_pass@2", 1),
        ("eval_hard_pass@2", 0),
    ]
    metrics = trainer.evaluate(sets["hard"], metric_key_prefix="evaluation")
    assert [name for name in metrics if "pass@2" in name] == ["evaluation_pass@2"]


def test_a_completion_without_a_success_reward_does_not_count(tmp_path):
    def right(prompts, completions, **kwargs):
        return [{0: 1.0, 1: None, 2: float("inf")}[PROMPTS.index(prompt)] for prompt in prompts]

    def shaped(completions, **kwargs):
        return [0.5] * len(completions)

    options = {"success_reward": "right", "num_generations_eval": 2, "per_device_eval_batch_size": 6}
    rows = Dataset.from_dict({"prompt": PROMPTS[:3]})
    trainer = build(tmp_path, [right, shaped], eval_dataset=rows, reward_weights=[0.0, 1.0], **options)
    assert trainer.evaluate()["eval_pass@2"] == 1


def test_the_table_of_an_evaluation_has_no_pools_of_training_prompts(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 1}
    rows = Dataset.from_dict({"prompt": ["9+9=", "8+8="]})
    build(tmp_path, eval_dataset=rows, log_completions=True, num_generations=4, **options).train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    of_evaluation = table["prompt"].isin(["9+9=", "8+8="])
    assert of_evaluation.any() and table["pool_size"].isna().equals(of_evaluation)


def test_metrics_that_are_constant_in_training_are_logged_in_evaluation(tmp_path):
    trainer = build(tmp_path, eval_dataset=prompt_dataset(1), baseline="batch", num_generations_eval=4)
    trainer.train()
    assert "frac_reward_zero_std" not in logs_of(trainer)[0]
    metrics = trainer.evaluate()
    assert "eval_frac_reward_zero_std" in metrics and not any("ada/" in name for name in metrics)
