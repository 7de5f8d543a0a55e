"""GRPO that keeps sampling the prompts that would have taught nothing."""

import os
import textwrap
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.extras.profiling import profiling_context
from trl.trainer.utils import get_config_model_id

from ..core import Pool, Rollout, completion_metrics
from ..core.identity import prompt_identity
from ..engine.vllm import vllm_generation_with
from ..estimation.head import prompt_features
from ..estimation.tracker import PassRateTracker
from ..notices import get_logger
from ..rollouts.in_rounds import RoundSource
from ..rollouts.per_prompt import PerPromptSource
from ..rollouts.progress import StepProgress
from ..rollouts.source import Batch, Completions, RolloutSource
from .ada_grpo_config import AdaGRPOConfig
from .config_checks import check_prompt_column
from .parent import ThroughParent, finite
from .replay import Replay, informed, plan_update, select_groups, uniform_pools
from .signal_warning import SignalWarning


logger = get_logger(__name__)

SUSPICIOUS_LOGP_DIFFERENCE = 0.1  # nats per token
MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")  # losses that divide by the number of rows, masked or not


class AdaGRPOTrainer(ThroughParent):
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
            `adaptive_sampling="uniform"`; `environment_factory` and vision-language models need any mode but
            `"est-value"`.

    Raises:
        `TypeError`: if `args` is not an [`AdaGRPOConfig`].
        `ValueError`: for an option that adaptive sampling cannot honour, a data set without a `prompt` column, or
            an unknown `exit_reward`.

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
        if kwargs.get("environment_factory") is None:
            check_prompt_column(train_dataset)
        with vllm_generation_with(
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
            max_concurrent_requests=args.vllm_max_concurrent_requests,
        ):
            super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        self.adaptive_sampling = args.adaptive_sampling
        self._train_sampler = None  # of a data set that can be indexed
        self._step_inputs: list[dict] | None = None  # this process's rows of the step being generated
        self._replay: Replay | None = None
        self._warned_of_other_weights = False
        self.pass_rates: PassRateTracker | None = None
        if args.needs_pass_rates:
            self.pass_rates = PassRateTracker(args, self.model, self.accelerator)
        self._check_exit_reward()
        self._signal_warning = SignalWarning(args, self.reward_func_names)
        if not args.is_plain_grpo:
            self._refuse_unsupported()

    def _check_exit_reward(self):
        name = self.args.exit_reward
        if name is not None and self.reward_func_names.count(name) != 1:
            raise ValueError(
                f"exit_reward ({name!r}) must name exactly one reward function; this trainer has "
                f"{', '.join(map(repr, self.reward_func_names)) or 'none'}."
            )

    def _refuse_unsupported(self):
        by_content = self.args.uses_value_network
        others = "pass_rate_estimator='counts'"
        unsupported = {
            "rollout_func": (
                self.rollout_func is not None,
                "it brings its own sampling loop",
                "adaptive_sampling='uniform' and baseline='pool'",
            ),
            "environment_factory": (
                by_content and self.environment_factories is not None,
                "it reads the prompt alone",
                others,
            ),
            "a vision-language model": (
                by_content and self._is_vlm,
                "the value head does not see the images",
                others,
            ),
        }
        for name, (given, reason, remedy) in unsupported.items():
            if given:
                raise ValueError(
                    f"{name} is not supported with adaptive_sampling={self.adaptive_sampling!r}, "
                    f"baseline={self.args.baseline!r} and pass_rate_estimator={self.args.pass_rate_estimator!r}: {reason}. "
                    f"Use {remedy}, or trl.GRPOTrainer."
                )

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._syncs_with_server:
                self.vllm_generation.close()
                self._last_loaded_step = -1

    # Collect, then replay through the parent: it calls `_generate` once and `_calculate_rewards` once.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self.args.is_plain_grpo:
            with self._replaced(self, _step_inputs=inputs):
                output = super()._generate_and_score_completions(inputs)
            if self.args.unresolved == "mask":
                groups = self.accelerator.gather(output["advantages"]).view(-1, self.num_generations)
                silent = (groups == groups[:, :1]).all(dim=1)  # equal rewards; rounding may leave a mean that is not
                self._mask_rows(output, silent.repeat_interleave(self.num_generations).tolist())
            return output
        replay = self._collect(inputs)
        with self._replaced(self, _replay=replay), self._episodes_over(len(inputs)):
            output = super()._generate_and_score_completions(replay.inputs)
            self._apply_replay(output)
        if self._syncs_with_server:
            self._warn_of_other_weights()
        return output

    def _collect(self, inputs: list[dict[str, Any]]) -> Replay:
        """Sample all processes' prompts, select their groups and bring this process's share of them here."""
        args = self.args
        own = self._own_prompts(inputs)
        everyone = gather_object(own)
        self._estimate(everyone)
        sizes = args.samples_per_round if args.samples_in_rounds else args.num_generations
        if args.estimates_budgets:
            sizes = self._sizes_to_ask_for(self.pass_rates.budgets(), len(inputs), len(own))
        source, num_shown = self._build_source(own, everyone)
        hidden = args.disable_tqdm or not self.accelerator.is_local_main_process
        with self._engine_ready(), StepProgress(num_shown, self.state.global_step + 1, hidden) as progress:
            pools = source.sample(
                exit_condition=args.exit_condition,
                samples_per_round=sizes,
                max_rounds=args.max_rounds if args.samples_in_rounds else 1,
                positive_threshold=args.positive_threshold,
                progress=progress,
            )
        # Seeded by the position of this generation in the run, which a resumed run shares.
        seed = (args.seed, self.state.global_step, self._step % args.gradient_accumulation_steps)
        replay = self._plan(source, everyone, pools, select_groups(pools, args, seed))
        replay.metrics |= self._learn(pools)
        return replay

    def _plan(self, source: RolloutSource, rows: list[dict], pools: list[Pool], groups: list[list[Rollout]]) -> Replay:
        """The update on `groups`, one of each pool (and of each row of the data set), with this process's share here."""
        batch = source.fetch([rollout for group in groups for rollout in group])
        priors = None
        if self.args.baseline == "posterior":
            priors = informed(self.pass_rates.priors(), self.pass_rates.visit.keys, pools)
        replay = plan_update(pools, groups, self.args, self.accelerator.device, self.reward_weights.tolist(), priors)
        environments = [row.get("environment") if self._multi_environment else None for row in rows]
        replay.take(batch, self.accelerator.process_index, environments)
        self._log_sampling(replay, batch)
        return replay

    def _log_sampling(self, replay: Replay, batch: Batch) -> None:
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
        for name in {name for row in batch.extras for name in row}:
            extras[name] = [row.get(name) for row in batch.extras]

    def _generate(self, prompts: list) -> tuple:
        return super()._generate(prompts) if self._replay is None else self._replay.columns

    # Pass rates: known before sampling, learnt after

    def _estimate(self, rows: list[dict]) -> None:
        """Estimate the pass rates of all processes' prompts, if they are tracked."""
        if self.pass_rates is not None:
            owned = self.environment_factories is not None  # then the row decides what is asked, not its prompt alone
            prompts = [(prompt_identity(row, whole_row=owned), row) for row in rows]
            self.pass_rates.predict(prompts, self._prompt_features)

    def _prompt_features(self, prompts: list) -> torch.Tensor:
        return prompt_features(
            self.model,
            prompts,
            lambda own: super(AdaGRPOTrainer, self)._tokenize_prompts(own)[0],
            self.accelerator,
            pad_token_id=self._tokenizer.pad_token_id,
            batch_size=self.args.per_device_train_batch_size,
        )

    def _sizes_to_ask_for(self, budgets: list[int], rows: int, own: int) -> list[int]:
        """The budgets of the prompts that this process asks for; a server is asked by the prompts' owners."""
        first = -(-self.accelerator.process_index * rows // self.num_generations)
        return budgets[first : first + own] if self._asks_server_per_prompt else budgets

    def _learn(self, pools: list[Pool]) -> dict[str, float]:
        return {} if self.pass_rates is None else self.pass_rates.observe(pools, self.state.global_step + 1)

    def _save_checkpoint(self, model, trial):
        # First, because the parent pushes the checkpoint to the hub as its last act.
        if self.pass_rates is not None and self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.pass_rates.save(os.path.join(self._get_output_dir(trial=trial), name))
        super()._save_checkpoint(model, trial)

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

    @property
    def _syncs_with_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def _asks_server_per_prompt(self) -> bool:
        """Whether every process samples its own prompts at its own pace, which some features do not allow."""
        in_turns = self.tools or self.environment_factories is not None  # a rollout is more than one request
        sharded = self.accelerator.num_processes > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        collective = sharded and any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs)
        return self._syncs_with_server and not in_turns and not collective

    def _build_source(self, own: list[dict], everyone: list[dict]) -> tuple[RolloutSource, int]:
        """The source of rollouts, and the number of prompts whose progress this process sees."""
        shared = (self._total_and_signal, self.accelerator)
        if self._asks_server_per_prompt:
            prompt_ids, images, _ = super()._tokenize_prompts(self._prepared(own)) if own else ([], None, {})
            below = int(self.args.vllm_speculative_rounds * len(own))
            options = (prompt_ids, images, self._scorer(own, prompt_ids, images), below, self.args.vllm_round_barrier)
            return PerPromptSource(self.vllm_generation, *options, *shared), len(own)

        def complete(rows: Sequence[tuple[int, int]], first_round: bool) -> Completions:
            return self._complete([everyone[prompt] for prompt, _ in rows], first_round)

        return RoundSource(len(everyone), complete, *shared), len(everyone)

    @contextmanager
    def _engine_ready(self):
        """Push new weights to a server; keep a colocated engine awake over the rounds."""
        if not self.use_vllm:
            yield
            return
        if self._syncs_with_server and self.state.global_step != self._last_loaded_step:
            self._push_weights()
        with self.vllm_generation.awake(self._push_weights):
            yield

    def _push_weights(self) -> None:
        with profiling_context(self, "sync_weights"):
            self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step

    def _warn_of_other_weights(self) -> None:
        """A server that was started from other weights answers as readily as the right one."""
        differences = self._metrics["train"].get("sampling/sampling_logp_difference/mean")
        if differences and differences[-1] > SUSPICIOUS_LOGP_DIFFERENCE and not self._warned_of_other_weights:
            self._warned_of_other_weights = True
            logger.warning(
                f"The vLLM server's log-probabilities differ from the trainer's by {differences[-1]:.2f} per token on "
                f"average (step {self.state.global_step + 1}); rounding explains a few hundredths. Its weights are "
                "probably others than those being trained: check that it was started from the same model (with "
                "vllm_weight_sync='lora' it must not have served a run with 'disk' or 'nccl' since), with the same "
                "dtype, and with --logprobs-mode processed_logprobs."
            )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        if self._replay is not None:
            return self._replay.rewards
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._step_inputs is not None:
            self._log_uniform_metrics(rewards, completion_ids_list)
        return rewards

    def _own_prompts(self, inputs: list[dict]) -> list[dict]:
        """The data set rows of the prompts whose first of `num_generations` equal rows is on this process."""
        start = self.accelerator.process_index * len(inputs)
        return [row for i, row in enumerate(inputs) if (start + i) % self.num_generations == 0]

    def _total_and_signal(self, rewards: torch.Tensor) -> tuple[list[float], list[float]]:
        total = self._total_rewards(rewards).tolist()
        if self.args.exit_reward is None:
            return total, total
        return total, rewards[:, self.reward_func_names.index(self.args.exit_reward)].tolist()

    def _total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """
        Weighted sum over reward functions, `(rows, num_reward_funcs)` to `(rows,)`; NaN if none scored the row, or if the
        sum is too large for float32.
        """
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return finite(total.masked_fill(rewards.isnan().all(dim=1), torch.nan))

    def _apply_replay(self, output: dict[str, Any]) -> None:
        """Put the true advantages and the honest metrics where the parent left those of the selected group."""
        replay = self._replay
        advantages = [value for values in replay.advantages for value in values]
        output["advantages"] = output["advantages"].new_tensor(advantages[replay.local])
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)
        if self.args.unresolved == "mask":
            self._mask_rows(output, replay.per_row(replay.without_contrast))
        replay.metrics["tokens/discarded"] = replay.metrics["tokens/generated"] - output["num_items_in_batch"].item()
        # The parent has just logged the rewards of the selected group: report those of the first round instead.
        for name, value in replay.first_round_rewards(self.reward_func_names, self.args.estimates_budgets).items():
            self._metrics["train"][name][-1] = value
        self._log_ada(replay.metrics)

    def _mask_rows(self, output: dict[str, Any], masked: list[bool]) -> None:
        """Make the loss what it would be without the `masked` rows, of all processes: those of prompts without contrast."""
        rows = len(output["advantages"])
        local = slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)
        keep = ~torch.tensor(masked[local], device=output["completion_mask"].device)
        output["completion_mask"] = output["completion_mask"] * keep.unsqueeze(1)  # (B, T)
        loss_mask = output["completion_mask"] * output.get("tool_mask", 1)
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        if self.loss_type in MEAN_OVER_ROWS:
            output["advantages"] = output["advantages"] * len(masked) / max(masked.count(False), 1)

    def _log_uniform_metrics(self, rewards: torch.Tensor, completion_ids_list: list) -> None:
        """The same figures for plain GRPO, so that both kinds of run can be compared."""
        rewards = finite(rewards)
        pools, metrics = uniform_pools(rewards.tolist(), *self._total_and_signal(rewards), self.args)
        if self.pass_rates is not None:
            self._estimate(gather_object(self._own_prompts(self._step_inputs)))
            metrics |= self._learn(pools)
        tokens = torch.tensor(sum(map(len, completion_ids_list)), device=rewards.device)
        metrics["tokens/generated"] = self.accelerator.reduce(tokens).item()
        metrics["tokens/discarded"] = 0.0
        self._log_ada(metrics)

    def _log_ada(self, metrics: dict[str, float]) -> None:
        self._signal_warning.observe(metrics, self.state.global_step + 1)
        for name, value in metrics.items():
            self._metrics["train"][f"ada/{name}"].append(value)
