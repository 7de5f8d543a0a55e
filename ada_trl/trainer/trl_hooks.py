"""
Everything private of TRL's trainer that this package relies on, in one module: hooks, attributes and patches. (The subclasses of
TRL's vLLM classes in `ada_trl/vllm` override private methods of those.)

[`~trl.GRPOTrainer`] prepares, generates, scores and assembles a batch in one method, `_generate_and_score_completions`. It
calls further methods, which a subclass can override. [`AdaGRPOTrainer`] overrides six of them and passes each call on to its
current *hook*, if it has one. There is a hook for each purpose for which `_generate_and_score_completions` is called:

- [`StepCapture`]: one round per step. TRL does everything; the hook records rewards, hidden states and seconds.
- [`PromptPreparation`]: several rounds per step. TRL turns dataset rows into prompts; an exception leaves its method before it generates.
- [`LocalSampling`]: several rounds. TRL generates, decodes and scores rows of this rank alone.
- [`InjectedBatch`]: several rounds. TRL assembles the batch from completions and rewards that were selected before.

Without a hook (evaluation, everything outside of a step) TRL's methods run as they are.

Two patches of TRL's module act only while one of our trainers is constructed or samples in rounds, and only in its thread
([`vllm_generation_class`], [`rank_local_collectives`]). docs/upstream.md proposes changes to TRL that would make them unnecessary.
`tests/trainer/test_trl_contract.py` checks every name of TRL that is used here.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather, gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ..utils.copying import SharedLeaves, copy_containers
from ..utils.distributed import describe_error, gather_unless_disabled, raise_first
from ..utils.logging import get_logger
from .rollout_batch import RolloutBatch
from .user_code import TrainingState, check_rewards_of


if TYPE_CHECKING:
    from .ada_grpo_trainer import AdaGRPOTrainer


logger = get_logger(__name__)

# Empty values of the columns that `GRPOTrainer._generate` returns: prompt_ids, completion_ids, tool_mask, completions, logprobs,
# extra_fields, images, tool_images. A column that is not empty has one value per row.
_EMPTY_COLUMNS: tuple = ([], [], None, [], None, {}, None, [])


# Hooks: the current behavior of the trainer's overrides of TRL's methods


class Hook:
    """
    Passes every call on to TRL. `call` is the bound method of [`~trl.GRPOTrainer`].

    A call of TRL goes through these layers, from the outside to the inside: the hook's outer method, if it has one for this name; an
    override of a user's subclass; the override of [`AdaGRPOTrainer`]; the hook's method; `call`.

    TRL resets environments before it calls `_generate`, and runs tools between the turns. Training state that they have changed is
    restored at the next call of one of these methods.
    """

    def __init__(self, trainer: "AdaGRPOTrainer"):
        self.trainer = trainer
        self.training_state = TrainingState(trainer.model)

    def outer_methods(self) -> dict[str, Callable]:
        """
        Methods that take the place of the trainer's while the hook is in use, those of the user's subclasses included.

        Everything else in a hook is called by [`AdaGRPOTrainer`], within an override of a subclass.
        """
        return {}

    def generate(self, call: Callable, prompts: list) -> tuple:
        self.training_state.restore()
        return call(prompts)

    def tokenize_prompts(self, call: Callable, prompts: list) -> tuple:
        return call(prompts)

    def generate_single_turn(self, call: Callable, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple:
        self.training_state.restore()
        return call(prompt_ids, *args, **kwargs)

    def compute_logprobs(self, call: Callable, *args: Any, **kwargs: Any):
        return call(*args, **kwargs)

    def run_tools(self, call: Callable, *args: Any, **kwargs: Any) -> tuple:
        with self.training_state.preserved():
            return call(*args, **kwargs)

    def calculate_rewards(self, call: Callable, inputs: list, prompts: list, completions: list, ids: list):
        return call(inputs, prompts, completions, ids)


class HiddenStateHook(Hook):
    """
    Keeps the policy's hidden states at the last prompt token, `(rows of this rank, H)`, of the first forward pass that TRL makes
    anyway: the prefill of the generation, or the pass that recomputes log-probabilities.
    """

    hidden_states: torch.Tensor | None = None

    @property
    def _wants_states(self) -> bool:
        return self.trainer.captures_hidden_states and self.hidden_states is None

    @staticmethod
    def _capturing(*args: Any, **kwargs: Any) -> AbstractContextManager:
        from ..pass_rates.hidden_states import capture_hidden_states

        return capture_hidden_states(*args, **kwargs)

    def generate_single_turn(self, call: Callable, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple:
        self.training_state.restore()
        # A turn after the first one (tools) has other prompts.
        if not self._wants_states or self.trainer.use_vllm:
            return call(prompt_ids, *args, **kwargs)
        longest, multiple = max(map(len, prompt_ids)), self.trainer.pad_to_multiple_of or 1
        prefill = (len(prompt_ids), -(-longest // multiple) * multiple)
        with self._capturing(self.trainer.model, -1, prefill=prefill) as captured:
            result = call(prompt_ids, *args, **kwargs)
        self.hidden_states = captured[0] if captured else None
        return result

    # An override of a subclass may pass TRL's arguments by name.
    def compute_logprobs(
        self, call: Callable, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args, **kwargs
    ):
        given = (model, input_ids, attention_mask, logits_to_keep, *args)
        # The policy's pass comes first; a later one may be that of its reference.
        if not (self._wants_states and self.trainer.args.recomputes_logprobs):
            return call(*given, **kwargs)
        with self._capturing(model, -logits_to_keep - 1) as captured:
            result = call(*given, **kwargs)
        self.hidden_states = torch.cat(captured) if captured else None
        return result


class StepCapture(HiddenStateHook):
    """
    One round per step: TRL runs once, on the chosen rows. Rewards, hidden states and seconds are recorded.

    With `score_early`, rewards are computed right after the generation instead of after TRL's forward pass, so that
    `on_rewards` can request the next step's rollouts before that pass.

    Args:
        rows (`list[dict]`):
            Dataset rows of this rank.
        on_rewards (`Callable[[torch.Tensor], None]`):
            Called with the rewards of all ranks, `(rows of all ranks, num_reward_funcs)`.
        score_early (`bool`):
            See above.
        prefetched (`bool`):
            Whether the rollouts of these rows were requested in the step before.
    """

    def __init__(
        self,
        trainer: "AdaGRPOTrainer",
        rows: list[dict],
        on_rewards: Callable[[torch.Tensor], None],
        *,
        score_early: bool,
        prefetched: bool,
    ):
        super().__init__(trainer)
        self.rows, self.on_rewards, self.score_early, self.prefetched = rows, on_rewards, score_early, prefetched
        self.rewards: torch.Tensor | None = None
        self.seconds: dict[str, float] = {}
        # Bound methods of the user's subclass, whose results are those that are trained on.
        self._generate_inside, self._score_inside = trainer._generate, trainer._calculate_rewards

    def outer_methods(self) -> dict[str, Callable]:
        return {"_generate": self.capture_generation, "_calculate_rewards": self.capture_rewards}

    def capture_generation(self, prompts: list) -> tuple:
        columns = self._generate_inside(prompts)
        if self.score_early:
            _, completion_ids, _, completions, *_ = columns
            self.capture_rewards(self.rows, prompts, completions, completion_ids)
        return columns

    def capture_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
        if self.rewards is None:
            started = time.perf_counter()
            rewards = self._score_inside(inputs, prompts, completions, ids)
            # GRPO's own statistics are left as they are where nothing but logging differs from it.
            self.rewards = rewards if self.trainer.args.is_vanilla_grpo else without_infinities(rewards)
            self.seconds["time/reward"] = time.perf_counter() - started
            self.on_rewards(self.rewards)
        return self.rewards

    def generate(self, call: Callable, prompts: list) -> tuple:
        started = time.perf_counter()
        with self.trainer.vllm.generation(self.prefetched):
            columns = super().generate(call, prompts)
        self.seconds["time/generate"] = time.perf_counter() - started
        return columns

    def calculate_rewards(self, call: Callable, inputs: list, prompts: list, completions: list, ids: list):
        if not self.trainer.args.is_vanilla_grpo:
            prompts, completions, ids = copy_containers([prompts, completions, ids])
        return score_on_all_ranks(self.trainer, call, inputs, prompts, completions, ids)


class PromptsPrepared(Exception):
    """Leaves `_generate_and_score_completions` with the prompts, before anything is generated."""

    def __init__(self, prompts: list):
        super().__init__("GRPOTrainer was left in the middle of a batch")
        self.prompts = prompts


class PromptPreparation(Hook):
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


class LocalSampling(HiddenStateHook):
    """TRL generates and scores rows of this rank alone, or decodes and scores completions of a server."""

    def __init__(self, trainer: "AdaGRPOTrainer", completions: ServerCompletions | None = None):
        super().__init__(trainer)
        self.completions = completions
        self.tool_calls = (0, 0)  # calls, and how many of them failed

    def generate(self, call: Callable, prompts: list) -> tuple:
        # TRL makes deep copies of the prompts; images in them need not be copied, and other objects may not be copyable.
        return super().generate(call, SharedLeaves(prompts))

    def tokenize_prompts(self, call: Callable, prompts: list) -> tuple:
        if self.completions is None:
            return call(prompts)
        return self.completions.prompt_ids, self.completions.images, {}

    def generate_single_turn(self, call: Callable, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple:
        if self.completions is None:
            return super().generate_single_turn(call, prompt_ids, *args, **kwargs)
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
        with self.training_state.preserved(), checked_rewards(self.trainer):
            return call(inputs, prompts, completions, ids)


class InjectedBatch(HiddenStateHook):
    """TRL assembles the batch from the selected completions, without generating or scoring."""

    def __init__(self, trainer: "AdaGRPOTrainer", batch: RolloutBatch):
        super().__init__(trainer)
        self.batch = batch

    def outer_methods(self) -> dict[str, Callable]:
        # An override of a subclass has seen these completions when they were sampled.
        return {"_generate": self.selected_columns, "_calculate_rewards": self.selected_rewards}

    def selected_columns(self, prompts: list) -> tuple:
        return _rows_to_columns([row.columns for row in self.batch.rows])

    def selected_rewards(self, inputs: list, prompts: list, completions: list, ids: list) -> torch.Tensor | None:
        return self.batch.rewards


@contextmanager
def using_hook(trainer: "AdaGRPOTrainer", hook: Hook) -> Iterator[None]:
    with override_attributes(trainer, _hook=hook, **hook.outer_methods()):
        yield


@contextmanager
def without_hook(trainer: "AdaGRPOTrainer") -> Iterator[None]:
    """While the block runs, TRL's methods run as they are: an evaluation that user code starts within a step is not part of it."""
    names = () if trainer._hook is None else ("_hook", *trainer._hook.outer_methods())
    hidden = {name: trainer.__dict__.pop(name) for name in names}
    try:
        yield
    finally:
        trainer.__dict__.update(hidden)


@contextmanager
def override_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """
    Temporarily set attributes of an object, which may be those of its class before and after. What code of the user assigns to them
    in the meantime stays.
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


# Rewards


@contextmanager
def checked_rewards(trainer: GRPOTrainer) -> Iterator[None]:
    """While the block runs, reward functions that return something other than one reward per completion are named in the error."""
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    with override_attributes(trainer, reward_funcs=[check_rewards_of(function, name) for function, name in named]):
        yield


@contextmanager
def reporting_rewards(trainer: "AdaGRPOTrainer", report: Callable[[torch.Tensor], None]) -> Iterator[None]:
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
        with TrainingState(trainer.model).preserved(), checked_rewards(trainer):
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


# Assembling a batch that was sampled before


class NoOpEnvironment:
    """Takes the place of an environment whose episode is over, when TRL resets it to assemble the batch."""

    def reset(self, **row: Any) -> None:
        return None


@contextmanager
def injecting(trainer: "AdaGRPOTrainer", batch: RolloutBatch) -> Iterator[InjectedBatch]:
    """While the block runs, `_generate_and_score_completions` assembles `batch` instead of generating; yields the hook."""
    hook = InjectedBatch(trainer, batch)
    with using_hook(trainer, hook):
        if trainer.environment_factories is None:
            yield hook
            return
        # The episodes have been played: resetting the real environments would start new ones.
        pools = {name: [NoOpEnvironment() for _ in batch.rows] for name in trainer.environment_factories}
        with override_attributes(trainer, _environment_pool=pools):
            yield hook
        trainer.environments = [row.environment for row in batch.rows]


def _rows_to_columns(rows: Sequence[tuple]) -> tuple:
    return tuple(
        empty if all(value is None for value in values) else list(values)
        for empty, values in zip(_EMPTY_COLUMNS, zip(*rows, strict=True), strict=True)
    )


# TRL's logs


def append_metrics(trainer: GRPOTrainer, metrics: dict[str, float], mode: str = "train") -> None:
    """Log metrics, averaged by TRL over the logging interval or the evaluation."""
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)


def replace_latest_metrics(trainer: GRPOTrainer, metrics: dict[str, list[float]]) -> None:
    """Overwrite the values that TRL has logged for this batch: one, or one for each reward function of the same name."""
    for name, values in metrics.items():
        trainer._metrics["train"][name][-len(values) :] = values


def set_token_count(trainer: GRPOTrainer, tokens: int) -> None:
    """Log the number of tokens seen in training so far; TRL logs the latest value, not a mean."""
    trainer._metrics["train"]["num_tokens"] = [tokens]


def latest_metric(trainer: GRPOTrainer, name: str, mode: str = "train") -> float | None:
    values = trainer._metrics[mode].get(name)
    return values[-1] if values else None


def drop_metrics(trainer: GRPOTrainer, names: set[str]) -> None:
    """Forget metrics of training that are not to be logged."""
    metrics = trainer._metrics["train"]
    for name in names & metrics.keys():
        del metrics[name]


def replace_logged_advantages(trainer: GRPOTrainer, advantages: Sequence[float]) -> None:
    """Overwrite the advantages of this batch in the table of completions."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages)


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
def isolated_metrics(trainer: GRPOTrainer, mode: str = "train", *, pending: bool = False) -> Iterator[dict[str, list]]:
    """
    While the block runs, TRL's metrics of `mode` are kept apart from those logged before; yields them.

    Args:
        pending (`bool`, *optional*, defaults to `False`):
            Whether metrics that reward functions log are kept apart too, and dropped.
    """
    isolated: dict[str, list] = defaultdict(list)
    attributes: dict[str, Any] = {"_metrics": trainer._metrics | {mode: isolated}}
    if pending:
        attributes["_pending_metrics"] = defaultdict(list)
    with override_attributes(trainer, **attributes):
        yield isolated


def keep_other_metrics(trainer: GRPOTrainer, isolated: dict[str, list]) -> None:
    """Add isolated metrics that are not TRL's, such as those of a user's subclass, to the step's."""
    for name, values in isolated.items():
        if name != "num_tokens" and not name.startswith(("completions/", "tools/")):
            trainer._metrics["train"][name] += values


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


def signature_columns(trainer: GRPOTrainer) -> list[str]:
    """Return the columns of the dataset that are kept with `remove_unused_columns=True`."""
    trainer._set_signature_columns_if_needed()
    return list(trainer._signature_columns)


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

    An evaluation prepares it without `DistributedDataParallel`, and accelerate leaves a model that is prepared as it is. The processes
    would then exchange no gradients, and train different weights.
    """
    model, accelerator = trainer.model, trainer.accelerator
    # A sharded model is prepared for an evaluation as for the training.
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if accelerator.num_processes == 1 or is_sharded or trainer.model_wrapped is not model:
        return
    if model.__dict__.pop("_is_accelerate_prepared", False):
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else mixed precision is applied twice


def weights_are_loaded(trainer: GRPOTrainer) -> bool:
    """Whether vLLM was given the weights of this optimizer step."""
    return trainer.state.global_step == trainer._last_loaded_step


def mark_weights_loaded(trainer: GRPOTrainer, loaded: bool = True) -> None:
    """Tell TRL whether vLLM has the weights of this optimizer step."""
    trainer._last_loaded_step = trainer.state.global_step if loaded else -1


# Patches of TRL's module


class _ModulePatch:
    """
    Replaces a global of TRL's module while at least one block uses it.

    Entries are counted, because trainers in several threads may leave the block in any order, and the original is restored by the
    last one. The replacement itself depends on a context variable, so that other threads are not affected.
    """

    def __init__(self, name: str, replacement: Callable[[Any], Any]):
        self.name, self.replacement = name, replacement
        self._lock, self._entries, self._original = threading.Lock(), 0, None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._entries:
                self._original = getattr(grpo_trainer, self.name)
                setattr(grpo_trainer, self.name, self.replacement(self._original))
            self._entries += 1
        try:
            yield
        finally:
            with self._lock:
                self._entries -= 1
                if not self._entries:
                    setattr(grpo_trainer, self.name, self._original)


_vllm_options: threading.local = threading.local()


def _choose_vllm_class(original: Any) -> Callable:
    def build(*args: Any, **kwargs: Any) -> Any:
        options = getattr(_vllm_options, "value", None)
        if options is None:
            return original(*args, **kwargs)
        from ..vllm.generation import AdaVLLMGeneration

        return AdaVLLMGeneration(*args, **kwargs, **options)

    return build


_patched_vllm = _ModulePatch("VLLMGeneration", _choose_vllm_class)
_patched_gather = _ModulePatch("gather", gather_unless_disabled)


@contextmanager
def vllm_generation_class(**options: Any) -> Iterator[None]:
    """
    While the block runs, a [`~trl.GRPOTrainer`] that this thread constructs builds an [`~vllm.generation.AdaVLLMGeneration`] with
    these options. TRL looks the class up as a global of its module, so a subclass cannot choose another one.
    """
    with _patched_vllm():
        _vllm_options.value = options
        try:
            yield
        finally:
            _vllm_options.value = None


@contextmanager
def rank_local_collectives(trainer: GRPOTrainer) -> Iterator[None]:
    """
    While the block runs, TRL's gathers respect [`~utils.distributed.no_collectives`]: ranks sample and score different numbers of rows, at
    different times. TRL calls `gather` as a global of its module and as a method of the accelerator.
    """
    with (
        _patched_gather(),
        override_attributes(trainer.accelerator, gather=gather_unless_disabled(trainer.accelerator.gather)),
    ):
        yield
