"""What a checkpoint holds beside the record of the prompts: the queue of prompts, the scale of rewards."""

import json
import os
from typing import Any

from ..utils.files import atomic_write


STATE_FILE = "ada_state.json"


def save_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write it, whole or not at all."""
    with atomic_write(os.path.join(checkpoint, STATE_FILE)) as temporary:
        temporary.write_text(json.dumps(state))


def load_state(checkpoint: str) -> dict[str, Any]:
    """
    What [`save_state`] wrote; nothing if that is missing.

    Raises:
        `ValueError`: if the file is there but corrupt, naming it and the remedy.
    """
    path = os.path.join(checkpoint, STATE_FILE)
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Restore it, or delete it to start anew.") from error
