"""
Reinforce-Ada adaptive sampling for TRL's GRPOTrainer. Who calls whom in a step, and where TRL is entered and left again:

    GRPOTrainer.training_step
      AdaGRPOTrainer._generate_and_score_completions     returns the batch to train on
        _plan_step                                       the next prompts, and the number of rollouts of each
        _sample_once                                     one round: TRL makes the batch
          GRPOTrainer._generate_and_score_completions
            _generate → GRPOTrainer._generate            with the weights of this step (vllm_session.py)
            _calculate_rewards → receive                 rewards become `Rollouts`; the queue keeps unsolved prompts
        _sample_in_rounds                                several rounds: sampled first
          sample_slots                                   the rounds of each prompt, until it is done
            RoundGenerator.prepare → GRPOTrainer._generate_and_score_completions, which an exception leaves
            RoundGenerator._sample → GRPOTrainer._generate, GRPOTrainer._calculate_rewards, on this rank alone
          select_groups                                  the rollouts to train on
          GRPOTrainer._generate_and_score_completions    makes the batch of them, without generating and scoring
        compute_advantages                               one function of all rollouts, in place of TRL's (core/advantages.py)
        _log_step                                        metrics, and the estimates of pass rates
"""

import itertools
import os
import textwrap
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..core import (
    Rollouts,
    SampledPrompt,
    Scoring,
    Slot,
    allocate,
    batch_advantages,
    collect_rollouts,
    completion_metrics,
    detailed_metrics,
    first_round_metrics,
    normalize_each_reward,
    pass_at_k_metrics,
    pool_advantages,
    round_metrics,
    sampled_prompts,
    sampling_metrics,
    select_groups,
)
from ..sampling.prompts import (
    WITHOUT_QUEUE,
    DataLoaderPrompts,
    PromptBatch,
    PromptQueue,
    PromptSource,
    SampledRow,
    collate_placeholders,
)
from ..sampling.sampler import SelectedRollouts, StepProgress
from ..utils.copying import copy_containers
from ..utils.distributed import collectives_disabled, exchange_rows, no_collectives, synchronized_errors
from ..utils.logging import deduplicate_warnings, get_logger
from ..version import __version__
from . import trl_private
from .ada_grpo_config import AdaGRPOConfig
from .arguments import (
    check_advantages,
    check_arguments,
    check_overrides,
    check_own_advantages,
    check_size,
    check_success_reward,
    check_value_head,
    has_whole_groups,
    report_too_few_prompts,
)
from .checkpointing import load_state, save_state
from .interception import (
    TrainingState,
    injecting,
    recording,
    reporting_rewards,
    run_tools,
    score_on_all_ranks,
    without_infinities,
    without_replaced_methods,
)
from .reporting import OF_ROWS_IN_LOSS, TrainingDiagnostics, logged_metrics, report_start
from .rounds import RoundGenerator
from .step import POOL_COLUMNS, StepBatch, StepPlan, mask_rows, skip_zero_advantage_rows
from .trl_version import check_trl
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
    sample of the dataset and comparable with a GRPO run. Where numbers of rollouts differ, each prompt counts once. Everything
    adaptive is logged under `ada/`.

    Args:
        model, reward_funcs, args, ...:
            As in [`~trl.GRPOTrainer`], except that `args` is an [`AdaGRPOConfig`]. `rollout_func` requires plain GRPO
            (`adaptive_sampling="uniform"`, `baseline="pool"`, no prompt weight); `environment_factory` and vision-language
            models do not support `pass_rate_estimator="value"`.
        advantage_func (`Callable[[Rollouts], np.ndarray]`, *optional*):
            Takes all rollouts of a generation batch ([`~core.Rollouts`]) and returns the advantage of each, `(N,)`, in place of
            [`~core.pool_advantages`] or [`~core.batch_advantages`]. In Seq modes the selected rollouts are trained on, in all other
            modes all of them. Called on every process with the same rollouts, and as carefully as a reward function: the training
            state is restored, and an error on one process is raised on all. A subclass may override `compute_advantages` instead.

    Raises:
        `TypeError`: if `args` is not an [`AdaGRPOConfig`].
        `ValueError`: for an option that adaptive sampling does not support, or an unknown `success_reward`.

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
    vllm: VLLMSession
    advantage_func: Callable[[Rollouts], np.ndarray] | None = None
    _is_in_step = False  # whether methods are replaced for a step (interception.py)
    _prefetched: StepPlan | None = None  # the next step, if its rollouts were requested before this one is trained on
    _train_sampler = None  # of a dataset that can be indexed

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
        advantage_func: Callable[[Rollouts], np.ndarray] | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = AdaGRPOConfig(f"{name.split('/')[-1]}-AdaGRPO")
        if not isinstance(args, AdaGRPOConfig):
            raise TypeError(
                f"AdaGRPOTrainer needs an AdaGRPOConfig as `args`, got {type(args).__name__}. Replace "
                f"{type(args).__name__}(…) by AdaGRPOConfig(…); it takes the same arguments."
            )
        check_trl()
        args.resolve()
        check_overrides(self, AdaGRPOTrainer, args)
        check_arguments(
            args,
            train_dataset=train_dataset,
            reward_funcs=reward_funcs,
            processing_class=processing_class,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            advantage_func=advantage_func,
        )
        self.advantage_func = advantage_func
        check_own_advantages(args, self.own_advantages, advantage_func)
        # Before `GRPOTrainer.__init__`, which adds the tags to the model.
        self._name, self._paper, self._tag_names = self._describe_method(args)
        engine = trl_private.vllm_generation_class(
            args,
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
        )
        replaced: dict[str, Any] = {"_is_used_by_ada_trainer": True}
        if args.scale_rewards == "rank":  # which TRL does not know, whose advantages are replaced
            replaced["scale_rewards"] = "none"
        with engine, trl_private.override_attributes(args, **replaced):
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
        self.vllm = VLLMSession(self)
        # Again: GRPOTrainer has now loaded the reward models and the processor.
        check_success_reward(args, self.reward_func_names, self.reward_weights.tolist())
        check_value_head(args, self.environment_factories is not None, trl_private.is_vision_language_model(self))
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
        self._round_generator = RoundGenerator(self)
        self._diagnostics = TrainingDiagnostics(args)
        self._logged_metrics = logged_metrics(args)
        self._evaluated_groups: list[tuple[int, int] | None] = []
        self._reset_position()

    @classmethod
    def _describe_method(cls, args: AdaGRPOConfig) -> tuple[str, dict[str, str], list[str]]:
        """Return name, paper and tags for the model card."""
        options = {name: getattr(args, name) for name in ("baseline", "retries", "zero_variance_groups")}
        changed = [f"{name}={value!r}" for name, value in options.items() if value not in ("pool", 0, "keep")]
        details = ", ".join([*changed, f"ada_trl {__version__}"])
        is_subclass = cls._name != AdaGRPOTrainer._name  # which may have other names
        if args.adaptive_sampling != "uniform" or args.retries or is_subclass:
            return f"{cls._name} ({details})", cls._paper, cls._tag_names
        tags = [tag for tag in cls._tag_names if tag != "reinforce-ada"]
        return f"{GRPOTrainer._name} ({details})", GRPOTrainer._paper, tags

    def _build_tracker(self) -> "PassRateTracker":
        from ..pass_rates.hidden_states import HiddenStateExtractor
        from ..pass_rates.tracker import PassRateTracker

        reader = None
        if self.args.pass_rate_estimator == "value":
            reader = HiddenStateExtractor(
                lambda: self.model,
                self.accelerator,
                lambda prompts: self._tokenize_prompts(prompts)[0],
                pad_token_id=trl_private.tokenizer(self).pad_token_id,
                batch_size=self.args.per_device_train_batch_size,
            )
        return PassRateTracker(
            reader=reader,
            hash_entire_row=self.environment_factories is not None,
        )

    def _build_prompt_queue(self) -> PromptQueue:
        args = self.args
        dataset, collate = trl_private.dataset_and_collator(self)

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

        return PromptQueue(
            dataset,
            self.accelerator,
            load_rows,
            shuffle=self.shuffle_dataset,
            seed=args.seed,
            num_slots=trl_private.prompts_per_generation(self),
            candidates_per_slot=args.prompts_per_slot,
            retries=args.retries,
            # The batches of an optimizer step that a signal interrupts (the first and the last of which other steps may share), and
            # the one that was prefetched.
            kept_states=args.gradient_accumulation_steps // trl_private.micro_steps_per_generation(self) + 3,
        )

    # A step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return self._evaluate_batch(inputs)
        plan, self._prefetched = self._prefetched or self._plan_step(inputs), None
        self._generated_at.append(self.state.global_step)
        if self.args.is_multi_round:
            batch, output = self._sample_in_rounds(plan)
        else:
            batch, output = self._sample_once(plan, inputs)
        batch.advantage_N = self._compute_advantages(plan, batch)
        if not self.is_vanilla_grpo:
            self._replace_advantages(batch, output)
        if self.args.zero_variance_groups == "mask":
            # By the batch's exact advantages: in TRL's, rounding may leave a mean that differs from equal rewards.
            mask_rows(output, batch.in_zero_advantage_group().tolist(), self.loss_type, self.accelerator)
        self._log_step(batch, output, plan)
        self.vllm.check_logprobs(output)
        return output

    def compute_advantages(self, rollouts: Rollouts) -> np.ndarray:
        """Advantages of all rollouts of a generation batch, `(N,)`: `advantage_func`, or the function of `baseline`."""
        if self.advantage_func is not None:
            return self.advantage_func(rollouts)
        # TRL's attributes and not `args`, because a callback may have set them.
        scale: Any = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        if self.args.baseline == "batch":
            return batch_advantages(rollouts, scale="rank" if self.args.scale_rewards == "rank" else "none")
        if self.multi_objective_aggregation == "normalize_then_sum":
            rollouts, scale = normalize_each_reward(rollouts, self.reward_weights.cpu().numpy()), "batch"
        return pool_advantages(rollouts, weighting=self.args.prompt_weighting, scale=scale)

    @property
    def own_advantages(self) -> str | None:
        """Name of the user's function that computes the advantages: `advantage_func`, or an override of `compute_advantages`."""
        if self.advantage_func is not None:
            return getattr(self.advantage_func, "__name__", "advantage_func")
        is_overridden = type(self).compute_advantages is not AdaGRPOTrainer.compute_advantages
        return "compute_advantages" if is_overridden or "compute_advantages" in vars(self) else None

    @property
    def is_vanilla_grpo(self) -> bool:
        """Whether training equals [`~trl.GRPOTrainer`] bit for bit, and only the metrics are ours."""
        return self.args.trains_as_grpo and self.own_advantages is None

    def _compute_advantages(self, plan: StepPlan, batch: StepBatch) -> np.ndarray:
        """The advantages of a batch; the user's function is run as a reward function is. Collective."""
        if self.own_advantages is None:
            return self.compute_advantages(batch.rollouts)
        batch.rollouts = replace(batch.rollouts, columns=self._dataset_columns(plan, batch))
        with synchronized_errors(), TrainingState(self.model).preserved():
            advantages = self.compute_advantages(batch.rollouts)
            return check_advantages(advantages, self.own_advantages, len(batch.rollouts))

    def _dataset_columns(self, plan: StepPlan, batch: StepBatch) -> dict[str, np.ndarray]:
        """Columns of the dataset but for prompts and images, with the value of each rollout. Collective."""
        hidden = ("prompt", "image", "images")
        rows = gather_object(
            [{name: row[name] for name in row if name not in hidden} for row in plan.prompts.local_rows]
        )
        of_prompts = [rows[i] for i in self._rows_of_prompts(plan, batch)]
        columns = {}
        for name in dict.fromkeys(name for row in of_prompts for name in row):
            values = [row.get(name) for row in of_prompts]
            if {type(value) for value in values} in ({int}, {float}, {bool}, {str}):
                array = np.array(values)
            else:
                array = np.empty(len(values), dtype=object)
                for i, value in enumerate(values):  # all at once, lists would become another dimension
                    array[i] = value
            columns[name] = array[batch.rollouts.prompt_N]
        return columns

    def _evaluate_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        from ..pass_rates.prompt_id import row_key

        report = partial(self._add_evaluated_groups, gather_object(list(map(row_key, inputs))))
        with without_replaced_methods(self), reporting_rewards(self, report):
            output = super()._generate_and_score_completions(inputs)
        trl_private.append_missing_extra_columns(self, POOL_COLUMNS, len(inputs) * self.accelerator.num_processes)
        self.vllm.check_logprobs(output)
        return output

    def _plan_step(self, inputs: list[dict[str, Any]]) -> StepPlan:
        """Choose the prompts of a step and their numbers of rollouts. Collective."""
        if self.args.uses_prompt_queue and not all(isinstance(row, SampledRow) or row == {} for row in inputs):
            raise ValueError(
                "Rows or values that an override passes to `_generate_and_score_completions` would have no effect where prompts come from "
                f"the prompt queue. Pass the data loader's rows, change the dataset instead, or set {WITHOUT_QUEUE}."
            )
        with TrainingState(self.model).preserved():  # a stream runs user code when it is read
            prompts = self.prompt_source.next_prompts(inputs)
        estimates = None if self.pass_rates is None else self.pass_rates.estimate(prompts.local_rows)
        sizes = [self.args.round_size] * len(prompts.slot_ranks)
        if estimates is not None and self.args.uses_estimated_budgets:
            sizes = self._allocate(estimates.pass_rates)
        rows: list[dict] = []
        if not self.args.is_multi_round:
            # The data loader has repeated each row `num_generations` times; other numbers and other prompts are assigned here.
            as_loaded = not self.args.uses_prompt_queue and not self.args.uses_estimated_budgets
            rows = inputs if as_loaded else self._assign_rows(prompts, sizes)
        return StepPlan(prompts, sizes, estimates, self.state.global_step, rows)

    def _scoring(self) -> Scoring:
        """What the rewards amount to, from TRL's present weights."""
        name = self.args.success_function
        column = None if name is None else self.reward_func_names.index(name)
        is_batch = self.args.baseline == "batch"
        return Scoring(tuple(self.reward_weights.tolist()), self.args.float32_threshold, column, needs_weight=is_batch)

    def _allocate(self, pass_rates: list[float]) -> list[int]:
        """Numbers of rollouts by estimated pass rates; the main process decides. Collective."""
        args = self.args
        sizes = allocate(
            pass_rates,
            args.num_generations * len(pass_rates),
            min_samples=args.min_samples,
            max_samples=args.max_samples,
            rule=args.allocation_rule,
        )
        return broadcast_object_list([sizes])[0]

    def _assign_rows(self, prompts: PromptBatch, sizes: list[int]) -> list[dict]:
        """This rank's part of the batch, in which each prompt has `sizes` copies of its row. Collective."""
        order = [prompt for prompt, size in enumerate(sizes) for _ in range(size)]
        per_rank = len(order) // self.accelerator.num_processes
        needed = [order[rank * per_rank : (rank + 1) * per_rank] for rank in range(self.accelerator.num_processes)]
        rows = exchange_rows(prompts.local_rows, prompts.row_ranks, needed, self.accelerator)
        return [copy_containers(rows[prompt]) for prompt in needed[self.accelerator.process_index]]

    # One round: TRL's method runs once, on the planned rows

    def _sample_once(self, plan: StepPlan, inputs: list[dict[str, Any]]) -> tuple[StepBatch, dict[str, Any]]:
        if plan.rows is not inputs and isinstance(inputs, list):
            # An override that reads its rows after this call expects those of the batch.
            inputs[:] = map(SampledRow if self.args.uses_prompt_queue else dict, plan.rows)
        is_ahead = self.args.max_staleness > 0
        prompts = [SampledPrompt(candidate, slot) for slot, (candidate,) in enumerate(plan.prompts.candidates)]
        attempt_P = np.array([prompt.candidate.attempts for prompt in prompts])
        batches: list[StepBatch] = []

        def receive(lengths: list[tuple[int, bool]], rewards: torch.Tensor) -> None:
            rows = (rewards if self.is_vanilla_grpo else without_infinities(rewards)).double().cpu().numpy()
            of_prompts, scoring = np.split(rows, np.cumsum(plan.sizes)[:-1]), self._scoring()
            length_N, is_truncated_N = np.array(gather_object(lengths)).T
            rollouts = Rollouts.score(of_prompts, scoring, attempt_P=attempt_P, length_N=length_N)
            queue_metrics = self.prompt_source.finish_step(prompts, rollouts)
            batch = StepBatch(prompts, rollouts, np.arange(len(rollouts)), attempt_P == 0, queue_metrics)
            batch.is_truncated_N = is_truncated_N
            batches.append(batch)
            if is_ahead:  # only now, because the rewards decide which prompts are retried
                self._prefetch_next_step()

        with recording(self, plan.rows, receive, score_early=is_ahead) as seconds:
            output = super()._generate_and_score_completions(plan.rows)
        (batch,) = batches
        of_ranks = self.accelerator.gather(torch.tensor([list(seconds.values())], device=self.accelerator.device))
        batch.metrics |= dict(zip(seconds, of_ranks.mean(dim=0).tolist(), strict=True)) | self.vllm.collect_metrics()
        batch.metrics["tokens/generated"] = float(batch.rollouts.length_N.sum())
        if self.args.uses_estimated_budgets or attempt_P.any():
            self._replace_completion_metrics(batch)
        if is_ahead:  # before rows are masked
            batch.metrics["staleness"] = float(self.state.global_step - plan.global_step)
            batch.metrics["ess_ratio"] = ess_ratio(output, self.accelerator)
        return batch, output

    def _replace_completion_metrics(self, batch: StepBatch) -> None:
        """Log the lengths of an unbiased sample where TRL has logged those of retries, or more of the hard prompts."""
        rollouts = batch.rollouts
        counted = np.flatnonzero(batch.is_on_distribution_P[rollouts.prompt_N])
        weights = 1 / rollouts.size_P[rollouts.prompt_N[counted]]  # each prompt counts once
        metrics = completion_metrics(rollouts.length_N[counted], batch.is_truncated_N[counted], weights)
        trl_private.replace_latest_metrics(self, {name: [value] for name, value in metrics.items()})

    def _prefetch_next_step(self) -> None:
        """Request the next step's rollouts, to be generated with the newest weights while this step is trained on. Collective."""
        args = self.args
        micro_steps = self.state.global_step * args.gradient_accumulation_steps
        micro_steps += trl_private.micro_step(self) % args.gradient_accumulation_steps
        after_this = micro_steps + trl_private.micro_steps_per_generation(self)
        if after_this >= self.state.max_steps * args.gradient_accumulation_steps:
            return  # this is the last generation batch
        # Before the requests: if one cannot be sent, the plan's prompts are the next ones again (see `train`).
        plan = self._prefetched = self._plan_step([])
        with synchronized_errors():
            # As TRL prepares them in the next step, where images join the messages.
            prompt_ids, images, _ = self._tokenize_prompts(self._round_generator.prepare(plan.rows))
        self.vllm.prefetch(prompt_ids, images)

    # Several rounds: sample and select first, then let TRL's method assemble the batch

    def _sample_in_rounds(self, plan: StepPlan) -> tuple[StepBatch, dict[str, Any]]:
        with (
            trl_private.rank_local_collectives(self),
            self._round_generator.hold_environments(),
            # TRL warns of every call in which a row has no reward.
            deduplicate_warnings(trl_private.TRL_LOGGER, "All reward functions returned None"),
        ):
            rule, scoring = self.args.slot_rule, self._scoring()
            slots = [Slot(rule, scoring, *slot) for slot in zip(plan.prompts.candidates, plan.sizes, strict=True)]
            sampler = self._round_generator.build_sampler(plan.prompts, slots, samples_async=self.vllm.samples_async)
            is_hidden = self.args.disable_tqdm or not self.accelerator.is_local_main_process
            with (
                self.vllm.generation(),
                StepProgress(sampler.num_shown, self.state.global_step + 1, is_hidden) as progress,
            ):
                sampler.sample(progress)
            batch = self._select(slots)
            selected = sampler.fetch(self._draws(batch, batch.selected))
            length_N = [selected.lengths[draw] for draw in self._draws(batch, np.arange(len(batch.rollouts)))]
            batch.rollouts = replace(batch.rollouts, length_N=np.array(length_N))
            self._log_sampling(batch, selected)
            batch.metrics |= self.prompt_source.finish_step(batch.prompts, batch.rollouts)
            batch.metrics |= self.vllm.collect_metrics()
        rewards = torch.tensor(batch.rollouts.rewards_NF[batch.selected], dtype=torch.float32)
        with injecting(self, selected.rows, rewards.to(self.accelerator.device)):
            output = super()._generate_and_score_completions([row.row for row in selected.rows])
        return batch, output

    def _select(self, slots: list[Slot]) -> StepBatch:
        """All rollouts of the sampled slots, and those of them that are trained on."""
        prompts = sampled_prompts(slots)
        rollouts = collect_rollouts(slots, prompts)
        is_on_distribution_P = np.array([prompt.is_on_distribution for prompt in prompts])
        if not self.args.is_sequential:
            is_trained_P = np.array([prompt.is_trained for prompt in prompts])
            selected = np.flatnonzero(is_trained_P[rollouts.prompt_N])
            return StepBatch(prompts, rollouts, selected, is_on_distribution_P, {})
        # The position in the run, which a resumed run shares, unlike TRL's count of micro-batches in this process.
        step = self.state.global_step
        batches_before = self._generated_at.count(step) - 1  # of this optimizer step
        seed = (self.args.seed, step, batches_before * trl_private.micro_steps_per_generation(self))
        has_candidates = self.args.zero_variance_groups == "resample"
        seeds = [
            (*seed, prompt.slot, *((prompt.candidate_index,) if has_candidates else ())) if prompt.is_trained else None
            for prompt in prompts
        ]
        selected = select_groups(rollouts, self.args.num_generations, seeds)
        return StepBatch(prompts, rollouts, selected, is_on_distribution_P, {})

    def _draws(self, batch: StepBatch, indices: np.ndarray) -> list[tuple[int, int]]:
        """Slots of rollouts, and their indices among the rollouts of the slot."""
        rollouts = batch.rollouts
        of_rollouts = zip(rollouts.prompt_N[indices].tolist(), rollouts.draw_N[indices].tolist(), strict=True)
        return [(batch.prompts[p].slot, batch.prompts[p].first_draw + draw) for p, draw in of_rollouts]

    def _reset_position(self) -> None:
        """Start from the first prompt, as the data loader does, and count generation batches from the beginning."""
        # Where prompts come from the queue, `get_train_dataloader` builds it.
        self.prompt_source: PromptSource = DataLoaderPrompts(
            self.accelerator, self.args.num_generations, checks_groups=not self.is_vanilla_grpo
        )
        self._generated_at: list[int] = []  # global step at which each generation batch of this training was sampled
        self._last_micro_batch_at = -1  # global step at which the last micro-batch was trained on
        self._micro_step_at_start = 0  # of that step

    # What is logged and what TRL trains on

    def _replace_advantages(self, batch: StepBatch, output: dict[str, Any]) -> None:
        """Replace the advantages that TRL has computed from its groups."""
        advantages = batch.advantage_N[batch.selected]
        rows = len(output["advantages"])
        start = self.accelerator.process_index * rows
        output["advantages"] = output["advantages"].new_tensor(advantages[start : start + rows])
        trl_private.replace_logged_advantages(self, advantages.tolist())

    def _log_sampling(self, batch: StepBatch, selected: SelectedRollouts) -> None:
        """Log the tokens of all rounds, the completions of the first one, and extra columns of the table, which TRL does not know."""
        stats = selected.stats
        self.state.num_input_tokens_seen += int(stats.pop("tokens/seen"))
        trl_private.set_token_count(self, self.state.num_input_tokens_seen)
        trl_private.append_metrics(self, completion_metrics(*zip(*selected.first_round, strict=True)))
        calls, failures = (stats.pop(f"tools/{name}") for name in ("calls", "failures"))
        if self.tools:
            frequencies = {
                "tools/call_frequency": calls / len(selected.first_round),
                "tools/failure_frequency": failures / calls if calls else 0.0,
            }
            trl_private.append_metrics(self, frequencies)
        batch.metrics |= stats
        names = {name for row in selected.rows for name in row.extras}
        columns = {name: [row.extras.get(name) for row in selected.rows] for name in names}
        trl_private.set_pending_extra_columns(self, columns)

    def _log_step(self, batch: StepBatch, output: dict[str, Any], plan: StepPlan) -> None:
        """Log the metrics of a step, and update the estimates of pass rates. Collective."""
        rollouts, args = batch.rollouts, self.args
        round_size = args.round_size if args.is_sequential else int(rollouts.size_P.max())
        sampling: dict[str, Any] = {
            "samples_per_round": round_size,
            "is_on_distribution_P": batch.is_on_distribution_P,
        }
        advantage_N = batch.advantage_N.copy()
        if args.mask_truncated_completions:  # a masked row has no gradient
            is_masked = self.accelerator.gather(output["completion_mask"].sum(dim=1) == 0)
            advantage_N[batch.selected[is_masked.cpu().numpy()]] = 0
        metrics = batch.metrics
        metrics |= sampling_metrics(
            rollouts,
            batch.selected,
            advantage_N,
            num_generations=args.num_generations,
            outcome_N=self._scoring().distinguish(rollouts.rewards_NF) if args.compares_each_reward else None,
            **sampling,
        )
        if args.is_sequential or args.log_completions:
            metrics |= round_metrics(rollouts, args.slot_rule, samples_per_round=round_size)
        if args.log_completions:
            options = {"rule": args.slot_rule, "weighting": args.prompt_weighting}
            metrics |= detailed_metrics(rollouts, batch.selected, **options, **sampling)
            if not self.is_vanilla_grpo:
                trl_private.append_extra_columns(self, batch.pool_columns)
        if self.pass_rates is not None and plan.estimates is not None:
            estimates = plan.estimates
            if args.is_multi_round:  # of several candidates, those that were sampled
                estimates = estimates.take(self._rows_of_prompts(plan, batch))
            metrics |= self.pass_rates.observe(estimates, rollouts, step=self.state.global_step + 1)
        if not self.is_vanilla_grpo:
            of_first_round = first_round_metrics(
                rollouts,
                self.reward_func_names,
                rollouts_per_round=round_size,
                is_on_distribution_P=batch.is_on_distribution_P,
                each_prompt_once=args.uses_estimated_budgets,
            )
            of_first_round["frac_reward_zero_std"] = [metrics["frac_reward_zero_std/first_round"]]
            trl_private.replace_latest_metrics(self, of_first_round)
        if args.num_generations == 1 or args.uses_estimated_budgets:  # GRPO has groups of one size
            trl_private.drop_metric(self, "frac_reward_zero_std")
            del metrics["frac_reward_zero_std/first_round"], metrics["frac_recovered_groups"]
        metrics["tokens/discarded"] = metrics["tokens/generated"] - output["num_items_in_batch"].item()
        self._diagnostics.observe(metrics, rollouts, self.state.global_step + 1)
        if not args.log_completions:
            metrics = {name: metrics[name] for name in metrics if name in self._logged_metrics}
        trl_private.append_metrics(self, metrics, prefix="ada/")

    def _rows_of_prompts(self, plan: StepPlan, batch: StepBatch) -> list[int]:
        """Index of each sampled prompt among all candidates of the step."""
        first = np.cumsum([0, *map(len, plan.prompts.candidates)])
        return [int(first[prompt.slot]) + prompt.candidate_index for prompt in batch.prompts]

    # TRL's methods that are called within `_generate_and_score_completions`

    def _generate(self, prompts: list) -> tuple:
        with self.vllm.generation():
            return super()._generate(prompts)

    def _tool_call_loop(self, *args, **kwargs) -> tuple:
        call: Callable = super()._tool_call_loop
        if not self.vllm.uses_server or collectives_disabled():
            return run_tools(self, call, *args, **kwargs)
        # Ranks request different numbers of further turns, so that none of them may wait for another.
        with synchronized_errors(self.vllm_generation.error_factory("rollouts are missing")), no_collectives():
            return run_tools(self, call, *args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        given = (inputs, prompts, completions, completion_ids_list)
        if collectives_disabled():  # a round on this rank alone
            return super()._calculate_rewards(*given)
        return score_on_all_ranks(self, super()._calculate_rewards, *given)

    def _prepare_inputs(self, generation_batch):
        if self.model.training and self._last_micro_batch_at != self.state.global_step:
            self._micro_step_at_start = trl_private.micro_step(self)
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._last_micro_batch_at = self.state.global_step
            if self.args.zero_variance_groups == "skip":
                inputs = skip_zero_advantage_rows(inputs, self.loss_type, self.accelerator)
        return inputs

    # Training, evaluation, logging

    def train(self, *args, **kwargs):
        # Again: attributes may have been set since the construction.
        check_overrides(self, AdaGRPOTrainer, self.args)
        check_own_advantages(self.args, self.own_advantages, self.advantage_func)
        check_size(self.args, self.train_dataset)
        if not self.is_vanilla_grpo:  # otherwise the rest of a batch of an earlier call is trained on, as in TRL
            trl_private.forget_buffered_batch(self)
        trl_private.forget_evaluation_model(self)
        self._reset_position()
        num_prompts = len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None
        report_start(self.args, num_prompts, self.own_advantages)
        steps_before = self.state.global_step
        try:
            # Of a subclass, perhaps, and called by its data loader.
            recorded = self._record_sampler(self._get_train_sampler)
            with self.vllm.running(), trl_private.override_attributes(self, _get_train_sampler=recorded):
                result = super().train(*args, **kwargs)
        finally:
            # The prompts of a step that was interrupted, or planned ahead and not trained on, are the next ones again.
            self._prefetched = None
            self.prompt_source.rollback()
        # A callback may have stopped the training before its first step: then a micro-batch has been trained on.
        no_batch = self.state.global_step == steps_before == trl_private.micro_step(self) == 0
        if no_batch and isinstance(self.train_dataset, IterableDataset):
            report_too_few_prompts(self.args, "fewer")
        return result

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        self._evaluated_groups = []
        dataset, num_rows = dataloader.dataset, itertools.count()
        num_prompts = len(dataset) if has_length(dataset) else None
        counting: Any = nullcontext()
        if isinstance(dataset, IterableDatasetShard):  # each of several processes reads the whole stream
            counting = trl_private.override_attributes(
                dataset, dataset=(row for row, _ in zip(dataset.dataset, num_rows, strict=False))
            )
        with self.vllm.running(), counting:
            output = super().evaluation_loop(*given)
        if isinstance(dataset, IterableDatasetShard):
            num_prompts = next(num_rows) // self.num_generations_eval
        # With several processes, the last batch is filled up with the first prompts.
        groups = self._evaluated_groups[:num_prompts]
        of_one_prompt = [group for group in groups if group is not None]
        if self.num_generations_eval > 1 and len(of_one_prompt) == len(groups):
            metrics = pass_at_k_metrics(of_one_prompt)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _add_evaluated_groups(self, keys: list[str], rewards: torch.Tensor) -> None:
        """
        Count correct and scored completions of an evaluation batch's groups, from rows and rewards of all ranks, in order. A group of
        different rows, for which there is no pass@k, is `None`.
        """
        rows, n = without_infinities(rewards).double().cpu().numpy(), self.num_generations_eval
        starts = range(0, len(rows), n)
        rollouts = Rollouts.score(np.split(rows, starts[1:]), self._scoring())
        counts = zip(rollouts.positives_P.tolist(), rollouts.scored_P.tolist(), strict=True)
        is_mixed = [len(set(keys[start : start + n])) > 1 for start in starts]
        self._evaluated_groups += [None if mixed else count for mixed, count in zip(is_mixed, counts, strict=True)]

    def _load_best_model(self):
        super()._load_best_model()
        self.vllm.forget_weights()  # the engine has other weights, of the same step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.args.zero_variance_groups in ("skip", "mask"):
            for name in OF_ROWS_IN_LOSS:
                trl_private.drop_metric(self, name)
        super().log(logs, start_time)

    def get_train_dataloader(self):
        """As in [`~trl.GRPOTrainer`]; where prompts come from the queue, a data loader that only counts the steps."""
        args = self.args
        if not args.uses_prompt_queue:
            loader = super().get_train_dataloader()
            rows, n = args.per_device_train_batch_size * args.steps_per_generation, args.num_generations
            is_whole = has_whole_groups(loader.dataset, self.accelerator.num_processes, rows, n)
            if not is_whole and not self.is_vanilla_grpo:
                raise ValueError(
                    f"num_generations ({n}) must divide the rows of a process, per_device_train_batch_size * steps_per_generation "
                    f"({rows}), because each process reads its own shards of the stream. Change one of them."
                )
            return loader
        # Not at construction, because attributes that TRL reads here may have been set since, and the dataset may have been replaced.
        if not isinstance(self.prompt_source, PromptQueue):
            self.prompt_source = self._build_prompt_queue()
        rows = None if isinstance(self.train_dataset, IterableDataset) else len(self.train_dataset)
        if rows is None:
            micro_steps = args.max_steps * args.gradient_accumulation_steps
            generations = -(-micro_steps // trl_private.micro_steps_per_generation(self))
            rows = generations * trl_private.prompts_per_generation(self)
        placeholders = Dataset.from_dict({"prompt": [""] * rows})
        replaced: dict[str, Any] = {"train_dataset": placeholders, "data_collator": collate_placeholders}
        # The queue's rows have passed an override of a subclass, to which the placeholders mean nothing.
        replaced["_remove_unused_columns"] = lambda dataset, description=None: dataset
        with trl_private.override_attributes(self, **replaced):
            return super().get_train_dataloader()

    def _record_sampler(self, get_sampler: Callable) -> Callable:
        """`_get_train_sampler`, which may be that of a subclass, keeping the sampler that it returns."""

        def recorded(*args, **kwargs):
            self._train_sampler = get_sampler(*args, **kwargs)
            return self._train_sampler

        return recorded

    # Checkpoints

    def _save_checkpoint(self, model, trial):
        # Before TRL's part, which ends by pushing the checkpoint to the hub.
        directory = os.path.join(
            self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        )
        if self.args.should_save:
            if self.pass_rates is not None:
                self.pass_rates.save(directory)
            state = {"prompts_per_generation": trl_private.prompts_per_generation(self)}
            save_state(directory, state | self.prompt_source.state_dict(self._steps_to_repeat()))
        super()._save_checkpoint(model, trial)

    def _steps_to_repeat(self) -> int:
        """Number of the latest generation batches that a run which resumes from this checkpoint has to sample again."""
        step, micro_steps = self.state.global_step, trl_private.micro_steps_per_generation(self)
        untrained = sum(at >= step for at in self._generated_at)
        # A checkpoint on a signal is saved before the optimizer step of its micro-batches, which are repeated.
        is_interrupted = self._last_micro_batch_at == step
        start = self._micro_step_at_start if is_interrupted else trl_private.micro_step(self)
        is_shared = start % micro_steps > 0  # by the steps before and after: a batch that was sampled earlier
        return untrained + is_shared + (self._prefetched is not None)

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
        state = load_state(checkpoint)
        prompts, before = trl_private.prompts_per_generation(self), state.get("prompts_per_generation")
        is_other = before != prompts if before else self.args.num_generations == 1  # GRPOTrainer's group is larger
        difference = f"A generation batch of this run has {prompts} prompts, and one of the checkpoint {before or 'another number'}"
        if "queue" in state:
            is_other, difference = True, "The checkpoint has a prompt queue, and this run has none"
        # A queue has its own position.
        if is_other and not self.args.uses_prompt_queue and not self.args.ignore_data_skip:
            logger.warning(
                f"{difference}, so that the position in the dataset differs from the one where that run stopped: some prompts are left "
                "out or repeated. Set ignore_data_skip=True to start from the first prompt."
            )
        if not self.args.ignore_data_skip:  # else the queue starts from the first prompt, as the data loader does
            self.prompt_source.load_state_dict(state)
