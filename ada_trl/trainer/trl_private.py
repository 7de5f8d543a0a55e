"""
Everything private of TRL's trainer that this package relies on, in one module: attributes and patches. (The methods
that [`AdaGRPOTrainer`] overrides are in its own file, and the subclasses of TRL's vLLM classes in `ada_trl/vllm`
override private methods of those.)

Two globals of TRL's module are replaced while one of our trainers is constructed or samples in rounds
([`vllm_generation_class`], [`rank_local_collectives`]); two trainers in two threads are not supported.
benchmarks/README.md proposes changes to TRL that would make this unnecessary.
`tests/trainer/test_trl_contract.py` checks every name of TRL that is used here.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from ..utils.distributed import gather_unless_disabled


@contextmanager
def override_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """
    Temporarily set attributes of an object, which may be those of its class before and after. What code of the user
    assigns to them in the meantime stays.
    """
    before = {name: owner.__dict__[name] for name in attributes.keys() & owner.__dict__.keys()}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in attributes.items():
            if owner.__dict__.get(name) is value:
                del owner.__dict__[name]
                owner.__dict__.update({name: before[name]} if name in before else {})


# TRL's logs


@contextmanager
def without_repeated_warnings(text: str) -> Iterator[None]:
    """While the block runs, TRL logs only the first record that contains `text`."""
    logger, matches = logging.getLogger(grpo_trainer.__name__), 0

    def is_first(record: logging.LogRecord) -> bool:
        nonlocal matches
        if text not in str(record.msg):
            return True
        matches += 1
        return matches == 1

    logger.addFilter(is_first)
    try:
        yield
    finally:
        logger.removeFilter(is_first)


def append_metrics(trainer: GRPOTrainer, metrics: dict[str, float], prefix: str = "") -> None:
    """Log metrics of training, averaged by TRL over the logging interval."""
    for name, value in metrics.items():
        trainer._metrics["train"][prefix + name].append(value)


def replace_latest_metrics(trainer: GRPOTrainer, metrics: dict[str, list[float]]) -> None:
    """Overwrite the values that TRL has logged for this batch: one, or one per reward function of a name."""
    for name, values in metrics.items():
        trainer._metrics["train"][name][-len(values) :] = values


def set_token_count(trainer: GRPOTrainer, tokens: int) -> None:
    """Log the number of tokens seen in training so far; TRL logs the latest value, not a mean."""
    trainer._metrics["train"]["num_tokens"] = [tokens]


def drop_metric(trainer: GRPOTrainer, name: str) -> None:
    """Forget the values of a metric of training that is not to be logged."""
    trainer._metrics["train"].pop(name, None)


def replace_advantages(trainer: GRPOTrainer, output: dict[str, Any], advantage_of_row: np.ndarray) -> None:
    """Overwrite the advantages in this rank's batch and in the table of completions, from those of all ranks."""
    rows, logged = len(output["advantages"]), trainer._logs["advantages"]
    start = trainer.accelerator.process_index * rows
    output["advantages"] = output["advantages"].new_tensor(advantage_of_row[start : start + rows])
    for _ in range(min(len(advantage_of_row), len(logged))):
        logged.pop()
    logged.extend(advantage_of_row.tolist())


def append_extra_columns(trainer: GRPOTrainer, columns: dict[str, list]) -> None:
    """Add columns of all ranks' rows to the table of completions of this batch."""
    for name, values in columns.items():
        trainer._logs["extra"][name].extend(values)


def append_missing_extra_columns(trainer: GRPOTrainer, names: Sequence[str], rows: int) -> None:
    """Add empty cells to columns of the table, if they exist, for rows that have no values: those of an evaluation."""
    columns = trainer._logs["extra"]
    for name in names:
        if name in columns:
            columns[name].extend([None] * rows)


def set_pending_extra_columns(trainer: GRPOTrainer, columns: dict[str, list]) -> None:
    """Columns of this rank's rows, which TRL gathers when it assembles the batch."""
    trainer._pending_extra_logs.update(columns)


@contextmanager
def isolated_metrics(trainer: GRPOTrainer, mode: str = "train") -> Iterator[tuple[dict[str, list], dict[str, list]]]:
    """Keep TRL's metrics of `mode` and those of reward functions apart while the block runs; yields both."""
    isolated: dict[str, list] = defaultdict(list)
    pending: dict[str, list] = defaultdict(list)
    with override_attributes(trainer, _metrics=trainer._metrics | {mode: isolated}, _pending_metrics=pending):
        yield isolated, pending


def keep_other_metrics(trainer: GRPOTrainer, isolated: dict[str, list], pending: dict[str, list], rows: int) -> None:
    """
    Add isolated metrics of `rows` completions that are not TRL's to the step's: those of a user's subclass, and those
    of reward functions, of which TRL logs the mean over calls. Calls have different numbers of completions, each of
    which counts once.
    """
    for name, values in isolated.items():
        if name != "num_tokens" and not name.startswith(("completions/", "tools/")):
            trainer._metrics["train"][name] += values
    for name, values in pending.items():
        trainer._pending_metrics[name] += [sum(values) / len(values)] * rows


def pending_extra_columns(trainer: GRPOTrainer) -> dict[str, list]:
    """Values that reward functions have logged with `log_extra` since TRL gathered them last, by column."""
    return trainer._pending_extra_logs


# TRL's model of prompts: tokenizer, environments, and the columns that are read


def tokenizer(trainer: GRPOTrainer) -> PreTrainedTokenizerBase:
    """The tokenizer, which is part of the processor of a vision-language model."""
    return trainer._tokenizer


def is_vision_language_model(trainer: GRPOTrainer) -> bool:
    return trainer._is_vlm


def environment_pool(trainer: GRPOTrainer) -> dict[str | None, list]:
    """Free environments by name, from the front of which TRL takes those of a batch."""
    return trainer._environment_pool


def environment_names(trainer: GRPOTrainer) -> list[str | None]:
    """The name of the environment of each row of the last batch; `None` if there is only one kind."""
    return trainer._batch_environments


def has_named_environments(trainer: GRPOTrainer) -> bool:
    return trainer.environment_factories is not None and trainer._multi_environment


def dataset_and_collator(trainer: GRPOTrainer) -> tuple[Dataset | IterableDataset, Callable]:
    """The training set and its collator without unused columns, as TRL's data loader uses them."""
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if isinstance(dataset, Dataset):
        return trainer._remove_unused_columns(dataset, description="Training"), collate
    # The columns of a stream are known when its rows are read.
    return dataset, trainer._get_collator_with_removed_columns(collate, description="Training")


# TRL's position in the run


def micro_steps_per_generation(trainer: GRPOTrainer) -> int:
    return trainer.args.steps_per_generation * trainer.num_iterations


def prompts_per_generation(trainer: GRPOTrainer) -> int:
    """Number of prompts of all ranks whose rows the data loader yields for one generation."""
    rows = trainer._train_batch_size * trainer.args.steps_per_generation * trainer.accelerator.num_processes
    return rows // trainer.num_generations


def micro_step(trainer: GRPOTrainer) -> int:
    """Number of micro-batches trained on so far in this process."""
    return trainer._step


def forget_buffered_batch(trainer: GRPOTrainer) -> None:
    """Discard the rest of a batch of an earlier call of `train`, so that the next step generates."""
    trainer._step, trainer._buffered_inputs = 0, None


def forget_evaluation_model(trainer: GRPOTrainer) -> None:
    """
    Let the training prepare the model although an evaluation has done so before.

    An evaluation prepares it without `DistributedDataParallel`, and accelerate leaves a model that is prepared as it
    is. The processes would then exchange no gradients, and train different weights.
    """
    model, accelerator = trainer.model, trainer.accelerator
    # A sharded model is prepared for an evaluation as for the training.
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if accelerator.num_processes == 1 or is_sharded or trainer.model_wrapped is not model:
        return
    if model.__dict__.pop("_is_accelerate_prepared", False):
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else mixed precision is applied twice


# Globals of TRL's module that are replaced for a while


@contextmanager
def vllm_generation_class(args: GRPOConfig, **options: Any) -> Iterator[None]:
    """
    While the block runs, a [`~trl.GRPOTrainer`] that uses vLLM builds an [`~vllm.generation.AdaVLLMGeneration`] with
    these options. TRL looks the class up as a global of its module, so a subclass cannot choose another one.
    """
    if not args.use_vllm:
        yield
        return
    from ..vllm.generation import AdaVLLMGeneration  # needs the extra

    with override_attributes(grpo_trainer, VLLMGeneration=functools.partial(AdaVLLMGeneration, **options)):
        yield


@contextmanager
def rank_local_collectives(trainer: GRPOTrainer) -> Iterator[None]:
    """
    While the block runs, TRL's gathers respect [`~utils.distributed.no_collectives`]: ranks sample and score different
    numbers of rows, at different times. TRL calls `gather` as a global of its module and as a method of the
    accelerator.
    """
    with (
        override_attributes(grpo_trainer, gather=gather_unless_disabled(grpo_trainer.gather)),
        override_attributes(trainer.accelerator, gather=gather_unless_disabled(trainer.accelerator.gather)),
    ):
        yield
