"""
Overhead of adaptive sampling, excluding the generation of additional rollouts.

`python -m benchmarks.speed.overhead` prints (1) the CPU time of the sampler for 512 prompts × 32 rollouts, (2) step time and
peak memory of `adaptive_sampling="uniform"` relative to `GRPOTrainer`, (3) of Est with the value head relative to Est with the EMA of counts, which
differ by the value head only, and (4) of retries relative to GRPO with the same number of rows, each alternating in one run.
Ratios are of the fastest steps, which are least affected by other load on the machine, and of the medians; "estimating" is
`ada/time/pass_rate_estimation` as a fraction of the step.
"""

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time

import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import ExitCondition, Rollout, eliminate, group_advantages, sampling_metrics, select_group
from recipes.arithmetic.task import build_model, build_tokenizer, exact_match, problems


def sampler_seconds(num_prompts: int, samples_per_round: int, max_rounds: int) -> tuple[float, int]:
    """CPU seconds without generation and rewards, where (almost) no prompt meets its exit condition, and the rollouts."""
    rng = np.random.default_rng(0)
    exit_condition = ExitCondition(2, 2)

    def sample_round(requests):
        rewards = (rng.random(len(requests)) < 0.001).astype(float).tolist()
        return [
            Rollout(index, reward, reward, (reward,)) for (_, index), reward in zip(requests, rewards, strict=True)
        ]

    started = time.process_time()
    pools = eliminate(
        num_prompts,
        sample_round,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        positive_threshold=0.7,
    )
    groups = [select_group(pool, 4, (0, 0, 0, i)) for i, pool in enumerate(pools)]
    advantages = [group_advantages(pool, group) for pool, group in zip(pools, groups, strict=True)]
    sampling_metrics(
        pools,
        groups,
        advantages,
        exit_condition,
        samples_per_round=samples_per_round,
        max_rounds=max_rounds,
        num_generations=4,
        weighting="inverse_sqrt",
        is_on_distribution=[True] * num_prompts,
    )
    return time.process_time() - started, sum(map(len, pools))


EST = {"adaptive_sampling": "est"}
RETRIES = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "max_rounds": 8}
VARIANTS = {  # trainer, configuration, rows per step, options
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, 64, {"num_generations": 4}),
    "uniform": (AdaGRPOTrainer, AdaGRPOConfig, 64, {"adaptive_sampling": "uniform", "scale_rewards": "group"}),
    "Est (EMA)": (AdaGRPOTrainer, AdaGRPOConfig, 128, EST | {"pass_rate_estimator": "ema"}),
    "Est (value head)": (AdaGRPOTrainer, AdaGRPOConfig, 128, EST | {"pass_rate_estimator": "value"}),
    "GRPO n=4": (AdaGRPOTrainer, AdaGRPOConfig, 128, {"adaptive_sampling": "uniform", "scale_rewards": "group"}),
    "retries n=4": (AdaGRPOTrainer, AdaGRPOConfig, 128, RETRIES),
    "retries n=1": (AdaGRPOTrainer, AdaGRPOConfig, 128, RETRIES | {"num_generations": 1}),
    "… EMA only": (
        AdaGRPOTrainer,
        AdaGRPOConfig,
        128,
        RETRIES | {"num_generations": 1, "pass_rate_estimator": "ema"},
    ),
}


def train(variant: str, steps: int, queue) -> None:
    torch.set_num_threads(1)
    trainer_class, config_class, rows, extra = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as directory:
        args = config_class(
            directory,
            per_device_train_batch_size=rows,
            max_completion_length=6,
            max_steps=steps,
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
            **extra,
        )
        tokenizer = build_tokenizer()
        trainer = trainer_class(
            build_model(tokenizer), exact_match, args, problems(1024, seed=0), processing_class=tokenizer
        )
        trainer.remove_callback(next(type(c) for c in trainer.callback_handler.callbacks if "Printer" in str(type(c))))
        trainer.train()
    steps = [logs for logs in trainer.state.log_history if "step_time" in logs][2:]
    seconds = [logs["step_time"] for logs in steps]
    shares = [logs.get("ada/time/pass_rate_estimation", 0.0) / logs["step_time"] for logs in steps]
    queue.put((seconds, shares, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def compare(base: str, *others: str, steps: int, repeats: int) -> None:
    context = multiprocessing.get_context("fork")
    seconds, shares, memory = ({name: [] for name in (base, *others)} for _ in range(3))
    for _ in range(repeats):
        for variant in seconds:
            queue = context.Queue()
            process = context.Process(target=train, args=(variant, steps, queue))
            process.start()
            step_seconds, step_shares, peak = queue.get()
            process.join()
            seconds[variant] += step_seconds
            shares[variant] += step_shares
            memory[variant].append(peak)
    rows = VARIANTS[base][2]
    print(f"\nStep time and peak memory, {repeats} interleaved runs of {steps} steps of {rows} rows")
    for variant in seconds:
        print(
            f"  {variant:12s} fastest {1e3 * min(seconds[variant]):7.1f} ms   "
            f"median {1e3 * statistics.median(seconds[variant]):7.1f} ms   "
            f"estimating {100 * statistics.median(shares[variant]):4.1f} % (median)   "
            f"peak {min(memory[variant]) / 1024:7.1f} MiB"
        )
    for other in others:
        fastest = min(seconds[other]) / min(seconds[base])
        median = statistics.median(seconds[other]) / statistics.median(seconds[base])
        peak = min(memory[other]) / min(memory[base])
        print(f"  {other} / {base}: step time {fastest:.3f} (fastest), {median:.3f} (median); memory {peak:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    runs = [sampler_seconds(512, 8, 4) for _ in range(10)]
    print(f"Sampler, 512 prompts, {runs[0][1]} rollouts: {1e3 * min(seconds for seconds, _ in runs):.1f} ms of CPU")
    for names in (
        ("GRPOTrainer", "uniform"),
        ("Est (EMA)", "Est (value head)"),
        ("GRPO n=4", "retries n=4", "retries n=1", "… EMA only"),
    ):
        compare(*names, steps=args.steps, repeats=args.repeats)


if __name__ == "__main__":
    main()
