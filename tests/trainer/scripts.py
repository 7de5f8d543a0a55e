"""
User code that GRPOTrainer trains with: every mode trains with it too, or an error says why it cannot.

A [`Script`] is a kind of user code, often a public report; a new report is a new row of `REWARDS`
(test_reward_functions.py), `DATASETS` (test_datasets.py) or `METHODS` (test_subclasses.py). Each row is tried in one
mode per outcome, in all modes by the slow tests, and in random combinations with other rows
(test_random_configurations.py).
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOTrainer

from ..helpers import (
    LOADER_MODES,
    MODES,
    QUEUE_MODES,
    QUICK,
    config,
    even_reward,
    prompt_dataset,
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
            Reward function with which a run must be the same, bit for bit.
            By default, `"uniform"` must equal GRPOTrainer.
        same_prompts (`bool`):
            Whether prompts and their order are those of GRPOTrainer where a data loader provides them.
        steps (`int`):
            Training steps of the run.
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
    steps: int = QUICK["max_steps"]
    check: Callable[["Run"], None] | None = None


class Run(NamedTuple):
    trainer: Any
    batches: list[dict]
    prompts: list[list[str]]  # of the rows of each batch


def everywhere(pattern):
    return dict.fromkeys(MODES, pattern)


def from_queue(pattern):
    return dict.fromkeys(QUEUE_MODES, pattern)


def except_uniform(pattern):
    return {mode: pattern for mode in MODES if mode != "uniform"}


RUNNING: list = []  # the trainer of the current run, for user code that changes it
GUARDS: list = []  # contexts that user code has entered
NO_END = {"suppress_tokens": [tiny_tokenizer().eos_token_id, tiny_tokenizer().pad_token_id]}


def disturb(*_):
    RUNNING[0].model.eval()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


# Running a script


def assert_state_is_that_of_a_training_step():
    assert torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


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
    return Run(trainer, batches, [decode(batch["prompt_ids"]) for batch in batches])


def assert_same_training(expected, actual):
    for a, b in zip(expected.batches, actual.batches, strict=True):
        torch.testing.assert_close(b["advantages"], a["advantages"], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(a["completion_ids"], b["completion_ids"])
    for a, b in zip(expected.trainer.model.parameters(), actual.trainer.model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def check_script(script, mode, directory):
    try:
        check_run(script, mode, directory)
    finally:
        restore()


def check_run(script, mode, directory):
    if mode in script.rejected:
        with pytest.raises(Exception, match=script.rejected[mode]) as caught:
            train(script, mode, directory)
        assert isinstance(caught.value, ValueError | ZeroDivisionError | RuntimeError), repr(caught.value)
        assert_state_is_that_of_a_training_step()
        return
    run = train(script, mode, directory)
    assert run.trainer.state.global_step == script.steps
    if script.equals is not None:
        assert_same_training(train(script._replace(reward=script.equals), mode, directory), run)
    elif mode == "uniform" or (script.same_prompts and mode in LOADER_MODES):
        n = run.trainer.args.num_generations
        grpo = train(script._replace(options={**script.options, "num_generations": n}), None, directory)
        restore()
        first, expected = ([list(dict.fromkeys(batch)) for batch in one.prompts] for one in (run, grpo))
        assert first == expected
        if mode == "uniform":
            assert_same_training(grpo, run)
    if script.check is not None:
        script.check(run)


def cases(scripts):
    """Of each row one mode per outcome, the next row's another one; the others are slow."""
    for i, (name, script) in enumerate(scripts.items()):
        modes, seen = list(script.modes), set()
        for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
            is_slow = script.rejected.get(mode) in seen
            seen.add(script.rejected.get(mode))
            yield pytest.param(name, mode, marks=[pytest.mark.slow] * is_slow)
