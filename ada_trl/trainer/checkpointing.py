"""State of the prompt queue and of the baseline in a checkpoint, in addition to the table of pass rates."""

import json
import os
from typing import Any

from ..utils.files import atomic_write


STATE_FILE = "ada_state.json"


def save_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write the state atomically."""
    with atomic_write(os.path.join(checkpoint, STATE_FILE)) as temporary:
        temporary.write_text(json.dumps(state), encoding="utf-8")


def load_state(checkpoint: str) -> dict[str, Any]:
    """
    Return the state that [`save_state`] wrote, or an empty one if the file is missing.

    Raises:
        `ValueError`: If the file is not valid JSON.
    """
    path = os.path.join(checkpoint, STATE_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). Restore it, or delete it to start without this state."
        ) from error
