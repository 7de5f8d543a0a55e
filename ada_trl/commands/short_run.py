"""
The run of `ada-trl check`: an evaluation of a few prompts with several rollouts of each, and the first step of the
training, whose update is made on rows of maximum length.
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
from trl.trainer.utils import is_async_callable

from ..core import Rollouts
from ..trainer import trl_private
from ..trainer.ada_grpo_trainer import AdaGRPOTrainer
from ..vllm.responses import quote
from . import findings
from .errors import UserError
from .findings import Finding


PROMPTS, ROLLOUTS = 8, 8  # of the evaluation: prompts for each process, rollouts of each prompt
MAX_ROWS = 1000  # of the dataset, in which the longest prompt is searched


class ShortRun(TrainerCallback):
    """
    Makes `trainer.train()` stop after the first step, and fills `findings`.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            A trainer that is not used afterwards: its evaluation set and some of its methods are replaced.
    """

    def __init__(self, trainer: AdaGRPOTrainer):
        self.trainer, self.findings = trainer, list[Finding]()
        self._uses_server = trainer.args.use_vllm and trainer.args.vllm_mode == "server"
        self._rewards: list[torch.Tensor] = []  # of the evaluation, with the lengths of its completions
        self._lengths: list[torch.Tensor] = []
        self._shape = "sampled rows"
        self._reward_seconds = self._sampling_seconds = self._step_seconds = 0.0
        self._set_up_evaluation()
        self._generate, self._score = trainer._generate_and_score_completions, trainer._calculate_rewards
        trainer.reward_funcs = list(map(_checked, trainer.reward_funcs, trainer.reward_func_names))
        replaced = {
            "_generate_and_score_completions": self._generate_and_stretch,
            "_calculate_rewards": self._score_and_record,
            "prediction_step": self._evaluate_without_loss,
        }
        trainer.__dict__.update(replaced)
        trainer.add_callback(self)

    def _set_up_evaluation(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        prompts = PROMPTS * trainer.accelerator.num_processes
        data, rng = trainer.train_dataset, random.Random(args.seed)
        if hasattr(data, "__len__"):
            choose = rng.sample if prompts <= len(data) else rng.choices
            trainer.eval_dataset = [data[index] for index in choose(range(len(data)), k=prompts)]
        else:
            first = list(islice(iter(data), prompts))
            trainer.eval_dataset = [first[i % len(first)] for i in range(prompts)]
        at_once = args.per_device_train_batch_size * args.steps_per_generation  # as in a step
        args.per_device_eval_batch_size = min(max(at_once // ROLLOUTS, 1), PROMPTS) * ROLLOUTS
        args.eval_on_start, args.load_best_model_at_end = True, False
        trainer.num_generations_eval = ROLLOUTS

    # The course of the run

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._step_seconds = -time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._step_seconds += time.perf_counter()
        control.should_training_stop = control.should_log = True
        # Generating after the step pushes the new weights to a server and compares log-probabilities.
        control.should_evaluate, control.should_save = self._uses_server, False
        self.trainer.eval_dataset = self.trainer.eval_dataset[:1]

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        logs = logs or {}
        if "grad_norm" in logs:
            self._report_step(logs)
        elif "eval_runtime" in logs and state.global_step == 0:
            self._report_rollouts(logs)
        elif "eval_runtime" in logs:
            self._report_weights("weights after the step")

    # In place of the trainer's methods

    def _evaluate_without_loss(self, model: Any, inputs: list[dict], *args: Any, **kwargs: Any) -> tuple:
        """Generate and score. The forward pass of the loss, on all rows at once, needs more memory than a step."""
        self.trainer._prepare_inputs(inputs)
        return None, None, None

    def _score_and_record(self, inputs: list, prompts: list, completions: list, completion_ids: list) -> torch.Tensor:
        if self.trainer.model.training:
            return self._score(inputs, prompts, completions, completion_ids)
        lengths = torch.tensor(list(map(len, completion_ids)), device=self.trainer.accelerator.device)
        self._lengths.append(self.trainer.accelerator.gather(lengths))
        started = time.perf_counter()
        rewards = self._score(inputs, prompts, completions, completion_ids)
        self._reward_seconds += time.perf_counter() - started
        self._rewards.append(rewards)
        return rewards

    def _generate_and_stretch(self, inputs: list[dict]) -> dict[str, Any]:
        if not self.trainer.model.training:
            return self._generate(inputs)
        started = time.perf_counter()
        batch = self._generate(inputs)
        self._sampling_seconds += time.perf_counter() - started
        # Images of the prompts fit the sampled rows only.
        return batch if trl_private.is_vision_language_model(self.trainer) else self._stretch(batch)

    def _stretch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Repeat the tokens of each row up to the longest prompt of the dataset and the maximum completion length."""
        trainer, (rows, width) = self.trainer, batch["completion_ids"].shape
        prompts = [row["prompt"] for row in islice(iter(trainer.train_dataset), MAX_ROWS)]
        longest = max(map(len, trainer._tokenize_prompts(prompts)[0]))
        stretched = dict(batch)
        for name, value in batch.items():
            is_prompt = name.startswith("prompt_")
            if is_prompt or (isinstance(value, torch.Tensor) and value.shape[:2] == (rows, width)):
                columns = torch.arange(longest if is_prompt else trainer.max_completion_length, device=value.device)
                stretched[name] = value[:, columns % value.shape[1]]
        for name in ("prompt_mask", "completion_mask"):
            stretched[name] = torch.ones_like(stretched[name])
        stretched["advantages"] = torch.ones_like(batch["advantages"])  # the gradient may not be zero
        tokens = rows * trainer.max_completion_length * trainer.accelerator.num_processes
        stretched["num_items_in_batch"] = torch.full_like(batch["num_items_in_batch"], tokens)
        self._shape = (
            f"{trainer.args.per_device_train_batch_size} rows of {longest} + {trainer.max_completion_length} tokens "
            "at a time"
        )
        return stretched

    # The findings

    def _report_rollouts(self, logs: dict[str, Any]) -> None:
        trainer = self.trainer
        if self._uses_server:
            self._report_weights("vLLM server")
        number = len(trainer.eval_dataset) * ROLLOUTS  # with several processes, prompts may be repeated after the last
        rewards_NF = torch.cat(self._rewards)[:number].cpu().numpy()
        rollouts = Rollouts.score(
            np.split(rewards_NF, len(trainer.eval_dataset)),
            trainer._scoring(),
            length_N=torch.cat(self._lengths)[:number].cpu().numpy(),
        )
        self.findings += findings.generation(trainer.args, rollouts, logs, self._reward_seconds)
        self.findings += findings.rewards(rollouts, trainer.reward_func_names)
        self.findings.append(findings.difficulty(trainer.args, rollouts))
        self.findings.append(findings.across_prompts(trainer.args, rollouts))

    def _report_weights(self, checked: str) -> None:
        self.findings.append(
            Finding(
                checked,
                f"sent by {self.trainer.args.vllm_weight_sync!r}; log-probabilities of a known prompt differ by "
                f"{self.trainer.vllm_generation.weight_check.difference:.4f} nats per token from the trainer's",
            )
        )

    def _report_step(self, logs: dict[str, Any]) -> None:
        norm, update_seconds = float(logs["grad_norm"]), self._step_seconds - self._sampling_seconds
        advice = "" if math.isfinite(norm) else "Gradients are not finite: train in bf16 or float32 (--dtype float32)."
        found = f"{self._shape}: {update_seconds:.1f} s, gradient norm {norm:.3g}"
        self.findings.append(Finding("optimizer step", found, advice, is_fatal=not math.isfinite(norm)))
        self.findings.append(_peak_memory(self.trainer.accelerator.device))
        prompts = trl_private.prompts_per_generation(self.trainer)
        self.findings.append(
            findings.step_cost(self.trainer.args, prompts, logs, self._sampling_seconds, update_seconds)
        )


def _checked(function: Callable, name: str) -> Callable:
    """A reward function that is named in the error if it returns no list of numbers; TRL's error does not name it."""

    def check(rewards: Any) -> Any:
        try:
            scored = list(rewards)  # it may be a generator, which can be read once
            torch.tensor([torch.nan if reward is None else reward for reward in scored], dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward function {name} returned {quote(rewards)}, but needs a list of one number or None for each "
                "completion."
            ) from error
        return scored

    async def check_awaited(**given: Any) -> Any:
        return check(await function(**given))

    if isinstance(function, torch.nn.Module):
        return function
    return check_awaited if is_async_callable(function) else lambda **given: check(function(**given))


def _peak_memory(device: torch.device) -> Finding:
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(device).total_memory
        advice = "Little is left: halve per_device_train_batch_size." if peak > 0.95 * total else ""
        return Finding("peak memory", f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU", advice)
    try:
        import resource
    except ImportError:  # Windows
        return Finding("peak memory", "not measured without a GPU on Windows")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Finding("peak memory", f"{peak / 2**30:.1f} GiB of this process, without a GPU")
