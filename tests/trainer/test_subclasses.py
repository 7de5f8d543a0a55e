"""Subclasses that override a method of GRPOTrainer: the override has its effect, or is rejected."""

import functools
import inspect

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, identity

from ada_trl import AdaGRPOTrainer
from ada_trl.trainer.trainer_checks import DATA_LOADING

from ..helpers import (
    LOADER_MODES,
    MODES,
    PROMPTS,
    QUEUE_MODES,
    QUICK,
    build,
    even_reward,
    prompt_dataset,
    tiny_model,
    tiny_tokenizer,
)
from .scripts import NO_END, ROUNDS, Script, cases, check_script, from_queue


class ShiftedRewards:
    def _calculate_rewards(self, *args):
        return super()._calculate_rewards(*args) - 0.5


class LoggedMetric:
    def _calculate_rewards(self, inputs, *args):
        rewards = super()._calculate_rewards(inputs, *args)
        self._metrics["train"]["mine"].append(rewards.nanmean().item())
        return rewards


class DoubledAdvantages:
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        return output | {"advantages": 2 * output["advantages"]}


class LongerCompletions:
    def _generate(self, prompts):
        prompt_ids, completion_ids, *others = super()._generate(prompts)
        return prompt_ids, [[*ids, ids[-1]] for ids in completion_ids], *others


class ShorterCompletions:
    def _generate_single_turn(self, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [ids[:2] for ids in completion_ids], logprobs


class ExtraFields:
    def _generate(self, prompts):
        ids, completion_ids, mask, completions, logprobs, extra_fields, *others = super()._generate(prompts)
        fields = {"first": [text[:1] for text in completions], "judge": "strict"}
        return ids, completion_ids, mask, completions, logprobs, extra_fields | fields, *others


def expects_extra_fields(completions, first, judge, **kwargs):
    assert first == [text[:1] for text in completions] and set(judge) == {"strict"}
    return even_reward(completions)


class SampledTwice:
    def _generate_and_score_completions(self, inputs):
        super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


class ReplacedRows:
    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions([{"prompt": "1+1="} for _ in inputs])


class AddedColumn:
    def _generate_and_score_completions(self, inputs):
        for row in inputs:
            row |= {"stage": 1}
        return super()._generate_and_score_completions(inputs)


def expects_stage(completions, stage, **kwargs):
    assert stage == [1] * len(completions)
    return even_reward(completions)


class ReadRows:
    """Reads the rows of the batch after it was assembled."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        trained = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        assert [row["prompt"] for row in inputs] == trained
        return output


def solves_the_first(prompts, **kwargs):
    """So that the numbers of rollouts differ after the first step of "est"."""
    return [float(prompt == "1+2=") for prompt in prompts]


class Curriculum:
    """The dataset backwards, epoch after epoch."""

    def _get_train_sampler(self, dataset=None):
        batch = self.args.generation_batch_size // self.num_generations
        repeats = self.num_iterations * self.args.steps_per_generation
        dataset = self.train_dataset if dataset is None else dataset
        return RepeatSampler(range(len(dataset))[::-1], self.num_generations, batch, repeats, shuffle=False)


class OwnLoader:
    """A data loader that always gives one prompt."""

    def get_train_dataloader(self):
        rows = [{"prompt": "7+8="}] * 64
        return self.accelerator.prepare(DataLoader(rows, batch_size=8, collate_fn=list))


class InheritedLoader:
    def _get_dataloader(self, *args, **kwargs):
        return super()._get_dataloader(*args, **kwargs)


class NoRepetitions:
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


class Collator:
    """A collator that changes prompts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = self.collate

    def collate(self, rows):
        return [row | {"prompt": "1" + row["prompt"]} for row in rows]


class ShorteningCollator(Collator):
    def collate(self, rows):
        return rows[1:]


class RemovingCollator(Collator):
    """The same where TRL removes unused columns, which it does here for a stream only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator, self.description = identity, "Training"

    def _get_collator_with_removed_columns(self, data_collator, description=None):
        assert description == self.description
        return self.collate


class Prefixing:
    """The same where TRL removes unused columns of a dataset that can be indexed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefix = "1"

    def _remove_unused_columns(self, dataset, description=None):
        return Dataset.from_list([{"prompt": self.prefix + row["prompt"]} for row in dataset])


def prefixed(run):
    assert {prompt for batch in run.prompts for prompt in batch} <= {"1" + prompt for prompt in PROMPTS}


def one_token_more(run):
    for batch in run.batches:
        assert batch["completion_mask"].sum(dim=1).tolist() == [QUICK["max_completion_length"] + 1] * 8


def two_tokens(run):
    assert all(batch["completion_mask"].shape[1] == 2 for batch in run.batches)


def shifted(run):
    rewards = [logs["reward"] for logs in run.trainer.state.log_history if "reward" in logs]
    assert min(rewards) < 0.5 and max(map(abs, rewards)) <= 0.5


def metrics_of_the_first_round(run):
    logs = [logs for logs in run.trainer.state.log_history if "reward" in logs]
    assert [step["mine"] for step in logs] == pytest.approx([step["reward"] for step in logs])


NO_EFFECT = r"Own\.{} would have no effect.*prompt queue.*Remove the override, or set"
METHODS = {
    "_calculate_rewards": Script(methods=ShiftedRewards, check=shifted),
    "_calculate_rewards, logged": Script(methods=LoggedMetric, modes=ROUNDS, check=metrics_of_the_first_round),
    "_generate_and_score_completions": Script(methods=DoubledAdvantages),
    "_generate": Script(methods=LongerCompletions, options={"generation_kwargs": NO_END}, check=one_token_more),
    "_generate with extra fields": Script(expects_extra_fields, methods=ExtraFields),
    "_generate_single_turn": Script(methods=ShorterCompletions, check=two_tokens),
    "sampled twice": Script(methods=SampledTwice),
    "rows read": Script(
        solves_the_first,
        lambda: prompt_dataset(2),
        methods=ReadRows,
        rejected={
            "dynamic sampling": "This row has no column .prompt.: .* the rows of the data loader are placeholders"
        },
    ),
    "a column added": Script(
        expects_stage,
        methods=AddedColumn,
        rejected=from_queue(r"Rows or values that an override passes to `_gen.*no effect"),
    ),
    "rows replaced": Script(
        methods=ReplacedRows,
        rejected=from_queue(r"override passes to `_generate_and_score_completions` would have no effect"),
    ),
    "_get_train_sampler": Script(
        methods=Curriculum, rejected=from_queue(NO_EFFECT.format("_get_train_sampler")), same_prompts=True
    ),
    "get_train_dataloader": Script(
        methods=OwnLoader, rejected=from_queue(NO_EFFECT.format("get_train_dataloader")), same_prompts=True
    ),
    "_get_dataloader": Script(methods=InheritedLoader, rejected=from_queue(NO_EFFECT.format("_get_dataloader"))),
    "a sampler without repetitions": Script(
        methods=NoRepetitions,
        modes=LOADER_MODES,
        rejected={
            mode: r"different prompts, but num_generations \(\d\) requires \d consecutive rows"
            for mode in LOADER_MODES
            if mode != "uniform"
        },
    ),
    "a collator": Script(methods=Collator, same_prompts=True, check=prefixed),
    "a collator that removes columns": Script(
        dataset=lambda: prompt_dataset().to_iterable_dataset(), methods=RemovingCollator, check=prefixed
    ),
    "a collator that removes rows": Script(
        methods=ShorteningCollator,
        modes=QUEUE_MODES,
        rejected=from_queue(r"returned \d rows for \d rows .*Add or remove rows in the dataset itself"),
    ),
    "_remove_unused_columns": Script(methods=Prefixing, same_prompts=True, check=prefixed),
}


@pytest.mark.parametrize(("name", "mode"), cases(METHODS))
def test_subclasses(name, mode, tmp_path):
    check_script(METHODS[name], mode, tmp_path)


# Every method that a training step calls


def counted_methods(base, excluded=()):
    """
    A subclass of `base` whose overrides of all methods of GRPOTrainer and Trainer count calls
    and pass arguments by name.
    """
    calls = {}

    def counting(name, signature):
        def method(self, *args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            arguments = signature.bind(self, *args, **kwargs).arguments
            arguments |= arguments.pop("kwargs", {})
            del arguments["self"]
            return getattr(super(own, self), name)(**arguments)

        return method

    methods = {}
    for owner in (Trainer, GRPOTrainer):
        for name, function in vars(owner).items():
            if inspect.isfunction(function) and not name.startswith("__") and name not in excluded:
                methods[name] = counting(name, inspect.signature(function))
    own = type("Counted", (base,), methods)
    return own, calls


# A generation is not aligned with the optimizer steps, so that log-probabilities are recomputed.
REUSED = {"num_iterations": 2}


@functools.cache
def called_by_grpo():
    own, calls = counted_methods(GRPOTrainer)
    args = GRPOConfig("unused", **QUICK | REUSED | {"num_generations": 4})
    trainer = own(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())
    calls.clear()
    trainer.train()
    return dict(calls)


@pytest.mark.parametrize("mode", MODES)
def test_every_method_that_grpo_calls_is_called_or_rejected(mode, tmp_path):
    expected = called_by_grpo()
    assert {"_calculate_rewards", "_generate", "training_step", *DATA_LOADING} <= expected.keys()
    rejected = DATA_LOADING if mode in QUEUE_MODES else ()
    own, calls = counted_methods(AdaGRPOTrainer, rejected)
    trainer = build(tmp_path / "own", trainer_class=own, **MODES[mode] | REUSED)
    calls.clear()
    trainer.train()
    assert expected.keys() - {*rejected} <= calls.keys()
    if mode not in ROUNDS:
        for name in ("_generate", "_calculate_rewards", "_generate_single_turn", "_generate_and_score_completions"):
            assert calls[name] == expected[name], f"{name} is called once per generation."


@pytest.mark.parametrize(
    "options",
    [{}, MODES["dynamic sampling"], MODES["batch"] | {"max_staleness": 1}, MODES["uniform"] | {"max_staleness": 1}],
    ids=str,
)
def test_an_override_of_generate_single_turn_is_rejected_where_a_server_is_sent_single_requests(options, tmp_path):
    own = type("Own", (ShorterCompletions, AdaGRPOTrainer), {})
    with pytest.raises(ValueError, match=r"Own\._generate_single_turn would have no effect.*Remove the override"):
        build(tmp_path, trainer_class=own, use_vllm=True, vllm_mode="server", **options)


@pytest.mark.parametrize("calls_super", [True, False])
def test_rewards_that_a_subclass_changes_are_evaluated(calls_super, tmp_path):
    class AllRight(AdaGRPOTrainer):
        def _calculate_rewards(self, *args):
            if calls_super:
                return torch.ones_like(super()._calculate_rewards(*args))
            return self.accelerator.gather(torch.ones(len(args[0]), 1))

    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "eval_dataset": prompt_dataset(1)}
    trainer = build(tmp_path, lambda completions, **_: [0.0] * len(completions), trainer_class=AllRight, **options)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_pass@1"] == metrics["eval_pass@2"] == 1
