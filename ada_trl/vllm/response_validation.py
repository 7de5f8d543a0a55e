"""Validation of a vLLM server's responses, before anything in them is used."""

import json
import math
from collections.abc import Sequence
from typing import Any


FINISH_REASONS = ("stop", "length", "repetition")  # vLLM's others, "abort" and "error", leave a completion unfinished
QUOTED_CHARACTERS = 300


class InvalidResponseError(Exception):
    """A response with status 200 that is not a valid response of vLLM to the request."""


def quote(content: Any) -> str:
    """The start of a response, for an error message."""
    text = content.strip() if isinstance(content, str) else json.dumps(content, default=str)
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}…"


def parse(content_type: str, body: bytes) -> dict:
    """
    Content of a response: a JSON object. Some endpoints of vLLM return nothing (`{}` here) or plain text (`{"text": …}` here).

    Raises:
        [`InvalidResponseError`]: for a web page, or JSON that is not an object.
        `json.JSONDecodeError`: for an incomplete response.
    """
    if content_type == "application/json":
        content = _loads(body) if body else {}
        if not isinstance(content, dict):
            raise InvalidResponseError(f"its response is not a JSON object: {quote(content)}")
        return content
    text = body.decode()
    if content_type == "text/html" or text.lstrip().startswith("<"):
        raise InvalidResponseError(f"its response is a web page, which vLLM does not send: {quote(text)}")
    return {"text": text} if text else {}


def _loads(body: bytes) -> Any:
    import orjson  # several times as fast, and holds the interpreter's lock for as much less

    try:
        return orjson.loads(body)
    except ValueError:
        # NaN is valid for the standard library, and then reported as a log-probability that is not finite.
        return json.loads(body)


def check_completions(request: dict, response: dict, vocab_size: int | None) -> None:
    """
    Validate the response to a request for completions.

    Args:
        request (`dict`):
            Body of the request to `/v1/completions` or `/inference/v1/generate`.

    Raises:
        [`InvalidResponseError`]: for another number of completions or another prompt than requested; for a completion that is
            empty, too long, unfinished or has unknown tokens; for log-probabilities that are missing, not finite, or of other
            tokens.
    """
    if response.get("error"):
        raise InvalidResponseError(f"the server returned an error: {quote(response['error'])}")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise InvalidResponseError(f"its response has no choices: {quote(response)}")
    if "prompt" in request and not request.get("return_token_ids"):
        return  # a request for text, which a user's code has sent
    sampling = request.get("sampling_params", request)
    prompts = request.get("prompt", [None])
    copies = sampling.get("n") or 1
    if len(choices) != copies * len(prompts):
        raise InvalidResponseError(
            f"{copies * len(prompts)} completions were requested, the server returned {len(choices)}"
        )
    for i, choice in enumerate(choices):
        _check_prompt(prompts[i // copies], choice)
        ids = _check_tokens(choice, sampling.get("max_tokens"), vocab_size)
        if sampling.get("logprobs") is not None:
            _check_logprobs(ids, choice.get("logprobs"))


def _check_prompt(requested: Sequence[int] | str | None, choice: dict) -> None:
    completed = choice.get("prompt_token_ids")
    if isinstance(requested, list) and completed != requested:
        raise InvalidResponseError(
            f"a completion of the tokens {quote(requested)} was requested, the server completed {quote(completed)}"
        )


def _check_tokens(choice: dict, max_tokens: int | None, vocab_size: int | None) -> list[int]:
    ids, end = choice.get("token_ids"), choice.get("finish_reason")
    # Millions of tokens per step pass here and below: built-in functions loop over them, not generators.
    if not isinstance(ids, list) or set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        raise InvalidResponseError(f"its response is invalid, the tokens of a completion are {quote(ids)}")
    if end not in FINISH_REASONS:
        raise InvalidResponseError(f"a completion of {len(ids)} tokens is not finished (finish_reason {end!r})")
    if not ids:
        raise InvalidResponseError("a completion is empty")
    if max_tokens is not None and len(ids) > max_tokens:
        raise InvalidResponseError(f"a completion has {len(ids)} tokens, at most {max_tokens} were requested")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise InvalidResponseError(
            f"a completion has token {max(ids)}, but the model's vocabulary has {vocab_size} tokens: the server serves "
            "another model"
        )
    return ids


def _check_logprobs(ids: list[int], logprobs: Any) -> None:
    """Validate `logprobs` in the layout of either endpoint, see [`sampled_logprobs`]."""
    try:
        tokens, values = _sampled_tokens(logprobs), sampled_logprobs(logprobs)
        lengths = {len(ids), len(tokens), len(values)}
    except (LookupError, TypeError):
        raise InvalidResponseError(f"the log-probabilities of a completion are {quote(logprobs)}") from None
    if len(lengths) > 1:
        raise InvalidResponseError(f"a completion of {len(ids)} tokens has {len(values)} log-probabilities")
    if set(map(type, values)) - {int, float} or not all(map(math.isfinite, values)):
        raise InvalidResponseError(f"log-probabilities of a completion are not finite: {quote(values)}")
    if tokens != [f"token_id:{token}" for token in ids]:
        raise InvalidResponseError(f"the log-probabilities of a completion are of other tokens: {quote(tokens)}")


def _sampled_tokens(logprobs: dict) -> list[str]:
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    return logprobs["tokens"]


def sampled_logprobs(logprobs: dict) -> list[float]:
    """Log-probability of each sampled token, from a choice of `/v1/completions` or `/inference/v1/generate`."""
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs["token_logprobs"]


def served_model(response: dict) -> str:
    """Name of the base model in a response of `/v1/models`."""
    try:
        name = response["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise InvalidResponseError(f"it lists no model: {quote(response)}")
    return name


def check_server_info(response: dict) -> None:
    """Check that a response of `/server_info` has the fields that are read."""
    try:
        config = response["vllm_config"]
        model = config["model_config"]
        complete = isinstance(model["max_model_len"], int) and isinstance(model["logprobs_mode"], str)
        complete &= {"lora_config", "parallel_config", "weight_transfer_config"} <= config.keys()
    except (LookupError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InvalidResponseError(f"it does not describe a vLLM server: {quote(response)}")
