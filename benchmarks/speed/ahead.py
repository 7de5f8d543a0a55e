"""
Step time with generation one step ahead (`max_staleness=1`), relative to `max_staleness=0`; the two alternate.

`python -m benchmarks.speed.ahead` uses a scripted server whose generation takes as long as training, half as long, or twice as
long. `--real` starts a vLLM server on the first core and trains on the second. With the default model size and completion length,
generation and training take about the same time.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import problems
from recipes.arithmetic.vllm_server import running_server

from .. import names
from ..common import ratio_of_repeats
from .server import heavy_tailed_model, reward


METHODS = {
    names.POSTERIOR: {"baseline": "posterior"},
    names.GRPO_4: {"adaptive_sampling": "uniform", "scale_rewards": "group", "num_generations": 4},
}
ROWS = 16


class SlowTrainer(AdaGRPOTrainer):
    """Trainer whose training step takes `seconds` longer."""

    seconds = 0.0

    def training_step(self, *args, **kwargs):
        time.sleep(self.seconds)
        return super().training_step(*args, **kwargs)


def train(
    url: str, model: str, steps: int, seed: int, seconds: float, rows: int, tokens: int, **options
) -> list[dict]:
    """Seconds of the steps and of waiting for rollouts, without the first step, which has no generation before it."""
    with tempfile.TemporaryDirectory() as directory:
        args = AdaGRPOConfig(
            directory,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_weight_sync="disk",
            per_device_train_batch_size=rows,
            max_completion_length=tokens,
            learning_rate=1e-6,
            max_steps=steps * options.get("num_iterations", 1),
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
        trainer = SlowTrainer(model, reward, args, problems(4096, seed=0))
        trainer.seconds = seconds
        starts, waits = [], []
        original = trainer._generate_and_score_completions

        def timed(inputs):
            starts.append(time.perf_counter())
            output = original(inputs)
            waits.append(time.perf_counter() - starts[-1])
            return output

        trainer._generate_and_score_completions = timed
        trainer.train()
    steps = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    return [{"seconds": s, "waits": w} for s, w in list(zip(steps, waits, strict=False))[1:]]


def compare(url: str, model: str, steps: int, repeats: int, **common) -> None:
    for name, options in METHODS.items():
        runs: dict[int, list[list[dict]]] = {0: [], 1: []}
        for seed in range(repeats):
            for staleness, own in runs.items():
                own.append(train(url, model, steps, seed, max_staleness=staleness, **common | options))
        seconds = {s: [mean(step["seconds"] for step in run) for run in own] for s, own in runs.items()}
        waits = {s: mean(step["waits"] / step["seconds"] for run in own for step in run) for s, own in runs.items()}
        print(
            f"  {name:24s} step {mean(seconds[0]):.2f} s, ahead {mean(seconds[1]):.2f} s: "
            f"{ratio_of_repeats(seconds[1], seconds[0])}   waiting for rollouts {waits[0]:.0%}, ahead {waits[1]:.0%}"
        )


def simulate(steps: int, repeats: int) -> None:
    from tests.helpers import tiny_model, tiny_tokenizer
    from tests.server.fake import FakeServer, answer, random_texts

    with tempfile.TemporaryDirectory() as directory:
        tiny_model().save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        for generation, training in ((2.0, 2.0), (1.0, 2.0), (2.0, 1.0)):

            async def behave(call, generation=generation):
                await asyncio.sleep(generation)
                return answer(call, random_texts(call, 0.5))

            print(f"Generation {generation:.0f} s, training {training:.0f} s")
            with FakeServer(behave) as server:
                compare(server.url, directory, steps, repeats, seconds=training, rows=ROWS, tokens=4)


def measure(steps: int, repeats: int, hidden: int, layers: int, **common) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        heavy_tailed_model(Path(directory), hidden, layers)
        os.sched_setaffinity(0, cores[:1])  # which the server inherits
        with running_server(Path(directory), 8388, Path(directory) / "server.log", max_model_len=512) as url:
            os.sched_setaffinity(0, cores[1:2])
            torch.set_num_threads(1)
            compare(url, directory, steps, repeats, seconds=0.0, **common)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="Use a vLLM server and the trainer on one core each.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    real = parser.add_argument_group("with --real")
    real.add_argument("--rows", type=int, default=128, help="Rollouts per step.")
    real.add_argument("--tokens", type=int, default=32, help="Maximum completion length.")
    real.add_argument("--hidden", type=int, default=256)
    real.add_argument("--layers", type=int, default=6)
    real.add_argument("--num_iterations", type=int, default=1, help="Optimizer iterations per generation batch.")
    args = parser.parse_args()
    if args.real:
        sizes = {"rows": args.rows, "tokens": args.tokens, "num_iterations": args.num_iterations}
        measure(args.steps, args.repeats, args.hidden, args.layers, **sizes)
    else:
        simulate(args.steps, args.repeats)


if __name__ == "__main__":
    main()
