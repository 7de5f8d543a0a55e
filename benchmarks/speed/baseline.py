"""
CPU time of a step with one rollout per prompt, relative to GRPO n=4 with the same number of rows.

`python -m benchmarks.speed.baseline` trains alternately, in one process and one thread, and prints ratios of the CPU time per step:
of the fastest steps, which are least affected by other load on the machine, and of the medians. The settings are the arithmetic task,
and prompts of 64 tokens with completions of 8 tokens on models with 2 and 30 layers.
"""

import argparse
import random
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.task import build_model, build_tokenizer, exact_match, problems

from .. import names


METHODS = {
    names.GRPO_4: {"adaptive_sampling": "uniform", "scale_rewards": "group"},
    names.BATCH: {"baseline": "batch"},
    names.POSTERIOR: {"baseline": "posterior"},
}
SETTINGS = {"arithmetic": None, "64 tokens, 2 layers": 2, "64 tokens, 30 layers": 30}  # layers


class CpuSeconds(TrainerCallback):
    """Records the CPU time of each step, including generation."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.process_time() - self.started)


def even(completions, **kwargs):
    """A reward of 1 for about half of the completions of an untrained model."""
    return [float(sum(map(ord, completion)) % 2 == 0) for completion in completions]


def setting(name: str):
    """Model, reward, prompts and options."""
    tokenizer, layers = build_tokenizer(), SETTINGS[name]
    if layers is None:
        return build_model(tokenizer), exact_match, problems(1024, seed=0), {"max_completion_length": 6}, 128
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=64)) for _ in range(2048)]
    return Qwen2ForCausalLM(config), even, Dataset.from_dict({"prompt": prompts}), {"max_completion_length": 8}, 64


def cpu_seconds(name: str, method: str, steps: int) -> list[float]:
    """CPU seconds by step, without the first two steps."""
    model, reward, prompts, options, rows = setting(name)
    recorder = CpuSeconds()
    with tempfile.TemporaryDirectory() as directory:
        args = AdaGRPOConfig(
            directory, per_device_train_batch_size=rows, max_steps=steps, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, log_level="error",
            **options, **METHODS[method],
        )  # fmt: skip
        trainer = AdaGRPOTrainer(
            model, reward, args, prompts, processing_class=build_tokenizer(), callbacks=[recorder]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return recorder.seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in SETTINGS:
        seconds = {method: [] for method in METHODS}
        for _ in range(args.repeats):
            for method in METHODS:
                seconds[method] += cpu_seconds(name, method, args.steps)
        reference = seconds[names.GRPO_4]
        print(f"{name}: GRPO n=4 takes {min(reference):.3f} s of CPU per step (fastest)")
        for method, own in seconds.items():
            ratio = statistics.median(own) / statistics.median(reference)
            print(f"  {method:24s} {min(own) / min(reference):.3f} (fastest)  {ratio:.3f} (median)", flush=True)


if __name__ == "__main__":
    main()
