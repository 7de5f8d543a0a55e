"""
TRL's methods within a step.

[`~trl.GRPOTrainer`] prepares, generates, scores and assembles a batch in one method, `_generate_and_score_completions`, which
calls further methods that a subclass can override. [`AdaGRPOTrainer`] overrides five of them and passes each call on to its current
*interception*, if it has one. There is one for each purpose for which `_generate_and_score_completions` is called:

- [`RecordedStep`]: one round per step. TRL does everything; rewards and seconds are recorded.
- [`PromptPreparation`]: several rounds per step. TRL turns dataset rows into prompts; an exception leaves its method before it generates.
- [`LocalSampling`]: several rounds. TRL generates, decodes and scores rows of this rank alone.
- [`InjectedBatch`]: several rounds. TRL assembles the batch from completions and rewards that were selected before.

Without one (evaluation, everything outside of a step) TRL's methods run as they are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather, gather_object
from trl import GRPOTrainer

from ..sampling.sampler import Completion
from ..utils.copying import SharedLeaves, copy_containers
from ..utils.distributed import describe_error, raise_first
from ..utils.logging import get_logger
from .training_state import TrainingState
from .trl_private import override_attributes


if TYPE_CHECKING:
    from .ada_grpo_trainer import AdaGRPOTrainer
    from .vllm_session import VLLMSession


logger = get_logger(__name__)

# Empty values of the columns that `GRPOTrainer._generate` returns: prompt_ids, completion_ids, tool_mask, completions, logprobs,
# extra_fields, images, tool_images. A column that is not empty has one value per row.
_EMPTY_COLUMNS: tuple = ([], [], None, [], None, {}, None, [])


class Interception:
    """
    Passes every call on to TRL. `call` is the bound method of [`~trl.GRPOTrainer`].

    A call of TRL goes through these layers, from the outside to the inside: an outer method of the interception, if it has one for
    this name; an override of a user's subclass; the override of [`AdaGRPOTrainer`]; the method of the interception; `call`. Only
    the result of an outer method replaces that of a user's override.

    TRL resets environments before it calls `_generate`, and runs tools between the turns. Training state that they have changed is
    restored at the next call of one of these methods.
    """

    def __init__(self, model: torch.nn.Module):
        self.training_state = TrainingState(model)

    def outer_methods(self) -> dict[str, Callable]:
        """Methods that take the place of the trainer's while the interception is in use, those of the user's subclasses included."""
        return {}

    def generate(self, call: Callable, prompts: list) -> tuple:
        self.training_state.restore()
        return call(prompts)

    def tokenize_prompts(self, call: Callable, prompts: list) -> tuple:
        return call(prompts)

    def generate_single_turn(self, call: Callable, *args: Any, **kwargs: Any) -> tuple:
        self.training_state.restore()
        return call(*args, **kwargs)

    def run_tools(self, call: Callable, *args: Any, **kwargs: Any) -> tuple:
        with self.training_state.preserved():
            return call(*args, **kwargs)

    def calculate_rewards(self, call: Callable, inputs: list, prompts: list, completions: list, ids: list):
        return call(inputs, prompts, completions, ids)


class RecordedStep(Interception):
    """
    One round per step: TRL runs once, on the chosen rows. Rewards and seconds are recorded.

    With `score_early`, rewards are computed right after the generation instead of after TRL's forward pass, so that
    `on_rewards` can request the next step's rollouts before that pass.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.
        vllm ([`VLLMSession`]):
            Its engine.
        rows (`list[dict]`):
            Dataset rows of this rank.
        on_rewards (`Callable[[torch.Tensor], None]`):
            Called with the rewards of all ranks, `(rows of all ranks, num_reward_funcs)`.
        is_vanilla (`bool`):
            Whether nothing but logging differs from GRPO, whose rewards are left as they are.
        score_early (`bool`):
            See above.
        prefetched (`bool`):
            Whether the rollouts of these rows were requested in the step before.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        vllm: "VLLMSession",
        rows: list[dict],
        on_rewards: Callable[[torch.Tensor], None],
        *,
        is_vanilla: bool,
        score_early: bool,
        prefetched: bool,
    ):
        super().__init__(trainer.model)
        self.trainer, self.vllm, self.rows, self.on_rewards = trainer, vllm, rows, on_rewards
        self.is_vanilla, self.score_early, self.prefetched = is_vanilla, score_early, prefetched
        self.rewards: torch.Tensor | None = None
        self.seconds: dict[str, float] = {}
        # Bound methods of the user's subclass, whose results are those that are trained on.
        self._generate_inside, self._score_inside = trainer._generate, trainer._calculate_rewards

    def outer_methods(self) -> dict[str, Callable]:
        return {"_generate": self.record_generation, "_calculate_rewards": self.record_rewards}

    def record_generation(self, prompts: list) -> tuple:
        columns = self._generate_inside(prompts)
        if self.score_early:
            _, completion_ids, _, completions, *_ = columns
            self.record_rewards(self.rows, prompts, completions, completion_ids)
        return columns

    def record_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
        if self.rewards is None:
            started = time.perf_counter()
            rewards = self._score_inside(inputs, prompts, completions, ids)
            self.rewards = rewards if self.is_vanilla else without_infinities(rewards)
            self.seconds["time/reward"] = time.perf_counter() - started
            self.on_rewards(self.rewards)
        return self.rewards

    def generate(self, call: Callable, prompts: list) -> tuple:
        started = time.perf_counter()
        with self.vllm.generation(self.prefetched):
            columns = super().generate(call, prompts)
        self.seconds["time/generate"] = time.perf_counter() - started
        return columns

    def calculate_rewards(self, call: Callable, inputs: list, prompts: list, completions: list, ids: list):
        if not self.is_vanilla:
            prompts, completions, ids = copy_containers([prompts, completions, ids])
        return score_on_all_ranks(self.trainer, call, inputs, prompts, completions, ids)


class PromptsPrepared(Exception):
    """Leaves `_generate_and_score_completions` with the prompts, before anything is generated."""

    def __init__(self, prompts: list):
        super().__init__("GRPOTrainer was left in the middle of a batch")
        self.prompts = prompts


class PromptPreparation(Interception):
    """TRL turns dataset rows into prompts: images join their messages, tools are bound, environments are reset."""

    def outer_methods(self) -> dict[str, Callable]:
        return {"_generate": self.leave}

    def leave(self, prompts: list) -> tuple:
        self.training_state.restore()
        # TRL has no method for the part before the generation, and everything after it would be wasted.
        raise PromptsPrepared(prompts)


class ServerCompletions(NamedTuple):
    """Completions that a server has generated, to be decoded and scored as if TRL had generated them."""

    prompt_ids: list[list[int]]
    images: list[list | None] | None
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


class LocalSampling(Interception):
    """TRL generates and scores rows of this rank alone, or decodes and scores completions of a server."""

    def __init__(self, trainer: GRPOTrainer, completions: ServerCompletions | None = None):
        super().__init__(trainer.model)
        self.trainer, self.completions = trainer, completions
        self.tool_calls = (0, 0)  # calls, and how many of them failed

    def generate(self, call: Callable, prompts: list) -> tuple:
        # TRL makes deep copies of the prompts; images in them need not be copied, and other objects may not be copyable.
        return super().generate(call, SharedLeaves(prompts))

    def tokenize_prompts(self, call: Callable, prompts: list) -> tuple:
        if self.completions is None:
            return call(prompts)
        return self.completions.prompt_ids, self.completions.images, {}

    def generate_single_turn(self, call: Callable, *args: Any, **kwargs: Any) -> tuple:
        if self.completions is None:
            return super().generate_single_turn(call, *args, **kwargs)
        return self.completions.completion_ids, self.completions.logprobs

    def run_tools(self, call: Callable, *args: Any, **kwargs: Any) -> tuple:
        results = super().run_tools(call, *args, **kwargs)
        *_, calls, failures, _ = results
        self.tool_calls = (calls, failures)
        return results

    def calculate_rewards(self, call: Callable, inputs: list, prompts: list, completions: list, ids: list):
        # Completions stay in their pools until they are trained on, and reward functions may modify what they are given.
        prompts, completions, ids = copy_containers([prompts, completions, ids])
        # The sampler shares errors between ranks.
        with self.training_state.preserved():
            return call(inputs, prompts, completions, ids)


class InjectedBatch(Interception):
    """TRL assembles the batch from the selected completions and the rewards of all ranks' rows, without generating or scoring."""

    def __init__(self, model: torch.nn.Module, rows: Sequence[Completion], rewards: torch.Tensor):
        super().__init__(model)
        self.rows, self.rewards = rows, rewards

    def outer_methods(self) -> dict[str, Callable]:
        # An override of a subclass has seen these completions when they were sampled.
        return {"_generate": self.selected_columns, "_calculate_rewards": self.selected_rewards}

    def selected_columns(self, prompts: list) -> tuple:
        return tuple(
            empty if all(value is None for value in values) else list(values)
            for empty, values in zip(
                _EMPTY_COLUMNS, zip(*(row.columns for row in self.rows), strict=True), strict=True
            )
        )

    def selected_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
        return self.rewards


@contextmanager
def intercepting(trainer: "AdaGRPOTrainer", interception: Interception) -> Iterator[None]:
    with override_attributes(trainer, _interception=interception, **interception.outer_methods()):
        yield


@contextmanager
def without_interception(trainer: "AdaGRPOTrainer") -> Iterator[None]:
    """While the block runs, TRL's methods run as they are: an evaluation that user code starts within a step is not part of it."""
    current = trainer._interception
    names = () if current is None else ("_interception", *current.outer_methods())
    hidden = {name: trainer.__dict__.pop(name) for name in names}
    try:
        yield
    finally:
        trainer.__dict__.update(hidden)


class NoOpEnvironment:
    """Takes the place of an environment whose episode is over, when TRL resets it to assemble the batch."""

    def reset(self, **row: Any) -> None:
        return None


@contextmanager
def injecting(trainer: "AdaGRPOTrainer", rows: Sequence[Completion], rewards: torch.Tensor) -> Iterator[None]:
    """While the block runs, `_generate_and_score_completions` assembles a batch of `rows` instead of generating."""
    with intercepting(trainer, InjectedBatch(trainer.model, rows, rewards)):
        if trainer.environment_factories is None:
            yield
            return
        # The episodes have been played: resetting the real environments would start new ones.
        pools = {name: [NoOpEnvironment() for _ in rows] for name in trainer.environment_factories}
        with override_attributes(trainer, _environment_pool=pools):
            yield
        trainer.environments = [row.environment for row in rows]


# Rewards


@contextmanager
def reporting_rewards(trainer: GRPOTrainer, report: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While the block runs, `report` is called with the rewards of every batch, as an override of the user's subclass returns them."""
    score = trainer._calculate_rewards

    def reported(*args: Any) -> torch.Tensor:
        rewards = score(*args)
        report(rewards)
        return rewards

    with override_attributes(trainer, _calculate_rewards=reported):
        yield


def without_infinities(rewards: torch.Tensor) -> torch.Tensor:
    """The rewards with NaN (unscored) in place of infinities, which would turn every baseline into NaN."""
    if rewards.isinf().any():
        logger.warning_once("A reward function returned an infinite reward, which is treated as None.")
    return rewards.masked_fill(rewards.isinf(), torch.nan)


def score_on_all_ranks(
    trainer: GRPOTrainer, call: Callable, inputs: list, prompts: list, completions: list, completion_ids: list
) -> torch.Tensor:
    """
    TRL's `_calculate_rewards`, whose errors on one rank are raised on all ranks. Collective.

    The other ranks wait in TRL's gather of the rewards. A rank whose reward function has failed takes part in it with NaN, so that no
    rank hangs, before all ranks exchange their errors.
    """
    error = None
    try:
        with TrainingState(trainer.model).preserved():
            rewards = call(inputs, prompts, completions, completion_ids)
    except Exception as caught:  # of any class: it is raised on the other ranks too
        if trainer.accelerator.num_processes == 1:
            raise
        error = caught
        missing = torch.full((len(prompts), len(trainer.reward_funcs)), torch.nan, device=trainer.accelerator.device)
        rewards = gather(missing)
    if trainer.accelerator.num_processes > 1:
        raise_first(gather_object([describe_error(error)]), error)
    return rewards
