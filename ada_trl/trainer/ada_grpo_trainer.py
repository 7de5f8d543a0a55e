"""
Reinforce-Ada adaptive sampling for TRL's GRPOTrainer. Who calls whom in a step, and where TRL is entered and left
again:

    GRPOTrainer.training_step
      AdaGRPOTrainer._generate_and_score_completions     returns the batch to train on
        plan_step                                        the next prompts, and the number of rollouts of each (step.py)
        sample_once                                      one round: TRL makes the batch
          GRPOTrainer._generate_and_score_completions
            _generate → GRPOTrainer._generate            with the weights of this step (vllm_session.py)
            _calculate_rewards → receive                 rewards become `Rollouts`; the queue keeps unsolved prompts
        sample_in_rounds                                 several rounds: sampled first
          sample_slots                                   the rounds of each prompt, until it is done
            RoundGenerator.prepare → GRPOTrainer._generate_and_score_completions, which an exception leaves
            RoundGenerator._sample → GRPOTrainer._generate, GRPOTrainer._calculate_rewards, on this rank alone
          select_groups                                  the rollouts to train on
          GRPOTrainer._generate_and_score_completions    makes the batch of them, without generating and scoring
        compute_advantages                               one function of all rollouts, in place of TRL's
        log_step                                         metrics, and the estimates of pass rates
"""

import itertools
import os
import textwrap
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..core import (
    Rollouts,
    Scoring,
    batch_advantages,
    normalize_each_reward,
    pass_at_k_metrics,
    pool_advantages,
)
from ..sampling.prompts import DataLoaderPrompts, PromptQueue, PromptSource, SampledRow, StepPlan, collate_placeholders
from ..utils.distributed import collectives_disabled, no_collectives, synchronized_errors
from ..utils.logging import get_logger
from ..version import __version__
from . import trl_private
from .ada_grpo_config import AdaGRPOConfig
from .checkpointing import load_state, save_state
from .interception import (
    TrainingState,
    reporting_rewards,
    run_tools,
    score_on_all_ranks,
    without_infinities,
    without_replaced_methods,
)
from .loss_rows import mask_rows, skip_zero_advantage_rows
from .mode import WEIGHTED_SUM, Mode
from .own_advantages import run_own_advantages
from .reporting import OF_ROWS_IN_LOSS, TrainingDiagnostics, logged_metrics, report_start
from .rounds import RoundGenerator
from .step import POOL_COLUMNS, log_step, plan_step, sample_in_rounds, sample_once
from .trainer_checks import (
    check_arguments,
    check_same_construction,
    check_scheduled,
    check_size,
    check_trainer,
    has_whole_groups,
    report_too_few_prompts,
)
from .trl_version import check_trl
from .vllm_session import VLLMSession


if TYPE_CHECKING:
    from ..pass_rates.tracker import PassRateTracker


logger = get_logger(__name__)


class AdaGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with the adaptive sampling of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996).

    Two things are changed: *which rollouts* are trained on and *what advantage* each of them gets. Everything else
    (loss types, importance sampling, KL, PEFT, distributed training, checkpoints, evaluation) is inherited.

    `reward`, `reward_std`, `rewards/*`, `frac_reward_zero_std` and `completions/*` describe the first round, which is
    an unbiased sample of the dataset and comparable with a GRPO run. Where numbers of rollouts differ, each prompt
    counts once. Everything adaptive is logged under `ada/`.

    Args:
        model, reward_funcs, args, ...:
            As in [`~trl.GRPOTrainer`], except that `args` is an [`AdaGRPOConfig`]. `rollout_func` requires plain GRPO
            (`adaptive_sampling="uniform"`, `baseline="pool"`, no prompt weight); `environment_factory` and
            vision-language models do not support `pass_rate_estimator="value"`.
        advantage_func (`Callable[[Rollouts], np.ndarray]`, *optional*):
            Takes all rollouts of a generation batch ([`~core.Rollouts`]) and returns the advantage of each, `(N,)`, in
            place of [`~core.pool_advantages`] or [`~core.batch_advantages`]. In Seq modes the selected rollouts are
            trained on, in all other modes all of them. Called on every process with the same rollouts, and as
            carefully as a reward function: the training state is restored, and an error on one process is raised on
            all. A subclass may override `compute_advantages` instead.

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

    mode: Mode
    pass_rates: "PassRateTracker | None" = None
    _built_for: Mode | None = None  # the mode of estimates and diagnostics
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
                author       = {Wei Xiong and Chenlu Ye and Baohao Liao and Hanze Dong and Xinxing Xu and
                                Christof Monz and Jiang Bian and Nan Jiang and Tong Zhang},
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
            args = AdaGRPOConfig(f"{Path(name).name}-AdaGRPO")  # a local path may have backslashes
        if not isinstance(args, AdaGRPOConfig):
            raise TypeError(
                f"AdaGRPOTrainer needs an AdaGRPOConfig as `args`, got {type(args).__name__}. Replace "
                f"{type(args).__name__}(…) by AdaGRPOConfig(…); it takes the same arguments."
            )
        check_trl()
        self.mode, self.advantage_func = args.resolve(), advantage_func
        of_mode = (train_dataset, reward_funcs, processing_class, rollout_func, environment_factory)
        check_arguments(self, AdaGRPOTrainer, args, *of_mode)
        # Before `GRPOTrainer.__init__`, which adds the tags to the model.
        self._name, self._paper, self._tag_names = self._describe_method(self.mode)
        engine = trl_private.vllm_generation_class(
            args,
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
        )
        with engine:
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
        check_trainer(self, AdaGRPOTrainer)
        self._round_generator = RoundGenerator(self)
        self._evaluated_groups: list[tuple[int, int] | None] = []
        self._use_mode()
        self._reset_position()

    def _use_mode(self) -> None:
        """Build what depends on the mode and was built for another one, but for the queue (`get_train_dataloader`)."""
        before, self._built_for = self._built_for, self.mode
        if before != self.mode:
            compares_prompts = self.mode.baseline == "batch" and self.own_advantages is None
            self._diagnostics = TrainingDiagnostics(self.args, self.mode, compares_prompts)
            self._logged_metrics = logged_metrics(self.args, self.mode)
        if (before and before.pass_rate_estimator) != self.mode.pass_rate_estimator:
            self.pass_rates = self._build_tracker() if self.mode.pass_rate_estimator else None

    @classmethod
    def _describe_method(cls, mode: Mode) -> tuple[str, dict[str, str], list[str]]:
        """Return name, paper and tags for the model card."""
        options = {name: getattr(mode, name) for name in ("baseline", "retries", "zero_variance_groups")}
        changed = [f"{name}={value!r}" for name, value in options.items() if value not in ("pool", 0, "keep")]
        details = ", ".join([*changed, f"ada_trl {__version__}"])
        is_subclass = cls._name != AdaGRPOTrainer._name  # which may have other names
        if mode.adaptive_sampling != "uniform" or mode.retries or is_subclass:
            return f"{cls._name} ({details})", cls._paper, cls._tag_names
        tags = [tag for tag in cls._tag_names if tag != "reinforce-ada"]
        return f"{GRPOTrainer._name} ({details})", GRPOTrainer._paper, tags

    def _build_tracker(self) -> "PassRateTracker":
        from ..pass_rates.hidden_states import HiddenStateExtractor
        from ..pass_rates.tracker import PassRateTracker

        reader = None
        if self.mode.pass_rate_estimator == "value":
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
                    f"The data collator returned {len(loaded)} rows for {len(read)} rows of the dataset, but the "
                    "prompt queue needs one for each. Add or remove rows in the dataset itself."
                )
            return loaded

        return PromptQueue(
            dataset,
            self.accelerator,
            load_rows,
            shuffle=self.shuffle_dataset,
            seed=args.seed,
            num_slots=trl_private.prompts_per_generation(self),
            candidates_per_slot=self.mode.candidates_per_slot,
            retries=self.mode.retries,
            # The batches of an optimizer step that a signal interrupts (the first and the last of which other steps
            # may share), and the one that was prefetched.
            kept_states=args.gradient_accumulation_steps // trl_private.micro_steps_per_generation(self) + 3,
        )

    # A step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return self._evaluate_batch(inputs)
        if any(getattr(self.args, name) != value for name, value in self.mode.options.items()):  # by a callback
            self.mode.check_schedule(self.args)
            self.mode = self.args.resolve()
            check_scheduled(self)
        plan, self._prefetched = self._prefetched or plan_step(self, inputs), None
        self._generated_at.append(self.state.global_step)
        make_batch = super()._generate_and_score_completions
        if self.mode.is_multi_round:
            batch, output = sample_in_rounds(self, plan, make_batch)
        else:
            if plan.rows is not inputs and isinstance(inputs, list):
                # An override that reads its rows after this call expects those of the batch.
                inputs[:] = map(SampledRow if self.mode.uses_prompt_queue else dict, plan.rows)
            batch, output = sample_once(self, plan, make_batch)
        if self.own_advantages is None:
            batch.advantage_N = self.compute_advantages(batch.rollouts)
        else:
            batch.advantage_N = run_own_advantages(self, plan, batch)
        if not self.is_vanilla_grpo:  # TRL has computed advantages from its groups
            trl_private.replace_advantages(self, output, batch.advantage_of_row)
        if self.mode.zero_variance_groups == "mask":
            # By the batch's exact advantages: in TRL's, rounding may leave a mean that differs from equal rewards.
            mask_rows(output, batch.in_zero_advantage_group().tolist(), self.loss_type, self.accelerator)
        log_step(self, plan, batch, output)
        self.vllm.check_logprobs(output)
        return output

    def compute_advantages(self, rollouts: Rollouts) -> np.ndarray:
        """Advantages of all rollouts of a batch, `(N,)`: `advantage_func`, or the function of `baseline`."""
        if self.advantage_func is not None:
            return self.advantage_func(rollouts)
        # TRL's attributes and not `args`, because a callback may have set them.
        scale: Any = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        if self.mode.baseline == "batch":
            return batch_advantages(rollouts, scale=scale)
        if self.multi_objective_aggregation == "normalize_then_sum":
            rollouts, scale = normalize_each_reward(rollouts, self.reward_weights.cpu().numpy()), "batch"
        return pool_advantages(rollouts, weighting=self.mode.prompt_weighting, scale=scale)

    @property
    def own_advantages(self) -> str | None:
        """Name of the user's function of advantages: `advantage_func`, or an override of `compute_advantages`."""
        if self.advantage_func is not None:
            return getattr(self.advantage_func, "__name__", "advantage_func")
        is_overridden = type(self).compute_advantages is not AdaGRPOTrainer.compute_advantages
        return "compute_advantages" if is_overridden or "compute_advantages" in vars(self) else None

    @property
    def is_vanilla_grpo(self) -> bool:
        """Whether training equals [`~trl.GRPOTrainer`] bit for bit, and only the metrics are ours."""
        return self.mode.trains_as_grpo and self.own_advantages is None

    def _evaluate_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        from ..pass_rates.prompt_id import row_key

        report = partial(self._add_evaluated_groups, gather_object(list(map(row_key, inputs))))
        with without_replaced_methods(self), reporting_rewards(self, report):
            output = super()._generate_and_score_completions(inputs)
        trl_private.append_missing_extra_columns(self, POOL_COLUMNS, len(inputs) * self.accelerator.num_processes)
        self.vllm.check_logprobs(output)
        return output

    def _scoring(self) -> Scoring:
        """What the rewards amount to, from TRL's present weights."""
        name, weights = self.args.success_reward, tuple(self.reward_weights.tolist())
        column = None if name in (None, WEIGHTED_SUM) else self.reward_func_names.index(name)
        # TRL represents rewards in float32, in which one that is equal to the threshold is not above it.
        threshold = float(np.float32(self.args.positive_threshold))
        return Scoring(weights, threshold, column, needs_weight=self.mode.baseline == "batch")

    def _reset_position(self) -> None:
        """Start from the first prompt, as the data loader does, and count generation batches from the beginning."""
        # Where prompts come from the queue, `get_train_dataloader` builds it.
        self.prompt_source: PromptSource = DataLoaderPrompts(
            self.accelerator, self.mode.num_generations, checks_groups=not self.is_vanilla_grpo
        )
        self._generated_at: list[int] = []  # global step at which each generation batch of this training was sampled
        self._last_micro_batch_at = -1  # global step at which the last micro-batch was trained on
        self._micro_step_at_start = 0  # of that step

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
            if self.mode.zero_variance_groups == "skip":
                inputs = skip_zero_advantage_rows(inputs, self.loss_type, self.accelerator)
        return inputs

    # Training, evaluation, logging

    def train(self, *args, **kwargs):
        # Options and attributes may have been set since the construction. Otherwise nothing is derived again, because
        # GRPOTrainer keeps the values of its own options, from which some of ours follow.
        if self.args.own_options() != self.mode.options:
            mode = self.args.resolve()
            check_same_construction(self.args, self.mode.options)
            self.mode = mode
        check_trainer(self, AdaGRPOTrainer)
        check_size(self.args, self.mode, self.train_dataset)
        self._use_mode()
        if not self.is_vanilla_grpo:  # otherwise the rest of a batch of an earlier call is trained on, as in TRL
            trl_private.forget_buffered_batch(self)
        trl_private.forget_evaluation_model(self)
        self._reset_position()
        num_prompts = len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None
        report_start(self.args, self.mode, num_prompts, self.own_advantages)
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
            report_too_few_prompts(self.args, self.mode, "fewer")
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
        Count correct and scored completions of an evaluation batch's groups, from rows and rewards of all ranks, in
        order. A group of different rows, for which there is no pass@k, is `None`.
        """
        rows, n = without_infinities(rewards).cpu().double().numpy(), self.num_generations_eval
        starts = range(0, len(rows), n)
        rollouts = Rollouts.score(np.split(rows, starts[1:]), self._scoring())
        counts = zip(rollouts.positives_P.tolist(), rollouts.scored_P.tolist(), strict=True)
        is_mixed = [len(set(keys[start : start + n])) > 1 for start in starts]
        self._evaluated_groups += [None if mixed else count for mixed, count in zip(is_mixed, counts, strict=True)]

    def _load_best_model(self):
        super()._load_best_model()
        self.vllm.forget_weights()  # the engine has other weights, of the same step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.mode.zero_variance_groups in ("skip", "mask"):
            for name in OF_ROWS_IN_LOSS:
                trl_private.drop_metric(self, name)
        super().log(logs, start_time)

    def get_train_dataloader(self):
        """As in [`~trl.GRPOTrainer`]; where prompts come from the queue, a data loader that only counts the steps."""
        args = self.args
        if not self.mode.uses_prompt_queue:
            loader = super().get_train_dataloader()
            rows, n = args.per_device_train_batch_size * args.steps_per_generation, self.mode.num_generations
            is_whole = has_whole_groups(loader.dataset, self.accelerator.num_processes, rows, n)
            if not is_whole and not self.is_vanilla_grpo:
                raise ValueError(
                    f"num_generations ({n}) must divide the rows of a process, per_device_train_batch_size * "
                    f"steps_per_generation ({rows}), because each process reads its own shards of the stream. Change "
                    "one of them."
                )
            return loader
        # Not at construction, because attributes that TRL reads here may have been set since, and the dataset may have
        # been replaced.
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
        """Number of the latest generation batches that a run resumed from this checkpoint has to sample again."""
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
            # The sampler takes a new order for each epoch from one random generator. Without advancing it, a resumed
            # run would repeat the order of the first epoch, as GRPOTrainer does.
            for _ in range(int(self.state.epoch)):
                next(iter(self._train_sampler), None)
        if self.pass_rates is not None:
            self.pass_rates.load(checkpoint)
        state = load_state(checkpoint)
        prompts, before = trl_private.prompts_per_generation(self), state.get("prompts_per_generation")
        is_other = before != prompts if before else self.mode.num_generations == 1  # GRPOTrainer's group is larger
        difference = f"A generation batch of this run has {prompts} prompts, and one of the checkpoint "
        difference += str(before or "another number")
        if "queue" in state:
            is_other, difference = True, "The checkpoint has a prompt queue, and this run has none"
        # A queue has its own position.
        if is_other and not self.mode.uses_prompt_queue and not self.args.ignore_data_skip:
            logger.warning(
                f"{difference}, so that the position in the dataset differs from the one where that run stopped: some "
                "prompts are left out or repeated. Set ignore_data_skip=True to start from the first prompt."
            )
        if not self.args.ignore_data_skip:  # else the queue starts from the first prompt, as the data loader does
            self.prompt_source.load_state_dict(state)
