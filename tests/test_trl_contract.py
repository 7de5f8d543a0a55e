"""
What the seam relies on in TRL. When a new TRL release breaks something, it should break here first, with a sentence.

Tried and not supported: TRL 1.15, whose log-probability kernel needs Triton, so that nothing trains on a CPU; TRL 1.14,
which has no `eos_token_ids`.
"""

import inspect

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import nanstd

from .helpers import QUICK, chat_tokenizer, even_reward, prompt_dataset, tiny_chat_model, tiny_model, tiny_tokenizer


def test_version_is_one_that_was_tested():
    assert Version("1.16.0") <= Version(trl.__version__) < Version("1.17"), (
        f"TRL {trl.__version__} was never tested. Run the whole suite, then widen the range in setup.cfg and here."
    )


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_generate", ["self", "prompts"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_tokenize_prompts", ["self", "prompts"]),
        (
            "_generate_single_turn",
            ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
        ),
    ],
)
def test_overridden_methods_have_the_expected_parameters(method, parameters):
    found = list(inspect.signature(getattr(GRPOTrainer, method)).parameters)
    assert found == parameters, f"AdaGRPOTrainer overrides {method}, whose parameters changed."


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    class Recorder(GRPOTrainer):
        calls = []

        def _generate(self, prompts):
            columns = super()._generate(prompts)
            self.calls.append(("_generate", prompts, columns))
            return columns

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self.calls.append(("_calculate_rewards", inputs, rewards))
            return rewards

        def _generate_and_score_completions(self, inputs):
            self.calls.append(("start", inputs))
            output = super()._generate_and_score_completions(inputs)
            self.calls.append(("end", output, {k: list(v) for k, v in self._metrics["train"].items()}))
            return output

    args = GRPOConfig(str(tmp_path_factory.mktemp("contract")), **QUICK | {"num_generations": 4, "max_steps": 1})
    trainer = Recorder(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


def test_generation_and_rewards_are_called_once_each_in_this_order(recorded):
    assert [call[0] for call in recorded.calls] == ["start", "_generate", "_calculate_rewards", "end"]


def test_rows_of_a_prompt_are_contiguous(recorded):
    prompts = recorded.calls[1][1]
    assert [prompt for prompt in prompts[::4] for _ in range(4)] == prompts
    assert [row["prompt"] for row in recorded.calls[0][1]] == prompts


def test_generation_returns_eight_columns(recorded):
    columns = recorded.calls[1][2]
    assert len(columns) == 8, (
        "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, images, tool_images"
    )
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images = columns
    assert [len(column) for column in (prompt_ids, completion_ids, completions)] == [8, 8, 8]
    assert (tool_mask, logprobs, extra_fields, images, tool_images) == (None, None, {}, None, [])


def test_output_and_metrics_that_are_corrected_exist(recorded):
    _, output, metrics = recorded.calls[3]
    assert output["advantages"].shape == (8,)
    assert output["num_items_in_batch"] == output["completion_mask"].sum()
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/even_reward/mean", "num_tokens"):
        assert len(metrics[name]) == 1, f"{name} is no longer logged once per generation."
    assert len(recorded._logs["advantages"]) == 8


@pytest.mark.parametrize(
    "name",
    [
        "_pending_extra_logs",
        "_pending_metrics",
        "_metrics",
        "_logs",
        "_step",
        "_tokenizer",
        "_is_vlm",
        "_multi_environment",
        "environment_factories",
        "eos_token_ids",
        "loss_type",
        "reward_func_names",
        "reward_funcs",
        "reward_weights",
        "tools",
    ],
)
def test_state_exists(name, recorded):
    assert hasattr(recorded, name), f"GRPOTrainer.{name} is gone."


def test_nothing_collective_and_no_metric_before_generation(recorded):
    """The rows of a round are prepared by a call that is left in `_generate`, on each process by itself."""
    before, called = {k: len(v) for k, v in recorded._metrics["train"].items()}, []

    class Left(Exception):
        pass

    def generate(prompts):
        called.append(prompts)
        raise Left

    def gather(tensor):
        raise AssertionError("GRPOTrainer gathers before it calls `_generate`: rounds would wait for each other.")

    recorded._generate, recorded.accelerator.gather = generate, gather
    try:
        with pytest.raises(Left):
            GRPOTrainer._generate_and_score_completions(recorded, [{"prompt": "1+2="}] * 3)
    finally:
        del recorded._generate, recorded.accelerator.gather
    assert called == [["1+2="] * 3], "GRPOTrainer asks for other rows than it was given."
    assert {k: len(v) for k, v in recorded._metrics["train"].items()} == before


def test_gathers_of_generation_and_rewards_can_be_made_local(recorded, monkeypatch):
    """All of them go through `accelerator.gather` or the module's `gather`."""
    calls = []

    def local(tensor):
        calls.append(tensor)
        return tensor

    monkeypatch.setattr(grpo_trainer, "gather", local)
    monkeypatch.setattr(recorded.accelerator, "gather", local)
    for name in ("all_gather_object", "all_gather", "broadcast_object_list", "all_reduce", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, None)
    recorded.model.train()
    columns = GRPOTrainer._generate(recorded, ["1+2="] * 3)
    rewards = GRPOTrainer._calculate_rewards(recorded, [{"prompt": "1+2="}] * 3, ["1+2="] * 3, columns[3], columns[1])
    assert len(calls) == 4, "Lengths of prompts and completions, truncation, rewards."
    assert rewards.shape == (3, 1)


def test_environments_come_from_a_pool_that_can_be_replaced(tmp_path):
    class Environment:
        def reset(self, **row):
            return None

        def get_reward(self):
            return 1.0

    args = GRPOConfig(str(tmp_path), **QUICK | {"num_generations": 4})
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hello."}]] * 2})
    tokenizer = chat_tokenizer()
    trainer = GRPOTrainer(
        tiny_chat_model(tokenizer),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=Environment,
    )
    assert set(trainer._environment_pool) == {None} and isinstance(trainer._environment_pool[None][0], Environment)


def test_standard_deviation_has_bessels_correction():
    torch.testing.assert_close(nanstd(torch.tensor([1.0, 2.0, torch.nan, 4.0])), torch.tensor([1.0, 2.0, 4.0]).std())


def test_sampler_shuffles_anew_each_epoch_and_a_new_one_starts_over(recorded):
    sampler = recorded._get_train_sampler()
    first, second = list(sampler), list(sampler)
    assert first != second, "AdaGRPOTrainer takes each iteration of the sampler to be one epoch's shuffle."
    assert list(recorded._get_train_sampler()) == first and not hasattr(sampler, "set_epoch"), (
        "TRL resumes the order of later epochs itself now: AdaGRPOTrainer._load_optimizer_and_scheduler must not."
    )
