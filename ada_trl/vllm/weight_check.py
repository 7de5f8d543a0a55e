"""
Whether rollouts come from the weights that are trained, by log-probabilities.

A server returns those of a fixed prompt, after each synchronization and after each generation. For a colocated engine,
those of the rollouts themselves are compared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOConfig
from trl.generation.vllm_generation import VLLMGeneration

from ..utils.distributed import ErrorFactory, synchronized_errors
from .errors import VLLMServerError
from .responses import prompt_logprobs


TEXT = "Question: what is 12 + 34? Answer: 12 + 34 = 46, because 2 + 4 = 6 and 10 + 30 = 40."
MAX_PROMPT_TOKENS = 32
MIN_PROMPT_TOKENS = 8

# Allowed difference of two implementations, in nats per token on average; well above measured values.
ROUNDING = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
QUANTIZED = 0.5

OTHER_WEIGHTS = "its rollouts may come from other weights than those that are trained"
DEDICATED = "Use a dedicated server for this run, started from the model that is trained."
COLOCATE_FIX = "Set vllm_enable_sleep_mode=False, or try another version of vLLM."


@dataclass
class EngineWeights:
    """
    Which weights an engine has, and what it does with them.

    Attributes:
        step (`int`, *optional*):
            Optimizer step that they belong to; `None` if they have to be sent before the next generation.
        use (`str`):
            `"idle"`: TRL's methods do what they do in TRL. `"receiving"`: newer ones are being sent. `"generating"`:
            completions of a step, for which they were sent, so that TRL's synchronizations do nothing and a colocated
            engine does not sleep. `"returning"`: the same, but the completions were requested one step ahead, from
            earlier weights.
        server (`dict`):
            Configuration of the server that has received them, with the id of its process; on the main process only.
        logprobs (`list[float]`):
            Log-probabilities of the fixed prompt, which the trainer computed when they were sent to a server.
    """

    step: int | None = None
    use: Literal["idle", "receiving", "generating", "returning"] = "idle"
    server: dict = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)

    @contextmanager
    def used_for(self, use: Literal["receiving", "generating", "returning"]) -> Iterator[None]:
        before, self.use = self.use, use
        try:
            yield
        finally:
            self.use = before


class WeightCheck:
    """
    Compares the log-probabilities of an engine with those of the model that is trained.

    Weights that change the log-probabilities by less than the tolerance cannot be told from rounding: those of a
    single small optimizer step before, for example, but not those of several steps, another adapter or another model.

    Args:
        vllm (`VLLMGeneration`):
            The engine.
        weights ([`EngineWeights`]):
            Its weights.
        error_factory (`Callable[..., ErrorFactory]`):
            See [`~vllm.errors.make_error_factory`].

    Attributes:
        difference (`float`):
            Result of the last check of a server, in nats per token; 0 on all ranks but the main one.
    """

    def __init__(self, vllm: VLLMGeneration, weights: EngineWeights, error_factory: Callable[..., ErrorFactory]):
        self.vllm, self.weights, self.error_factory = vllm, weights, error_factory
        self.difference = 0.0

    @cached_property
    def _prompt_ids(self) -> list[int]:
        return probe_prompt(self.vllm.processing_class)

    def verify_synchronization(self, model: torch.nn.Module) -> None:
        """
        Check a server's weights after a synchronization, against the model as prepared for training. Collective.

        Raises:
            [`VLLMServerError`]: if its log-probabilities are not those of the model.
        """
        self.weights.logprobs = token_logprobs(model, self._prompt_ids, self.vllm.accelerator.device)
        with synchronized_errors(self.error_factory("it does not have this step's weights")):
            if self.vllm.accelerator.is_main_process:
                self._compare()

    def verify_generation(self) -> None:
        """
        Check that all completions since the last synchronization came from its weights: that the server is the same
        instance, with the same weights. Collective, after the completions of all ranks have arrived.

        Raises:
            [`VLLMServerError`]: if the server does not respond, was restarted, or has received other weights.
        """
        with synchronized_errors(self.error_factory(OTHER_WEIGHTS)):
            if self.vllm.accelerator.is_main_process:
                expected = self.weights.server.get("instance_id")
                found = self.vllm.vllm_client.read_config().get("instance_id")
                if found != expected:
                    raise VLLMServerError(f"it was restarted during the step (instance {expected} became {found})")
                self._compare()

    def _compare(self) -> None:
        request = {"prompt": [self._prompt_ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        client = self.vllm.vllm_client
        # With `prompt_logprobs`, vLLM does not use its prefix cache.
        read = partial(prompt_logprobs, self._prompt_ids)
        served = client.send("POST", "/v1/completions", read, json={"model": client.model} | request)
        differences = [abs(a - b) for a, b in zip(served, self.weights.logprobs, strict=True)]
        self.difference = sum(differences) / len(differences)
        tolerance = self._tolerance(self.weights.server["model_config"])
        if not self.difference <= tolerance:  # NaN is not, either
            raise VLLMServerError(
                f"its log-probabilities differ from the trainer's by {self.difference:.3f} nats per token (by "
                f"rounding at most {tolerance:g})",
                DEDICATED,
            )

    def verify_rollouts(self, output: dict[str, torch.Tensor]) -> None:
        """
        Check the weights of a colocated engine by the log-probabilities of the sampled tokens. Collective.

        Args:
            output (`dict[str, torch.Tensor]`):
                Batch of this rank, as returned by [`~trl.GRPOTrainer`], with log-probabilities of both engine and
                trainer.

        Raises:
            [`VLLMServerError`]: if the rollouts of any rank come from other weights than those that are trained.
        """
        differences = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()  # (B, T)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        of_tokens = differences[mask.bool()]
        # vLLM may fail to score single tokens; if it has scored none of them, the mean is NaN and not accepted.
        difference = of_tokens.nanmean().item() if len(of_tokens) else 0.0
        config = self.vllm.llm.llm_engine.model_config
        # Sampled tokens differ more than those of the fixed prompt, hence at least the tolerance of bfloat16.
        tolerance = max(
            ROUNDING["bfloat16"], self._tolerance({"dtype": config.dtype, "quantization": config.quantization})
        )
        with synchronized_errors(self.error_factory(OTHER_WEIGHTS, COLOCATE_FIX)):
            if not difference <= tolerance:  # NaN is not, either
                raise VLLMServerError(
                    f"log-probabilities differ from the trainer's by {difference:.2f} nats per token, more than "
                    f"rounding explains ({tolerance:g})"
                )

    def _tolerance(self, served: dict) -> float:
        """
        Largest difference that rounding explains, in nats per token, for the coarser data type of engine and trainer.
        """
        model, precision = self.vllm.accelerator.unwrap_model(self.vllm.model), self.vllm.accelerator.mixed_precision
        if served.get("quantization") or getattr(model.config, "quantization_config", None):
            return QUANTIZED
        trained = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, str(next(model.parameters()).dtype))
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (served.get("dtype"), trained))
        return max(ROUNDING.get(dtype, QUANTIZED) for dtype in dtypes)


def has_comparable_logprobs(args: GRPOConfig) -> bool:
    """
    Whether vLLM samples from the model's own distribution, so that its log-probabilities of the sampled tokens are
    those of the model. Any of the `generation_kwargs` may change the distribution.
    """
    return (
        args.top_p == 1.0
        and args.top_k in (0, -1, None)
        and not args.min_p
        and args.repetition_penalty == 1.0
        and args.vllm_structured_outputs_regex is None
        and not args.generation_kwargs
    )


def probe_prompt(tokenizer: PreTrainedTokenizerBase | ProcessorMixin) -> list[int]:
    """Token ids of a short text, or the first tokens of a vocabulary without letters."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    special = set(tokenizer.all_special_ids)
    ids = [token for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if token not in special]
    if len(ids) < MIN_PROMPT_TOKENS:
        ids = [token for token in range(len(tokenizer)) if token not in special]
    return ids[:MAX_PROMPT_TOKENS]


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, prompt_ids: Sequence[int], device: torch.device | str) -> list[float]:
    """
    Log-probability of each token of the prompt but the first, given those before it. If the model is sharded, every
    rank must call this. Dropout is off, no random number is drawn and the mode of every module is restored.

    Returns:
        `list[float]`: one fewer than `prompt_ids`.
    """
    ids = torch.tensor([list(prompt_ids)], device=device)  # (1, T)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for module, training in modes:
            module.training = training
    logprobs = logits[0, :-1].float().log_softmax(dim=-1)  # (T - 1, V)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
