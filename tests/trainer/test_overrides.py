"""Overrides of a subclass: each is called as GRPOTrainer calls it, or rejected by name where the mode does not call it."""

import functools
import inspect

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, identity

from ada_trl import AdaGRPOTrainer
from ada_trl.trainer.trainer_validation import DATA_LOADING

from ..helpers import (
    PROMPTS,
    QUICK,
    Recorder,
    build,
    even_reward,
    logs_of,
    prompt_dataset,
    prompts_of,
    tiny_model,
    tiny_tokenizer,
)


LOADER_MODES = {
    "uniform": {"adaptive_sampling": "uniform", "num_generations": 4},
    "batch": {"baseline": "batch", "num_generations": 4},
    "est": {"adaptive_sampling": "est-ema", "num_generations": 4},
    "seq-balance": {"num_generations": 4},
}
QUEUE_MODES = {
    "dynamic sampling": {"zero_variance_groups": "resample", "num_generations": 4, "samples_per_round": 4},
    "oversampling": {"adaptive_sampling": "uniform", "prompt_oversampling": 2, "num_generations": 4},
    "retries": {"adaptive_sampling": "seq-pos", "baseline": "posterior", "num_generations": 1},
}


class Curriculum:
    """Mixin: the dataset backwards, epoch after epoch."""

    def _get_train_sampler(self, dataset=None):
        batch = self.args.generation_batch_size // self.num_generations
        repeats = self.num_iterations * self.args.steps_per_generation
        dataset = self.train_dataset if dataset is None else dataset
        return RepeatSampler(range(len(dataset))[::-1], self.num_generations, batch, repeats, shuffle=False)


class Loader:
    """Mixin: a data loader that always gives one prompt."""

    def get_train_dataloader(self):
        rows = [{"prompt": "7+8="}] * 64
        return self.accelerator.prepare(DataLoader(rows, batch_size=8, collate_fn=list))


class Collator:
    """Mixin: a collator that changes prompts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = self.collate

    def collate(self, rows):
        return [row | {"prompt": "1" + row["prompt"]} for row in rows]


def trained_prompts(tmp_path, mixin, mode):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(sorted(set(prompts)))
        return even_reward(completions)

    if mode is None:
        trainer_class = type("Stock", (mixin, GRPOTrainer), {})
        args = GRPOConfig(str(tmp_path), **QUICK | {"num_generations": 4})
        trainer_class(tiny_model(), reward, args, prompt_dataset(), processing_class=tiny_tokenizer()).train()
    else:
        build(tmp_path, reward, trainer_class=type("Own", (mixin, Recorder), {}), **LOADER_MODES[mode]).train()
    return [prompts for i, prompts in enumerate(seen) if not i or prompts != seen[i - 1]]


@pytest.mark.parametrize("mode", LOADER_MODES)
@pytest.mark.parametrize("mixin", [Curriculum, Loader, Collator])
def test_data_of_a_subclass_is_trained_on_as_in_grpo(mixin, mode, tmp_path):
    own, stock = trained_prompts(tmp_path / "own", mixin, mode), trained_prompts(tmp_path / "stock", mixin, None)
    assert [prompts for prompts in own if prompts in stock] == stock, "Seq modes have further rounds of some prompts."


@pytest.mark.parametrize("mode", QUEUE_MODES)
@pytest.mark.parametrize("name", DATA_LOADING)
def test_overrides_of_the_data_loading_are_rejected_where_prompts_come_from_the_queue(name, mode, tmp_path):
    def override(self, *args, **kwargs):
        return getattr(super(own, self), name)(*args, **kwargs)

    own = type("Own", (AdaGRPOTrainer,), {name: override})
    with pytest.raises(
        ValueError, match=rf"Own\.{name} would have no effect.*prompt queue.*Remove the override, or set"
    ):
        build(tmp_path, trainer_class=own, **QUEUE_MODES[mode])


class RemovingCollator(Collator):
    """Mixin: the same where TRL removes unused columns, which it does here for a stream only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator, self.description = identity, "Training"

    def _get_collator_with_removed_columns(self, data_collator, description=None):
        assert description == self.description
        return self.collate


class Prefixing:
    """Mixin: the same where TRL removes unused columns of a dataset that can be indexed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefix = "1"

    def _remove_unused_columns(self, dataset, description=None):
        return Dataset.from_list([{"prompt": self.prefix + row["prompt"]} for row in dataset])


@pytest.mark.parametrize("mode", QUEUE_MODES)
@pytest.mark.parametrize("mixin", [Collator, RemovingCollator, Prefixing])
def test_collators_and_removed_columns_of_a_subclass_decide_what_the_prompt_queue_reads(mixin, mode, tmp_path):
    seen = set()

    def reward(prompts, completions, **kwargs):
        seen.update(prompts)
        return even_reward(completions)

    dataset = prompt_dataset().to_iterable_dataset() if mixin is RemovingCollator else prompt_dataset()
    build(tmp_path, reward, dataset, trainer_class=type("Own", (mixin, Recorder), {}), **QUEUE_MODES[mode]).train()
    assert seen and seen <= {"1" + prompt for prompt in PROMPTS}


def test_a_collator_that_changes_the_number_of_rows_is_rejected_where_prompts_come_from_the_queue(tmp_path):
    trainer = build(tmp_path, **QUEUE_MODES["retries"])
    trainer.data_collator = lambda rows: rows[1:]
    with pytest.raises(ValueError, match=r"returned 7 rows for 8 rows .*Add or remove rows in the dataset itself"):
        trainer.train()


@pytest.mark.parametrize("mode", ["batch", "est", "seq-balance", "oversampling", "retries"])
def test_an_override_reads_the_rows_of_the_batch_after_it_was_assembled(mode, tmp_path):
    batches = []

    class Reading(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            batches.append((prompts_of(output), [row["prompt"] for row in inputs]))
            return output

    def reward(prompts, **kwargs):  # so that the numbers of rollouts differ after the first step of "est"
        return [float(prompt == "1+1=") for prompt in prompts]

    dataset = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(2 if mode == "est" else 16)]})
    build(tmp_path, reward, dataset, trainer_class=Reading, **(LOADER_MODES | QUEUE_MODES)[mode]).train()
    assert len(batches) == 2 and all(read == trained for read, trained in batches)


@pytest.mark.parametrize("mode", QUEUE_MODES)
def test_an_override_may_sample_twice(mode, tmp_path):
    class Twice(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            super()._generate_and_score_completions(inputs)
            return super()._generate_and_score_completions(inputs)

    trainer = build(tmp_path, trainer_class=Twice, **QUEUE_MODES[mode])
    trainer.train()
    assert trainer.state.global_step == 2


def test_rows_that_an_override_replaces_are_rejected_where_prompts_come_from_the_queue(tmp_path):
    class Replacing(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions([{"prompt": "1+1="} for _ in inputs])

    with pytest.raises(ValueError, match=r"override passes to `_generate_and_score_completions` would have no effect"):
        build(tmp_path, trainer_class=Replacing, **QUEUE_MODES["retries"]).train()


@pytest.mark.parametrize(
    "options",
    [
        {"adaptive_sampling": "seq-balance", "num_generations": 4},
        {"adaptive_sampling": "uniform", "num_generations": 4, "zero_variance_groups": "resample"},
        {"baseline": "batch", "max_staleness": 1},
        {"adaptive_sampling": "uniform", "num_generations": 4, "max_staleness": 1},
    ],
)
def test_an_override_of_generate_single_turn_is_rejected_where_a_server_is_sent_single_requests(options, tmp_path):
    class Own(AdaGRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            return super()._generate_single_turn(*args, **kwargs)

    with pytest.raises(
        ValueError, match=r"Own\._generate_single_turn would have no effect.*Remove the override, or set"
    ):
        build(tmp_path, trainer_class=Own, use_vllm=True, vllm_mode="server", **options)


def test_a_sampler_that_does_not_repeat_rows_is_an_error(tmp_path):
    class Sequential(Recorder):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with pytest.raises(ValueError, match=r"different prompts, but num_generations \(4\) requires 4 consecutive rows"):
        build(tmp_path, trainer_class=Sequential, num_generations=4).train()
    trainer = build(tmp_path, trainer_class=Sequential, **LOADER_MODES["uniform"])
    trainer.train()
    assert trainer.state.global_step == 2, "As in GRPOTrainer, in the mode that equals it."


@pytest.mark.parametrize("mode", [*LOADER_MODES, *QUEUE_MODES])
def test_unused_columns_are_removed(mode, tmp_path):
    dataset = prompt_dataset().add_column("answer", ["1"] * 16)
    for name, rows in {"indexed": dataset, "stream": dataset.to_iterable_dataset()}.items():
        columns = set()

        def reward(completions, columns=columns, **kwargs):
            columns.update(kwargs)
            return even_reward(completions)

        options = {"remove_unused_columns": True, **(LOADER_MODES | QUEUE_MODES)[mode]}
        build(tmp_path, reward, rows, **options).train()
        assert "trainer_state" in columns and "answer" not in columns, name


ATTRIBUTES = {
    "shuffle_dataset": lambda trainer: setattr(trainer, "shuffle_dataset", False),
    "seed": lambda trainer: setattr(trainer.args, "seed", 7),
    "steps_per_generation": lambda trainer: setattr(trainer.args, "steps_per_generation", 2),
    "_signature_columns": lambda trainer: setattr(trainer, "_signature_columns", ["prompt", "answer"]),
}


@pytest.mark.parametrize("mode", ["uniform", *QUEUE_MODES])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_set_after_the_construction_decide_which_rows_are_read(name, mode, tmp_path):
    dataset = Dataset.from_list([{"prompt": f"{i}+1=", "answer": str(i), "unused": 0} for i in range(32)])
    seen = []

    def reward(prompts, completions, **columns):
        seen.append((len(prompts), list(dict.fromkeys(prompts))[:2], columns.keys()))
        return even_reward(completions)

    options = {"remove_unused_columns": True, "max_steps": 1, "num_generations": 4}
    args = GRPOConfig(str(tmp_path), **QUICK | options)
    stock = GRPOTrainer(tiny_model(), reward, args, dataset, processing_class=tiny_tokenizer())
    own = build(tmp_path, reward, dataset, **options | (LOADER_MODES | QUEUE_MODES)[mode])
    for trainer in (stock, own):
        ATTRIBUTES[name](trainer)
        trainer.train()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance", "oversampling"])
def test_options_that_the_trainer_was_constructed_from_cannot_be_changed(mode, tmp_path):
    changes = {"args.prompt_oversampling": 3, "args.max_rounds": 2, "args.num_generations": 8, "num_generations": 8}
    if mode != "uniform":
        changes |= {"args.scale_rewards": "batch", "scale_rewards": "batch"}
    trainer = build(tmp_path, **(LOADER_MODES | QUEUE_MODES)[mode])
    for name, value in changes.items():
        owner = trainer.args if name.startswith("args.") else trainer
        attribute = name.removeprefix("args.")
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        with pytest.raises(
            ValueError, match=rf"trainer\.{name} was changed from {before!r} to {value!r}.*another trainer"
        ):
            trainer.train()
        setattr(owner, attribute, before)
    trainer.train()


# Every method that a training step calls


def counted_methods(base, excluded=()):
    """A subclass of `base` whose overrides of all methods of GRPOTrainer and Trainer count calls and pass arguments by name."""
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


@pytest.mark.parametrize("mode", [*LOADER_MODES, *QUEUE_MODES])
def test_every_method_that_grpo_calls_is_called_or_rejected(mode, tmp_path):
    expected = called_by_grpo()
    assert {"_calculate_rewards", "_generate", "training_step", *DATA_LOADING} <= expected.keys()
    rejected = DATA_LOADING if mode in QUEUE_MODES else ()
    own, calls = counted_methods(AdaGRPOTrainer, rejected)
    trainer = build(tmp_path / "own", trainer_class=own, **(LOADER_MODES | QUEUE_MODES)[mode] | REUSED)
    calls.clear()
    trainer.train()
    assert expected.keys() - {*rejected} <= calls.keys()
    if not trainer.args.is_multi_round:
        for name in ("_generate", "_calculate_rewards", "_generate_single_turn", "_generate_and_score_completions"):
            assert calls[name] == expected[name], f"{name} is called once per generation."


@pytest.mark.parametrize("mode", [*LOADER_MODES, *QUEUE_MODES])
def test_rewards_that_a_subclass_changes_are_trained_on(mode, tmp_path):
    class Doubling(Recorder):
        def _calculate_rewards(self, *args):
            return 2 * super()._calculate_rewards(*args) + 1

    rewards = []
    for trainer_class, threshold in ((Recorder, 0.7), (Doubling, 1.7)):
        options = (LOADER_MODES | QUEUE_MODES)[mode]
        trainer = build(tmp_path, trainer_class=trainer_class, max_steps=1, positive_threshold=threshold, **options)
        trainer.train()
        rewards.append(trainer.state.log_history[0]["reward"])
    assert rewards[1] == pytest.approx(2 * rewards[0] + 1)


@pytest.mark.parametrize("calls_super", [True, False])
def test_rewards_that_a_subclass_changes_are_evaluated(calls_super, tmp_path):
    class AllRight(AdaGRPOTrainer):
        def _calculate_rewards(self, *args):
            if calls_super:
                return torch.ones_like(super()._calculate_rewards(*args))
            return self.accelerator.gather(torch.ones(len(args[0]), 1))

    options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = build(
        tmp_path,
        lambda completions, **_: [0.0] * len(completions),
        trainer_class=AllRight,
        eval_dataset=prompt_dataset(1),
        **options,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_pass@1"] == metrics["eval_pass@2"] == 1


@pytest.mark.parametrize("mode", [*LOADER_MODES, *QUEUE_MODES])
def test_fields_that_a_subclass_returns_with_completions_are_arguments_of_reward_functions(mode, tmp_path):
    class Judging(AdaGRPOTrainer):
        def _generate(self, prompts):
            prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, *others = super()._generate(
                prompts
            )
            fields = {"first": [text[:1] for text in completions], "judge": "strict"}
            return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields | fields, *others

    def reward(completions, first, judge, **kwargs):
        assert first == [text[:1] for text in completions] and set(judge) == {"strict"}
        return even_reward(completions)

    trainer = build(tmp_path, reward, trainer_class=Judging, **(LOADER_MODES | QUEUE_MODES)[mode])
    trainer.train()
    assert trainer.state.global_step == QUICK["max_steps"]


@pytest.mark.parametrize("mode", ["batch", "seq-balance", "dynamic sampling"])
def test_completions_that_a_subclass_changes_are_changed_once(mode, tmp_path):
    class Lengthening(Recorder):
        def _generate(self, prompts):
            prompt_ids, completion_ids, *others = super()._generate(prompts)
            return prompt_ids, [[*ids, ids[-1]] for ids in completion_ids], *others

    no_end = {"suppress_tokens": [tiny_tokenizer().eos_token_id, tiny_tokenizer().pad_token_id]}
    options = {"max_steps": 1, "generation_kwargs": no_end, **(LOADER_MODES | QUEUE_MODES)[mode]}
    trainer = build(tmp_path, trainer_class=Lengthening, **options)
    trainer.train()
    (batch,) = trainer.batches
    assert batch["completion_mask"].sum(dim=1).tolist() == [QUICK["max_completion_length"] + 1] * 8
    assert set(prompts_of(batch)) <= set(PROMPTS)


class WithOwnMetric(Recorder):
    def _calculate_rewards(self, inputs, *args):
        rewards = super()._calculate_rewards(inputs, *args)
        self._metrics["train"]["mine"].append(rewards.mean().item())
        return rewards


@pytest.mark.parametrize("options", [{}, {"adaptive_sampling": "uniform", "zero_variance_groups": "resample"}])
def test_metrics_that_a_subclass_logs_are_those_of_the_first_round(options, tmp_path):
    trainer = build(tmp_path, trainer_class=WithOwnMetric, num_generations=4, **options)
    trainer.train()
    assert [logs["mine"] for logs in logs_of(trainer)] == pytest.approx([logs["reward"] for logs in logs_of(trainer)])
