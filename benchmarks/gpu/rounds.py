"""
Seconds of Seq-balance without a server, with the rounds of the default and of the paper.

With `transformers` and with a colocated engine, a round takes as long as its longest completion. The default has
smaller rounds and more of them; they are filled up to 8 rollouts per prompt, which is left out in one unit.
"""

import contextlib
import functools
import tempfile
from pathlib import Path
from statistics import mean

import torch

from ada_trl import AdaGRPOTrainer
from ada_trl.sampling.synchronous import SynchronousSampler
from ada_trl.trainer import rounds as trainer_rounds
from ada_trl.trainer.trl_private import override_attributes

from .. import names
from ..common import BALANCE, DEFAULT, markdown
from . import fast
from .fast import SMOKE, Size, save_model
from .units import Unit, run, succeeded


# With few wide layers, generation with `transformers` takes less time than in usual models of this size.
WIDE = Size(hidden=2048, layers=8, intermediate=5632, vocabulary=32_000, median_tokens=40, max_tokens=160)
PROMPTS, STEPS = 64, 3  # the first step is not counted
ROUNDS = {"the paper's rounds": BALANCE, "the default's rounds": DEFAULT}
TRANSFORMERS, COLOCATE = "transformers", "colocate"
UNFILLED = f"{TRANSFORMERS}, the default's rounds, not filled"


class UnfilledSampler(SynchronousSampler):
    def __init__(self, **options):
        super().__init__(**options | {"fills_rounds": False})


def train(engine: str, size: Size, prompts_per_step: int, steps: int, rounds: dict, fills: bool = True) -> dict:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save_model(Path(directory) / "model", size)
        options = {}
        if engine == COLOCATE:
            from trl.generation import vllm_generation

            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            llm = functools.partial(
                vllm_generation.LLM, compilation_config=graphs, kv_cache_memory_bytes=8 * 2**30, dtype="bfloat16"
            )
            stack.enter_context(override_attributes(vllm_generation, LLM=llm))
            options = {"use_vllm": True, "vllm_mode": COLOCATE, "vllm_max_model_length": 512}
        if not fills:
            stack.enter_context(override_attributes(trainer_rounds, SynchronousSampler=UnfilledSampler))
        return fast.steps(directory, size, 4 * prompts_per_step, steps, AdaGRPOTrainer, options | rounds)


def report(results: dict[str, dict]) -> str:
    """Table of the units that have a result."""
    rows = [row | {"name": name} for name, row in results.items() if "logs" in row]
    columns = {
        f"{names.SEQ_BALANCE} without a server": lambda row: row["name"],
        "Step, s": lambda row: f"{mean(row['step_seconds']):.2f}",
        "Rollouts per prompt": lambda row: f"{mean(s['ada/samples_per_prompt/mean'] for s in row['logs']):.1f}",
        "Generated tokens": lambda row: f"{mean(s['ada/tokens/generated'] for s in row['logs']):.0f}",
    }
    return markdown(rows, columns)


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    shared = {
        "size": SMOKE if smoke else WIDE,
        "prompts_per_step": 4 if smoke else PROMPTS,
        "steps": 2 if smoke else STEPS,
    }
    units = [
        Unit(f"{engine}, {name}", train, shared | {"engine": engine, "rounds": rounds}, 120)
        for engine in (TRANSFORMERS, COLOCATE)
        for name, rounds in ROUNDS.items()
        if engine == TRANSFORMERS or torch.cuda.is_available()  # vLLM for CPUs cannot load weights a second time
    ]
    units.append(Unit(UNFILLED, train, shared | {"engine": TRANSFORMERS, "rounds": DEFAULT, "fills": False}, 120))
    results = run(units, output_dir / "rounds.json", limit, reuse_processes=False)
    print(report(results))
    return succeeded(units, results)
