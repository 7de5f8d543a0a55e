"""The requests of a batch of rows to a vLLM server: which rows share one, and their completions."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

from .transport import RequestGroup


ROLLOUTS_PER_REQUEST = 16

Row = tuple[list[int], list | None]  # prompt and images


class RequestedBatch(NamedTuple):
    """
    Rows whose completions were requested, and the results of the requests of [`split_rows`], in flight or completed.
    """

    rows: list[Row]
    futures: Sequence[Future]
    group: RequestGroup
    is_verified: bool = False  # whether all have arrived, from the weights that the server had at the request

    def results(self) -> tuple[list, list]:
        """Completion ids and log-probabilities, in the order of the rows."""
        completion_ids, logprobs = [], []
        for future in self.futures:
            ids, logps = future.result()
            completion_ids += ids
            logprobs += logps
        return completion_ids, logprobs

    def close(self) -> None:
        """Cancel the requests in flight."""
        self.group.cancel()


def to_rows(prompts: list[list[int]], images: list | None) -> list[Row]:
    return list(zip(prompts, images or [None] * len(prompts), strict=True))


def split_rows(rows: list[Row]) -> Iterator[tuple[list[list[int]], int, list | None]]:
    """
    Prompts, completions per prompt and images of each request for `rows`.

    Equal neighbors are completions of one prompt. Prompts with equal numbers of completions share a request, up to
    `ROLLOUTS_PER_REQUEST`, because sending and receiving a request costs as much as a few hundred tokens of its
    response.
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
