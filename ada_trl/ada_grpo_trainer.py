"""GRPO that keeps sampling the prompts that would have taught nothing."""

import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from trl.extras.profiling import profiling_context
from trl.trainer.utils import get_config_model_id, nanstd

from .ada_grpo_config import AdaGRPOConfig
from .core import Pool, Rollout, group_advantages, sampling_metrics, select_group
from .core.pool import sample_std
from .generation.local import LocalSampler
from .generation.progress import StepProgress
from .generation.sampler import Sampler
from .generation.server import ServerSampler
from .generation.vllm import vllm_generation_with
from .through_parent import ThroughParent


logger = get_logger(__name__)

SUSPICIOUS_LOGP_DIFFERENCE = 0.1  # nats per token


@dataclass
class _Replay:
    """The update batch of all processes, handed to the parent in place of what it would have generated and scored."""

    groups: list[list[Rollout]]
    advantages: list[list[float]]
    rewards: torch.Tensor  # (batch of all processes, num_reward_funcs)
    zero_signal_unresolved: list[bool]  # per prompt
    first_round_rewards: torch.Tensor  # (prompts * samples_per_round, num_reward_funcs)
    metrics: dict[str, float]


class AdaGRPOTrainer(ThroughParent):
    """
    [`~trl.GRPOTrainer`] with the adaptive sampling of
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996).

    Two things are changed: *which rollouts* the update sees and *what advantage* each of them gets. In training, each
    generation batch is drawn in rounds; a prompt leaves as soon as its pool of rollouts holds enough signal. From each
    pool a balanced group of `num_generations` rollouts is trained on, with advantages from the statistics of the whole
    pool. Everything else (loss types, importance sampling, KL, PEFT, distributed training, checkpoints, evaluation) is
    inherited: the selected group is replayed through the parent in place of its own generation and rewards.

    `reward`, `reward_std`, `rewards/*`, `frac_reward_zero_std` and `completions/*` describe the first round, which is
    uniform sampling and so comparable with a GRPO run; everything adaptive is logged under `ada/`.

    Args:
        model, reward_funcs, args, ...:
            As in [`~trl.GRPOTrainer`], except that `args` is an [`AdaGRPOConfig`]. `rollout_func`, `tools`,
            `environment_factory` and vision-language models need `adaptive_sampling="uniform"`.

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
        columns = getattr(train_dataset, "column_names", None)
        if columns and "prompt" not in columns and kwargs.get("environment_factory") is None:
            raise ValueError(
                f"The training data set has no column 'prompt' (it has {', '.join(map(repr, columns))}). Rename the "
                "column that holds the prompts with `dataset.rename_column(..., 'prompt')`."
            )
        with vllm_generation_with(
            weight_sync=args.vllm_weight_sync,
            weight_sync_dir=args.vllm_weight_sync_dir,
            request_timeout=args.vllm_request_timeout,
            max_concurrent_requests=args.vllm_max_concurrent_requests,
        ):
            super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        self.adaptive_sampling = args.adaptive_sampling
        self._step_inputs: list[dict] | None = None  # this process's rows of the step being generated
        self._replay: _Replay | None = None
        self._warned_of_other_weights = False
        self._check_exit_reward()
        if self.adaptive_sampling != "uniform":
            self._refuse_unsupported()

    def _check_exit_reward(self):
        name = self.args.exit_reward
        if name is not None and self.reward_func_names.count(name) != 1:
            raise ValueError(
                f"exit_reward ({name!r}) must name exactly one reward function; this trainer has "
                f"{', '.join(map(repr, self.reward_func_names)) or 'none'}."
            )

    def _refuse_unsupported(self):
        unsupported = {
            "rollout_func": (self.rollout_func is not None, "it brings its own sampling loop"),
            "tools": (bool(self.tools), "multi-turn rollouts are not replayed yet"),
            "environment_factory": (self.environment_factories is not None, "environments are bound to rows"),
            "a vision-language model": (self._is_vlm, "images are not replayed yet"),
        }
        for name, (given, reason) in unsupported.items():
            if given:
                raise ValueError(
                    f"{name} is not supported with adaptive_sampling={self.adaptive_sampling!r}: {reason}. Use "
                    "adaptive_sampling='uniform' or trl.GRPOTrainer."
                )

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._samples_from_server:
                self.vllm_generation.close()
                self._last_loaded_step = -1

    # Collect, then replay through the parent: it calls `_generate` once and `_calculate_rewards` once.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._step_inputs = inputs
        try:
            output = super()._generate_and_score_completions(inputs)
            if self.adaptive_sampling != "uniform":
                self._apply_replay(output)
            if self._samples_from_server:
                self._warn_of_other_weights()
        finally:
            self._step_inputs = self._replay = None
        return output

    def _generate(self, prompts: list) -> tuple:
        if self._step_inputs is None or self.adaptive_sampling == "uniform":
            return super()._generate(prompts)
        args, tokens_seen = self.args, self.state.num_input_tokens_seen
        sampler, num_shown = self._build_sampler(prompts)
        hidden = args.disable_tqdm or not self.accelerator.is_local_main_process
        with self._engine_ready(), StepProgress(num_shown, self.state.global_step + 1, hidden) as progress:
            pools = sampler.sample(
                exit_condition=args.exit_condition,
                samples_per_round=args.samples_per_round,
                max_rounds=args.max_rounds,
                positive_threshold=args.positive_threshold,
                progress=progress,
            )
        # Seeded by the position of this generation in the run, which a resumed run shares.
        seed = (args.seed, self.state.global_step, self._step % args.gradient_accumulation_steps)
        groups = [select_group(pool, self.num_generations, (*seed, i)) for i, pool in enumerate(pools)]
        if self._samples_from_server:  # each process has seen its own prompts only
            sampler.stats["tokens/seen"] = self.state.num_input_tokens_seen - tokens_seen
            self._log_first_round()
        columns, extras, stats = sampler.fetch([rollout for group in groups for rollout in group])
        if self._samples_from_server:
            self.state.num_input_tokens_seen = tokens_seen + int(stats.pop("tokens/seen"))
        for name in {name for row in extras for name in row}:
            self._pending_extra_logs[name] = [row.get(name) for row in extras]
        self._replay = self._plan_update(pools, groups, stats)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]  # later rounds count too
        return columns

    @property
    def _samples_from_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    def _build_sampler(self, prompts: list) -> tuple[Sampler, int]:
        """The source of rollouts, and the number of prompts whose progress this process sees."""
        shared = (self._total_and_signal, self.accelerator)
        own_prompts, own_inputs = self._own_prompts(prompts)
        if self._samples_from_server:
            prompt_ids = super()._tokenize_prompts(own_prompts)[0] if own_prompts else []
            score = self._scorer(own_prompts, own_inputs, prompt_ids)
            below = int(self.args.vllm_speculative_rounds * len(own_prompts))
            options = (prompt_ids, score, below, self.args.vllm_round_barrier)
            return ServerSampler(self.vllm_generation, *options, *shared), len(own_prompts)
        pairs = gather_object(list(zip(own_prompts, own_inputs, strict=True)))
        complete = self._completer([prompt for prompt, _ in pairs], [row for _, row in pairs])
        return LocalSampler(len(pairs), complete, *shared), len(pairs)

    @contextmanager
    def _engine_ready(self):
        """Push new weights to a server; keep a colocated engine awake over the rounds."""
        if not self.use_vllm:
            yield
            return
        if self._samples_from_server and self.state.global_step != self._last_loaded_step:
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

    def _own_prompts(self, prompts: list) -> tuple[list, list[dict]]:
        """The prompts whose first of `num_generations` equal rows is on this process, with their data set rows."""
        start = self.accelerator.process_index * len(prompts)
        firsts = [i for i in range(len(prompts)) if (start + i) % self.num_generations == 0]
        return [prompts[i] for i in firsts], [self._step_inputs[i] for i in firsts]

    def _total_and_signal(self, rewards: torch.Tensor) -> tuple[list[float], list[float]]:
        total = self._total_rewards(rewards).tolist()
        if self.args.exit_reward is None:
            return total, total
        return total, rewards[:, self.reward_func_names.index(self.args.exit_reward)].tolist()

    def _total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sum over reward functions, `(rows, num_reward_funcs)` to `(rows,)`; NaN if none scored the row."""
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)

    def _plan_update(
        self,
        pools: list[Pool],
        groups: list[list[Rollout]],
        stats: dict[str, float],
    ) -> _Replay:
        args = self.args
        first_round = [r.rewards for pool in pools for r in pool.rollouts if r.draw < args.samples_per_round]
        stds: list[float | None] = [None] * len(pools)
        if args.scale_rewards == "group":
            stds = [pool.std for pool in pools]
        elif args.scale_rewards == "batch":
            stds = [sample_std([reward for pool in pools for reward in pool.scored_rewards])] * len(pools)
        advantages = [
            group_advantages(
                pool,
                group,
                weighting=args.prompt_weighting,
                std=std,
                selection_correction=args.selection_correction,
            )
            for pool, group, std in zip(pools, groups, stds, strict=True)
        ]
        metrics = sampling_metrics(
            pools,
            groups,
            advantages,
            args.exit_condition,
            samples_per_round=args.samples_per_round,
            weighting=args.prompt_weighting,
        )
        return _Replay(
            groups=groups,
            advantages=advantages,
            rewards=self._tensor([rollout.rewards for group in groups for rollout in group]),
            zero_signal_unresolved=[
                not args.exit_condition(pool) and not any(values)
                for pool, values in zip(pools, advantages, strict=True)
            ],
            first_round_rewards=self._tensor(first_round),
            metrics=metrics | stats,
        )

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.accelerator.device)

    def _apply_replay(self, output: dict[str, Any]) -> None:
        """Put the true advantages and the honest metrics where the parent left those of the selected group."""
        replay = self._replay
        local_rows = output["completion_ids"].size(0)
        local = slice(self.accelerator.process_index * local_rows, (self.accelerator.process_index + 1) * local_rows)
        advantages = [value for values in replay.advantages for value in values]
        output["advantages"] = output["advantages"].new_tensor(advantages[local])
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

        if self.args.unresolved == "mask":
            self._mask_rows(output, local)
        trained_tokens = self.accelerator.gather(output["completion_mask"].sum()).sum().item()
        replay.metrics["tokens/discarded"] = replay.metrics["tokens/generated"] - trained_tokens
        self._relabel_rewards()
        self._log_ada(replay.metrics)

    def _mask_rows(self, output: dict[str, Any], local: slice) -> None:
        masked = [flag for flag in self._replay.zero_signal_unresolved for _ in range(self.num_generations)]
        keep = ~torch.tensor(masked[local], device=output["completion_mask"].device)
        output["completion_mask"] = output["completion_mask"] * keep.unsqueeze(1)  # (B, T)
        output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()

    def _relabel_rewards(self) -> None:
        """The parent has just logged the rewards of the selected group: report those of the first round instead."""
        rewards, metrics = self._replay.first_round_rewards, self._metrics["train"]
        total = self._total_rewards(rewards)
        metrics["reward"][-1] = total.nanmean().item()
        metrics["reward_std"][-1] = nanstd(total).item()
        metrics["frac_reward_zero_std"][-1] = self._replay.metrics["zero_signal/first_round"]
        for i, name in enumerate(self.reward_func_names):
            metrics[f"rewards/{name}/mean"][-1] = rewards[:, i].nanmean().item()
            metrics[f"rewards/{name}/std"][-1] = nanstd(rewards[:, i]).item()

    def _log_uniform_metrics(self, rewards: torch.Tensor, completion_ids_list: list) -> None:
        """The same figures for plain GRPO, so that both kinds of run can be compared."""
        totals, signals = self._total_and_signal(rewards)
        rollouts = [
            Rollout(i % self.num_generations, total, signal, tuple(per_func))
            for i, (total, signal, per_func) in enumerate(zip(totals, signals, rewards.tolist(), strict=True))
        ]
        groups = [rollouts[i : i + self.num_generations] for i in range(0, len(rollouts), self.num_generations)]
        pools = [Pool(self.args.positive_threshold, group) for group in groups]
        metrics = sampling_metrics(
            pools,
            groups,
            [group_advantages(pool, group, weighting="none") for pool, group in zip(pools, groups, strict=True)],
            self.args.exit_condition,
            samples_per_round=self.num_generations,
            weighting="none",
        )
        tokens = torch.tensor(sum(map(len, completion_ids_list)), device=rewards.device)
        metrics["tokens/generated"] = self.accelerator.reduce(tokens).item()
        metrics["tokens/discarded"] = 0.0
        self._log_ada(metrics)

    def _log_ada(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][f"ada/{name}"].append(value)
