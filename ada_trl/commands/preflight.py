"""
The training step of `ada-trl check`: inspects a few rollouts, then makes an update on rows of maximum length.

It generates with methods of [`~trl.GRPOTrainer`] only, so that it does not depend on how [`AdaGRPOTrainer`] samples.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import is_async_callable

from ..sampling.sampler import Completion
from ..trainer import trl_private
from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
from ..trainer.interception import injecting
from ..trainer.trl_private import override_attributes
from ..vllm.responses import quote
from .errors import UserError
from .findings import CheckResult, Sample, difficulty, generation, rewards, step_cost
from .run_setup import run


PROMPTS, ROLLOUTS = 8, 8  # prompts of each process, rollouts of each prompt
MAX_ROWS = 1000  # of the dataset, in which the longest prompt is searched
LENGTHS = ("mean_length", "max_length", "clipped_ratio")  # logged by GRPOTrainer under completions/


class Preflight(TrainerCallback):
    """
    One step of a trainer, with inspected rollouts and an update batch of maximum length.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            Trainer that is set up for one step, with a temporary output directory.
    """

    def __init__(self, trainer: AdaGRPOTrainer):
        self.trainer = trainer
        self.findings: list[CheckResult] = []
        self.sample: Sample | None = None  # from the first batch on
        self._batch: dict | None = None
        self._generate = trainer._generate_and_score_completions
        self._shape = "sampled rows"
        self._updating_since = self._update_seconds = math.nan
        self._uses_server = trainer.args.use_vllm and trainer.args.vllm_mode == "server"

    def run(self) -> None:
        """Fill `findings`. Errors of the run are raised."""
        trainer = self.trainer
        trainer.add_callback(self)
        # The step is the usual one, except for its generation batch.
        with override_attributes(trainer, _generate_and_score_completions=self._first_batch):
            run(trainer)

    def _first_batch(self, inputs: list[dict]) -> dict:
        if self._batch is not None:  # the next generation batch of the same optimizer step
            return dict(self._batch)
        self._inspect_rollouts(len(inputs))
        batch = self._longest_batch(len(inputs))
        if batch is None:
            batch = self._generate(inputs)
        if self.trainer.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._updating_since = time.perf_counter()
        self._batch = batch
        return batch

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._update_seconds = time.perf_counter() - self._updating_since

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "grad_norm" not in (logs or {}):
            return
        self._report_update(logs["grad_norm"])
        if self._uses_server:  # generating after the step pushes the new weights and compares log-probabilities
            self._sample_rows(self._random_rows(1), ROLLOUTS)
            self.findings.append(self._weights("weights after the step"))

    # Rollouts

    def _inspect_rollouts(self, batch_size: int) -> None:
        trainer, args = self.trainer, self.trainer.args
        sample = self.sample = self._sample_rows(self._random_rows(PROMPTS), batch_size)
        if self._uses_server:
            self.findings.append(self._weights("vLLM server"))
        self.findings += [*generation(args, sample), *rewards(sample, trainer.reward_func_names)]
        self.findings.append(difficulty(args, sample))

    def _random_rows(self, number: int) -> list[dict]:
        """Choose rows of the dataset, different ones on each process; of a stream the first ones."""
        data, rank = self.trainer.train_dataset, self.trainer.accelerator.process_index
        total = number * self.trainer.accelerator.num_processes
        if not hasattr(data, "__len__"):
            first = list(islice(iter(data), total))
            return [first[i % len(first)] for i in range(rank * number, (rank + 1) * number) if first]
        rng = random.Random(self.trainer.args.seed)
        indices = rng.sample(range(len(data)), total) if total <= len(data) else rng.choices(range(len(data)), k=total)
        return [data[index] for index in indices[rank * number : (rank + 1) * number]]

    def _sample_rows(self, rows: list[dict], batch_size: int) -> Sample:
        """
        Sample and score `ROLLOUTS` rollouts of each row, as an evaluation does: at most `batch_size` at once, as in the
        run, and at least those of one prompt. Collective.
        """
        trainer, at_once = self.trainer, max(batch_size // ROLLOUTS, 1)
        calculate = trainer._calculate_rewards
        received, reward_seconds = [], 0.0

        def timed_rewards(*given):
            nonlocal reward_seconds
            started = time.perf_counter()
            found = calculate(*given)  # of all processes
            reward_seconds += time.perf_counter() - started
            received.append(found.cpu())
            return found

        trainer.model.eval()
        started = time.perf_counter()
        try:
            with (
                trl_private.isolated_metrics(trainer, "eval") as (metrics, _),
                override_attributes(
                    trainer,
                    _calculate_rewards=timed_rewards,
                    num_generations_eval=ROLLOUTS,
                    reward_funcs=list(map(_checked, trainer.reward_funcs, trainer.reward_func_names)),
                ),
            ):
                for start in range(0, len(rows), at_once):
                    self._generate([dict(row) for row in rows[start : start + at_once] for _ in range(ROLLOUTS)])
            seconds = time.perf_counter() - started
            lengths = {name: metrics[f"completions/{name}"] for name in LENGTHS}
        finally:
            trainer.model.train()
        times = torch.tensor([[seconds, reward_seconds]], device=trainer.accelerator.device)
        slowest = trainer.accelerator.gather(times).amax(dim=0).tolist()
        scoring = trainer._scoring()
        rewards_NF = scoring.clean(torch.cat(received).numpy())
        reward_N, success_reward_N = scoring.totals(rewards_NF)
        return Sample(
            rewards_NF.reshape(-1, ROLLOUTS, rewards_NF.shape[1]),
            reward_N.reshape(-1, ROLLOUTS),
            success_reward_N.reshape(-1, ROLLOUTS),
            float(np.mean(lengths["mean_length"])),
            max(lengths["max_length"]),
            float(np.mean(lengths["clipped_ratio"])),
            *slowest,
        )

    def _weights(self, checked: str) -> CheckResult:
        difference = self.trainer.vllm_generation.weight_check.difference
        return CheckResult(
            checked,
            f"sent by {self.trainer.args.vllm_weight_sync!r}; log-probabilities of a known prompt differ by "
            f"{difference:.4f} nats per token from the trainer's",
        )

    # The update

    def _longest_batch(self, size: int) -> dict[str, Any] | None:
        """
        Make GRPOTrainer's batch of the longest prompt of the data and completions of the full length. `None` if a rollout
        consists of more than a prompt and a completion.
        """
        trainer, args = self.trainer, self.trainer.args
        if trl_private.is_vision_language_model(trainer) or trainer.tools or trainer.environment_factories is not None:
            return None
        prompt_ids, row = self._longest_prompt()
        completion_ids = self._full_length(prompt_ids)
        text = trl_private.tokenizer(trainer).decode(completion_ids)
        completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        logprobs = [-1.0] * len(completion_ids) if args.use_vllm else None
        columns = (prompt_ids, completion_ids, None, completion, logprobs, None, None, None)
        rollout = Completion(columns, row, {}, len(completion_ids), truncated=True)
        total = size * trainer.accelerator.num_processes
        scores = torch.zeros(total, len(trainer.reward_funcs), device=trainer.accelerator.device)
        with injecting(trainer, [rollout] * size, scores):
            batch = GRPOTrainer._generate_and_score_completions(trainer, [row] * size)
        for name in {"advantages", "importance_sampling_ratio"} & set(batch):
            batch[name] = torch.ones_like(batch[name])  # otherwise the gradient of equal rows would be zero
        lengths = len(prompt_ids), len(completion_ids)
        self._shape = f"{args.per_device_train_batch_size} rows of {lengths[0]} + {lengths[1]} tokens at a time"
        return batch

    def _longest_prompt(self) -> tuple[list[int], dict]:
        rows = list(islice(iter(self.trainer.train_dataset), MAX_ROWS))
        ids = self.trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        return list(ids[longest]), rows[longest]

    def _full_length(self, prompt_ids: list[int]) -> list[int]:
        trainer = self.trainer
        special = {*trainer.eos_token_ids, *trl_private.tokenizer(trainer).all_special_ids}
        token = next((i for i in prompt_ids if i not in special), prompt_ids[-1])
        return [token] * (trainer.max_completion_length - 1) + [trainer.eos_token_ids[0]]

    def _report_update(self, norm: float) -> None:
        finite, seconds = math.isfinite(norm), self._update_seconds
        advice = "" if finite else "Gradients are not finite: train in bf16 or float32 (--dtype float32)."
        found = f"{self._shape}: {seconds:.1f} s, gradient norm {float(norm):.3g}"
        self.findings.append(CheckResult("optimizer step", found, advice, not finite))
        self.findings.append(_peak_memory(self.trainer.accelerator.device))
        if self.sample is not None:
            self.findings.append(step_cost(self.trainer.args, self.sample, seconds))


def _checked(function: Callable, name: str) -> Callable:
    """A reward function that is named in the error if it returns no list of numbers; TRL's error does not name it."""

    def check(rewards: Any) -> Any:
        try:
            torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward function {name} returned {quote(rewards)}, but needs a list of one number or None for each completion."
            ) from error
        return rewards

    async def check_awaited(**given: Any) -> Any:
        return check(await function(**given))

    if isinstance(function, torch.nn.Module):
        return function
    return check_awaited if is_async_callable(function) else lambda **given: check(function(**given))


def _peak_memory(device: torch.device) -> CheckResult:
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(device).total_memory
        advice = "Little is left: halve per_device_train_batch_size." if peak > 0.95 * total else ""
        return CheckResult("peak memory", f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU", advice)
    try:
        import resource
    except ImportError:  # Windows
        return CheckResult("peak memory", "not measured without a GPU on Windows")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return CheckResult("peak memory", f"{peak / 2**30:.1f} GiB of this process, without a GPU")
