"""Copying of data set rows."""

from typing import Any


def copy_containers(value: Any) -> Any:
    """
    Copy dicts, lists and tuples; other objects are shared with the original.

    Reward functions and environments may modify the rows that they receive. Images, clients and locks in them need not be
    copied, and often cannot be.
    """
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_containers(item) for item in value)
    return value


class SharedLeaves(list):
    """List whose `copy.deepcopy` copies containers only, as [`copy_containers`] does."""

    def __deepcopy__(self, memo: dict) -> list:
        return [copy_containers(item) for item in self]
