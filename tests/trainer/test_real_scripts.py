"""
User code that GRPOTrainer trains with: every mode trains with it too, or an error says why it cannot.

A row of `SCRIPTS` is a kind of user code, often a public report; a new report is a new row. Each row is tried in one mode per outcome
here, in all modes by the slow tests, and in random combinations with other rows.
"""

import copy
import functools
import inspect
import math
import random
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, identity

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.trainer.arguments import DATA_LOADING

from ..conversations import Counting
from ..helpers import (
    LOADER_MODES,
    MODES,
    PROMPTS,
    QUEUE_MODES,
    QUICK,
    Recorder,
    build,
    chat_tokenizer,
    config,
    even_reward,
    prompt_dataset,
    tiny_chat_model,
    tiny_model,
    tiny_tokenizer,
)


ROUNDS = ("seq-balance", "dynamic sampling")  # modes with several rounds per step


class Script(NamedTuple):
    """
    User code.

    Args:
        reward (`Callable` or `list[Callable]`), dataset (`Callable`), options (`dict`):
            Arguments of the trainer and options of its configuration; `dataset` is called for each run.
        methods (`type`, *optional*):
            Mixin with the methods of the user's subclass.
        modes (`Collection[str]`):
            Modes that are tried.
        rejected (`dict[str, str]`):
            Pattern of the error message by mode; in the other modes the script trains.
        equals (`Callable`, *optional*):
            Reward function with which a run must be the same, bit for bit. By default, `"uniform"` must equal GRPOTrainer.
        same_prompts (`bool`):
            Whether prompts and their order are those of GRPOTrainer where a data loader provides them.
        check (`Callable[[Run], None]`, *optional*):
            Further assertions about a run.
    """

    reward: Any = even_reward
    dataset: Callable[[], Any] = prompt_dataset
    options: Mapping[str, Any] = {}
    methods: type | None = None
    modes: Collection[str] = tuple(MODES)
    rejected: Mapping[str, str] = {}
    equals: Any = None
    same_prompts: bool = False
    check: Callable[["Run"], None] | None = None


class Run(NamedTuple):
    trainer: Any
    batches: list[dict]
    prompts: list[list[str]]  # of the rows of each batch
    mode: str | None


def everywhere(pattern):
    return dict.fromkeys(MODES, pattern)


def from_queue(pattern):
    return dict.fromkeys(QUEUE_MODES, pattern)


def except_uniform(pattern):
    return {mode: pattern for mode in MODES if mode != "uniform"}


# Reward functions

RUNNING: list = []  # the trainer of the current run, for user code that changes it
GUARDS: list = []


def returning(convert):
    def reward(completions, **kwargs):
        return convert(even_reward(completions))

    return reward


def changing(change):
    def reward(completions, **kwargs):
        rewards = even_reward(completions)
        change(kwargs | {"completions": completions})
        return rewards

    return reward


async def asynchronous(completions, **kwargs):
    return even_reward(completions)


async def asynchronous_none(completions, **kwargs):
    return None


class Instance:
    def __call__(self, completions, **kwargs):
        return even_reward(completions)


def generator(completions, **kwargs):
    yield from even_reward(completions)


def scaled(completions, scale, **kwargs):
    return [scale * reward for reward in even_reward(completions)]


def enter_inference_mode(kwargs):
    GUARDS.append(torch.inference_mode())
    GUARDS[-1].__enter__()


def disturb(*_):
    RUNNING[0].model.eval()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


def disturb_and_fail(kwargs):
    disturb()
    torch.set_default_device("meta")
    raise ZeroDivisionError("my bug")


def fail_in_the_second_step(kwargs):
    if kwargs["trainer_state"].global_step:
        raise ZeroDivisionError("my bug")


def evaluate(kwargs):
    if RUNNING and RUNNING[0].model.training:
        assert "eval_reward" in RUNNING[0].evaluate()


def modify_everything(prompts, completions, completion_ids, tags, **kwargs):
    values = even_reward(completions)
    for ids, tag in zip(completion_ids, tags, strict=True):
        assert tag == {"names": ["a"]}, "Another rollout has changed it."
        ids.clear()
        tag["names"].append("b")
    for column in (prompts, completions, completion_ids):
        column[:] = [None] * len(column)
    return values


def one_mean_of_seven_functions(run):
    logs = run.trainer.state.log_history[0]
    means = {value for name, value in logs.items() if name.startswith("rewards/") and name.endswith("/mean")}
    assert len(run.trainer.reward_func_names) == 7 and len(means) == 1 and 0 < means.pop() <= 1


def no_advantages(run):
    assert not any(batch["advantages"].any() for batch in run.batches)


def no_tokens(run):
    assert not any(batch["completion_mask"].any() for batch in run.batches)
    assert run.trainer.state.log_history[0]["ada/frac_zero_advantage_groups"] == 1


NO_END = {"suppress_tokens": [tiny_tokenizer().eos_token_id, tiny_tokenizer().pad_token_id]}
EVALUATED = {"eval_dataset": Dataset.from_dict({"prompt": ["9+9="] * 2}), "per_device_eval_batch_size": 4}
REWARDS = {
    "too few": Script(returning(lambda rewards: rewards[1:]), rejected=everywhere(".")),
    "all unscored": Script(returning(lambda rewards: [None] * len(rewards)), check=no_advantages),
    "NaN": Script(returning(lambda rewards: [math.nan if i % 3 else reward for i, reward in enumerate(rewards)])),
    "infinite": Script(returning(lambda rewards: [math.inf if i % 3 else -math.inf for i in range(len(rewards))])),
    "integers": Script(returning(lambda rewards: [int(reward) for reward in rewards])),
    "numpy scalars": Script(returning(lambda rewards: [np.float64(reward) for reward in rewards])),
    "numpy objects": Script(returning(lambda rewards: np.array([None, *rewards[1:]], dtype=object))),
    "tensor": Script(returning(lambda r: torch.tensor(r, dtype=torch.bfloat16, requires_grad=True))),
    "tuple of tensors": Script(returning(lambda rewards: tuple(torch.tensor(reward) for reward in rewards))),
    "any callable and iterable": Script(
        [generator, asynchronous, Instance(), functools.partial(scaled, scale=1), returning(np.array)]
        + [returning(tuple), lambda completions, **_: torch.tensor(even_reward(completions))],
        options={"success_reward": "generator"},
        check=one_mean_of_seven_functions,
    ),
    "unscored where the weight is not 0": Script(
        [even_reward, returning(lambda rewards: [None] * len(rewards))],
        options={"reward_weights": [0.0, 1.0]},
        check=no_advantages,
    ),
    "modifies its arguments": Script(
        modify_everything,
        lambda: Dataset.from_list(
            [{"prompt": p, "tags": {"names": ["a"]}} for p in PROMPTS * 4]
        ).to_iterable_dataset(),
        equals=even_reward,
    ),
    "evaluation mode": Script(changing(lambda _: RUNNING[0].model.eval()), equals=even_reward),
    "a module's evaluation mode": Script(changing(lambda _: RUNNING[0].model.lm_head.eval()), equals=even_reward),
    "no gradients": Script(changing(lambda _: torch.set_grad_enabled(False)), equals=even_reward),
    "inference mode": Script(changing(enter_inference_mode), equals=even_reward),
    "default dtype": Script(changing(lambda _: torch.set_default_dtype(torch.float64)), equals=even_reward),
    "default device": Script(changing(lambda _: torch.set_default_device("meta")), equals=even_reward),
    "seeds": Script(changing(lambda _: torch.manual_seed(7))),
    "fails": Script(changing(fail_in_the_second_step), rejected=everywhere("^my bug$")),
    "changes state and fails": Script(changing(disturb_and_fail), rejected=everywhere("^my bug$")),
    "evaluates the policy": Script(
        changing(evaluate), options=EVALUATED | {"num_generations_eval": 2}, equals=changing(evaluate)
    ),  # GRPOTrainer goes on in evaluation mode
    "logs": Script(changing(lambda kwargs: kwargs["log_metric"]("mine", 1.0))),
    "logs too little": Script(changing(lambda kwargs: kwargs["log_extra"]("mine", [1]))),
    "all rows masked": Script(
        options={"mask_truncated_completions": True, "generation_kwargs": NO_END}, check=no_tokens
    ),
}


# Datasets

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


def no_step(run):
    assert run.trainer.state.global_step == 0


TOO_FEW = except_uniform(r"needs \d distinct prompts")
DATASETS = {
    "id repeated": Script(dataset=dataset_with(id=[i % 2 for i in range(NUMBER)])),
    "id constant": Script(dataset=dataset_with(id=["a"] * NUMBER)),
    "id missing": Script(dataset=dataset_with(id=[None, "b"] * (NUMBER // 2))),
    "id of lists": Script(dataset=dataset_with(id=[[i] for i in range(NUMBER)])),
    "without images": Script(dataset=dataset_with(images=[[]] * NUMBER)),
    "very long": Script(dataset=dataset_with(prompt=["1+2=" * (1 + 40 * (i % 2)) for i in range(NUMBER)])),
    "unicode": Script(dataset=dataset_with(prompt=[f"é漢😀\u202e\x00{prompt}" for prompt in PROMPTS * 4])),
    "equal": Script(dataset=dataset_with(prompt=["1+2="] * NUMBER)),
    "nested": Script(dataset=dataset_with(answer=[{"parts": [{"value": i}]} for i in range(NUMBER)])),
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
    "one row": Script(dataset=converted(lambda dataset: dataset.select([0])), rejected=TOO_FEW, check=no_step),
    "no row": Script(dataset=converted(lambda dataset: dataset.select([])), rejected=TOO_FEW, check=no_step),
    "short stream": Script(dataset=lambda: stream(1), rejected=TOO_FEW, check=no_step),
    "torch format": Script(
        dataset=lambda: dataset_with(x=list(range(NUMBER)))().with_format("torch"), same_prompts=True
    ),
    "pandas format": Script(dataset=converted(lambda dataset: dataset.with_format("pandas"))),
    "numpy format": Script(dataset=converted(lambda dataset: dataset.with_format("numpy"))),
    "stream": Script(dataset=converted(lambda dataset: dataset.to_iterable_dataset(num_shards=2)), same_prompts=True),
    "taken": Script(dataset=converted(lambda dataset: dataset.to_iterable_dataset().take(10)), same_prompts=True),
    "shuffled stream": Script(
        dataset=converted(lambda dataset: dataset.to_iterable_dataset().shuffle(seed=1, buffer_size=3)),
        same_prompts=True,
    ),
    "mapped stream": Script(
        dataset=converted(lambda d: d.to_iterable_dataset().map(lambda row: {"prompt": f"1{row['prompt']}"})),
        same_prompts=True,
    ),
    "filtered stream": Script(
        dataset=converted(lambda d: d.to_iterable_dataset().filter(lambda row: "1" in row["prompt"]))
    ),
    "rows with different columns": Script(
        expects_different_columns,
        lambda: IterableDataset.from_generator(rows_with_different_columns),
        options={"shuffle_dataset": False},
    ),
    "stopped before the first step": Script(
        dataset=lambda: stream(64),
        options={"gradient_accumulation_steps": 2, "callbacks": [StopAtOnce()]},
        check=no_step,
    ),
}


# Methods of a subclass


class ScaledLoss:
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class ScaledPrivateLoss:
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


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


def shifted(run):
    rewards = [logs["reward"] for logs in run.trainer.state.log_history if "reward" in logs]
    assert min(rewards) < 0.5 and max(map(abs, rewards)) <= 0.5


def metrics_of_the_first_round(run):
    logs = [logs for logs in run.trainer.state.log_history if "reward" in logs]
    assert [step["mine"] for step in logs] == pytest.approx([step["reward"] for step in logs])


NO_EFFECT = r"Own\.{} would have no effect.*prompt queue.*Remove the override, or set"
METHODS = {
    "compute_loss": Script(methods=ScaledLoss),
    "_compute_loss": Script(methods=ScaledPrivateLoss),
    "_calculate_rewards": Script(methods=ShiftedRewards, check=shifted),
    "_calculate_rewards, logged": Script(methods=LoggedMetric, modes=ROUNDS, check=metrics_of_the_first_round),
    "_generate_and_score_completions": Script(methods=DoubledAdvantages),
    "_generate": Script(methods=LongerCompletions, options={"generation_kwargs": NO_END}, check=one_token_more),
    "_generate with extra fields": Script(expects_extra_fields, methods=ExtraFields),
    "_generate_single_turn": Script(methods=ShorterCompletions),
    "sampled twice": Script(methods=SampledTwice),
    "rows read": Script(
        solves_the_first,
        lambda: prompt_dataset(2),
        methods=ReadRows,
        rejected={
            "dynamic sampling": "This row has no column .prompt.: .* the rows of the data loader are placeholders"
        },
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
        dataset=converted(lambda dataset: dataset.to_iterable_dataset()), methods=RemovingCollator, check=prefixed
    ),
    "a collator that removes rows": Script(
        methods=ShorteningCollator,
        modes=QUEUE_MODES,
        rejected=from_queue(r"returned \d rows for \d rows .*Add or remove rows in the dataset itself"),
    ),
    "_remove_unused_columns": Script(methods=Prefixing, same_prompts=True, check=prefixed),
}

SCRIPTS = {
    f"{kind}: {name}": script
    for kind, scripts in {"reward": REWARDS, "dataset": DATASETS, "subclass": METHODS}.items()
    for name, script in scripts.items()
}


# Running a script


def assert_state_is_that_of_a_training_step():
    assert torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.fixture(autouse=True)
def defaults():
    yield
    restore()


def restore():
    RUNNING.clear()
    while GUARDS:
        GUARDS.pop().__exit__(None, None, None)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)


def build_script(script, mode, directory, batches):
    """A trainer that keeps its batches; of GRPOTrainer itself without a mode."""

    class Recording(GRPOTrainer if mode is None else AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                batches.append(output)
            return output

    trainer_class = type("Own", (script.methods, Recording) if script.methods else (Recording,), {})
    options = dict(script.options)
    given = {name: options.pop(name) for name in ("callbacks", "eval_dataset") if name in options}
    if mode is None:
        options = {name: value for name, value in options.items() if name in GRPOConfig.__dataclass_fields__}
        defaults = {"epsilon_high": 0.28, "scale_rewards": "none"}
        args = GRPOConfig(str(directory), **QUICK | defaults | options)
    else:
        args = config(directory, **QUICK | options | MODES[mode])
    return trainer_class(
        tiny_model(), script.reward, args, script.dataset(), processing_class=tiny_tokenizer(), **given
    )


def train(script, mode, directory):
    batches: list[dict] = []
    trainer = build_script(script, mode, directory, batches)
    functions, dataset = list(trainer.reward_funcs), trainer.train_dataset
    before = str(dataset[0]) if isinstance(dataset, Dataset) and len(dataset) else None
    RUNNING[:] = [trainer]
    trainer.train()
    RUNNING.clear()
    if mode is not None:
        assert_state_is_that_of_a_training_step()
        assert all(module.training for module in trainer.model.modules())
        assert all(a is b for a, b in zip(trainer.reward_funcs, functions, strict=True)), "They are the user's."
        assert before is None or "Lock" in before or str(dataset[0]) == before, "The rows are as they were."
        assert all(batch["advantages"].isfinite().all() for batch in batches) or mode == "uniform"
        assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    decode = functools.partial(trainer.processing_class.batch_decode, skip_special_tokens=True)
    return Run(trainer, batches, [decode(batch["prompt_ids"]) for batch in batches], mode)


def assert_same_run(expected, actual):
    for a, b in zip(expected.batches, actual.batches, strict=True):
        torch.testing.assert_close(b["advantages"], a["advantages"], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(a["completion_ids"], b["completion_ids"])
    for a, b in zip(expected.trainer.model.parameters(), actual.trainer.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def check_script(script, mode, directory):
    if mode in script.rejected:
        with pytest.raises(Exception, match=script.rejected[mode]) as caught:
            train(script, mode, directory)
        assert isinstance(caught.value, ValueError | ZeroDivisionError | RuntimeError), repr(caught.value)
        assert_state_is_that_of_a_training_step()
        return
    run = train(script, mode, directory)
    if script.check is not no_step:
        assert run.trainer.state.global_step == QUICK["max_steps"]
    if script.equals is not None:
        assert_same_run(train(script._replace(reward=script.equals), mode, directory), run)
    elif mode == "uniform" or (script.same_prompts and mode in LOADER_MODES):
        n = run.trainer.args.num_generations
        grpo = train(script._replace(options={**script.options, "num_generations": n}), None, directory)
        restore()
        assert [list(dict.fromkeys(batch)) for batch in run.prompts] == [
            list(dict.fromkeys(batch)) for batch in grpo.prompts
        ]
        if mode == "uniform":
            assert_same_run(grpo, run)
    if script.check is not None:
        script.check(run)


def script_cases():
    """Of each row one mode per outcome, the next row's another one; the others are slow."""
    for i, (name, script) in enumerate(SCRIPTS.items()):
        modes, seen = list(script.modes), set()
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            is_slow = script.rejected.get(mode) in seen
            seen.add(script.rejected.get(mode))
            yield pytest.param(name, mode, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("name", "mode"), script_cases())
def test_a_script_trains_or_is_rejected(name, mode, tmp_path):
    check_script(SCRIPTS[name], mode, tmp_path)


# Random combinations


def changed_fields(script):
    return {
        name for name in ("reward", "dataset", "methods") if getattr(script, name) is not Script._field_defaults[name]
    }


def combination(seed):
    """A reward function, a dataset and methods, of rows that change only one of these and have no check, and a mode."""
    rng, combined = random.Random(seed), Script()
    plain = [s for s in SCRIPTS.values() if not s.rejected and s.check is None and len(s.modes) == len(MODES)]
    for name in ("reward", "dataset", "methods"):
        row = rng.choice([Script(), *(script for script in plain if changed_fields(script) == {name})])
        combined = combined._replace(**{name: getattr(row, name)}, options={**combined.options, **row.options})
        if row.equals is not None:
            combined = combined._replace(equals=row.equals)
    return combined, rng.choice(list(MODES))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_combinations_of_scripts_train(seed, tmp_path):
    check_script(*combination(seed), tmp_path)


# Random configurations

FIELDS = {
    "adaptive_sampling": ["seq-balance", "seq-pos", "est-ema", "est-value", "uniform"],
    "baseline": ["pool", "batch"],
    "num_generations": [1, 2, 4],
    "per_device_train_batch_size": [4, 8, 16],
    "zero_variance_groups": ["keep", "mask", "skip", "resample"],
    "prompt_weighting": [None, "none", "inverse", "inverse_sqrt", 0.25],
    "scale_rewards": ["none", "batch", "group"],
    "min_samples": [1, 2],
    "max_rounds": [None, 1],
    "num_iterations": [1, 2],
    "positive_threshold": [0.7, 50.0],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
}
USUAL = {
    "min_samples": 2,
    "max_rounds": None,
    "zero_variance_groups": "keep",
    "num_iterations": 1,
    "prompt_weighting": None,
}
USUAL |= {"multi_objective_aggregation": "sum_then_normalize"}
# Reward as a function of a number from 0 to 1 that depends on the completion, and the range of these rewards.
SCALES = {
    "0 or 1": (lambda u: float(u > 0.5), 1.0),
    "rare": (lambda u: float(u > 0.97), 1.0),
    "0 to 100": (lambda u: 100 * u, 100.0),
    "-5 to 0": (lambda u: 5 * u - 5, 5.0),
    "constant": (lambda u: 0.3, 0.0),
    "tiny": (lambda u: 1e-6 * u, 1e-6),
    "some None": (lambda u: None if u < 0.3 else u, 1.0),
    "all None": (lambda u: None, 0.0),
    "shifted": (lambda u: 1000 + u, 1.0),
}


def random_configurations(number, seed=0):
    """Most options have their usual value in two thirds of the cases, so that many configurations are valid."""
    rng = random.Random(seed)
    for _ in range(number):
        options = {name: rng.choice(values) for name, values in FIELDS.items()}
        yield options | {name: value for name, value in USUAL.items() if rng.random() < 0.67}, rng.choice(list(SCALES))


def largest_advantage(args: AdaGRPOConfig, reward_range: float) -> float:
    """
    Bound of |A|. |r − b| is at most the range of rewards, since both baselines are means of rewards. Divided by a standard
    deviation, |A| is at most (n − 1)/√n for a group of n, likewise for a batch or a pool of 128, and is clipped at 32 otherwise.
    The prompt weight is at most that of a pass rate of one in a pool.
    """
    pool = max(args.round_size * args.slot_rule.max_rounds, 32)
    weight = 1.0 if args.prompt_weighting == "none" else float(pool)
    if args.multi_objective_aggregation == "normalize_then_sum" or args.scale_rewards != "none":
        return weight * max(32.0, math.sqrt(128 * pool)) * 2
    return weight * reward_range + 1e-6


CONFIGURATIONS = list(random_configurations(40))


@pytest.mark.parametrize(("options", "scale"), CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_a_configuration_trains_or_is_rejected(options, scale, tmp_path):
    to_reward, reward_range = SCALES[scale]

    def reward(completions, **kwargs):
        return [to_reward((sum(map(ord, completion)) % 101) / 100) for completion in completions]

    steps = 2 * options["num_iterations"]
    try:
        trainer = build(tmp_path, reward, prompt_dataset(16), max_steps=steps, learning_rate=1e-3, **options)
    except ValueError as error:
        names = re.findall(r"\w+", str(error))
        assert set(names) & set(AdaGRPOConfig.__dataclass_fields__), f"No option is named: {error}"
        return
    trainer.train()
    assert trainer.state.global_step == steps
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    bound = largest_advantage(trainer.args, reward_range)
    for batch in trainer.batches:
        assert batch["advantages"].isfinite().all() and batch["advantages"].abs().max() <= bound
        if not reward_range and trainer.args.baseline != "pool":
            assert batch["advantages"].abs().max() < 1e-6


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


# Reports with their own code


class Disturbing(Counting):
    """An environment whose reset and tool leave everything in another state."""

    def reset(self, **row):
        if RUNNING:
            disturb()
        return super().reset(target=1, **row)


@pytest.mark.parametrize("mode", ["uniform", "batch", "seq-balance"])
def test_state_that_an_environment_changes_is_restored(mode, tmp_path):
    tokenizer, seen = chat_tokenizer(), []

    class Observing(Recorder):
        def compute_loss(self, *args, **kwargs):
            seen.append((torch.get_default_dtype(), torch.is_grad_enabled()))
            return super().compute_loss(*args, **kwargs)

    trainer = build(
        tmp_path,
        lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 4]}),
        tiny_chat_model(tokenizer),
        tokenizer=tokenizer,
        environment_factory=Disturbing,
        trainer_class=Observing,
        success_reward="Disturbing",
        **MODES[mode],
    )
    RUNNING[:] = [trainer]
    trainer.train()
    assert set(seen) == {(torch.float32, True)}
    assert any("reward" in logs for logs in trainer.state.log_history), "Nothing was logged as an evaluation."


@pytest.mark.parametrize("mode", ["uniform", "seq-balance"])
def test_a_reward_function_may_assign_others(mode, tmp_path):
    def constant(completions, **kwargs):
        return [0.5] * len(completions)

    def reward(completions, **kwargs):
        trainer.reward_funcs = [constant]
        return even_reward(completions)

    trainer = build(tmp_path, reward, **MODES[mode])
    trainer.train()
    assert trainer.reward_funcs == [constant] and trainer.state.log_history[1]["reward"] == 0.5


def test_a_stream_shorter_than_a_step_is_a_warning_in_the_mode_that_equals_grpo(tmp_path, caplog):
    trainer = build(tmp_path, dataset=stream(1), **MODES["uniform"])
    trainer.train()
    assert trainer.state.global_step == 0 and "No training step can be run" in caplog.text


@pytest.mark.parametrize("mode", ["batch", "uniform"])
def test_reward_functions_of_the_same_name_share_a_metric_as_in_grpo(mode, tmp_path):
    rewards = [lambda completions, **_: [1.0] * len(completions), lambda completions, **_: [0.0] * len(completions)]
    logs = []
    for functions in (rewards, rewards[::-1]):
        trainer = build(tmp_path, functions, max_steps=1, **MODES[mode])
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert [log["rewards/<lambda>/mean"] for log in logs] == [0.5, 0.5]


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
    own = type("Own", (ShorterCompletions, AdaGRPOTrainer), {})
    with pytest.raises(
        ValueError, match=r"Own\._generate_single_turn would have no effect.*Remove the override, or set"
    ):
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


@pytest.mark.parametrize("mode", ["stock", *MODES])
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

    class Failing:
        def _generate_single_turn(self, *args, **kwargs):
            fail_once("generation")
            return super()._generate_single_turn(*args, **kwargs)

    dataset = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(64)]}).with_transform(transform)
    base = GRPOTrainer if mode == "stock" else AdaGRPOTrainer
    own = type("Own", (Failing, base), {})
    if mode == "stock":
        args = GRPOConfig(str(tmp_path), **QUICK | {"num_generations": 4})
        trainer = own(tiny_model(), reward, args, dataset, processing_class=tiny_tokenizer())
    else:
        trainer = build(tmp_path, reward, dataset, trainer_class=own, **MODES[mode])
    trainer.train()
    first = sampled[0]
    failing.append(place)
    if place != "nowhere":
        with pytest.raises(OSError):
            trainer.train()
    sampled.clear()
    trainer.train()
    assert sampled[0] == first
