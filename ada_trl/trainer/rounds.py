"""
Several rounds per step: rows are prepared, generated and scored through TRL's own methods, on this rank alone and as
often as a step needs it.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from trl import GRPOTrainer

from ..core import Slot
from ..sampling.prompts import StepPlan
from ..sampling.sampler import Completion, Generated, RolloutSampler
from ..sampling.synchronous import SynchronousSampler
from ..utils.copying import SharedLeaves, copy_containers
from ..utils.distributed import no_collectives, synchronized_errors
from . import trl_private
from .interception import (
    TrainingState,
    add_fields,
    completion_lengths,
    prepare_prompts,
    replaced_methods,
    without_infinities,
)


class RoundGenerator:
    """
    Prepares, generates and scores any rows through [`~trl.GRPOTrainer`], while TRL's metrics of these calls are kept
    apart from those of the step.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer of the policy.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        # Instances that were used in this step, by environment name.
        self._used_environments: dict[str | None, list] | None = None

    def build_sampler(self, plan: StepPlan, slots: list[Slot], *, samples_async: bool) -> RolloutSampler:
        """A sampler of the step's slots; with `samples_async` (a vLLM server), rounds have no barrier. Collective."""
        trainer, rank = self.trainer, self.trainer.accelerator.process_index
        if not samples_async:
            is_single_turn = not trainer.tools and trainer.environment_factories is None
            return SynchronousSampler(
                rows=plan.local_rows,
                row_ranks=plan.row_ranks,
                generate_and_score=self.generate_and_score,
                # On a CPU every rollout costs time, and those of an episode cost the time of its tools.
                fills_rounds=is_single_turn and trainer.accelerator.device.type != "cpu",
                slots=slots,
                accelerator=trainer.accelerator,
            )
        from ..sampling.asynchronous import AsyncVLLMSampler

        prepared, prompt_ids, images = [], [], None
        with synchronized_errors():
            if plan.local_rows:
                prepared = self.prepare(plan.local_rows)
                prompt_ids, images, _ = trainer._tokenize_prompts(prepared)
        before = sum(owner < rank for owner in plan.slot_ranks)
        return AsyncVLLMSampler(
            local_slots=range(before, before + plan.slot_ranks.count(rank)),
            vllm=trainer.vllm_generation,
            prompt_ids=prompt_ids,
            images=images,
            score=self.make_score_fn(plan.local_rows, prepared, prompt_ids, images),
            slots=slots,
            accelerator=trainer.accelerator,
        )

    def prepare(self, rows: list[dict]) -> list:
        """Prepare the prompts of dataset rows as TRL does. Not collective."""
        trainer, prompts = self.trainer, prepare_prompts(self.trainer, rows)
        if self._used_environments is not None:
            # TRL takes environments from the front of its pool: hide those that this step's rollouts have used.
            for name, number in Counter(trl_private.environment_names(trainer)).items():
                pool = trl_private.environment_pool(trainer)[name]
                self._used_environments[name] += pool[:number]
                del pool[:number]
        return prompts

    @contextmanager
    def hold_environments(self) -> Iterator[None]:
        """While the block runs, no two rollouts share an environment. Afterwards all of them are free again."""
        if self.trainer.environment_factories is None:
            yield
            return
        self._used_environments = defaultdict(list)
        try:
            yield
        finally:
            for name, environments in self._used_environments.items():
                trl_private.environment_pool(self.trainer)[name][:0] = environments
            self._used_environments = None

    def generate_and_score(self, rows: list[dict], is_first_round: bool) -> Generated:
        """
        Generate and score one completion for each of `rows`, on this rank. Ranks need not call it together, except
        where the model's own forward pass is collective (FSDP, ZeRO-3).
        """
        rows = [copy_containers(row) for row in rows]  # reward functions may modify their row
        return self._sample(rows, self.prepare(rows), is_first_round)

    def make_score_fn(self, rows: list[dict], prompts: list, prompt_ids: list, images: list | None) -> Callable:
        """
        Return a function that decodes and scores completions of a server for `prompts`, prepared from `rows`. It takes
        positions of prompts, completion ids, their log-probabilities, and whether they belong to the first round.
        """

        def score(positions: list[int], completion_ids: list, logprobs: list, is_first_round: bool) -> Generated:
            # The prompts were tokenized before the completions were requested.
            tokenized: tuple = [prompt_ids[i] for i in positions], images and [images[i] for i in positions], {}
            copies = [copy_containers((rows[i], prompts[i])) for i in positions]
            with replaced_methods(
                self.trainer,
                _tokenize_prompts=lambda prompts: tokenized,
                _generate_single_turn=lambda *args, **kwargs: (completion_ids, logprobs),
            ):
                return self._sample([row for row, _ in copies], [prompt for _, prompt in copies], is_first_round)

        return score

    def _sample(self, rows: list[dict], prompts: list, is_first_round: bool) -> Generated:
        """Generate and score one completion for each prompt, on this rank alone."""
        trainer = self.trainer
        state, tokens_seen = TrainingState(trainer.model), trainer.state.num_input_tokens_seen
        # TRL's metrics of a part of the step would be mistaken for those of the step.
        isolated = trl_private.isolated_metrics(trainer)
        try:
            with replaced_methods(trainer), isolated as (metrics, pending), no_collectives():
                # TRL makes deep copies of the prompts; images in them need not be copied, and other objects may not be
                # copyable.
                columns = trainer._generate(SharedLeaves(prompts))
                _, completion_ids, _, completions, _, extra_fields, *_ = columns
                add_fields(rows, extra_fields)
                started = time.perf_counter()
                # Copies: completions stay in their pools until they are trained on, and reward functions may modify
                # them. The sampler shares errors between ranks.
                with state.preserved():
                    given = copy_containers([prompts, completions, completion_ids])
                    rewards: torch.Tensor = trainer._calculate_rewards(rows, *given)
                extras = self._take_extra_columns(len(prompts))
                seconds = time.perf_counter() - started
            calls = round(sum(metrics["tools/call_frequency"]) * len(prompts))
            failures = round(sum(metrics["tools/failure_frequency"]) * calls)
            if is_first_round:  # which is comparable with GRPO
                trl_private.keep_other_metrics(trainer, metrics, pending, len(prompts))
            seen = trainer.state.num_input_tokens_seen - tokens_seen
        finally:
            trainer.state.num_input_tokens_seen = tokens_seen
        stats = {"tokens/seen": seen, "time/reward": seconds, "tools/calls": calls, "tools/failures": failures}
        return self._split(columns, prompts, extras, without_infinities(rewards).tolist()), stats

    def _split(self, columns: tuple, prompts: list, extras: list[dict], rewards: list) -> list[Completion]:
        trainer = self.trainer
        lengths = completion_lengths(trainer, columns)
        rows: list[dict] = [{"prompt": prompt} for prompt in prompts]
        if trl_private.has_named_environments(trainer):
            names = trl_private.environment_names(trainer)
            rows = [row | {"environment": name} for row, name in zip(rows, names, strict=True)]
        return [
            Completion(
                columns=values,
                row=rows[i],
                extras=extras[i],
                length=lengths[i][0],
                truncated=lengths[i][1],
                environment=trainer.environments and trainer.environments[i],
                rewards=rewards[i],
            )
            for i, values in enumerate(_columns_to_rows(columns, len(prompts)))
        ]

    def _take_extra_columns(self, rows: int) -> list[dict]:
        """Values that reward functions logged with `log_extra`, by row; of one column, those logged last."""
        trainer = self.trainer
        extras: list[dict] = [{} for _ in range(rows)]
        columns = trl_private.pending_extra_columns(trainer)
        for name, values in columns.items():
            if len(values) < rows and trainer.log_completions:  # the values are only used for the table
                raise ValueError(
                    f"log_extra({name!r}, …) was given {len(values)} values for {rows} completions. Log exactly one "
                    "value per completion, or set log_completions=False."
                )
            if len(values) >= rows:
                for row, value in zip(extras, values[-rows:], strict=True):
                    row[name] = value
        columns.clear()
        return extras


def _columns_to_rows(columns: tuple, number: int) -> list[tuple]:
    # Extra fields, a dictionary, have been added to the rows.
    columns = tuple(None if isinstance(column, dict) else column for column in columns)
    return list(zip(*(column or [None] * number for column in columns), strict=True))
