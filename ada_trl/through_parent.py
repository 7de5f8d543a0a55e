"""TRL's own generation, decoding and reward functions, for any rows and on one process or all."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from .core import completion_metrics
from .generation.sampler import Completions


class _Answers(NamedTuple):
    """Completions that a server has generated, handed to the parent to be decoded and scored."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class ThroughParent(GRPOTrainer):
    """
    Generates and scores through [`~trl.GRPOTrainer`] as often as a step needs it, without what that logs being taken for
    the step's own. [`AdaGRPOTrainer`] decides on which rows.
    """

    _answers: _Answers | None = None  # set while a server's completions are decoded and scored
    _first_round: list[tuple[int, bool]]  # length of a server's completions, and whether truncated

    def _completer(self, prompts: list, inputs: list[dict]) -> Callable[[list[int], bool], Completions]:
        """A function that generates and scores one completion per given prompt position, through the parent."""
        generate, calculate_rewards = super()._generate, super()._calculate_rewards

        def complete(positions: list[int], first_round: bool) -> Completions:
            row_prompts = [prompts[i] for i in positions]
            with self._side_effects(keep=first_round):
                columns = generate(row_prompts)
                _, completion_ids, _, completions, *_ = columns
                started = time.perf_counter()
                rewards = calculate_rewards([inputs[i] for i in positions], row_prompts, completions, completion_ids)
                reward_seconds = time.perf_counter() - started
                extras = self._take_extra_logs(len(positions))
            return Completions(columns, rewards, extras, reward_seconds)

        return complete

    def _scorer(self, prompts: list, inputs: list[dict], prompt_ids: list[list[int]]) -> Callable[..., Completions]:
        """A function that decodes and scores what a server has generated for this process's own prompts."""
        complete = self._completer(prompts, inputs)

        self._first_round = []
        final_ids = {*self.eos_token_ids, self._tokenizer.pad_token_id}

        def score(positions: list[int], completion_ids: list, logprobs: list, first_round: bool) -> Completions:
            if first_round:
                self._first_round += [(len(ids), ids[-1] not in final_ids) for ids in completion_ids]
            answers = _Answers([prompt_ids[i] for i in positions], completion_ids, logprobs)
            with self._alone(answers):
                return complete(positions, first_round)

        return score

    @contextmanager
    def _alone(self, answers: _Answers):
        """
        Let the parent work on this process only: other processes score other prompts at other times, so its gathers,
        which are collective, must return what they are given. The metrics made of them are not those of the step.
        """
        metrics, gather = self._metrics["train"], grpo_trainer.gather
        self._answers, self._metrics["train"] = answers, defaultdict(list)
        self.accelerator.gather = grpo_trainer.gather = _identity
        try:
            yield
        finally:
            del self.accelerator.gather
            grpo_trainer.gather = gather
            self._answers, self._metrics["train"] = None, metrics

    @contextmanager
    def _side_effects(self, keep: bool):
        """Metrics that the parent and the reward functions log describe the first round only."""
        metrics, pending = self._metrics["train"], self._pending_metrics
        if not keep:
            self._metrics["train"], self._pending_metrics = defaultdict(list), defaultdict(list)
        try:
            yield
        finally:
            self._metrics["train"], self._pending_metrics = metrics, pending

    def _take_extra_logs(self, rows: int) -> dict[str, list]:
        extras = {}
        for name, values in self._pending_extra_logs.items():
            if len(values) != rows:
                raise ValueError(
                    f"log_extra({name!r}, …) was given {len(values)} values for {rows} completions. Log exactly one "
                    "value per completion."
                )
            extras[name] = list(values)
        self._pending_extra_logs.clear()
        return extras

    # A server's completions are decoded and scored by the parent as if it had generated them.

    def _tokenize_prompts(self, prompts: list) -> tuple:
        return super()._tokenize_prompts(prompts) if self._answers is None else (self._answers.prompt_ids, None, {})

    def _generate_single_turn(self, *args, **kwargs) -> tuple:
        if self._answers is None:
            return super()._generate_single_turn(*args, **kwargs)
        return self._answers.completion_ids, self._answers.logprobs

    def _log_first_round(self) -> None:
        """`completions/*` of a server's first round, which the parent logs itself where it generates."""
        lengths, truncated = zip(*gather_object(self._first_round), strict=True)
        for name, value in completion_metrics(lengths, truncated).items():
            self._metrics["train"][name].append(value)
