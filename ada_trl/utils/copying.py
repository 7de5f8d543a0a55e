"""Copying of dataset rows."""

import copy
from collections import deque
from typing import Any

import numpy as np
import torch


_IMMUTABLE = {int, float, bool, str, bytes, type(None)}


def copy_containers(value: Any) -> Any:
    """
    Copy what a reward function may modify in place: dicts, lists and tuples with their contents, sets, and arrays of
    fewer than three dimensions. Other objects are shared with the original.

    Images (arrays with more dimensions included), clients and locks need not be copied, and often cannot be.
    """
    if type(value) in _IMMUTABLE:  # first, because of the many token ids
        return value
    if isinstance(value, dict):
        copied = copy.copy(value)  # of the same class
        copied.update((key, copy_containers(item)) for key, item in value.items())
        return copied
    if type(value) is list:
        return [copy_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_containers(item) for item in value)
    if isinstance(value, set | deque | bytearray):
        return copy.copy(value)
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim < 3:
        return value.copy() if isinstance(value, np.ndarray) else value.clone()
    return value


class SharedLeaves(list):
    """List whose `copy.deepcopy` copies containers only, as [`copy_containers`] does."""

    def __deepcopy__(self, memo: dict) -> list:
        return [copy_containers(item) for item in self]
