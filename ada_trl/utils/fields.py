"""Fields of configurations."""

from dataclasses import field
from typing import Any


def optional_field(**metadata: Any) -> Any:
    """A field that `__post_init__` sets from the others if it is not given."""
    return field(default=None, metadata=metadata)
