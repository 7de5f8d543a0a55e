"""
Overhead of adaptive sampling, excluding the generation of additional rollouts.

`python -m benchmarks.speed.overhead` prints

1. the CPU time of the sampling logic of a step of 4,096 and of 16,384 rollouts;
2. time per step and peak memory of variants relative to the first one of their group, alternating in separate
   processes: `adaptive_sampling="uniform"` and `GRPOTrainer`; Est with the value head and with success counts; the
   batch baseline with one rollout per prompt, and GRPO n=4 with as many rows, on the arithmetic task and with prompts
   of 64 tokens. Ratios are of the fastest steps, which are least affected by other load on the machine, and of the
   medians.
"""

import argparse
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import (
    Candidate,
    Scoring,
    Slot,
    SlotRule,
    batch_advantages,
    collect_rollouts,
    first_round_metrics,
    pool_advantages,
    sample_slots,
    sampled_prompts,
    sampling_metrics,
    select_groups,
)
from recipes.arithmetic.task import build_model, build_tokenizer, exact_match, problems

from ..common import QUIET


class Variant(NamedTuple):
    """Options of a trainer, and what it trains on."""

    options: dict[str, Any]
    rows: int = 128
    prompt_tokens: int | None = None  # of random prompts instead of sums
    trainer: tuple[type, type] = (AdaGRPOConfig, AdaGRPOTrainer)


UNIFORM = {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4}
EST = {"adaptive_sampling": "est", "num_generations": 4}
GROUPS = (
    {
        "GRPOTrainer": Variant({"num_generations": 4}, rows=64, trainer=(GRPOConfig, GRPOTrainer)),
        "uniform": Variant(UNIFORM, rows=64),
    },
    {
        "Est (EMA)": Variant(EST | {"pass_rate_estimator": "ema"}),
        "Est (value head)": Variant(EST | {"pass_rate_estimator": "value"}),
    },
    {"GRPO n=4": Variant(UNIFORM), "batch baseline, n=1": Variant({"baseline": "batch"})},
    {
        "GRPO n=4, 64 tokens": Variant(UNIFORM, 64, 64),
        "batch baseline, n=1, 64 tokens": Variant({"baseline": "batch"}, 64, 64),
    },
)


def host_seconds(baseline: str, num_prompts: int, samples_per_round: int, max_rounds: int) -> float:
    """
    CPU seconds of a step's sampling logic, without generation and rewards: rounds, selection, advantages and metrics.
    With the baseline `"pool"` it is a step of Seq-balance in which (almost) no prompt meets the exit condition.
    """
    rng, requests = np.random.default_rng(0), []
    quota = 2 if baseline == "pool" else 0

    def collect():
        rewards = (rng.random((len(requests), samples_per_round, 1)) < 0.001).astype(float)
        received = [(*request, of_round) for request, of_round in zip(requests, rewards, strict=True)]
        requests.clear()
        return received

    started = time.process_time()
    rule, scoring = SlotRule(quota, quota, max_rounds), Scoring(weights=(1.0,), threshold=0.7)
    slots = [Slot(rule, scoring, [Candidate(i)], samples_per_round) for i in range(num_prompts)]
    sample_slots(slots, lambda *request: requests.append(request), collect)
    prompts = sampled_prompts(slots)
    rollouts = collect_rollouts(slots, prompts)
    if baseline == "pool":
        selected = select_groups(rollouts, 4, [(0, i) for i in range(num_prompts)])
        advantage_N = pool_advantages(rollouts)
    else:
        selected, advantage_N = np.arange(len(rollouts)), batch_advantages(rollouts)
    is_on_distribution_P = np.array([prompt.is_on_distribution for prompt in prompts])
    sampling_metrics(
        rollouts,
        selected,
        advantage_N,
        samples_per_round=samples_per_round,
        num_generations=min(samples_per_round, 4),
        is_on_distribution_P=is_on_distribution_P,
    )
    first_round_metrics(
        rollouts,
        ["reward"],
        rollouts_per_round=samples_per_round,
        is_on_distribution_P=is_on_distribution_P,
        each_prompt_once=False,
    )
    return time.process_time() - started


HOST_WORK = {
    "batch baseline, 4,096 prompts × 1 rollout": ("batch", 4096, 1, 1),
    "Seq-balance, 512 prompts × 1 round of 8": ("pool", 512, 8, 1),
    "Seq-balance, 512 prompts × 4 rounds of 8": ("pool", 512, 8, 4),
}


def print_host_work(repeats: int = 10) -> None:
    runs = [[host_seconds(*step) for step in HOST_WORK.values()] for _ in range(repeats)]
    fastest = [min(seconds) for seconds in zip(*runs, strict=True)]
    print(f"Sampling logic of a step (fastest of {repeats}), and relative to the first one")
    for name, seconds in zip(HOST_WORK, fastest, strict=True):
        print(f"  {name}: {1e3 * seconds:.1f} ms of CPU, {seconds / fastest[0]:.2f}")


class CpuSeconds(TrainerCallback):
    """Records the CPU time of each step, including generation."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.process_time() - self.started)


def even(completions, **kwargs):
    """A reward of 1 for about half of the completions of an untrained model."""
    return [float(sum(map(ord, completion)) % 2 == 0) for completion in completions]


def train(variant: Variant, steps: int, queue) -> None:
    """Put CPU seconds by step, without the first two steps, and the peak memory."""
    torch.set_num_threads(1)
    config_class, trainer_class = variant.trainer
    tokenizer, recorder = build_tokenizer(), CpuSeconds()
    reward, prompts = exact_match, problems(1024, seed=0)
    if variant.prompt_tokens:
        rng = random.Random(0)
        texts = ["".join(rng.choices("0123456789", k=variant.prompt_tokens)) for _ in range(2048)]
        reward, prompts = even, Dataset.from_dict({"prompt": texts})
    with tempfile.TemporaryDirectory() as directory:
        args = config_class(
            directory,
            per_device_train_batch_size=variant.rows,
            max_completion_length=6,
            max_steps=steps,
            bf16=False,
            use_cpu=True,
            **QUIET,
            **variant.options,
        )
        model = build_model(tokenizer)
        trainer = trainer_class(model, reward, args, prompts, processing_class=tokenizer, callbacks=[recorder])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    queue.put((recorder.seconds[2:], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def compare(group: dict[str, Variant], steps: int, repeats: int) -> None:
    context = multiprocessing.get_context("fork")
    seconds, memory = ({name: [] for name in group} for _ in range(2))
    for _ in range(repeats):
        for name, variant in group.items():
            queue = context.Queue()
            process = context.Process(target=train, args=(variant, steps, queue))
            process.start()
            own, peak = queue.get()
            process.join()
            seconds[name] += own
            memory[name].append(peak)
    base, *others = group
    print(f"\n{base}: {1e3 * min(seconds[base]):.1f} ms of CPU per step (fastest of {repeats} runs of {steps} steps)")
    for other in others:
        fastest = min(seconds[other]) / min(seconds[base])
        median = statistics.median(seconds[other]) / statistics.median(seconds[base])
        peak = min(memory[other]) / min(memory[base])
        print(f"  {other}: {fastest:.3f} (fastest), {median:.3f} (median); memory {peak:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print_host_work()
    for group in GROUPS:
        compare(group, args.steps, args.repeats)


if __name__ == "__main__":
    main()
