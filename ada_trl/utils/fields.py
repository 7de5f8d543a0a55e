"""Fields of configurations."""

from dataclasses import field
from typing import Any


def optional_field(**metadata: Any) -> Any:
    """Field whose default is derived from other fields in `__post_init__`."""
    return field(default=None, metadata=metadata)
