"""Sample completions from a model: a vLLM server, vLLM in this process, or transformers."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol


if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class SamplingArguments:
    """
    How completions are sampled. The defaults are those of the paper's evaluation.

    Args:
        num_samples (`int`):
            Completions per problem.
        temperature (`float`, *optional*, defaults to `1.0`), top_p (`float`, *optional*, defaults to `1.0`):
            Of the sampling; temperature 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to `4096`):
            Most tokens of a completion.
        reward_func (`str`, *optional*):
            Import path of a reward function as [`~trl.GRPOTrainer`] takes it, which decides what is right. By default
            math-verify compares the answers.
        positive_threshold (`float`, *optional*, defaults to `0.7`):
            A completion is right where `reward_func` gives more.
        prompt_format (`str`, *optional*):
            `"chat"`: the paper's system prompt and instruction in the model's chat template. `"plain"`: the problem as it
            is. By default `"chat"`, and `"plain"` with a `reward_func`. A conversation stays as it is.
        chat_template_kwargs (`str` or `dict`, *optional*):
            Variables of the chat template, on the command line as JSON. Llama-3.2's writes the current day unless it gets
            a `date_string`: give the one of the training, or an evaluation cannot be resumed the next day.
        seed (`int`, *optional*, defaults to `42`):
            Each problem has a seed of its own, derived from it and the problem's position.
        backend (`str`, *optional*, defaults to `"vllm"`):
            `"vllm"`: in this process. `"server"`: a running vLLM server. `"transformers"`: works everywhere; slow.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Of the weights; not with a server.
        batch_size (`int`, *optional*, defaults to `16`):
            transformers: completions of one problem that are generated together.
        vllm_server_base_url (`str`, *optional*, defaults to `"http://127.0.0.1:8000"`):
            Server: its address. It must serve the model under its name or path.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Server: seconds to wait for it to come up.
        vllm_request_timeout (`float`, *optional*, defaults to `3600.0`):
            Server: deadline in seconds of a request, which is for all completions of a problem.
        vllm_max_concurrent_requests (`int`, *optional*, defaults to `64`):
            vLLM: problems under way at a time.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.9`), vllm_tensor_parallel_size (`int`,
        *optional*, defaults to `1`), vllm_max_model_length (`int`, *optional*):
            vLLM in this process: as in [`~trl.GRPOConfig`].
    """

    num_samples: int = field(metadata={"help": "Completions per problem."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of the sampling; 1 is all of it."})
    max_new_tokens: int = field(default=4096, metadata={"help": "Most tokens of a completion."})
    reward_func: str | None = field(
        default=None,
        metadata={
            "help": "Import path of a reward function, such as `my_rewards.right`, that decides what is right; default: "
            "math-verify compares the answers."
        },
    )
    positive_threshold: float = field(
        default=0.7, metadata={"help": "A completion is right where reward_func gives more."}
    )
    prompt_format: str | None = field(
        default=None,
        metadata={
            "help": "'chat': the paper's system prompt and instruction in the model's chat template; 'plain': the "
            "problem as it is. Default: 'chat', with a reward_func 'plain'. A conversation stays as it is.",
            "choices": ["chat", "plain"],
        },
    )
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={
            "help": 'JSON with variables of the chat template, such as \'{"date_string": "26 Jul 2024"}\' for Llama-3.2, '
            "whose template otherwise writes the current day."
        },
    )
    seed: int = field(default=42, metadata={"help": "Each problem gets a seed of its own, derived from this one."})
    backend: str = field(
        default="vllm",
        metadata={
            "help": "'vllm': in this process; 'server': a running vLLM server; 'transformers': works everywhere, slow.",
            "choices": ["vllm", "server", "transformers"],
        },
    )
    dtype: str = field(default="auto", metadata={"help": "Of the weights (not with a server)."})
    batch_size: int = field(
        default=16, metadata={"help": "transformers: completions of one problem that are generated together."}
    )
    vllm_server_base_url: str = field(
        default="http://127.0.0.1:8000",
        metadata={"help": "server: its address. It must serve the model under its name or path."},
    )
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "server: seconds to wait for it to come up."})
    vllm_request_timeout: float = field(
        default=3600.0, metadata={"help": "server: deadline in seconds of a request for all completions of a problem."}
    )
    vllm_max_concurrent_requests: int = field(default=64, metadata={"help": "vLLM: problems under way at a time."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "vllm: share of the GPU's memory."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "vllm: GPUs that share the model."})
    vllm_max_model_length: int | None = field(
        default=None, metadata={"help": "vllm: most tokens of prompt and completion; default: the model's."}
    )

    def __post_init__(self):
        if self.prompt_format is None:
            self.prompt_format = "chat" if self.reward_func is None else "plain"
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = _read_json(self.chat_template_kwargs)
        for name in ("num_samples", "max_new_tokens", "batch_size", "vllm_max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature ({self.temperature}) must be at least 0 and top_p ({self.top_p}) in (0, 1]."
            )

    @property
    def scored_by(self) -> str:
        """What decides, in words."""
        if self.reward_func is None:
            return "answers compared by math-verify"
        return f"right where `{self.reward_func}` gives more than {self.positive_threshold:g}"


def _read_json(text: str) -> dict:
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'chat_template_kwargs ({text}) is no valid JSON ({error}). Write it as \'{{"name": "value"}}\'.'
        ) from error
    if not isinstance(variables, dict):
        raise ValueError(f'chat_template_kwargs ({text}) must be a JSON object, as \'{{"name": "value"}}\'.')
    return variables


@dataclass(frozen=True)
class Request:
    """A prompt to be completed: its position, token ids and seed."""

    index: int
    prompt_ids: list[int]
    seed: int


class Sampler(Protocol):
    """Draws `num_samples` completions for each request."""

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield a request's index and its completions' token ids as soon as they are all there, in any order."""

    def close(self) -> None:
        """Give the memory back."""


def make_sampler(model: str, tokenizer: "PreTrainedTokenizerBase", args: SamplingArguments) -> Sampler:
    """The sampler of `args.backend` for a model by name or path."""
    return {"vllm": VLLMSampler, "server": ServerSampler, "transformers": TransformersSampler}[args.backend](
        model, tokenizer, args
    )


@contextmanager
def once(make: Callable[[], Sampler]) -> Iterator[Callable[[], Sampler]]:
    """A function that makes the sampler when first called, and returns the same from then on; closed at the end."""
    made: list[Sampler] = []

    def get() -> Sampler:
        if not made:
            made.append(make())
        return made[0]

    try:
        yield get
    finally:
        for sampler in made:
            sampler.close()


class TransformersSampler:
    """`generate` of a model in this process, one problem at a time, so that its seed alone decides its completions."""

    def __init__(self, model: str, tokenizer: "PreTrainedTokenizerBase", args: SamplingArguments):
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=args.dtype).to(device).eval()
        self.args = args
        eos = self.model.generation_config.eos_token_id
        self.eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        pad = tokenizer.pad_token_id
        self.pad = min(self.eos, default=0) if pad is None else pad

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[list[int]]]]:
        import torch

        for request in requests:
            torch.manual_seed(request.seed)
            completions = []
            while len(completions) < self.args.num_samples:
                number = min(self.args.batch_size, self.args.num_samples - len(completions))
                completions += self._generate(request, number)
            yield request.index, completions

    def _generate(self, request: Request, number: int) -> list[list[int]]:
        import torch

        prompt = torch.tensor([request.prompt_ids] * number, device=self.model.device)  # (B, T)
        random = {"do_sample": True, "temperature": self.args.temperature, "top_p": self.args.top_p, "top_k": 0}
        with torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.args.max_new_tokens,
                eos_token_id=sorted(self.eos) or None,
                pad_token_id=self.pad,
                repetition_penalty=1.0,
                **(random if self.args.temperature else {"do_sample": False}),
            )
        return [self._until_eos(ids) for ids in output[:, prompt.size(1) :].tolist()]

    def _until_eos(self, ids: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))
        return ids[:end]

    def close(self) -> None:
        import torch

        del self.model
        torch.cuda.empty_cache()


class ServerSampler:
    """
    A running vLLM server. One request per problem, `vllm_max_concurrent_requests` at a time, none of which waits for
    another; when one fails, those that are answered are still yielded, the others are ended, and the error raised.
    """

    def __init__(self, model: str, tokenizer: "PreTrainedTokenizerBase", args: SamplingArguments):
        from ..engine.client import DeadlineClient

        self.args = args
        self.stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.client = DeadlineClient(
            args.vllm_server_base_url,
            connection_timeout=args.vllm_server_timeout,
            request_timeout=args.vllm_request_timeout,
        )
        served = self.client._get(f"{self.client.base_url}/v1/models")["data"]
        # An adapter is served under a name of its own; its root is its path.
        matches = [e["id"] for e in served if same_model(model, e["id"]) or same_model(model, e.get("root") or "")]
        if not matches:
            self.close()
            raise ValueError(
                f"The vLLM server at {args.vllm_server_base_url} serves "
                f"{', '.join(repr(entry['id']) for entry in served)}, not {model!r}. Start it with --served-model-name "
                f"{model}, or correct vllm_server_base_url."
            )
        self.client.model = matches[0]

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[list[int]]]]:
        executor = ThreadPoolExecutor(self.args.vllm_max_concurrent_requests, thread_name_prefix="vLLM sampling")
        try:
            yield from self._sample(executor, iter(requests))
        finally:
            self.client.cancel()  # nothing is under way unless something failed
            executor.shutdown()
            self.client.resume()

    def _sample(self, executor, requests: Iterator[Request]) -> Iterator[tuple[int, list[list[int]]]]:
        pending = {}
        while True:
            for request in itertools.islice(requests, self.args.vllm_max_concurrent_requests - len(pending)):
                pending[executor.submit(self._complete, request)] = request.index
            if not pending:
                return
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            failed = [future for future in done if future.exception() is not None]
            for future in done.difference(failed):
                yield pending.pop(future), future.result()
            for future in failed:
                raise future.exception()

    def _complete(self, request: Request) -> list[list[int]]:
        answer = self.client.generate(
            [request.prompt_ids],
            n=self.args.num_samples,
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            max_tokens=self.args.max_new_tokens,
            logprobs=None,
            generation_kwargs={"seed": request.seed, "stop_token_ids": self.stop},
        )
        return answer["completion_ids"]

    def close(self) -> None:
        self.client.close()


class VLLMSampler:
    """vLLM's engine in this process, which is given new problems as others finish. LoRA adapters too."""

    def __init__(self, model: str, tokenizer: "PreTrainedTokenizerBase", args: SamplingArguments):
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise ImportError(
                "vLLM is not installed. Install it (`pip install ada_trl[vllm]`), or set --backend transformers."
            ) from error
        self.args = args
        self.stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.lora, options = None, {}
        adapter = Path(model) / "adapter_config.json"
        if adapter.exists():
            config = json.loads(adapter.read_text())
            self.lora = LoRARequest("adapter", 1, model)
            options = {"enable_lora": True, "max_lora_rank": config["r"], "tokenizer": model}
            model = config["base_model_name_or_path"]
        if args.vllm_max_model_length is not None:
            options["max_model_len"] = args.vllm_max_model_length
        try:
            self.engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=model,
                    dtype=args.dtype,
                    gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                    tensor_parallel_size=args.vllm_tensor_parallel_size,
                    **options,
                )
            )
        except (RuntimeError, ValueError) as error:  # no GPU, or not enough of it
            raise ValueError(
                f"vLLM cannot serve {model!r} here: {error} Without a GPU set --backend transformers; to share one lower "
                f"--vllm_gpu_memory_utilization ({args.vllm_gpu_memory_utilization})."
            ) from error

    def sample(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[list[int]]]]:
        requests, under_way = iter(requests), set()
        while True:
            for request in itertools.islice(requests, self.args.vllm_max_concurrent_requests - len(under_way)):
                self._add(request)
                under_way.add(str(request.index))
            if not under_way:
                return
            for output in self.engine.step():
                if output.finished:
                    under_way.remove(output.request_id)
                    yield int(output.request_id), [list(completion.token_ids) for completion in output.outputs]

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=self.args.num_samples,
            temperature=self.args.temperature,
            top_p=self.args.top_p,
            max_tokens=self.args.max_new_tokens,
            seed=request.seed,
            stop_token_ids=self.stop,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.prompt_ids}
        self.engine.add_request(str(request.index), prompt, params, lora_request=self.lora)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def same_model(model: str, name: str) -> bool:
    """Whether a server's name or root is the model's name, or a path of the same directory."""
    return name == model or (Path(model).exists() and Path(name).resolve() == Path(model).resolve())
