"""GRPO that keeps sampling the prompts that would have taught nothing."""

import inspect
import logging
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..core import completion_metrics, prompt_weight
from ..pass_rates.hidden_states import HiddenStateExtractor
from ..pass_rates.tracker import PassRateTracker
from ..sampling.async_vllm_sampler import AsyncVLLMSampler
from ..sampling.batch_slots import BatchSlot, lane_done
from ..sampling.progress import StepProgress
from ..sampling.prompt_queue import SlotConfig
from ..sampling.prompt_sources import DataLoaderPrompts, PromptBatch, QueuedPrompts
from ..sampling.rollout_sampler import Batch, RolloutSampler
from ..sampling.synchronous_sampler import SynchronousSampler
from ..utils.distributed import shared
from ..utils.logging import deduplicate_warnings, get_logger
from ..vllm.generation import _vllm_options
from .ada_grpo_config import AdaGRPOConfig
from .argument_checks import check_arguments, check_success_reward, check_support
from .baselines import build_baseline
from .callbacks import constant_metrics, show_one_line
from .checkpointing import load_state, save_state
from .diagnostics import TrainingDiagnostics
from .loss_masking import ess_ratio, mask_rows
from .phases import RewardCapture, finite
from .rollout_batch import RolloutBatch, build_rollout_batch, uniform_pools
from .vllm_session import SamplingJob, VLLMMixin


logger = get_logger(__name__)

TRL_LOGGER = logging.getLogger(GRPOTrainer.__module__)


class AdaGRPOTrainer(VLLMMixin):
    """
    [`~trl.GRPOTrainer`] with the adaptive sampling of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996).

    Two things are changed: *which rollouts* the update sees and *what advantage* each of them gets. In training, each
    generation batch is drawn in rounds; a prompt leaves as soon as its pool of rollouts holds enough signal. From each
    pool a balanced group of `num_generations` rollouts is trained on, with advantages from the statistics of the whole
    pool. Everything else (loss types, importance sampling, KL, PEFT, distributed training, checkpoints, evaluation) is
    inherited: the selected group is replayed through the parent in place of its own generation and rewards.

    With `adaptive_sampling="est-ema"` and `"est-value"` there is one round, of as many rollouts per prompt as its estimated
    pass rate calls for, and by default all of them are trained on. Pass rates are saved and resumed with checkpoints.

    `reward`, `reward_std`, `rewards/*`, `frac_reward_zero_std` and `completions/*` describe the first round, which is
    uniform sampling and so comparable with a GRPO run. Where budgets differ, each prompt counts once in the first three.
    Everything adaptive is logged under `ada/`.

    Args:
        model, reward_funcs, args, ...:
            As in [`~trl.GRPOTrainer`], except that `args` is an [`AdaGRPOConfig`]. `rollout_func` needs
            `adaptive_sampling="uniform"`; `environment_factory` and vision-language models need
            `pass_rate_estimator="ema"` where pass rates are estimated (not `"value"` or `"ema+value"`).

    Raises:
        `TypeError`: if `args` is not an [`AdaGRPOConfig`].
        `ValueError`: for an option that adaptive sampling cannot honour, a data set without a `prompt` column, or
            an unknown `success_reward`.

    Example:

    ```python
    from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
    from datasets import load_dataset
    from trl.rewards import accuracy_reward

    trainer = AdaGRPOTrainer(
        model="Qwen/Qwen2.5-Math-1.5B",
        reward_funcs=accuracy_reward,
        args=AdaGRPOConfig(output_dir="out"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    pass_rates: PassRateTracker | None = None
    _warned_mid_generation_checkpoint = False
    _train_sampler = None  # of a data set that can be indexed

    _tag_names = ["trl", "grpo", "reinforce-ada"]
    _name = "Reinforce-Ada"
    _paper = {
        "title": "Reinforce-Ada: An Adaptive Sampling Framework under Non-linear RL Objectives",
        "id": "2510.04996",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{xiong2025reinforceada,
                title        = {{Reinforce-Ada: An Adaptive Sampling Framework under Non-linear RL Objectives}},
                author       = {Wei Xiong and Chenlu Ye and Baohao Liao and Hanze Dong and Xinxing Xu and Christof Monz and Jiang Bian and Nan Jiang and Tong Zhang},
                year         = 2025,
                eprint       = {arXiv:2510.04996},
            }"""),
    }

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, *positional, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AdaGRPOConfig(f"{name.split('/')[-1]}-AdaGRPO")
        if not isinstance(args, AdaGRPOConfig):
            raise TypeError(
                f"AdaGRPOTrainer needs an AdaGRPOConfig as `args`, got {type(args).__name__}. Replace "
                f"{type(args).__name__}(…) by AdaGRPOConfig(…); it takes the same arguments."
            )
        given = inspect.signature(GRPOTrainer).bind_partial(
            model, reward_funcs, args, train_dataset, *positional, **kwargs
        )
        check_arguments(args, given.arguments)
        with _vllm_options(
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
        ):
            super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        # Again, with what the parent has loaded.
        check_success_reward(args, self.reward_func_names)
        check_support(args, self.rollout_func, self.environment_factories, self.processing_class)
        self.adaptive_sampling = args.adaptive_sampling
        if args.tracks_pass_rates:
            reader = HiddenStateExtractor(
                lambda: self.model,
                self.accelerator,
                lambda prompts: super(AdaGRPOTrainer, self)._tokenize_prompts(prompts)[0],
                pad_token_id=self._tokenizer.pad_token_id,
                batch_size=args.per_device_train_batch_size,
            )
            self.pass_rates = PassRateTracker(args, reader, hash_entire_row=self.environment_factories is not None)
            self._capture_hidden_states = self.pass_rates.captures_hidden_states
        self._baseline = build_baseline(args, self.pass_rates)
        if args.max_staleness and not self._uses_async_vllm:
            raise ValueError(
                f"max_staleness ({args.max_staleness}) asks for a step's rollouts before the step, one request each, which "
                "tools, environments, and reward models on sharded processes do not allow. Set max_staleness=0."
            )
        self.prompt_source = self._build_prompts()
        self._signal_warning = TrainingDiagnostics(args, self.reward_func_names)
        self._constant_metrics = constant_metrics(args)
        show_one_line(self)
        if args.adaptive_sampling == "uniform":  # for the model card
            self._name, self._paper = GRPOTrainer._name, GRPOTrainer._paper
            if args.baseline != "pool":
                self._name, self._paper = f"GRPO with a {args.baseline} baseline", {}

    # Collect, then replay through the parent

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            output = super()._generate_and_score_completions(inputs)
            self._check_logprob_mismatch(output)
            return output
        if self.args.is_vanilla_grpo:
            observed = RewardCapture()
            with self.having(_phase=observed):
                output = super()._generate_and_score_completions(inputs)
            self._log_uniform_metrics(inputs, observed)
            self._check_logprob_mismatch(output)
            if self.args.zero_variance_groups == "mask":
                groups = self.accelerator.gather(output["advantages"]).view(-1, self.num_generations)
                # Rewards were equal; rounding may leave a mean that is not.
                zero_variance = (groups == groups[:, :1]).all(dim=1)
                masked = zero_variance.repeat_interleave(self.num_generations).tolist()
                mask_rows(output, masked, self.loss_type, self.accelerator)
            return output
        with self.hold_environments(), deduplicate_warnings(TRL_LOGGER, "All reward functions returned None"):
            replay = self._collect(inputs)
            if self.args.max_staleness:
                self._prefetch_next_generation()
        with self.replaying(replay) as phase:
            output = super()._generate_and_score_completions([row.row for row in replay.rows])
            self._compute_advantages(replay, phase.states)
            if self.args.max_staleness:  # before rows are masked
                replay.metrics["staleness"] = float(self._staleness)
                replay.metrics["ess_ratio"] = ess_ratio(output, self.accelerator)
            self._overwrite_advantages_and_metrics(replay, output)
        self._check_logprob_mismatch(output)
        return output

    def _build_prompts(self) -> DataLoaderPrompts:
        args = self.args
        if not args.uses_prompt_queue:
            return DataLoaderPrompts(self.accelerator, args.num_generations)
        schedule = SlotConfig(
            lanes=args.prompts_per_step,
            candidates_per_slot=args.max_rounds if args.zero_variance_groups == "resample" else 1,
            exit_condition=args.exit_condition,
            max_rounds=args.sampling_strategy.max_rounds(args),
            fixed_budget=args.sampling_strategy.across_steps,
            positive_threshold=args.positive_threshold,
            choices_per_prompt=args.prompt_oversampling,
        )
        return QueuedPrompts(
            self.train_dataset,
            schedule,
            self.accelerator,
            self.pass_rates,
            lambda p: prompt_weight(p, args.max_samples, args.prompt_weighting) * p * (1 - p),
            shuffle=self.shuffle_dataset,
            seed=args.seed,
        )

    def _plan_sampling(self, inputs: list[dict[str, Any]]) -> SamplingJob:
        """Which prompts are asked next, and for how many rollouts. Collective."""
        args, tracker = self.args, self.pass_rates
        question = self.prompt_source.ask(inputs)
        if tracker is not None and not question.predicted:
            tracker.start_step(question.own)
        number, size = len(question.slot_ranks), args.sampling_strategy.round_size(args)
        budgets = tracker.budgets() if tracker is not None and args.sampling_strategy.by_estimates else None
        lanes = self.prompt_source.lanes(question, budgets or [size] * number)
        source = self._build_source(question, lanes)
        sizes = size if budgets is None else [budgets[prompt] for prompt in source.prompts]
        return SamplingJob(
            self.prompt_source,
            source,
            sizes,
            self.state.global_step,
            lanes,
            None if tracker is None else tracker.predictions,
        )

    def _prefetch_next_generation(self) -> None:
        """Send the next step's requests, to be answered with the newest weights while this step is trained on. Collective."""
        args = self.args
        done = (
            self.state.global_step * args.gradient_accumulation_steps + self._step % args.gradient_accumulation_steps
        )
        if done + args.steps_per_generation * self.num_iterations >= (
            self.state.max_steps * args.gradient_accumulation_steps
        ):
            return  # this was the last generation
        self._sync_weights_if_needed()
        tracker = self.pass_rates
        visit = None if tracker is None else tracker.predictions  # of the step that is yet to be trained on
        self._ahead = self._plan_sampling([])
        self._ahead.source.ask(self._ahead.sizes)
        self._ahead.sent = True
        if tracker is not None and visit is not None:
            tracker.predictions = visit

    def _collect(self, inputs: list[dict[str, Any]]) -> RolloutBatch:
        """Sample all processes' prompts, select their groups and bring this process's share of them here."""
        args = self.args
        asking, self._ahead = self._ahead or self._plan_sampling(inputs), None
        source, lanes = asking.source, asking.lanes
        tracker = self.pass_rates
        if tracker is not None and asking.visit is not None:
            tracker.predictions = asking.visit
        self._staleness = self.state.global_step - asking.step
        hidden = args.disable_tqdm or not self.accelerator.is_local_main_process
        with (
            self.vllm_session(asking),
            StepProgress(len(source.prompts), self.state.global_step + 1, hidden) as progress,
        ):
            pools = source.sample(
                exit_condition=args.exit_condition if lanes is None else lane_done,
                samples_per_round=asking.sizes,
                max_rounds=args.max_rounds_per_step,
                positive_threshold=args.positive_threshold,
                progress=progress,
            )
        # Seeded by the position of this generation in the run, which a resumed run shares.
        seed = (args.seed, self.state.global_step, self._step % args.gradient_accumulation_steps)
        asked = self.prompt_source.asked(pools)
        if tracker is not None:
            tracker.restrict_to(asked.indices)
        groups = [
            args.sampling_strategy.group(pool, args, (*seed, *number)) if trained else []
            for pool, number, trained in zip(asked.pools, asked.numbers, asked.trained, strict=True)
        ]
        batch = source.fetch([rollout for group in groups for rollout in group])
        replay = build_rollout_batch(asked.pools, groups, args, self.accelerator.device, asked.is_on_distribution)
        replay.take(batch.rows, self.accelerator.process_index)
        self._log_sampling(replay, batch)
        if tracker is not None and self._capture_hidden_states:
            replay.states = tracker.reader.all_gather_states([source.states.get(i) for i in asked.indices])
        replay.metrics |= self.prompt_source.close(pools)
        return replay

    def _compute_advantages(self, replay: RolloutBatch, states: torch.Tensor | None) -> None:
        """
        Put advantages and metrics into the replay, and learn from it.

        Args:
            states (`torch.Tensor`, *optional*):
                The policy's hidden states of the prompts, `(rows of this process, H)`, if the parent has passed them.
        """
        tracker = self.pass_rates
        if tracker is not None and not tracker.predict_before_sampling:
            if self._capture_hidden_states and states is not None:
                replay.states = tracker.reader.all_gather_states(replay.by_prompt(states))
            tracker.predict(replay.states)
        estimates, stds = self._baseline.compute(replay.pools)
        replay.judge(self.args, self.reward_weights.tolist(), estimates, stds)
        self._baseline.update(replay.pools)
        if tracker is not None:
            step = self.state.global_step + 1
            replay.metrics |= tracker.observe(replay.pools, step, replay.is_on_distribution)

    def _log_sampling(self, replay: RolloutBatch, batch: Batch) -> None:
        """What the parent has not seen: the tokens of all rounds, the completions of the first, extra columns."""
        metrics, stats = self._metrics["train"], batch.stats
        self.state.num_input_tokens_seen += int(stats.pop("tokens/seen"))
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, value in completion_metrics(*zip(*batch.first_round, strict=True)).items():
            metrics[name].append(value)
        calls, failures = (stats.pop(f"tools/{name}") for name in ("calls", "failures"))
        if self.tools:
            metrics["tools/call_frequency"].append(calls / len(batch.first_round))
            metrics["tools/failure_frequency"].append(failures / calls if calls else 0.0)
        replay.metrics |= stats
        extras = self._pending_extra_logs
        extras["pool_size"] = replay.per_row([len(pool) for pool in replay.pools])[replay.local]
        extras["pool_positives"] = replay.per_row([pool.positives for pool in replay.pools])[replay.local]
        for name in {name for row in batch.rows for name in row.extras}:
            extras[name] = [row.extras.get(name) for row in batch.rows]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for metrics in self._metrics.values():
            for name in self._constant_metrics & metrics.keys():
                del metrics[name]
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial):
        self._warn_of_unfinished_generation()
        # First, because the parent pushes the checkpoint to the hub as its last act.
        directory = os.path.join(
            self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        if self.args.should_save:
            if self.pass_rates is not None:
                self.pass_rates.save(directory)
            if state := self._sampler_state_dict():
                save_state(directory, state)
        super()._save_checkpoint(model, trial)

    def _sampler_state_dict(self) -> dict[str, Any]:
        """What is saved beside the record of the prompts."""
        # A generation that is still being trained on is made again after a resume, and so is one that is asked ahead.
        under_way = self._step % (self.args.steps_per_generation * self.num_iterations) > 0
        return self.prompt_source.state_dict(under_way + (self._ahead is not None)) | self._baseline.state_dict()

    def _warn_of_unfinished_generation(self) -> None:
        """Its rollouts are in no checkpoint, TRL's neither, so a resumed run draws them anew."""
        args, micro_steps = self.args, self.args.steps_per_generation * self.num_iterations
        unfinished = self._step % micro_steps and self.state.global_step < self.state.max_steps
        if unfinished and not self._warned_mid_generation_checkpoint:
            self._warned_mid_generation_checkpoint = True
            steps = micro_steps // math.gcd(micro_steps, args.gradient_accumulation_steps)
            logger.warning(
                f"The checkpoint at step {self.state.global_step} is in the middle of a generation, which is {steps} steps "
                "long and which a resumed run starts anew: it will not be the same as one that is not interrupted. Set "
                f"save_steps to a multiple of {steps}."
            )

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._train_sampler is not None:
            for _ in range(int(self.state.epoch)):  # else the first epoch's order is repeated, as GRPOTrainer does
                next(iter(self._train_sampler), None)
        if checkpoint is not None and self.pass_rates is not None:
            self.pass_rates.load(checkpoint)
        if checkpoint is not None and self._sampler_state_dict():
            state = load_state(checkpoint)
            self.prompt_source.load_state_dict(state)
            self._baseline.load_state_dict(state)

    def get_train_dataloader(self):
        """As the parent's; where the prompts come from a stream, one that only counts the steps."""
        args = self.args
        if not args.uses_prompt_queue:
            return super().get_train_dataloader()
        if isinstance(self.train_dataset, IterableDataset):
            generations = -(
                -args.max_steps * args.gradient_accumulation_steps // (args.steps_per_generation * self.num_iterations)
            )
            rows = generations * args.prompts_per_step
        else:
            rows = len(self.train_dataset)
        with self.having(train_dataset=Dataset.from_dict({"prompt": [""] * rows})):
            return super().get_train_dataloader()

    def _build_source(self, question: PromptBatch, lanes: Sequence[BatchSlot] | None) -> RolloutSampler:
        own = question.own
        common = {"split_rewards": self.split_rewards, "accelerator": self.accelerator, "lanes": lanes}
        if not self._uses_async_vllm:
            return SynchronousSampler(rows=own, owners=question.owners, complete=self.complete, **common)
        prompts, prompt_ids, images = [], [], None
        with shared():
            if own:
                prompts = self._prepare(own)
                prompt_ids, images, _ = self._tokenize_prompts(prompts)
        me, places = self.accelerator.process_index, question.slot_ranks
        return AsyncVLLMSampler(
            prompts=range(sum(owner < me for owner in places), sum(owner <= me for owner in places)),
            vllm=self.vllm_generation,
            prompt_ids=prompt_ids,
            images=images,
            score=self._scorer(own, prompts, prompt_ids, images),
            **common,
        )

    def split_rewards(self, rewards: torch.Tensor) -> tuple[list[float], list[float]]:
        """By row of `rewards` (rollouts, reward functions), its weighted sum, and what decides when sampling ends."""
        total = self._total_rewards(rewards).tolist()
        if self.args.success_reward is None:
            return total, total
        return total, rewards[:, self.reward_func_names.index(self.args.success_reward)].tolist()

    def _total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """
        Weighted sum over reward functions, `(rows, num_reward_funcs)` to `(rows,)`; NaN if none scored the row, or if the
        sum is too large for float32.
        """
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return finite(total.masked_fill(rewards.isnan().all(dim=1), torch.nan))

    def _overwrite_advantages_and_metrics(self, replay: RolloutBatch, output: dict[str, Any]) -> None:
        """Put the true advantages and the honest metrics where the parent left those of the selected group."""
        advantages = [value for values in replay.advantages for value in values]
        output["advantages"] = output["advantages"].new_tensor(advantages[replay.local])
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)
        if self.args.zero_variance_groups == "mask":
            masked = replay.per_row(replay.is_zero_variance)
            mask_rows(output, masked, self.loss_type, self.accelerator)
        replay.metrics["tokens/discarded"] = replay.metrics["tokens/generated"] - output["num_items_in_batch"].item()
        # The parent has just logged the rewards of the selected group: report those of the first round instead.
        for name, value in replay.first_round_rewards(
            self.reward_func_names, self.args.sampling_strategy.by_estimates
        ).items():
            self._metrics["train"][name][-1] = value
        self._log_ada(replay.metrics)

    def _log_uniform_metrics(self, inputs: list[dict], observed: RewardCapture) -> None:
        """The same figures for plain GRPO, so that both kinds of run can be compared."""
        rewards = finite(observed.rewards)
        pools, metrics = uniform_pools(rewards.tolist(), *self.split_rewards(rewards), self.args)
        if self.pass_rates is not None:
            self.pass_rates.register_prompts(self.prompt_source.ask(inputs).own)
            self.pass_rates.predict()
            metrics |= self.pass_rates.observe(pools, self.state.global_step + 1)
        tokens = torch.tensor(sum(map(len, observed.completion_ids)), device=rewards.device)
        metrics["tokens/generated"] = self.accelerator.reduce(tokens).item()
        metrics["tokens/discarded"] = 0.0
        self._log_ada(metrics)

    def _log_ada(self, metrics: dict[str, float]) -> None:
        self._signal_warning.observe(metrics, self.state.global_step + 1)
        for name, value in metrics.items():
            self._metrics["train"][f"ada/{name}"].append(value)
