"""Copies of data set rows."""

from typing import Any


def copy_containers(value: Any) -> Any:
    """
    A copy whose dicts, lists and tuples are new and whose other objects are shared.

    Reward functions and environments may modify the rows that they are given. Images, clients and locks in them need not, and
    often cannot, be copied.
    """
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_containers(item) for item in value)
    return value


class SharedLeaves(list):
    """A list of which `copy.deepcopy` copies the containers only, as [`copy_containers`] does."""

    def __deepcopy__(self, memo: dict) -> list:
        return [copy_containers(item) for item in self]
