"""What a vLLM server's answers must look like before anything of them is used."""

import json
import math
from collections.abc import Sequence
from typing import Any


try:
    import orjson  # several times as fast, and holds the interpreter's lock for as much less
except ImportError:
    orjson = None  # type: ignore[assignment]

ENDS = ("stop", "length", "repetition")  # vLLM's others, "abort" and "error", leave a completion unfinished
QUOTED_CHARACTERS = 300


class InvalidResponseError(Exception):
    """An answer with status 200 that is not one of vLLM's. The text says what is wrong with it."""


def quote(answer: Any) -> str:
    text = answer.strip() if isinstance(answer, str) else json.dumps(answer, default=str)
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}…"


def parse(content_type: str, body: bytes) -> dict:
    """
    The answer's JSON. Some endpoints answer with nothing, `{}` here, or with a sentence, `{"text": …}` here.

    Raises:
        [`InvalidResponseError`]: for a web page, or JSON that is no object.
        `json.JSONDecodeError`: for half an answer.
    """
    if content_type == "application/json":
        answer = _loads(body) if body else {}
        if not isinstance(answer, dict):
            raise InvalidResponseError(f"its answer is no JSON object: {quote(answer)}")
        return answer
    text = body.decode()
    if content_type == "text/html" or text.lstrip().startswith("<"):
        raise InvalidResponseError(f"its answer is a web page, which vLLM does not send: {quote(text)}")
    return {"text": text} if text else {}


def _loads(body: bytes) -> Any:
    if orjson is not None:
        try:
            return orjson.loads(body)
        except ValueError:
            pass  # what the standard library accepts too (NaN) is judged below, and its errors are the ones reported
    return json.loads(body)


def check_completions(request: dict, answer: dict, vocab_size: int | None) -> None:
    """
    Check an answer to a request for completions; what is asked for may not be missing and nothing else may be there.

    Args:
        request (`dict`):
            What was sent to `/v1/completions` or `/inference/v1/generate`.
        answer (`dict`):
            What came back.
        vocab_size (`int`, *optional*):
            Of the model. Token ids are below it.

    Raises:
        [`InvalidResponseError`]: for another number of completions or another prompt than was asked for; for a completion that is
            empty, too long, unfinished or holds tokens that do not exist; for log-probabilities that are missing, not
            finite, or of other tokens.
    """
    if answer.get("error"):
        raise InvalidResponseError(f"the server answered with an error: {quote(answer['error'])}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise InvalidResponseError(f"its answer was not understood, it has no choices: {quote(answer)}")
    sampling = request.get("sampling_params", request)
    prompts = request.get("prompt", [None])
    copies = sampling.get("n") or 1
    if len(choices) != copies * len(prompts):
        raise InvalidResponseError(
            f"asked for {copies * len(prompts)} completions, the server answered with {len(choices)}"
        )
    if "prompt" in request and not request.get("return_token_ids"):
        return
    for i, choice in enumerate(choices):
        _check_prompt(prompts[i // copies], choice)
        ids = _check_tokens(choice, sampling.get("max_tokens"), vocab_size)
        if sampling.get("logprobs") is not None:
            _check_logprobs(ids, choice.get("logprobs"))


def _check_prompt(asked: Sequence[int] | str | None, choice: dict) -> None:
    answered = choice.get("prompt_token_ids")
    if isinstance(asked, list) and answered != asked:
        raise InvalidResponseError(
            f"asked to complete the tokens {quote(asked)}, the server completed {quote(answered)}"
        )


def _check_tokens(choice: dict, max_tokens: int | None, vocab_size: int | None) -> list[int]:
    ids, end = choice.get("token_ids"), choice.get("finish_reason")
    # Millions of tokens per step pass here and below: built-in functions loop over them, not generators.
    if not isinstance(ids, list) or set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        raise InvalidResponseError(f"its answer was not understood, the tokens of a completion are {quote(ids)}")
    if end not in ENDS:
        raise InvalidResponseError(f"a completion of {len(ids)} tokens is not finished (finish_reason {end!r})")
    if not ids:
        raise InvalidResponseError("a completion is empty")
    if max_tokens is not None and len(ids) > max_tokens:
        raise InvalidResponseError(f"a completion has {len(ids)} tokens, at most {max_tokens} were asked for")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise InvalidResponseError(
            f"a completion holds token {max(ids)}, but the model's vocabulary has {vocab_size}: the server serves another "
            "model"
        )
    return ids


def _check_logprobs(ids: list[int], logprobs: Any) -> None:
    """In the layout of `/v1/completions`, or that of `/inference/v1/generate`."""
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
    """The log-probability of each sampled token, from a choice of either endpoint."""
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs["token_logprobs"]


def served_model(answer: dict) -> str:
    """The name of the base model in an answer of `/v1/models`."""
    try:
        name = answer["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise InvalidResponseError(f"it lists no model: {quote(answer)}")
    return name


def check_server_info(answer: dict) -> None:
    """Whether an answer of `/server_info` holds what is read of it."""
    try:
        config = answer["vllm_config"]
        model = config["model_config"]
        complete = isinstance(model["max_model_len"], int) and isinstance(model["logprobs_mode"], str)
        complete &= {"lora_config", "parallel_config", "weight_transfer_config"} <= config.keys()
    except (LookupError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise InvalidResponseError(f"it does not describe a vLLM server: {quote(answer)}")
