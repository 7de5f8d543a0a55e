"""A vLLM server's responses, validated before anything in them is used."""

import json
import math
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
    Content of a response: a JSON object. Some endpoints of vLLM return nothing (`{}` here) or plain text
    (`{"text": …}` here).

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


def read_completions(request: dict, response: dict) -> tuple[list[list[int]], list[list[float | None]]]:
    """
    Token ids and log-probabilities of the completions in a response to `/v1/completions` or `/inference/v1/generate`.

    Checks for errors that would otherwise be trained on: completions of other prompts, truncated or empty ones,
    log-probabilities that are missing or infinite. Everything else that can be wrong is an error where it is used.
    Log-probabilities may be `None`, vLLM's NaN, which TRL's importance sampling leaves out.

    Args:
        request (`dict`):
            Body of the request.

    Returns:
        `tuple`: two lists of `len(prompts) * n` lists, prompt by prompt.
    """
    prompts, n = request.get("prompt", [None]), request.get("sampling_params", request)["n"]
    choices = response["choices"]
    if len(choices) != n * len(prompts):
        raise InvalidResponseError(
            f"{n * len(prompts)} completions were requested, the server returned {len(choices)}"
        )
    completion_ids, logprobs = [], []
    for i, choice in enumerate(choices):
        prompt, ids, values = prompts[i // n], choice["token_ids"], sampled_logprobs(choice["logprobs"])
        if prompt is not None and choice["prompt_token_ids"] != prompt:
            raise InvalidResponseError(
                f"a completion of the tokens {quote(prompt)} was requested, the server completed "
                f"{quote(choice['prompt_token_ids'])}"
            )
        if choice["finish_reason"] not in FINISH_REASONS:
            raise InvalidResponseError(f"a completion is not finished (finish_reason {choice['finish_reason']!r})")
        # Millions of tokens per step pass here: built-in functions loop over them, not generators.
        known = values if None not in values else [value for value in values if value is not None]
        if not ids:
            raise InvalidResponseError("a completion has no tokens")
        if len(values) != len(ids) or not all(map(math.isfinite, known)):
            raise InvalidResponseError(
                f"a completion of {len(ids)} tokens has log-probabilities that are missing or not finite: "
                f"{quote(values)}"
            )
        completion_ids.append(ids)
        logprobs.append(values)
    return completion_ids, logprobs


def sampled_logprobs(logprobs: dict) -> list:
    """Log-probability of each sampled token, in the layout of either endpoint."""
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs["token_logprobs"]


def prompt_logprobs(prompt_ids: list[int], response: dict) -> list[float]:
    """Log-probability of each token of the only prompt but the first, from a response with `prompt_logprobs`."""
    positions = response["choices"][0]["prompt_logprobs"][1:]
    found = [position[str(token)]["logprob"] for position, token in zip(positions, prompt_ids[1:], strict=True)]
    return [math.nan if logprob is None else logprob for logprob in found]
