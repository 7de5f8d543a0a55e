"""
Step time of adaptive sampling with a vLLM server, with asynchronous and with synchronous rounds.

`python -m benchmarks.speed.server` starts a real vLLM server with a tiny random model whose completion lengths are heavy-tailed
(median about 26 tokens, 1 % above 230). It alternates between

- Seq-balance with asynchronous rounds (as always with a server), at most four of eight rollouts,
- the same without speculative rounds ([`NonSpeculativeTrainer`]),
- Seq-balance with synchronous rounds ([`SynchronousTrainer`]),
- GRPO with n = 4, and
- GRPO with the n that samples as many rollouts as Seq-balance,

or, with `--stream`, at GRPO's number of rows,

- GRPO with n = 4,
- the batch baseline with one rollout per prompt,
- dynamic sampling with asynchronous and with synchronous rounds,
- retries with one rollout per prompt.

The learning rate is 0, so that all methods sample from the same policy; weights are still sent in every step
(`vllm_weight_sync="disk"`). Reward functions take `--reward_ms` per rollout. Ratios are of mean step times, followed by those of
the single repeats.
"""

import argparse
import socket
import tempfile
import time
import zlib
from pathlib import Path
from statistics import mean

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.sampling import asynchronous
from ada_trl.sampling.asynchronous import AsyncVLLMSampler
from ada_trl.sampling.sampler import RolloutSampler
from ada_trl.trainer.trl_private import override_attributes
from recipes.arithmetic.task import build_tokenizer, problems
from recipes.arithmetic.vllm_server import running_server

from .. import names
from ..common import BALANCE, ratio_of_repeats


MAX_TOKENS = 300
REWARD_SECONDS = 0.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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
    """1 if the first character is in a set that depends on the prompt, so that prompts have different pass rates."""
    time.sleep(REWARD_SECONDS * len(prompts))
    numbers = [zlib.crc32(prompt.encode()) for prompt in prompts]
    first = [ord(completion[0]) if completion else 0 for completion in completions]
    return [float((character * 7 + n) % 12 < n // 12 % 12) for n, character in zip(numbers, first, strict=True)]


class NonSpeculativeSampler(AsyncVLLMSampler):
    """Requests no round before it is needed."""

    speculate_below = 0.0


class RoundByRoundSampler(NonSpeculativeSampler):
    """Requests a round when the round before is complete for all prompts of the rank."""

    def __init__(self, **options):
        super().__init__(**options)
        self._next_round: list[tuple] = []

    def _submit(self, *request) -> None:
        self._next_round.append(request)

    def _collect(self, *given) -> list:
        if not self._in_flight:
            requests, self._next_round = self._next_round, []
            for request in requests:
                super()._submit(*request)
        return super()._collect(*given)


class NonSpeculativeTrainer(AdaGRPOTrainer):
    """Trainer with asynchronous rounds that requests no round before it is needed."""

    sampler_class: type[AsyncVLLMSampler] = NonSpeculativeSampler

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        build_sampler = self._round_generator.build_sampler

        def build(*step, **options) -> RolloutSampler:
            with override_attributes(asynchronous, AsyncVLLMSampler=self.sampler_class):
                return build_sampler(*step, **options)

        self._round_generator.build_sampler = build


class SynchronousTrainer(NonSpeculativeTrainer):
    """Trainer that finishes a round of all prompts of its rank before the next one starts."""

    sampler_class = RoundByRoundSampler


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
        "zero advantage": mean(step["ada/frac_zero_advantage_groups"] for step in logs),
    }
    line = f"  {name:36s}" + "".join(f"{label} {value:6.2f}   " for label, value in figures.items())
    if "ada/time/idle" in logs[0]:
        sampling = sum(step["ada/time/generate"] + step["ada/time/reward"] for step in logs)
        idle = sum(step["ada/time/idle"] for step in logs) / sampling
        reward_seconds = sum(step["ada/time/reward"] for step in logs)
        overlapped = sum(step["ada/time/reward_overlapped"] for step in logs) / reward_seconds
        line += f"server idle {idle:.1%} of sampling   reward time overlapped {overlapped:.1%}"
    return line


def compare_stream(url: str, model: Path, prompts: int, steps: int, repeats: int) -> None:
    grpo = {"adaptive_sampling": "uniform"}
    dynamic = grpo | {"zero_variance_groups": "resample", "max_rounds": 8}
    retries = {"baseline": "batch", "retries": 7}
    settings = {  # rollouts per prompt, class, options
        "GRPO n=4": (4, AdaGRPOTrainer, grpo),
        names.BATCH: (1, AdaGRPOTrainer, {"baseline": "batch"}),
        "dynamic sampling": (4, AdaGRPOTrainer, dynamic),
        "dynamic sampling, synchronous rounds": (4, SynchronousTrainer, dynamic),
        "retries, n=1": (1, AdaGRPOTrainer, retries),
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
            (names.BATCH, "GRPO n=4"),
            ("dynamic sampling", "dynamic sampling, synchronous rounds"),
            ("retries, n=1", "GRPO n=4"),
        ),
    )


def print_ratios(runs: dict[str, list[list[dict]]], pairs) -> None:
    """Print ratios of mean step times, followed by those of the single repeats in brackets."""

    def seconds(run: list[dict]) -> float:
        return mean(step["step_time"] for step in run)

    for one, other in pairs:
        ratio = ratio_of_repeats([*map(seconds, runs[one])], [*map(seconds, runs[other])])
        print(f"  {one} / {other}: step time {ratio}")


def compare(url: str, model: Path, prompts: int, steps: int, repeats: int) -> None:
    ada, patient, synchronous = "Seq-balance", "Seq-balance, no speculation", "Seq-balance, synchronous rounds"
    grpo, same = "GRPO n=4", "GRPO, as many rollouts"
    uniform = {"adaptive_sampling": "uniform"}
    runs: dict[str, list[list[dict]]] = {ada: [], patient: [], synchronous: [], grpo: [], same: []}
    for seed in range(repeats):
        runs[ada].append(train(url, model, prompts, 4, steps, seed, **BALANCE))
        runs[patient].append(train(url, model, prompts, 4, steps, seed, NonSpeculativeTrainer, **BALANCE))
        runs[synchronous].append(train(url, model, prompts, 4, steps, seed, SynchronousTrainer, **BALANCE))
        runs[grpo].append(train(url, model, prompts, 4, steps, seed, **uniform))
        rollouts = mean(step["ada/samples_per_prompt/mean"] for run in runs[ada] for step in run)
        runs[same].append(train(url, model, prompts, round(rollouts), steps, seed, **uniform))
    print(f"\n{repeats} interleaved repeats of {steps - 1} steps of {prompts} prompts, seconds")
    for name, logs in runs.items():
        print(report(name, [step for run in logs for step in run]))

    pairs = ((ada, synchronous), (patient, synchronous), (ada, grpo), (ada, same), (synchronous, same))
    print_ratios(runs, pairs)


def main() -> None:
    global REWARD_SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32, help="Prompts per step.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reward_ms", type=float, default=1.0)
    parser.add_argument("--stream", action="store_true", help="Compare dynamic sampling and retries.")
    parser.add_argument("--log", type=Path, default=None, help="File for the server's output.")
    args = parser.parse_args()
    REWARD_SECONDS = args.reward_ms / 1000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        heavy_tailed_model(Path(directory) / "model")
        with running_server(
            Path(directory) / "model", free_port(), args.log or Path(directory) / "log", max_model_len=512
        ) as url:
            work = compare_stream if args.stream else compare
            work(url, Path(directory) / "model", args.prompts, args.steps, args.repeats)


if __name__ == "__main__":
    main()
