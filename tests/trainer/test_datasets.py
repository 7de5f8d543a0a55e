"""Datasets: columns, formats, streams, sizes, and changes after the construction of the trainer."""

import copy
import threading
from collections import OrderedDict, deque
from datetime import datetime

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..helpers import (
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
from .scripts import RUNNING, Script, cases, check_script, disturb, except_uniform


NUMBER = 16
LOCK = threading.Lock()


def dataset_with(**columns):
    return lambda: Dataset.from_dict({"prompt": PROMPTS * (NUMBER // len(PROMPTS))} | columns)


def converted(convert):
    return lambda: convert(prompt_dataset())


def stream(number):
    return Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(number)]}).to_iterable_dataset()


def with_objects(rows):
    empty = {"array": np.zeros(1), "tensor": torch.zeros(1), "set": set(), "queue": deque(), "ordered": OrderedDict()}
    number = len(rows["prompt"])
    shared = {"lock": [LOCK] * number, "nested": [{"locks": [LOCK]}] * number}
    return rows | shared | {"values": [copy.deepcopy(empty) for _ in range(number)]}


def uses_objects(completions, lock, nested, values, **kwargs):
    """Containers in rows belong to one rollout, and other objects are shared."""
    assert all(one is LOCK for one in lock) and all(one["locks"][0] is LOCK for one in nested)
    for row in values:
        assert not any(row.values())
        row["array"] += 1
        row["tensor"] += 1
        row["set"].add(1)
        row["queue"].append(1)
        row["ordered"]["a"] = 1
    return even_reward(completions)


def rows_with_different_columns():
    for i in range(64):
        yield {"prompt": f"{i}+1="} | ({"answer": str(i + 1)} if i % 2 else {"source": "test"})


def expects_different_columns(prompts, completions, answer, source, **kwargs):
    for prompt, right, origin in zip(prompts, answer, source, strict=True):
        i = int(prompt.partition("+")[0])
        assert (right, origin) == ((str(i + 1), None) if i % 2 else (None, "test"))
    return even_reward(completions)


COLUMNS = {"when": datetime(2026, 1, 1), "none": None, "blob": b"x", "nested": {"a": [{"b": None}]}, "id": None}


def expects_columns(completions, **columns):
    assert all(columns[name] == [COLUMNS[name]] * len(completions) for name in COLUMNS)
    return even_reward(completions)


def expects_no_answer(completions, **columns):
    assert "trainer_state" in columns and "answer" not in columns
    return even_reward(completions)


def transform(rows):
    if RUNNING:
        disturb()
    return rows


class StopAtOnce(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        control.should_training_stop = True


TOO_FEW = except_uniform(r"needs \d distinct prompts")
DATASETS = {
    "id missing": Script(dataset=dataset_with(id=[None, "b"] * (NUMBER // 2))),
    "without images": Script(dataset=dataset_with(images=[[]] * NUMBER)),
    "very long": Script(dataset=dataset_with(prompt=["1+2=" * (1 + 40 * (i % 2)) for i in range(NUMBER)])),
    "equal": Script(dataset=dataset_with(prompt=["1+2="] * NUMBER)),
    "columns of any kind": Script(
        expects_columns, lambda: Dataset.from_list([COLUMNS | {"prompt": p} for p in PROMPTS * 4])
    ),
    "made by a transform": Script(
        dataset=lambda: Dataset.from_dict({"question": PROMPTS * 4}).with_transform(
            lambda rows: {"prompt": rows["question"]}
        )
    ),
    "ignored": Script(dataset=dataset_with(trainer_state=["a"] * NUMBER)),
    "named like a metric": Script(dataset=dataset_with(reward=[0.5] * NUMBER, advantages=[0.5] * NUMBER)),
    "unused columns": Script(
        expects_no_answer, dataset_with(answer=["1"] * NUMBER), options={"remove_unused_columns": True}
    ),
    "unused columns of a stream": Script(
        expects_no_answer,
        lambda: dataset_with(answer=["1"] * NUMBER)().to_iterable_dataset(),
        options={"remove_unused_columns": True},
    ),
    "live objects": Script(uses_objects, converted(lambda dataset: dataset.with_transform(with_objects))),
    "a transform that changes state": Script(
        dataset=converted(lambda dataset: dataset.with_transform(transform)), modes=QUEUE_MODES
    ),
    "a stream that changes state": Script(
        dataset=converted(lambda dataset: dataset.to_iterable_dataset().map(transform)), modes=QUEUE_MODES
    ),
    "one row": Script(dataset=converted(lambda dataset: dataset.select([0])), rejected=TOO_FEW, steps=0),
    "no row": Script(dataset=converted(lambda dataset: dataset.select([])), rejected=TOO_FEW, steps=0),
    "short stream": Script(dataset=lambda: stream(1), rejected=TOO_FEW, steps=0),
    "torch format": Script(
        dataset=lambda: dataset_with(x=list(range(NUMBER)))().with_format("torch"), same_prompts=True
    ),
    "pandas format": Script(dataset=converted(lambda dataset: dataset.with_format("pandas"))),
    "stream": Script(dataset=converted(lambda dataset: dataset.to_iterable_dataset(num_shards=2)), same_prompts=True),
    "taken": Script(dataset=converted(lambda dataset: dataset.to_iterable_dataset().take(10)), same_prompts=True),
    "shuffled stream": Script(
        dataset=converted(lambda dataset: dataset.to_iterable_dataset().shuffle(seed=1, buffer_size=3)),
        same_prompts=True,
    ),
    "rows with different columns": Script(
        expects_different_columns,
        lambda: IterableDataset.from_generator(rows_with_different_columns),
        options={"shuffle_dataset": False},
    ),
    "stopped before the first step": Script(
        dataset=lambda: stream(64),
        options={"gradient_accumulation_steps": 2, "callbacks": [StopAtOnce()]},
        steps=0,
    ),
}


@pytest.mark.parametrize(("name", "mode"), cases(DATASETS))
def test_datasets(name, mode, tmp_path):
    check_script(DATASETS[name], mode, tmp_path)


def test_a_stream_shorter_than_a_step_is_a_warning_in_the_mode_that_equals_grpo(tmp_path, caplog):
    trainer = build(tmp_path, dataset=stream(1), **MODES["uniform"])
    trainer.train()
    assert trainer.state.global_step == 0 and "No training step can be run" in caplog.text


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
    own = build(tmp_path, reward, dataset, **options | MODES[mode])
    for trainer in (stock, own):
        ATTRIBUTES[name](trainer)
        trainer.train()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_dataset_that_replaces_the_first_one_is_trained_on(mode, tmp_path):
    seen = set()

    def reward(prompts, completions, **kwargs):
        seen.update(prompts)
        return even_reward(completions)

    trainer = build(tmp_path, reward, max_steps=1, remove_unused_columns=True, **MODES[mode])
    trainer.train()
    assert seen <= set(PROMPTS)
    seen.clear()
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"{i}+9=" for i in range(8)]})
    trainer.train()
    assert seen and seen <= set(trainer.train_dataset["prompt"])
    seen.clear()
    trainer.train_dataset.set_transform(lambda rows: {"prompt": [prompt[::-1] for prompt in rows["prompt"]]})
    trainer.train()
    assert seen and all(prompt.startswith("=9+") for prompt in seen)
    trainer.train_dataset = trainer.train_dataset.select([])
    if mode != "uniform":
        with pytest.raises(ValueError, match="has only 0"):
            trainer.train()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["nowhere", "reward function", "transform", "generation"])
def test_another_training_starts_from_the_first_prompt(place, mode, tmp_path):
    """Also after an error that the script has caught."""
    failing, sampled = [], []

    def fail_once(where):
        if failing == [where]:
            failing.clear()
            raise OSError("no route to host")

    def reward(prompts, completions, **kwargs):
        fail_once("reward function")
        sampled.append(set(prompts))
        return [float(i % 2) for i in range(len(prompts))]

    def transform(rows):
        fail_once("transform")
        return rows

    class Failing(AdaGRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            fail_once("generation")
            return super()._generate_single_turn(*args, **kwargs)

    dataset = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(64)]}).with_transform(transform)
    trainer = build(tmp_path, reward, dataset, trainer_class=Failing, **MODES[mode])
    trainer.train()
    first = sampled[0]
    failing.append(place)
    if place != "nowhere":
        with pytest.raises(OSError):
            trainer.train()
    sampled.clear()
    trainer.train()
    assert sampled[0] == first
