"""
Will this run work, and what will it cost? Looks in about a minute, before a long run, on your machine.

`ada-trl check --config my.yaml` takes the arguments of `ada-trl train`. It builds the trainer, samples a handful of
prompts, scores them with your reward functions, sends the weights to a vLLM server and compares log-probabilities, and makes
one optimizer step on rows of the greatest length. Nothing of it is kept. Under `accelerate launch`: `-m ada_trl.check …`.
"""

import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .cli import start
from .cli.errors import UserError, explained, one_line
from .measurement.tables import markdown_table


if TYPE_CHECKING:  # they import torch, which takes seconds
    from .trainer.ada_grpo_config import AdaGRPOConfig
    from .trainer.ada_grpo_trainer import AdaGRPOTrainer

PROMPTS, DRAWS = 8, 8  # sampled on each process
MAX_ROWS = 1000  # of the data set, among which the longest prompt is looked for
MANY_TRUNCATED = 0.1


class Finding(NamedTuple):
    """
    A line of the report: what was checked, what was found, what to do about it, if anything, and whether nothing could be
    learnt that way.
    """

    checked: str
    found: str
    advice: str = ""
    is_fatal: bool = False


class Sample(NamedTuple):
    """
    What the prompts of all processes drew.

    Args:
        rewards (`np.ndarray`):
            Of each reward function, `(prompts, draws, num_reward_funcs)`.
        signals (`np.ndarray`):
            What decides between positive and negative, `(prompts, draws)`.
        lengths, truncated (`np.ndarray`):
            Generated tokens, and whether the cap ended them, `(prompts * draws,)`.
        seconds, reward_seconds (`float`):
            Of generation and scoring together, and of scoring, on the slowest process.
    """

    rewards: np.ndarray
    signals: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    seconds: float
    reward_seconds: float


class Preflight:
    """
    Runs one step of a trainer whose rollouts are looked at, and whose update batch is as long as it may become.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            Set up for one step, with an output directory of its own.
    """

    def __init__(self, trainer: "AdaGRPOTrainer"):
        self.trainer = trainer
        self.findings: list[Finding] = []
        self.doing = "setting up"
        self.sample: Sample | None = None
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

        trainer._generate_and_score_completions = first_batch
        with trainer._using_server():
            try:
                trainer.train()
            except _out_of_memory() as error:
                raise UserError(self._memory_advice(error)) from error
            self._report_update(time.perf_counter() - self._updating_since)
            if trainer._syncs_with_server:
                self.doing = "sending the weights again"
                trainer._push_weights()
                self.findings.append(self._weights("weights after the step"))

    # Rollouts

    def _look_at_rollouts(self, inputs: list[dict]) -> None:
        trainer = self.trainer
        own = trainer._own_prompts(inputs)
        self.doing = "estimating pass rates"
        trainer._estimate(own)
        self.doing = "sampling and scoring"
        self.sample = self._draw(own[:PROMPTS] or inputs[:1])
        if trainer._syncs_with_server:
            self.findings.append(self._weights("vLLM server"))
        args, sample = trainer.args, self.sample
        self.findings += [*_generation(args, sample), *_rewards(args, sample, trainer.reward_func_names)]
        self.findings += _difficulty(args, sample)

    def _draw(self, rows: list[dict]) -> Sample:
        """A few rollouts of each prompt, by the way of generating that the run has. Collective."""
        from .processes import gather_results, shared

        trainer, copies = self.trainer, [row for row in rows for _ in range(DRAWS)]
        with trainer._environments_kept(), trainer._engine_ready():
            started = time.perf_counter()
            with shared():
                found = trainer._complete(copies, True)
            seconds = time.perf_counter() - started
        _, signals = trainer._total_and_signal(found.rewards)
        own = (
            found.rewards.reshape(len(rows), DRAWS, -1).tolist(),
            np.reshape(signals, (len(rows), DRAWS)).tolist(),
            [row.length for row in found.rows],
            [row.truncated for row in found.rows],
        )
        processes = gather_results(lambda: (*own, seconds, found.reward_seconds))
        *lists, all_seconds, reward_seconds = zip(*processes, strict=True)
        arrays = [np.array([value for process in values for value in process]) for values in lists]
        return Sample(*arrays, max(all_seconds), max(reward_seconds))

    def _weights(self, what: str) -> Finding:
        vllm, args = self.trainer.vllm_generation, self.trainer.args
        return Finding(
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

        from .trainer.parent import Replaying

        trainer, args = self.trainer, self.trainer.args
        if trainer._is_vlm or trainer.tools or trainer.environment_factories is not None:
            return None
        prompt_ids, row = self._longest_prompt(inputs)
        completion_ids = self._full_length(prompt_ids)
        text = trainer._tokenizer.decode(completion_ids)
        completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        logprobs = [-1.0] * len(completion_ids) if args.use_vllm else None
        columns = (prompt_ids, completion_ids, None, completion, logprobs, None, None, None)
        rows = [SimpleNamespace(columns=columns, row=row) for _ in inputs]
        total = len(inputs) * trainer.accelerator.num_processes
        rewards = torch.arange(total, device=trainer.accelerator.device)[:, None] % 2.0
        rewards = rewards.expand(-1, len(trainer.reward_funcs))
        with trainer._having(_phase=Replaying(SimpleNamespace(rows=rows, rewards=rewards))):
            batch = GRPOTrainer._generate_and_score_completions(trainer, [row] * len(inputs))
        for name in {"advantages", "importance_sampling_ratio"} & set(batch):
            batch[name] = torch.ones_like(batch[name])  # else equal rows would cancel, or made-up ones count nothing
        lengths = len(prompt_ids), len(completion_ids)
        self._shape = f"{args.per_device_train_batch_size} rows of {lengths[0]} + {lengths[1]} tokens at a time"
        return batch

    _shape = "rows as they were drawn"

    def _longest_prompt(self, inputs: list[dict]) -> tuple[list[int], dict]:
        rows = [*islice(iter(self.trainer.train_dataset), MAX_ROWS), *inputs]
        ids = self.trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        return list(ids[longest]), rows[longest]

    def _full_length(self, prompt_ids: list[int]) -> list[int]:
        trainer = self.trainer
        special = {*trainer.eos_token_ids, *trainer._tokenizer.all_special_ids}
        token = next((i for i in prompt_ids if i not in special), prompt_ids[-1])
        return [token] * (trainer.max_completion_length - 1) + [trainer.eos_token_ids[0]]

    def _report_update(self, seconds: float) -> None:
        trainer, sample = self.trainer, self.sample
        norm = next((log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log), math.nan)
        finite = math.isfinite(norm)
        advice = "" if finite else "Gradients are not finite: train in bf16 or float32 (--dtype float32)."
        found = f"{self._shape}: {seconds:.1f} s, gradient norm {float(norm):.3g}"
        self.findings.append(Finding("optimizer step", found, advice, not finite))
        self.findings.append(_peak_memory(trainer))
        self.findings.append(_forecast(trainer, sample, seconds))

    def _memory_advice(self, error: BaseException) -> str:
        return (
            f"Out of memory in {self.doing} ({one_line(error)[:200]}). Halve per_device_train_batch_size "
            f"({self.trainer.args.per_device_train_batch_size}) and double gradient_accumulation_steps "
            f"({self.trainer.args.gradient_accumulation_steps}), or lower max_completion_length "
            f"({self.trainer.args.max_completion_length})."
        )


# What a sample says


def _generation(args: "AdaGRPOConfig", sample: Sample) -> Iterator[Finding]:
    per_token = sample.seconds / max(sample.lengths.sum(), 1)
    yield Finding(
        "generation",
        f"{sample.lengths.size} completions of {sample.lengths.mean():.0f} tokens (longest {sample.lengths.max()}) in "
        f"{sample.seconds:.1f} s, {1 / max(per_token, 1e-9):.0f} tokens/s; reward functions {sample.reward_seconds:.1f} s",
        "Reward functions take most of the time."
        if sample.reward_seconds > sample.seconds / 2 and sample.seconds > 1
        else "",
    )
    share = sample.truncated.mean()
    advice = f"Raise max_completion_length ({args.max_completion_length}): what has no end has no answer."
    yield Finding("cut off", f"{share:.0%} of the completions", advice if share > MANY_TRUNCATED else "")


def _rewards(args: "AdaGRPOConfig", sample: Sample, names: list[str]) -> Iterator[Finding]:
    for name, values in zip(names, np.moveaxis(sample.rewards, -1, 0), strict=True):
        scored = values[~np.isnan(values)]
        if not scored.size:
            yield Finding(f"reward {name}", "no completion scored", "It returns None or NaN; look at its columns.")
            continue
        advice = "It is the same for all: nothing to learn from it here." if np.ptp(scored) == 0 else ""
        missing = f"; {1 - scored.size / values.size:.0%} not scored" if scored.size < values.size else ""
        yield Finding(
            f"reward {name}", f"{scored.min():.3g} to {scored.max():.3g}, mean {scored.mean():.3g}{missing}", advice
        )
    if len(names) > 1 and args.exit_reward is None and not args.is_plain_grpo:
        yield Finding(
            "signal", f"the weighted total of {' and '.join(names)}", "Name the one that decides: exit_reward."
        )


def _difficulty(args: "AdaGRPOConfig", sample: Sample) -> Iterator[Finding]:
    scored = ~np.isnan(sample.signals)
    positives = (np.where(scored, sample.signals, -np.inf) > args.positive_threshold).sum(axis=1)
    draws = scored.sum(axis=1)
    if not draws.any():
        yield Finding("pass rate", "unknown, nothing was scored", "Correct the reward functions.", True)
        return
    signals = sample.signals[scored]
    crossing = signals.min() <= args.positive_threshold < signals.max()
    advice = ""
    if not crossing and np.ptp(signals) > 0:
        advice = (
            f"The signal ranges from {signals.min():.3g} to {signals.max():.3g} and never crosses positive_threshold "
            f"({args.positive_threshold:g}): set it between, or see whether the prompts are of the right difficulty."
        )
    elif not crossing:
        advice = f"All of them {'pass: harder' if positives.any() else 'fail: easier'} prompts, or other rewards."
    per_prompt = " ".join(f"{k}/{n}" for k, n in zip(positives[:16], draws[:16], strict=True))
    found = f"{positives.sum() / draws.sum():.2f} of {draws.sum()} rollouts; by prompt {per_prompt}"
    yield Finding("pass rate", found, advice)
    if 0 < positives.sum() < draws.sum():
        yield _planned(args, positives, draws)


def _planned(args: "AdaGRPOConfig", positives: np.ndarray, draws: np.ndarray) -> Finding:
    """What `ada-trl plan` makes of so few prompts: the share with a gradient and the rollouts, now and at its best."""
    from .plan import describe, least_noise, recommend, settings
    from .planning.observed import prompts_from_counts

    prompts = prompts_from_counts("the sample", positives.astype(float), draws.astype(float))
    lost, rollouts = _expected(args, prompts.distribution)
    size = max(args.num_generations, 2)
    found = settings(prompts, num_generations=size, budget=max(rollouts, size), max_samples=max(32, size))
    budget = max(rollouts, size)
    best, quietest = recommend(found, budget)[0], least_noise(found, budget)
    advice = f"The least noise for a rollout has {quietest.method} ({describe(quietest)})."
    if args.baseline == "pool":
        advice = f"For as many {best.method} ({describe(best)}) has {best.with_gradient:.0%}. {advice}"
    return Finding(
        "plan",
        f"{1 - lost:.0%} of the prompts would have a gradient, for {rollouts:.1f} rollouts each",
        f"{advice} From {len(draws)} prompts only: `ada-trl plan` takes a record.",
    )


def _expected(args: "AdaGRPOConfig", distribution) -> tuple[float, float]:
    """Share of the prompts without a gradient and rollouts per prompt, of the run's own settings."""
    from .planning.outcomes import sequential_outcome, single_round_outcome

    rates, weights = distribution
    if args.samples_in_rounds:
        sampling = {"samples_per_round": args.samples_per_round, "max_rounds": args.max_rounds}
        outcome = sequential_outcome(rates, args.exit_condition, **sampling)
    else:  # Est hands out as many on average
        outcome = single_round_outcome(rates, args.num_generations)
    lost = 0.0 if args.baseline == "posterior" else float(weights @ outcome.zero_signal)
    return lost, float(weights @ outcome.rollouts)


def _forecast(trainer: "AdaGRPOTrainer", sample: Sample, update_seconds: float) -> Finding:
    """Of one generation and the update on it. The sample is smaller than a step, so generation is at most that slow."""
    from .planning.difficulty import fit_pass_rate_distribution

    args = trainer.args
    scored = ~np.isnan(sample.signals)
    positives = (np.where(scored, sample.signals, -np.inf) > args.positive_threshold).sum(axis=1)
    rollouts = float(args.num_generations)
    if scored.any():
        _, rollouts = _expected(args, fit_pass_rate_distribution(positives, scored.sum(axis=1)))
    prompts = args.generation_batch_size // args.num_generations
    drawn = prompts * rollouts
    per_process = drawn / trainer.accelerator.num_processes
    seconds = sample.seconds * per_process / (sample.lengths.size / trainer.accelerator.num_processes)
    return Finding(
        "forecast",
        f"a step of {prompts} prompts: {drawn:.0f} rollouts, {drawn * sample.lengths.mean():.0f} tokens, at most "
        f"{seconds:.1f} s of sampling and {update_seconds:.1f} s of update",
    )


# Memory


def _out_of_memory() -> "type[BaseException]":
    import torch

    return torch.OutOfMemoryError


def _reset_peak_memory(trainer: "AdaGRPOTrainer") -> None:
    import torch

    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_memory(trainer: "AdaGRPOTrainer") -> Finding:
    import torch

    device: torch.device = trainer.accelerator.device
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(device).total_memory
        advice = "Little is left: halve per_device_train_batch_size." if peak > 0.95 * total else ""
        return Finding("peak memory", f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB of the GPU", advice)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Finding("peak memory", f"{peak / 2**30:.1f} GiB of this process, without a GPU")


# The command


@contextmanager
def throwaway(args: "AdaGRPOConfig") -> Iterator[None]:
    """Let a configuration be for one step that leaves nothing: a directory of its own, no reports, no checkpoints."""
    given = Path(args.output_dir)
    missing = [path for path in (given, *given.parents) if not path.exists()]
    directory = given / f".check-{os.environ.get('MASTER_PORT', os.getpid())}"  # the same on every process
    if Path(args.vllm_weight_sync_dir) == given / "vllm_weight_sync":
        args.vllm_weight_sync_dir = str(directory / "vllm_weight_sync")  # where the server sees it too
    args.output_dir, args.max_steps, args.logging_steps = str(directory), 1, 1
    args.report_to, args.push_to_hub, args.log_completions, args.disable_tqdm = [], False, False, True
    args.load_best_model_at_end = False
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # every process, since the last one may have made it anew
        with suppress(OSError):  # not empty: another process's, or a recipe has made its data there meanwhile
            for path in missing:
                path.rmdir()


def report(findings: list[Finding]) -> str:
    """The findings as a table."""
    rows = [[cell.replace("|", "/") for cell in finding[:3]] for finding in findings]
    return markdown_table(["Checked", "Found", "Recommended"], rows)


def main(args: list[str] | None = None) -> None:
    """Parse a command line (default: `sys.argv`), check, print what was found."""
    from .train import build_trainer, parse_args

    script_args, training_args, model_args = parse_args(args, command="check")
    evaluates = "no evaluation" if training_args.eval_strategy == "no" else "an evaluation set"
    with throwaway(training_args):
        with explained():
            trainer = build_trainer(script_args, training_args, model_args)
        _be_quiet(trainer)
        check = Preflight(trainer)
        sizes = f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.3g} M parameters"
        data = f"{len(trainer.train_dataset)} rows" if hasattr(trainer.train_dataset, "__len__") else "a stream"
        check.findings.append(Finding("model and data", f"{sizes}, {data}, {evaluates}"))
        try:
            check.run()
        except BaseException:
            check.findings.append(Finding(f"**failed** in {check.doing}", "see the error below"))
            raise
        finally:
            if trainer.accelerator.is_main_process:
                print(report(check.findings), flush=True)
    if any(finding.is_fatal for finding in check.findings):
        raise SystemExit(1)


def _be_quiet(trainer: "AdaGRPOTrainer") -> None:
    """No evaluation and no checkpoint within the one step, and no log of it."""
    from transformers import PrinterCallback
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    args = trainer.args
    args.eval_strategy, args.save_strategy, args.eval_on_start = IntervalStrategy.NO, SaveStrategy.NO, False
    trainer.remove_callback(PrinterCallback)


if __name__ == "__main__":
    start("check")
