"""
Reinforce-Ada adaptive sampling for TRL's GRPOTrainer.

A step is [`AdaGRPOTrainer._generate_and_score_completions`], which TRL calls with rows of the data loader and which returns the
batch to train on. In reading order:

1. the prompt source gives the prompts of the step, the sampling strategy their numbers of rollouts (`_plan_step`);
2. with one round per step, TRL's own method runs once on these rows (`_run_single_round`); with several, rounds are sampled
   first, and the selected rollouts are then assembled by TRL's method (`_run_multiple_rounds`);
3. the baseline gives the advantages, and everything that depends on them is replaced in TRL's batch and logs.
"""

import functools
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .. import __version__
from ..core import Pool, Rollout, pass_at_k_metrics, prompt_weight
from ..sampling.prompt_queue import SlotConfig
from ..sampling.prompt_sources import (
    WITHOUT_QUEUE,
    DataLoaderPrompts,
    PlaceholderRow,
    PromptBatch,
    PromptSource,
    QueuedPrompts,
    SampledPrompts,
    StepPlan,
    collate_placeholders,
)
from ..utils.copying import copy_containers
from ..utils.distributed import collectives_disabled, exchange_rows, no_collectives, synchronized_errors
from ..utils.logging import get_logger
from . import trl_hooks
from .ada_grpo_config import AdaGRPOConfig
from .baselines import LARGEST_POOL, build_baseline
from .checkpointing import load_state, save_state
from .multi_round import MultiRoundSampling
from .reporting import TrainingDiagnostics, constant_metrics, report_start
from .rollout_batch import POOL_COLUMNS, RolloutBatch, build_rollout_batch, mask_rows, skip_zero_advantage_rows
from .round_generator import RoundGenerator
from .trainer_validation import (
    check_arguments,
    check_overrides,
    check_prompt_format,
    check_settings,
    check_size,
    check_success_reward,
    check_support,
    check_trainable,
    read_settings,
    report_too_few_prompts,
    tokenize_prompts,
    use_counts_beyond_text,
)
from .trl_hooks import Hook, StepCapture, injecting, using_hook
from .user_code import TrainingState
from .vllm_session import VLLMSession, ess_ratio


if TYPE_CHECKING:
    from ..pass_rates.tracker import PassRateTracker


logger = get_logger(__name__)


class AdaGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with the adaptive sampling of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996).

    Two things are changed: *which rollouts* are trained on and *what advantage* each of them gets. Everything else (loss types,
    importance sampling, KL, PEFT, distributed training, checkpoints, evaluation) is inherited.

    `reward`, `reward_std`, `rewards/*`, `frac_reward_zero_std` and `completions/*` describe the first round, which is an unbiased
    sample of the dataset and comparable with a GRPO run. Where numbers of rollouts differ, each prompt counts once in the first
    three. Everything adaptive is logged under `ada/`.

    Args:
        model, reward_funcs, args, ...:
            As in [`~trl.GRPOTrainer`], except that `args` is an [`AdaGRPOConfig`]. `rollout_func` requires plain GRPO
            (`adaptive_sampling="uniform"`, `baseline="pool"`, no prompt weight); `environment_factory` and vision-language
            models require `pass_rate_estimator="ema"` where pass rates are estimated before sampling.

    Raises:
        `TypeError`: if `args` is not an [`AdaGRPOConfig`].
        `ValueError`: for an option that adaptive sampling does not support, a dataset without a `prompt` column, or
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

    pass_rates: "PassRateTracker | None" = None
    vllm: VLLMSession = None  # type: ignore[assignment] # set by `__init__`
    captures_hidden_states = False  # whether a value head reads the policy's hidden states of the prompts
    _hook: Hook | None = None  # see trl_hooks.py
    _prefetched: StepPlan | None = None  # the next step, if its rollouts were requested before this one is trained on
    _warned_mid_generation_checkpoint = False
    _queue_inputs: tuple | None = None  # attributes that the prompt queue was made from
    _train_sampler = None  # of a dataset that can be indexed
    _repeats_evaluated_rows = True  # whether an evaluation samples each prompt `num_generations_eval` times

    _tag_names = ["trl", "grpo", "ada-trl", "reinforce-ada"]
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

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: AdaGRPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AdaGRPOConfig(f"{name.split('/')[-1]}-AdaGRPO")
        if not isinstance(args, AdaGRPOConfig):
            raise TypeError(
                f"AdaGRPOTrainer needs an AdaGRPOConfig as `args`, got {type(args).__name__}. Replace "
                f"{type(args).__name__}(…) by AdaGRPOConfig(…); it takes the same arguments."
            )
        check_overrides(self, AdaGRPOTrainer, args)
        check_arguments(
            args, train_dataset, eval_dataset, reward_funcs, processing_class, rollout_func, environment_factory
        )
        # Before `GRPOTrainer.__init__`, which adds the tags to the model.
        self._name, self._paper, self._tag_names = self._describe_method(args)
        with trl_hooks.vllm_generation_class(
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
        ):
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        # Again: GRPOTrainer has now loaded the reward models, the environments and the processing class.
        check_success_reward(args, self.reward_func_names)
        check_support(args, self.rollout_func, self.environment_factories, self.processing_class)
        use_counts_beyond_text(args, self.environment_factories, self.processing_class)
        check_trainable(self.model, self.optimizer)
        check_prompt_format(self)
        self.vllm = VLLMSession(self)
        if args.max_staleness and not self.vllm.samples_async:
            raise ValueError(
                f"max_staleness ({args.max_staleness}) is not supported with tools, environments, or reward models under "
                "FSDP or DeepSpeed, because rollouts are requested one step ahead. Set max_staleness=0."
            )
        if args.zero_variance_groups == "skip" and self.aux_loss_enabled:
            raise ValueError(
                "zero_variance_groups='skip' is not supported with the auxiliary loss of a Mixture-of-Experts model, which acts "
                "on all rows. Use zero_variance_groups='keep', or router_aux_loss_coef=0."
            )
        if args.tracks_pass_rates:
            self.pass_rates = self._build_tracker()
            self.captures_hidden_states = self.pass_rates.captures_hidden_states
        self.strategy = args.sampling_strategy
        self.baseline = build_baseline(args, self.pass_rates)
        # Where prompts come from the queue, `get_train_dataloader` replaces it.
        self.prompt_source: PromptSource = DataLoaderPrompts(
            self.accelerator, args.num_generations, check_groups=not args.is_vanilla_grpo
        )
        self._rounds = RoundGenerator(self)
        self._multi_round = MultiRoundSampling(self, self._rounds)
        self._diagnostics = TrainingDiagnostics(args)
        self._constant_metrics = constant_metrics(args)
        self._evaluated_groups: list[tuple[int, int]] = []
        self._settings = read_settings(self)

    @classmethod
    def _describe_method(cls, args: AdaGRPOConfig) -> tuple[str, dict[str, str], list[str]]:
        """Return name, paper and tags for the model card."""
        options = {name: getattr(args, name) for name in ("baseline", "prompt_oversampling", "zero_variance_groups")}
        changed = [f"{name}={value!r}" for name, value in options.items() if value not in ("pool", 1, "keep")]
        details = ", ".join([*changed, f"ada_trl {__version__}"])
        if args.adaptive_sampling != "uniform" or cls._name != AdaGRPOTrainer._name:  # a subclass may have other names
            return f"{cls._name} ({details})", cls._paper, cls._tag_names
        tags = [tag for tag in cls._tag_names if tag != "reinforce-ada"]
        return f"{GRPOTrainer._name} ({details})", GRPOTrainer._paper, tags

    def _build_tracker(self) -> "PassRateTracker":
        from ..pass_rates.hidden_states import HiddenStateExtractor
        from ..pass_rates.tracker import PassRateTracker

        reader = HiddenStateExtractor(
            lambda: self.model,
            self.accelerator,
            lambda prompts: self._tokenize_prompts(prompts)[0],
            pad_token_id=trl_hooks.tokenizer(self).pad_token_id,
            batch_size=self.args.per_device_train_batch_size,
        )
        return PassRateTracker(self.args, reader, hash_entire_row=self.environment_factories is not None)

    def _build_prompt_queue(self) -> QueuedPrompts:
        args = self.args
        config = SlotConfig(
            slots=trl_hooks.prompts_per_generation(self),
            candidates_per_slot=args.max_rounds if args.zero_variance_groups == "resample" else 1,
            exit_condition=self.strategy.exit_condition,
            max_rounds=self.strategy.max_rounds,
            fixed_budget=self.strategy.retries_across_steps,
            positive_threshold=args.float32_threshold,
            choices_per_prompt=args.prompt_oversampling,
        )
        dataset, collate = trl_hooks.dataset_and_collator(self)

        def load_rows(rows: Iterable[dict]) -> list[dict]:
            with TrainingState(self.model).preserved():  # a transform or a collator may be user code
                read = list(rows)
                loaded = collate(read) if read else []
            if len(loaded) != len(read):
                raise ValueError(
                    f"The data collator returned {len(loaded)} rows for {len(read)} rows of the dataset, but the prompt queue needs "
                    "one for each. Add or remove rows in the dataset itself."
                )
            return loaded

        return QueuedPrompts(
            dataset,
            config,
            self.accelerator,
            self.pass_rates,
            lambda p: prompt_weight(p, LARGEST_POOL, args.prompt_weighting) * p * (1 - p),
            load_rows,
            shuffle=self.shuffle_dataset,
            seed=args.seed,
        )

    def _read_queue_inputs(self) -> tuple:
        """Return the attributes that decide which rows the prompt queue yields, in which order and how many in a step."""
        order = self.shuffle_dataset, self.args.seed, trl_hooks.prompts_per_generation(self)
        rows = self.train_dataset, getattr(self.train_dataset, "format", None), self.data_collator
        return *rows, trl_hooks.signature_columns(self), *order

    # A step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            with trl_hooks.without_hook(self), trl_hooks.reporting_rewards(self, self._add_evaluated_groups):
                output = super()._generate_and_score_completions(inputs)
            trl_hooks.append_missing_extra_columns(self, POOL_COLUMNS, len(inputs) * self.accelerator.num_processes)
            self.vllm.check_logprobs(output, same_weights=True)
            return output
        if self.args.uses_prompt_queue and not all(isinstance(row, PlaceholderRow) for row in inputs):
            raise ValueError(
                "Rows that an override passes to `_generate_and_score_completions` would have no effect where prompts come from the "
                f"prompt queue. Pass the data loader's rows, change the dataset instead, or set {WITHOUT_QUEUE}."
            )
        plan, self._prefetched = self._prefetched or self._plan_step(inputs), None
        if self.pass_rates is not None and plan.predictions is not None:
            self.pass_rates.predictions = plan.predictions  # a prefetched plan was made during the step before
        if self.args.is_multi_round:
            batch, output = self._run_multiple_rounds(plan)
        else:
            if plan.rows is not inputs and isinstance(inputs, list):
                # An override that reads its rows after this call expects those of the batch.
                inputs[:] = map(PlaceholderRow if self.args.uses_prompt_queue else dict, plan.rows)
            batch, output = self._run_single_round(plan)
        if not self.args.is_vanilla_grpo:
            self._replace_advantages_and_metrics(batch, output)
        self._mask_and_log(batch, output)
        self.vllm.check_logprobs(output, same_weights=plan.global_step == self.state.global_step)
        return output

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self.args.zero_variance_groups == "skip":
            inputs = skip_zero_advantage_rows(inputs, self.loss_type, self.accelerator)
        return inputs

    def _plan_step(self, inputs: list[dict[str, Any]]) -> StepPlan:
        """Choose the prompts of a step and their numbers of rollouts. Collective."""
        tracker = self.pass_rates
        with TrainingState(self.model).preserved():  # a stream runs user code when it is read
            prompts = self.prompt_source.next_prompts(inputs)
        if tracker is not None and not prompts.is_predicted:
            tracker.start_step(prompts.local_rows)
        if tracker is not None and self.strategy.uses_estimated_budgets:
            sizes = tracker.budgets()
        else:
            sizes = [self.strategy.rollouts_per_round] * len(prompts.slot_ranks)
        rows: list[dict] = []
        if not self.args.is_multi_round:
            # The data loader has repeated each row `num_generations` times; other numbers and other prompts are assigned here.
            as_loaded = not self.args.uses_prompt_queue and not self.strategy.uses_estimated_budgets
            rows = inputs if as_loaded else self._assign_rows(prompts, sizes)
        return StepPlan(
            prompts,
            sizes,
            self.prompt_source.make_slots(prompts, sizes),
            None if tracker is None else tracker.predictions,
            self.state.global_step,
            rows,
        )

    def _assign_rows(self, prompts: PromptBatch, sizes: Sequence[int]) -> list[dict]:
        """This rank's part of the batch, in which each prompt has `sizes` copies of its row. Collective."""
        order = [prompt for prompt, size in enumerate(sizes) for _ in range(size)]
        per_rank = len(order) // self.accelerator.num_processes
        needed = [order[rank * per_rank : (rank + 1) * per_rank] for rank in range(self.accelerator.num_processes)]
        rows = exchange_rows(prompts.local_rows, prompts.row_ranks, needed, self.accelerator)
        return [copy_containers(rows[prompt]) for prompt in needed[self.accelerator.process_index]]

    # One round: TRL's method runs once, on the planned rows

    def _run_single_round(self, plan: StepPlan) -> tuple[RolloutBatch, dict[str, Any]]:
        sampled: SampledPrompts | None = None
        queue_metrics: dict[str, float] = {}

        def receive(rewards: torch.Tensor) -> None:
            nonlocal sampled, queue_metrics
            pools = self._fill_pools(plan, rewards)
            sampled = self.prompt_source.sampled_prompts(pools)
            queue_metrics = self.prompt_source.finish_step(pools)
            if self.args.max_staleness:  # only now, because the rewards decide which prompts are retried
                self._prefetch_next_step()

        capture = StepCapture(
            self, plan.rows, receive, score_early=self.args.max_staleness > 0, prefetched=plan.is_prefetched
        )
        with using_hook(self, capture):
            output = super()._generate_and_score_completions(plan.rows)
        assert sampled is not None, "GRPOTrainer made a batch without calling `_calculate_rewards`"
        groups = [self.strategy.select(pool, ()) for pool in sampled.pools]
        batch = build_rollout_batch(sampled.pools, groups, self.args, sampled.is_on_distribution)
        batch.metrics |= queue_metrics | self._average_seconds(capture.seconds) | self.vllm.collect_metrics()
        mean_length = trl_hooks.latest_metric(self, "completions/mean_length") or 0.0
        batch.metrics["tokens/generated"] = round(mean_length * sum(map(len, groups)))
        if self.args.max_staleness:  # before rows are masked
            batch.metrics["staleness"] = float(self.state.global_step - plan.global_step)
            batch.metrics["ess_ratio"] = ess_ratio(output, self.accelerator)
        self._compute_advantages(batch, capture.hidden_states)
        if not self.args.is_vanilla_grpo:
            trl_hooks.append_extra_columns(self, batch.pool_columns())
        return batch, output

    def _fill_pools(self, plan: StepPlan, rewards: torch.Tensor) -> Sequence[Pool]:
        """One pool, or slot, per prompt, from `rewards` of all ranks' rows, `(rows, num_reward_funcs)`."""
        totals, success_rewards = self.split_rewards(rewards)
        scored = zip(totals, success_rewards, map(tuple, rewards.tolist()), strict=True)
        pools: Sequence[Pool] = plan.slots or [Pool(self.args.float32_threshold) for _ in plan.sizes]
        for pool, size in zip(pools, plan.sizes, strict=True):
            for index in range(size):
                pool.add(Rollout(index, *next(scored)))
        return pools

    def _prefetch_next_step(self) -> None:
        """Request the next step's rollouts, to be generated with the newest weights while this step is trained on. Collective."""
        args = self.args
        micro_steps = self.state.global_step * args.gradient_accumulation_steps
        micro_steps += trl_hooks.micro_step(self) % args.gradient_accumulation_steps
        after_this = micro_steps + trl_hooks.micro_steps_per_generation(self)
        if after_this >= self.state.max_steps * args.gradient_accumulation_steps:
            return  # this is the last generation batch
        tracker = self.pass_rates
        predictions = None if tracker is None else tracker.predictions
        plan = self._plan_step([])
        plan.is_prefetched = True
        if tracker is not None and predictions is not None:
            tracker.predictions = predictions  # those of this step, whose advantages are computed next
        # Before the requests: if one cannot be sent, `cancel_prefetch` makes the plan's prompts the next ones again.
        self._prefetched = plan
        with synchronized_errors():
            # As TRL prepares them in the next step, where images join the messages.
            prompt_ids, images, _ = self._tokenize_prompts(self._rounds.prepare(plan.rows))
        self.vllm.prefetch(prompt_ids, images)

    def cancel_prefetch(self) -> None:
        """Forget the next step that was planned, before its requests are cancelled; its prompts are the next ones again."""
        if self._prefetched is not None:
            self._prefetched = None
            self.prompt_source.rollback()

    # Several rounds: sample and select first, then let TRL's method assemble the batch

    def _run_multiple_rounds(self, plan: StepPlan) -> tuple[RolloutBatch, dict[str, Any]]:
        batch = self._multi_round.sample(plan)
        with injecting(self, batch) as hook:
            output = super()._generate_and_score_completions([row.row for row in batch.rows])
        self._compute_advantages(batch, hook.hidden_states)
        return batch, output

    # Advantages

    def _compute_advantages(self, batch: RolloutBatch, states: torch.Tensor | None) -> None:
        """
        Set the batch's advantages and metrics, and update baseline and pass-rate estimates. Collective.

        Args:
            states (`torch.Tensor`, *optional*):
                `(rows of this rank, H)`, the policy's hidden states of the prompts, if they were captured from TRL's forward passes.
        """
        tracker = self.pass_rates
        if tracker is not None and not tracker.predict_before_sampling:
            if self.captures_hidden_states and states is not None:
                by_prompt = batch.first_row_states(states, self.accelerator.process_index)
                batch.hidden_states = tracker.reader.all_gather_states(by_prompt)
            tracker.predict(batch.hidden_states)
        values = self.baseline.compute(batch.pools)
        batch.compute_advantages(self.args, self.reward_weights.tolist(), values)
        # Only now: no rollout may influence its own baseline or divisor.
        self.baseline.update(batch.pools)
        if tracker is not None:
            step = self.state.global_step + 1
            batch.metrics |= tracker.observe(batch.pools, step, batch.is_on_distribution)

    def _replace_advantages_and_metrics(self, batch: RolloutBatch, output: dict[str, Any]) -> None:
        """Replace the advantages and the metrics of rewards that TRL has computed from its groups."""
        advantages = batch.flat_advantages
        rows = len(output["advantages"])
        start = self.accelerator.process_index * rows
        output["advantages"] = output["advantages"].new_tensor(advantages[start : start + rows])
        trl_hooks.replace_logged_advantages(self, advantages)
        once = self.strategy.uses_estimated_budgets
        first_round = batch.first_round_metrics(self.reward_func_names, each_prompt_once=once)
        trl_hooks.replace_latest_metrics(self, first_round)

    def _mask_and_log(self, batch: RolloutBatch, output: dict[str, Any]) -> None:
        """Mask zero-variance groups with `zero_variance_groups="mask"`, and log the `ada/` metrics. Collective."""
        if self.args.zero_variance_groups == "mask":
            # By the batch's exact advantages: in TRL's, rounding may leave a mean that differs from equal rewards.
            mask_rows(output, batch.per_row(batch.has_zero_advantage), self.loss_type, self.accelerator)
        batch.metrics["tokens/discarded"] = batch.metrics["tokens/generated"] - output["num_items_in_batch"].item()
        if self.args.mask_truncated_completions:
            # A prompt of which every row with an advantage is masked has no gradient.
            is_masked = self.accelerator.gather(output["completion_mask"].sum(dim=1) == 0)
            batch.count_masked_rows(is_masked.tolist())
        rewards = [reward for pool in batch.pools for reward in pool.rewards]
        self._diagnostics.observe(batch.metrics, rewards, self.state.global_step + 1)
        trl_hooks.append_metrics(self, {f"ada/{name}": value for name, value in batch.metrics.items()})

    def _average_seconds(self, seconds: dict[str, float]) -> dict[str, float]:
        """Over ranks. Collective."""
        received = gather_object([seconds])
        return {name: sum(of_rank[name] for of_rank in received) / len(received) for name in seconds}

    def split_rewards(self, rewards: torch.Tensor) -> tuple[list[float], list[float]]:
        """
        Total reward and success reward of each row of `rewards`, `(rows, num_reward_funcs)`. The total is the weighted sum; NaN if
        no function with a weight scored the row, or if it exceeds float32.
        """
        weights = self.reward_weights.to(rewards.device)
        unscored = (rewards.isnan() | (weights == 0)).all(dim=1)
        total = (rewards * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        totals = total.masked_fill(total.isinf(), torch.nan).tolist()
        if self.args.success_reward is None:
            return totals, totals
        return totals, rewards[:, self.reward_func_names.index(self.args.success_reward)].tolist()

    # TRL's methods that the hooks intercept (trl_hooks.py)

    def _generate(self, prompts: list) -> tuple:
        if self._hook is not None:
            return self._hook.generate(super()._generate, prompts)
        if self.vllm is None:  # constructed without `__init__`, as in tests of TRL
            return super()._generate(prompts)
        with self.vllm.generation():  # evaluation
            return super()._generate(prompts)

    def _tokenize_prompts(self, prompts: list) -> tuple:
        call = functools.partial(tokenize_prompts, super()._tokenize_prompts)
        return call(prompts) if self._hook is None else self._hook.tokenize_prompts(call, prompts)

    def _generate_single_turn(self, *args, **kwargs) -> tuple:
        call: Callable = super()._generate_single_turn
        return call(*args, **kwargs) if self._hook is None else self._hook.generate_single_turn(call, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        call: Callable = super()._get_per_token_logps_and_entropies
        return call(*args, **kwargs) if self._hook is None else self._hook.compute_logprobs(call, *args, **kwargs)

    def _tool_call_loop(self, *args, **kwargs) -> tuple:
        call: Callable = super()._tool_call_loop
        if self._hook is not None:
            call = functools.partial(self._hook.run_tools, call)
        if self.vllm is None or not self.vllm.uses_server or collectives_disabled():
            return call(*args, **kwargs)
        # Ranks request different numbers of further turns, so that none of them may wait for another.
        with synchronized_errors(self.vllm_generation.error_factory("rollouts are missing")), no_collectives():
            return call(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        given = (super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        if self._hook is not None:
            return self._hook.calculate_rewards(*given)
        return trl_hooks.score_on_all_ranks(self, *given)

    def _add_evaluated_groups(self, rewards: torch.Tensor) -> None:
        """Count correct and scored completions of an evaluation batch's prompts; `rewards` has those of all ranks, in order."""
        n = self.num_generations_eval
        scored = zip(*self.split_rewards(trl_hooks.without_infinities(rewards)), strict=True)
        rollouts = [Rollout(i % n, total, success) for i, (total, success) in enumerate(scored)]
        for start in range(0, len(rollouts), n):
            pool = Pool(self.args.float32_threshold, rollouts[start : start + n])
            self._evaluated_groups.append((pool.positives, pool.scored))

    # Training, logging, checkpoints

    def train(self, *args, **kwargs):
        # Again: attributes may have been set since the construction.
        check_overrides(self, AdaGRPOTrainer, self.args)
        check_settings(self, self._settings)
        if self.environment_factories is None:
            check_size(self.args, self.train_dataset)
        if not self.args.is_vanilla_grpo:  # otherwise the rest of a batch of an earlier call is trained on, as in TRL
            trl_hooks.forget_buffered_batch(self)
        trl_hooks.forget_evaluation_model(self)
        self._multi_round.reset()
        report_start(self.args, len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None)
        steps_before = self.state.global_step
        try:
            with self.vllm.running():
                result = super().train(*args, **kwargs)
        finally:
            self.prompt_source.rollback()  # the prompts of a step that an error has interrupted are the next ones again
        # A callback may have stopped the training before its first step: then a micro-batch has been trained on.
        no_batch = self.state.global_step == steps_before == trl_hooks.micro_step(self) == 0
        if no_batch and isinstance(self.train_dataset, IterableDataset):
            report_too_few_prompts(self.args, "fewer")
        return result

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        self._evaluated_groups = []
        with self.vllm.running():
            output = super().evaluation_loop(*given)
        groups = self._evaluated_groups
        if has_length(dataloader.dataset):
            # With several processes, the last batch is filled up with the first prompts.
            groups = groups[: len(dataloader.dataset)]
        if self.num_generations_eval > 1 and self._repeats_evaluated_rows:
            metrics = pass_at_k_metrics(groups)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def predict(self, test_dataset, *args, **kwargs):
        # TRL repeats the rows of a dataset `num_generations_eval` times, but not those of a stream, which then have no pass@k.
        repeats = not isinstance(test_dataset, IterableDataset)
        with trl_hooks.override_attributes(self, _repeats_evaluated_rows=repeats):
            return super().predict(test_dataset, *args, **kwargs)

    def _load_best_model(self):
        super()._load_best_model()
        self.vllm.forget_weights()  # the engine has other weights, of the same step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        trl_hooks.drop_metrics(self, self._constant_metrics)
        super().log(logs, start_time)

    def get_train_dataloader(self):
        """As in [`~trl.GRPOTrainer`]; where prompts come from the queue, a data loader that only counts the steps."""
        args = self.args
        if not args.uses_prompt_queue:
            return super().get_train_dataloader()
        # Attributes that TRL reads here may have been set since the construction, and the dataset may have been replaced since the
        # last call, for example for the next stage of a curriculum.
        if self._queue_inputs != (queue_inputs := self._read_queue_inputs()):
            self._queue_inputs, self.prompt_source = queue_inputs, self._build_prompt_queue()
        rows = None if isinstance(self.train_dataset, IterableDataset) else len(self.train_dataset)
        if rows is None:
            micro_steps = args.max_steps * args.gradient_accumulation_steps
            generations = -(-micro_steps // trl_hooks.micro_steps_per_generation(self))
            rows = generations * trl_hooks.prompts_per_generation(self)
        placeholders = Dataset.from_dict({"prompt": [""] * rows})
        replaced: dict[str, Any] = {"train_dataset": placeholders, "data_collator": collate_placeholders}
        # The queue's rows have passed an override of a subclass, to which the placeholders mean nothing.
        replaced["_remove_unused_columns"] = lambda dataset, description=None: dataset
        with trl_hooks.override_attributes(self, **replaced):
            return super().get_train_dataloader()

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _save_checkpoint(self, model, trial):
        self._warn_of_unfinished_generation()
        # Before TRL's part, which ends by pushing the checkpoint to the hub.
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
        # A generation batch that is still being trained on is generated again after a resume, and so is a prefetched one.
        is_unfinished = trl_hooks.micro_step(self) % trl_hooks.micro_steps_per_generation(self) > 0
        steps_back = is_unfinished + (self._prefetched is not None)
        return self.prompt_source.state_dict(steps_back) | self.baseline.state_dict()

    def _warn_of_unfinished_generation(self) -> None:
        """Warn that a resumed run generates this batch again: its rollouts are not part of a checkpoint, as in TRL."""
        args, micro_steps = self.args, trl_hooks.micro_steps_per_generation(self)
        unfinished = trl_hooks.micro_step(self) % micro_steps and self.state.global_step < self.state.max_steps
        if unfinished and not self._warned_mid_generation_checkpoint:
            self._warned_mid_generation_checkpoint = True
            steps = micro_steps // math.gcd(micro_steps, args.gradient_accumulation_steps)
            fix = f"Set save_steps to a multiple of {steps}."
            loader = self.callback_handler.train_dataloader
            if has_length(loader) and len(loader) % args.gradient_accumulation_steps:
                fix = (  # the last step of an epoch has fewer micro-batches, so that no multiple fits
                    f"Set save_strategy='epoch', or gradient_accumulation_steps ({args.gradient_accumulation_steps}) to a divisor of the "
                    f"{len(loader)} micro-batches of an epoch."
                )
            logger.warning(
                f"Checkpoint {self.state.global_step} falls inside a generation batch of {steps} steps. A resumed run "
                f"generates it again and will not reproduce the uninterrupted run. {fix}"
            )

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._train_sampler is not None:
            # The sampler takes a new order for each epoch from one random generator. Without advancing it, a resumed run would
            # repeat the order of the first epoch, as GRPOTrainer does.
            for _ in range(int(self.state.epoch)):
                next(iter(self._train_sampler), None)
        if self.pass_rates is not None:
            self.pass_rates.load(checkpoint)
        if self._sampler_state_dict():
            state = load_state(checkpoint)
            self.prompt_source.load_state_dict(state)
            self.baseline.load_state_dict(state)
