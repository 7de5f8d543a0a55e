"""Callbacks that describe a run: a line at the start, one line per logging step. docs/metrics.md documents all metrics."""

import logging
import math
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..sampling.strategies import pluralize
from .ada_grpo_config import AdaGRPOConfig


GRPO_REFERENCE_N = 4  # rollouts per prompt of the GRPO that a run is set beside


def summary(args: AdaGRPOConfig) -> str:
    """
    Which prompts a step asks, how many rollouts each gets, what these are compared with, how much the prompt counts, and
    how many prompts GRPO with 4 rollouts would ask with as many rows.
    """
    rows = args.generation_batch_size
    prompts = rows // args.num_generations
    step = "step" if args.steps_per_generation == args.gradient_accumulation_steps else "generation"
    text = f"Each {step}: {pluralize(prompts, 'prompt')}{_order(args)}; {args.sampling_strategy.describe()}; {_baseline(args)}; {_weight(args)}. "
    text += f"{rows} rows are trained on{', while the server generates the next' * args.max_staleness}."
    if prompts != rows // GRPO_REFERENCE_N:
        text += (
            f" GRPO with {GRPO_REFERENCE_N} rollouts has {pluralize(rows // GRPO_REFERENCE_N, 'prompt')} in as many."
        )
    return text


def _order(args: AdaGRPOConfig) -> str:
    if args.prompt_oversampling > 1:
        return f", one of {args.prompt_oversampling} candidates each"
    return ", another for one without contrast" if args.zero_variance_groups == "resample" else ""


def _baseline(args: AdaGRPOConfig) -> str:
    return {
        "pool": "compared with the mean of the prompt's rollouts",
        "posterior": "compared with what was expected of the prompt",
        "batch": "compared with the mean of all other rollouts",
    }[args.baseline]


def _weight(args: AdaGRPOConfig) -> str:
    names = {
        "none": "all prompts count the same",
        "inverse_sqrt": "a prompt counts 1/√p",
        "inverse": "a prompt counts 1/p",
    }
    return names.get(args.prompt_weighting, f"prompt_weighting={args.prompt_weighting!r}")


LARGEST_LINE = 100  # characters
# By what is known of a mode. Without these, metrics of different modes can be laid over each other: the mean number of
# rollouts and the share of prompts that teach nothing are logged by all.
_ALL_ALIKE = [f"ada/samples_per_prompt/{name}" for name in ("min", "max")] + [
    "ada/rounds/mean",
    "ada/active_prompts/round_1",
]
_ONE_MEAN = [f"ada/reward/{name}" for name in ("trained", "macro_mean", "micro_mean")]
_ALONE = [
    "frac_reward_zero_std",
    "ada/frac_exit_condition_met",
    "ada/frac_reward_zero_std/first_round",
    "ada/frac_recovered_groups",
]
_ALONE += ["ada/frac_missing_positives/round_1", "ada/frac_missing_negatives/round_1"]
_ALONE += [f"ada/{name}" for name in ("frac_all_correct", "frac_all_wrong", "pass_rate/p10", "pass_rate/p90")]


def constant_metrics(args: AdaGRPOConfig) -> set[str]:
    """Names of metrics that never vary where `args` run, or are another one's in every step."""
    names = []
    if (
        not args.sampling_strategy.is_sequential
        and not args.sampling_strategy.uses_estimated_budgets
        and not args.resamples_prompts
    ):
        names += [*_ALL_ALIKE, *_ONE_MEAN, "ada/tokens/discarded"]
        if args.num_generations == 1:
            names += _ALONE
    if args.prompt_weighting == "none":
        names += ["ada/prompt_weight/mean", "ada/prompt_weight/max"]
    if args.baseline == "batch":  # functions of the number of rollouts
        names += [
            f"ada/baseline/{name}"
            for name in ("explained_variance", "explained_variance_leave_one_out", "pseudo_counts")
        ]
    return set(names)


def console_line(logs: dict[str, Any], args: AdaGRPOConfig, step: int) -> str:
    """At most 100 characters of what matters in the mode that runs."""
    if "train_runtime" in logs:
        return f"{step} steps in {_duration(logs['train_runtime'])}"
    evaluated = any(name.startswith("eval_") for name in logs)
    shown = {"reward": ("reward", ".3f"), "length": ("completions/mean_length", "length")}
    if not evaluated:
        signal = {
            "pool": {"zero signal": ("ada/frac_zero_advantage_groups", ".2f")},
            "posterior": {"explained": ("ada/baseline/explained_variance", ".2f")},
            "batch": {},
        }[args.baseline]
        if args.sampling_strategy.is_sequential or args.resamples_prompts:
            signal["rollouts"] = ("ada/samples_per_prompt/mean", ".1f")
        shown = {"reward": shown["reward"], **signal, "entropy": ("entropy", ".2f"), "length": shown["length"]}
        shown |= {"tokens": ("num_tokens", "large"), "seconds": ("step_time", ".3g")}
    parts = {}
    for label, (name, form) in shown.items():
        value = logs.get(f"eval_{name}" if evaluated else name)
        if value is not None and not math.isnan(value):
            parts[label] = f"{label} {_formatted(value, form)}"
    start = f"step {step}{', evaluation' if evaluated else ''}: "
    for least in ("entropy", "seconds", "length"):
        if len(start + ", ".join(parts.values())) > LARGEST_LINE:
            parts.pop(least, None)
    return start + ", ".join(parts.values())


def _formatted(value: float, form: str) -> str:
    if form == "length":
        form = ".0f" if value >= 100 else ".1f"
    elif form == "large":
        return _short(value)
    return f"{value:{form}}"


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class CompactProgressCallback(ProgressCallback):
    """The progress bar, with a line per logging step instead of all metrics."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(console_line(logs, args, state.global_step))


class CompactPrinterCallback(PrinterCallback):
    """The same without a bar, for `disable_tqdm=True`."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero:
            print(console_line(logs, args, state.global_step))


class RunSummaryCallback(TrainerCallback):
    """Says at the start of a training what will run."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
            print(summary(args), flush=True)


def show_one_line(trainer) -> None:
    """Put these callbacks in the place of transformers' own, where they are used: a notebook's table stays."""
    for theirs, ours in ((ProgressCallback, CompactProgressCallback), (PrinterCallback, CompactPrinterCallback)):
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [ours() if type(callback) is theirs else callback for callback in callbacks]
    trainer.callback_handler.callbacks.insert(0, RunSummaryCallback())
