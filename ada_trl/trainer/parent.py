"""TRL's own preparation, generation, decoding and reward functions, for any rows and on one process alone."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ..failures import shared
from ..notices import get_logger
from ..rollouts.source import Completions


logger = get_logger(__name__)


class _Answers(NamedTuple):
    """Completions that a server has generated, handed to the parent to be decoded and scored."""

    prompt_ids: list[list[int]]
    images: list[list | None] | None
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


class _Result(Exception):
    """Leaves the parent with what was to be had from it: the rest of its method is for the update batch only."""

    def __init__(self, value: Any):
        super().__init__("GRPOTrainer was left in the middle of a batch")
        self.value = value


class _EpisodeOver:
    """Stands in for an environment whose episode is over while its rollout is trained on."""

    def reset(self, **row) -> None:
        return None


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def finite(rewards: torch.Tensor) -> torch.Tensor:
    """The rewards with NaN in place of infinities, which no baseline survives."""
    return rewards.masked_fill(rewards.isinf(), torch.nan)


class ThroughParent(GRPOTrainer):
    """
    Generates and scores through [`~trl.GRPOTrainer`] as often as a step needs it, without what that logs being taken for
    the step's own. [`AdaGRPOTrainer`] decides on which rows.

    The parent prepares the rows of every round as it prepares a batch: images join their messages, tools are bound,
    environments are reset.
    """

    _then: Callable[[list], Any] | None = None  # what is to be done with the prompts that the parent is preparing
    _answers: _Answers | None = None  # set while a server's completions are decoded and scored

    def _prepared(self, rows: list[dict], then: Callable[[list], Any] = list) -> Any:
        """What `then` makes of the prompts of `rows`, of the data set, once the parent has prepared them."""
        self._then = then
        try:
            super()._generate_and_score_completions(rows)
        except _Result as result:
            return result.value
        finally:
            self._then = None
        raise RuntimeError("GRPOTrainer has made a batch without calling `_generate`, which AdaGRPOTrainer relies on.")

    def _generate(self, prompts: list) -> tuple:
        if self._then is None:
            return super()._generate(prompts)
        then, self._then = self._then, None
        raise _Result(then(prompts))

    def _complete(self, rows: list[dict], first_round: bool, answers: _Answers | None = None) -> Completions:
        """
        Generate and score one completion for each of `rows`, of the data set, on this process. Processes need not call
        it together, except where the model's own forward pass is collective (FSDP, ZeRO-3).
        """
        rows = [copy.deepcopy(row) for row in rows]  # a data loader makes each copy anew: a rollout may change its own
        tokens_seen = self.state.num_input_tokens_seen
        self._answers = answers
        try:
            with self._alone(log_metrics=first_round):
                completions = self._prepared(rows, lambda prompts: self._generate_and_score(rows, prompts))
            return completions._replace(tokens_seen=self.state.num_input_tokens_seen - tokens_seen)
        finally:
            self.state.num_input_tokens_seen = tokens_seen
            self._answers = None

    def _generate_and_score(self, rows: list[dict], prompts: list) -> Completions:
        columns = super()._generate(prompts)
        _, completion_ids, tool_mask, completions, *_ = columns
        started = time.perf_counter()
        rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        if rewards.isinf().any():
            logger.warning_once("A reward function has returned an infinite reward, which is treated as None.")
        final_ids = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return Completions(
            columns=columns,
            prompts=prompts,
            rewards=finite(rewards),
            extras=self._take_extra_logs(len(prompts)),
            # Of a tool's answer the model has generated nothing.
            lengths=[len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask],
            truncated=[ids[-1] not in final_ids for ids in completion_ids],
            tool_calls=self._tool_calls(len(prompts)),
            reward_seconds=time.perf_counter() - started,
        )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """As the parent's, but what a reward function raises on one process is raised on all of them."""
        with shared("a reward function failed"), self._replaced(grpo_trainer, gather=_identity):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self.accelerator.gather(rewards)

    def _scorer(self, rows: list[dict], prompt_ids: list, images: list | None) -> Callable[..., Completions]:
        """A function that decodes and scores what a server has generated for this process's own prompts."""

        def score(positions: list[int], completion_ids: list, logprobs: list, first_round: bool) -> Completions:
            answers = _Answers(
                [prompt_ids[i] for i in positions],
                images and [images[i] for i in positions],
                completion_ids,
                logprobs,
            )
            return self._complete([rows[i] for i in positions], first_round, answers)

        return score

    @contextmanager
    def _alone(self, log_metrics: bool):
        """
        Let the parent work on this process only: its gathers, which are collective, must return what they are given,
        because the other processes score other prompts, perhaps at other times, and may fail. The metrics made of them
        are not those of the step; those that reward functions log are kept with `log_metrics`.
        """
        logs = {"_metrics": self._metrics | {"train": defaultdict(list)}}
        if not log_metrics:
            logs["_pending_metrics"] = defaultdict(list)
        with (
            self._replaced(self.accelerator, gather=_identity),
            self._replaced(grpo_trainer, gather=_identity),
            self._replaced(self, **logs),
            self._replaced(self.vllm_generation, alone=True) if self.use_vllm else nullcontext(),
        ):
            yield

    @staticmethod
    @contextmanager
    def _replaced(owner: Any, **attributes: Any):
        before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
        vars(owner).update(attributes)
        try:
            yield
        finally:
            for name in attributes:
                del vars(owner)[name]
            vars(owner).update(before)

    @contextmanager
    def _episodes_over(self, rows: int):
        """Let the parent prepare `rows` whose episodes have been played."""
        if self.environment_factories is None:
            yield
            return
        pool = {name: [_EpisodeOver() for _ in range(rows)] for name in self.environment_factories}
        with self._replaced(self, _environment_pool=pool):
            yield

    def _take_extra_logs(self, rows: int) -> dict[str, list]:
        """The columns that reward functions have logged; of several that logged the same one, the last one's."""
        extras = {}
        for name, values in self._pending_extra_logs.items():
            if len(values) < rows and self.log_completions:  # nobody sees them otherwise
                raise ValueError(
                    f"log_extra({name!r}, …) was given {len(values)} values for {rows} completions. Log exactly one "
                    "value per completion, or set log_completions=False."
                )
            if len(values) >= rows:
                extras[name] = values[-rows:]
        self._pending_extra_logs.clear()
        return extras

    def _tool_calls(self, rows: int) -> tuple[int, int]:
        """Calls of tools in the round under way and how many of them failed, from what the parent has logged of it."""
        if not self.tools:
            return 0, 0
        logged = self._metrics["train"]
        calls = logged["tools/call_frequency"][-1] * rows
        return round(calls), round(logged["tools/failure_frequency"][-1] * calls)

    # A server's completions are decoded and scored by the parent as if it had generated them.

    def _tokenize_prompts(self, prompts: list) -> tuple:
        if self._answers is None:
            return super()._tokenize_prompts(prompts)
        return self._answers.prompt_ids, self._answers.images, {}

    def _generate_single_turn(self, *args, **kwargs) -> tuple:
        if self._answers is None:
            return super()._generate_single_turn(*args, **kwargs)
        return self._answers.completion_ids, self._answers.logprobs
