"""One step of a trainer whose rollouts are looked at, and whose update batch is as long as it may become."""

import math
import resource
import sys
import time
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cli.errors import UserError, one_line
from .findings import CheckResult, Sample, counts, difficulty, expected, forecast, generation, rewards


if TYPE_CHECKING:  # they import torch, which takes seconds
    from ..trainer.ada_grpo_config import AdaGRPOConfig
    from ..trainer.ada_grpo_trainer import AdaGRPOTrainer

PROMPTS, DRAWS = 8, 8  # sampled on each process
MAX_ROWS = 1000  # of the data set, among which the longest prompt is looked for


class Preflight:
    """
    Runs one step of a trainer whose rollouts are looked at, and whose update batch is as long as it may become.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            Set up for one step, with an output directory of its own.
    """

    sample: Sample  # from the first batch on

    def __init__(self, trainer: "AdaGRPOTrainer"):
        self.trainer = trainer
        self.findings: list[CheckResult] = []
        self.doing = "setting up"
        self._own: list[dict] = []  # rows of this process
        self._updating_since = math.nan

    def run(self) -> None:
        """Fill [`findings`]; whatever a run would fail with is raised, and [`doing`] says in what."""
        trainer = self.trainer
        rounds_of_its_own = trainer._generate_and_score_completions

        def first_batch(inputs: list[dict]) -> dict:
            self._look_at_rollouts(inputs)
            self.doing = "the optimizer step"
            batch = self._longest_batch(inputs)
            if batch is None:
                batch = rounds_of_its_own(inputs)
            _reset_peak_memory(trainer)
            self._updating_since = time.perf_counter()
            return batch

        with trainer.having(_generate_and_score_completions=first_batch), trainer.server_session():
            try:
                trainer.train()
            except _out_of_memory() as error:
                raise UserError(self._memory_advice(error)) from error
            self._report_update(time.perf_counter() - self._updating_since)
            if trainer.syncs_with_server:
                self.doing = "sending the weights again"
                trainer.push_weights()
                self.findings.append(self._weights("weights after the step"))

    # Rollouts

    def _look_at_rollouts(self, inputs: list[dict]) -> None:
        trainer = self.trainer
        own = self._own = self._rows_of(inputs)
        self.doing = "estimating pass rates"
        if trainer.pass_rates is not None:
            trainer.pass_rates.start_step(own)
        self.doing = "sampling and scoring"
        self.sample = self._draw(own[:PROMPTS])
        if trainer.syncs_with_server:
            self.findings.append(self._weights("vLLM server"))
        args, sample = trainer.args, self.sample
        self.findings += [*generation(args, sample), *rewards(args, sample, trainer.reward_func_names)]
        self.findings += difficulty(args, sample)
        positives, draws = counts(args, sample)
        if 0 < positives.sum() < draws.sum():
            self.findings.append(_planned(args, positives, draws))

    def _rows_of(self, inputs: list[dict]) -> list[dict]:
        """Rows of the data set, this process's share of what a step asks; of a stream the first ones, at least one."""
        trainer, args = self.trainer, self.trainer.args
        if not args.uses_prompt_queue:
            return trainer.prompt_source.ask(inputs).own or inputs[:1]
        number = max(args.prompts_per_step // trainer.accelerator.num_processes, 1)
        start = trainer.accelerator.process_index * number
        rows = list(islice(iter(trainer.train_dataset), start, start + number))
        return rows or list(islice(iter(trainer.train_dataset), 1))

    def _draw(self, rows: list[dict]) -> Sample:
        """A few rollouts of each prompt, by the way of generating that the run has. Collective."""
        from ..utils.distributed import gather_results, shared

        trainer, copies = self.trainer, [row for row in rows for _ in range(DRAWS)]
        with trainer.hold_environments(), trainer.vllm_session():
            started = time.perf_counter()
            with shared():
                found = trainer.complete(copies, True)
            seconds = time.perf_counter() - started
        _, signals = trainer.split_rewards(found.rewards)
        own = (
            found.rewards.reshape(len(rows), DRAWS, -1).tolist(),
            np.reshape(signals, (len(rows), DRAWS)).tolist(),
            [row.length for row in found.rows],
            [row.truncated for row in found.rows],
        )
        processes = gather_results(lambda: (*own, seconds, found.reward_seconds))
        *lists, all_seconds, reward_seconds = zip(*processes, strict=True)
        arrays = [np.array([value for process in values for value in process]) for values in lists]
        return Sample._make([*arrays, max(all_seconds), max(reward_seconds)])

    def _weights(self, what: str) -> CheckResult:
        vllm, args = self.trainer.vllm_generation, self.trainer.args
        return CheckResult(
            what,
            f"sent by {args.vllm_weight_sync!r}; log-probabilities of a known prompt differ by {vllm.weight_difference:.4f} nats "
            "per token from the trainer's",
        )

    # The update

    def _longest_batch(self, inputs: list[dict]) -> dict[str, Any] | None:
        """
        The step's batch with the longest prompt of the data and completions of the full length, as the parent makes it;
        `None` where a rollout is more than a prompt and a completion.
        """
        import torch
        from trl import GRPOTrainer

        trainer, args = self.trainer, self.trainer.args
        if trainer._is_vlm or trainer.tools or trainer.environment_factories is not None:
            return None
        prompt_ids, row = self._longest_prompt()
        completion_ids = self._full_length(prompt_ids)
        text = trainer._tokenizer.decode(completion_ids)
        completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        logprobs = [-1.0] * len(completion_ids) if args.use_vllm else None
        columns = (prompt_ids, completion_ids, None, completion, logprobs, None, None, None)
        rows = [SimpleNamespace(columns=columns, row=row) for _ in inputs]
        total = len(inputs) * trainer.accelerator.num_processes
        rewards = torch.arange(total, device=trainer.accelerator.device)[:, None] % 2.0
        rewards = rewards.expand(-1, len(trainer.reward_funcs))
        as_drawn = SimpleNamespace(rows=rows, rewards=rewards)
        with trainer.replaying(as_drawn):  # type: ignore[arg-type] # what the parent reads of a RolloutBatch
            batch = GRPOTrainer._generate_and_score_completions(trainer, [row] * len(inputs))
        for name in {"advantages", "importance_sampling_ratio"} & set(batch):
            batch[name] = torch.ones_like(batch[name])  # else equal rows would cancel, or made-up ones count nothing
        lengths = len(prompt_ids), len(completion_ids)
        self._shape = f"{args.per_device_train_batch_size} rows of {lengths[0]} + {lengths[1]} tokens at a time"
        return batch

    _shape = "rows as they were drawn"

    def _longest_prompt(self) -> tuple[list[int], dict]:
        rows = [*islice(iter(self.trainer.train_dataset), MAX_ROWS), *self._own]
        ids = self.trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        return list(ids[longest]), rows[longest]

    def _full_length(self, prompt_ids: list[int]) -> list[int]:
        trainer = self.trainer
        special = {*trainer.eos_token_ids, *trainer._tokenizer.all_special_ids}
        token = next((i for i in prompt_ids if i not in special), prompt_ids[-1])
        return [token] * (trainer.max_completion_length - 1) + [trainer.eos_token_ids[0]]

    def _report_update(self, seconds: float) -> None:
        trainer = self.trainer
        norm = next((log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log), math.nan)
        finite = math.isfinite(norm)
        advice = "" if finite else "Gradients are not finite: train in bf16 or float32 (--dtype float32)."
        found = f"{self._shape}: {seconds:.1f} s, gradient norm {float(norm):.3g}"
        self.findings.append(CheckResult("optimizer step", found, advice, not finite))
        self.findings.append(_peak_memory(trainer))
        self.findings.append(forecast(trainer.args, self.sample, seconds))

    def _memory_advice(self, error: BaseException) -> str:
        return (
            f"Out of memory in {self.doing} ({one_line(error)[:200]}). Halve per_device_train_batch_size "
            f"({self.trainer.args.per_device_train_batch_size}) and double gradient_accumulation_steps "
            f"({self.trainer.args.gradient_accumulation_steps}), or lower max_completion_length "
            f"({self.trainer.args.max_completion_length})."
        )


def _planned(args: "AdaGRPOConfig", positives: np.ndarray, draws: np.ndarray) -> CheckResult:
    """What `ada-trl plan` makes of so few prompts: the share with a gradient and the rollouts, now and at its best."""
    from ..planning.observed import prompts_from_counts
    from ..planning.settings import describe, recommend, settings

    prompts = prompts_from_counts("the sample", positives.astype(float), draws.astype(float))
    lost, rollouts = expected(args, prompts.distribution)
    size = max(args.num_generations, 2)
    budget = max(rollouts, size)
    found = settings(prompts, num_generations=size, budget=budget, max_samples=max(32, size))
    best = recommend(found, budget)
    fields = {"num_generations": 1} | best.fields
    runs_best = all(getattr(args, name) == value for name, value in fields.items())
    advice = "" if runs_best else f"The least noise for a rollout has {best.method} ({describe(best)})."
    return CheckResult(
        "plan",
        f"{1 - lost:.0%} of the prompts would have a gradient, for {rollouts:.1f} rollouts each",
        advice and f"{advice} From {len(draws)} prompts only: `ada-trl plan` takes a record.",
    )


def _out_of_memory() -> "type[BaseException]":
    import torch

    return torch.OutOfMemoryError


def _reset_peak_memory(trainer: "AdaGRPOTrainer") -> None:
    import torch

    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_memory(trainer: "AdaGRPOTrainer") -> CheckResult:
    import torch

    device: torch.device = trainer.accelerator.device
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(device).total_memory
        advice = "Little is left: halve per_device_train_batch_size." if peak > 0.95 * total else ""
        return CheckResult("peak memory", f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU", advice)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return CheckResult("peak memory", f"{peak / 2**30:.1f} GiB of this process, without a GPU")
