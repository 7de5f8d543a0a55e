"""Problems to pass rates: render, sample, verify, with every finished problem on disk at once."""

import asyncio
import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..commands.reward_funcs import load_reward_func
from ..mathematics.problems import Problem
from ..mathematics.prompts import to_prompt
from ..mathematics.verification import verify_answers
from .arguments import SamplingArguments
from .samplers import Request, Sampler
from .store import SampleStore


Score = Callable[[list[str], list[Problem]], list[float | None]]
"""Takes completions and the problem of each; returns rewards, `None` where there is none."""

VERIFY_TOGETHER = 4096  # completions; what an interruption of the verification costs


@dataclass(frozen=True)
class EvalResult:
    """
    What a model did on some problems.

    Args:
        rewards (`np.ndarray` of shape `(num_problems, num_samples)`):
            1 for a correct completion, 0 for a wrong one. All 0 where a problem cannot be scored.
        lengths (`np.ndarray` of shape `(num_problems, num_samples)`):
            Tokens of each completion.
        unparsable (`int`):
            Problems that cannot be scored: of which the reference cannot be parsed, or a reward is `None`.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    unparsable: int

    @property
    def correct(self) -> np.ndarray:
        """Correct completions of each problem, `(num_problems,)`."""
        return self.rewards.sum(axis=1).astype(int)

    @property
    def pass_rates(self) -> np.ndarray:
        """Share of correct completions of each problem, `(num_problems,)`."""
        return self.rewards.mean(axis=1)


def to_model_prompt(problem: Problem, prompt_format: str) -> str | list[dict[str, str]]:
    """A problem as a prompt in the sense of TRL: the paper's conversation (`"chat"`), or itself (`"plain"`)."""
    if problem.messages is not None:
        return problem.messages
    return to_prompt(problem.text) if prompt_format == "chat" else problem.text


def render(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, prompt_format: str, chat_template_kwargs: dict | None = None
) -> list[int]:
    """
    Token ids of a problem's prompt.

    Raises:
        `ValueError`: if a chat template is needed and the tokenizer has none.
    """
    prompt = to_model_prompt(problem, prompt_format)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Save one with it, or set "
            "--prompt_format plain."
        )
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=False, **chat_template_kwargs or {}
    )


def measure(
    path: Path,
    problems: Sequence[Problem],
    *,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    data: str,
    args: SamplingArguments,
    make_sampler: Callable[[], Sampler],
) -> EvalResult:
    """
    Sample and verify what is not on disk yet.

    Args:
        path (`Path`):
            Where the samples are; the scores are beside them. See [`~sample_store.SampleStore`].
        problems (`Sequence[Problem]`):
            What to sample for.
        model (`str`), tokenizer (`PreTrainedTokenizerBase`), data (`str`):
            Names of the model and the data set, and what renders the prompts.
        args ([`~measurement.samplers.SamplingArguments`]):
            How to sample.
        make_sampler (`Callable[[], Sampler]`):
            Called if there is anything to sample.
    """
    samples = _sample(path, problems, model, tokenizer, data, args, make_sampler)
    scores = _score(path.with_suffix(".scores.jsonl"), samples, problems, data, args)
    rewards = np.zeros((len(problems), args.num_samples))
    lengths = np.zeros((len(problems), args.num_samples), dtype=int)
    unparsable = 0
    for row in scores.rows():
        lengths[row["index"]] = row["lengths"]
        if row["rewards"] is None:
            unparsable += 1
        else:
            rewards[row["index"]] = np.array(row["rewards"]) > args.positive_threshold
    return EvalResult(rewards, lengths, unparsable)


def _sample(
    path: Path,
    problems: Sequence[Problem],
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    data: str,
    args: SamplingArguments,
    make_sampler: Callable[[], Sampler],
) -> SampleStore:
    variables: dict | None = args.chat_template_kwargs  # type: ignore[assignment] # `__post_init__` has read it
    prompts = [render(problem, tokenizer, args.prompt_format, variables) for problem in problems]
    names = ("num_samples", "temperature", "top_p", "max_new_tokens", "prompt_format", "seed")
    settings = {name: asdict(args)[name] for name in names}
    # The digest of the token ids stands for the problems, their order, the chat template and the tokenizer.
    settings |= {"model": model, "weights": fingerprint(model), "data": data, "prompts": _digest(prompts)}
    with SampleStore(path, settings).open() as store:
        missing = [i for i in range(len(prompts)) if i not in store.done]
        with tqdm(total=len(prompts), initial=len(store.done), desc=f"Sampling {data}", unit="problem") as progress:
            if missing:
                requests = (Request(i, prompts[i], _seed(args.seed, i)) for i in missing)
                with (
                    _counted(store, len(prompts), f"{data} sampled"),
                    closing(make_sampler().sample(requests)) as finished,
                ):
                    for index, completions in finished:
                        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
                        store.append(index, completions=texts, lengths=[len(ids) for ids in completions])
                        progress.update()
    return store


def _score(
    path: Path, samples: SampleStore, problems: Sequence[Problem], data: str, args: SamplingArguments
) -> SampleStore:
    settings: dict[str, Any]
    if args.reward_func is None:
        score: Score = _compare_answers
        settings = {"samples": samples.id, "answers": _digest([problem.answer for problem in problems])}
        settings["math_verify"] = importlib.metadata.version("math-verify")
    else:
        score = own = CustomReward(args.reward_func, args.prompt_format)
        settings = {"samples": samples.id, "answers": _digest([problem.extra for problem in problems])}
        settings |= {"reward_func": args.reward_func, "source": own.source}
    with SampleStore(path, settings).open() as store, _counted(store, len(problems), f"{data} verified"):
        with tqdm(total=len(problems), initial=len(store.done), desc=f"Verifying {data}", unit="problem") as progress:
            batch: list[dict[str, Any]] = []
            for row in samples.rows():
                if row["index"] not in store.done:
                    batch.append(row)
                if len(batch) * len(row["completions"]) >= VERIFY_TOGETHER:
                    progress.update(_score_batch(store, batch, problems, score))
                    batch = []
            progress.update(_score_batch(store, batch, problems, score))
    return store


@contextmanager
def _counted(store: SampleStore, total: int, what: str) -> Iterator[None]:
    """Ctrl-C says what is done."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f"{len(store.done)} of {total} problems of {what} and on disk; the same command continues."
        ) from error


def _compare_answers(completions: list[str], problems: list[Problem]) -> list[float | None]:
    return verify_answers(completions, [problem.answer for problem in problems])


class CustomReward:
    """
    A reward function by its import path, called as TRL calls it: with `prompts`, `completions` and the data set's columns.

    Args:
        name (`str`):
            Import path, or a call of a function that makes one, see [`~commands.reward_funcs.load_reward_func`].
        prompt_format (`str`):
            See [`to_model_prompt`].

    Raises:
        `ValueError`: if it is no function.
    """

    def __init__(self, name: str, prompt_format: str):
        self.name, self.function, self.prompt_format = name, load_reward_func(name), prompt_format

    @property
    def source(self) -> str | None:
        """A hash of the function's text, so that scores of an older version are noticed."""
        try:
            return _digest(inspect.getsource(self.function))
        except (OSError, TypeError):  # not a plain function
            return None

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        if not completions:
            return []
        prompts = [to_model_prompt(problem, self.prompt_format) for problem in problems]
        replies = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for text, prompt in zip(completions, prompts, strict=True)
        ]
        names = problems[0].extra.keys() - {"prompt", "completion", "completion_ids"}  # as TRL leaves them out
        columns = {name: [problem.extra[name] for problem in problems] for name in sorted(names)}
        rewards = self.function(prompts=prompts, completions=replies, **columns)
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_awaited(rewards))
        if len(rewards) != len(completions):
            raise ValueError(
                f"reward_func {self.name!r} returned {len(rewards)} rewards for {len(completions)} completions. Return one "
                "for each, or None."
            )
        return [None if reward is None else float(reward) for reward in rewards]


async def _awaited(rewards: Awaitable[list]) -> list:
    return await rewards


def _score_batch(
    store: SampleStore,
    batch: list[dict[str, Any]],
    problems: Sequence[Problem],
    score: Score,
) -> int:
    completions = [completion for row in batch for completion in row["completions"]]
    rewards = iter(score(completions, [problems[row["index"]] for row in batch for _ in row["completions"]]))
    for row in batch:
        row_rewards = [next(rewards) for _ in row["completions"]]
        scored = None if None in row_rewards else row_rewards
        store.append(row["index"], rewards=scored, lengths=row["lengths"])
    return len(batch)


def fingerprint(model: str) -> str | None:
    """
    A hash that changes with the weights of a local model, so that samples of an older checkpoint under the same path
    are noticed. Reads the first and last megabyte of each weight file. `None` for a model on the hub.
    """
    if not Path(model).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _seed(seed: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
