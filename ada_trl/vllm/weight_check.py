"""
Weight check: whether a server generates from the weights it was sent, by the log-probabilities of a fixed prompt.

```python
client = TimeoutVLLMClient("http://localhost:8000")
prompt = probe_prompt(tokenizer)
tolerance = logprob_tolerance(*dtypes(model, client.get_server_info()))
difference = verify_weights(client, prompt, token_logprobs(model, prompt), tolerance)
```
"""

from collections.abc import Sequence

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from .client import NOT_VLLM, TimeoutVLLMClient
from .errors import VLLMServerError
from .response_validation import quote


TEXT = "Question: what is 12 + 34? Answer: 12 + 34 = 46, because 2 + 4 = 6 and 10 + 30 = 40."
MAX_PROMPT_TOKENS = 32
MIN_PROMPT_TOKENS = 8
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")

# Allowed difference of two implementations, in nats per token on average; well above measured values.
ROUNDING = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
QUANTIZED = 0.5


def verify_weights(
    client: TimeoutVLLMClient, prompt_ids: Sequence[int], expected: Sequence[float], tolerance: float
) -> float:
    """
    Compare the server's log-probabilities of a prompt with those of the weights that it should have. One short request.

    Weights that change the log-probabilities by less than `tolerance` cannot be told from rounding: those of a single small
    optimizer step before, for example, but not those of several steps, another adapter or another model.

    Returns:
        `float`: mean absolute difference in nats per token.

    Raises:
        [`VLLMServerError`]: if it is above `tolerance`, or if the server does not respond.
    """
    served = served_logprobs(client, prompt_ids)
    difference = sum(abs(a - b) for a, b in zip(served, expected, strict=True)) / len(expected)
    if not difference <= tolerance:  # NaN is not, either
        raise VLLMServerError(
            f"its log-probabilities differ from the trainer's by {difference:.3f} nats per token (by rounding at most {tolerance:g})",
            "Use a dedicated server for this run, started from the model that is trained.",
        )
    return difference


def probe_prompt(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin, max_tokens: int = MAX_PROMPT_TOKENS
) -> list[int]:
    """Token ids of a short text, or the first tokens of a vocabulary without letters."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    special = set(tokenizer.all_special_ids)
    ids = [token for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if token not in special]
    if len(ids) < MIN_PROMPT_TOKENS:
        ids = [token for token in range(len(tokenizer)) if token not in special]
    return ids[: min(max_tokens, MAX_PROMPT_TOKENS)]


@torch.no_grad()
def token_logprobs(
    model: torch.nn.Module, prompt_ids: Sequence[int], device: torch.device | str | None = None
) -> list[float]:
    """
    Log-probability of each token of the prompt but the first, given those before it. If the model is sharded, every
    rank must call this. Dropout is off, no random number is drawn and the mode of every module is restored.

    Returns:
        `list[float]`: one fewer than `prompt_ids`.
    """
    ids = torch.tensor([list(prompt_ids)], device=device or next(model.parameters()).device)  # (1, T)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    finally:
        for module, training in modes:
            module.training = training
    logprobs = logits[0, :-1].float().log_softmax(dim=-1)  # (T - 1, V)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def served_logprobs(client: TimeoutVLLMClient, prompt_ids: Sequence[int]) -> list[float]:
    """The server's [`token_logprobs`]. With `prompt_logprobs`, vLLM does not use its prefix cache."""
    request = {"model": client.model, "prompt": [list(prompt_ids)], "max_tokens": 1, "temperature": 0}
    response = client._post(
        f"{client.base_url}/v1/completions", json=request | {"prompt_logprobs": 0, "return_token_ids": True}
    )
    try:
        positions = response["choices"][0]["prompt_logprobs"][1:]
        return [
            float(position[str(token)]["logprob"]) for position, token in zip(positions, prompt_ids[1:], strict=True)
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise VLLMServerError(
            f"its response has no log-probabilities of the prompt, which verify its weights: {quote(response)}",
            NOT_VLLM,
        ) from error


def dtypes(model: torch.nn.Module, server_config: dict, mixed_precision: str = "no") -> tuple[str, str]:
    """
    Data types in which server and trainer compute; `"quantized"` for quantized weights. `server_config` is the `vllm_config` of
    `/server_info`.
    """
    served = server_config["model_config"]
    served = "quantized" if served.get("quantization") else str(served.get("dtype")).removeprefix("torch.")
    if getattr(model.config, "quantization_config", None):
        return served, "quantized"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return served, {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision, dtype)


def logprob_tolerance(*dtypes: str) -> float:
    """Largest difference that rounding explains, in nats per token: that of the coarsest of [`dtypes`]."""
    return max(ROUNDING.get(dtype, QUANTIZED) for dtype in dtypes)


def check_model(
    client: TimeoutVLLMClient,
    server_config: dict,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
) -> None:
    """
    Compare tokenizer and, where its configuration can be read here, sizes of the server's model with the trainer's. This comes
    before the first token id is sent, because one beyond its vocabulary ends vLLM.

    Raises:
        [`VLLMServerError`]: if sizes or tokens differ.
    """
    name = server_config["model_config"].get("model")
    different = _different_sizes(name, config)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    ours, theirs = tokenizer(TEXT, add_special_tokens=False)["input_ids"], _server_tokenize(client)
    # Tokenizers differ in whether a special token stands for characters that are not in the vocabulary.
    special = set(tokenizer.all_special_ids)
    ours = [token for token in ours if token not in special]
    theirs = theirs and [token for token in theirs if token not in special]
    if not different and theirs is not None and theirs != ours:
        different = [f"other tokens for {TEXT[:27]!r}, {quote(theirs[:8])}, not {quote(ours[:8])}"]
    if different:
        raise VLLMServerError(
            f"it serves another model ({name!r}) with {' and '.join(different)}",
            "Start it from the model that is trained, or correct vllm_server_base_url.",
        )


def _different_sizes(name: str | None, config: PretrainedConfig) -> list[str]:
    """Sizes of the server's model that differ, if its configuration can be read here."""
    try:
        served = AutoConfig.from_pretrained(name, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError, TypeError):  # it is on the server only, or of an unknown class
        return []
    sizes = [(size, getattr(served, size, None), getattr(config, size, None)) for size in SIZES]
    return [
        f"{size} {theirs}, not {ours}" for size, theirs, ours in sizes if None not in (theirs, ours) and theirs != ours
    ]


def _server_tokenize(client: TimeoutVLLMClient) -> list[int] | None:
    """Token ids of [`TEXT`] by the server's tokenizer; `None` if the server does not serve it."""
    request = {"model": client.model, "prompt": TEXT, "add_special_tokens": False}
    try:
        response = client._post(f"{client.base_url}/tokenize", json=request)
    except VLLMServerError as error:
        if error.status is None:
            raise
        return None
    tokens = response.get("tokens")
    if not isinstance(tokens, list):
        raise VLLMServerError(
            f"POST {client.base_url}/tokenize returned an invalid response: {quote(response)}", NOT_VLLM
        )
    return tokens
