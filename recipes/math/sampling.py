"""Sampling and scoring without training, shared by `select.py` and `evaluate.py`."""

import asyncio
import hashlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.hf_argparser import HfArg
from trl.scripts.utils import TrlParser

from ada_trl.commands.reward_funcs import load_reward_funcs
from ada_trl.utils.files import atomic_write

from .problems import Problem
from .rewards import math_accuracy_reward
from .samplers import make_sampler


# Settings that determine the samples of a problem, in addition to the model and the prompts;
# the last ones in `model_kwargs`.
SETTINGS = ("num_samples", "temperature", "top_p", "max_new_tokens", "prompt_format", "seed")
MODEL_SETTINGS = ("dtype", "quantization", "revision")


@dataclass(kw_only=True)
class SamplingArguments:
    """Options that `select.py` and `evaluate.py` share. The defaults are those of the paper's evaluation."""

    output_dir: str = HfArg(help="Directory for the samples and the results.")
    num_samples: int = HfArg(default=32, help="Completions per problem.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature; 0 is greedy.")
    top_p: float = HfArg(default=1.0, help="Probability mass of nucleus sampling.")
    max_new_tokens: int = HfArg(default=4096, help="Maximum number of tokens per completion.")
    seed: int = HfArg(default=42, help="Each problem has its own seed, derived from this one and its position.")
    prompt_format: Literal["chat", "plain"] | None = HfArg(
        default=None,
        help="'chat': the paper's prompt in the model's chat template; 'plain': the problem alone. Default: 'chat', "
        "with a reward_func 'plain'. Conversations are used as they are.",
    )
    chat_template_kwargs: dict | str | None = HfArg(
        default=None,
        help="""JSON with variables of the chat template: '{"date_string": "26 Jul 2024"}' for Llama-3.2.""",
    )
    reward_func: str | None = HfArg(
        default=None, help="Import path of a reward function. Default: math-verify compares the answers."
    )
    positive_threshold: float = HfArg(default=0.7, help="A completion with a higher reward is correct.")
    problem_column: str | None = HfArg(default=None, help="Default: found by its name, and logged.")
    answer_column: str | None = HfArg(default=None, help="Default: found by its name, and logged.")
    dataset_split: str = HfArg(default="train", help="Split of the dataset.")
    max_problems: int | None = HfArg(default=None, help="Use only the first problems, for a trial.")
    backend: Literal["vllm", "transformers"] = HfArg(default="vllm", help="transformers: works everywhere, slow.")
    model_kwargs: dict | str | None = HfArg(
        default=None, help="JSON with options of vllm.LLM (tensor_parallel_size, ...) or transformers (dtype, ...)."
    )
    save_every: int = HfArg(default=256, help="Problems that are sampled together, and saved when all are finished.")
    batch_size: int = HfArg(default=16, help="transformers: completions of a problem that are generated together.")

    def __post_init__(self) -> None:
        if self.prompt_format is None:
            self.prompt_format = "chat" if self.reward_func is None else "plain"
        for name in ("chat_template_kwargs", "model_kwargs"):
            value = getattr(self, name) or {}
            try:
                setattr(self, name, dict(json.loads(value) if isinstance(value, str) else value))
            except (TypeError, ValueError) as error:
                raise ValueError(f'{name} ({value}) must be a JSON object such as {{"name": "value"}}.') from error
        for name in ("num_samples", "max_new_tokens", "save_every", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature ({self.temperature}) must be at least 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be in (0, 1].")

    def load_reward_func(self) -> Callable:
        """Return the function that scores completions, which is called as TRL calls it."""
        if self.reward_func is None:
            return math_accuracy_reward
        (function,) = load_reward_funcs([self.reward_func])
        if isinstance(function, str):
            raise ValueError(
                f"reward_func ({function!r}) is not a function. Give an import path such as my_rewards.correct."
            )
        return function


def parse_arguments(kind: type, args: list[str] | None, description: str | None) -> Any:
    """Parse a command line with an optional `--config` file; invalid values exit like unknown options."""
    parser = TrlParser(kind, description=description)
    try:
        return parser.parse_args_and_config(args)[0]
    except ValueError as error:
        parser.error(str(error))


class Measurement(NamedTuple):
    """Rewards (1 if correct, else 0) and token counts of a model's completions, each `(num_problems, num_samples)`."""

    rewards: np.ndarray
    lengths: np.ndarray
    unscored: np.ndarray
    """
    Problems with a reward of `None` (their reference cannot be parsed), `(num_problems,)`; all their rewards are 0.
    """

    def take(self, positions: np.ndarray) -> "Measurement":
        """Select the problems at `positions`."""
        return Measurement(*(values[positions] for values in self))

    @property
    def correct(self) -> np.ndarray:
        """Number of correct completions of each problem, `(num_problems,)`."""
        return self.rewards.sum(axis=1).astype(int)

    @property
    def pass_rates(self) -> np.ndarray:
        """Fraction of correct completions of each problem, `(num_problems,)`."""
        return self.rewards.mean(axis=1)


class Model:
    """Model by name or path, whose weights are loaded when the first completions are sampled."""

    def __init__(self, name: str, args: SamplingArguments, make: Callable = make_sampler):
        self.name, self.args = name, args
        self.reward_func = args.load_reward_func()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.fingerprint = fingerprint(name)
        self._sampler = cache(partial(make, name, self.tokenizer, args))

    def close(self) -> None:
        """Release the weights."""
        if self._sampler.cache_info().currsize:  # it has been created
            self._sampler().close()

    def measure(self, problems: list[Problem], folder: Path, data: str) -> Measurement:
        """
        Sample and score what is not in `folder` yet; `data` is the name of the problems' dataset.

        The folder contains `settings.json`, `scores.parquet`, and a file with the completions of every `save_every`
        problems. Files are written atomically, so an interrupted command continues. A `ValueError` is raised if the
        completions were sampled with other settings.
        """
        if not problems:
            raise ValueError(f"{data!r} has no usable problems (max_problems is {self.args.max_problems}).")
        prompts = [self.render(problem) for problem in problems]
        settings = {name: getattr(self.args, name) for name in SETTINGS}
        # The digest of the token ids identifies the problems, their order, the chat template and the tokenizer.
        settings |= {name: self.args.model_kwargs.get(name) for name in MODEL_SETTINGS}
        settings |= {"model": self.name, "weights": self.fingerprint, "data": data, "prompts": _digest(prompts)}
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            size = self._check_settings(folder / "settings.json", settings)
        files = {folder / f"{start:08d}.parquet": start for start in range(0, len(prompts), size)}
        try:
            # Several processes, one per GPU, share the files: each process first samples files that no other process
            # works on. Then it waits for the remaining files, and samples those of processes that have ended early.
            for file, start in tqdm(files.items(), f"Sampling {data}, {size} problems per file", unit="file"):
                self._sample(prompts[start : start + size], start, file, wait=False)
            for file, start in files.items():
                self._sample(prompts[start : start + size], start, file, wait=True)
        except KeyboardInterrupt:
            print("\nThe same command continues with the samples saved so far.", file=sys.stderr)
            raise SystemExit(130) from None  # as a shell reports Ctrl-C
        with FileLock(folder / ".lock"):
            table = self._score(problems, list(files), folder / "scores.parquet", data)
        rewards = np.array(table["rewards"].to_pylist(), dtype=float)  # NaN for None
        unscored = np.isnan(rewards).all(axis=1)
        correct = rewards > self.args.positive_threshold  # `None` for a single completion is not correct
        return Measurement(correct.astype(float), np.array(table["lengths"].to_pylist()), unscored)

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> int:
        """Compare the settings with those of stored samples, if any, and return the number of problems per file."""
        stored = settings | {"save_every": self.args.save_every}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"The samples in {path.parent} were generated with {name} {stored.get(name)!r}, but this run has "
                    f"{value!r}. Set the former, choose another output directory, or delete the samples."
                )
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        return stored["save_every"]

    def _sample(self, prompts: list[list[int]], start: int, file: Path, wait: bool) -> None:
        try:
            with FileLock(file.with_name(f".{file.name}.lock"), timeout=-1 if wait else 0):
                if file.exists():
                    return
                seeds = np.random.SeedSequence(self.args.seed).generate_state(start + len(prompts))[start:]
                completions = self._sampler().generate(prompts, seeds.tolist())
                texts = [self.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in completions]
                lengths = [[len(completion) for completion in ids] for ids in completions]
                with atomic_write(file) as temporary:
                    pq.write_table(pa.table({"completions": texts, "lengths": lengths}), temporary)
        except Timeout:  # another process is sampling this file
            pass

    def render(self, problem: Problem) -> list[int]:
        """Tokenize a problem's prompt."""
        prompt = problem.to_prompt(self.args.prompt_format)
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise ValueError(f"The tokenizer of {self.name!r} has no chat template. Set --prompt_format plain.")
        return self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **self.args.chat_template_kwargs
        )

    def _score(self, problems: list[Problem], files: list[Path], path: Path, data: str) -> pa.Table:
        # Scores are reused until anything that they depend on changes;
        # unlike samples, they are quick to compute again.
        settings = {"columns": _digest([problem.columns for problem in problems]), "source": _source(self.reward_func)}
        settings |= {"reward_func": self.args.reward_func, "samples": [file.stat().st_mtime_ns for file in files]}
        if path.exists() and settings["source"] is not None:
            table = pq.read_table(path)
            if json.loads(table.schema.metadata[b"settings"]) == settings:
                return table
        rewards, lengths, rest = [], [], iter(problems)
        for file in tqdm(files, f"Scoring {data}", unit="file"):
            samples = pq.read_table(file)
            completions = samples["completions"].to_pylist()
            rewards += self._call_reward_func(completions, list(islice(rest, len(completions))))
            lengths += samples["lengths"].to_pylist()
        table = pa.table({"rewards": pa.array(rewards, pa.list_(pa.float64())), "lengths": lengths})
        table = table.replace_schema_metadata({"settings": json.dumps(settings)})
        with atomic_write(path) as temporary:
            pq.write_table(table, temporary)
        return table

    def _call_reward_func(self, completions: list[list[str]], problems: list[Problem]) -> list[list[float | None]]:
        """Call the reward function as TRL does: with prompts, completions and the dataset's other columns."""
        number = self.args.num_samples
        repeated = [problem for problem in problems for _ in range(number)]
        prompts = [problem.to_prompt(self.args.prompt_format) for problem in repeated]
        replies: list[Any] = [text for texts in completions for text in texts]
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                replies[i] = [{"role": "assistant", "content": replies[i]}]
        names = problems[0].columns.keys() - {"prompt", "completion", "completion_ids"}
        columns = {name: [problem.columns[name] for problem in repeated] for name in sorted(names)}
        rewards = self.reward_func(prompts=prompts, completions=replies, **columns)
        if inspect.iscoroutine(rewards):
            rewards = asyncio.run(rewards)
        if len(rewards) != len(replies):
            raise ValueError(
                f"reward_func {self.args.reward_func!r} returned {len(rewards)} rewards for {len(replies)} "
                "completions. Return one for each, or None."
            )
        values = [None if reward is None else float(reward) for reward in rewards]
        return [values[i : i + number] for i in range(0, len(values), number)]


def fingerprint(model: str) -> str:
    """Hash the weight files of a local model, or return the commit of one on the Hub."""
    if not Path(model).is_dir():  # a small file that the tokenizer has loaded; an adapter has no `config.json`
        return Path(snapshot_download(model, allow_patterns="tokenizer_config.json")).name
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _source(reward_func: Callable) -> str | None:
    """
    Identify the version of the reward function by the Python files in its module's folder, where its helpers may be,
    and the version of math-verify. `None` if the folder is unknown.
    """
    while isinstance(reward_func, partial):
        reward_func = reward_func.func
    module = inspect.getmodule(reward_func)
    if module is None or getattr(module, "__file__", None) is None:
        return None
    files = sorted(Path(module.__file__).parent.glob("*.py"))
    try:
        verifier = importlib.metadata.version("math-verify")
    except importlib.metadata.PackageNotFoundError:
        verifier = None
    return _digest([verifier, *((file.name, file.read_bytes()) for file in files)])
