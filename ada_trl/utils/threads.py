"""Number of threads of torch on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


# Threads of OpenMP spin while they wait for each other. A step on 64 rows, beside other processes on two cores, took
# with one and two threads 0.08 and 1.8 seconds for a model of 0.9 million parameters, and still 0.6 and 1.9 seconds
# for one of 5 million.
SMALL_MODEL = 2_000_000  # parameters; language models have more than 100 million and keep all threads


@contextmanager
def bounded_threads(model: nn.Module) -> Iterator[None]:
    """
    While the block runs, torch uses one thread if `model` is on the CPU and so small that a second one only waits.
    """
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL_MODEL
    given = torch.get_num_threads()
    if not is_small or next(model.parameters()).device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(given)
