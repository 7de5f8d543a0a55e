"""
Several rounds per step: sample all prompts until their exit conditions are met, and select the rollouts that are trained on.

TRL's method then assembles the batch from the selected rollouts ([`~trainer.trl_hooks.InjectedBatch`]).
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from trl import GRPOTrainer

from ..core import completion_metrics
from ..sampling.batch_slots import slot_done
from ..sampling.prompt_sources import StepPlan
from ..sampling.rollout_sampler import RolloutSampler, SelectedRollouts
from ..sampling.synchronous_sampler import SynchronousSampler
from ..utils.distributed import synchronized_errors
from ..utils.logging import deduplicate_warnings
from . import trl_hooks
from .rollout_batch import RolloutBatch, build_rollout_batch
from .round_generator import RoundGenerator


if TYPE_CHECKING:
    from .ada_grpo_trainer import AdaGRPOTrainer


TRL_LOGGER = logging.getLogger(GRPOTrainer.__module__)


class MultiRoundSampling:
    """
    Samples the prompts of a step in rounds.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            Trainer of the policy.
        generator ([`~trainer.round_generator.RoundGenerator`]):
            Prepares, generates and scores rows through the trainer.
    """

    def __init__(self, trainer: "AdaGRPOTrainer", generator: RoundGenerator):
        self.trainer, self.generator = trainer, generator
        self.reset()

    def reset(self) -> None:
        """Count the generation batches of a step from the beginning, when a training starts."""
        self._step, self._batches = -1, 0

    def _position_in_step(self) -> int:
        """
        Micro-batches of this optimizer step before this generation batch: the position in the run that seeds the selection. A
        resumed run shares it, unlike TRL's count of micro-batches in this process.
        """
        step = self.trainer.state.global_step
        self._batches = self._batches + 1 if step == self._step else 0
        self._step = step
        return self._batches * trl_hooks.micro_steps_per_generation(self.trainer)

    def sample(self, plan: StepPlan) -> RolloutBatch:
        """Sample all ranks' prompts, select their groups and receive the completions that this rank trains on. Collective."""
        with (
            trl_hooks.rank_local_collectives(self.trainer),
            self.generator.hold_environments(),
            # TRL warns of every call in which a row has no reward.
            deduplicate_warnings(TRL_LOGGER, "All reward functions returned None"),
        ):
            return self._sample_and_select(plan)

    def _sample_and_select(self, plan: StepPlan) -> RolloutBatch:
        trainer, args, tracker = self.trainer, self.trainer.args, self.trainer.pass_rates
        strategy, prompt_source = trainer.strategy, trainer.prompt_source
        sampler = self.build_sampler(plan)
        hidden = args.disable_tqdm or not trainer.accelerator.is_local_main_process
        with (
            trainer.vllm.generation(),
            StepProgress(len(sampler.prompts), trainer.state.global_step + 1, hidden) as progress,
        ):
            pools = sampler.sample(
                exit_condition=strategy.exit_condition if plan.slots is None else slot_done,
                samples_per_round=strategy.rollouts_per_round,
                max_rounds=args.max_rounds_per_slot,
                positive_threshold=args.float32_threshold,
                progress=progress,
            )
        sampled = prompt_source.sampled_prompts(pools)
        if tracker is not None:
            tracker.restrict_to(sampled.indices)
        seed = (args.seed, trainer.state.global_step, self._position_in_step())
        groups = [
            strategy.select(pool, (*seed, *of_prompt)) if is_trained else []
            for pool, of_prompt, is_trained in zip(sampled.pools, sampled.seeds, sampled.is_trained, strict=True)
        ]
        selected = sampler.fetch([rollout for group in groups for rollout in group])
        batch = build_rollout_batch(sampled.pools, groups, args, sampled.is_on_distribution)
        batch.rows = selected.rows
        rewards = [rollout.rewards for group in groups for rollout in group]
        batch.rewards = torch.tensor(rewards, dtype=torch.float32, device=trainer.accelerator.device)
        self._log(batch, selected)
        if tracker is not None and trainer.captures_hidden_states:
            batch.hidden_states = tracker.reader.all_gather_states([sampler.states.get(i) for i in sampled.indices])
        batch.metrics |= prompt_source.finish_step(pools)
        if not trainer.vllm.samples_async:  # an asynchronous sampler has collected them
            batch.metrics |= trainer.vllm.collect_metrics()
        return batch

    def build_sampler(self, plan: StepPlan) -> RolloutSampler:
        """A sampler of this rank's prompts: without a barrier between rounds if a vLLM server generates. Collective."""
        trainer, generator, prompts = self.trainer, self.generator, plan.prompts
        common: dict[str, Any] = {
            "split_rewards": trainer.split_rewards,
            "accelerator": trainer.accelerator,
            "slots": plan.slots,
        }
        if not trainer.vllm.samples_async:
            return SynchronousSampler(
                rows=prompts.local_rows,
                row_ranks=prompts.row_ranks,
                generate_and_score=generator.generate_and_score,
                **common,
            )
        from ..sampling.async_vllm_sampler import AsyncVLLMSampler

        prepared, prompt_ids, images = [], [], None
        with synchronized_errors():
            if prompts.local_rows:
                prepared = generator.prepare(prompts.local_rows)
                prompt_ids, images, _ = trainer._tokenize_prompts(prepared)
        ranks, rank = prompts.slot_ranks, trainer.accelerator.process_index
        return AsyncVLLMSampler(
            prompts=range(sum(owner < rank for owner in ranks), sum(owner <= rank for owner in ranks)),
            vllm=trainer.vllm_generation,
            prompt_ids=prompt_ids,
            images=images,
            score=generator.make_score_fn(prompts.local_rows, prepared, prompt_ids, images),
            **common,
        )

    def _log(self, batch: RolloutBatch, selected: SelectedRollouts) -> None:
        """Log the tokens of all rounds, the completions of the first one, and extra columns of the table, which TRL does not know."""
        trainer, stats = self.trainer, selected.stats
        trainer.state.num_input_tokens_seen += int(stats.pop("tokens/seen"))
        trl_hooks.set_token_count(trainer, trainer.state.num_input_tokens_seen)
        trl_hooks.append_metrics(trainer, completion_metrics(*zip(*selected.first_round, strict=True)))
        calls, failures = (stats.pop(f"tools/{name}") for name in ("calls", "failures"))
        if trainer.tools:
            frequencies = {
                "tools/call_frequency": calls / len(selected.first_round),
                "tools/failure_frequency": failures / calls if calls else 0.0,
            }
            trl_hooks.append_metrics(trainer, frequencies)
        batch.metrics |= stats
        start = trainer.accelerator.process_index * len(batch.rows)
        columns: dict[str, list] = {
            name: values[start : start + len(batch.rows)] for name, values in batch.pool_columns().items()
        }
        for name in {name for row in batch.rows for name in row.extras}:
            columns[name] = [row.extras.get(name) for row in batch.rows]
        trl_hooks.set_pending_extra_columns(trainer, columns)


class StepProgress(tqdm):
    """
    A bar of the prompts whose sampling is finished in this step, with the number of rollouts and the elapsed time. It appears
    after two seconds, so that quick steps show nothing, and disappears at the end of the step.

    Args:
        total (`int`):
            Number of prompts to sample: those of this rank with a vLLM server, of all ranks otherwise.
        step (`int`):
            Training step, for the label.
        disable (`bool`):
            Show nothing.
    """

    def __init__(self, total: int, step: int, disable: bool):
        label, look = f"Sampling for step {step}", {"miniters": 0, "leave": False, "dynamic_ncols": True}
        super().__init__(total=total, desc=label, unit="prompt", delay=2, disable=disable, **look)

    def __call__(self, active: int, rollouts: int) -> None:
        self.set_postfix(active=active, rollouts=rollouts, refresh=False)
        self.update(self.total - active - self.n)

    def tick(self) -> None:
        """Refresh the elapsed time while nothing else has changed."""
        self.update(0)
