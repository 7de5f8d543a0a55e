"""
What adaptive sampling costs on a vLLM server, and what leaving out the barrier saves.

`python -m benchmarks.speed.server` starts a real vLLM server with a tiny random model whose completion lengths are heavy-tailed
(median about 26 tokens, 1 % beyond 230), and takes steps of `--prompts` prompts in turn with

- Seq-balance, no barrier (the default),
- Seq-balance, no barrier and no rounds ahead of time ([`PatientTrainer`]),
- Seq-balance with a barrier per round ([`BarrierTrainer`]),
- GRPO with n = 4, and
- GRPO with the n that draws as many rollouts as Seq-balance did,

or, with `--stream`, at GRPO's rows, with prompts from the stream:

- GRPO with n = 4,
- the batch mean and the posterior baseline with one rollout per prompt,
- refill, without and with a barrier per round,
- rounds across steps, four rollouts per prompt and one.

It ends with a simulation of the other extreme, a server with capacity to spare, where a decoding step takes the same
time whatever the batch, as on a GPU that is not full: this machine's server is bound by throughput instead.

The learning rate is 0, so that all see the same policy; weights are still sent at every step (`vllm_weight_sync="disk"`).
Rewards take `--reward_ms` per rollout. Ratios are of mean step times; the quotients of the single repeats follow.
"""

import argparse
import heapq
import socket
import tempfile
import time
import zlib
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.core import ExitCondition, Rollout, eliminate_async
from ada_trl.sampling.batch_slots import BatchSlot, QueuedPrompt, SlotConfig, slot_done
from ada_trl.sampling.rollout_sampler import RolloutSampler
from recipes.arithmetic.task import build_tokenizer, problems
from recipes.arithmetic.vllm_server import running_server


MAX_TOKENS = 300
REWARD_SECONDS = 0.0


def heavy_tailed_model(directory: Path, hidden: int = 64, layers: int = 2) -> None:
    set_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,  # vLLM's CPU attention needs heads of 32
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def reward(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """Right if the first character is in a set that the prompt decides on: pass rates spread over prompts."""
    time.sleep(REWARD_SECONDS * len(prompts))
    numbers = [zlib.crc32(prompt.encode()) for prompt in prompts]
    first = [ord(completion[0]) if completion else 0 for completion in completions]
    return [float((character * 7 + n) % 12 < n // 12 % 12) for n, character in zip(numbers, first, strict=True)]


class BarrierTrainer(AdaGRPOTrainer):
    """Completes each round for all of a process's prompts before the next begins, for comparison."""

    differs = {"barrier": True}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        build = self._multi_round.build_sampler

        def build_different(plan) -> RolloutSampler:
            sampler = build(plan)
            vars(sampler).update(self.differs)
            return sampler

        self._multi_round.build_sampler = build_different


class PatientTrainer(BarrierTrainer):
    """Asks for nothing ahead of time, for comparison."""

    differs = {"speculate_below": 0}


def train(
    url: str,
    model: Path,
    prompts: int,
    num_generations: int,
    steps: int,
    seed: int,
    trainer_class: type[AdaGRPOTrainer] = AdaGRPOTrainer,
    **options,
) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        args = AdaGRPOConfig(
            directory,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_weight_sync="disk",
            num_generations=num_generations,
            per_device_train_batch_size=prompts * num_generations,
            max_completion_length=MAX_TOKENS,
            learning_rate=0.0,
            max_steps=steps,
            logging_steps=1,
            seed=seed,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
            **options,
        )
        trainer = trainer_class(str(model), reward, args, problems(1024, seed=0))
        trainer.remove_callback(next(type(c) for c in trainer.callback_handler.callbacks if "Printer" in str(type(c))))
        trainer.train()
    return [logs for logs in trainer.state.log_history if "step_time" in logs][1:]  # the first step warms up


def report(name: str, logs: list[dict]) -> str:
    figures = {
        "step": mean(step["step_time"] for step in logs),
        "rollouts/prompt": mean(step["ada/samples_per_prompt/mean"] for step in logs),
        "zero signal": mean(step["ada/frac_zero_advantage_groups"] for step in logs),
    }
    line = f"  {name:36s}" + "".join(f"{label} {value:6.2f}   " for label, value in figures.items())
    if "ada/time/idle" in logs[0]:
        sampling = sum(step["ada/time/generate"] + step["ada/time/reward"] for step in logs)
        idle = sum(step["ada/time/idle"] for step in logs) / sampling
        hidden = sum(step["ada/time/reward_overlapped"] for step in logs) / sum(
            step["ada/time/reward"] for step in logs
        )
        line += f"server idle {idle:.1%} of sampling   reward time hidden {hidden:.1%}"
    return line


def compare_stream(url: str, model: Path, prompts: int, steps: int, repeats: int) -> None:
    grpo = {"adaptive_sampling": "uniform"}
    refill = grpo | {"zero_variance_groups": "resample", "max_rounds": 8}
    across = {"adaptive_sampling": "seq-pos", "baseline": "posterior", "max_rounds": 8}
    settings = {  # rollouts per prompt, class, options
        "GRPO n=4": (4, AdaGRPOTrainer, grpo),
        "Batch n=1": (1, AdaGRPOTrainer, {"baseline": "batch"}),
        "Posterior n=1": (1, AdaGRPOTrainer, {"baseline": "posterior"}),
        "Refill": (4, AdaGRPOTrainer, refill),
        "Refill, barrier per round": (4, BarrierTrainer, refill),
        "Rounds across steps, n=4": (4, AdaGRPOTrainer, across),
        "Rounds across steps, n=1": (1, AdaGRPOTrainer, across),
    }
    runs: dict[str, list[list[dict]]] = {name: [] for name in settings}
    for seed in range(repeats):
        for name, (n, trainer_class, options) in settings.items():
            runs[name].append(train(url, model, prompts * 4 // n, n, steps, seed, trainer_class, **options))
    print(f"\n{repeats} interleaved repeats of {steps - 1} steps of {prompts * 4} rows, seconds")
    for name, logs in runs.items():
        print(report(name, [step for run in logs for step in run]))
    print_ratios(
        runs,
        (
            ("Batch n=1", "GRPO n=4"),
            ("Posterior n=1", "GRPO n=4"),
            ("Refill", "Refill, barrier per round"),
            ("Rounds across steps, n=4", "GRPO n=4"),
            ("Rounds across steps, n=1", "GRPO n=4"),
        ),
    )


def print_ratios(runs: dict[str, list[list[dict]]], pairs) -> None:
    """Of mean step times, and in brackets of the single repeats."""

    def seconds(run: list[dict]) -> float:
        return mean(step["step_time"] for step in run)

    for one, other in pairs:
        ratio = mean(map(seconds, runs[one])) / mean(map(seconds, runs[other]))
        single = [seconds(a) / seconds(b) for a, b in zip(runs[one], runs[other], strict=True)]
        print(f"  {one} / {other}: step time {ratio:.2f} ({', '.join(f'{r:.2f}' for r in single)})")


def compare(url: str, model: Path, prompts: int, steps: int, repeats: int) -> None:
    per_prompt, patient, barrier, grpo, same = (
        "Seq-balance",
        "Seq-balance, nothing ahead of time",
        "Seq-balance, barrier per round",
        "GRPO n=4",
        "GRPO, as many rollouts",
    )
    runs: dict[str, list[list[dict]]] = {per_prompt: [], patient: [], barrier: [], grpo: [], same: []}
    for seed in range(repeats):
        runs[per_prompt].append(train(url, model, prompts, 4, steps, seed))
        runs[patient].append(train(url, model, prompts, 4, steps, seed, PatientTrainer))
        runs[barrier].append(train(url, model, prompts, 4, steps, seed, BarrierTrainer))
        runs[grpo].append(train(url, model, prompts, 4, steps, seed, adaptive_sampling="uniform"))
        drawn = mean(step["ada/samples_per_prompt/mean"] for run in runs[per_prompt] for step in run)
        runs[same].append(train(url, model, prompts, round(drawn), steps, seed, adaptive_sampling="uniform"))
    print(f"\n{repeats} interleaved repeats of {steps - 1} steps of {prompts} prompts, seconds")
    for name, logs in runs.items():
        print(report(name, [step for run in logs for step in run]))

    pairs = ((per_prompt, barrier), (patient, barrier), (per_prompt, grpo), (per_prompt, same), (barrier, same))
    print_ratios(runs, pairs)


def simulated_seconds(num_prompts: int, seed: int, refill: bool = False, **options) -> tuple[float, float]:
    """
    Decoding steps until all prompts are done on a server with capacity to spare, and tokens generated: of Seq-balance with 8
    rollouts per round, or of `refill` with 4 and up to 7 replacements. Lengths are lognormal (median 26, σ = 1.2), cut at 300
    as above; pass rates are uniform.
    """
    rng = np.random.default_rng(seed)
    size = 4 if refill else 8
    pass_rates = rng.random((num_prompts, 8))  # of a prompt, and of those in its place
    now, tokens, under_way = 0.0, 0.0, []

    def submit(prompt: int, first_draw: int) -> None:
        drawn = np.minimum(26 * np.exp(1.2 * rng.standard_normal(size)), MAX_TOKENS)
        heapq.heappush(under_way, (now + drawn.max(), prompt, first_draw))
        nonlocal tokens
        tokens += drawn.sum()

    def collect() -> list[tuple[int, list[Rollout]]]:
        nonlocal now
        now, prompt, first_draw = heapq.heappop(under_way)
        p = pass_rates[prompt, first_draw // size if refill else 0]
        rewards = (rng.random(size) < p).astype(float).tolist()
        return [(prompt, first_draw, [Rollout(first_draw + i, r, r) for i, r in enumerate(rewards)])]

    loop = {"samples_per_round": size, "positive_threshold": 0.7, "max_in_flight": num_prompts, **options}
    if refill:
        config = SlotConfig(
            num_prompts, 8, ExitCondition(1, 1), max_rounds=1, fixed_budget=False, positive_threshold=0.7
        )
        loop["pools"] = [BatchSlot(config, [QueuedPrompt(i) for i in range(8)], size) for _ in range(num_prompts)]
        eliminate_async(num_prompts, submit, collect, slot_done, max_rounds=8, **loop)
    else:
        eliminate_async(num_prompts, submit, collect, ExitCondition(2, 2), max_rounds=4, **loop)
    return now, tokens


def simulate(repeats: int = 200) -> None:
    print(f"\nSimulated server with capacity to spare: time and tokens over those with a barrier, {repeats} steps")
    for num_prompts in (8, 32, 128, 512):
        kinds = {
            "barrier": {"barrier": True},
            "none": {},
            "rounds ahead of time": {"speculate_below": num_prompts // 4},
            "refill, barrier": {"refill": True, "barrier": True},
            "refill": {"refill": True},
        }
        results = {
            kind: np.mean([simulated_seconds(num_prompts, seed, **options) for seed in range(repeats)], axis=0)
            for kind, options in kinds.items()
        }
        ratios = [
            f"{kind}: time {t:.2f} tokens {k:.2f}"
            for kind, (t, k) in (
                (kind, value / results["refill, barrier" if "refill" in kind else "barrier"])
                for kind, value in results.items()
                if "barrier" not in kind
            )
        ]
        print(f"  {num_prompts:4d} prompts   {'   '.join(ratios)}")


def main() -> None:
    global REWARD_SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32, help="Prompts per step.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reward_ms", type=float, default=1.0)
    parser.add_argument("--stream", action="store_true", help="Compare what takes its prompts from the stream.")
    parser.add_argument("--log", type=Path, default=None, help="File for the server's output.")
    args = parser.parse_args()
    REWARD_SECONDS = args.reward_ms / 1000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        heavy_tailed_model(Path(directory) / "model")
        with running_server(
            Path(directory) / "model", port, args.log or Path(directory) / "log", max_model_len=512
        ) as url:
            work = compare_stream if args.stream else compare
            work(url, Path(directory) / "model", args.prompts, args.steps, args.repeats)
    simulate()


if __name__ == "__main__":
    main()
