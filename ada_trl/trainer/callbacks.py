"""
Console output: a summary at the start of training, and one line per logging step.

The line replaces the dictionary of all metrics that transformers prints. The environment variable `ADA_TRL_CONSOLE=trl` brings
that back, for scripts that parse it, and callbacks passed to the trainer in `callbacks` are never replaced. Trackers and
`trainer.state.log_history` get all metrics either way, except for those that cannot vary in the mode of the run
([`constant_metrics`]).
"""

import logging
import math
import os
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from .ada_grpo_config import AdaGRPOConfig
from .run_summary import pluralize, summary, warn_at_start


CONSOLE_VARIABLE = "ADA_TRL_CONSOLE"
LARGEST_LINE = 120  # characters

# Metrics that cannot vary in some modes. `ada/samples_per_prompt/mean` and `ada/frac_zero_advantage_groups` are logged in all
# modes, so that runs of different modes can be compared.
_ROLLOUT_NUMBERS = [
    "ada/samples_per_prompt/min",
    "ada/samples_per_prompt/max",
    "ada/rounds/mean",
    "ada/active_prompts/round_1",
]
_POOL_MEANS = [f"ada/reward/{name}" for name in ("trained", "macro_mean", "micro_mean")]
_UNDEFINED_FOR_SINGLE_ROLLOUTS = [
    "frac_reward_zero_std",
    "ada/frac_exit_condition_met",
    "ada/frac_reward_zero_std/first_round",
    "ada/frac_recovered_groups",
    "ada/frac_missing_positives/round_1",
    "ada/frac_missing_negatives/round_1",
    "ada/frac_all_correct",
    "ada/frac_all_wrong",
    "ada/pass_rate/p10",
    "ada/pass_rate/p90",
]


def constant_metrics(args: AdaGRPOConfig) -> set[str]:
    """Return the names of the metrics that are constant, or equal to another metric in every step, in the mode of `args`."""
    names = []
    if args.adaptive_sampling == "uniform" and not args.resamples_prompts:
        names += [*_ROLLOUT_NUMBERS, *_POOL_MEANS]
        if not args.mask_truncated_completions and args.zero_variance_groups != "mask":
            names.append("ada/tokens/discarded")
        if args.num_generations == 1:
            names += _UNDEFINED_FOR_SINGLE_ROLLOUTS
    if args.adaptive_sampling == "est":  # groups of different sizes are not comparable with GRPO's
        names += ["frac_reward_zero_std", "ada/frac_reward_zero_std/first_round", "ada/frac_recovered_groups"]
    if args.prompt_weighting == "none":
        names += ["ada/prompt_weight/mean", "ada/prompt_weight/max"]
    return set(names)


# Labels in the order in which they are left out of a line that is too long. The means of the reward functions follow, from
# the last one on, and then the rest of these.
_LEAST_IMPORTANT = ("seconds", "entropy", "length", "tokens in+out")
_MORE_IMPORTANT = ("rollouts", "explained variance", "KL")


def console_line(logs: dict[str, Any], args: AdaGRPOConfig, step: int) -> str:
    """Format the most important `logs` of a step in at most 120 characters. Metrics that were not logged are left out."""
    if "train_runtime" in logs:
        return f"{pluralize(step, 'step')} in {_duration(logs['train_runtime'])}"
    is_evaluation = any(name.startswith("eval_") for name in logs)
    place = f"step {step}"
    if is_evaluation:
        logs = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        # If there are several evaluation sets, transformers puts the name of the set before its metrics; TRL does not.
        dataset = next((name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")), "")
        logs = {name.removeprefix(f"{dataset}_"): value for name, value in logs.items()}
        place += f", evaluation of {dataset}" if dataset else ", evaluation"
    reward_functions = _reward_functions(logs)
    columns = {"reward": ("reward", ".3f")}
    columns |= {name: (f"rewards/{name}/mean", ".3f") for name in reward_functions}
    columns |= {"KL": ("kl", ".3g"), "loss": ("loss", ".3g")}
    if not is_evaluation:
        columns["zero advantage"] = ("ada/frac_zero_advantage_groups", ".2f")
        if args.is_sequential or args.resamples_prompts:
            columns["rollouts"] = ("ada/samples_per_prompt/mean", ".1f")
        columns["entropy"] = ("entropy", ".2f")
    columns["length"] = ("completions/mean_length", "length")
    if not is_evaluation:
        columns |= {"tokens in+out": ("num_tokens", "large"), "seconds": ("step_time", ".3g")}

    parts = {}
    for label, (name, form) in columns.items():
        value = logs.get(name)
        # A callback may have replaced it. NaN is a missing value, except for the loss.
        if isinstance(value, int | float) and (not math.isnan(value) or label == "loss"):
            parts[label] = f"{label} {_formatted(value, form)}"
    start = f"{place}: "
    for label in (*_LEAST_IMPORTANT, *reversed(reward_functions), *_MORE_IMPORTANT):
        if len(start + ", ".join(parts.values())) > LARGEST_LINE:
            parts.pop(label, None)
    return start + (", ".join(parts.values()) or str(logs))  # a log of the user's own


def _reward_functions(logs: dict[str, Any]) -> list[str]:
    """Return the names of the reward functions if there are several: the mean of a single one is close to the reward."""
    names = [
        name[len("rewards/") : -len("/mean")]
        for name in logs
        if name.startswith("rewards/") and name.endswith("/mean")
    ]
    return names if len(names) > 1 else []


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
    """Progress bar with one line per logging step instead of the dictionary of all metrics."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(console_line(logs, args, state.global_step))


class CompactPrinterCallback(PrinterCallback):
    """The same line without a progress bar, for `disable_tqdm=True`."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero:
            print(console_line(logs, args, state.global_step))


class RunSummaryCallback(TrainerCallback):
    """
    Print what differs from GRPO when training starts, and warn of options with another effect than in GRPO.

    Args:
        trainer ([`AdaGRPOTrainer`]):
            Trainer whose training dataset is described.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        dataset = self.trainer.train_dataset
        num_prompts = len(dataset) if isinstance(dataset, Dataset) else None
        if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
            print(summary(args, num_prompts), flush=True)
        warn_at_start(args, num_prompts)


def show_one_line(trainer) -> None:
    """
    Add these callbacks to a trainer. The callback that transformers adds by itself is replaced, unless it is a notebook's table
    or `ADA_TRL_CONSOLE` is "trl".

    Raises:
        `ValueError`: if `ADA_TRL_CONSOLE` has another value.
    """
    console = os.environ.get(CONSOLE_VARIABLE, "compact")
    if console not in ("compact", "trl"):
        raise ValueError(
            f"The environment variable {CONSOLE_VARIABLE} ({console!r}) must be 'compact' or 'trl'. Unset it for one line per "
            "logging step, or set it to 'trl' for all metrics."
        )
    callbacks = trainer.callback_handler.callbacks
    theirs = PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
    ours = {PrinterCallback: CompactPrinterCallback, ProgressCallback: CompactProgressCallback}.get(theirs)
    indices = [index for index, callback in enumerate(callbacks) if type(callback) is theirs]
    if console == "compact" and ours is not None and indices:
        callbacks[indices[-1]] = ours()  # transformers adds its own after those that were passed to the trainer
    callbacks.insert(0, RunSummaryCallback(trainer))
