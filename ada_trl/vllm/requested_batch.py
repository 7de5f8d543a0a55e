"""A batch of rows that is sent to a vLLM server, as few requests as possible, and received in the order of the rows."""

from collections.abc import Iterator
from concurrent.futures import wait
from itertools import groupby
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .generation import AdaVLLMGeneration


ROLLOUTS_PER_REQUEST = 16


class RequestedBatch:
    """The requests of a batch of rows, in flight or completed."""

    def __init__(self, vllm: "AdaVLLMGeneration", prompts: list[list[int]], images: list | None):
        self._rows = _rows(prompts, images)
        self._group = vllm.vllm_client.transport.group()
        self._futures = [vllm.start_request(self._group, *request) for request in _requests(self._rows)]

    def has_rows(self, prompts: list[list[int]], images: list | None) -> bool:
        return self._rows == _rows(prompts, images)

    def wait(self) -> None:
        wait(self._futures)

    def results(self) -> tuple[list, list]:
        """Completion ids and log-probabilities, in the order of the rows."""
        completion_ids, logprobs = [], []
        for future in self._futures:
            ids, logps = future.result()
            completion_ids += ids
            logprobs += logps
        return completion_ids, logprobs

    def close(self) -> None:
        """Cancel the requests in flight."""
        self._group.cancel()


_Row = tuple[list[int], list | None]


def _rows(prompts: list[list[int]], images: list | None) -> list[_Row]:
    return list(zip(prompts, images or [None] * len(prompts), strict=True))


def _requests(rows: list[_Row]) -> Iterator[tuple[list[list[int]], int, list | None]]:
    """
    Prompts, completions per prompt and images of each request for `rows`.

    Equal neighbors are completions of one prompt. Prompts with equal numbers of completions share a request, up to
    `ROLLOUTS_PER_REQUEST`, because sending and receiving a request costs as much as a few hundred tokens of its response.
    """
    prompts: list[list[int]] = []
    number = 0
    for (ids, images), copies in groupby(rows):
        before, number = number, len(list(copies))
        is_full = number != before or (len(prompts) + 1) * number > ROLLOUTS_PER_REQUEST
        if prompts and (images or is_full):
            yield prompts, before, None
            prompts = []
        if images:  # the endpoint for images takes one prompt
            yield [ids], number, images
        else:
            prompts.append(ids)
    if prompts:
        yield prompts, number, None
