"""
The parts of a step, in the order in which [`AdaGRPOTrainer`] calls them: the plan, the rollouts of one round or of
several, and what is logged. (The formulas of advantages are in core/advantages.py.)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl import GRPOTrainer

from ..core import (
    Rollouts,
    SampledPrompt,
    Slot,
    allocate,
    collect_rollouts,
    completion_metrics,
    detailed_metrics,
    first_round_metrics,
    round_metrics,
    sampled_prompts,
    sampling_metrics,
    select_groups,
)
from ..sampling.prompts import WITHOUT_QUEUE, SampledRow, StepPlan
from ..sampling.sampler import Completion, RolloutSampler, StepProgress
from ..utils.copying import copy_containers
from ..utils.distributed import exchange_rows, synchronized_errors
from . import trl_private
from .interception import TrainingState, injecting, recording, without_infinities
from .vllm_session import ess_ratio


POOL_COLUMNS = ("pool_size", "pool_positives")  # of the table of completions

MakeBatch = Callable[[list[dict]], dict[str, Any]]
"""GRPOTrainer's `_generate_and_score_completions`, which makes the batch that is trained on from its rows."""


@dataclass
class StepBatch:
    """
    What a step has sampled: the rollouts of all ranks, and which of them it trains on.

    Args:
        prompts (`list[SampledPrompt]`):
            The P sampled prompts.
        rollouts ([`~core.Rollouts`]):
            All rollouts.
        selected (`np.ndarray`):
            Indices of the rollouts that are trained on, prompt by prompt. Every rank trains on an equal part of them.
        is_on_distribution_P (`np.ndarray`):
            Which prompts are an unbiased sample of the dataset.
        metrics (`dict[str, float]`):
            Logged under `ada/`.
        advantage_N (`np.ndarray`):
            Advantages of all rollouts, once they are computed.
        is_truncated_N (`np.ndarray`):
            With one round per step: whether each rollout reached the maximum length.
    """

    prompts: list[SampledPrompt]
    rollouts: Rollouts
    selected: np.ndarray
    is_on_distribution_P: np.ndarray
    metrics: dict[str, float]
    advantage_N: np.ndarray = field(init=False)
    is_truncated_N: np.ndarray = field(init=False)

    @property
    def prompt_of_row(self) -> np.ndarray:
        """Prompt of each row of all ranks."""
        return self.rollouts.prompt_N[self.selected]

    @property
    def advantage_of_row(self) -> np.ndarray:
        return self.advantage_N[self.selected]

    @property
    def pool_columns(self) -> dict[str, list[int]]:
        """Columns of the table of completions: size of each row's pool, and positives in it."""
        of_prompts = (self.rollouts.size_P, self.rollouts.positives_P)
        return {
            name: values[self.prompt_of_row].tolist() for name, values in zip(POOL_COLUMNS, of_prompts, strict=True)
        }

    def in_zero_advantage_group(self) -> np.ndarray:
        """Whether all rows of each row's prompt have the advantage 0, by row."""
        has_gradient_P = np.zeros(self.rollouts.num_prompts, dtype=bool)
        has_gradient_P[self.prompt_of_row[self.advantage_of_row != 0]] = True
        return ~has_gradient_P[self.prompt_of_row]

    def draws(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """Slots of rollouts, and their indices among the rollouts of the slot."""
        of_rollouts = zip(
            self.rollouts.prompt_N[indices].tolist(), self.rollouts.draw_N[indices].tolist(), strict=True
        )
        return [(self.prompts[p].slot, self.prompts[p].first_draw + draw) for p, draw in of_rollouts]


# The plan


def plan_step(trainer: GRPOTrainer, inputs: list[dict]) -> StepPlan:
    """Choose prompts and numbers of rollouts, given this rank's rows of the data loader. Collective."""
    mode = trainer.mode
    if mode.uses_prompt_queue and not all(isinstance(row, SampledRow) or row == {} for row in inputs):
        raise ValueError(
            "Rows or values that an override passes to `_generate_and_score_completions` would have no effect where "
            "prompts come from the prompt queue. Pass the data loader's rows, change the dataset instead, or set "
            f"{WITHOUT_QUEUE}."
        )
    with TrainingState(trainer.model).preserved():  # a stream runs user code when it is read
        plan = trainer.prompt_source.next_prompts(inputs)
    plan.global_step = trainer.state.global_step
    if trainer.pass_rates is not None:
        plan.estimates = trainer.pass_rates.estimate(plan.local_rows)
    plan.sizes = [mode.round_size] * len(plan.slot_ranks)
    if plan.estimates is not None and mode.is_estimated:
        sizes = allocate(
            plan.estimates.pass_rates,
            mode.num_generations * len(plan.slot_ranks),
            min_samples=mode.min_samples,
            max_samples=mode.max_samples,
            rule=mode.allocation_rule,
        )
        plan.sizes = broadcast_object_list([sizes])[0]  # the main process decides
    if not mode.is_multi_round:
        # The data loader has repeated each row `num_generations` times; other numbers and other prompts are assigned
        # here.
        as_loaded = not mode.uses_prompt_queue and not mode.is_estimated
        plan.rows = inputs if as_loaded else _assign_rows(trainer, plan)
    return plan


def _assign_rows(trainer: GRPOTrainer, plan: StepPlan) -> list[dict]:
    """This rank's part of the batch, which has a copy of the prompt's row for each rollout. Collective."""
    accelerator = trainer.accelerator
    order = [prompt for prompt, size in enumerate(plan.sizes) for _ in range(size)]
    per_rank = len(order) // accelerator.num_processes
    needed = [order[rank * per_rank : (rank + 1) * per_rank] for rank in range(accelerator.num_processes)]
    rows = exchange_rows(plan.local_rows, plan.row_ranks, needed, accelerator)
    return [copy_containers(rows[prompt]) for prompt in needed[accelerator.process_index]]


# One round: TRL's method runs once, on the planned rows


def sample_once(trainer: GRPOTrainer, plan: StepPlan, make_batch: MakeBatch) -> tuple[StepBatch, dict[str, Any]]:
    """Sample one round, in which TRL generates, scores and makes the batch. Collective."""
    is_ahead = trainer.mode.max_staleness > 0
    batches: list[StepBatch] = []

    def receive(lengths: list[tuple[int, bool]], rewards: torch.Tensor) -> None:
        batches.append(_record_round(trainer, plan, lengths, rewards))
        if is_ahead:  # only now, because the rewards decide which prompts are retried
            _prefetch_next_step(trainer)

    with recording(trainer, plan.rows, receive, score_early=is_ahead) as seconds:
        output = make_batch(plan.rows)
    (batch,) = batches
    _log_round(trainer, plan, batch, output, seconds)
    return batch, output


def _record_round(
    trainer: GRPOTrainer, plan: StepPlan, lengths: list[tuple[int, bool]], rewards: torch.Tensor
) -> StepBatch:
    """The batch of this rank's lengths and all ranks' rewards; the queue keeps unsolved prompts. Collective."""
    prompts = [SampledPrompt(candidate, slot) for slot, (candidate,) in enumerate(plan.candidates)]
    attempt_P = np.array([prompt.candidate.attempts for prompt in prompts])
    rows = (rewards if trainer.is_vanilla_grpo else without_infinities(rewards)).cpu().double().numpy()
    of_prompts, scoring = np.split(rows, np.cumsum(plan.sizes)[:-1]), trainer._scoring()
    length_N, is_truncated_N = np.array(gather_object(lengths)).T
    rollouts = Rollouts.score(of_prompts, scoring, attempt_P=attempt_P, length_N=length_N)
    queue_metrics = trainer.prompt_source.finish_step(prompts, rollouts)
    batch = StepBatch(prompts, rollouts, np.arange(len(rollouts)), attempt_P == 0, queue_metrics)
    batch.is_truncated_N = is_truncated_N
    return batch


def _prefetch_next_step(trainer: GRPOTrainer) -> None:
    """Request the next step's rollouts from the newest weights, while this step is trained on. Collective."""
    accumulated = trainer.args.gradient_accumulation_steps
    micro_steps = trainer.state.global_step * accumulated + trl_private.micro_step(trainer) % accumulated
    after_this = micro_steps + trl_private.micro_steps_per_generation(trainer)
    if after_this >= trainer.state.max_steps * accumulated:
        return  # this is the last generation batch
    # Before the requests: if one cannot be sent, the plan's prompts are the next ones again (see
    # `AdaGRPOTrainer.train`).
    plan = trainer._prefetched = plan_step(trainer, [])
    with synchronized_errors():
        # As TRL prepares them in the next step, where images join the messages.
        prompt_ids, images, _ = trainer._tokenize_prompts(trainer._round_generator.prepare(plan.rows))
    trainer.vllm.prefetch(prompt_ids, images)


# Several rounds: sample and select first, then let TRL's method make the batch


def sample_in_rounds(trainer: GRPOTrainer, plan: StepPlan, make_batch: MakeBatch) -> tuple[StepBatch, dict[str, Any]]:
    """Sample the rounds of each prompt until it is done, select from them, and have TRL make the batch. Collective."""
    with (
        trl_private.rank_local_collectives(trainer),
        trainer._round_generator.hold_environments(),
        # TRL warns of every call in which a row has no reward.
        trl_private.without_repeated_warnings("All reward functions returned None"),
    ):
        rule, scoring = trainer.mode.slot_rule, trainer._scoring()
        slots = [Slot(rule, scoring, *slot) for slot in zip(plan.candidates, plan.sizes, strict=True)]
        sampler = trainer._round_generator.build_sampler(plan, slots, samples_async=trainer.vllm.samples_async)
        is_hidden = trainer.args.disable_tqdm or not trainer.accelerator.is_local_main_process
        with (
            trainer.vllm.generation(),
            StepProgress(sampler.num_shown, trainer.state.global_step + 1, is_hidden) as progress,
        ):
            sampler.sample(progress)
        batch = _select(trainer, slots)
        completions = sampler.fetch(batch.draws(batch.selected))
        length_N = [sampler.lengths[draw] for draw in batch.draws(np.arange(len(batch.rollouts)))]
        batch.rollouts = replace(batch.rollouts, length_N=np.array(length_N))
        _log_rounds(trainer, batch, sampler, completions)
        batch.metrics |= trainer.prompt_source.finish_step(batch.prompts, batch.rollouts)
        batch.metrics |= trainer.vllm.collect_metrics()
    rewards = torch.tensor(batch.rollouts.rewards_NF[batch.selected], dtype=torch.float32)
    with injecting(trainer, completions, rewards.to(trainer.accelerator.device)):
        output = make_batch([completion.row for completion in completions])
    return batch, output


def _select(trainer: GRPOTrainer, slots: list[Slot]) -> StepBatch:
    """All rollouts of the sampled slots, and those of them that are trained on."""
    prompts, mode = sampled_prompts(slots), trainer.mode
    rollouts = collect_rollouts(slots, prompts)
    is_on_distribution_P = np.array([prompt.is_on_distribution for prompt in prompts])
    if not mode.is_sequential:
        is_trained_P = np.array([prompt.is_trained for prompt in prompts])
        selected = np.flatnonzero(is_trained_P[rollouts.prompt_N])
        return StepBatch(prompts, rollouts, selected, is_on_distribution_P, {})
    # The position in the run, which a resumed run shares, unlike TRL's count of micro-batches in this process.
    step = trainer.state.global_step
    batches_before = trainer._generated_at.count(step) - 1  # of this optimizer step
    seed = (trainer.args.seed, step, batches_before * trl_private.micro_steps_per_generation(trainer))
    has_candidates = mode.zero_variance_groups == "resample"
    seeds = [
        (*seed, prompt.slot, *((prompt.candidate_index,) if has_candidates else ())) if prompt.is_trained else None
        for prompt in prompts
    ]
    selected = select_groups(rollouts, mode.num_generations, seeds)
    return StepBatch(prompts, rollouts, selected, is_on_distribution_P, {})


# What is logged


def _log_round(
    trainer: GRPOTrainer, plan: StepPlan, batch: StepBatch, output: dict[str, Any], seconds: dict[str, float]
) -> None:
    """Log times, numbers and lengths of a single round, of which TRL has logged all completions. Collective."""
    rollouts, accelerator = batch.rollouts, trainer.accelerator
    of_ranks = accelerator.gather(torch.tensor([list(seconds.values())], device=accelerator.device))
    batch.metrics |= dict(zip(seconds, of_ranks.mean(dim=0).tolist(), strict=True)) | trainer.vllm.collect_metrics()
    batch.metrics["tokens/generated"] = float(rollouts.length_N.sum())
    if trainer.mode.is_estimated or not batch.is_on_distribution_P.all():
        # Lengths of an unbiased sample, where TRL has logged those of retries, or more of the hard prompts.
        counted = np.flatnonzero(batch.is_on_distribution_P[rollouts.prompt_N])
        weights = 1 / rollouts.size_P[rollouts.prompt_N[counted]]  # each prompt counts once
        lengths = completion_metrics(rollouts.length_N[counted], batch.is_truncated_N[counted], weights)
        trl_private.replace_latest_metrics(trainer, {name: [value] for name, value in lengths.items()})
    if trainer.mode.max_staleness:  # before rows are masked
        batch.metrics["staleness"] = float(trainer.state.global_step - plan.global_step)
        batch.metrics["ess_ratio"] = ess_ratio(output, accelerator)


def _log_rounds(
    trainer: GRPOTrainer, batch: StepBatch, sampler: RolloutSampler, completions: list[Completion]
) -> None:
    """Log tokens of all rounds, completions of the first one, and extra columns, which TRL does not know."""
    stats, first_round = sampler.stats, sampler.first_round
    trainer.state.num_input_tokens_seen += int(stats.pop("tokens/seen"))
    trl_private.set_token_count(trainer, trainer.state.num_input_tokens_seen)
    trl_private.append_metrics(trainer, completion_metrics(*zip(*first_round, strict=True)))
    calls, failures = (stats.pop(f"tools/{name}") for name in ("calls", "failures"))
    if trainer.tools:
        frequencies = {
            "tools/call_frequency": calls / len(first_round),
            "tools/failure_frequency": failures / calls if calls else 0.0,
        }
        trl_private.append_metrics(trainer, frequencies)
    batch.metrics |= stats
    names = {name for completion in completions for name in completion.extras}
    columns = {name: [completion.extras.get(name) for completion in completions] for name in names}
    trl_private.set_pending_extra_columns(trainer, columns)


def log_step(trainer: GRPOTrainer, plan: StepPlan, batch: StepBatch, output: dict[str, Any]) -> None:
    """Log the metrics of a step, and update the estimates of pass rates. Collective."""
    rollouts, args, mode = batch.rollouts, trainer.args, trainer.mode
    round_size = mode.round_size if mode.is_sequential else int(rollouts.size_P.max())
    advantage_N = batch.advantage_N.copy()
    if args.mask_truncated_completions:  # a masked row has no gradient
        is_masked = trainer.accelerator.gather(output["completion_mask"].sum(dim=1) == 0)
        advantage_N[batch.selected[is_masked.cpu().numpy()]] = 0
    metrics = batch.metrics
    metrics |= sampling_metrics(
        rollouts,
        batch.selected,
        advantage_N,
        num_generations=mode.num_generations,
        outcome_N=trainer._scoring().distinguish(rollouts.rewards_NF) if mode.slot_rule.compares_each_reward else None,
        samples_per_round=round_size,
        is_on_distribution_P=batch.is_on_distribution_P,
    )
    if mode.is_sequential or args.log_completions:
        metrics |= round_metrics(rollouts, mode.slot_rule, samples_per_round=round_size)
    if args.log_completions:
        metrics |= detailed_metrics(rollouts, batch.selected, mode.slot_rule, samples_per_round=round_size)
        if not trainer.is_vanilla_grpo:
            trl_private.append_extra_columns(trainer, batch.pool_columns)
    if trainer.pass_rates is not None and plan.estimates is not None:
        estimates = plan.estimates
        if mode.is_multi_round:  # of several candidates, those that were sampled
            estimates = estimates.take(plan.rows_of(batch.prompts))
        metrics |= trainer.pass_rates.observe(estimates, rollouts, step=trainer.state.global_step + 1)
    if not trainer.is_vanilla_grpo:
        of_first_round = first_round_metrics(
            rollouts,
            trainer.reward_func_names,
            rollouts_per_round=round_size,
            is_on_distribution_P=batch.is_on_distribution_P,
            each_prompt_once=mode.is_estimated,
        )
        of_first_round["frac_reward_zero_std"] = [metrics["frac_reward_zero_std/first_round"]]
        trl_private.replace_latest_metrics(trainer, of_first_round)
    if mode.num_generations == 1 or mode.is_estimated:  # GRPO has groups of one size
        trl_private.drop_metric(trainer, "frac_reward_zero_std")
        del metrics["frac_reward_zero_std/first_round"], metrics["frac_recovered_groups"]
    metrics["tokens/discarded"] = metrics["tokens/generated"] - output["num_items_in_batch"].item()
    trainer._diagnostics.observe(metrics, rollouts, trainer.state.global_step + 1)
    if not args.log_completions:
        metrics = {name: metrics[name] for name in metrics if name in trainer._logged_metrics}
    trl_private.append_metrics(trainer, metrics, prefix="ada/")
