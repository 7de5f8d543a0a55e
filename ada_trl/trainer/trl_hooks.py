"""TRL's own preparation, generation, decoding and reward functions, for any rows and on one process alone."""

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from ..pass_rates.hidden_states import capture_hidden_states
from ..sampling.rollout_sampler import Completion, Completions
from ..utils.distributed import gather_unless_local, local, shared
from ..utils.logging import get_logger
from ..vllm.generation import build_vllm_generation
from .phases import (
    Idle,
    InjectedBatch,
    NoOpEnvironment,
    Prepared,
    Preparing,
    RewardCapture,
    Sampling,
    ServerCompletions,
    columns_of,
    finite,
    rows_of,
)
from .rollout_batch import RolloutBatch


logger = get_logger(__name__)

# What TRL looks up in its module, once for all trainers; both do as TRL unless one of ours asks for something else.
grpo_trainer.gather = gather_unless_local(grpo_trainer.gather)
grpo_trainer.VLLMGeneration = build_vllm_generation


class GRPOHooks(GRPOTrainer):
    """
    Generates and scores through [`~trl.GRPOTrainer`] as often as a step needs it, without what that logs being taken for
    the step's own. [`AdaGRPOTrainer`] decides on which rows.

    The parent prepares the rows of every round as it prepares a batch: images join their messages, tools are bound,
    environments are reset. It is left then, and what follows happens outside of its frame.
    """

    _phase: Idle | RewardCapture | Preparing | Sampling | InjectedBatch = Idle()
    _capture_hidden_states = False  # whether the policy's hidden states of the prompts are wanted
    _played: dict[str | None, list] | None = (
        None  # by environment's name, the instances that rollouts of this step used
    )

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.gather = gather_unless_local(self.accelerator.gather)

    @contextmanager
    def having(self, **attributes: Any):
        """While the block runs, attributes of this trainer are these."""
        before = {name: getattr(self, name) for name in attributes}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            self.__dict__.update(before)

    # What the parent calls

    def _generate(self, prompts: list) -> tuple:
        match self._phase:
            case Preparing():
                raise Prepared(prompts)
            case InjectedBatch(replay):
                return columns_of([row.columns for row in replay.rows])
        return super()._generate(prompts)

    def _tokenize_prompts(self, prompts: list) -> tuple:
        match self._phase:
            case Sampling(ServerCompletions() as answers):
                return answers.prompt_ids, answers.images, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, *args, **kwargs) -> tuple:
        match self._phase:
            case Sampling(ServerCompletions() as answers):
                return answers.completion_ids, answers.logprobs
            case Sampling(states=None) as phase if self._capture_hidden_states and not self.use_vllm:
                prompt_ids = args[0] if args else kwargs["prompt_ids"]
                longest, multiple = max(map(len, prompt_ids)), self.pad_to_multiple_of or 1
                prefill = (len(prompt_ids), -(-longest // multiple) * multiple)
                with capture_hidden_states(self.model, -1, prefill=prefill) as caught:
                    result = super()._generate_single_turn(*args, **kwargs)
                phase.states = caught[0] if caught else None
                return result
        return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        given = (model, input_ids, attention_mask, logits_to_keep, *args)
        match self._phase:
            # The first of these passes, of the policy: the next ones may be of its reference.
            case InjectedBatch(states=None) as phase if self._capture_hidden_states and self.args.recomputes_logprobs:
                with capture_hidden_states(model, -logits_to_keep - 1) as caught:
                    result = super()._get_per_token_logps_and_entropies(*given, **kwargs)
                phase.states = torch.cat(caught) if caught else None
                return result
        return super()._get_per_token_logps_and_entropies(*given, **kwargs)

    def _tool_call_loop(self, *args, **kwargs) -> tuple:
        results = super()._tool_call_loop(*args, **kwargs)
        if isinstance(self._phase, Sampling):
            *_, calls, failures, _ = results
            self._phase.tool_calls = (calls, failures)
        return results

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """As the parent's, but what a reward function raises on one process is raised on all of them."""
        given = (inputs, prompts, completions, completion_ids_list)
        match self._phase:
            case InjectedBatch(replay):
                return replay.rewards
            case Sampling():  # whose caller shares errors
                return super()._calculate_rewards(*given)
        with shared(), local():
            rewards = super()._calculate_rewards(*given)
        rewards = gather(rewards)
        if isinstance(self._phase, RewardCapture):
            self._phase.rewards, self._phase.completion_ids = rewards, completion_ids_list
        return rewards

    # Preparing

    def _prepare(self, rows: list[dict]) -> list:
        """The prompts of `rows`, of the data set. Not collective."""
        try:
            with self.having(_phase=Preparing()):
                super()._generate_and_score_completions(rows)
        except Prepared as prepared:
            prompts = prepared.prompts
        else:
            raise RuntimeError("GRPOTrainer made a batch without calling `_generate`, which AdaGRPOTrainer relies on.")
        if self._played is not None:
            names: list[str | None] = self._batch_environments
            for name, number in Counter(names).items():
                pool = self._environment_pool[name]  # the parent takes its environments from the front
                self._played[name] += pool[:number]
                del pool[:number]
        return prompts

    @contextmanager
    def hold_environments(self):
        """Let no two rollouts of a step share an environment. Afterwards all of them are free for the next step."""
        if self.environment_factories is None:
            yield
            return
        played: dict[str | None, list] = defaultdict(list)
        try:
            with self.having(_played=played):
                yield
        finally:
            for name, environments in played.items():
                self._environment_pool[name][:0] = environments

    # Sampling

    def complete(self, rows: list[dict], first_round: bool) -> Completions:
        """
        Generate and score one completion for each of `rows`, of the data set, on this process. Processes need not call
        it together, except where the model's own forward pass is collective (FSDP, ZeRO-3).
        """
        rows = [copy.deepcopy(row) for row in rows]  # a data loader makes each copy anew: a rollout may change its own
        return self._sample(rows, self._prepare(rows), first_round, Sampling())

    def _scorer(self, rows: list[dict], prompts: list, prompt_ids: list, images: list | None) -> Callable:
        """
        A function that decodes and scores what a server has generated for `prompts`, prepared from `rows`: by position
        of the prompt, completion ids, their log-probabilities, and whether that was the first round.
        """

        def score(positions: list[int], completion_ids: list, logprobs: list, first_round: bool) -> Completions:
            copies = [copy.deepcopy((rows[i], prompts[i])) for i in positions]  # images stay one object in both
            own_ids, own_images = [prompt_ids[i] for i in positions], images and [images[i] for i in positions]
            phase = Sampling(ServerCompletions(own_ids, own_images, completion_ids, logprobs))
            return self._sample([row for row, _ in copies], [prompt for _, prompt in copies], first_round, phase)

        return score

    def _sample(self, rows: list[dict], prompts: list, first_round: bool, phase: Sampling) -> Completions:
        tokens_seen = self.state.num_input_tokens_seen
        try:
            with self.having(_phase=phase), self._isolated_metrics(first_round), local():
                columns = self._generate(prompts)
                _, completion_ids, _, completions, *_ = columns
                started = time.perf_counter()
                rewards = self._calculate_rewards(rows, prompts, completions, completion_ids)
                extras = self._take_extra_logs(len(prompts))
                seconds = time.perf_counter() - started
            seen = self.state.num_input_tokens_seen - tokens_seen
        finally:
            self.state.num_input_tokens_seen = tokens_seen
        if rewards.isinf().any():
            logger.warning_once("A reward function has returned an infinite reward, which is treated as None.")
        return Completions(
            rows=self._split(columns, prompts, extras),
            rewards=finite(rewards),
            tool_calls=phase.tool_calls,
            reward_seconds=seconds,
            tokens_seen=seen,
            states=phase.states,
        )

    def _split(self, columns: tuple, prompts: list, extras: list[dict]) -> list[Completion]:
        _, completion_ids, tool_mask, *_ = columns
        # Of a tool's answer the model has generated nothing.
        lengths = [len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask]
        final_ids = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        rows: list[dict] = [{"prompt": prompt} for prompt in prompts]
        if self.environment_factories is not None and self._multi_environment:
            rows = [row | {"environment": name} for row, name in zip(rows, self._batch_environments, strict=True)]
        return [
            Completion(
                columns=values,
                row=rows[i],
                extras=extras[i],
                length=lengths[i],
                truncated=completion_ids[i][-1] not in final_ids,
                environment=self.environments and self.environments[i],
            )
            for i, values in enumerate(rows_of(columns, len(prompts)))
        ]

    def _isolated_metrics(self, keep_pending: bool):
        """
        What the parent logs of some completions is not said of the step. What reward functions log with `log_metric` is
        taken for it with `keep_pending`.
        """
        logs = {"_metrics": self._metrics | {"train": defaultdict(list)}}
        if not keep_pending:
            logs["_pending_metrics"] = defaultdict(list)
        return self.having(**logs)

    def _take_extra_logs(self, rows: int) -> list[dict]:
        """By row, what reward functions have logged of it; of several that logged the same column, the last one's."""
        extras: list[dict] = [{} for _ in range(rows)]
        for name, values in self._pending_extra_logs.items():
            if len(values) < rows and self.log_completions:  # nobody sees them otherwise
                raise ValueError(
                    f"log_extra({name!r}, …) was given {len(values)} values for {rows} completions. Log exactly one "
                    "value per completion, or set log_completions=False."
                )
            if len(values) >= rows:
                for row, value in zip(extras, values[-rows:], strict=True):
                    row[name] = value
        self._pending_extra_logs.clear()
        return extras

    # InjectedBatch

    @contextmanager
    def replaying(self, replay: RolloutBatch):
        """Let the parent make the update batch of rollouts whose episodes have been played; gives the phase."""
        phase = InjectedBatch(replay)
        with self.having(_phase=phase):
            if self.environment_factories is None:
                yield phase
                return
            names = self.environment_factories
            with self.having(_environment_pool={name: [NoOpEnvironment() for _ in replay.rows] for name in names}):
                yield phase
            self.environments = [row.environment for row in replay.rows]
