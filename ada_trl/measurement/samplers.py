"""Sample completions from a model: a vLLM server, vLLM in this process, or transformers."""

import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .arguments import SamplingArguments


if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


Finished = Generator[tuple[int, list[list[int]]], None, None]
"""A request's index and its completions' token ids as soon as they are all there, in any order."""


@dataclass(frozen=True)
class Request:
    """A prompt to be completed: its position, token ids and seed."""

    index: int
    prompt_ids: list[int]
    seed: int


class Sampler(Protocol):
    """Draws `num_samples` completions for each request."""

    def sample(self, requests: Iterable[Request]) -> Finished:
        """Yield what is [`Finished`]."""

    def close(self) -> None:
        """Give the memory back."""


def make_sampler(model: str, tokenizer: "PreTrainedTokenizerBase", args: SamplingArguments) -> Sampler:
    """The sampler of `args.backend` for a model by name or path."""
    samplers: dict[str, Callable[[str, PreTrainedTokenizerBase, SamplingArguments], Sampler]]
    samplers = {"vllm": VLLMSampler, "server": ServerSampler, "transformers": TransformersSampler}
    return samplers[args.backend](model, tokenizer, args)


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

    def sample(self, requests: Iterable[Request]) -> Finished:
        import torch

        for request in requests:
            torch.manual_seed(request.seed)
            completions: list[list[int]] = []
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
        from ..vllm.client import TimeoutVLLMClient

        self.args = args
        self.stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.client = TimeoutVLLMClient(
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

    def sample(self, requests: Iterable[Request]) -> Finished:
        executor = ThreadPoolExecutor(self.args.vllm_max_concurrent_requests, thread_name_prefix="vLLM sampling")
        try:
            yield from self._sample(executor, iter(requests))
        finally:
            self.client.cancel()  # nothing is under way unless something failed
            executor.shutdown()
            self.client.resume()

    def _sample(self, executor: ThreadPoolExecutor, requests: Iterator[Request]) -> Finished:
        pending: dict[Future, int] = {}
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
                future.result()  # raises

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

    def sample(self, requests: Iterable[Request]) -> Finished:
        under_way: set[str] = set()
        requests = iter(requests)
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
