"""
Seconds of generation and of steps with a vLLM server on the trainer's GPU.

- *Generation*: one batch, with TRL's client and with ours.
- *Steps* with an adapter (`vllm_weight_sync="lora"`): every method, Seq-balance with the rounds of the default and of
  the paper, asynchronous and synchronous.
- *Weights*: seconds of a synchronization by `lora` and by `disk`.
"""

import functools
import math
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from recipes.arithmetic.vllm_server import EAGER, running_server

from .. import names
from ..common import BALANCE, DEFAULT, markdown, ratio_of_repeats
from ..speed.server import SynchronousTrainer
from .training import options_of_run, peak_memory_gib, random_model, reset_memory, run_trainer
from .units import Unit, run, succeeded


class Size(NamedTuple):
    """Llama of 0.47 billion parameters, and lengths of completions."""

    hidden: int = 896
    layers: int = 24
    intermediate: int = 4864
    vocabulary: int = 64_000
    median_tokens: int = 60
    max_tokens: int = 256  # a decoding step of 256 rows took 15 ms, so that twice as many do not fit into the limit
    prompt_tokens: int = 32
    micro_batch: int = 16


SMOKE = Size(hidden=64, layers=2, intermediate=128, vocabulary=64, median_tokens=4, max_tokens=16, micro_batch=8)
STEPS = 3  # the first one is not counted
REPEATS = 2
RANK = 16
SHARE = 0.3  # of the GPU's memory, for the server
UNIT_SECONDS = 90
AHEAD = "one step ahead"
PAPER_ROUNDS = f"{names.SEQ_BALANCE}, the paper's rounds"
SYNCHRONOUS = ", synchronous"
GRPO = {"adaptive_sampling": "uniform", "num_generations": 4, "scale_rewards": "group"}
STEP_METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    names.GRPO_4: (AdaGRPOTrainer, GRPO),
    names.SEQ_BALANCE: (AdaGRPOTrainer, DEFAULT),
    f"{names.SEQ_BALANCE}{SYNCHRONOUS}": (SynchronousTrainer, DEFAULT),
    PAPER_ROUNDS: (AdaGRPOTrainer, BALANCE),
    names.BATCH: (AdaGRPOTrainer, {"baseline": "batch"}),
    f"{PAPER_ROUNDS}{SYNCHRONOUS}": (SynchronousTrainer, BALANCE),
    AHEAD: (AdaGRPOTrainer, {"baseline": "batch", "max_staleness": 1}),
    f"{names.BATCH}, retries": (AdaGRPOTrainer, {"baseline": "batch", "retries": 3}),
    "dynamic sampling": (AdaGRPOTrainer, GRPO | {"zero_variance_groups": "resample", "max_rounds": 4}),
}
FIRST_ROWS = 256
# Steps of that many rows which decide, and how long the first one may take relative to the second one:
# stated before the runs.
CRITERIA = {
    "Seq-balance / GRPO n=4": (names.SEQ_BALANCE, names.GRPO_4, 1.6),
    "asynchronous / synchronous rounds": (names.SEQ_BALANCE, f"{names.SEQ_BALANCE}{SYNCHRONOUS}", 0.75),
    "the default's / the paper's rounds": (names.SEQ_BALANCE, PAPER_ROUNDS, 1.0),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def build_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """A tokenizer of words `t0`, `t1`, … with as many tokens as the model."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>"])}
    vocabulary |= {f"t{i}": i for i in range(2, size.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@torch.no_grad()
def save_model(directory: Path, size: Size) -> None:
    """
    A random model that ends a completion after each token with the same probability, so that their median is as given.
    """
    tokenizer = build_tokenizer(size)
    model = random_model(
        tokenizer,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64 if size.hidden >= 128 else 2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    # The first coordinate of the residual stream is a constant that no layer reads or changes. It is larger than all
    # others, so that the last normalization leaves sqrt(hidden) of it, and only the logit of the stop token depends on
    # it.
    model.model.embed_tokens.weight[:, 0] = 100.0
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for reading in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reading.weight[:, 0] = 0
        for writing in (attention.o_proj, mlp.down_proj):
            writing.weight[0] = 0
    probability = 1 - 0.5 ** (1 / size.median_tokens)
    logit = math.log(size.vocabulary * probability / (1 - probability))
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.lm_head.weight[tokenizer.eos_token_id, 0] = logit / math.sqrt(size.hidden)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def prompts(size: Size) -> Dataset:
    """Distinct prompts, with pass rates that are uniformly distributed."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, size.vocabulary, (8192, size.prompt_tokens), generator=generator).tolist()
    rates = torch.rand(8192, generator=generator).tolist()
    texts = [" ".join(f"t{token}" for token in row) for row in tokens]
    return Dataset.from_dict({"prompt": texts, "pass_rate": rates})


def reward(completion_ids: list[list[int]], pass_rate: list[float], **kwargs) -> list[float]:
    """1 for as many of a prompt's completions as its pass rate says, by a hash of the tokens."""
    hashes = [sum(ids) * 2654435761 % 2**32 / 2**32 for ids in completion_ids]
    return [float(value < rate) for value, rate in zip(hashes, pass_rate, strict=True)]


def generation(url: str, size: Size, rows: int, copies: int, repeats: int) -> dict:
    """Seconds of a batch with `copies` completions per prompt, with both clients in turn."""
    from ..speed import clients as of_server  # imports what the report of stored results does not need

    clients = {"TRL": of_server.TRL(url, size.max_tokens), "ours": of_server.Ours(url, size.max_tokens)}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, size.vocabulary, (rows // copies, size.prompt_tokens), generator=generator).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    tokens: dict[str, list[int]] = {name: [] for name in clients}
    for _ in range(1 + repeats):
        for name, client in clients.items():
            started = time.perf_counter()
            completions, _ = client.rows(ids, copies)
            seconds[name].append(time.perf_counter() - started)
            tokens[name].append(sum(map(len, completions)))
    clients["ours"].vllm.close()
    AcceleratorState._reset_state(reset_partial_state=True)  # of the client, for the trainers of later units
    return {"generation_seconds": {name: values[1:] for name, values in seconds.items()}, "tokens": tokens}


@contextmanager
def timed_synchronizations(trainer: AdaGRPOTrainer) -> Iterator[list[float]]:
    """While the block runs, seconds of each weight synchronization, with its verification."""
    seconds: list[float] = []
    push = trainer.vllm.push_weights

    @functools.wraps(push)
    def timed() -> None:
        started = time.perf_counter()
        push()
        seconds.append(time.perf_counter() - started)

    trainer.vllm.push_weights = timed
    yield seconds
    trainer.vllm.push_weights = push


def server_options(url: str, directory: str, sync: str) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_weight_sync": sync,
        "vllm_weight_sync_dir": str(Path(directory) / "weights"),
    }


def steps(
    directory: str, size: Size, rows: int, steps: int, trainer_class: type, options: dict, adapter: bool = True
) -> dict:
    """Train the model in `directory` and measure the steps after the first one, which warms up."""
    reset_memory()
    args = AdaGRPOConfig(
        str(Path(directory) / "out"),
        learning_rate=1e-6,
        bf16=torch.cuda.is_available(),
        **options_of_run(rows, size.micro_batch, size.max_tokens, steps),
        **options,
    )
    lora = LoraConfig(r=RANK, target_modules="all-linear") if adapter else None
    trainer = trainer_class(str(Path(directory) / "model"), reward, args, prompts(size), peft_config=lora)
    with timed_synchronizations(trainer) as synchronizations:
        logs, seconds = run_trainer(trainer)
    return {
        "rows": rows,
        "step_seconds": seconds[1:],
        "sync_seconds": synchronizations[1:],
        "memory_gib": peak_memory_gib(),
        "logs": logs[1:],
    }


def all_units(url: str, directory: str, size: Size, smoke: bool) -> list[Unit]:
    """In the order of their importance, because the last ones may not fit into the limit."""
    first, *others = (8,) if smoke else (FIRST_ROWS, 1024, 64)

    def of_generation(rows: int) -> list[Unit]:
        shared = {"url": url, "size": size, "rows": rows, "repeats": 1 if smoke else REPEATS}
        return [
            Unit(f"generation, {name}, {rows} rows", generation, shared | {"copies": copies}, UNIT_SECONDS)
            for name, copies in ((names.BATCH, 1), (names.GRPO_4, 4))
        ]

    def of_steps(rows: int, method: str, sync: str = "lora") -> Unit:
        trainer_class, options = STEP_METHODS[method]
        own = {
            "directory": directory,
            "size": size,
            "rows": rows,
            "steps": 2 if smoke else STEPS,
            "trainer_class": trainer_class,
            "options": options | server_options(url, directory, sync),
            "adapter": sync == "lora",
        }
        name = f"step, {method}, {rows} rows" if sync == "lora" else f"weights by {sync}"
        return Unit(name, steps, own, UNIT_SECONDS)

    if smoke:
        return [*of_generation(first), of_steps(first, names.SEQ_BALANCE), of_steps(first, AHEAD)]
    decisive = list(STEP_METHODS)[:5]
    return [
        *of_generation(first),
        *(of_steps(first, method) for method in decisive),
        *(unit for rows in others for unit in of_generation(rows)),
        *(of_steps(first, method) for method in STEP_METHODS if method not in decisive),
        of_steps(64, names.BATCH, sync="disk"),
        *(of_steps(rows, method) for rows in others for method in decisive),
    ]


def report(results: dict[str, dict]) -> str:
    """Tables of the units that have a result."""
    generated = [(name, row["generation_seconds"]) for name, row in results.items() if "generation_seconds" in row]
    ratios = markdown(
        generated,
        {
            "Generation": lambda row: row[0].removeprefix("generation, "),
            "TRL's client, s": lambda row: f"{mean(row[1]['TRL']):.2f}",
            "ours, s": lambda row: f"{mean(row[1]['ours']):.2f}",
            "ours / TRL (single repeats)": lambda row: ratio_of_repeats(row[1]["ours"], row[1]["TRL"]),
        },
    )
    trained = [row | {"name": name} for name, row in results.items() if "step_seconds" in row]

    def average(row: dict, name: str) -> float:
        return mean(step[name] for step in row["logs"])

    table = markdown(
        trained,
        {
            "Step": lambda row: row["name"].removeprefix("step, "),
            "s": lambda row: f"{mean(row['step_seconds']):.2f}",
            "generation, s": lambda row: (
                f"{average(row, 'ada/time/generate'):.2f}" if "ada/time/generate" in row["logs"][0] else ""
            ),
            "weights, s": lambda row: f"{mean(row['sync_seconds'] or [math.nan]):.2f}",
            "rollouts per prompt": lambda row: f"{average(row, 'ada/samples_per_prompt/mean'):.1f}",
            "zero-variance groups": lambda row: f"{average(row, 'ada/frac_zero_advantage_groups'):.0%}",
            "trainer's memory, GiB": lambda row: f"{row['memory_gib']:.1f}" if row["memory_gib"] else "–",
        },
    )
    lengths = [step["completions/mean_length"] for row in trained for step in row["logs"]]
    tokens = f"Completions have {mean(lengths):.0f} tokens on average." if lengths else ""
    return "\n\n".join([ratios, table, tokens, decisions(results)])


def decisions(results: dict[str, dict]) -> str:
    """Table of the `CRITERIA`, with the steps that have a result."""

    def measured(row: tuple) -> str:
        units = [results.get(f"step, {method}, {FIRST_ROWS} rows", {}).get("step_seconds") for method in row[1][:2]]
        return ratio_of_repeats(*units) if all(units) else "not measured"

    columns = {
        f"Step of {FIRST_ROWS} rows": lambda row: row[0],
        "Ratio (single steps)": measured,
        "At most": lambda row: f"{row[1][2]:g}",
    }
    return markdown(list(CRITERIA.items()), columns)


def main(output_dir: Path, limit: float, smoke: bool) -> bool:
    """Returns whether all units have succeeded."""
    size = SMOKE if smoke else Size()
    started = time.monotonic()
    flags: dict[str, Any] = {"--max-num-seqs": 1024}
    if torch.cuda.is_available():
        # CUDA graphs of the decoding steps without compilation, which takes a minute.
        sizes = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
        graphs = f'{{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": {sizes}}}'
        flags |= {"--compilation-config": graphs, "--kv-cache-memory-bytes": 12 * 2**30}
        flags |= {"--gpu-memory-utilization": SHARE}
    else:
        flags |= EAGER
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory) / "model", size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        log = output_dir / "fast_server.log"
        output_dir.mkdir(parents=True, exist_ok=True)
        with running_server(
            Path(directory) / "model", free_port(), log, 150, max_model_len=1024, max_lora_rank=RANK, flags=flags
        ) as url:
            print(f"[{time.monotonic() - started:4.0f} s] the server is up", flush=True)
            if torch.cuda.is_available():
                print(f"memory of the server: {(free - torch.cuda.mem_get_info()[0]) / 2**30:.1f} GiB", flush=True)
            units = all_units(url, directory, size, smoke)
            left = limit - (time.monotonic() - started)
            results = run(units, output_dir / "fast.json", left)
    print(report(results))
    return succeeded(units, results)
